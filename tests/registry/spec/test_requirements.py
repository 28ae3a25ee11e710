"""What a run demands of a state: keys with alternatives, dtypes by path, phases that there are."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.registry import pytree
from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.spec import DtypeRule, Phase, RunSpec, requirements

SPEC = RunSpec(
    phases=(Phase(name="1", required_keys=("value",)), Phase(name="2")),
    required_keys=("model | policy", "step"),
    dtypes=(
        DtypeRule(path="model/*", dtype="float32"),
        DtypeRule(path="*/exact", dtype="float64"),
    ),
)


@pytest.mark.parametrize(
    ("phase", "names"),
    [
        ("1", ["model", "step", "value"]),
        ("1", ["value", "step", "policy", "more"]),
        ("2", ["policy", "model", "step"]),
    ],
)
def test_a_state_with_every_key_passes(phase, names):
    requirements.check_keys(SPEC, phase, names, where="x")


@pytest.mark.parametrize(
    ("phase", "names", "missing"),
    [
        ("1", ["model", "step"], "value"),
        ("1", ["step"], r"model \| policy, value"),
        ("2", ["mode", "step"], r"model \| policy"),
        ("2", [], r"model \| policy, step"),
    ],
)
def test_what_is_missing_is_named(phase, names, missing):
    with pytest.raises(
        IncompatibleState, match=rf"x: a state of phase {phase}.*missing: {missing}"
    ):
        requirements.check_keys(SPEC, phase, names, where="x")


def _dtypes(state) -> list[tuple[str, str]]:
    return list(requirements.flat_dtypes(pytree.flatten(state)))


def test_floating_tensors_have_the_demanded_type_and_others_any():
    sound = {
        "model": {"w": np.zeros(20, np.float32), "n": np.zeros(20, np.int64)},
        "other": {"w": np.zeros(20, np.float16), "exact": np.zeros(20)},
    }
    requirements.check_dtypes(SPEC, _dtypes(sound), where="x")


def test_every_wrong_type_is_named():
    wrong = {
        "model": {"w": np.zeros(20), "deep": {"b": np.zeros(2, np.float16)}},
        "a": {"exact": np.zeros(20, np.float32)},
    }
    with pytest.raises(IncompatibleState, match="x: tensors have another dtype") as caught:
        requirements.check_dtypes(SPEC, _dtypes(wrong), where="x")
    told = str(caught.value)
    assert "model/w is float64, must be float32" in told
    assert "model/deep/b is float16, must be float32" in told
    assert "a/exact is float32, must be float64" in told


def test_of_many_the_first_are_named():
    many = [(f"model/{i}", "float64") for i in range(20)]
    with pytest.raises(IncompatibleState, match=r"model/7 .*; and 12 more") as caught:
        requirements.check_dtypes(SPEC, many, where="x")
    assert "model/8" not in str(caught.value)


def test_a_phase_that_is_not_declared_is_refused_with_near_names():
    spec = RunSpec(phases=(Phase(name="warmup"), Phase(name="main")))
    requirements.check_phase_is_declared(spec, "main")
    requirements.check_phase_is_declared(RunSpec(), "anything")
    with pytest.raises(InvalidInput, match=r"expected one of warmup, main.*'warmup'"):
        requirements.check_phase_is_declared(spec, "warm-up")
    with pytest.raises(InvalidInput, match="The run's preset declares its phases"):
        requirements.check_phase_is_declared(spec, "zzz")


@pytest.mark.parametrize(
    ("key", "found"), [("a", "a"), ("x|b", "b"), ("b | a", "b"), ("x | y", None), ("", None)]
)
def test_the_first_alternative_that_is_there(key, found):
    assert requirements.first_of(key, ["a", "b"]) == found
