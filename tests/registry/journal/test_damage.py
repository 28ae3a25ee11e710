"""A damaged journal: a typed error, what is sound is kept, and the run goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.registry.errors import Conflict
from tests.registry.journal.machines import RUN, Machine, added
from tests.support.sameness import assert_same
from tests.support.states import make_state
from tests.support.stores import new_backend, opened


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()  # it may be linked into the next entry
    path.write_bytes(bytes(data))


def _states(machine: Machine, kind: str) -> list[Path]:
    root = Path(machine.folder.states_path(machine.folder.entry(2).write))
    return sorted(path for path in root.glob(f"{kind}/*/*") if path.stat().st_nlink == 1)


def _flip_a_pack(machine: Machine) -> None:
    _flip(_states(machine, "packs")[0])


def _cut_a_pack(machine: Machine) -> None:
    os.truncate(_states(machine, "packs")[0], 100)


def _flip_the_manifest(machine: Machine) -> None:
    _flip(_states(machine, "manifests")[0])


def _lose_the_placement(machine: Machine) -> None:
    _states(machine, "placements")[0].unlink()


def _lose_the_states(machine: Machine) -> None:
    shutil.rmtree(machine.folder.states_path(machine.folder.entry(2).write))


def _tear_the_entry(machine: Machine) -> None:
    os.truncate(Path(machine.folder.path) / "entries" / f"{2:020d}", 50)


DAMAGE = [
    _flip_a_pack,
    _cut_a_pack,
    _flip_the_manifest,
    _lose_the_placement,
    _lose_the_states,
    _tear_the_entry,
]


@pytest.mark.parametrize("harm", DAMAGE)
def test_damage_costs_one_save(
    harm: Callable[[Machine], None], tmp_path: Path, by_hand: None
) -> None:
    bucket = new_backend()
    machine = Machine(bucket, tmp_path / "journal")
    run = machine.run()
    for step in (1, 2):
        run.save(make_state(step), step=step)
    harm(machine)
    again = machine.run()
    restored = again.restore()
    assert restored.checkpoint.step == 1
    assert_same(restored.state, make_state(1))
    again.save(make_state(3), step=3)
    machine.carry()
    assert [step for step, _ in added(bucket)] == [1, 3]
    assert machine.outcomes()[2] == "damaged"
    with pytest.raises(Conflict, match="is damaged"):
        again.wait(remote=True)
    again.save(make_state(4), step=4)
    machine.carry()
    with opened(bucket) as registry:
        assert registry.verify(deep=True).findings == ()
        assert [one.step for one in registry.run(RUN).checkpoints()] == [1, 3, 4]


def test_a_lost_takeover_costs_its_saves(tmp_path: Path, by_hand: None) -> None:
    bucket = new_backend()
    machine = Machine(bucket, tmp_path / "journal")
    machine.run().save(make_state(1), step=1)
    (Path(machine.folder.path) / "takeovers" / f"{1:020d}").unlink()
    machine.carry()
    assert machine.outcomes() == {1: "damaged"}


def test_a_lost_journal_is_begun_again(tmp_path: Path, by_hand: None) -> None:
    bucket = new_backend()
    machine = Machine(bucket, tmp_path / "journal")
    machine.run().save(make_state(1), step=1)
    machine.carry()
    shutil.rmtree(machine.journal.path)
    run = machine.run()
    assert run.restore().checkpoint.step == 1
    run.save(make_state(2), step=2)
    machine.carry()
    assert [step for step, _ in added(bucket)] == [1, 2]


def test_states_of_a_save_that_was_not_acknowledged_are_deleted(
    tmp_path: Path, by_hand: None
) -> None:
    machine = Machine(new_backend(), tmp_path / "journal")
    machine.run().save(make_state(1), step=1)
    left = Path(machine.folder.states_path("0123456789abcdef"))
    (left / "packs").mkdir(parents=True)
    saving = machine.folder.lock("writing")
    saving.acquire(shared=True)  # another process saves: it may be its own
    machine.carry()
    assert left.exists()
    saving.release()
    machine.carry()
    assert not left.exists()
