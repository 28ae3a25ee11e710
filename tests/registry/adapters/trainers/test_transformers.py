"""The HF Trainer: killed for real, resumed bit for bit; adapters, export, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.registry.adapters.trainers.children import KILLED, Children, needs
from tests.support.loads import components

pytestmark = needs("transformers", "accelerate", "peft")
#: Of 12 steps, 6 an epoch: whether it is an adapter, where it is killed, and how it is saved.
CASES = [
    pytest.param(False, 9, {}, [4, 8, 12], id="within an epoch"),
    pytest.param(
        True,
        10,
        {
            "save_strategy": "epoch",
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 4,
            "logging_steps": 3,
        },
        [3, 6, 9, 12],
        id="an adapter, after an epoch",
        marks=pytest.mark.soak,
    ),
]


def untimed(reg: holdfast.Registry, ref: str) -> Any:
    """Return the Trainer's state without the times in its log, which always differ."""
    state = reg.checkpoint(ref).load(only="trainer")["trainer"]
    state["log_history"] = [
        {name: value for name, value in entry.items() if not name.endswith(("runtime", "second"))}
        for entry in state["log_history"]
    ]
    return state


@pytest.mark.parametrize(("adapter", "strike", "options", "steps"), CASES)
def test_a_killed_training_continues_bit_for_bit(
    reg: holdfast.Registry,
    children: Children,
    tmp_path: Path,
    adapter: bool,
    strike: int,
    options: Any,
    steps: list[int],
) -> None:
    def train(name: str, until: int | None) -> int:
        target = "transformers_training.train"
        return children.run(target, reg.url, name, tmp_path / "out", adapter, until, options)

    assert train("straight", None) == 0
    assert train("killed", strike) == KILLED
    assert set(components(reg, "killed")) <= {one for one in steps if one < strike}
    assert components(reg, "killed")
    assert train("killed", None) == 0
    straight, killed = components(reg, "straight"), components(reg, "killed")
    assert list(killed) == steps
    for step in steps:
        assert untimed(reg, f"killed/main/step{step}") == untimed(reg, f"straight/main/step{step}")
        for parts in (killed[step], straight[step]):
            del parts["trainer"]
        assert killed[step] == straight[step]
    latest = reg.checkpoint("killed/latest")
    assert "loss" in latest.metrics
    kept = latest.load(only="trainer")["trainer"]["stateful_callbacks"]["EarlyStoppingCallback"]
    assert kept["attributes"] == {"early_stopping_patience_counter": 5}
    name = "adapter" if adapter else "model"
    assert latest.components.keys() & {"model", "adapter"} == {name}
    assert any(path.startswith("optimizer/state/0/exp_avg") for path in latest)


@pytest.mark.parametrize(
    ("strike", "left", "all_steps"),
    [
        (6, [5, 7], [5, 7, 10, 12]),
        pytest.param(4, [5], [5, 10, 12], marks=pytest.mark.soak),
    ],
)
def test_sigterm_saves_the_step_and_the_requeued_training_continues_bit_for_bit(
    reg: holdfast.Registry,
    children: Children,
    tmp_path: Path,
    strike: int,
    left: list[int],
    all_steps: list[int],
) -> None:
    target = "transformers_training.train_with_checkpointer"
    assert children.run(target, reg.url, "straight", tmp_path / "out", None) == 0
    assert children.run(target, reg.url, "asked", tmp_path / "out", strike) == 143
    assert list(components(reg, "asked")) == left
    assert reg.run("asked").status == "interrupted"
    assert children.run(target, reg.url, "asked", tmp_path / "out", None) == 0
    straight, asked = components(reg, "straight"), components(reg, "asked")
    assert (list(straight), list(asked)) == ([5, 10, 12], all_steps)
    assert all(asked[12][name] == straight[12][name] for name in ("model", "optimizer", "rng"))


def test_a_trainer_may_leave_by_itself_when_it_is_asked_to_stop(
    reg: holdfast.Registry, children: Children, tmp_path: Path
) -> None:
    target = "transformers_training.train_with_checkpointer"
    assert children.run(target, reg.url, "asked", tmp_path / "out", 6, False) == 0
    assert list(components(reg, "asked")) == [5, 7, 8]  # the step that had begun is saved too
    assert reg.run("asked").status == "interrupted"


def test_a_resume_that_skips_no_batches_is_told(
    reg: holdfast.Registry, children: Children, tmp_path: Path
) -> None:
    assert children.run("transformers_training.ignore_data", reg.url, tmp_path / "out") == 0


def test_what_is_exported_is_read_by_from_pretrained(
    reg: holdfast.Registry, children: Children, tmp_path: Path
) -> None:
    short = {"max_steps": 2, "save_steps": 2}
    for name, adapter in (("full", False), ("adapted", True)):
        target = "transformers_training.train"
        assert children.run(target, reg.url, name, tmp_path / "out", adapter, None, short) == 0
    target = "transformers_training.write_and_read"
    folder = tmp_path / "exported"
    assert children.run(target, reg.url, "full/latest", "adapted/latest", folder) == 0


def test_what_is_refused(reg: holdfast.Registry, children: Children, tmp_path: Path) -> None:
    assert children.run("transformers_training.refuse", reg.url, tmp_path / "out") == 0
