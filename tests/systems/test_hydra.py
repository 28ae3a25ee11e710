"""The life of a Hydra run: what its checkpoints are, what is kept, and how it comes back.

The league is in `test_hydra_league.py`, damage in `test_hydra_harm.py`. The rules are
those of the document of Hydra; `docs/systems.md` says row by row which test proves what.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import Run
from holdfast.registry.errors import Conflict, IncompatibleState
from holdfast.registry.history.actions import AddCheckpoint, EnterPhase, Evict, ReportMetrics
from tests.support.sameness import assert_same
from tests.systems import hydra_life as acts
from tests.systems.hydra import SEED, Student, Training, seeds_of
from tests.systems.hydra_life import Hydra, Reader
from tests.systems.life import Life
from tests.systems.places import in_a_folder

pytestmark = pytest.mark.xdist_group("hydra")

KIB = 1024
FIFO = 20
CORE = [
    "model_record",
    "optimizer_record",
    "scheduler_record",
    "rng_state",
    "global_step",
    "phase",
    "config",
    "metrics",
    "timestamp",
    "checkpoint_version",
]


def kept_numbers(run: Run, phase: int) -> list[int]:
    """Return the numbers, from 1 in its phase, of the checkpoints that a phase keeps."""
    first = acts.first_step(run, phase)
    every = acts.CLONE_EVERY if phase == 1 else acts.PPO_EVERY
    return [(one.step - first) // every + 1 for one in run.checkpoints(phase)]


def members_over_time(run: Run, phase: str) -> list[int]:
    """Return how many checkpoints a phase held after each commit."""
    added: dict[int, str] = {}
    held, counts = 0, []
    for commit in run.history.commits():
        for action in commit.actions:
            if isinstance(action, AddCheckpoint):
                added[commit.n] = action.phase
                held += action.phase == phase
            if isinstance(action, Evict):
                held -= sum(added[one.checkpoint] == phase for one in action.evictions)
        counts.append(held)
    return counts


# What a checkpoint is


def test_run_id_tells_start_and_seed(read_hydra: Reader) -> None:
    run = read_hydra(acts.birth)
    assert re.fullmatch(rf"\d{{8}}_\d{{6}}_{SEED & 0xFFFFFFFF:08x}", run.id)
    assert run.config == {"blocks": 3, "channels": 32}


@in_a_folder
@pytest.mark.parametrize("key", CORE)
def test_core_keys_are_required(read_hydra: Reader, key: str) -> None:
    run = read_hydra(acts.cloning)
    state = Training(1, seeds_of(1)).state_dict()
    del state[key]
    with pytest.raises(IncompatibleState, match=f"missing: {key}"):
        run.save(state, phase=1, step=10**7)


def test_core_keys_come_back_in_their_order(read_hydra: Reader) -> None:
    run = read_hydra(acts.cloning)
    state = run.checkpoints(1)[0].load()
    assert list(state) == CORE
    assert state["global_step"] == run.checkpoints(1)[0].step
    assert state["phase"] == 1
    assert state["checkpoint_version"] == 1
    assert set(state["rng_state"]) == {"torch", "python", "numpy", "cursor"}


def test_student_stays_bf16_and_moments_fp32(read_hydra: Reader) -> None:
    run = read_hydra(acts.distillation)
    latest = run.latest(2)
    assert latest is not None
    tensors = latest.tensors()
    student = {one.dtype for path, one in tensors.items() if path.startswith("model_record/")}
    moments = {one.dtype for path, one in tensors.items() if "exp_avg" in path}
    assert (student, moments) == ({"bfloat16"}, {"float32"})
    # The whole is a fifth of it: two moments of 4 bytes for each weight of 2.
    weights = sum(t.nbytes for path, t in tensors.items() if path.startswith("model_record/"))
    assert sum(t.nbytes for path, t in tensors.items() if "exp_avg" in path) == 4 * weights
    cast = latest.load()
    for kept in cast["optimizer_record"]["state"].values():
        kept["exp_avg"] = kept["exp_avg"].bfloat16()
    with pytest.raises(IncompatibleState, match="exp_avg is bfloat16, must be float32"):
        run.save(cast, phase=2, step=10**7)
    wide = latest.load()
    wide["model_record"] = {name: one.float() for name, one in wide["model_record"].items()}
    with pytest.raises(IncompatibleState, match="is float32, must be bfloat16"):
        run.save(wide, phase=2, step=10**7)


def test_keys_of_phases_2_and_3(read_hydra: Reader) -> None:
    run = read_hydra(acts.league)
    phases = [run.checkpoints(phase)[0].load() for phase in (1, 2, 3)]
    assert ["teacher_state_dict" in state for state in phases] == [False, True, False]
    assert ["opponent_pool_metadata" in state for state in phases] == [False, False, True]
    last = run.latest(3)
    assert last is not None
    pool = last.load()["opponent_pool_metadata"]
    assert pool["next_version"] == pool["roster"][-1] + 1
    for state, phase, key in (
        (phases[1], 2, "teacher_state_dict"),
        (phases[2], 3, "opponent_pool_metadata"),
    ):
        del state[key]
        with pytest.raises(IncompatibleState, match=key):
            run.save(state, phase=phase, step=10**7)


def test_time_of_a_save_is_no_part_of_its_id(hydra: Life[Hydra], read_hydra: Reader) -> None:
    run = read_hydra(acts.first_gate)
    # Saved again, at another second and with another metric, it is the same checkpoint.
    steps = [one.step for one in run.manifest.checkpoints if one.phase == "1" and one.is_live]
    assert len(steps) == len(set(steps))
    assert hydra.story.added["the same step again"] < KIB
    assert hydra.story.added["the same weights"] < 64 * KIB
    assert "timestamp" not in run.checkpoints(1)[0].components


# What is kept


def test_phase_1_keeps_20_and_its_best_among_them(read_hydra: Reader) -> None:
    run = read_hydra(acts.first_gate)
    # The one after was superseded and saved again; the last one holds its weights.
    last = acts.CLONED + 2
    assert kept_numbers(run, 1) == [acts.BEST_CLONE, *range(last - FIFO + 2, last + 1)]
    best = run.best(phase=1)
    assert best is not None
    assert best.metrics == {"heldout_ce": acts.heldout_ce(acts.BEST_CLONE)}


@pytest.mark.parametrize(
    ("phase", "best", "saved"),
    [(2, acts.BEST_DISTILLED, acts.DISTILLED), (3, acts.BEST_PLAYED, acts.PLAYED)],
)
def test_phases_2_and_3_keep_20_and_the_best_by_mu_less_3_sigma(
    read_hydra: Reader, phase: int, best: int, saved: int
) -> None:
    run = read_hydra(acts.league)
    first = saved - FIFO + 1
    wanted = [*range(first, saved + 1)] if best >= first else [best, *range(first + 1, saved + 1)]
    assert kept_numbers(run, phase) == wanted
    found = run.best(phase=phase)
    assert found is not None
    assert found.metrics == acts.rating(best, best)
    by_mu_alone = max(run.checkpoints(phase), key=lambda one: one.metrics.get("mu", 0))
    assert by_mu_alone.digest != found.digest


def test_cadence_of_each_phase(read_hydra: Reader) -> None:
    run = read_hydra(acts.birth)
    assert [run.phases.is_due(step, phase=1) for step in (500, 10_000, 10_500, 20_000)] == [
        False,
        True,
        False,
        True,
    ]
    for phase in (2, 3):
        assert [run.phases.is_due(step, phase=phase) for step in (499, 500, 750, 10_000)] == [
            False,
            True,
            False,
            True,
        ]


def test_evictions_are_part_of_saves(read_hydra: Reader) -> None:
    run = read_hydra(acts.league)
    for phase in ("1", "2", "3"):
        assert max(members_over_time(run, phase)) == FIFO
    for commit in run.history.commits():
        evicted = [
            one
            for action in commit.actions
            if isinstance(action, Evict)
            for one in action.evictions
        ]
        if evicted:
            assert any(isinstance(action, AddCheckpoint) for action in commit.actions)
            assert all("not among last 20" in one.reason for one in evicted)
    saved = sum(
        len([a for a in c.actions if isinstance(a, AddCheckpoint)]) for c in run.history.commits()
    )
    assert saved == run.manifest.count > 60
    assert len(run.retention.evicted()) == saved - 3 * FIFO


def test_ratings_come_from_elsewhere_and_late(read_hydra: Reader) -> None:
    run = read_hydra(acts.distillation)
    commits = list(run.history.commits())
    adds = {c.n: a for c in commits for a in c.actions if isinstance(a, AddCheckpoint)}
    late = Counter(
        sum(1 for n in adds if action.checkpoint < n < commit.n)
        for commit in commits
        for action in commit.actions
        if isinstance(action, ReportMetrics) and adds[action.checkpoint].phase == "2"
    )
    assert late[acts.LAG] == acts.DISTILLED - acts.LAG
    assert not any(adds[n].metrics for n in adds if adds[n].phase == "2")


def test_gate_keeps_its_checkpoint_for_good(hydra: Life[Hydra], read_hydra: Reader) -> None:
    run = read_hydra(acts.league)
    for name, phase in (("bc_best", 1), ("distill_best", 2)):
        best = run.best(phase=phase)
        assert best is not None
        assert run.pins.gates.get(name).digest == best.digest
        assert_same(run.pins.gates.get(name).load(), best.load())
        plan = run.retention.prune(dry_run=True)
        (reasons,) = (
            v.reasons for v in plan.kept if v.checkpoint.n == run.pins.gates.get(name).handle.n
        )
        assert f"gates/{name}" in reasons
    assert hydra.story.added["gate"] < KIB


@in_a_folder
def test_grp_and_evaluations_are_added_once(hydra: Life[Hydra], read_hydra: Reader) -> None:
    run = read_hydra(acts.aftermath)
    assert_same(run.pins.artifacts.get("grp").load(), acts.grp_network())
    assert run.pins.artifacts.get("eval_full").load()["games"] == 200_000
    place = hydra.story.copies["phase 3"]
    with place.open() as reg:
        other = acts.grp_network()
        other["grp"]["layers"] = 3
        with pytest.raises(Conflict, match="added once"):
            reg.run(run.id).pins.artifacts.set("grp", other)
        before = place.size_bytes()
        reg.run(run.id).pins.artifacts.set("grp", acts.grp_network())
        assert place.size_bytes() == before


# Coming back


def test_death_at_any_write_of_a_save_loses_nothing(hydra: Life[Hydra], read_hydra: Reader) -> None:
    run = read_hydra(acts.cloning)
    # Three packs, manifest, placement, slot: before each of them, and after each, a process died.
    # One save in some has a seventh write, of a snapshot.
    deaths = [(write, after) for write, after in hydra.story.deaths if write < 7]
    assert deaths == [(write, after) for after in (False, True) for write in range(1, 7)]
    assert [one for one in hydra.story.left if one.severity == "error"] == []
    straight = Training(1, seeds_of(1))
    for _ in range(acts.CLONED):
        straight.train(acts.CLONE_EVERY)
    straight.metrics = {"heldout_ce": acts.heldout_ce(acts.CLONED)}
    (came_out,) = (one for one in run.checkpoints(1) if one.step == straight.global_step)
    assert_same(acts.without_time(came_out.load()), acts.without_time(straight.state_dict()))


def test_nan_is_never_latest_best_or_restored(hydra: Life[Hydra], read_hydra: Reader) -> None:
    run = read_hydra(acts.divergence)
    held_back = [one for one in run.history.manifest().checkpoints if one.held_back]
    assert [one.nonfinite for one in held_back] == [("model_record/policy_head.bias",)]
    assert held_back[0].metrics["heldout_ce"] == 0.0  # better than any other, and not best
    best = run.best(phase=1)
    assert best is not None
    assert best.metrics["heldout_ce"] == acts.heldout_ce(acts.BEST_CLONE)
    (passed,) = hydra.story.passed_over
    assert passed.digest == held_back[0].manifest
    assert "not finite" in passed.reason
    assert run.manifest.is_superseded(held_back[0].n)  # the step was saved again
    again = [one for one in run.checkpoints(1) if one.step == held_back[0].step]
    assert not again or not again[0].nonfinite


# From phase to phase


def test_first_transition_row_by_row(hydra: Life[Hydra], read_hydra: Reader) -> None:
    run = read_hydra(acts.distillation)
    entered, gate = hydra.story.entered[2], run.pins.gates.get("bc_best")
    assert entered.checkpoint.digest == gate.digest  # step 1
    source = gate.load()["model_record"]
    student, teacher = entered.state["model_record"], entered.state["teacher_state_dict"]
    carried = {name: one for name, one in source.items() if "value" not in name}
    assert_same({name: student[name] for name in carried}, carried)
    weight = student["value_head.weight"].float()
    assert torch.allclose(weight @ weight.T, torch.eye(1), atol=1e-2)  # orthogonal and new
    assert not torch.equal(student["value_head.weight"], source["value_head.weight"])
    copied = {name: one for name, one in source.items() if "stem" not in name}  # step 2
    assert_same(dict(teacher), copied)
    assert all(one.dtype == torch.bfloat16 for one in teacher.values())  # step 3
    assert not any(one.requires_grad for one in teacher.values())
    anchor = entered.companions["kl_anchor"]["model_record"]  # step 4
    assert_same(dict(anchor), {n: one for n, one in source.items() if "policy" in n})
    assert {"optimizer_record", "scheduler_record", "rng_state"}.isdisjoint(entered.state)  # 5
    first = Training(2, seeds_of(2))
    assert first.optimizer.state_dict()["state"] == {}
    children = {name: one.spawn_key for name, one in entered.seeds.items()}  # step 6
    assert children == {
        "model_init": (2, 0),
        "data_loader": (2, 1),
        "suit_augmentation": (2, 2),
        "game_engine": (2, 3),
    }
    assert all(one.entropy == SEED for one in entered.seeds.values())
    assert "metrics" not in entered.state  # step 7
    assert entered.state["global_step"] == gate.step
    phase = run.manifest.entered("2")
    assert phase is not None
    assert phase.ready == acts.READY
    assert [row.change for row in phase.rows] == [row.change for row in entered.report]


def test_second_transition_row_by_row(hydra: Life[Hydra], read_hydra: Reader) -> None:
    run = read_hydra(acts.league)
    entered, gate = hydra.story.entered[3], run.pins.gates.get("distill_best")
    assert entered.checkpoint.digest == gate.digest  # step 1
    source = gate.load()
    assert not any(
        source["teacher_state_dict"][mask].any() for mask in ("mask_opp", "mask_wall")
    )  # step 2
    assert set(entered.state) == {"model_record", "global_step", "config", "checkpoint_version"}
    assert_same(entered.state["model_record"], source["model_record"])  # 3: no teacher, no critic
    anchors = [one for one in run.pool.roster() if one.frozen]  # step 4
    assert [one.gate for one in anchors] == ["distill_best", "bc_best"]
    assert_same(entered.companions["kl_anchor"]["model_record"], source["model_record"])  # step 5
    children = {name: one.spawn_key for name, one in entered.seeds.items()}  # step 7
    assert children == {"model_init": (3, 0), "game_engine": (3, 3), "opponent_pool": (3, 4)}
    assert {(one.mu, one.sigma) for one in anchors} == {(25.0, 25 / 3)}  # step 8


def test_seeds_are_children_of_the_phase(hydra: Life[Hydra], read_hydra: Reader) -> None:
    read_hydra(acts.second_transition)
    components = {"model_init": 0, "data_loader": 1, "suit_augmentation": 2, "game_engine": 3}
    for phase, numbers in (
        (2, components),
        (3, {"model_init": 0, "game_engine": 3, "opponent_pool": 4}),
    ):
        spawned = np.random.SeedSequence(SEED, spawn_key=(phase,)).spawn(5)
        found = hydra.story.entered[phase].seeds
        assert {name: list(one.generate_state(8)) for name, one in found.items()} == {
            name: list(spawned[number].generate_state(8)) for name, number in numbers.items()
        }


def test_every_checkpoint_has_the_policy_that_it_may_not_forget(read_hydra: Reader) -> None:
    run = read_hydra(acts.league)
    for phase, gate, part in ((2, "bc_best", "policy"), (3, "distill_best", "")):
        source = run.pins.gates.get(gate).load()["model_record"]
        wanted = {name: one for name, one in source.items() if part in name}
        anchors = {one.companion("kl_anchor").digest for one in run.checkpoints(phase)}
        assert len(anchors) == 1  # frozen: one state for all checkpoints
        latest = run.latest(phase)
        assert latest is not None
        assert_same(dict(latest.companion("kl_anchor").load()["model_record"]), wanted)


def test_a_process_that_dies_in_a_transition_repeats_it(
    hydra: Life[Hydra], read_hydra: Reader
) -> None:
    run = read_hydra(acts.first_transition)
    assert {after for _, after in hydra.story.transition_deaths} == {False, True}
    assert len(hydra.story.transition_deaths) >= 4
    entries = [a for c in run.history.commits() for a in c.actions if isinstance(a, EnterPhase)]
    assert len([one for one in entries if one.to_phase == "2"]) == 1


def refused(hydra: Life[Hydra], copy: str, to: int, match: str, **options: Any) -> None:
    """Check that a transition is refused, and that nothing is committed then."""
    with hydra.story.copies[copy].open() as reg:
        run = reg.run(hydra.story.run_id)
        before = run.refresh().manifest
        given = {"targets": {"model_record": Student()}, "metrics": acts.READY, **options}
        if to == 2:
            given["enable"] = acts.SWITCHED
        with pytest.raises(IncompatibleState, match=match):
            run.phases.transition(to, **given)
        assert run.refresh().manifest == before


@in_a_folder
def test_strict_loading_refuses_another_architecture(
    hydra: Life[Hydra], read_hydra: Reader
) -> None:
    read_hydra(acts.second_gate)
    more = Student()
    more.extra_head = torch.nn.Linear(3, 3).bfloat16()
    for copy, to in (("phase 1", 2), ("phase 2", 3)):
        refused(hydra, copy, to, "extra_head.weight is not in", targets={"model_record": more})
        wider = {"model_record": Student(planes=9)}
        refused(hydra, copy, to, r"stem.weight is bfloat16\[32, 8, 3\], target", targets=wider)


@in_a_folder
def test_readiness_is_checked_before_phase_2(hydra: Life[Hydra], read_hydra: Reader) -> None:
    read_hydra(acts.first_transition)
    late = {**acts.READY, "discard_accuracy": 0.649}
    refused(hydra, "phase 1", 2, "discard_accuracy is 0.649, must be at least 0.65", metrics=late)
    refused(hydra, "phase 1", 2, "deal_in_rate is not known", metrics={"discard_accuracy": 0.9})


@in_a_folder
def test_phases_are_entered_in_order(hydra: Life[Hydra], read_hydra: Reader) -> None:
    run_id = read_hydra(acts.second_gate).id
    with hydra.story.copies["phase 2"].open() as reg:
        run = reg.run(run_id)
        training = acts.resume(run)
        training.phase = 3
        with pytest.raises(Conflict, match="declares a transition"):
            run.save(training, phase=3, step=10**7)
        with pytest.raises(Conflict, match="this phase is over"):
            run.save(training, phase=1, step=10**7)
