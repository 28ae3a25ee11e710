"""Keys that the commit keeps: equal trainings have equal ids; the state comes back as it was."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from holdfast.registry.errors import NotFound, UnsupportedValue
from holdfast.registry.spec import RunSpec
from tests.support.states import same, small_state
from tests.support.stores import contents

SPEC = RunSpec(commit_keys=("timestamp", "host", "metrics"))


@pytest.fixture
def run(reg):
    return reg.create_run("run", preset=SPEC)


def state(time: object = 17.25, host: object = "gpu-a", **more) -> dict:
    """Return a state whose commit keys stand first, in the middle and last."""
    small = small_state()
    return {
        "timestamp": time,
        "model": small["model"],
        "metrics": {"loss": float("nan"), 5: (1, "ä"), "none": None},
        "optimizer": small["optimizer"],
        **more,
        "host": host,
    }


def test_trainings_that_differ_in_them_alone_have_equal_ids(reg, run):
    other = reg.create_run("other", preset=SPEC)
    first, second = run.save(state(1.0, "a"), step=1), other.save(state(2.0, "b"), step=1)
    assert first.digest == second.digest
    assert (first.load()["timestamp"], second.load()["timestamp"]) == (1.0, 2.0)
    assert other.save(state(3.0) | {"seed": 1}, step=2).digest != first.digest


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_order_and_types_come_back_exactly(reg, run, kind):
    given = kind(state(None, b"\xff"))
    run.save(given, step=1)
    back = reg.run("run").latest().load()
    assert type(back) is kind
    assert list(back) == list(given)
    assert back["host"] == b"\xff"
    assert back["timestamp"] is None
    metrics = back["metrics"]
    assert list(metrics) == ["loss", 5, "none"]
    assert (np.isnan(metrics["loss"]), metrics[5]) == (True, (1, "ä"))
    assert same(dict(back["model"]), given["model"])


def test_a_state_of_nothing_else_comes_back(reg, run):
    run.save({"timestamp": 1, "host": "a"}, step=1)
    assert reg.run("run").latest().load() == {"timestamp": 1, "host": "a"}


def test_a_state_without_them_is_none_the_worse(run):
    saved = run.save(small_state(), step=1)
    assert saved.handle.commit_keys() is None
    assert same(saved.load(), small_state())


@pytest.mark.parametrize(
    ("only", "keys"),
    [
        ("timestamp", ["timestamp"]),
        (["host", "model"], ["model", "host"]),
        (["optimizer"], ["optimizer"]),
        ([], []),
    ],
)
def test_only_what_is_asked_for(run, only, keys):
    loaded = run.save(state(), step=1).load(only=only)
    assert list(loaded) == keys
    assert all(same(loaded[key], state()[key]) for key in keys)


def test_names_may_be_given_by_an_iterator(run):
    saved = run.save(state(), step=1)
    assert list(saved.load(only=iter(["host", "model"]))) == ["model", "host"]
    assert saved.load(only=iter(["host"])) == saved.load(only="host")


def test_what_there_is_not_is_an_error(run):
    saved = run.save(state(), step=1)
    with pytest.raises(NotFound, match="no such component"):
        saved.load(only=["timestamp", "times"])
    with pytest.raises(NotFound, match="no such component"):
        run.save(small_state(), step=2).load(only="timestamp")


@pytest.mark.parametrize("value", [np.arange(9), "x" * 70_000, {"deep": [np.float32([1, 2])]}])
def test_the_log_takes_no_arrays_and_no_long_texts(run, backend, value):
    before = contents(backend)
    with pytest.raises(UnsupportedValue, match=r"timestamp.*a key in commit_keys holds"):
        run.save(state(value), step=1)
    assert contents(backend) == before


@pytest.mark.parametrize("levels", [97, 98])
def test_a_value_that_nests_too_deeply_in_its_commit_is_refused(run, levels):
    value: object = Path("a")
    for _ in range(levels):
        value = [value]
    if levels == 97:
        assert run.save(state(value), step=1).load()["timestamp"] == value
    else:
        with pytest.raises(
            UnsupportedValue, match=r"commit keys could not be read.*nested too deeply"
        ):
            run.save(state(value), step=1)


def test_the_same_state_at_another_time_is_the_same_checkpoint(run):
    first = run.save(state(1.0), step=1)
    again = run.save(state(2.0), step=1)
    assert again.handle.n == first.handle.n
    assert again.load()["timestamp"] == 1.0


def test_load_into_leaves_them_aside(run):
    saved = run.save(state(), step=1)
    target = {"w": np.zeros(600, np.float32), "b": np.zeros(100)}
    report = saved.load_into(target, component="model")
    assert report.unexpected == report.missing == ()
    assert same(target, state()["model"])


def test_required_keys_may_be_among_them(reg):
    run = reg.create_run("r", preset=RunSpec(commit_keys=("host",), required_keys=("host",)))
    assert run.save({"host": "a", "x": 1}, step=1).load() == {"host": "a", "x": 1}
