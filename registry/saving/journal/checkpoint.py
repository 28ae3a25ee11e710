"""A checkpoint of a journaled save; perhaps only this machine has it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeVar

from holdfast.registry.errors import (
    Hint,
    IntegrityError,
    MissingObject,
    OnlyLocal,
    StorageError,
    StoreFull,
)
from holdfast.registry.history import RunLog
from holdfast.registry.history.actions import Place
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.loading import Checkpoint, CheckpointHandle, LoadPrecision, LoadReport
from holdfast.registry.objects import Manifest
from holdfast.registry.saving.journal.background import LOOK_S, REMINDER_S, BackgroundCarrier
from holdfast.registry.saving.journal.folder import RunFolder
from holdfast.registry.saving.journal.records import Entry
from holdfast.registry.saving.journal.settings import BYTES_VARIABLE
from holdfast.registry.saving.journal.states import EntryStates
from holdfast.registry.saving.save_request import PlannedSave
from holdfast.registry.values import Digest

_LOGGER = logging.getLogger("holdfast")
_T = TypeVar("_T")


class JournaledCheckpoint(Checkpoint):
    """A checkpoint that a journal has acknowledged.

    `n` is its number in the expected run, which its handle refuses to give. `find` returns the
    checkpoint in the registry, or `None` while it is not there.
    """

    def __init__(
        self,
        states: EntryStates,
        number: int,
        entry: Entry,
        expected: RunManifest,
        n: int,
        find: Callable[[int, Entry], Checkpoint | None],
    ) -> None:
        log = _EntryLog(states, entry, expected)
        super().__init__(states.store, log, expected.by_n[n])
        self._handle = _LocalHandle(states.store, log, expected.by_n[n])
        self._find: Callable[[int, Entry], Checkpoint | None] | None = find
        self._number, self._entry, self._states = number, entry, states

    @property
    def number(self) -> int:
        """The number of its entry."""
        return self._number

    @property
    def entry(self) -> Entry:
        """Its entry."""
        return self._entry

    @property
    def durable_in(self) -> Literal["journal", "registry"]:
        """The place where it is durable: the `journal` of this machine, or the `registry`."""
        self._look()
        return "registry" if self._find is None else "journal"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        mine, theirs = self.durable_in, other.durable_in
        if mine == theirs == "journal":  # their numbers are provisional
            return (self.run_id, self.digest) == (other.run_id, other.digest)
        return mine == theirs and super().__eq__(other)

    __hash__ = Checkpoint.__hash__

    @property
    def handle(self) -> CheckpointHandle:
        """Its inner value: that of the checkpoint in the registry, once it is there."""
        self._look()
        return self._handle

    def _look(self) -> None:
        """Switch to the registry's checkpoint, once the registry has it."""
        found = None if self._find is None else self._find(self._number, self._entry)
        if found is not None:
            self._find = None
            self._handle = found.handle

    @property
    def manifest(self) -> Manifest:
        """Its manifest, from this machine or from the registry."""
        return self._anywhere(lambda: super(JournaledCheckpoint, self).manifest)

    def load(
        self,
        *,
        only: str | Iterable[str] | None = None,
        map_location: object = "cpu",
        precision: LoadPrecision | None = None,
        version: int | str | None = None,
    ) -> Any:
        """Return the state, from this machine or from the registry; see `Checkpoint.load`."""
        if only is not None and not isinstance(only, str):
            only = list(only)  # it may be read twice
        load = partial(super().load, only=only, map_location=map_location)
        return self._anywhere(partial(load, precision=precision, version=version))

    def load_into(
        self, target: object, *, component: str | None = None, strict: bool = True
    ) -> LoadReport:
        """Fill tensors in place; see `Checkpoint.load_into`."""
        load = super().load_into
        return self._anywhere(partial(load, target, component=component, strict=strict))

    def _anywhere(self, load: Callable[[], _T]) -> _T:
        try:
            return load()
        except IntegrityError as error:
            # The carrier deletes the bytes here once they are in the registry.
            is_moved = isinstance(error, MissingObject) and self._find is not None
            if (is_moved and self.durable_in == "registry") or self._is_mended():
                return load()
            raise

    def _is_mended(self) -> bool:
        """Return whether the registry replaced the objects that are damaged here."""
        with suppress(IntegrityError, StorageError):
            if self._find is not None and self._states.check_whole(self._entry.places):
                held = self._handle  # the reader of the new one has read nothing
                self._handle = type(held)(held.store, held.log, held.record)
                return True
        return False


def carried_here(states: EntryStates, entry: Entry, run: RunManifest, n: int) -> Checkpoint:
    """Return a checkpoint of the registry that is read from the states that are still here."""
    return Checkpoint(states.store, _EntryLog(states, entry, run), run.by_n[n])


class _LocalHandle(CheckpointHandle):
    """The inner value of a checkpoint that only this machine has: its number is provisional."""

    @property
    def n(self) -> int:
        """Refuse: reports and pins would name a commit that is not in the registry."""
        raise OnlyLocal(
            "this checkpoint is durable on this machine, but not in the registry yet",
            where=self.ref,
            hint=Hint.of(
                Hint("Call `run.wait(remote=True)` first:", "Call `holdfast journal push` first:"),
                "reports, pins and promotions need the commit in the registry.",
            ),
        )


class _EntryLog(RunLog):
    """A stand-in for the log of a run, with the expected run and the places of one entry."""

    def __init__(self, states: EntryStates, entry: Entry, expected: RunManifest) -> None:
        super().__init__(states.store, expected.run_id)
        self._places: Mapping[Digest, Place] = {place.manifest: place for place in entry.places}
        self.run = expected

    def place_of(self, manifest: Digest) -> Place | None:
        """Return the place of a state of the entry."""
        return self._places.get(manifest)

    def refresh(self) -> RunManifest:
        """Return the expected run: there is nothing to read."""
        return self.run

    def history(self) -> RunManifest:
        """Return the expected run."""
        return self.run


def await_room(
    folder: RunFolder, carrier: BackgroundCarrier, save: PlannedSave, check: Callable[[], None]
) -> float:
    """Wait until a save has room in the journal beside the waiting ones; return the seconds."""
    needed = sum(one.nbytes for one in [save.state, *save.companions.values()])
    most = folder.journal.max_bytes
    if needed > most:
        raise StoreFull(
            "the state is larger than the bound of the journal",
            where=folder.path,
            expected=f"at most {most} bytes",
            found=f"{needed} bytes",
            hint=f"Set {BYTES_VARIABLE}, or save without a journal.",
        )
    began = said = time.monotonic()
    while (held := folder.waiting_bytes()) + needed > most:
        check()
        if began == said or time.monotonic() > said + REMINDER_S:
            said = time.monotonic()
            _LOGGER.warning(
                "%s: the save waits: %d bytes are only in the journal %s, of at most %d (%s); %s",
                folder.run_id,
                held,
                folder.path,
                most,
                BYTES_VARIABLE,
                carrier.why(),
            )
        carrier.sleep(LOOK_S)
        carrier.raise_hopeless()
    return 0.0 if said == began else time.monotonic() - began
