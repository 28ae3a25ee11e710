"""The commits of a run, kept once read; later calls read only new or older commits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from holdfast.registry.errors import IntegrityError, UnsupportedFormat
from holdfast.registry.history import RunLog
from holdfast.registry.history.actions import Commit

#: Maximum number of slots to read unless a caller asks for more; the newest of a longer log.
LONGEST = 2000
#: Slots of the first part, and of each other: a page shows a part while older ones are read.
_FIRST, _MORE = 64, 512


@dataclass(frozen=True, slots=True)
class Chronicle:
    """The commits of a run, oldest first."""

    commits: tuple[Commit, ...] = ()
    first_slot: int = 0  # their first slot; above 0 if older slots were not read
    next_slot: int = 0  # the slot after the last one that was read
    #: The errors of slots that could not be read; their commits are absent.
    errors: tuple[IntegrityError | UnsupportedFormat, ...] = ()
    pending: int = 0  # number of older slots still being read


def read_on(log: RunLog, known: Chronicle | None, end: int, most: int) -> Iterator[Chronicle]:
    """Yield chronicles that grow: new slots first, then older ones; one request for each slot."""
    first = max(0, end - most)
    found = known or Chronicle(first_slot=max(first, end - _FIRST), next_slot=end - _FIRST)
    if found.next_slot < end:
        commits, errors = _read(log, max(found.next_slot, found.first_slot), end)
        found = replace(
            found,
            commits=(*found.commits, *commits),
            errors=(*found.errors, *errors),
            next_slot=end,
        )
    yield replace(found, pending=max(0, found.first_slot - first))
    while found.first_slot > first:
        start = max(first, found.first_slot - _MORE)
        commits, errors = _read(log, start, found.first_slot)
        found = replace(
            found,
            commits=(*commits, *found.commits),
            errors=(*errors, *found.errors),
            first_slot=start,
        )
        yield replace(found, pending=start - first)


def _read(
    log: RunLog, start: int, end: int
) -> tuple[list[Commit], list[IntegrityError | UnsupportedFormat]]:
    """Return the commits of slots, and the errors of those that are damaged."""
    commits: list[Commit] = []
    errors: list[IntegrityError | UnsupportedFormat] = []
    while start < end:
        try:
            for slot in log.fetch(range(start, end)):
                commits.extend(commit for _, commit in slot.commits)
                start += 1
        except (IntegrityError, UnsupportedFormat) as error:
            errors.append(error)
            start += 1  # slots after a damaged one can still be read
    return commits, errors
