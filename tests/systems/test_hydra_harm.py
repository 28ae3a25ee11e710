"""What befalls Hydra: bits that flip, processes that are killed, and the end of the run."""

from __future__ import annotations

import signal

import pytest

from holdfast import Checkpoint, Run
from holdfast.registry.errors import Conflict, IncompatibleState, IntegrityError, RestoreFailed
from tests.support.processes import run_apart
from tests.support.sameness import assert_same
from tests.systems import hydra_life as acts
from tests.systems.hydra import Training, seeds_of
from tests.systems.hydra_life import Hydra, Reader
from tests.systems.killed import clone_until_killed
from tests.systems.life import Life
from tests.systems.places import Place, in_a_folder, own_packs

pytestmark = pytest.mark.xdist_group("hydra")


def damage(place: Place, run: Run, victim: Checkpoint) -> str:
    """Flip a bit of a file that a checkpoint needs and no other one does; return its name."""
    others = [one for one in run.checkpoints() if one.digest != victim.digest]
    key = own_packs(victim, others)[0]
    place.damage(key)
    return key


@pytest.fixture
def cloned(place: Place) -> tuple[Place, str]:
    """A run with three checkpoints of phase 1, and its name."""
    story = Hydra(place, place)
    acts.birth(story)
    for number in (1, 2, 3):
        with place.open() as reg:
            acts.clone(reg, story.run_id, number)
    return place, story.run_id


def test_sigkill_in_a_save_is_as_if_it_had_not_begun(cloned: tuple[Place, str]) -> None:
    place, run_id = cloned
    assert run_apart(clone_until_killed, place.url, run_id, 4) == -signal.SIGKILL
    straight = Training(1, seeds_of(1))
    for _ in range(3):
        straight.train(acts.CLONE_EVERY)
    straight.metrics = {"heldout_ce": acts.heldout_ce(3)}
    with place.open() as reg:
        restored = reg.run(run_id).restore()
        assert restored.checkpoint.step == 3 * acts.CLONE_EVERY
        assert restored.report == ()
        for part in ("model_record", "optimizer_record", "scheduler_record", "rng_state"):
            assert_same(restored.state[part], straight.state_dict()[part], part)
        assert reg.verify(deep=True).ok
        acts.clone(reg, run_id, 4)
    with place.open() as reg:
        assert [one.step for one in reg.run(run_id).checkpoints()][-1] == 4 * acts.CLONE_EVERY


def test_damaged_latest_is_passed_over(cloned: tuple[Place, str]) -> None:
    place, run_id = cloned
    with place.open() as reg:
        run = reg.run(run_id)
        two, three = run.checkpoints()[-2:]
        key = damage(place, run, three)
        with pytest.raises(IntegrityError, match=key.split("/")[-1][:12]):
            three.load()
    with place.open() as reg:
        run = reg.run(run_id)
        restored = run.restore()
        assert restored.checkpoint.digest == two.digest
        assert [(one.ref, one.digest) for one in restored.report] == [(three.ref, three.digest)]
        assert key.split("/")[-1][:12] in restored.report[0].reason or restored.report[0].reason
        found = reg.verify(deep=True)
        assert not found.ok
        assert [one.where for one in found.findings] == [key]
        acts.clone(reg, run_id, 3)  # the same steps again give the same bytes, and heal the file
    with place.open() as reg:
        assert reg.verify(deep=True).ok
        assert reg.run(run_id).restore().checkpoint.digest == three.digest


def test_all_damaged_is_one_error_that_lists_them(cloned: tuple[Place, str]) -> None:
    place, run_id = cloned
    with place.open() as reg:
        run = reg.run(run_id)
        retained = run.checkpoints()
        for one in retained:
            damage(place, run, one)
    with place.open() as reg, pytest.raises(RestoreFailed) as failure:
        reg.run(run_id).restore()
    text = str(failure.value)
    assert "none of 3 checkpoints could be loaded" in text
    lines = [line for line in text.splitlines() if "step000" in line]
    assert [one.ref in line for one, line in zip(reversed(retained), lines, strict=True)]
    for one, line in zip(reversed(retained), lines, strict=True):
        assert one.ref in line
        assert one.digest.short in line
        assert len(line.split("): ", 1)[1]) > 10  # and why


@in_a_folder
def test_damaged_gate_stops_the_transition_and_can_be_replaced(
    hydra: Life[Hydra], read_hydra: Reader
) -> None:
    run_id = read_hydra(acts.second_gate).id
    place = hydra.story.copies["phase 2"].copy()
    with place.open() as reg:
        run = reg.run(run_id)
        gate, other = run.pins.gates.get("distill_best"), run.checkpoints(2)[-1]
        with pytest.raises(Conflict, match="sound"):
            run.pins.gates.set("distill_best", other)
        damage(place, run, gate)
    with place.open() as reg:
        run = reg.run(run_id)
        commits = run.manifest.commits
        with pytest.raises(IntegrityError):
            reg.checkpoint(f"{run_id}/gates/distill_best").load()
        with pytest.raises(IntegrityError):
            acts.enter(run, 3)
        assert run.refresh().manifest.commits == commits
        run.pins.gates.set("distill_best", other)
        assert run.manifest.pin("gate", "distill_best").replaced == (gate.digest,)
        assert acts.enter(run, 3).checkpoint.digest == other.digest


@in_a_folder
def test_damaged_anchor_stops_the_transition(hydra: Life[Hydra], read_hydra: Reader) -> None:
    run_id = read_hydra(acts.second_gate).id
    place = hydra.story.copies["phase 2"].copy()
    with place.open() as reg:
        # Of the rest of its weights the teacher in the other gate has a copy: the same chunks.
        place.damage_tensor(reg.run(run_id).pins.gates.get("bc_best"), "model_record/stem.weight")
    with place.open() as reg:
        run = reg.run(run_id)
        assert run.pins.gates.get("distill_best").load()
        with pytest.raises(IntegrityError):
            acts.enter(run, 3)
        assert run.refresh().phases.current == 2


@in_a_folder
def test_oracle_features_must_be_gone(hydra: Life[Hydra], read_hydra: Reader) -> None:
    run_id = read_hydra(acts.second_gate).id
    place = hydra.story.copies["phase 2"].copy()
    with place.open() as reg:
        run = reg.run(run_id)
        training = acts.resume(run)
        training.train(acts.PPO_EVERY)
        training.teacher.fade(0.5)
        seeing = run.save(training, step=training.global_step)
        damage(place, run, run.pins.gates.get("distill_best"))
    with place.open() as reg:
        run = reg.run(run_id)
        run.pins.gates.set("distill_best", run.history.checkpoint(seeing.handle.n))
        with pytest.raises(IncompatibleState, match=r"mask_opp is not zero.*mask_wall is not zero"):
            acts.enter(run, 3)
        assert run.refresh().phases.current == 2


@in_a_folder
def test_pgoi_keeps_the_stem_of_the_teacher(hydra: Life[Hydra], read_hydra: Reader) -> None:
    run_id = read_hydra(acts.second_gate).id
    with hydra.story.copies["phase 2"].copy().open() as reg:
        run = reg.run(run_id)
        gone = acts.enter(run, 3, enable=["pgoi"])
        teacher = run.pins.gates.get("distill_best").load()["teacher_state_dict"]
        stem = {name: one for name, one in teacher.items() if "stem" in name}
        assert_same(dict(gone.state["teacher_stem_state_dict"]), stem)
        assert "teacher_state_dict" not in gone.state
