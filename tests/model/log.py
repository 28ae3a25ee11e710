"""Logs of runs: slots, what a replay says, and what a collector can find in one.

A log is append-only, so all that anybody can still learn from it is what stands at its head and,
for a collector, what stood at the slot of its mark and since. Logs that nobody can tell apart are
one `Log` here, however they came about: that keeps the number of states small.
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
        names: What a commit names, as bits.
        let_go: What a commit after it evicts, as bits.
        drops: Whether a commit drops the run.
    """

    mark: int = 0
    places: tuple[tuple[int, int], ...] = ()
    names: int = 0
    let_go: int = 0
    drops: bool = False


class Log:
    """What a log says to whoever reads it. Each exists once, so identity is equality.

    Attributes:
        number: Tells it from others.
        says: All that tells logs apart; the next five are its parts.
        names: What is named, as bits.
        places: For each manifest its keys: the last `place` line wins, whether it is live or not.
        mark: The highest mark.
        gone: For each epoch: keys that no live manifest needed at the slot of its mark, or at some
            slot since. A collector of that epoch may have read the log at any of them.
        dropped: Whether no commit may follow.
        held: The manifests that are live.
        keys: Every key that the current place of a live manifest needs.
        placed: Every key that any current place needs.
        unplaced: Whether a live manifest has no place.
    """

    __slots__ = (
        "dropped",
        "gone",
        "held",
        "keys",
        "mark",
        "names",
        "number",
        "placed",
        "places",
        "says",
        "unplaced",
    )

    def __init__(self, number: int, says: Says) -> None:
        self.number = number
        self.says = says
        self.names, self.places, self.mark, self.gone, self.dropped = says
        self.held = held(self.names, len(self.places))
        self.keys = union(self.places[manifest] for manifest in self.held)
        self.placed = union(self.places)
        self.unplaced = any(not self.places[manifest] for manifest in self.held)


class Says(NamedTuple):
    """Everything by which logs differ; the fields are those of `Log`."""

    names: int
    places: tuple[int, ...]
    mark: int
    gone: tuple[int, ...]
    dropped: bool


class Logs:
    """Every log that a search has come across.

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
    names = 0 if slot.drops else (log.names | slot.names) & ~slot.let_go
    places = list(log.places)
    for manifest, keys in slot.places:
        places[manifest] = keys
    mark = max(log.mark, slot.mark)
    needed = union(places[manifest] for manifest in held(names, len(places)))
    gone = tuple(
        was | ~needed if epoch <= mark else was for epoch, was in enumerate(log.gone, start=1)
    )
    return Says(names, tuple(places), mark, gone, log.dropped or slot.drops)


def held(names: int, manifests: int) -> frozenset[int]:
    """Return the manifests that are live, given what is named."""
    return frozenset(m for m in range(manifests) if names & (name_bit(m, 0) | name_bit(m, 1)))


def union(sets: Iterable[int]) -> int:
    """Return the keys of several sets."""
    keys = 0
    for one in sets:
        keys |= one
    return keys
