"""A program that does what a document says, with its keys and words and no argument of ours.

`docs/systems.md` names the row of each test.
"""

from __future__ import annotations

import runpy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast import Registry, Run, formats
from holdfast.registry.errors import IncompatibleState, InvalidInput, RestoreFailed
from holdfast.registry.spec.migrations import MIGRATIONS, register_migration
from tests.support.commands import invoke
from tests.systems.adr004 import CARD


@pytest.fixture
def reg(tmp_path: Path) -> Iterator[Registry]:
    """An empty registry in a folder."""
    with holdfast.init(str(tmp_path / "registry")) as made:
        yield made


@pytest.fixture
def no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the migrations of a test when it ends."""
    monkeypatch.setattr(MIGRATIONS, "_steps", {})


# ADR-004


def adr004_state(epoch: int, accuracy: float, loss: float) -> dict[str, Any]:
    """Return a training checkpoint as `save_training_checkpoint` of the document makes it."""
    return {
        "version": "1.0.0",
        "timestamp": f"2025-10-25T00:00:{epoch:02d}",
        "git_commit": None,
        "model_state_dict": {"weight": torch.full((2,), float(epoch))},
        "optimizer_state_dict": {"state": {}, "param_groups": []},
        "scheduler_state_dict": None,
        "epoch": epoch,
        "global_step": 10 * epoch,
        "metrics": {
            "accuracy": accuracy,
            "loss": loss,
            "uncertainty_calibration": {"ece": 0.01},
        },
        "config": {"d_model": 2},
        "metadata": {"device": "CPU", "cuda_version": None},
    }


ACCURACY = (0.5, 0.9, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6)


def adr004_run(reg: Registry, epochs: int = len(ACCURACY)) -> Run:
    run = reg.create_run("bayesian", preset="adr004")
    for epoch in range(1, epochs + 1):
        run.save(adr004_state(epoch, ACCURACY[epoch - 1], 1.0 + epoch), step=epoch)
    return run


def test_metrics_in_the_state_choose_best_and_milestones(reg: Registry) -> None:
    run = adr004_run(reg)
    assert run.best().step == 2
    assert run.best().tier == "milestone"
    assert {one.step for one in run.checkpoints()} == {1, 2, 5, 6, 7, 8}
    assert run.best().metrics == {"accuracy": 0.9, "loss": 3.0}  # nested ones stay in the state
    assert run.best().load()["metrics"] == adr004_state(2, 0.9, 3.0)["metrics"]


def test_metrics_in_the_state_come_through_a_journal(reg: Registry, tmp_path: Path) -> None:
    with holdfast.open(str(tmp_path / "registry"), journal=tmp_path / "journal") as near:
        run = adr004_run(near)
        run.wait(remote=True)
    assert reg.run("bayesian").best().step == 2
    assert reg.run("bayesian").best().metrics == {"accuracy": 0.9, "loss": 3.0}


def test_a_metric_has_one_value(reg: Registry) -> None:
    run = adr004_run(reg, 1)
    with pytest.raises(InvalidInput, match="metric accuracy: a metric has two values"):
        run.save(adr004_state(2, 0.6, 1.0), step=2, metrics={"accuracy": 0.7})
    assert run.latest().step == 1
    same = run.save(adr004_state(2, 0.6, 1.0), step=2, metrics={"accuracy": 0.6, "f1": 0.2})
    assert same.metrics == {"accuracy": 0.6, "loss": 1.0, "f1": 0.2}


def test_a_release_has_what_the_documents_loader_asks_for(reg: Registry, tmp_path: Path) -> None:
    run = adr004_run(reg, 2)
    release = run.releases.publish("1.2.3", run.best(), card=CARD)
    target = tmp_path / "bayesian_transformer_v1.2.3.pt"
    formats.write(target, release)
    checkpoint = torch.load(target, map_location="cpu", weights_only=True)
    assert [key for key in ("version", "model_state_dict", "config") if key not in checkpoint] == []
    assert checkpoint["version"] == "1.2.3"
    assert checkpoint["metrics"] == {"accuracy": 0.9, "loss": 3.0}
    assert checkpoint["model_card"] == CARD
    assert checkpoint["model_state_dict"]["weight"].tolist() == [2.0, 2.0]
    own = {
        "version": "9.9.9",
        "model_state_dict": {},
        "config": {},
        "metrics": {"ece": {"l1": 0.1}},
    }
    formats.write(
        tmp_path / "own.pt", run.releases.publish("2.0.0", run.best(), card=CARD, state=own)
    )
    kept = torch.load(tmp_path / "own.pt", weights_only=True)
    assert kept == {**own, "model_card": CARD}  # what the state says of itself stays


# Hydra


def test_evaluation_games_are_of_the_entries_whose_rating_is_uncertain(reg: Registry) -> None:
    run = reg.create_run("league", seed=42)
    models = [run.save({"w": torch.ones(2) * step}, step=step) for step in range(1, 5)]
    run.pool.promote(models[0], sigma=8.0, frozen=True)
    for model, sigma in zip(models[1:], (2.8, 3.5, 7.7), strict=True):
        run.pool.promote(model, mu=25.0, sigma=sigma)
    drawn = Counter(run.pool.evaluation(game).version for game in range(1400))
    assert drawn.keys() == {2, 3, 4}  # not the frozen one
    for version, sigma in ((2, 2.8), (3, 3.5), (4, 7.7)):
        assert abs(drawn[version] - 100 * sigma) < 50
    words = np.random.SeedSequence(42, spawn_key=(0, 0, 7)).generate_state(3, np.uint64)
    weights = [round(sigma * 2**32) for sigma in (2.8, 3.5, 7.7)]
    point = int(words[2]) * sum(weights) >> 64
    version = 2 + sum(point >= sum(weights[:n]) for n in (1, 2))
    assert run.pool.evaluation(7).version == version
    for game in range(30):  # its rating becomes certain
        run.pool.record_match([4, 2], [1 + game % 2, 2 - game % 2], match=str(game))
    later = Counter(run.pool.evaluation(game).version for game in range(1400))
    assert later[4] < drawn[4] - 200


class Student(nn.Module):
    """The parts of the student that the document names, and a stem."""

    def __init__(self, planes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(planes, 4)
        self.policy_head = nn.Linear(4, 5)
        self.value_head = nn.Linear(4, 1)
        self.to(torch.bfloat16)


def hydra_state(phase: int, step: int, student: Student, **more: Any) -> dict[str, Any]:
    """Return the core keys of the document, with the snapshot of the metrics in the state."""
    return {
        "model_record": student.state_dict(),
        "optimizer_record": {"exp_avg": torch.zeros(4)},
        "scheduler_record": {"position": step},
        "rng_state": {"seed": step},
        "global_step": step,
        "phase": phase,
        "config": {"blocks": 40},
        "metrics": {"heldout_ce": 2.0} if phase == 1 else {"mu": 25.0, "sigma": 1.0},
        "timestamp": 1,
        "checkpoint_version": 1,
        **more,
    }


def cloned(reg: Registry) -> tuple[Run, Student]:
    run, student = reg.create_run(preset="hydra", seed=7), Student()
    run.save(hydra_state(1, 10_000, student), step=10_000)
    run.pins.gates.set("bc_best")
    return run, student


def distilled(reg: Registry, mask: str, value: float) -> tuple[Run, Student]:
    """Return a run at the end of phase 2, whose teacher has dropout masks under a name."""
    run, student = cloned(reg)
    run.phases.transition(2, targets={"model_record": Student()})
    teacher = {**student.state_dict(), mask: torch.full((3,), value, dtype=torch.bfloat16)}
    run.save(hydra_state(2, 10_500, student, teacher_state_dict=teacher), step=10_500)
    run.pins.gates.set("distill_best")
    return run, student


def test_metrics_snapshot_of_hydra_chooses_the_gate(reg: Registry) -> None:
    run, student = reg.create_run(preset="hydra", seed=7), Student()
    for step, loss in ((10_000, 2.0), (20_000, 1.0), (30_000, 3.0)):
        state = hydra_state(1, step, student)
        run.save({**state, "metrics": {"heldout_ce": loss}}, step=step)
    run.pins.gates.set("bc_best")
    assert run.pins.gates.get("bc_best").load()["global_step"] == 20_000


MIGRATION = """
def add_head(state):
    heads = {**state["model_record"], "safety_head": state["model_record"]["policy_head"]}
    return {**state, "model_record": heads, "checkpoint_version": 2}
"""


@pytest.mark.usefixtures("no_steps")
def test_one_command_raises_the_version_of_a_running_run(reg: Registry, tmp_path: Path) -> None:
    run = reg.create_run("hydra", preset="hydra")
    old = {
        **hydra_state(1, 1, Student()),
        "model_record": {"policy_head": torch.ones(2).bfloat16()},
    }
    run.save(old, step=1)
    (tmp_path / "ours.py").write_text(MIGRATION)
    given = ("run", "set", "hydra", "--schema-version", "1:2", "--migration")
    url = ("--registry", tmp_path / "registry")
    bad = invoke(*given, f"{tmp_path / 'ours.py'}:MIGRATION", *url)
    assert (bad.exit_code, run.refresh().manifest.spec.version) == (2, 1)
    done = invoke(*given, f"{tmp_path / 'ours.py'}:add_head", *url)
    assert done.stdout == "hydra: schema version 2\n"
    slots = run.refresh().manifest.next_slot
    migrate = runpy.run_path(str(tmp_path / "ours.py"))["add_head"]
    run.phases.raise_version(1, 2, migrate)  # as each program does when it begins
    assert run.refresh().manifest.next_slot == slots
    state = run.restore().state
    assert (list(state["model_record"]), state["checkpoint_version"]) == (
        ["policy_head", "safety_head"],
        2,
    )
    assert run.save({**state, "global_step": 2}, step=2).load()["checkpoint_version"] == 2
    with reg.fork(run.latest(), "fork") as fork:
        assert fork.manifest.spec.version == 2
    MIGRATIONS._steps.clear()  # a program that was never told
    with pytest.raises(IncompatibleState, match="no migration from 1 to 2"):
        run.save(old, step=3)
    with pytest.raises(InvalidInput, match="another schema version"):
        run.phases.raise_version(3, 4, migrate)
    with pytest.raises(IncompatibleState, match="did not set the version"):
        run.phases.raise_version(2, 3, lambda state: state)
    assert run.refresh().manifest.spec.version == 2


def test_transition_needs_only_what_the_document_names(reg: Registry) -> None:
    run, student = cloned(reg)
    begun = run.phases.transition(2, targets={"model_record": Student()})
    fresh = Student()
    fresh.load_state_dict(begun.state["model_record"], strict=True)
    for name, weight in student.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], weight)


def test_thresholds_and_a_new_value_head_are_switched_on(reg: Registry) -> None:
    run, _ = cloned(reg)
    given = {"targets": {"model_record": Student()}, "enable": ["readiness", "new_value_head"]}
    with pytest.raises(IncompatibleState, match="deal_in_rate is not known"):
        run.phases.transition(2, **given)
    ready = {"discard_accuracy": 0.7, "average_placement": 2.5, "deal_in_rate": 0.1}
    begun = run.phases.transition(2, metrics=ready, **given)
    assert not [name for name in begun.state["model_record"] if "value" in name]
    assert [name for name in begun.state["model_record"] if "policy" in name]


@pytest.mark.parametrize("mask", ["feature_dropout_mask", "mask_opp"])
def test_masks_have_the_names_of_the_program(reg: Registry, mask: str) -> None:
    run, _ = distilled(reg, mask, 0.0)
    given: dict[str, Any] = {"targets": {"model_record": Student()}}
    if mask == "mask_opp":  # without mask_wall, which the preset also expects
        with pytest.raises(IncompatibleState, match="mask_wall"):
            run.phases.transition(3, **given)
        given["zero"] = "teacher_state_dict/mask_*"
    assert run.phases.transition(3, **given).state["model_record"]


def test_masks_that_are_left_stop_the_transition(reg: Registry) -> None:
    run, _ = distilled(reg, "fading", 0.5)
    given: dict[str, Any] = {"targets": {"model_record": Student()}}
    with pytest.raises(IncompatibleState, match="fading is not zero"):
        run.phases.transition(3, zero=["teacher_state_dict/fading"], **given)
    with pytest.raises(InvalidInput, match="must return the tensor names"):
        run.phases.transition(3, zero=[], **given)


# Versions


def test_a_version_that_no_load_can_read_is_refused_at_save(reg: Registry, no_steps: None) -> None:
    run, student = cloned(reg)
    newer = {**hydra_state(1, 20_000, student), "checkpoint_version": 2}
    with pytest.raises(IncompatibleState, match="no migration from 2 to 1"):
        run.save(newer, step=20_000)
    with pytest.raises(IncompatibleState, match="not a version"):
        run.save({**newer, "checkpoint_version": "new"}, step=20_000)
    assert run.latest().step == 10_000
    register_migration(2, 1, lambda state: {**state, "checkpoint_version": 1})
    assert run.save(newer, step=20_000).load()["checkpoint_version"] == 1


def test_restore_passes_over_what_it_cannot_migrate(reg: Registry, no_steps: None) -> None:
    run, student = cloned(reg)
    register_migration(2, 1, lambda state: {**state, "checkpoint_version": 1})
    run.save({**hydra_state(1, 20_000, student), "checkpoint_version": 2}, step=20_000)
    MIGRATIONS._steps.clear()  # another program, which does not know version 2
    restored = reg.run(run.id).restore()
    assert restored is not None
    assert restored.checkpoint.step == 10_000
    (passed,) = restored.report
    assert passed.ref.endswith("step00020000")
    assert "no migration from 2 to 1" in passed.reason


def test_restore_fails_if_nothing_can_be_migrated(reg: Registry, no_steps: None) -> None:
    run, student = reg.create_run(preset="hydra", seed=7), Student()
    register_migration(2, 1, lambda state: {**state, "checkpoint_version": 1})
    run.save({**hydra_state(1, 10_000, student), "checkpoint_version": 2}, step=10_000)
    MIGRATIONS._steps.clear()
    with pytest.raises(RestoreFailed, match="no migration from 2 to 1") as caught:
        reg.run(run.id).restore()
    assert "register_migration" in str(caught.value)
