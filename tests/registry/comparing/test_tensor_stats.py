"""What tensors hold, held against NumPy in float64; how often and how much is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast import Registry, Stored
from holdfast.backends.wrappers import Metered
from holdfast.registry.comparing import chunkwise, tensor_stats
from holdfast.registry.comparing.tensor_stats import StateStats, TensorStats, histogram
from holdfast.registry.errors import Damaged, InvalidInput, NotFound
from holdfast.registry.face.factory import open_on
from holdfast.registry.values.digest import Digest
from holdfast.registry.values.dtypes import ITEM_SIZES
from tests.support.faults import flip
from tests.support.states import small_state
from tests.support.stores import bytes_read, new_backend, packs_of, small_grid
from tests.support.strategies import examples

#: torch warns of complex halves.
DTYPES = [name for name in ITEM_SIZES if hasattr(torch, name) and name != "complex32"]


def stats(stored: Stored, patterns: Sequence[str] = ()) -> StateStats:
    return tensor_stats.stats(stored.handle, patterns)


def tensor_of(dtype: str, shape: tuple[int, ...], seed: int, *, small: bool) -> torch.Tensor:
    """Return a tensor of random bits, or of small numbers with zeros and some not finite."""
    rng = np.random.default_rng(seed)
    count, kind = math.prod(shape), getattr(torch, dtype)
    if not count:
        return torch.empty(shape, dtype=kind)
    if dtype == "bool" or small:
        values = torch.from_numpy(rng.integers(0, 5, count)).to(torch.float32)
        if kind.is_floating_point:
            values[torch.from_numpy(rng.random(count) < 0.02)] = math.nan
            values[torch.from_numpy(rng.random(count) < 0.02)] = math.inf
        if kind.is_complex:
            values = torch.complex(values, -values.flip(0))
        return values.to(kind).reshape(shape)
    data = rng.integers(0, 256, count * ITEM_SIZES[dtype], "u1")
    return torch.from_numpy(data).view(kind).reshape(shape)


def numpy_of(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bool or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.numpy().reshape(-1)
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).reshape(-1).numpy()


def close(got: Any, wanted: Any, tolerance: float) -> bool:
    return bool(abs(got - wanted) <= tolerance) or got == wanted


def check(found: TensorStats, tensor: torch.Tensor) -> None:
    values = numpy_of(tensor)
    sound = values[np.isfinite(values)]
    assert (found.count, found.shape) == (values.size, tuple(tensor.shape))
    assert found.nan == np.isnan(values).sum()
    assert found.inf == values.size - found.nan - sound.size
    assert found.zeros == (sound == 0).sum()
    if not sound.size:
        assert (found.min, found.max, found.mean, found.norm) == (None, None, None, 0)
        return
    if values.dtype.kind == "c":
        assert found.min is found.max is None
        parts = [sound.real, sound.imag]
        means = [math.fsum(part / sound.size) for part in parts]
        wanted: Any = complex(*means)
    else:
        assert (found.min, found.max) == (sound.min(), sound.max())
        parts = [sound]
        exact = sum(map(Fraction, sound.tolist()), Fraction(0)) / sound.size
        wanted = float(exact)
        if values.dtype.kind in "biu":
            assert type(found.min) is int
            assert found.mean == wanted
    largest = max(float(np.abs(part.astype("f8")).max()) for part in parts)
    assert close(found.mean, wanted, 1e-13 * largest)
    norm = math.hypot(*(number for part in parts for number in part.astype("f8").tolist()))
    assert found.norm == norm or math.isclose(found.norm, norm, rel_tol=1e-13)


@examples(80)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 12), max_size=3).map(tuple),
    st.integers(0, 2**32),
    st.booleans(),
    st.sampled_from([64, 100, 256]),
)
def test_any_tensor_is_what_numpy_says(
    dtype: str, shape: tuple[int, ...], seed: int, small: bool, chunk_bytes: int
) -> None:
    tensor = tensor_of(dtype, shape, seed, small=small)
    with small_grid(chunk_bytes, list_threshold=4), open_on(new_backend()) as reg:
        saved = reg.create_run("r").save({"m": {"t": tensor, "n": 1}}, step=1)
        (found,) = stats(saved).tensors
        assert (found.path, found.dtype, found.nbytes) == ("m/t", dtype, tensor.nbytes)
        check(found, tensor)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "int16", "complex64"])
def test_tensors_of_several_blocks(dtype: str, run: Any) -> None:
    tensor = tensor_of(dtype, (3, 50_000), 1, small=True)
    (found,) = stats(run.save({"t": tensor}, step=1)).tensors
    check(found, tensor)


def test_numpy_arrays_and_totals(run: Any) -> None:
    state = {
        "a": {"w": np.array([3.0, 0.0, -4.0, math.nan]), "b": np.array([True, False])},
        "b": {"s": np.array(7), "e": np.zeros((0, 3)), "x": np.array([math.inf, math.inf])},
    }
    found = stats(run.save(state, step=1))
    w, b, s, e, x = found.tensors
    assert [one.path for one in found.tensors] == ["a/w", "a/b", "b/s", "b/e", "b/x"]
    assert (w.min, w.max, w.norm, w.nan, w.zeros_share) == (-4, 3, 5, 1, 0.25)
    assert (b.min, b.max, b.mean, b.norm, b.zeros_share) == (0, 1, 0.5, 1, 0.5)
    assert (s.min, s.max, s.mean, s.norm, s.shape) == (7, 7, 7, 7, ())
    assert (e.min, e.mean, e.norm, e.zeros_share, e.is_finite) == (None, None, 0, 0, True)
    assert (x.min, x.mean, x.norm, x.inf) == (None, None, 0, 2)
    assert found.nonfinite == (w, x)
    assert (found.count, found.nan, found.inf) == (9, 1, 2)
    assert found.nbytes == sum(array.nbytes for part in state.values() for array in part.values())
    assert math.isclose(found.norm, math.sqrt(25 + 1 + 49))
    assert found.zeros_share == 2 / 9
    assert StateStats(()).zeros_share == 0


def test_patterns(run: Any) -> None:
    saved = run.save(small_state(), step=1)
    assert [one.path for one in stats(saved).tensors] == ["model/w", "model/b", "optimizer/m"]
    assert [one.path for one in stats(saved, ["opt*"]).tensors] == ["optimizer/m"]
    assert [one.path for one in stats(saved, ["*/b", "model/*"]).tensors] == ["model/w", "model/b"]
    with pytest.raises(NotFound, match="modle"):
        stats(saved, ["model/*", "modle/w"])


def read_bytes(backend: Any, patterns: list[str]) -> int:
    """Return the bytes that were read from packs."""
    calls: list[Any] = []
    with open_on(Metered(backend, calls)) as reg:
        stats(reg.checkpoint("run"), patterns)
    return bytes_read(calls)


def test_equal_chunks_are_read_once_and_others_not(
    backend: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunkwise, "_BATCH_BYTES", 256)  # equal ones in several batches
    rows = np.repeat(np.arange(2, dtype=np.float32), 64)
    with small_grid(256, list_threshold=1000):
        run.save({"a": np.tile(rows, 8), "b": np.tile(rows, 3), "c": np.arange(600)}, step=1)
        assert read_bytes(backend, ["a", "b"]) == 512
        assert read_bytes(backend, ["c"]) == 4800
        assert read_bytes(backend, []) == 512 + 4800


def test_equal_bytes_of_another_type_are_other_numbers(run: Any) -> None:
    ones = np.ones(100, dtype=np.float32)
    one, other = stats(run.save({"f": ones, "i": ones.view("i4")}, step=1)).tensors
    assert (one.max, other.max) == (1, 0x3F80_0000)


def test_damage_is_told(backend: Any, run: Any) -> None:
    saved = run.save(small_state(), step=1)
    flip(backend, packs_of(saved)[0])
    with pytest.raises(Damaged):
        stats(saved)


class Counting:
    """A source of zeros that counts the bytes which are held at once."""

    def __init__(self) -> None:
        self.held = self.most = 0
        self._lock = Lock()

    def chunk_digests(self, entry: Any) -> Any:
        raise NotImplementedError

    def index(self) -> None:
        pass

    def read_chunks(self, wanted: Any) -> None:
        self.add(sum(map(len, wanted.values())))

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.held += nbytes
            self.most = max(self.most, self.held)


@pytest.mark.parametrize("sources", [1, 2])
def test_memory_is_bounded_whatever_the_size(sources: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunkwise, "_BATCH_BYTES", 1024)
    monkeypatch.setattr(chunkwise, "_MAX_THREADS", 2)
    counting = Counting()
    pieces = [
        chunkwise.Piece((Digest.of(b"%d" % i),) * sources, "float32", 1 + i % 400)
        for i in range(3000)
    ]

    def reduce(piece: Any, views: Any) -> int:
        assert [len(view) for view in views] == [piece.nbytes] * sources
        counting.add(-piece.nbytes * sources)
        return piece.nbytes

    found = chunkwise.reduce_pieces([counting] * sources, pieces, reduce)
    assert list(found) == pieces
    assert list(found.values()) == [piece.nbytes for piece in pieces]
    assert counting.held == 0
    assert 400 * sources < counting.most <= 2 * 1024


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
