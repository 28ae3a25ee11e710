"""A program with a journal dies: at each step of a save, and of carrying; and the power goes.

Whatever was acknowledged ends in exactly one `checkpoint.add`; nothing else is ever visible.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.backends.local.backend import LocalBackend
from holdfast.backends.wrappers import Fault, Faulty, InjectedCrash
from holdfast.registry.errors import RegistryError
from holdfast.registry.saving.journal.states import EntryStates
from holdfast.registry.store.store import create_config
from tests.crash.disk import Disk
from tests.registry.saving.journal.machines import RUN, Machine, added, by_hand
from tests.support.faults import Hooked
from tests.support.sameness import assert_same
from tests.support.states import make_state
from tests.support.stores import Scratch, new_backend, opened

__all__ = ["by_hand"]


def _check(machine: Machine, acknowledged: list[int], possible: list[int]) -> None:
    """Carry everything in a new process; check what is in the run."""
    with opened(machine.backend) as registry:
        if RUN not in registry.run_names():  # not even that was acknowledged
            assert acknowledged == []
            return
    machine.carry()
    steps = [step for step, _ in added(machine.backend)]
    assert steps in (acknowledged, [*acknowledged, *possible])
    with opened(machine.backend) as registry:
        assert registry.verify(deep=True).findings == ()
        for one in registry.run(RUN).checkpoints():
            assert_same(one.load(), make_state(one.step))


def _saves_and_dies(machine: Machine, steps: list[int]) -> list[int]:
    """Save in a process that may die; return the steps that were acknowledged."""
    acknowledged = []
    try:
        run = machine.run()
        run.restore()
        for step in steps:
            run.save(make_state(step), step=step)
            acknowledged.append(step)
    except (InjectedCrash, RegistryError):
        pass
    return acknowledged


@pytest.mark.sometimes("states of an unfinished save are deleted")
@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.soak)])
def test_death_at_each_event_of_a_save(
    every: int, tmp_path: Path, by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is made or a folder that is synced: the process dies before it."""
    died = 0
    for at in itertools.count(1, every):
        bucket, place = new_backend(), tmp_path / str(at)
        machine = Machine(bucket, place / "journal")
        place.mkdir()
        with monkeypatch.context() as patch:
            disk = Disk(place, patch)
            disk.dies_at = at
            acknowledged = _saves_and_dies(machine, [1, 2])
            is_over = disk.events < at
        (unsure,) = [acknowledged[-1] + 1 if acknowledged else 1]
        _check(machine, acknowledged, [unsure])
        assert _saves_and_dies(machine, [5]) == [5]
        _check(machine, [step for step, _ in added(bucket)], [5])
        if is_over:
            break
        died += 1
    assert died > 80 // every


@pytest.mark.sometimes(
    "an entry was carried by a process that died",
    "an entry is in the log when its slot is composed",
)
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_death_at_each_call_of_carrying(
    after: bool, every: int, tmp_path: Path, by_hand: None
) -> None:
    """A carrier dies at a request to the registry, or right after its effect; another goes on."""
    for at in itertools.count(1, every):
        bucket = new_backend()
        machine = Machine(bucket, tmp_path / f"{at}-{after}")
        assert _saves_and_dies(machine, [1, 2, 3]) == [1, 2, 3]
        machine.backend = Faulty(bucket, [Fault(at, after=after)], count_reads=True)
        try:
            machine.carry()
        except InjectedCrash:
            ended = False
        else:
            ended = True
        machine.backend = bucket
        assert [step for step, _ in added(bucket)] in ([], [1], [1, 2], [1, 2, 3])
        _check(machine, [1, 2, 3], [])
        if ended:
            break
    assert at > 40


@pytest.mark.sometimes("a journal is stranded", "another writer has the slot")
@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.soak)])
def test_a_takeover_at_each_moment_of_carrying(every: int, tmp_path: Path, by_hand: None) -> None:
    """Another machine takes over at a request of the carrier: no entry enters behind it."""
    for at in itertools.count(1, every):
        bucket = Hooked(new_backend())
        here = Machine(bucket, tmp_path / f"here-{at}")
        there = Machine(bucket, tmp_path / f"there-{at}")
        assert _saves_and_dies(here, [1, 2, 3]) == [1, 2, 3]
        calls = 0

        def count(method: str, key: str, at: int = at, there: Machine = there) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                run = there.run()
                run.restore()
                run.save(make_state(9), step=9)

        bucket.before = count
        here.carry()
        bucket.before = lambda method, key: None
        there.carry()
        steps = [step for step, _ in added(bucket)]
        entered = [step for step in steps if step != 9]
        assert entered == [1, 2, 3][: len(entered)]
        assert here.folder.waiting() == []
        behind = 0
        with opened(bucket) as registry:
            for commit in registry.run(RUN).history.commits():
                kinds = [one.action for one in commit.actions]
                if "run.take_over" in kinds:
                    behind = 0
                behind += kinds.count("checkpoint.add")
        if calls >= at:  # the other machine came: what was not there yet is stranded
            assert behind == 1
            stranded = sum(one == "stranded" for one in here.outcomes().values())
            assert stranded == 3 - len(entered)
        else:
            assert steps == [1, 2, 3]
            break


@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.soak)])
def test_a_loss_of_power_keeps_what_was_acknowledged(
    every: int, tmp_path: Path, by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies at an event, then each name whose folder was not synced is lost."""
    for at in itertools.count(1, every):
        place = tmp_path / str(at)
        place.mkdir()
        with monkeypatch.context() as patch:
            disk = Disk(place, patch)
            bucket = LocalBackend(place / "registry")
            create_config(bucket, "skipped")
            machine = Machine(bucket, place / "journal")
            disk.settle()
            disk.dies_at = at
            acknowledged = _saves_and_dies(machine, [1, 2])
            with suppress(InjectedCrash):
                machine.carry()
            is_dead = disk.events >= at
            registry = disk.survivors(place / "registry")
            journal = disk.survivors(place / "journal")
        after = Machine(registry, tmp_path / f"{at}-after")
        _restore_files(journal, tmp_path / f"{at}-after")
        unsure = acknowledged[-1] + 1 if acknowledged else 1
        _check_whole(after)
        _check(after, acknowledged, [unsure])
        if not is_dead:
            break
    assert at > 140


def _check_whole(machine: Machine) -> None:
    """Check that every entry that waits has all its bytes here, whatever the registry has (J4)."""
    store = machine.registry().handle.store
    for _, entry in machine.folder.entries(machine.folder.waiting()):
        assert entry.save is not None
        EntryStates(machine.folder, entry.write, store).check_whole([entry.save.place])


def _restore_files(kept: Scratch, folder: Path) -> None:
    for info in kept.list():
        path = folder / info.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(kept.get(info.key))
