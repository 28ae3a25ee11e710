"""Lazy tensors: NumPy's answer bit for bit, and no chunk more than the index touches."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.wrappers import Metered
from holdfast.registry.errors import (
    Damaged,
    InvalidInput,
    MissingObject,
    NotFound,
    OutOfRange,
    UnsupportedValue,
)
from holdfast.registry.face.factory import open_on
from tests.support.faults import flip
from tests.support.states import filled, same, save_small, small_state
from tests.support.stores import bytes_read, new_backend, packs_of, small_grid
from tests.support.strategies import examples

TORCH = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float32,
    torch.int64,
    torch.complex128,
]


def raw(tensor) -> np.ndarray:
    """Return a tensor as elements of opaque bytes, which NumPy can index whatever they mean."""
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).view(f"V{tensor.itemsize}").reshape(tensor.shape)
    flat = tensor.contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return np.frombuffer(data, f"V{tensor.element_size()}").reshape(tuple(tensor.shape))


def check(lazy, tensor, index) -> None:
    want, got = raw(tensor)[index], lazy[index]
    assert type(got) is type(tensor)
    assert got.dtype == tensor.dtype == lazy.dtype
    assert tuple(got.shape) == np.shape(want)
    assert raw(got).tobytes() == np.ascontiguousarray(want).tobytes()


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    dtype = draw(st.sampled_from(TORCH))
    picks = [
        draw(
            st.one_of(
                st.slices(length),
                st.builds(
                    slice,
                    st.none() | st.integers(-12, 12),
                    st.none() | st.integers(-12, 12),
                    st.none() | st.sampled_from([-7, -3, -2, -1, 1, 2, 5]),
                ),
                *([st.integers(-length, length - 1)] if length else []),
            )
        )
        for length in shape
    ]
    keep = draw(st.integers(0, len(picks)))
    if draw(st.booleans()):
        tail = draw(st.integers(keep, len(picks)))
        index = (*picks[:keep], ..., *picks[tail:])
    else:
        index = tuple(picks[:keep])
    return shape, dtype, index


@examples(150)
@given(cases(), st.sampled_from([64, 100, 256]))
def test_any_index_is_numpys_answer(case, chunk_bytes):
    shape, dtype, index = case
    tensor = filled(shape, str(dtype).removeprefix("torch."))
    with small_grid(chunk_bytes, list_threshold=4), open_on(new_backend()) as reg:
        check(reg.create_run("r").save({"m": {"t": tensor}}, step=1)["m/t"], tensor, index)


@pytest.fixture
def saved(grid, run):
    """A matrix of 40 rows of 100 bytes, two rows a chunk, 20 chunks."""
    state = {"m": {"w": torch.arange(1000).reshape(40, 25).float(), "n": np.arange(600)}}
    return run.save(state, step=1), state


def read_bytes(backend, act) -> tuple[int, list]:
    """Return the bytes that an act read from packs, and the ranges."""
    calls = []
    with open_on(Metered(backend, calls)) as reg:
        lazy = reg.checkpoint("run")["m/w"]
        lazy[0]  # the digest list
        calls.clear()
        act(lazy)
    got = [call for call in calls if call.method == "get"]
    assert all(call.key.startswith("packs/") for call in got)
    return bytes_read(calls), got


def test_only_the_chunks_that_are_touched_are_read(saved, backend):
    assert read_bytes(backend, lambda lazy: lazy[5])[0] == 200
    assert read_bytes(backend, lambda lazy: lazy[5:7, 3])[0] == 400
    assert read_bytes(backend, lambda lazy: lazy[::10])[0] == 4 * 200
    assert read_bytes(backend, lambda lazy: lazy[10:10])[0] == 0


def test_neighbouring_chunks_are_read_at_once(saved, backend):
    size, calls = read_bytes(backend, lambda lazy: lazy[3:21, 1:2])
    assert (size, len(calls)) == (10 * 200, 1)


def test_reading_all_reads_each_chunk_once(saved, backend):
    size, calls = read_bytes(backend, lambda lazy: lazy[...])
    assert (size, len(calls)) == (4000, 1)


def test_what_is_told_without_reading(saved, backend):
    checkpoint, _ = saved
    lazy = checkpoint["m/w"]
    assert (lazy.shape, lazy.ndim, lazy.nbytes, len(lazy)) == ((40, 25), 2, 4000, 40)
    assert lazy.dtype == torch.float32
    assert checkpoint["m/n"].dtype == np.int64
    assert "m/w float32[40, 25]" in repr(lazy)
    assert np.asarray(lazy).shape == (40, 25)


def test_bounded_memory_gives_the_same(saved, monkeypatch):
    monkeypatch.setattr("holdfast.registry.store.lazy._HELD_BYTES", 1)
    checkpoint, state = saved
    check(checkpoint["m/w"], state["m"]["w"], (slice(None, None, -3), slice(1, 20, 2)))


def test_equal_chunks_are_read_once_and_land_everywhere(grid, run, backend):
    tensor = torch.zeros(40, 25)
    checkpoint = run.save({"m": {"w": tensor}}, step=1)
    for index in (..., slice(None, None, 3), (slice(1, 9), slice(3, 5))):
        check(checkpoint["m/w"], tensor, index)


def test_a_damaged_chunk_is_refused_and_the_others_are_read(saved, backend, open_registry):
    checkpoint, state = saved
    (pack,) = {key for key in packs_of(checkpoint) if backend.stat(key).size_bytes > 4000}
    flip(backend, pack, 8 * 250)
    fresh = open_registry(backend).checkpoint("run")
    with pytest.raises(Damaged):
        fresh["m/w"][2]
    check(fresh["m/w"], state["m"]["w"], slice(4, 6))


def test_a_pack_that_is_gone(saved, backend, open_registry):
    checkpoint, _ = saved
    for key in packs_of(checkpoint):
        backend.delete(key)
    with pytest.raises(MissingObject):
        open_registry(backend).checkpoint("run")["m/w"][0]


@pytest.mark.parametrize("index", [[1, 2], True, np.array([1]), None, 1.5, "a", (0, [1])])
def test_other_indices_are_refused(saved, index):
    with pytest.raises(InvalidInput, match="integers, slices"):
        saved[0]["m/w"][index]


@pytest.mark.parametrize("index", [40, -41, (0, 25), (0, 0, 0)])
def test_what_is_out_of_range(saved, index):
    with pytest.raises(IndexError, match="m/w") as caught:
        saved[0]["m/w"][index]
    assert isinstance(caught.value, OutOfRange)


def test_one_ellipsis_at_most(saved):
    with pytest.raises(InvalidInput, match=r"m/w.*one ellipsis"):
        saved[0]["m/w"][..., ...]


@pytest.mark.parametrize("index", [slice(None, None, 0), slice(1.5, 2), slice("a")])
def test_slices_that_are_none(saved, index):
    with pytest.raises(InvalidInput, match=r"m/w.*not a slice"):
        saved[0]["m/w"][index]


def test_rows_are_iterated_over_by_chunks(saved, backend):
    checkpoint, state = saved
    for path, whole in (("m/w", state["m"]["w"]), ("m/n", state["m"]["n"])):
        rows = list(checkpoint[path])
        assert len(rows) == len(whole)
        assert all(bool((row == want).all()) for row, want in zip(rows, whole, strict=True))
    size, calls = read_bytes(backend, lambda lazy: list(zip(range(7), lazy, strict=False)))
    assert (size, len(calls)) == (4 * 200, 4)


def test_whether_an_element_is_in_it(saved, run):
    lazy = saved[0]["m/w"]
    assert 999.0 in lazy
    assert 0.5 not in lazy
    scalar = run.save({"m": {"s": torch.tensor(3)}}, step=2)["m/s"]
    assert 3 in scalar
    assert 4 not in scalar
    with pytest.raises(TypeError, match="without axes"):
        list(scalar)


def test_a_state_knows_its_paths(saved):
    checkpoint, _ = saved
    assert list(checkpoint) == list(checkpoint.tensors()) == ["m/w", "m/n"]
    assert "m/w" in checkpoint
    assert "m" not in checkpoint
    for path in (5, None, ("m", "w")):
        assert path not in checkpoint
        with pytest.raises(InvalidInput, match="named by its path"):
            checkpoint[path]


def test_a_path_that_is_none(saved):
    with pytest.raises(NotFound, match="m/w"):
        saved[0]["m/ww"]
    with pytest.raises(NotFound, match="no such tensor"):
        saved[0]["m"]


def test_a_tensor_without_axes_has_no_length(run):
    lazy = run.save({"m": {"s": torch.tensor(2.5)}}, step=1)["m/s"]
    assert lazy[...] == lazy[()] == 2.5
    with pytest.raises(TypeError):
        len(lazy)


def test_a_repack_moves_what_a_handle_reads(run, reg, backend, open_registry):
    state = small_state(1)
    held = run.save(state, step=1)
    lazy = held["model/w"]
    save_small(run, 2, 3)
    other = open_registry(backend)
    other.repack()
    other.gc(grace_s=0)
    check(lazy, state["model"]["w"], slice(3, 50, 2))


# A state by components


def test_components_are_loaded_at_their_first_access(run, backend):
    run.save(small_state(1), step=1)
    calls = []
    with open_on(Metered(backend, calls)) as reg:
        state = reg.checkpoint("run").lazily()
        assert list(state) == ["model", "optimizer"]
        assert len(state) == 2
        calls.clear()
        assert ("model" in state, "other" in state, None in state) == (True, False, False)
        assert calls == []
        for other in ("other", "model/w", None, 5):  # None would be the whole state for a load
            with pytest.raises(NotFound, match="no such component; expected model, optimizer"):
                state[other]
            assert state.get(other) is None
        assert calls == []
        assert same(state["model"], small_state(1)["model"])
        first = len([call for call in calls if call.key.startswith("packs/")])
        assert "model loaded of model, optimizer" in repr(state)
        assert state["model"] is state["model"]
        assert len([call for call in calls if call.key.startswith("packs/")]) == first == 1
        assert same(dict(state), small_state(1))
        with pytest.raises(UnsupportedValue, match="cannot be pickled or copied"):
            pickle.dumps(state)
