"""The one loop that carries a change of a run through.

A `Committer` belongs to one handle of a run. It checks the log, lets the change write its objects,
and puts its lines into the next slot. It starts again if a sweep has condemned an object, or the
run has changed. `holdfast.registry.writing.change` defines a change, which writes its states with a
`holdfast.registry.writing.state_writer`. The rules for objects are in
`holdfast.registry.writing.object_writer`, those for slots in `holdfast.registry.history.log`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import TypeVar

from holdfast.registry.errors import Conflict, MissingObject
from holdfast.registry.history import Races
from holdfast.registry.history.actions import Line
from holdfast.registry.history.replay import NeedsHistory, RunManifest
from holdfast.registry.values import ProcessLock
from holdfast.registry.writing.change import Actions, Change, Composed, Stale
from holdfast.registry.writing.object_writer import ChosenKeys, Condemned
from holdfast.registry.writing.state_writer import StateWriter

#: What a sweep has condemned is written again this often; so is, after this time, what other
#: writers have overtaken.
_ATTEMPTS = 5
_PATIENCE_S = 60.0

_T = TypeVar("_T")


class Committer:
    """Commits changes of one run.

    Attributes:
        writer: Puts states on the store; changes hold it, too.
        store: The registry's objects.
        log: The run's log.
        await_earlier: Called before a commit: waits for saves that were acknowledged before it and
            are not in the log yet. Without a journal there are none.
    """

    def __init__(self, writer: StateWriter) -> None:
        self.writer = writer
        self.store, self.log = writer.store, writer.log
        self.await_earlier: Callable[[], None] = _nothing
        self._lock = ProcessLock()

    def commit(self, change: Change | Actions, *, waits: bool = True) -> RunManifest:
        """Carry a change through: its objects first, then its lines in one slot."""
        if waits:
            self.await_earlier()
        if not isinstance(change, Change):
            change = Composed(change)
        # A change that writes no objects need not wait for a running save.
        with self._lock.here() if change.writes else nullcontext():
            races, overtaken = Races(_PATIENCE_S), 0
            while overtaken < _ATTEMPTS:
                try:
                    run = self._attempt(change)
                except Stale:
                    overtaken += not races.lose()
                    continue
                if run is None:
                    overtaken += 1
                    continue
                for state in change.placed_states():
                    if run.is_placed(state.place):
                        self.writer.keep(state)
                return run
        raise Conflict(
            f"sweeps or other writers overtook this {change.noun} {_ATTEMPTS} times in a row",
            where=self.log.run_id,
            hint=f"{change.given_up}; try again, and let collectors run less often.",
        )

    def _attempt(self, change: Change) -> RunManifest | None:
        """Write the objects of a change and put its slot; return `None` to write them again.

        Races for the slot are not counted here: `RunLog.append` asks for the lines again.
        """
        if change.writes:
            self._recalling(lambda: change.check(self.log.run))
        read = self.log.run.next_slot
        look = self.log.look()  # while objects are sent
        try:
            chosen = self._recalling(change.write) if change.writes else ChosenKeys()
        except MissingObject:
            look.check.result()
            if not self._has_moved(change, read):
                raise
            return None
        try:
            return self.writer.objects.commit(partial(_lines, change), chosen, look)
        except Condemned:
            # There was a sweep since the keys were chosen; it may have condemned bases too.
            self.writer.forget_bases()
        return None

    def _recalling(self, act: Callable[[], _T]) -> _T:
        """Call a function that may need the records of evicted checkpoints."""
        for _ in range(_ATTEMPTS):
            with suppress(NeedsHistory):
                return act()
            # Once is enough, unless another thread refreshes the run and makes it compact again.
            self.log.recall()
        return act()

    def _has_moved(self, change: Change, read: int) -> bool:
        """Return whether the run, or the source of a change, has changed meanwhile."""
        is_different = change.read_again()
        run = self.log.refresh()
        if run.next_slot == read:
            return is_different
        # If a state was evicted and collected meanwhile, the error of the change says it better.
        with suppress(Stale):
            try:
                _lines(change, run)
            except NeedsHistory:
                _lines(change, self.log.history())
        return True


def _nothing() -> None:
    """Wait for nothing."""


def _lines(change: Change, run: RunManifest) -> Sequence[Line | bytes] | None:
    change.check(run)
    return change.lines(run)
