"""Ranks that miss a call, or make one alone, find the others again in the next one.

No rank waits out a deadline for it again: `Patient` counts the waits that were in vain.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import Checkpoint, Registry
from holdfast.registry.errors import IncompatibleState, RegistryError, StoreUnavailable
from holdfast.registry.saving.collective import talk
from holdfast.registry.saving.collective.sides import Following
from tests.registry.saving.collective.ranks import Mortal, group_of, mortals, together
from tests.registry.saving.collective.rows import Rows

WHOLE = np.arange(6000.0)
#: Long enough for a rank that is well, on a busy machine.
WELL_S = 30.0

pytestmark = pytest.mark.usefixtures("rows_are_sharded")


def state(rank: int, size: int) -> dict[str, Any]:
    return {"model": {"w": Rows(WHOLE, rank, size), "b": 1.0}}


class Patient(Mortal):
    """A rank that counts its waits in vain, the last one of each call."""

    vain = 0

    def receive(self, name: str, senders: Sequence[int], timeout_s: float) -> dict[int, bytes]:
        found = super().receive(name, senders, timeout_s)
        self.vain += bool(timeout_s) and len(found) < len(senders)
        return found


def patient(size: int) -> list[Any]:
    made = mortals(size, WELL_S)
    for one in made:
        one.__class__ = Patient
    return made


def training(
    reg: Registry, victim: int, missed: range, steps: int, *, in_lockstep: bool
) -> tuple[list[Any], list[Any]]:
    """Save at each step; a rank leaves some out, by an error of its own that the loop catches.

    Returns:
        Each rank's steps that were saved, and the ranks.
    """
    groups = patient(3)
    trained = threading.Barrier(3)
    others = threading.Barrier(3)

    def train(group: Patient) -> list[int]:
        saved = []
        with holdfast.open(reg.url) as mine:
            run = mine.run("run", group=group)
            for step in range(steps):
                if in_lockstep:
                    trained.wait(WELL_S)
                if group.rank == victim and step in missed:
                    if in_lockstep:
                        group.fall_silent()
                        others.wait(WELL_S)
                        group.speak()
                    continue
                try:
                    run.save(state(group.rank, 3), step=step)
                    saved.append(step)
                except RegistryError:
                    pass
                if in_lockstep and step in missed:
                    others.wait(WELL_S)
        return saved

    return together(groups, train), groups


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("in_lockstep", [True, False], ids=["in lockstep", "each by itself"])
@pytest.mark.parametrize("missed", [range(2, 3), range(2, 14)], ids=["one call", "many calls"])
def test_after_missed_calls_the_next_call_succeeds_on_all_ranks(
    reg: Registry, victim: int, missed: range, in_lockstep: bool
) -> None:
    found, groups = training(reg, victim, missed, missed.stop + 2, in_lockstep=in_lockstep)
    right = [step for step in range(missed.stop + 2) if step not in missed]
    assert found == [right] * 3
    # Once for each call that it missed, and never again for the same.
    assert max(one.vain for one in groups) <= len(missed) * in_lockstep
    # What nobody can ask for any more is forgotten; of 16 calls there would be 87.
    assert len(groups[0]._board.messages) < 60


@pytest.mark.parametrize("waiting", [0, 1, 2])
def test_a_failed_save_in_the_background_that_one_rank_has_waited_for(
    reg: Registry, monkeypatch: pytest.MonkeyPatch, waiting: int
) -> None:
    failing, store = [True], Following._store
    all_failed = threading.Barrier(3)
    groups = patient(3)

    def fail_once(*args: Any) -> Any:
        if failing:
            raise StoreUnavailable("no answer", where="packs/aa")
        return store(*args)

    monkeypatch.setattr(Following, "_store", fail_once)

    def train(group: Patient) -> tuple[list[str], Checkpoint]:
        said = []
        with holdfast.open(reg.url) as mine:
            run = mine.run("run", group=group)
            pending = run.save_async(state(group.rank, 3), step=1)
            if group.rank == waiting:
                with pytest.raises(StoreUnavailable):
                    pending.wait()
            else:
                run.handle.saver.pipeline._background.wait(None)
            all_failed.wait(WELL_S)
            failing.clear()
            try:
                run.save(state(group.rank, 3), step=2)
            except RegistryError as error:
                said.append(type(error).__name__)
            return said, run.save(state(group.rank, 3), step=3)

    found = together(groups, train)
    assert all(isinstance(one, tuple) for one in found), found
    assert [said for said, _ in found] == [["StoreUnavailable"]] * 3
    assert {made.step for _, made in found} == {3}
    assert sum(one.vain for one in groups) == 0


def test_ranks_that_seldom_wait_for_their_saves_do_not_end_each_others_for_ever(
    reg: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing, store = [True], Following._store
    together_now = threading.Barrier(3)

    def fail_once(*args: Any) -> Any:
        if failing:
            raise StoreUnavailable("no answer", where="packs/aa")
        return store(*args)

    monkeypatch.setattr(Following, "_store", fail_once)

    def train(group: Patient) -> list[int]:
        told = []
        with holdfast.open(reg.url) as mine:
            run = mine.run("run", group=group)
            for step in range(1, 7):
                try:
                    pending = run.save_async(state(group.rank, 3), step=step)
                    if step == 1 and group.rank == 0:  # it prints the first checkpoint
                        pending.wait()
                except StoreUnavailable:
                    told.append(step)
                run.handle.saver.pipeline._background.wait(None)
                together_now.wait(WELL_S)
                failing.clear()
        return told

    assert together(patient(3), train) == [[1], [2], [2]]
    assert [one.step for one in reg.run("run").checkpoints()] == [3, 4, 5, 6]
    assert "run: step 2: rank" in caplog.text


def test_different_steps_are_named_on_all_ranks(
    reg: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(talk, "_GRACE_S", 0.1)
    saved = threading.Barrier(3)

    def save(group: Any) -> list[str]:
        said = []
        with holdfast.open(reg.url) as mine:
            run = mine.run("run", group=group)
            for step in (10, 20):
                with pytest.raises(IncompatibleState) as caught:
                    run.save(state(group.rank, 3), step=step + (group.rank == 1))
                said.append(str(caught.value))
                saved.wait(WELL_S)
        return said

    found = together(group_of(3, WELL_S), save)
    for said in found:
        assert len(said) == 2, found
        assert "out of step" in said[0]
        assert "expected step 11, as on rank 1; found step 10" in said[0]
        assert "missed a save" in said[0]
    assert not reg.run("run").checkpoints()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_load_that_one_rank_has_missed(reg: Registry, victim: int) -> None:
    plain = reg.run("run")
    refs = [plain.save({"m": {"w": WHOLE + n}}, step=n).ref for n in range(3)]
    groups = patient(3)
    others = threading.Barrier(3)

    def load(group: Patient) -> list[bool]:
        right = []
        with holdfast.open(reg.url) as mine:
            run = mine.run("run", group=group)
            for n, ref in enumerate(refs):
                target = {"m": {"w": np.zeros_like(WHOLE)}}
                if n == 1 and group.rank == victim:
                    group.fall_silent()
                    others.wait(WELL_S)
                    group.speak()
                    continue
                try:
                    run.handle.ranks.fill(mine.checkpoint(ref), target, None, strict=True)
                except RegistryError:
                    assert n == 1
                    others.wait(WELL_S)
                else:
                    right.append(bool((target["m"]["w"] == WHOLE + n).all()))
        return right

    assert together(groups, load) == [[True, True]] * 3
    assert max(one.vain for one in groups) <= 1


def test_a_rank_that_opens_the_run_once_more_is_in_step(reg: Registry) -> None:
    def save(group: Any) -> Checkpoint:
        with holdfast.open(reg.url) as mine:
            for _ in range(1 + group.rank):
                run = mine.run("run", group=group)
            return run.save(state(group.rank, 2), step=1)

    found = together(group_of(2, WELL_S), save)
    assert [one.step for one in found] == [1, 1], found
