"""A state with the bytes of an earlier step: refused where declared, warned about elsewhere."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.registry.errors import IncompatibleState
from holdfast.registry.spec import RunSpec


class Training:
    """A real model and optimizer; `state` copies them, as a saver has to."""

    def __init__(self, lr: float = 0.1, kind: type = torch.optim.AdamW) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(20, 3)
        self.optimizer = kind(self.model.parameters(), lr=lr)
        self.rng = np.random.default_rng(1)

    def step(self) -> Training:
        self.optimizer.zero_grad()
        self.model(torch.as_tensor(self.rng.random(20), dtype=torch.float32)).sum().backward()
        self.optimizer.step()
        return self

    def state(self, **more: Any) -> dict[str, Any]:
        copied = {name: t.clone() for name, t in self.model.state_dict().items()}
        own = {"model": copied, "optimizer": self.optimizer.state_dict()}
        return {**own, "rng": {"numpy": self.rng.bit_generator.state}, **more}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_training_that_moves_on_is_not_warned_of(run, caplog):
    training = Training()
    frozen = {"w": torch.ones(20, 3), "b": torch.ones(3)}
    for step in range(1, 6):
        run.save(training.step().state(teacher=frozen, config={"lr": 0.1}), step=step)
    assert said(caplog) == []


def test_an_old_buffer_is_told_with_both_steps_once_for_each_part(run, caplog):
    training = Training()
    run.save(training.step().state(), step=80)
    # `state_dict` of an optimizer shares its tensors: this copies them.
    old = copy.deepcopy(training.step().state())
    run.save(old, step=90)
    run.save(training.step().state(), step=100)
    assert said(caplog) == []
    run.save(old, step=110)  # equal to step 90, although step 100 is between
    run.save(old, step=120)
    found = said(caplog)
    assert len(found) == 3
    for name in ("model", "optimizer", "rng"):
        (one,) = [text for text in found if f": {name} has the bytes of step 90" in text]
        assert one.startswith("run: phase main, step 110: ")


@pytest.mark.parametrize(
    ("generator", "is_warned"),
    [
        (random.Random(1).getstate(), True),
        (np.random.default_rng(1).bit_generator.state, True),
        (torch.Generator().get_state(), True),
        (list(range(10)), False),
    ],
    ids=["python", "numpy", "torch", "none"],
)
def test_a_generator_that_does_not_move_is_told(run, caplog, generator, is_warned):
    for step in (1, 2):
        run.save({"w": torch.full((20,), step), "random": {"it": generator}}, step=step)
    assert len(said(caplog)) == int(is_warned)


def test_optimizers_in_a_list_are_known(run, caplog):
    training = Training()
    for step in (1, 2):
        state = training.step().state()
        run.save(
            {**state, "optimizer": [state["optimizer"]], "rng": random.Random(1).getstate()},
            step=step,
        )
    assert said(caplog) == []
    run.save({"model": step, "optimizer": [state["optimizer"]]}, step=3)
    assert ["optimizer has the bytes of step 2" in text for text in said(caplog)] == [True]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_generator_may_stay_in_a_training_that_draws_nothing(run, caplog, kind):
    training = Training(kind=kind)
    still = {"random": np.random.default_rng(1).bit_generator.state}
    for step in (1, 2):
        run.save(training.step().state(**still), step=step)
    assert said(caplog) == []
    run.save(training.state(**still), step=3)  # nothing moves
    assert any("random has the bytes of step 2" in text for text in said(caplog))


@pytest.mark.parametrize(("lr", "is_warned"), [(0.1, True), (0.0, False)])
def test_weights_may_stay_while_the_learning_rate_is_zero(run, caplog, lr, is_warned):
    # SGD without momentum has no counters: only the weights can tell.
    training = Training(lr, torch.optim.SGD)
    training.rng = None
    for step in (1, 2):
        state = {"model": training.model, "optimizer": training.optimizer, "n": step}
        run.save(state, step=step)
    assert len(said(caplog)) == int(is_warned)


def test_weights_without_an_optimizer_may_stay_while_others_move(run, caplog):
    for step in (1, 2):
        run.save({"model": {"w": torch.ones(20)}, "table": torch.full((20,), step)}, step=step)
    assert said(caplog) == []


def test_a_save_in_which_no_tensor_moved_is_told_once_for_each_handle(run, reg, caplog):
    # The step and the generators advance, and nothing else does: plain values are not enough.
    for step in (1, 2, 3):
        rng = torch.Generator().manual_seed(step).get_state()
        run.save({"model": {"w": torch.ones(20)}, "n": step, "rng": {"torch": rng}}, step=step)
    (one,) = said(caplog)
    assert one.startswith("run: phase main, step 2: no tensor has changed since step 1")
    run.save({"model": {"w": torch.zeros(20)}}, step=4)
    run.exchange.push({"model": {"w": torch.zeros(20)}}, step=5)  # another program's state
    run.save({"n": 6}, step=6)  # no tensor at all
    assert said(caplog) == [one]
    caplog.clear()
    quiet = reg.create_run("quiet", preset=RunSpec(name="own", must_change=()))
    for step in (1, 2):
        quiet.save({"model": {"w": torch.ones(20)}}, step=step)
    assert said(caplog) == []


@pytest.mark.parametrize("declared", [("optimizer",), ("*moment*", "opt*")])
def test_what_the_preset_declares_is_refused_before_the_commit(reg, caplog, declared):
    run = reg.create_run("own", preset=RunSpec(name="own", must_change=declared))
    training = Training().step()
    run.save(training.state(), step=10)
    commits = run.manifest.commits
    with pytest.raises(IncompatibleState, match=r"optimizer has to change.* step 10") as refused:
        run.save(training.state(), step=20)
    assert "step 20" in str(refused.value)
    failed = run.save_async(training.state(), step=20)
    with pytest.raises(IncompatibleState):
        failed.wait()
    assert run.refresh().manifest.commits == commits
    run.save(training.step().state(), step=20)
    assert said(caplog) == []


def test_an_empty_list_turns_it_off(reg, caplog):
    run = reg.create_run("own", preset=RunSpec(name="own", must_change=()))
    training = Training().step()
    for step in (1, 2):
        run.save(training.state(), step=step)
    assert said(caplog) == []


def test_the_checkpoint_that_training_resumed_from_counts(reg, backend, open_registry):
    run = reg.create_run("own", preset=RunSpec(name="own", must_change=("model",)))
    training = Training().step()
    run.save(training.state(), step=10)
    run.save(training.step().state(), step=20)
    resumed = open_registry(backend).run("own")
    resumed.restore(at=resumed.checkpoints()[0])
    with pytest.raises(IncompatibleState, match="step 10"):
        resumed.save(resumed.checkpoints()[0].load(), step=15)
    resumed.save(training.state(), step=30)  # equal to step 20, which is superseded by this save


def test_a_step_that_is_superseded_is_no_earlier_step(reg):
    run = reg.create_run("own", preset=RunSpec(name="own", must_change=("model",)))
    training = Training().step()
    first = run.save(training.state(), step=10)
    later = copy.deepcopy(training.step().state())
    run.save(later, step=20)
    run.restore(at=first)
    assert run.save(later, step=30).step == 30


def test_the_same_step_again_is_no_later_step(reg):
    run = reg.create_run("own", preset=RunSpec(name="own", must_change=("model",)))
    state = Training().step().state()
    assert (
        run.save(state, step=10).handle.n == run.save(state, step=10, metrics={"loss": 1}).handle.n
    )
