"""Averages held against torch: the same arithmetic in float32, and one rounding."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from holdfast.registry.comparing.elements import float8_values
from holdfast.registry.deriving.merging import mixing
from holdfast.registry.deriving.merging.mixing import average

DTYPES = [
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
]
WEIGHTS = [(0.5, 0.5), (0.3, 0.7), (1.25, -0.25), (0.2, 0.3, 0.5)]


def raw(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def averaged(tensors: list[torch.Tensor], weights: tuple[float, ...]) -> torch.Tensor:
    made = torch.empty_like(tensors[0])
    average(
        [raw(one) for one in tensors], weights, str(made.dtype).removeprefix("torch."), raw(made)
    )
    return made


def reference(tensors: list[torch.Tensor], weights: tuple[float, ...]) -> torch.Tensor:
    kind = tensors[0].dtype
    if kind.is_complex:
        parts = reference([torch.view_as_real(one) for one in tensors], weights)
        return torch.view_as_complex(parts.contiguous())
    wide = torch.float64 if kind == torch.float64 else torch.float32
    total = tensors[0].to(wide) * torch.tensor(weights[0], dtype=wide)
    for one, weight in zip(tensors[1:], weights[1:], strict=True):
        total = total + one.to(wide) * torch.tensor(weight, dtype=wide)
    return total.to(kind)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return raw(one) == raw(other)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_are_those_of_torch(
    dtype: str, weights: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.registry.comparing.elements._BLOCK", 100)
    rng = np.random.default_rng(len(dtype))
    kind = getattr(torch, dtype)
    numbers = [
        rng.standard_normal((1000, 2)) * rng.choice([1e-3, 1, 20], (1000, 1)) for _ in weights
    ]
    given = [torch.from_numpy(one) for one in numbers]
    made = [torch.view_as_complex(g) if kind.is_complex else g.reshape(-1) for g in given]
    made[1][:50] = -made[0][:50]  # sums of nothing, signs included
    tensors = [one.to(kind) for one in made]
    found, wanted = averaged(tensors, weights), reference(tensors, weights)
    differs = torch.tensor([raw(a) != raw(b) for a, b in zip(found, wanted, strict=True)])
    # What is equal in all sources is left as it is.
    size = [one.reshape(-1).view(torch.uint8).reshape(len(one), -1) for one in tensors]
    equal = torch.stack([(one == size[0]).reshape(len(one), -1).all(1) for one in size]).all(0)
    assert not (differs & ~equal).any()
    assert not equal.all()


def test_elements_that_are_equal_stay_bit_for_bit() -> None:
    odd = torch.tensor([0.1, -0.0, math.nan, math.inf, 3e38, 1e-45, 7.0])
    third = (1 / 3, 1 / 3, 1 / 3)
    tensors = [odd.clone(), odd.clone(), odd.clone()]
    tensors[2][6] = 8.0
    found = averaged(tensors, third)
    assert same_bits(found[:6], odd[:6])
    assert found[6] == np.float32(1 / 3) * 7 + np.float32(1 / 3) * 7 + np.float32(1 / 3) * 8


def test_rounding_happens_once_and_ties_go_to_even() -> None:
    # Exactly half way between two neighbours, and next to it by what bfloat16 alone would lose.
    one = torch.tensor([1.0, 1.0078125, 1.0], dtype=torch.bfloat16)
    two = torch.tensor([1.0078125, 1.015625, 1.0234375], dtype=torch.bfloat16)
    found = averaged([one, two], (0.5, 0.5))
    assert found.tolist() == [1.0, 1.015625, 1.015625]
    thirds = averaged([one, two, two], (0.25, 0.5, 0.25))
    assert thirds.tolist() == [1.0078125, 1.015625, 1.015625]


def test_a_source_of_weight_nothing_adds_nothing() -> None:
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([math.nan, math.inf])
    assert averaged([one, two], (1.0, 0.0)).tolist() == [1.0, 2.0]
    assert averaged([two, one], (0.0, 1.0)).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name.startswith("float8")])
def test_every_float8_and_what_lies_between_rounds_to_its_nearest(dtype: str) -> None:
    values = float8_values(dtype)
    codes = np.arange(256)[np.isfinite(values)]
    assert (mixing._rounded(values.astype("f4"), dtype)[codes] == codes).all()
    finite = np.unique(values[codes])
    for low, high in pairwise(finite):
        near = np.array([low + (high - low) * share for share in (0.49, 0.51)], "f4")
        assert values[mixing._rounded(near, dtype)].tolist() == [low, high]
    beyond = values[mixing._rounded(np.array([1e6, -1e6, math.nan], "f4"), dtype)]
    assert not np.isfinite(beyond).any()
    assert np.isnan(beyond[2])


def test_what_is_not_finite_is_passed_on() -> None:
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        one = torch.tensor([math.nan, math.inf, math.inf, 1.0]).to(kind)
        two = torch.tensor([1.0, 1.0, -math.inf, 2.0]).to(kind)
        found = averaged([one, two], (0.5, 0.5)).float()
        assert found[0].isnan()
        assert found[1].isinf()
        assert found[2].isnan()
        assert found[3] == 1.5


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_nan_has_the_same_bits_wherever_it_lies(dtype):
    one, two = (np.full(50, np.nan, dtype).view(f"u{np.dtype(dtype).itemsize}") for _ in "ab")
    one += 1
    two |= two.dtype.type(1) << two.dtype.type(8 * two.itemsize - 1)
    for count in range(1, 50):
        into = memoryview(bytearray(count * one.itemsize))
        views = [memoryview(words[:count].view("u1")) for words in (one, two)]
        mixing.average(views, [-0.5, 1.5], dtype, into)
        assert bytes(into) == np.full(count, np.nan, dtype).tobytes()
