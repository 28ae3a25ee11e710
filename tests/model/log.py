"""Logs of runs: slots, their replay, and the keys that a collector can find unneeded.

A log is append-only. All that a reader can learn from it is its replay at the head, and all that a
collector can learn are the replays from the slot of its mark on. Logs that no reader can
distinguish are one `Log` here, which keeps the number of states small.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

#: A manifest is live while a checkpoint or a pin names it.
CHECKPOINT, PIN = 0, 1


def name_bit(manifest: int, name: int) -> int:
    """Return the bit of one name of one manifest."""
    return 1 << (2 * manifest + name)


class Slot(NamedTuple):
    """Lines that become visible together.

    Attributes:
        mark: Epoch of a `mark` line; 0 without one.
        places: `place` lines: manifests, each with the set of keys that it needs from here on.
        names: The names that a commit adds, as bits.
        evicts: The names that a later commit in the slot evicts, as bits.
        drops: Whether a commit drops the run, or the operator's line ends its log.
        garbage: Whether there is a file in the run's folder that stops collectors, who list all of
            it, and not writers, who read the next slot; `None`: as before. It stands here although
            it is no line, and so does the next one.
        forgets: Whether an epoch says from here on that the run is forgotten.
        hides: Whether a commit drops the run so that it can be taken back.
        ages: Whether the store's clock passes the delay of that drop; no line either.
        frees: Whether a line frees the hidden run.
        shows: Whether a commit takes the drop back.
    """

    mark: int = 0
    places: tuple[tuple[int, int], ...] = ()
    names: int = 0
    evicts: int = 0
    drops: bool = False
    garbage: bool | None = None
    forgets: bool = False
    hides: bool = False
    ages: bool = False
    frees: bool = False
    shows: bool = False


#: A run that is not dropped, one that is hidden, one whose delay has passed, one that is freed.
SHOWN, HIDDEN, DUE, FREED = range(4)


class Log:
    """A log as its readers see it. Each exists once, so identity is equality.

    Attributes:
        number: Its number among all logs.
        says: Everything by which logs differ; the next five are its parts.
        names: The present names, as bits.
        places: For each manifest its keys: the last `place` line counts, live or not.
        mark: The highest mark.
        unneeded: For each epoch: keys that no live manifest needed at the slot of its mark, or at
            a later slot. A collector of that epoch may have read the log at any of them.
        dropped: Whether no commit may follow.
        garbage: As in `Slot`.
        forgotten: Whether an epoch says that the run is forgotten.
        stage: How far a drop that can be taken back has come.
        early: Whether the run was ever freed before its delay had passed.
        held: The manifests that are live.
        keys: Every key that the current place of a live manifest needs.
        placed: Every key that any current place needs.
        unplaced: Whether a live manifest has no place.
    """

    __slots__ = (
        "dropped",
        "early",
        "forgotten",
        "garbage",
        "held",
        "keys",
        "mark",
        "names",
        "number",
        "placed",
        "places",
        "says",
        "stage",
        "unneeded",
        "unplaced",
    )

    def __init__(self, number: int, says: Says) -> None:
        self.number = number
        self.says = says
        self.names, self.places, self.mark, self.unneeded, self.dropped = says[:5]
        self.garbage, self.forgotten, self.stage, self.early = says[5:]
        self.held = held(0 if self.stage == FREED else self.names, len(self.places))
        self.keys = union(self.places[manifest] for manifest in self.held)
        self.placed = union(self.places)
        self.unplaced = any(not self.places[manifest] for manifest in self.held)


class Says(NamedTuple):
    """Everything by which logs differ; the fields are those of `Log`."""

    names: int
    places: tuple[int, ...]
    mark: int
    unneeded: tuple[int, ...]
    dropped: bool
    garbage: bool = False
    forgotten: bool = False
    stage: int = SHOWN
    early: bool = False


class Logs:
    """Every log of a search.

    Args:
        manifests: How many there are.
        epochs: How many there can be.

    Attributes:
        created: The log of slot 0 alone, which references nothing.
    """

    def __init__(self, manifests: int, epochs: int) -> None:
        self._known: dict[Says, Log] = {}
        self._appended: dict[tuple[Log, Slot], Log] = {}
        self.created = self._log(Says(0, (0,) * manifests, 0, (0,) * epochs, False))

    def append(self, log: Log, slot: Slot) -> Log:
        """Return the log with one more slot."""
        longer = self._appended.get((log, slot))
        if longer is None:
            longer = self._appended[log, slot] = self._log(_replay(log, slot))
        return longer

    def _log(self, says: Says) -> Log:
        log = self._known.get(says)
        if log is None:
            log = self._known[says] = Log(len(self._known), says)
        return log


def _replay(log: Log, slot: Slot) -> Says:
    names = 0 if slot.drops else (log.names | slot.names) & ~slot.evicts
    places = list(log.places)
    for manifest, keys in slot.places:
        places[manifest] = keys
    mark = max(log.mark, slot.mark)
    stage = _stage(log.stage, slot)
    holds = held(0 if stage == FREED else names, len(places))
    needed = union(places[manifest] for manifest in holds)
    unneeded = tuple(
        was | ~needed if epoch <= mark else was for epoch, was in enumerate(log.unneeded, start=1)
    )
    garbage = log.garbage if slot.garbage is None else slot.garbage
    dropped, forgotten = log.dropped or slot.drops, log.forgotten or slot.forgets
    early = log.early or (slot.frees and log.stage == HIDDEN)
    return Says(names, tuple(places), mark, unneeded, dropped, garbage, forgotten, stage, early)


def _stage(stage: int, slot: Slot) -> int:
    if slot.hides or slot.shows:
        return HIDDEN if slot.hides else SHOWN
    if slot.frees:
        return FREED
    return DUE if slot.ages and stage == HIDDEN else stage


def held(names: int, manifests: int) -> frozenset[int]:
    """Return the live manifests for some names."""
    return frozenset(m for m in range(manifests) if names & (name_bit(m, 0) | name_bit(m, 1)))


def union(sets: Iterable[int]) -> int:
    """Return the keys of several sets."""
    keys = 0
    for one in sets:
        keys |= one
    return keys
