"""Comparing checkpoints from their manifests, and their elements where that is asked for."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast import Checkpoint, Registry, Storing
from holdfast.backends.wrappers import Metered
from holdfast.registry.comparing import state_diff
from holdfast.registry.comparing.state_diff import Diff, Distance
from holdfast.registry.errors import Damaged
from holdfast.registry.face.factory import open_on
from tests.support.faults import flip
from tests.support.stores import new_backend, packs_of, small_grid
from tests.support.strategies import examples


def diff(before: Checkpoint, after: Checkpoint, *, values: bool = False) -> Diff:
    return state_diff.diff(before.handle, after.handle, values=values)


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


def test_the_numbers_of_a_generator_are_one_value(reg: Registry) -> None:
    saved = [
        reg.create_run(f"r{seed}").save({"rng": random.Random(seed).getstate()}, step=1)
        for seed in (1, 2)
    ]
    (found,) = reg.diff(*saved).values
    assert (found.kind, found.path) == ("changed", "rng/1")
    assert str(found) == "~ rng/1: 623 numbers of 625 differ, from 1 on"


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


# Values


def distance(reg: Registry, before: Any, after: Any) -> Distance:
    run = reg.create_run()
    saved = (run.save({"t": value}, step=step) for step, value in enumerate((before, after)))
    (tensor,) = diff(*saved, values=True).tensors
    assert tensor.kind == "changed"
    assert tensor.distance is not None
    return tensor.distance


DTYPES = ["int8", "int64", "uint16", "bool", "bfloat16", "float16", "float32", "float64"]


@examples(80)
@given(
    st.sampled_from([*DTYPES, "float8_e4m3fn", "complex64", "complex128"]),
    st.lists(st.integers(1, 12), max_size=3).map(tuple),
    st.integers(0, 2**32),
    st.sampled_from([0.01, 0.3, 1.0]),
    st.booleans(),
)
def test_distances_are_what_numpy_says(
    dtype: str, shape: tuple[int, ...], seed: int, share: float, broken: bool
) -> None:
    rng = np.random.default_rng(seed)
    kind = getattr(torch, dtype)
    old = torch.from_numpy(rng.normal(0, 20, shape)).reshape(shape)
    picked = torch.from_numpy(np.asarray(rng.random(shape) < share)).reshape(shape)
    picked.view(-1)[0] = True
    new = torch.where(picked, old + torch.from_numpy(np.asarray(rng.normal(0, 5, shape))), old)
    if kind.is_floating_point and broken:
        old.view(-1)[-1] = math.nan
        new.view(-1)[rng.integers(new.numel())] = math.inf
    if kind.is_complex:
        old, new = torch.complex(old, -old.flip(0)), torch.complex(new, -new.flip(0))
    if dtype == "uint16":
        old, new = old.abs(), new.abs()
    old, new = old.to(kind), new.to(kind)
    wide = torch.complex128 if kind.is_complex else torch.float64
    a, b = (one.to(wide).reshape(-1).numpy() for one in (old, new))
    words = [one.reshape(-1).view(torch.uint8).reshape(one.numel(), -1) for one in (old, new)]
    changed = (words[0] != words[1]).any(1).numpy()
    if not changed.any():
        return
    with small_grid(64, list_threshold=3), open_on(new_backend()) as reg:
        found = distance(reg, old, new)
    sound = np.isfinite(a) & np.isfinite(b)
    apart = np.abs(b - a)[sound]
    assert (found.count, found.changed) == (a.size, changed.sum())
    assert found.nonfinite == (changed & ~sound).sum()
    assert found.changed_share == changed.sum() / a.size
    assert math.isclose(found.max, apart.max(initial=0), rel_tol=1e-15)
    norm = math.hypot(*apart)
    assert math.isclose(found.norm, norm, rel_tol=1e-14)
    whole = math.hypot(*np.abs(a[sound]))
    relative = norm / whole if whole else (math.inf if norm else 0)
    assert found.relative >= relative * (1 - 1e-14)
    if changed.all():
        assert math.isclose(found.relative, relative, rel_tol=1e-14)


def test_what_is_not_changed_has_no_distance(reg: Registry) -> None:
    one = np.arange(100.0)
    before = {"m": {"same": one, "shape": one, "old": one + 1, "changed": one}}
    after = {"m": {"same": one, "shape": one.reshape(10, 10), "new": one + 1, "changed": one + 1}}
    run = reg.create_run()
    old, new = run.save(before, step=1), run.save(after, step=2)
    found = {tensor.path: tensor.distance for tensor in diff(old, new, values=True).tensors}
    assert found.pop("m/changed") == Distance(10.0, 10 / math.hypot(*range(100)), 1.0, 100, 100, 0)
    assert set(found.values()) == {None}
    assert {tensor.distance for tensor in diff(old, new).tensors} == {None}
    assert diff(old, new).components == diff(old, new, values=True).components


def test_from_zero_on_is_infinitely_far(reg: Registry) -> None:
    assert distance(reg, np.zeros(100), np.ones(100)).relative == math.inf
    signs = distance(reg, np.zeros(100), np.full(100, -0.0))
    assert (signs.norm, signs.relative, signs.changed) == (0, 0, 100)


def test_inline_tensors_and_scalars(reg: Registry) -> None:
    assert distance(reg, np.array([3, 4]), np.array([3, 5])) == Distance(1.0, 0.2, 1, 2, 1, 0)
    assert distance(reg, torch.tensor(1.0), torch.tensor(3.0)) == Distance(2.0, 2.0, 2.0, 1, 1, 0)


def test_one_not_finite_element_does_not_hide_the_rest(reg: Registry) -> None:
    old, new = np.ones(100), np.ones(100)
    old[3], new[4], new[5] = math.nan, math.inf, 3
    found = distance(reg, old, new)
    assert (found.norm, found.max, found.changed, found.nonfinite) == (2, 2, 3, 2)


def test_only_chunks_that_differ_are_read(backend: Any, reg: Registry) -> None:
    run = reg.create_run("run")
    old = np.arange(640, dtype=np.float32)
    new = old.copy()
    new[100] += 3
    with small_grid(256, list_threshold=1000):
        run.save({"t": old, "u": old + 1}, step=1)
        run.save({"t": new, "u": old + 1}, step=2)
        calls: list[Any] = []
        with open_on(Metered(backend, calls)) as again:
            pair = again.checkpoint("run/main/step1"), again.checkpoint("run/main/step2")
            found = diff(*pair, values=True).tensors[0].distance
            assert found is not None
            assert (found.norm, found.max, found.changed, found.count) == (3, 3, 1, 640)
            assert math.isclose(found.relative, 3 / math.hypot(*old[64:128]))
            got = [call for call in calls if call.method == "get" and "packs/" in call.key]
            assert [len(call.byte_range) for call in got] == [256, 256]
            calls.clear()
            diff(*pair)
            assert not [call for call in calls if "packs/" in call.key]


def test_damage_is_told(backend: Any, reg: Registry) -> None:
    run = reg.create_run("run")
    old, new = (run.save({"t": np.arange(100.0) + i}, step=i) for i in (0, 1))
    flip(backend, packs_of(new)[0])
    assert not diff(old, new).is_same
    with pytest.raises(Damaged):
        diff(old, new, values=True)


def test_what_was_stored_with_less_precision_differs_from_what_was_given_so(reg: Registry) -> None:
    """The same bytes, and yet not the same state: one of them lost something."""
    run = reg.create_run()
    wide = np.full(100, 0.5, dtype=np.float32)
    lossy = run.save({"m": {"w": wide}}, step=1, storing=Storing(precision={"m/*": "fp16"}))
    given = run.save({"m": {"w": wide.astype(np.float16)}}, step=2)
    found = diff(lossy, given)
    assert not found.is_same
    assert kinds(found) == {"m/w": "reshaped"}
    assert diff(lossy, lossy).is_same
