"""What a skeleton may say of its arrays: held against what numpy and torch make themselves."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch

from holdfast.registry.errors import Malformed
from holdfast.registry.pytree import check_arrays, check_values, flatten, register_adapter
from holdfast.registry.pytree.torch_memory import DTYPES


class Entry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


LENGTHS = (0, 1, 2, 2**10, 2**31, 2**52, 2**53)
SHAPES = [
    shape
    for axes in (1, 2, 3, 4)
    for shape in itertools.product(LENGTHS, repeat=axes)
    if 0 in shape
]


def refuses(tag: str, dtype: str, shape: tuple[int, ...]) -> bool:
    try:
        check_arrays("x", {tag: 0}, [Entry(dtype, shape)])
    except Malformed:
        return True
    return False


@pytest.mark.parametrize("dtype", ["uint8", "float32", "complex128"])
def test_empty_shapes_that_numpy_makes_are_taken_and_no_others(dtype: str) -> None:
    for shape in SHAPES:
        try:
            np.empty(shape, dtype)
        except ValueError:
            assert refuses("n", dtype, shape), shape
        else:
            assert not refuses("n", dtype, shape), shape


def test_every_empty_shape_that_torch_makes_is_taken() -> None:
    refused = 0
    for shape in SHAPES:
        try:
            torch.empty(shape)
        except RuntimeError:
            refused += refuses("t", "float32", shape)
        else:
            assert not refuses("t", "float32", shape), shape
    assert refused > 100
    assert refuses("t", "float32", (2**53, 2**53, 0))


@pytest.mark.parametrize(
    ("tag", "dtype", "shape"),
    [
        *((tag, "float32", (3,)) for tag in ("B", "BA", "S")),
        *((tag, "uint8", (3, 1)) for tag in ("B", "BA", "S")),
    ],
)
def test_arrays_that_cannot_be_what_is_said(tag: str, dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(Malformed) as caught:
        check_arrays("part", {"d": [["k", {tag: 0}]]}, [Entry(dtype, shape)])
    assert caught.value.where == "part/k"
    assert dtype in str(caught.value)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_everything_that_can_be_saved_fits() -> None:
    arrays = {name: torch.zeros(3, dtype=dtype) for name, dtype in DTYPES.items()}
    state = {
        "torch": arrays | {"empty": torch.empty(0, 5), "coo": torch.eye(3).to_sparse()},
        "csr": torch.eye(3).to_sparse_csr(),
        "numpy": {name: np.zeros((2, 0), name) for name in DTYPES if name in np.sctypeDict},
        "days": np.zeros(3, "timedelta64[ns]"),
        "long": ["x" * 10**5, bytes(10**4), bytearray(10**4)],
        "plain": [{1, 2}, (1, 2.5), {"a": {3: None}}, 2**70, np.float32(1), torch.float16],
    }
    for part in flatten(state).components:
        entries = [Entry(leaf.dtype, leaf.shape) for leaf in part.leaves]
        check_arrays(part.name, part.skeleton, entries)
        check_values(part.name, part.skeleton)
        for wrong in (entries[:-1], [*entries, Entry("uint8", (1,))]):
            if wrong != entries:
                with pytest.raises(Malformed, match="does not fit"):
                    check_arrays(part.name, part.skeleton, wrong)


class _Own:
    pass


def test_what_an_adapter_makes_is_not_asked_for() -> None:
    name, arrays = "claims.own", {"w": np.zeros(3)}
    register_adapter(name, _Own, to_plain=lambda _: arrays, from_plain=pytest.fail)
    (part,) = flatten({"x": {"own": _Own()}}).components
    check_values("x", part.skeleton)
    check_values("x", {"ad": ["nobody.knows", {"set": [{"ad": ["nor.this", 1]}]}]})


@pytest.mark.parametrize(
    "node",
    [
        {"f": "zz"},
        {"zz": 1},
        {"tu": [{"i": "1"}]},
        {"dd": ["list", [["a", {"f": ""}]]]},
        {"sd": [[["a", {"t": 0}]], {"f": ""}]},
        {"deque": [1, [1, 2]]},
        {"ad": ["nobody.knows", {"f": ""}]},
        {"d": [["a"]]},
        {"d": 5},
        {"dd": 5},
    ],
    ids=repr,
)
def test_values_that_cannot_be_rebuilt(node: object) -> None:
    with pytest.raises(Malformed):
        check_values("x", node)
