"""Every value comes back with its types and bits, and equal content has one spelling."""

from __future__ import annotations

import random
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from holdfast.registry.pytree import flatten
from holdfast.registry.values import canonical
from tests.support.sameness import assert_same, through

from .states import states

warm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(states)
@warm
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_state_comes_back_bit_for_bit(state):
    assert_same(state, through(state))


@given(states)
@warm
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_loaded_state_has_the_same_skeletons(state):
    before, after = flatten(state), flatten(through(state))
    assert before.kind == after.kind
    for first, second in zip(before.components, after.components, strict=True):
        assert canonical.encode(first.skeleton) == canonical.encode(second.skeleton)
        assert [x.buffer() for x in first.leaves] == [x.buffer() for x in second.leaves]


def test_the_order_of_a_set_does_not_matter():
    items = [f"name{i}" for i in range(50)] + [2**70, 1.5, None, (1, "x")]
    first = flatten({"s": set(items)}).components[0].skeleton
    random.Random(1).shuffle(items)
    second = flatten({"s": set(items)}).components[0].skeleton
    assert canonical.encode(first) == canonical.encode(second)


def test_keys_that_look_alike_stay_apart():
    state = {"x": {True: 1, "1": 2, 1.5: 3, "true": 4, None: 5, "null": 6, b"1": 7, (1,): 8}}
    assert_same(state, through(state))


def test_key_order_is_kept():
    assert list(through({"x": {"b": 1, "a": 2}})["x"]) == ["b", "a"]
    assert list(through({"b": 1, "a": 2})) == ["b", "a"]


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_coo_tensors():
    loose = torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 0]], [3.0, 4.0, 5.0], (2, 3))
    state = {
        "loose": loose,
        "coalesced": [loose.coalesce()],
        "empty": {"x": torch.zeros(2, 3).to_sparse()},
        "hybrid": torch.eye(4).to_sparse(1),
    }
    assert_same(state, through(state))


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_compressed_tensors():
    dense = torch.eye(4, dtype=torch.bfloat16)
    state = {
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.float().to_sparse_bsr((2, 2)),
        "bsc": dense.float().to_sparse_bsc((2, 2)),
        "int32": torch.sparse_csr_tensor(
            torch.tensor([0, 1, 1], dtype=torch.int32),
            torch.tensor([1], dtype=torch.int32),
            [2.0],
            (2, 2),
        ),
    }
    assert_same(state, through(state))
    assert leaf_names(state) == [
        *("csr/crow_indices", "csr/col_indices", "csr/values"),
        *("csc/ccol_indices", "csc/row_indices", "csc/values"),
        *("bsr/crow_indices", "bsr/col_indices", "bsr/values"),
        *("bsc/ccol_indices", "bsc/row_indices", "bsc/values"),
        *("int32/crow_indices", "int32/col_indices", "int32/values"),
    ]


def leaf_names(state):
    return [leaf.path for part in flatten(state).components for leaf in part.leaves]


def test_names_join_component_and_keys():
    t = torch.zeros(1)
    state = {
        "model": {"conv1.weight": t},
        "optimizer": {"state": {0: {"exp_avg": t}}, "groups": [t, (t,)]},
        "bare": t,
    }
    assert leaf_names(state) == [
        "model/conv1.weight",
        "optimizer/state/0/exp_avg",
        "optimizer/groups/0",
        "optimizer/groups/1/0",
        "bare",
    ]


def test_keys_that_could_be_mistaken_are_quoted():
    t = torch.zeros(1)
    odd = [0, "0", "a/b", '"', "", None, "null", True, 1.5, 2**60, (1, "x"), "{", "0.weight"]
    state = {"a": dict.fromkeys(odd, t), "a/b": t}
    assert leaf_names(state) == [
        *("a/0", 'a/"0"', 'a/"a/b"', 'a/"\\""', 'a/""', "a/null", 'a/"null"', "a/true"),
        *('a/{"f":"3ff8000000000000"}', 'a/{"i":"1000000000000000"}', 'a/{"tu":[1,"x"]}'),
        *('a/"{"', "a/0.weight"),
        '"a/b"',
    ]
    assert_same(state, through(state))


def test_bare_components_are_marked():
    state = {"t": torch.zeros(2), "n": np.zeros(2), "b": b"x" * 9999, "l": [torch.zeros(2)], "i": 1}
    assert [c.is_bare for c in flatten(state).components] == [True, True, False, False, False]


def test_tied_tensors_are_stored_as_two_leaves():
    weight = torch.ones(3)
    assert len(flatten({"m": {"a": weight, "b": weight}}).components[0].leaves) == 2


def test_modules_at_any_depth_become_their_state_dict():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(net.parameters())
    loaded = through({"model": net, "more": [{"optimizer": optimizer}]})
    assert_same(net.state_dict(), loaded["model"])
    assert_same(optimizer.state_dict(), loaded["more"][0]["optimizer"])
    assert loaded["model"]._metadata["1"] == {"version": 2}


def test_an_object_with_state_dict_is_a_state():
    net = torch.nn.Linear(2, 2)
    flat = flatten(net)
    assert flat.kind == "odict"
    assert [c.name for c in flat.components] == ["weight", "bias"]


def test_scalars_of_ml_dtypes_arrays():
    array = np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3)
    state = {"x": array, "d": array.dtype, "s": array[1, 2], "f": ml_dtypes.float8_e5m2(2)}
    assert_same(state, through(state))


def test_depth_of_one_hundred_levels():
    value = 0
    for _ in range(99):
        value = [value]
    state = {"x": value}
    assert_same(state, through(state))


# Later versions of NumPy warn of them; states that were saved with them still come back.
@pytest.mark.filterwarnings("ignore:The 'generic' unit:DeprecationWarning")
def test_times_without_a_unit():
    state = {"x": np.array([1, 2]).view("M8"), "y": np.datetime64("NaT"), "z": np.timedelta64(3)}
    assert_same(state, through(state))


def test_special_dicts():
    weird = OrderedDict(a=1)
    weird._metadata = {"version": 1}
    assert_same({"x": weird}, through({"x": weird}))


def test_huge_values_are_cheap():
    state = {"i": 10**20000, "r": range(10**30, 10**40, 7), "d": -(10**5000)}
    assert_same(state, through(state))
