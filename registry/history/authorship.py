"""Who writes a commit, and the line of a commit that continues a history."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.registry.history.actions import Action, Commit
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.values import author


class Authorship(NamedTuple):
    """Who writes a commit, and when."""

    write: str  # random id of the write
    author: str  # `user@host`
    time_ms: int  # milliseconds since the epoch by the author's clock


def new_authorship() -> Authorship:
    """Return the authorship of a commit that this process makes now."""
    return Authorship(secrets.token_hex(8), author(), int(time.time() * 1000))


def commit_line(
    run: RunManifest, actions: Sequence[Action], authorship: Authorship | None = None
) -> Commit:
    """Return the commit that continues a history with these actions."""
    authorship = authorship or new_authorship()
    return Commit(
        n=run.commits,
        run=run.run_id,
        prev=run.head,
        write=authorship.write,
        author=authorship.author,
        time_ms=authorship.time_ms,
        actions=tuple(actions),
    )
