"""The grid: chunks cover every tensor exactly, contiguous in C order, none above 4 MiB."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.registry.errors import UnsupportedValue
from holdfast.registry.objects.chunking import CHUNK_BYTES, Grid, grid
from holdfast.registry.values.dtypes import ITEM_SIZES
from tests.support.stores import small_grid
from tests.support.strategies import dtypes, quick, shapes


def _oracle(item: int, shape: tuple[int, ...], limit: int) -> list[int]:
    """Cut by the words of the rule, trying every trailing block of axes."""
    total = prod(shape) * item
    if total == 0:
        return []
    if total <= limit:
        return [total]
    cut = next(k for k in range(len(shape) + 1) if prod(shape[k:]) * item <= limit)
    piece = prod(shape[cut:]) * item
    run = []
    left = shape[cut - 1]
    while left:
        taken = min(limit // piece, left)
        run.append(taken * piece)
        left -= taken
    return run * prod(shape[: cut - 1])


@quick
@given(dtypes, shapes, st.integers(16, 300))
def test_the_grid_is_what_the_rule_says(dtype, shape, limit):
    with small_grid(limit):
        cut = grid(dtype, shape)
        assert list(cut.sizes()) == _oracle(ITEM_SIZES[dtype], shape, limit)


@quick
@given(dtypes, shapes, st.integers(16, 300))
def test_chunks_cover_the_tensor_and_fit(dtype, shape, limit):
    with small_grid(limit):
        cut = grid(dtype, shape)
    sizes = cut.sizes()
    assert cut.nbytes == sum(sizes) == prod(shape) * ITEM_SIZES[dtype]
    assert cut.count == len(sizes)
    assert all(0 < size <= limit and size % ITEM_SIZES[dtype] == 0 for size in sizes)
    assert all(size <= cut.chunk_bytes for size in sizes)


@quick
@given(shapes.filter(lambda shape: prod(shape) > 0), st.integers(16, 200))
def test_chunks_are_slices_of_whole_rows(shape, limit):
    array = np.arange(prod(shape), dtype=np.int16).reshape(shape)
    with small_grid(limit):
        sizes = grid("int16", shape).sizes()
    if len(sizes) == 1:
        return
    cut = next(k for k in range(len(shape) + 1) if prod(shape[k:]) * 2 <= limit)
    rows = limit // (prod(shape[cut:]) * 2)
    expected = [
        outer[start : start + rows].tobytes()
        for outer in array.reshape(-1, *shape[cut - 1 :])
        for start in range(0, shape[cut - 1], rows)
    ]
    data, found, start = array.tobytes(), [], 0
    for size in sizes:
        found.append(data[start : start + size])
        start += size
    assert found == expected


def test_a_chunk_is_at_most_four_mebibytes():
    assert CHUNK_BYTES == 4 * 2**20


@pytest.mark.parametrize(
    ("dtype", "shape", "sizes"),
    [
        ("float32", (), (4,)),
        ("float32", (0, 5), ()),
        ("uint8", (CHUNK_BYTES,), (CHUNK_BYTES,)),
        ("uint8", (CHUNK_BYTES + 1,), (CHUNK_BYTES, 1)),
        ("float32", (3, 2**20), (2**22,) * 3),
        ("float32", (3, 2**19), (2**22, 2**21)),
        ("float32", (2, 3, 2**19), (2**22, 2**21) * 2),
        ("float32", (2, 2**20 + 1), (2**22, 4) * 2),
        ("bfloat16", (32000, 4096), (512 * 8192,) * 62 + (256 * 8192,)),
        ("complex128", (1, 1, 2**18 + 1), (2**22, 16)),
        ("float32", (2**21, 1, 1), (2**22, 2**22)),
    ],
)
def test_known_cuts(dtype, shape, sizes):
    assert grid(dtype, shape).sizes() == sizes


def test_the_grid_depends_on_dtype_and_shape_alone():
    first = grid("float32", (1000, 3000))
    grid.cache_clear()
    assert grid("float32", (1000, 3000)) == first


def test_a_grid_without_bytes_has_no_chunks():
    assert grid("int8", (0,)) == Grid(0, 0, 0, 0, 0)
    assert grid("int8", (0,)).count == 0


def test_an_unknown_dtype_is_refused():
    with pytest.raises(UnsupportedValue, match=r"unknown dtype.*found object"):
        grid("object", (3,))
