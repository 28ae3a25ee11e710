"""Elements read by their bits: torch's and ml_dtypes' values for every pattern there is."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from holdfast.registry.comparing import elements
from holdfast.registry.values.dtypes import ITEM_SIZES

FLOAT8 = [name for name in ITEM_SIZES if name.startswith("float8")]


def numbers(data: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return elements._numbers(memoryview(data.view("u1")), dtype)


@pytest.mark.parametrize("dtype", [*FLOAT8, "bfloat16", "float16"])
def test_every_pattern_of_the_small_floats(dtype: str) -> None:
    size = ITEM_SIZES[dtype]
    patterns = np.arange(256**size, dtype=f"u{size}")
    got = numbers(patterns, dtype)
    wanted = torch.from_numpy(patterns).view(getattr(torch, dtype)).to(torch.float64).numpy()
    np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(wanted[wanted == 0]))
    if dtype != "float16":
        with np.errstate(all="ignore"):
            again = patterns.view(getattr(ml_dtypes, dtype)).astype("f8")
        np.testing.assert_array_equal(got, again)


def test_bools_are_zero_and_one_whatever_their_bytes() -> None:
    assert numbers(np.array([0, 1, 2, 255], "u1"), "bool").tolist() == [0, 1, 1, 1]


def summary(values: object, dtype: str) -> elements.Summary:
    return elements.summarise(memoryview(np.array(values, dtype).view("u1")), dtype)


@pytest.mark.parametrize("factor", [1e300, 1e-300, 5e-324])
def test_squares_beyond_the_range_of_float64(factor: float) -> None:
    found = summary([3 * factor, -4 * factor], "float64")
    assert math.isclose(found.norm, 5 * factor, rel_tol=1e-15)
    change = elements.compare(
        memoryview(np.zeros(2).view("u1")),
        memoryview(np.array([3 * factor, 4 * factor]).view("u1")),
        "float64",
    )
    assert math.isclose(change.norm, 5 * factor, rel_tol=1e-15)


def test_sums_beyond_the_range_of_float64() -> None:
    top = np.finfo("f8").max
    found = summary([top] * 100_000, "float64")
    assert float(found.total / found.finite) == top
    assert found.norm == math.inf  # truly beyond


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_sums_of_long_integers_are_exact(dtype: str) -> None:
    info = np.iinfo(dtype)
    values = [info.max, info.max, info.min, info.max - 1, 3] * 20_000
    found = summary(values, dtype)
    assert (found.low, found.high, found.total) == (info.min, info.max, sum(values))


@pytest.mark.parametrize(
    ("dtype", "before", "after", "largest"),
    [
        ("int64", -(2**63), 2**63 - 1, 2**64 - 1),
        ("int64", 2**63 - 1, 2**63 - 2, 1),
        ("uint64", 0, 2**64 - 1, 2**64 - 1),
        ("int8", -128, 127, 255),
        ("uint8", 255, 0, 255),
        ("int32", -(2**31), 2**31 - 1, 2**32 - 1),
        ("bool", 0, 1, 1),
    ],
)
def test_differences_of_integers_are_exact(
    dtype: str, before: int, after: int, largest: int
) -> None:
    old, new = (memoryview(np.array([0, one], dtype).view("u1")) for one in (before, after))
    found = elements.compare(old, new, dtype)
    assert (found.largest, found.changed) == (largest, 1)
    assert math.isclose(found.norm, largest, rel_tol=1e-15)


def test_complex_halves() -> None:
    parts = np.array([1, 2, 3, 4, math.nan, math.inf, math.inf, 0, 0, 0], "f2")
    found = elements.summarise(memoryview(parts.view("u1")), "complex32")
    assert (found.count, found.nans, found.infs, found.zeros) == (5, 1, 1, 1)
    assert (found.total, found.imaginary, found.norm) == (4, 6, math.sqrt(30))
    assert found.low is found.high is None
    other = parts.copy()
    other[:2] += (3, 4)
    change = elements.compare(
        memoryview(parts.view("u1")), memoryview(other.view("u1")), "complex32"
    )
    assert (change.changed, change.nonfinite, change.largest, change.norm) == (1, 0, 5, 5)
