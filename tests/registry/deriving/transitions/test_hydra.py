"""Both transitions of Hydra, by the shipped preset and with real modules (document of Hydra)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import Run
from holdfast.registry.curation.pool.ratings import DEFAULT
from holdfast.registry.errors import Conflict, IncompatibleState, InvalidInput
from tests.support.states import same

READY = {"discard_accuracy": 0.65, "average_placement": 2.55, "deal_in_rate": 0.15}


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value, self.tenpai = (nn.Linear(8, n) for n in (5, 1, 3))


class Student(nn.Module):
    def __init__(self, planes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv1d(planes, 8, 3)
        self.block = nn.Conv1d(8, 8, 3)
        self.norm = nn.GroupNorm(2, 8)
        self.head = Heads()
        self.to(torch.bfloat16)


class Teacher(Student):
    def __init__(self, mask: float) -> None:
        super().__init__(planes=12)
        self.register_buffer("mask_opp", torch.full((4,), mask, dtype=torch.bfloat16))
        self.register_buffer("mask_wall", torch.full((4,), mask, dtype=torch.bfloat16))


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return same(dict(a), dict(b))


def moments(model: nn.Module) -> dict[str, Any]:
    """Return the state of an AdamW over fp32 master weights after one step."""
    masters = [param.detach().float().requires_grad_() for param in model.parameters()]
    optimizer = torch.optim.AdamW(masters)
    sum(master.square().sum() for master in masters).backward()
    optimizer.step()
    return optimizer.state_dict()


class Trainer:
    """What Hydra keeps, in the names of either stack.

    Attributes:
        run: The run.
        student: Its student.
    """

    def __init__(self, run: Run, rust: bool) -> None:
        names = ("record", "record", "record") if rust else ("state_dict",) * 3
        self.keys = [
            f"{part}_{name}"
            for part, name in zip(("model", "optimizer", "scheduler"), names, strict=True)
        ]
        self.run, self.student = run, Student()

    @property
    def model(self) -> str:
        return self.keys[0]

    def save(self, step: int, phase: int, metrics: dict[str, float] | None = None, **more: Any):
        torch.manual_seed(step)
        with torch.no_grad():
            for param in self.student.parameters():
                param.add_(torch.randn(param.shape).to(param.dtype))
        values = (self.student.state_dict(), moments(self.student), {"last_epoch": step})
        state = {
            **dict(zip(self.keys, values, strict=True)),
            "rng_state": {"torch": torch.get_rng_state(), "cursor": {"epoch": 0, "file": step}},
            "global_step": step,
            "phase": phase,
            "config": {"blocks": 40},
            "metrics": metrics or {},
            "timestamp": 1_700_000_000 + step,
            "checkpoint_version": 1,
        }
        return self.run.save({**state, **more}, step=step, metrics=metrics)

    def over(self, to: int, **options: Any):
        given: dict[str, Any] = {"targets": {self.model: Student()}}
        if to == 2:
            given["enable"] = ["readiness", "new_value_head"]
        return self.run.phases.transition(to, **given | options)

    def clone(self) -> None:
        """Live through phase 1."""
        for step, loss in ((10_000, 0.5), (20_000, 0.3), (30_000, 0.4)):
            self.save(step, 1, {"heldout_ce": loss, **READY})
        self.run.pins.gates.set("bc_best")

    def distil(self, mask: float = 0.0) -> None:
        """Live through phase 2."""
        for step, mu in ((30_500, 26.0), (31_000, 27.0), (31_500, 26.5)):
            teacher = Teacher(mask).state_dict()
            self.save(step, 2, {"mu": mu, "sigma": 1.0}, teacher_state_dict=teacher)
        self.run.pins.gates.set("distill_best")


@pytest.fixture(params=["rust", "python"])
def hydra(reg, request) -> Trainer:
    return Trainer(
        reg.create_run("hydra", preset="hydra", seed=0xA1B2C3D4), request.param == "rust"
    )


@pytest.fixture
def rust(reg) -> Trainer:
    return Trainer(reg.create_run("hydra", preset="hydra", seed=0xA1B2C3D4), rust=True)


def commits(run: Run) -> int:
    return len(list(run.refresh().history.commits()))


def test_from_cloning_to_distillation(hydra):
    hydra.clone()
    cloned = hydra.run.pins.gates.get("bc_best").load()
    student = cloned[hydra.model]
    entered = hydra.over(2)
    assert entered.checkpoint.step == 20_000
    assert sorted(entered.state) == sorted(
        [hydra.model, "teacher_state_dict", "global_step", "config", "checkpoint_version"]
    )
    assert entered.state["global_step"] == 20_000
    kept = {key: value for key, value in student.items() if "value" not in key}
    assert equal(entered.state[hydra.model], kept)
    teacher = entered.state["teacher_state_dict"]
    assert equal(teacher, {key: value for key, value in student.items() if "stem" not in key})
    (anchor,) = entered.companions["kl_anchor"].values()
    assert equal(anchor, {key: student[key] for key in student if "policy" in key})
    assert {name: one.spawn_key for name, one in entered.seeds.items()} == {
        "model_init": (2, 0),
        "data_loader": (2, 1),
        "suit_augmentation": (2, 2),
        "game_engine": (2, 3),
    }
    reset = {one.part: one.paths for one in entered.report if one.change == "reset"}
    model = hydra.model
    assert reset[f"{model}/*value*"] == (f"{model}/head.value.weight", f"{model}/head.value.bias")
    assert reset["teacher_state_dict/*stem*"] == (
        "teacher_state_dict/stem.weight",
        "teacher_state_dict/stem.bias",
    )
    assert hydra.run.best(phase=2) is None


def test_what_is_carried_loads_into_the_student(rust):
    rust.clone()

    def fresh_value_head():
        head = nn.Linear(8, 1)
        nn.init.orthogonal_(head.weight)
        return {f"head.value.{name}": one.bfloat16() for name, one in head.state_dict().items()}

    def fresh_stem():
        stem = nn.Conv1d(12, 8, 3).bfloat16().state_dict()
        return {f"stem.{name}": one for name, one in stem.items()}

    entered = rust.over(
        2,
        initialise={
            "model_record/*value*": fresh_value_head,
            "teacher_state_dict/*stem*": fresh_stem,
        },
    )
    Student().load_state_dict(entered.state["model_record"])
    Student(planes=12).load_state_dict(entered.state["teacher_state_dict"])
    assert not any(one.requires_grad for one in entered.state["teacher_state_dict"].values())


def test_the_anchor_of_phase_2_stays_beside_its_checkpoints(rust):
    rust.clone()
    anchor = rust.over(2).companions["kl_anchor"]
    rust.distil()
    for checkpoint in rust.run.checkpoints(phase=2):
        kept = checkpoint.companion("kl_anchor").load()
        assert equal(kept["model_record"], anchor["model_record"])
    assert rust.run.best(phase=2).step == 31_000


@pytest.mark.parametrize("pgoi", [False, True])
def test_from_distillation_to_the_league(hydra, pgoi):
    hydra.clone()
    hydra.over(2)
    hydra.distil()
    source = hydra.run.pins.gates.get("distill_best").load()
    entered = hydra.over(3, enable=["pgoi"] if pgoi else [])
    parts = [hydra.model, "global_step", "config", "checkpoint_version"]
    parts += ["teacher_stem_state_dict"] if pgoi else []
    assert sorted(entered.state) == sorted(parts)
    assert equal(entered.state[hydra.model], source[hydra.model])
    assert equal(entered.companions["kl_anchor"][hydra.model], source[hydra.model])
    if pgoi:
        stem = entered.state["teacher_stem_state_dict"]
        teacher = source["teacher_state_dict"]
        assert equal(stem, {key: teacher[key] for key in ("stem.weight", "stem.bias")})
    assert {name: one.spawn_key for name, one in entered.seeds.items()} == {
        "model_init": (3, 0),
        "game_engine": (3, 3),
        "opponent_pool": (3, 4),
    }
    Student().load_state_dict(entered.state[hydra.model])


def test_the_league_begins_with_two_anchors(hydra):
    hydra.clone()
    hydra.over(2)
    hydra.distil()
    hydra.over(3)
    run = hydra.run
    anchors = run.manifest.roster()
    assert [(one.gate, one.phase, one.step, one.frozen) for one in anchors] == [
        ("distill_best", "2", 31_000, True),
        ("bc_best", "1", 20_000, True),
    ]
    assert {(one.mu, one.sigma) for one in anchors} == {(DEFAULT.mu, DEFAULT.sigma)}
    assert list(run.pool.entry(1).load()) == [hydra.model]
    assert run.best(phase=3) is None
    steps = range(32_000, 32_000 + 22 * 500, 500)
    with pytest.warns(UserWarning, match="none has a value of rating"):
        _ = [hydra.save(step, 3, opponent_pool_metadata={}) for step in steps]
    playing = run.manifest.roster()
    assert playing[:2] == anchors
    assert [one.version for one in playing[2:]] == list(range(5, 25))
    anchored = run.latest().companion("kl_anchor").load()
    assert equal(anchored[hydra.model], run.pins.gates.get("distill_best").load()[hydra.model])


def test_the_teacher_is_never_in_the_student(hydra):
    hydra.clone()
    begun = hydra.over(2)
    hydra.distil()
    names = set(Student().state_dict())
    assert set(begun.state[hydra.model]) < names
    for checkpoint in hydra.run.checkpoints():
        paths = {path for path in checkpoint.tensors() if path.startswith(hydra.model)}
        assert paths == {f"{hydra.model}/{name}" for name in names}
    league = hydra.over(3)
    assert not any("mask" in key for key in league.state[hydra.model])
    hydra.save(32_000, 3, opponent_pool_metadata={})
    assert not any("teacher" in path for path in hydra.run.latest().tensors())


def in_phase_2(hydra: Trainer, **options: Any) -> None:
    hydra.clone()
    hydra.over(2)
    hydra.distil(**options)


def cloned(hydra: Trainer) -> None:
    hydra.clone()


def cloned_badly(hydra: Trainer) -> None:
    hydra.save(10_000, 1, {"heldout_ce": 0.3, **READY, "deal_in_rate": 0.16})
    hydra.run.pins.gates.set("bc_best")


def cloned_without_a_gate(hydra: Trainer) -> None:
    hydra.save(10_000, 1, {"heldout_ce": 0.3, **READY})


def masked(hydra: Trainer) -> None:
    in_phase_2(hydra, mask=1e-3)


@pytest.mark.parametrize(
    ("live", "to", "options", "error", "told"),
    [
        (cloned_badly, 2, {}, IncompatibleState, r"deal_in_rate is 0\.16, must be at most 0\.15"),
        (cloned, 2, {"targets": {}}, InvalidInput, "no target is given"),
        (
            cloned,
            2,
            {"targets": {"model_record": Student(planes=5)}},
            IncompatibleState,
            r"model_record/stem\.weight is bfloat16\[8, 4, 3\], target bfloat16\[8, 5, 3\]",
        ),
        (
            cloned,
            2,
            {"targets": {"model_record": Teacher(0)}},
            IncompatibleState,
            r"model_record/mask_opp is not in the source",
        ),
        (
            cloned,
            2,
            {"targets": {"model_record": Student().float()}},
            IncompatibleState,
            "and 8 more|target float32",
        ),
        (masked, 3, {}, IncompatibleState, "mask_opp is not zero; .*mask_wall is not zero"),
        (in_phase_2, 3, {"enable": ["PGOI"]}, InvalidInput, "enable: PGOI.*pgoi"),
        (in_phase_2, 2, {}, Conflict, "this phase is under way"),
        (cloned, 3, {}, InvalidInput, "from phase 1 to phase 3.*expected to 2"),
    ],
)
def test_what_does_not_fit_changes_nothing(
    rust, live: Callable[[Trainer], None], to, options, error, told
):
    live(rust)
    before, phase = commits(rust.run), rust.run.phases.current
    with pytest.raises(error, match=told):
        rust.over(to, **options)
    assert (commits(rust.run), rust.run.phases.current) == (before, phase)


def test_a_phase_is_not_entered_but_by_its_transition(rust):
    rust.clone()
    with pytest.raises(Conflict, match=r"phases.transition\('2'\) first"):
        rust.run.save(rust.run.latest().load() | {"teacher_state_dict": {}}, step=1, phase=2)
