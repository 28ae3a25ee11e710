"""Two runs side by side: their fork, their settings, their steps, their first difference."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast import Registry, Run
from holdfast.registry.errors import NotFound

CONFIG = {"lr": 0.1, "model": {"width": 8}}


def save(run: Run, step: int, lr: float = 0.1) -> None:
    weights = np.arange(100.0) + step * lr
    state = {"model": {"a": np.ones(90), "w": weights}, "step": step}
    run.save(state, step=step, metrics={"loss": 1 / (1 + step * lr)})


@pytest.fixture
def parent(reg: Registry) -> Run:
    run = reg.create_run("parent", config=CONFIG, seed=1)
    for step in (1, 2, 3, 4):
        save(run, step)
    return run


def test_a_fork_beside_its_parent(reg: Registry, parent: Run) -> None:
    fork = reg.fork("parent/main/step2", "fork", config={"lr": 0.3, "model": {"width": 8}}, seed=2)
    save(fork, 3, lr=0.3)
    save(fork, 5, lr=0.3)
    found = reg.diff_runs("parent", "fork")
    assert (found.fork.run, found.fork.step) == ("parent", 2)
    assert [str(one) for one in found.config] == ["~ lr: 0.1 -> 0.3"]
    assert [str(one) for one in found.settings] == ["~ seed: 1 -> 2"]
    assert [(one.step, one.is_same) for one in found.steps] == [
        (2, True),
        (3, False),
        (4, None),
        (5, None),
    ]
    assert found.differs_at.step == 3
    assert [one.path for one in found.difference.tensors if one.kind == "changed"] == ["model/w"]
    pair = found.steps[1]
    assert pair.first.metrics["loss"] > pair.second.metrics["loss"]


def test_branches_are_shown_in_short(reg: Registry, parent: Run) -> None:
    fork = reg.fork("parent/main/step2", "fork", config={"lr": "<b>", "model": {"width": 8}})
    for step in range(3, 40):
        save(fork, step, lr=0.3)
    found = reg.diff_runs("parent", "fork")
    said = "Branches('parent', 'fork', fork='parent/main/step00000002', settings=0, config=1, "
    assert repr(found) == f"{said}steps=38, differs_at='main/step3')"
    html = found._repr_html_()
    assert len(html) < 6000
    assert "&lt;b&gt;" in html
    assert "<b>," not in html
    assert "and 28 more steps" in html


def test_two_forks_of_one_run_meet_at_the_earlier_checkpoint(reg: Registry, parent: Run) -> None:
    one = reg.fork("parent/main/step2", "one")
    reg.fork("parent/main/step3", "two")
    grandchild = reg.fork("two", "grandchild")
    save(one, 3)
    save(grandchild, 4)
    assert reg.diff_runs("one", "two").fork.step == 2
    found = reg.diff_runs("grandchild", "one")
    assert (found.fork.run, found.fork.step) == ("parent", 2)
    assert (found.config, found.settings, found.difference) == ((), (), None)
    assert [(pair.step, pair.is_same) for pair in found.steps] == [(2, None), (3, True), (4, None)]


def test_runs_without_a_common_checkpoint(reg: Registry, parent: Run) -> None:
    other = reg.create_run("other", preset="default", seed=1, config=CONFIG, input_hash="x")
    save(other, 1)
    found = reg.diff_runs("parent", "other")
    assert found.fork is None
    assert [one.path for one in found.settings] == ["preset", "input_hash"]
    assert found.steps[0].is_same
    with pytest.raises(NotFound, match="parent"):
        reg.diff_runs("parnet", "other")
