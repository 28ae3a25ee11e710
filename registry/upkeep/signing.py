"""Sign the heads of runs, each after its log was read whole (docs/spec.md, section 48)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.registry.errors import IntegrityError, NotFound
from holdfast.registry.history import Epochs, SigningKey, list_runs, sign_commit
from holdfast.registry.store import Store
from holdfast.registry.upkeep.head_check import HeadCheck
from holdfast.registry.upkeep.histories import Asked, read_history
from holdfast.registry.values import near


@dataclass(frozen=True, slots=True)
class SignedRun:
    """A run whose head was signed."""

    run_id: str
    commits: int  # the commits that the signature covers
    is_new: bool  # whether it was not there before


def sign_runs(store: Store, key: str, runs: Iterable[str] | None) -> list[SignedRun]:
    """Sign the heads of runs; see `Registry.sign`."""
    signing = SigningKey.load(key)
    known = list_runs(store)
    chosen = known if runs is None else list(dict.fromkeys(runs))
    for name in chosen:
        if name not in known:
            url = store.backend.url
            raise NotFound("no such run", where=f"{url}: {name}", hint=near(name, known))
    Epochs.of(store).observe()  # nobody signs in a frozen registry
    store.prepare_writing()
    heads, done = HeadCheck(store), list[SignedRun]()
    for name in chosen:
        # From the first slot on: a snapshot may be of another history.
        history = read_history(store, Asked(name, commits=heads.commits_of(name)))
        faults = [*history.findings, *heads.check(history)]
        errors = [one for one in faults if one.severity == "error"]
        if errors:
            raise IntegrityError(
                "a run that is damaged is not signed",
                where=name,
                found=errors[0].message,
                hint=f"{errors[0].advice} Signed before it: "
                f"{', '.join(one.run_id for one in done) or 'none'}.",
            )
        if history.head is not None:
            commits, digest = history.commits, history.head.head
            is_new = sign_commit(store, signing, name, commits - 1, digest)
            done.append(SignedRun(name, commits, is_new))
    return done
