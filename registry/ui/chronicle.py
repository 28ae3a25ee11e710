"""The commits of a run as they were read once; later looks read only the new ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.registry.errors import IntegrityError, UnsupportedFormat
from holdfast.registry.history.actions import Commit
from holdfast.registry.history.log import RunLog

#: Slots that are read at most; of a longer log the newest.
LONGEST = 2000


@dataclass(frozen=True, slots=True)
class Chronicle:
    """The commits of a run, oldest first.

    Attributes:
        commits: The commits.
        first_slot: The slot that reading began with; above 0 if the log is longer.
        next_slot: The slot after the last one that was read.
        errors: The errors of slots that could not be read; their commits are absent.
    """

    commits: tuple[Commit, ...] = ()
    first_slot: int = 0
    next_slot: int = 0
    errors: tuple[IntegrityError | UnsupportedFormat, ...] = ()


def read_on(log: RunLog, known: Chronicle | None, end: int) -> Chronicle:
    """Return a chronicle that has the slots up to `end`: one request for each new one.

    Args:
        log: The log of the run.
        known: What was read before.
        end: The number of slots that the log has.
    """
    if known is None:
        first = max(0, end - LONGEST)
        known = Chronicle(first_slot=first, next_slot=first)
    commits, errors, number = list(known.commits), list(known.errors), known.next_slot
    while number < end:
        try:
            for slot in log.fetch(range(number, end)):
                commits.extend(commit for _, commit in slot.commits)
                number += 1
        except (IntegrityError, UnsupportedFormat) as error:
            errors.append(error)
            number += 1  # the slots after a damaged one can be read all the same
    return replace(
        known, commits=tuple(commits), next_slot=max(end, known.next_slot), errors=tuple(errors)
    )
