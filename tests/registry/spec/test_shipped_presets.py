"""The presets that are shipped say what their documents say, and docs/presets.md says it all."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast import Monitor
from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.spec import (
    Draw,
    DtypeRule,
    Gate,
    Phase,
    Pool,
    Readiness,
    Retention,
    Row,
    RunSpec,
    Stream,
    Tier,
    Transition,
)
from holdfast.registry.spec.presets import load_preset, preset_names
from tests.support.states import same

DOCS = Path(__file__).parents[3] / "docs" / "presets.md"
EXAMPLE = re.findall(r"```toml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)[0]


# Hydra


@pytest.fixture(scope="module")
def hydra() -> RunSpec:
    return load_preset("hydra")


CORE = {
    "model": torch.ones(2, dtype=torch.bfloat16),
    "optimizer": {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)},
    "scheduler": {"last_epoch": 1},
}
REST = {
    "rng_state": 1,
    "global_step": 10_000,
    "phase": 1,
    "config": {},
    "metrics": {"heldout_ce": 0.5},
    "timestamp": 1_700_000_000,
    "checkpoint_version": 1,
}


def core(ending: str = "record") -> dict:
    named = {f"{name}_{ending}": {"w": value} for name, value in CORE.items()}
    return {**named, f"optimizer_{ending}": {"state": {0: CORE["optimizer"]}}, **REST}


def test_hydra_has_the_cadence_retention_and_monitors_of_its_table(hydra):
    assert [(one.name, one.counter, one.save_every) for one in hydra.phases] == [
        ("1", "training_step", 10_000),
        ("2", "ppo_update", 500),
        ("3", "ppo_update", 500),
    ]
    assert [one.monitors for one in hydra.phases] == [
        (Monitor(metric="heldout_ce", mode="min", name="heldout_ce"),),
        (Monitor(metric="mu - 3*sigma", mode="max", name="rating"),),
        (Monitor(metric="mu - 3*sigma", mode="max", name="rating"),),
    ]
    for phase in hydra.phases:
        assert phase.retention is not None
        assert (phase.retention.last, phase.retention.counts_protected) == (20, True)


def test_hydra_has_two_gates_and_a_pool_with_its_composition(hydra):
    assert {one.name: one.phase for one in hydra.gates} == {"bc_best": "1", "distill_best": "2"}
    pool = hydra.pool
    assert (pool.phase, pool.size, pool.promote_on_save) == ("3", 20, True)
    assert (pool.seed_child, pool.cache) == (4, 5)
    assert [(one.kind, one.weight, one.name) for one in pool.draws] == [
        ("self", 50, None),
        ("roster", 30, None),
        ("frozen", 20, "distill_best"),
    ]


@pytest.mark.parametrize("ending", ["record", "state_dict"])
def test_a_state_of_hydra_needs_its_ten_keys_of_either_stack(reg, ending):
    run = reg.create_run("hydra", preset="hydra")
    state = core(ending)
    for key in state:
        lacking = {name: value for name, value in state.items() if name != key}
        with pytest.raises(IncompatibleState, match=f"missing: .*{key}"):
            run.save(lacking, step=1)
    run.save(state, step=10_000, phase=1)


def test_phases_2_and_3_of_hydra_need_their_own_keys_and_the_anchor(reg):
    anchor = {"kl_anchor": {"w": np.ones(2)}}
    for phase, key in ((2, "teacher_state_dict"), (3, "opponent_pool_metadata")):
        run = reg.create_run(f"hydra{phase}", preset="hydra")
        with pytest.raises(IncompatibleState, match=f"missing: {key}"):
            run.exchange.push(core(), step=1, phase=phase, companions=anchor)
        with pytest.raises(IncompatibleState, match="kl_anchor"):
            run.exchange.push({**core(), key: {}}, step=1, phase=phase)
        run.exchange.push({**core(), key: {}}, step=1, phase=phase, companions=anchor)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_record", {"head": {"w": torch.ones(2)}}),
        ("optimizer_record", {"state": {0: {"exp_avg": torch.ones(2, dtype=torch.bfloat16)}}}),
        ("optimizer_record", {"state": {0: {"exp_avg_sq": torch.ones(2, dtype=torch.float16)}}}),
        ("teacher_state_dict", {"w": torch.ones(2)}),
    ],
)
def test_hydra_has_bf16_models_and_fp32_moments(reg, key, value):
    run = reg.create_run("hydra", preset="hydra")
    anchor = {"kl_anchor": {"w": np.ones(2)}}
    state = {**core(), "teacher_state_dict": {}, key: value}
    with pytest.raises(IncompatibleState, match=f"{key}/.* must be (bfloat16|float32)"):
        run.save(state, step=1, phase=2, companions=anchor)


def test_the_moments_of_a_real_adamw_are_found_by_their_paths(reg):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {**core("state_dict"), "optimizer_state_dict": optimizer.state_dict()}
    run = reg.create_run("hydra", preset="hydra")
    run.save(state, step=1)
    optimizer.state[model.weight]["exp_avg"] = torch.ones(1, 2, dtype=torch.bfloat16)
    state["optimizer_state_dict"] = optimizer.state_dict()
    with pytest.raises(IncompatibleState, match="optimizer_state_dict/state/0/exp_avg is bf"):
        run.save(state, step=2)


def test_equal_trainings_of_hydra_have_equal_ids(reg):
    run = reg.create_run("hydra", preset="hydra")
    first = run.save(core(), step=1)
    again = {**core(), "timestamp": 1_800_000_000, "metrics": {"heldout_ce": 0.4}}
    second = run.save(again, step=2)
    assert first.digest == second.digest
    assert same_keys(second.load(), again)


def same_keys(a: dict, b: dict) -> bool:
    plain = ("timestamp", "metrics", "global_step", "phase")
    return list(a) == list(b) and all(a[key] == b[key] for key in plain)


def test_weights_of_hydra_with_nan_do_not_become_latest(reg):
    run = reg.create_run("hydra", preset="hydra")
    run.save(core(), step=1)
    broken = core()
    broken["model_record"]["w"] = torch.tensor([1, float("nan")], dtype=torch.bfloat16)
    assert run.save(broken, step=2).nonfinite == ("model_record/w",)
    assert run.latest().step == 1


@pytest.mark.parametrize("to", ["2", "3"])
def test_every_key_of_hydra_has_a_row_at_each_transition(hydra, to):
    (way,) = (one for one in hydra.transitions if one.to_phase == to)
    assert way.source == {"2": "gates/bc_best", "3": "gates/distill_best"}[to]
    named = {row.part for row in way.rows if not row.is_pattern}
    own = {"2": (), "3": ("teacher_state_dict",)}[to]
    assert {*hydra.required_keys, *own} <= named
    assert all(row.why for row in way.rows)
    kept = {row.companion for row in way.rows if row.companion}
    assert kept == set(hydra.phase(to).companions)
    assert not {*way.strict} - named


def test_what_hydra_carries_and_resets(hydra):
    changes = [
        {(row.part.split(" ")[0], row.change, row.to or row.companion) for row in way.rows}
        for way in hydra.transitions
    ]
    model, moments = "model_record", "optimizer_record"
    common = {
        (model, "carry", None),
        (moments, "discard", None),
        ("scheduler_record", "discard", None),
        ("rng_state", "reseed", None),
        ("global_step", "carry", None),
        ("phase", "reset", None),
        ("config", "carry", None),
        ("metrics", "reset", None),
        ("timestamp", "discard", None),
        ("checkpoint_version", "carry", None),
    }
    assert changes[0] == common | {
        ("model_record/*value*", "reset", None),
        (model, "freeze", "teacher_state_dict"),
        ("teacher_state_dict/*stem*", "reset", None),
        ("model_record/*policy*", "freeze", "kl_anchor"),
    }
    assert changes[1] == common | {
        (model, "freeze", "kl_anchor"),
        ("teacher_state_dict", "discard", None),
        ("opponent_pool_metadata", "reset", None),
        ("teacher_state_dict/*stem*", "carry", "teacher_stem_state_dict"),
    }
    assert [way.conditions for way in hydra.transitions] == [
        {"readiness", "new_value_head"},
        {"pgoi"},
    ]
    assert [way.anchors for way in hydra.transitions] == [(), ("distill_best", "bc_best")]


def test_the_files_of_hydra_have_the_names_of_its_document(hydra):
    layout = hydra.layout
    assert layout["checkpoint"].format(phase=2, step=45_000) == (
        "phase2/checkpoints/ckpt_phase2_step00045000.pt"
    )
    assert layout["pool"].format(version=42, step=120_000) == (
        "phase3/opponent_pool/pool_v0042_step00120000.pt"
    )
    assert layout["gate"].format(name="bc_best") == "gates/bc_best.pt"
    assert layout["latest"].format(phase=1) == "phase1/checkpoints/latest.pt"
    assert layout["artifact"].format(name="grp") == "grp/grp.pt"


# ADR-004


def epoch(number: int, **more: object) -> dict:
    return {
        "version": "1.0.0",
        "timestamp": f"2025-10-25T00:00:{number:02d}",
        "git_commit": f"{number:040x}",
        "model_state_dict": {"w": np.full(3, number)},
        "optimizer_state_dict": {},
        "epoch": number,
        "config": {"d_model": 8},
        "metadata": {"device": "CPU"},
        **more,
    }


def test_adr004_keeps_the_last_three_and_every_milestone(reg):
    run = reg.create_run("adr", preset="adr004")
    accuracy = [0.5, 0.4, 0.6, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
    loss = [1.0, 1.0, 1.0, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    for number, (high, low) in enumerate(zip(accuracy, loss, strict=True), 1):
        run.save(epoch(number), step=number, metrics={"accuracy": high, "loss": low})
    assert {one.step: one.tier for one in run.checkpoints()} == {
        **dict.fromkeys((1, 3, 4, 5, 10), "milestone"),
        **dict.fromkeys((11, 12, 13), "training"),
    }
    assert run.best().step == 3
    assert reg.checkpoint("adr/best/loss").step == 4
    assert run.phases.is_due(1)


def test_adr004_demands_what_its_loader_demands(reg):
    run = reg.create_run("adr", preset="adr004")
    for key in ("version", "model_state_dict", "config"):
        lacking = {name: value for name, value in epoch(1).items() if name != key}
        with pytest.raises(IncompatibleState, match=f"missing: {key}"):
            run.save(lacking, step=1)
    run.save({key: epoch(1)[key] for key in ("version", "model_state_dict", "config")}, step=1)


def test_adr004_reads_the_metrics_from_the_last_entry_of_the_history(reg):
    run = reg.create_run("adr", preset="adr004")
    accuracy = [0.5, 0.6, 0.9, *[0.7] * 6]
    for end in range(1, 10):
        history = [{"accuracy": one, "note": "x"} for one in accuracy[:end]]
        run.save(epoch(end, metrics_history=history), step=end)
    assert run.best().step == 3
    assert run.best().tier == "milestone"
    by_name = epoch(10, metrics_history={"accuracy": [0.1, 0.95], "loss": [], "at": "x"})
    assert run.save(by_name, step=10).metrics == {"accuracy": 0.95}
    given = epoch(11, metrics_history=[{"accuracy": 0.1, "loss": 0.2}])
    assert run.save(given, step=11, metrics={"accuracy": 0.3}).metrics == {
        "accuracy": 0.3,
        "loss": 0.2,
    }
    both = epoch(12, metrics_history=[{"loss": 0.2}], metrics={"accuracy": 0.4})
    assert run.save(both, step=12).metrics == {"accuracy": 0.4}


def test_equal_trainings_of_adr004_have_equal_ids(reg):
    run = reg.create_run("adr", preset="adr004")
    first = run.save(epoch(1, metrics={"accuracy": 0.5}), step=1)
    elsewhere = epoch(1, metrics={}, timestamp="later", git_commit=None, metadata={"device": "H"})
    second = run.save(elsewhere, step=2)
    assert first.digest == second.digest
    assert same(second.load(), elsewhere)
    assert run.save(epoch(1, metrics_history=[0.1]), step=3).digest != first.digest


def test_adr004_releases_what_inference_needs_with_the_fields_of_its_card():
    preset = load_preset("adr004")
    assert preset.inference == ("model_state_dict", "config")
    assert preset.card_fields == (
        "description",
        "dataset",
        "training_date",
        "intended_use",
        "performance",
    )
    layout = preset.layout
    assert layout["training"].format(step=10, global_step=12_345) == (
        "training/epoch_0010_step_00012345.pt"
    )
    best = layout["milestone_best"].format(metric="accuracy", value=0.92341, step=7)
    assert best == "milestones/best_accuracy_0.9234_epoch_0007.pt"
    assert layout["release"].format(version="1.0.1") == (
        "production/bayesian_transformer_v1.0.1.pt"
    )


# docs/presets.md


def test_the_page_explains_every_field():
    text = DOCS.read_text(encoding="utf-8")
    for record in (
        *(RunSpec, Phase, Tier, Retention, Gate, Pool, Draw, Stream, DtypeRule, Monitor),
        *(Transition, Row, Readiness),
    ):
        for field in record.fields():
            assert f"`{field}`" in text, f"{record.__name__}.{field}"
    for name in preset_names():
        assert f"| `{name}` |" in text


def test_the_example_of_the_page_says_most_of_what_can_be_said():
    assert "pool" not in EXAMPLE
    for field in set(RunSpec.fields()) - {"pool", "layout", "monitors", "retention"}:
        assert re.search(rf"^(\[\[?)?{field}\b", EXAMPLE, re.MULTILINE), field


def test_the_example_of_the_page_works(reg, tmp_path):
    path = tmp_path / "head.toml"
    path.write_text(EXAMPLE, encoding="utf-8")
    run = reg.create_run("tuned", preset=path, seed=7)

    def state(i: int) -> dict:
        model = torch.nn.ModuleDict({"body": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 2)})
        return {
            "model": model.state_dict(),
            "optimizer": {"state": {0: {"exp_avg": torch.full((4,), i, dtype=torch.float32)}}},
            "rng": i,
            "config": {"lr": 0.1},
            "schema": "1.0",
            "saved_at": f"{i} o'clock",
        }

    for i, loss in ((1000, 0.4), (2000, 0.3), (3000, 0.6)):
        run.save(state(i), step=i, metrics={"loss": loss}, streams={"samples": [{"step": i}]})
    assert run.phases.current == "pretrain"
    run.pins.gates.set("pretrained")
    with pytest.raises(InvalidInput, match="no such gate"):
        run.pins.gates.set("finetuned")
    begun = run.phases.transition("finetune", targets={"model": state(0)["model"]})
    assert begun.checkpoint.step == 2000
    assert list(begun.state) == ["model", "config", "schema"]
    assert list(begun.state["model"]) == ["body.weight", "body.bias"]
    assert {name: one.spawn_key for name, one in begun.seeds.items()} == {
        "data": (2, 0),
        "dropout": (2, 1),
    }
    assert [one.label for one in run.manifest.stream("samples").archives] == ["pretrain"]
    saved = run.save(state(1), step=1, metrics={"accuracy": 0.5})
    assert saved.tier == "milestone"
    assert saved.companion("start").load()["model"]["head.bias"].dtype == torch.bfloat16
