"""Staging: a copy of a state that its owner cannot change any more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.registry.pytree import flatten
from holdfast.registry.writing.staging import Staging
from tests.support.strategies import quick


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(4) as threads:
        yield threads


sizes = st.lists(st.integers(0, 300), max_size=30)


def bytes_of(flat) -> list[bytes]:
    return [bytes(leaf.buffer()) for part in flat.components for leaf in part.leaves]


@quick
@given(st.lists(sizes, max_size=3))
def test_every_byte_is_copied_and_none_is_shared(pool, parts):
    rng = np.random.default_rng(0)
    state = {
        f"c{i}": {str(n): rng.integers(0, 255, size, np.uint8) for n, size in enumerate(part)}
        for i, part in enumerate(parts)
    }
    before = flatten(state)
    expected = bytes_of(before)
    copied = Staging().copy(before, pool)
    for part in state.values():
        for array in part.values():
            array += 1
    assert bytes_of(copied) == expected
    assert copied.kind == before.kind
    for old, new in zip(before.components, copied.components, strict=True):
        assert (old.name, old.skeleton, old.is_bare) == (new.name, new.skeleton, new.is_bare)
        for one, two in zip(old.leaves, new.leaves, strict=True):
            assert (one.dtype, one.shape, one.nbytes, one.path) == (
                two.dtype,
                two.shape,
                two.nbytes,
                two.path,
            )


def test_memory_is_used_again_and_grows_to_the_largest(pool):
    staging = Staging()
    small, large = {"m": np.zeros(100)}, {"m": np.ones(5000)}
    for state in (small, large, small, large):
        assert bytes_of(staging.copy(flatten(state), pool)) == [state["m"].tobytes()]


def test_what_is_read_only_or_not_contiguous_is_copied_as_well(pool):
    frozen = np.arange(100)
    frozen.flags.writeable = False
    state = {"a": frozen, "b": np.arange(100).reshape(10, 10).T, "c": b"x" * 9000, "d": "ä" * 90000}
    flat = flatten(state)
    expected = bytes_of(flatten(state))
    assert bytes_of(Staging().copy(flat, pool)) == expected


def test_tensors_are_copied_whatever_their_size_and_place_in_memory(pool):
    state = {
        "small": torch.arange(10.0),
        "inner": torch.arange(100, dtype=torch.int16)[7:30],
        "large": torch.arange(50_000.0),
        "turned": torch.arange(100.0).reshape(10, 10).T,
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "empty": torch.empty(0, 3),
    }
    flat, expected = flatten(state), bytes_of(flatten(state))
    copied = Staging().copy(flat, pool)
    for tensor in state.values():
        tensor.add_(1)
    assert bytes_of(copied) == expected
    assert all(leaf.is_ours for part in copied.components for leaf in part.leaves)
