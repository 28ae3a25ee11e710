"""Lightning: killed for real, resumed bit for bit; refs, tags, evictions, ranks, refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.registry.adapters.trainers.children import KILLED, Call, Children, Ranks, needs
from tests.support.loads import components

pytestmark = needs("lightning", "torchdata")
#: Of 16 steps, 4 an epoch: where the process is killed, and what the run then has.
CASES = [
    pytest.param(True, 10, {"every_n_train_steps": 3}, [3, 6, 9], id="within an epoch"),
    pytest.param(
        *(False, 10, {"every_n_epochs": 1}, [4, 8]),
        id="after an epoch, any loader",
        marks=pytest.mark.soak,
    ),
    pytest.param(
        *(True, 13, {"every_n_train_steps": 4, "background": True}, None),
        id="in the background",
        marks=pytest.mark.soak,
    ),
]


@pytest.mark.parametrize(("stateful", "strike", "cadence", "left"), CASES)
def test_a_killed_training_continues_bit_for_bit(
    reg: holdfast.Registry, children: Children, stateful: bool, strike: int, cadence: Any, left: Any
) -> None:
    fit = "lightning_training.fit"
    assert children.run(fit, reg.url, "straight", stateful, None, cadence) == 0
    assert children.run(fit, reg.url, "killed", stateful, strike, cadence) == KILLED
    saved = components(reg, "killed")
    assert left is None or list(saved) == left
    assert max(saved) < strike
    assert children.run(fit, reg.url, "killed", stateful, None, cadence) == 0
    assert components(reg, "killed") == components(reg, "straight")
    latest = reg.checkpoint("killed/latest")
    assert latest.step in (15, 16)
    for one in reg.run("killed").checkpoints():  # each epoch of 4 steps ends with a validation
        assert ("loss" in one.metrics, "val" in one.metrics) == (True, one.step % 4 == 0)
    assert latest["model/layers.0.weight"].shape == (4, 4)
    assert latest["optimizer/0/state/0/exp_avg"].shape == (4, 4)
    assert reg.run("killed").status == "completed"


def test_names_that_share_a_checkpoint_are_given_up_one_by_one(
    reg: holdfast.Registry, children: Children
) -> None:
    assert children.run("lightning_training.share_names", reg.url) == 0


def test_equal_and_long_names_are_told_apart(reg: holdfast.Registry, children: Children) -> None:
    assert children.run("lightning_training.tell_names_apart", reg.url) == 0


def test_what_a_failed_save_would_have_overwritten_stays(children: Children) -> None:
    assert children.run("lightning_training.overwrite_in_background") == 0


def test_sigterm_saves_the_last_completed_step(reg: holdfast.Registry, children: Children) -> None:
    assert children.run("lightning_training.fit_until_sigterm", reg.url, "run") == 143
    run = reg.run("run")
    assert [ck.step for ck in run.checkpoints()] == [4, 7]
    assert run.status == "interrupted"
    assert children.run("lightning_training.fit_from_latest", reg.url, "run") == 0
    assert [ck.step for ck in run.checkpoints()] == [4, 7, 8, 12, 16]


@pytest.mark.soak  # dropout and a sampler say more
def test_two_ranks_continue_bit_for_bit(reg: holdfast.Registry, ranks: Ranks) -> None:
    assert ranks.run(2, "lightning_training.fit_ddp", "straight", None) == [0, 0]
    assert ranks.run(2, "lightning_training.fit_ddp", "killed", 5) == [KILLED, KILLED]
    assert list(components(reg, "killed")) == [2, 4]
    assert ranks.run(2, "lightning_training.fit_ddp", "killed", None) == [0, 0]
    assert components(reg, "killed") == components(reg, "straight")
    state = reg.checkpoint("killed/latest").load(only=["model", "rng"])
    assert not [name for name in state["model"] if name.startswith("module.")]
    first, second = (one["torch.cpu"] for one in state["rng"]["ranks"])
    assert not first.equal(second)


@pytest.mark.parametrize(
    ("kind", "every", "saved"),
    [
        ("own", 3, [3, 6, 9]),
        *(
            pytest.param(kind, 0, [4, 8], marks=pytest.mark.soak)
            for kind in ("wrapped", "generator")
        ),
    ],
)
def test_two_ranks_with_dropout_continue_bit_for_bit_with_a_sampler(
    reg: holdfast.Registry, ranks: Ranks, kind: str, every: int, saved: list[int]
) -> None:
    fit = "lightning_training.fit_ddp_with"
    assert ranks.run(2, fit, "straight", None, kind, every) == [0, 0]
    assert ranks.run(2, fit, "killed", 10, kind, every) == [KILLED, KILLED]
    assert list(components(reg, "killed")) == saved
    assert ranks.run(2, fit, "killed", None, kind, every) == [0, 0]
    assert components(reg, "killed") == components(reg, "straight")


def test_a_save_within_an_epoch_that_cannot_be_continued_is_warned_of(
    reg: holdfast.Registry, ranks: Ranks, tmp_path: Path
) -> None:
    args = ("run", None, "wrapped", 3, tmp_path / "log")
    assert ranks.run(2, "lightning_training.fit_ddp_with", *args) == [0, 0]
    (line,) = (tmp_path / "log.0").read_text().splitlines()
    assert re.search(r"order of its RandomSampler.*use_distributed_sampler=False", line)


def test_a_loader_with_a_generator_of_its_own_continues_bit_for_bit(
    reg: holdfast.Registry, children: Children
) -> None:
    fit = "lightning_training.fit_with_a_generator"
    assert children.run(fit, reg.url, "straight", None) == 0
    assert children.run(fit, reg.url, "killed", 10) == KILLED
    assert children.run(fit, reg.url, "killed", None) == 0
    assert components(reg, "killed") == components(reg, "straight")


def test_lightnings_own_loaders_read_a_pulled_checkpoint(
    reg: holdfast.Registry, children: Children, tmp_path: Path
) -> None:
    reg.create_run("run", monitor=holdfast.Monitor(metric="val", mode="min")).close()
    cadence = {"every_n_epochs": 1}
    assert children.run("lightning_training.fit", reg.url, "run", True, None, cadence) == 0
    pulled = tmp_path / "best.ckpt"
    holdfast.formats.write(pulled, reg.checkpoint("run/best"))
    assert children.run("lightning_training.ways_out", reg.url, "run", pulled) == 0


def test_a_signal_to_one_rank_makes_both_leave_after_the_same_step(
    reg: holdfast.Registry, ranks: Ranks
) -> None:
    assert ranks.run(2, "lightning_training.fit_ddp_with_checkpointer", "asked", 4) == [143, 143]
    assert list(components(reg, "asked")) == [4, 5]
    assert reg.run("asked").status == "interrupted"
    assert ranks.run(2, "lightning_training.fit_ddp_with_checkpointer", "asked", None) == [0, 0]
    assert list(components(reg, "asked")) == [4, 5, 8]


@pytest.mark.parametrize("journal", [pytest.param("", marks=pytest.mark.soak), "journal"])
def test_lightnings_own_callback_keeps_its_checkpoints_in_a_run(
    reg: holdfast.Registry, children: Children, tmp_path: Path, journal: str
) -> None:
    env = {"HOLDFAST_JOURNAL": str(tmp_path / journal)} if journal else {}
    args = (reg.url, str(tmp_path / "own"))
    assert children.run_all(Call("lightning_training.keep_model_checkpoint", args, env)) == [0]


def test_a_training_resumes_from_what_is_only_in_a_journal(
    reg: holdfast.Registry, children: Children, tmp_path: Path
) -> None:
    env = {"HOLDFAST_JOURNAL": str(tmp_path / "journal"), "HOLDFAST_EXIT_WAIT_S": "0"}
    call = Call("lightning_training.resume_from_journal", (reg.url,), env)
    assert children.run_all(call) == [0]


def test_what_is_refused(reg: holdfast.Registry, children: Children) -> None:
    assert children.run("lightning_training.refuse", reg.url) == 0


def test_a_test_does_not_continue_the_run(reg: holdfast.Registry, children: Children) -> None:
    cadence = {"every_n_epochs": 2}
    assert children.run("lightning_training.fit", reg.url, "run", False, None, cadence) == 0
    assert children.run("lightning_training.load_to_test", reg.url, "run") == 0


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stateful", "cadence"),
    [
        (False, {"every_n_epochs": 1}),
        (True, {"every_n_epochs": 1}),
        *((True, {"every_n_train_steps": steps}) for steps in (1, 2, 3, 5)),
    ],
)
def test_a_training_that_is_killed_at_any_step_continues_bit_for_bit(
    reg: holdfast.Registry, children: Children, stateful: bool, cadence: dict[str, int]
) -> None:
    fit = "lightning_training.fit"
    assert children.run(fit, reg.url, "straight", stateful, None, cadence) == 0
    for strike in range(1, 16):
        name = f"killed-{strike}"
        for until in (strike, min(strike + 3, 15)):
            children.run(fit, reg.url, name, stateful, until, cadence)
        assert children.run(fit, reg.url, name, stateful, None, cadence) == 0
        found, wanted = components(reg, name), components(reg, "straight")
        for parts in (*found.values(), *wanted.values()):
            del parts["loops"]  # Lightning counts validation batches from 0 after a resume
        assert found == wanted, strike
