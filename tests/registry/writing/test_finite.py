"""NaN and infinity are found by their bits, in every floating-point type, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.registry import pytree
from holdfast.registry.values.dtypes import FLOATING, ITEM_SIZES
from holdfast.registry.writing import hashing

FLOATS = sorted(FLOATING)
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
COMPLEX = sorted(name for name in ITEM_SIZES if name.startswith("complex"))


def found(state, *patterns: str) -> tuple[str, ...]:
    leaves = [leaf for part in pytree.flatten(state).components for leaf in part.leaves]
    watched = [leaf for leaf in leaves if hashing.is_watched(leaf, patterns or ("*",))]
    return tuple(leaf.path for leaf in watched if not hashing.is_finite(leaf.buffer(), leaf.dtype))


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of every bit pattern of a small type."""
    words = torch.arange(256 ** min(dtype.itemsize, 2), dtype=torch.int32)
    return words.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype)


@pytest.mark.parametrize("name", [name for name in FLOATS if ITEM_SIZES[name] <= 2])
def test_every_bit_pattern_of_a_small_type(name):
    values = every_value(getattr(torch, name))
    finite_ones = torch.isfinite(values.to(torch.float32))
    assert found({"w": values[finite_ones]}) == ()
    others = [value.clone() for value in values[~finite_ones]]
    assert others
    for value in others[:: 1 + len(others) // 100]:
        assert found({"w": value}) == ("w",)


@pytest.mark.parametrize("name", [name for name in FLOATS if ITEM_SIZES[name] > 2] + COMPLEX)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_value_among_many(name, value):
    dtype = getattr(torch, name)
    size = 2 * hashing._BLOCK + 7
    for at in (0, hashing._BLOCK - 1, hashing._BLOCK, size - 1):
        tensor = torch.ones(size, dtype=torch.float32).to(dtype)
        assert found({"w": tensor}) == ()
        tensor[at] = value
        assert found({"w": tensor}) == ("w",)


@pytest.mark.parametrize("name", COMPLEX)
def test_either_part_of_a_complex_number(name):
    dtype = getattr(torch, name)
    for bad in (complex(float("nan"), 0), complex(0, float("inf"))):
        assert found({"w": torch.tensor([1j, bad]).to(dtype)}) == ("w",)


def test_the_greatest_and_the_least_numbers_are_finite():
    for name in FLOATS:
        dtype = getattr(torch, name)
        if ITEM_SIZES[name] < 4:
            continue  # every pattern of these is tried above
        info = torch.finfo(dtype)
        values = torch.tensor([info.max, info.min, info.tiny, 0.0], dtype=dtype)
        assert found({"w": values}) == ()


def test_numpy_counts_and_integers_do_not():
    state = {
        "a": np.array([1.0, np.nan]),
        "b": np.array([np.inf], np.float16),
        "ones": np.full(9, -1, np.int64),
        "flags": np.array([True]),
    }
    assert found(state) == ("a", "b")


def test_only_what_is_watched_counts():
    bad = torch.tensor([float("nan")])
    state = {"model": {"w": bad, "b": torch.ones(1)}, "optimizer": {"m": bad}}
    assert found(state, "model/*") == ("model/w",)
    assert found(state, "model/b", "optimizer/*") == ("optimizer/m",)
    assert found(state, "policy/*") == ()
    assert not any(
        hashing.is_watched(leaf, ()) for leaf in pytree.flatten(state).components[0].leaves
    )


def test_empty_tensors_are_finite():
    assert found({"w": torch.empty(0), "x": torch.empty(3, 0)}) == ()
