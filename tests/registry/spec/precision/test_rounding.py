"""Rounding gives the bits that torch gives, widening is its exact way back, and NaN stays NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from holdfast.registry.spec.precision import rounding
from holdfast.registry.values.dtypes import ITEM_SIZES
from tests.support.strategies import quick

ORIGINALS = ("float32", "float64")
NARROW = ("bfloat16", "float16")
PAIRS = [(original, dtype) for original in ORIGINALS for dtype in NARROW]
pairs = pytest.mark.parametrize(("original", "dtype"), PAIRS)


def narrow(values: np.ndarray, dtype: str) -> np.ndarray:
    made = rounding.narrow(memoryview(values.view("u1")), str(values.dtype), dtype)
    return np.frombuffer(made, "<u2")


def widen(words: np.ndarray, dtype: str, original: str) -> np.ndarray:
    memory = memoryview(bytearray(len(words) * ITEM_SIZES[original]))
    rounding.tail(memory, dtype, original)[:] = words.tobytes()
    rounding.widen(memory, dtype, original)
    return np.frombuffer(memory, original)


def by_torch(values: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(values.copy()).to(getattr(torch, dtype))


def check(values: np.ndarray, dtype: str) -> None:
    expected, made = by_torch(values, dtype), narrow(values, dtype)
    nan = np.isnan(values)
    assert np.array_equal(made[~nan], expected.view(torch.uint16).numpy()[~nan])
    back = widen(made, dtype, str(values.dtype))
    wide = expected.to(getattr(torch, str(values.dtype))).numpy()
    assert back[~nan].tobytes() == wide[~nan].tobytes()
    assert np.isnan(back[nan]).all()


def patterns(original: str, count: int) -> np.ndarray:
    """Return numbers of random bits: every exponent, both signs, NaN and infinities."""
    words = np.random.default_rng(5).integers(0, 2**64, count, np.uint64, endpoint=False)
    return words.view("f8") if original == "float64" else words.view("f4")


@pairs
def test_any_bits(original, dtype):
    values = patterns(original, 3 * rounding._BLOCK)
    assert np.isnan(values).any()
    check(values, dtype)


@pairs
@quick
@given(st.data())
def test_any_values(original, dtype, data):
    width = 8 * ITEM_SIZES[original]
    elements = st.floats(width=width) | st.floats(-70000, 70000, width=width)
    check(data.draw(hnp.arrays(original, st.integers(0, 40), elements=elements)), dtype)


@pairs
def test_halfway_between_two_numbers_the_even_one_wins(original, dtype):
    bits = 7 if dtype == "bfloat16" else 10
    step = 2.0**-bits
    between = np.array([1 + step / 2, 1 + 1.5 * step, 1 + step / 2 + 2.0**-20], original)
    back = widen(narrow(between, dtype), dtype, original)
    assert back.tolist() == [1, 1 + 2 * step, 1 + step]
    check(np.array([2.0**-24, 2.0**-25, 3 * 2.0**-25, 2.0**-133, 2.0**-134], original), dtype)


@pairs
def test_what_is_there_in_fewer_bits_comes_back_exactly(original, dtype):
    words = np.arange(2**16, dtype="<u2")
    wide = widen(words, dtype, original)
    nan = np.isnan(wide)
    assert np.array_equal(narrow(wide, dtype)[~nan], words[~nan])


@pairs
@pytest.mark.parametrize("count", [0, 1, 2, 3, 2 * rounding._BLOCK + 7])
def test_elements_are_widened_where_they_lie_whatever_their_number(original, dtype, count):
    values = np.random.default_rng(count).standard_normal(count).astype(original)
    check(values, dtype)


@pytest.mark.parametrize("dtype", NARROW)
def test_a_nan_keeps_its_sign_and_the_upper_bits_of_its_payload(dtype):
    words = np.array([0x7FC0_0000, 0xFFC0_0000, 0x7F80_0001, 0xFFFF_FFFF, 0x7FAA_0000], "<u4")
    quiet = {
        "bfloat16": [0x7FC0, 0xFFC0, 0x7FC0, 0xFFFF, 0x7FEA],
        "float16": [0x7E00, 0xFE00, 0x7E00, 0xFFFF, 0x7F50],
    }
    # Alone or among others: which kernel runs must not show.
    for filling in (0, 1, 100):
        values = np.concatenate([words, np.zeros(filling, "<u4")]).view("<f4")
        assert narrow(values, dtype)[: len(words)].tolist() == quiet[dtype]


@pairs
def test_what_would_become_infinity_is_found(original, dtype):
    def found(*values: float) -> float | None:
        array = np.array([0.5, -math.inf, math.nan, *values, math.inf, -0.25], original)
        return rounding.overflow(memoryview(array.view("u1")), original, dtype)

    largest = 65504.0 if dtype == "float16" else 2.0**127 * (2 - 2.0**-7)
    # Half a step above the largest number is where infinity begins.
    first = 65520.0 if dtype == "float16" else 2.0**127 * (2 - 2.0**-8)
    below = float(np.nextafter(np.float32(first), np.float32(0)))
    assert found() is None
    assert found(largest, -largest, below, -below) is None
    assert found(first) == first
    assert found(below, -first, 1.0) == -first
    assert narrow(np.array([below], original), dtype) == narrow(
        np.array([largest], original), dtype
    )


def test_an_overflow_is_found_in_any_block():
    values = np.ones(3 * rounding._BLOCK + 5, np.float32)
    view = memoryview(values.view("u1"))
    for at in (0, rounding._BLOCK, len(values) - 1):
        assert rounding.overflow(view, "float32", "float16") is None
        values[at] = 1e5
        assert rounding.overflow(view, "float32", "float16") == 1e5
        values[at] = math.nan


def test_nothing_but_nan_and_infinity_overflows_nothing():
    values = np.array([math.nan, math.inf, -math.inf])
    assert rounding.overflow(memoryview(values.view("u1")), "float64", "float16") is None
    assert rounding.overflow(memoryview(b""), "float64", "float16") is None


@pairs
def test_what_vanishes_is_counted(original, dtype):
    """As many as torch makes zeros of, at the tie, one above it and at random."""
    least = 2.0**-25 if dtype == "float16" else 2.0**-134
    near = np.array([least, -least, 0.0, -0.0, np.inf, np.nan], original)
    above = np.nextafter(np.float32(least), np.float32(1)).astype(original)
    tiny = np.random.default_rng(3).uniform(0, 3 * least, rounding._BLOCK).astype(original)
    values = np.concatenate([near, [above], tiny, np.array([1e-60], original)]).astype(original)
    made = by_torch(values, dtype).double().numpy()
    expected = int(((made == 0) & (values != 0)).sum()), int(np.count_nonzero(values))
    if (original, dtype) == ("float32", "bfloat16"):
        expected = (0, 0)  # not looked at
    assert rounding.vanishing(memoryview(values.view("u1")), original, dtype) == expected
