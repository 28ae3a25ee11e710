"""Small registries to damage, and what must be true of them afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import pytest

from holdfast.backends import Backend
from holdfast.registry.errors import IntegrityError, RegistryError, UnsupportedFormat
from holdfast.registry.face.factory import open_on
from holdfast.registry.history.epochs import encode_sweep
from holdfast.registry.objects.keys import CONFIG, EPOCHS, RUNS, epoch_key
from holdfast.registry.upkeep.verifying import VerifyReport
from tests.support.inline import without_threads
from tests.support.sameness import assert_same
from tests.support.states import make_state
from tests.support.stores import Scratch, contents, new_backend, opened

KINDS = ("config", "epoch", "slot", "snapshot", "manifest", "placement", "pack")


@dataclass(frozen=True)
class Specimen:
    """A whole registry.

    Attributes:
        store: Its files; never changed, only copied.
        held: Steps of each run; step `n` was added by commit `n`.
    """

    store: Scratch
    held: dict[str, tuple[int, ...]]

    def files(self, kind: str) -> dict[str, bytes]:
        """Return its files of a kind."""
        return {key: data for key, data in contents(self.store).items() if kind_of(key) == kind}


@cache
def small() -> Specimen:
    """Return a registry with one of everything."""
    return _grown({"night": (1, 2)})


@cache
def twins() -> Specimen:
    """Return a registry whose two runs share most of what they hold."""
    return _grown({"day": (1, 2), "night": (1, 2, 3)})


def _grown(held: dict[str, tuple[int, ...]]) -> Specimen:
    store = new_backend()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.registry.history.creating.describe_environment", dict)
        patch.setattr("holdfast.registry.history.log.SNAPSHOT_EVERY", 3)
        with opened(store) as registry:
            for name, steps in held.items():
                run = registry.create_run(name, seed=1)
                for number in (1, 2):
                    store.put_if_absent(epoch_key(number), encode_sweep(number, []))
                for step in steps:
                    run.save(make_state(step), step=step)
                run.pins.tags.set("keeper", run.latest())
    specimen = Specimen(store, held)
    assert all(specimen.files(kind) for kind in KINDS)
    return specimen


def kind_of(key: str) -> str:
    """Return what kind of file a key names."""
    if key.startswith(RUNS):
        return "snapshot" if "/snapshots/" in key else "slot"
    if key == CONFIG:
        return "config"
    return "epoch" if key.startswith(EPOCHS) else key.split("/")[0].removesuffix("s")


@dataclass
class Damage:
    """Damages the specimen, looks at what comes of it, and mends it.

    Attributes:
        specimen: The registry.
        cases: Damaged registries looked at.
        refused: Loads that failed with a typed error that names the file.
        exact: Loads that gave exactly the right bits.
    """

    specimen: Specimen
    cases: int = 0
    refused: int = 0
    exact: int = 0
    _store: Scratch = field(init=False)
    _whole: dict[str, bytes] = field(init=False)

    def __post_init__(self) -> None:
        self._store = self.specimen.store.copy()
        self._whole = contents(self._store)

    def __str__(self) -> str:
        return f"{self.cases} cases: {self.refused} loads refused, {self.exact} exact"

    def examine(self, changes: dict[str, bytes | None]) -> None:
        """Put changed files in place (or take them away), and check that nobody is deceived."""
        for key, data in changes.items():
            assert data != self._whole[key]
            if data is None:
                self._store.delete(key)
            else:
                self._store.put(key, data)
        self.cases += 1
        names = [name for key in changes for name in _names(key)]
        for run, steps in self.specimen.held.items():
            for step in steps:
                self._load(run, step, names)
        cached_only = all(kind_of(key) == "snapshot" for key in changes)
        _check_verify(self._store, names, cached_only=cached_only)
        for key in changes:
            self._store.put(key, self._whole[key])

    def _load(self, run: str, step: int, names: list[str]) -> None:
        """Load a checkpoint; a new handle, so that no cache hides the bytes on the store."""
        said = ""
        try:
            with without_threads(open_on(self._store)) as registry:
                loaded = registry.run(run).history.checkpoint(step).load()
        except (IntegrityError, UnsupportedFormat) as error:
            said = str(error)
        else:
            assert_same(loaded, make_state(step))
            self.exact += 1
        if said:
            assert any(name in said for name in names), said
            self.refused += 1


def _names(key: str) -> list[str]:
    """Return what a message may call a file: its key, or for a slot of a log its run and number."""
    if kind_of(key) != "slot":
        return [key]
    _, run, _, number = key.split("/")
    return [key, f"{run}: slot {int(number)}"]


def _check_verify(store: Backend, names: list[str], *, cached_only: bool) -> None:
    """Check that a deep verification names the file, and how bad it says that it is."""
    report = _verify(store)
    if report is None:
        return
    named = [
        finding
        for finding in report.findings
        if any(name in finding.where or name in finding.message for name in names)
    ]
    assert named, (names, report.findings)
    assert report.ok is cached_only, report.findings


def _verify(store: Backend) -> VerifyReport | None:
    try:
        registry = open_on(store)
    except RegistryError:
        return (
            None  # without its configuration a registry cannot be opened: that was reported already
        )
    with without_threads(registry):
        return registry.verify(deep=True)
