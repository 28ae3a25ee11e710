"""Machines with a journal each, around one registry; their entries are carried by hand."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from holdfast.backends import Backend
from holdfast.backends.errors import StoreUnavailable
from holdfast.backends.local import disk
from holdfast.registry.face.factory import open_on
from holdfast.registry.face.registry import Registry
from holdfast.registry.saving.journal import background
from holdfast.registry.saving.journal import checkpoint as bound
from holdfast.registry.saving.journal.background import BackgroundCarrier
from holdfast.registry.saving.journal.carrier import Carrier
from holdfast.registry.saving.journal.folder import RunFolder
from holdfast.registry.saving.journal.settings import Journal
from tests.support.inline import without_threads

RUN = "run"


class Machine:
    """A machine: its journal, and the registry as it sees it.

    Args:
        backend: The store of the registry.
        path: The folder of the journal.
        max_bytes: Its bound.
    """

    def __init__(self, backend: Backend, path: Path, max_bytes: int = 2**30) -> None:
        self.backend = backend
        self.journal = Journal(path, max_bytes=max_bytes)

    def registry(self) -> Registry:
        """Open the registry in a new process, as it were."""
        return without_threads(open_on(self.backend, journal=self.journal))

    def run(self, **given: Any) -> Any:
        """Open the run in a new process."""
        return self.registry().run(RUN, create=True, seed=7, **given)

    @cached_property
    def folder(self) -> RunFolder:
        """The journal of the run."""
        return RunFolder(self.journal, self.registry().id, RUN)

    def carrier(self, told: Any = lambda number, note: None) -> Carrier:
        """Return a carrier of a new process."""
        return Carrier(self.registry().handle.store, self.folder, told)

    def carry(self) -> bool:
        """Carry everything that waits."""
        return self.carrier().carry()

    def outcomes(self) -> dict[int, str]:
        """Return the outcomes that are kept."""
        notes = {number: self.folder.note(number) for number in self.folder.noted()}
        return {number: note.outcome for number, note in notes.items() if note is not None}


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be carried in the background, and no test wait for a disk or for a carrier."""
    monkeypatch.setattr(BackgroundCarrier, "wake", lambda self: None)
    for module in (background, bound):
        monkeypatch.setattr(module, "LOOK_S", 0.001)
    monkeypatch.setattr(disk, "sync", lambda fd: None)


def actions_of(backend: Backend, kind: str) -> list[Any]:
    """Return every action of a kind in the log of the run, in order."""
    with without_threads(open_on(backend)) as registry:
        commits = list(registry.run(RUN).history.commits())
    return [one for commit in commits for one in commit.actions if one.action == kind]


def added(backend: Backend) -> list[tuple[int, str]]:
    """Return step and id of every checkpoint that was ever added, in the order of the log."""
    return [(one.step, one.manifest.hex()) for one in actions_of(backend, "checkpoint.add")]


class Outage:
    """A registry that is out of reach while `is_down`."""

    def __init__(self) -> None:
        self.is_down = False

    def __call__(self, method: str, key: str) -> None:
        if self.is_down:
            raise StoreUnavailable("out of reach", where=key)


__all__ = ["RUN", "Machine", "Outage", "actions_of", "added", "by_hand"]
