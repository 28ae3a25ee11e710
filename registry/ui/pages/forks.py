"""The known forks of a run, and those that are cheap to find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.registry.history import step_ref
from holdfast.registry.ui.source import Source

#: Seconds for which a list of runs may be used again to find forks.
MAX_AGE_S = 60
#: Maximum number of first commits that are read to find forks, unless the user asks for more.
UNASKED = 64


@dataclass(frozen=True, slots=True)
class Fork:
    """A run that was forked from another one."""

    run: str  # its name
    time_ms: int  # when it was created
    ref: str  # the checkpoint that it continues from, within the other run


def read_forks(source: Source, name: str, names: Sequence[str]) -> tuple[Fork, ...]:
    """Return the forks of a run, oldest first.

    The first commit of each run is read once. If more than `UNASKED` runs are unread, only forks
    among the others are found.
    """
    unread = source.unread_births(names)
    known = names if len(unread) <= UNASKED else sorted({*names} - {*unread})
    found = [
        Fork(child, birth.created_ms, step_ref(parent))
        for child, birth in source.births(known).items()
        if birth is not None and (parent := birth.parent) is not None and parent.run == name
    ]
    return tuple(sorted(found, key=lambda one: one.time_ms))
