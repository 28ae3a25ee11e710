"""Live values of a state: paths as they are stored, rebuilding, copies, what counts as zero."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch

from holdfast.registry import pytree
from holdfast.registry.errors import IncompatibleState
from holdfast.registry.pytree.traversal import DROP, frozen, is_array, is_zero, rebuild, walk

STATE = {
    "plain": {"a/b": np.ones(1), 1: np.ones(2), "1": np.ones(3), "": np.ones(4), None: np.ones(5)},
    "nested": [{"x": (np.ones(1), np.ones(2))}, {True: np.ones(3), 2.5: np.ones(4)}],
    "odd/key": OrderedDict(w=np.ones(1)),
    "bare": np.ones(2),
}


def test_paths_are_those_under_which_arrays_are_stored():
    stored = [leaf.path for part in pytree.flatten(STATE).components for leaf in part.leaves]
    assert [path for name, value in STATE.items() for path, _ in walk(name, value)] == stored


def test_every_leaf_is_walked_plain_ones_and_empty_containers_too():
    state = {"n": 1, "s": "text", "none": None, "empty": {}, "list": [], "q": deque([1])}
    assert dict(walk("m", state)) == {f"m/{name}": value for name, value in state.items()}


def test_a_module_is_walked_by_its_state_dict():
    assert [path for path, _ in walk("m", torch.nn.Linear(2, 1))] == ["m/weight", "m/bias"]


def test_rebuilding_keeps_types_and_what_hangs_on_them():
    module = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.ReLU()).state_dict()
    value = {"module": module, "made": defaultdict(list, a=[1, 2]), "pair": (1, [2])}
    rebuilt = rebuild("m", value, lambda path, leaf: leaf)
    assert rebuilt == value
    assert type(rebuilt["module"]) is OrderedDict
    assert rebuilt["module"]._metadata == module._metadata
    assert rebuilt["made"].default_factory is list
    assert type(rebuilt["pair"]) is tuple
    assert rebuilt["module"] is not module


def test_what_is_dropped_takes_emptied_containers_along():
    value = {"head": {"w": 1, "b": 2}, "trunk": {"w": 3}, "empty": {}}

    def visit(path, leaf):
        return DROP if path.startswith("m/head/") else leaf

    assert rebuild("m", value, visit) == {"trunk": {"w": 3}, "empty": {}}
    assert rebuild("m", value, lambda path, leaf: DROP) is DROP
    assert value["head"] == {"w": 1, "b": 2}


def test_a_list_loses_all_of_its_items_or_none():
    value = {"blocks": [{"w": 1}, {"w": 2}]}
    with pytest.raises(IncompatibleState, match="m/blocks: some items of a list"):
        rebuild("m", value, lambda path, leaf: DROP if path == "m/blocks/0/w" else leaf)
    assert rebuild("m", value, lambda path, leaf: DROP) is DROP


@pytest.mark.parametrize(
    "zero",
    [
        *(0, 0.0, -0.0, False, 0j, np.float32(0), np.int8(0), np.zeros(3), np.zeros((0,))),
        *(torch.zeros(3), torch.tensor(-0.0), torch.zeros(2, dtype=torch.bfloat16)),
        *(torch.zeros(2, dtype=torch.float8_e4m3fn), torch.zeros(2, dtype=torch.int8)),
        torch.zeros(2, requires_grad=True),
    ],
    ids=repr,
)
def test_zero(zero):
    assert is_zero(zero)


@pytest.mark.parametrize(
    "other",
    [
        *(1, float("nan"), True, "0", "", None, {}, np.float64(1e-300), np.array([0, np.nan])),
        *(torch.tensor([0.0, float("nan")]), torch.tensor(1e-300, dtype=torch.float64)),
        *(torch.tensor(2**-9, dtype=torch.float8_e4m3fn), torch.tensor([False, True])),
        torch.tensor(9.2e-41, dtype=torch.bfloat16),
    ],
    ids=repr,
)
def test_what_is_not_zero(other):
    assert not is_zero(other)


def test_a_frozen_copy_shares_nothing_and_learns_nothing():
    for leaf in (torch.ones(3, requires_grad=True), np.ones(3), [1, [2]]):
        copied = frozen(leaf)
        assert type(copied) is type(leaf)
        copied[0] = 7
        assert leaf[0] == 1
    assert not frozen(torch.ones(3, requires_grad=True) * 2).requires_grad


def test_a_frozen_copy_is_cast_where_it_is_of_floating_point():
    assert frozen(torch.ones(3), "bfloat16").dtype == torch.bfloat16
    assert frozen(torch.ones(3, dtype=torch.int64), "bfloat16").dtype == torch.int64
    assert pytree.describe(frozen(np.ones(3), "bfloat16")) == ("bfloat16", (3,))
    assert frozen(np.ones(3, np.int32), "float16").dtype == np.int32
    assert frozen(np.array([5], "datetime64[s]"), "float16").dtype == "datetime64[s]"
    assert frozen(1.5, "float16") == 1.5


def test_arrays_are_those_of_torch_and_numpy():
    assert is_array(np.ones(1))
    assert is_array(torch.ones(1))
    assert not is_array([1.0])
    assert not is_array(np.float32(1))
