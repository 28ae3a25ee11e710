"""Tensors in memory: every chunk of the grid is read and written, contiguous or not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.registry import pytree
from holdfast.registry.loading.following.swapping import LiveChunks, Resident
from holdfast.registry.values.digest import Digest
from tests.support.stores import small_grid

SHAPES = [(), (7,), (40, 6), (3, 50, 2), (2, 3, 200), (5, 1, 130)]
KINDS = ["torch", "torch strided", "numpy", "numpy strided"]


def tensor(kind: str, shape: tuple[int, ...]):
    count = int(np.prod(shape))
    plain = np.arange(count, dtype=np.float32).reshape(shape)
    if kind.endswith("strided") and shape:
        wide = np.zeros((*shape[:-1], 2 * shape[-1]), np.float32)
        wide[..., ::2] = plain
        plain = wide[..., ::2] if kind.startswith("numpy") else wide
    if kind.startswith("torch"):
        made = torch.from_numpy(np.array(plain))
        return made[..., ::2] if kind.endswith("strided") and shape else made
    return plain


def resident(source) -> Resident:
    return Resident(source, *pytree.describe(source))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_laid_end_to_end_are_the_tensor(kind: str, shape: tuple[int, ...]) -> None:
    with small_grid(128):
        source = tensor(kind, shape)
        found = resident(source)
        parts = [bytearray(size) for size in found.grid.sizes()]
        for number, part in enumerate(parts):
            found.read(number, memoryview(part))
            assert found.examine(number, len(part)) == (Digest.of(bytes(part)), True)
        assert b"".join(parts) == np.ascontiguousarray(np.asarray(source)).tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_chunk_is_written_in_its_place(kind: str, shape: tuple[int, ...]) -> None:
    with small_grid(128):
        source = tensor(kind, shape)
        found = resident(source)
        expected = bytearray(np.ascontiguousarray(np.asarray(source)).tobytes())
        sizes = found.grid.sizes()
        for number in range(0, len(sizes), 2):
            start = sum(sizes[:number])
            data = bytes(sizes[number])
            expected[start : start + len(data)] = data
            before = np.ascontiguousarray(np.asarray(source)).tobytes()
            put = found.stage(number, memoryview(data), None)
            assert np.ascontiguousarray(np.asarray(source)).tobytes() == before
            put()
        assert np.ascontiguousarray(np.asarray(source)).tobytes() == expected


def test_torch_counts_what_is_written_to_a_tensor_or_a_view_of_it() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 4))
    marks = [resident(weight.detach()).mark()]
    with torch.no_grad():
        for write in (lambda: weight.add_(1), lambda: weight[0].zero_(), lambda: weight.T.mul_(2)):
            write()
            marks.append(resident(weight.detach()).mark())
    assert len(set(marks)) == 4
    weight.sum().item()
    assert resident(weight.detach()).mark() == marks[-1]


def test_where_writes_are_counted() -> None:
    with torch.inference_mode():
        made = torch.zeros(4)
    found = [resident(one).is_counted for one in (torch.zeros(4), made, np.zeros(4))]
    assert found == [True, False, False]
    assert resident(made).mark()[-1] is None


def test_a_chunk_that_is_another_one_by_now_is_not_given() -> None:
    source = np.arange(100, dtype=np.float32)
    known = Digest.of(source.tobytes())
    live = LiveChunks({"w": resident(source)}, {"w": (known,)})
    data = memoryview(bytearray(400))
    assert live.fill({known: data}) == []
    assert data == source.tobytes()
    assert not live.was_outdated
    assert live.fill({known: data[:396]}) == [known]
    assert not live.was_outdated
    source[3] = 0
    assert live.fill({known: data}) == [known]
    assert live.was_outdated
