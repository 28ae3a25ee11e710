"""Histograms of tensors, read as far as a budget allows."""

from __future__ import annotations

import math

import numpy as np
import pytest

from holdfast import Registry
from holdfast.backends.wrappers import Metered
from holdfast.registry.comparing.tensor_stats import histogram
from holdfast.registry.errors import InvalidInput, NotFound
from holdfast.registry.face.factory import open_on
from tests.support.stores import new_backend


def of(reg: Registry, array: np.ndarray, bins: int = 4):
    checkpoint = reg.create_run().save({"model": {"w": array}}, step=1)
    return histogram(checkpoint.handle, "model/w", bins=bins)


def test_counts_are_those_of_numpy_without_what_is_not_finite(reg: Registry) -> None:
    values = np.random.default_rng(3).normal(size=5000).astype(np.float32)
    found = of(reg, np.concatenate([values, [np.nan, np.inf, -np.inf, 0]]).astype(np.float32), 20)
    counts, edges = np.histogram(np.append(values, 0).astype("f8"), 20)
    assert found.counts == tuple(counts)
    assert found.edges == pytest.approx(edges)
    assert (found.nan, found.inf, found.zeros, found.read, found.count) == (1, 2, 1, 5004, 5004)
    assert found.read_bytes == found.nbytes == 5004 * 4


@pytest.mark.parametrize(
    "array",
    [
        np.array([3, 3, 3], np.int16),
        np.array([True, False, True]),
        np.array([-1e308, 1e308, 1e308]),
        np.array([0.0, 5e-324, 5e-324]),
        np.array([1.0, math.nextafter(1, 2), 1.0]),
        np.array([-(2**63), 2**63 - 1, 0]),
        np.array([0, 2**64 - 1, 1], np.uint64),
        np.array([1 + 2j, 3 - 4j, 0]),
    ],
    ids=str,
)
def test_every_element_is_counted_once_whatever_the_range(reg: Registry, array) -> None:
    found = of(reg, array)
    assert sum(found.counts) == array.size * (2 if array.dtype.kind == "c" else 1)
    assert all(a < b for a, b in zip(found.edges, found.edges[1:], strict=False))
    assert all(map(math.isfinite, found.edges))


def test_nothing_finite_has_no_bins(reg: Registry) -> None:
    assert of(reg, np.full(100, np.nan)).edges == ()
    assert of(reg, np.zeros((0, 4))).counts == ()


def test_a_budget_bounds_what_is_read_and_spreads_it() -> None:
    backend = new_backend()
    with open_on(backend) as reg:
        array = np.repeat(np.arange(8, dtype=np.float32), 2**20)  # 8 chunks of 4 MiB
        reg.create_run("r").save({"w": array}, step=1)
    with open_on(metered := Metered(backend)) as reg:
        checkpoint = reg.checkpoint("r/latest")
        _ = checkpoint.manifest
        with metered.measure() as used:
            found = histogram(checkpoint.handle, "w", budget_bytes=8 * 2**20, bins=8)
    assert used.read_bytes < 9 * 2**20
    assert found.read_bytes == 2 * 4 * 2**20
    assert (found.read, found.count) == (2**21, 2**23)
    assert (found.low, found.high) == (0, 4)  # the first chunk and the fifth


def test_what_cannot_be_read_is_refused(reg: Registry) -> None:
    checkpoint = reg.create_run().save({"w": np.ones(100)}, step=1)
    with pytest.raises(NotFound, match="v"):
        histogram(checkpoint.handle, "v")
    with pytest.raises(InvalidInput, match="budget"):
        histogram(checkpoint.handle, "w", budget_bytes=1)
