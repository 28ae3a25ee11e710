"""Comparing checkpoints from their manifests."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from registry import Registry
from registry.diff import Diff, diff


def compare(reg: Registry, before: dict[str, Any], after: dict[str, Any]) -> Diff:
    run = reg.create_run()
    return diff(run.save(before, step=1), run.save(after, step=2))


def kinds(found: Diff) -> dict[str, str]:
    return {tensor.path: tensor.kind for tensor in found.tensors}


def test_every_kind(reg: Registry) -> None:
    a, b, c = (np.full(100, value, dtype=np.float32) for value in (1, 2, 3))
    before = {"m": {"same": a, "changed": a, "shape": a, "dtype": a, "old": b, "gone": c}}
    after = {
        "m": {
            "same": a,
            "changed": b,
            "shape": a.reshape(10, 10),
            "dtype": a.astype(np.float64),
            "new": b,
            "more": c + 1,
        }
    }
    found = compare(reg, before, after)
    assert kinds(found) == {
        "m/same": "same",
        "m/changed": "changed",
        "m/shape": "reshaped",
        "m/dtype": "reshaped",
        "m/new": "moved",
        "m/more": "added",
        "m/gone": "removed",
    }
    (part,) = found.components
    assert (part.name, part.kind) == ("m", "changed")
    assert found.count("reshaped") == 2
    assert found.nbytes("moved") == 400
    moved = next(tensor for tensor in found.tensors if tensor.kind == "moved")
    assert moved.before is not None
    assert moved.before.path == "m/old"


def test_equal_states(reg: Registry) -> None:
    state = {"m": {"w": np.zeros(100)}, "n": 1}
    found = compare(reg, state, state)
    assert found.is_same
    assert found.values == ()
    assert [part.kind for part in found.components] == ["same", "same"]


def test_components_come_and_go(reg: Registry) -> None:
    found = compare(reg, {"a": {"w": np.zeros(9)}}, {"b/c": {"w": np.ones(9)}})
    assert {part.name: part.kind for part in found.components} == {"b/c": "added", "a": "removed"}
    assert [dict(part.tensors) for part in found.components] == [{"added": 1}, {"removed": 1}]


def test_one_content_moves_once(reg: Registry) -> None:
    zero = np.zeros(100)
    found = compare(reg, {"m": {"a": zero}}, {"m": {"b": zero, "c": zero}})
    assert kinds(found) == {"m/b": "moved", "m/c": "added"}


@pytest.mark.parametrize(
    ("before", "after", "values"),
    [
        ({"lr": 0.1}, {"lr": 0.2}, [("changed", "x/lr", 0.1, 0.2)]),
        ({"lr": 1}, {"lr": 1.0}, [("changed", "x/lr", 1, 1.0)]),
        ({"lr": 0.0}, {"lr": -0.0}, [("changed", "x/lr", 0.0, -0.0)]),
        ({"a": (1, 2)}, {"a": (1, 3)}, [("changed", "x/a/1", 2, 3)]),
        ({"a": [1]}, {"a": [1, 2]}, [("added", "x/a/1", None, 2)]),
        ({"a": 1, "b": None}, {"a": 1}, [("removed", "x/b", None, None)]),
        ({"a": set()}, {"a": {1}}, [("changed", "x/a", set(), {1})]),
        ({"a": {}}, {"a": {"b": 1}}, [("added", "x/a/b", None, 1), ("removed", "x/a", {}, None)]),
        (OrderedDict(a=1), OrderedDict(a=2), [("changed", "x/a", 1, 2)]),
        ({1: "x"}, {1: "y"}, [("changed", "x/1", "x", "y")]),
    ],
)
def test_plain_values(reg: Registry, before: Any, after: Any, values: list[Any]) -> None:
    found = compare(reg, {"x": before}, {"x": after})
    assert [(v.kind, v.path, v.before, v.after) for v in found.values] == values
    assert found.components[0].values == len(values)


def test_values_beside_tensors_keep_their_place(reg: Registry) -> None:
    w = np.zeros(100)
    found = compare(reg, {"x": {"w": w, "lr": 1}}, {"x": {"new": w, "w": w, "lr": 1}})
    assert found.values == ()
    assert kinds(found) == {"x/new": "added", "x/w": "same"}
