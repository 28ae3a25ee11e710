"""A checkpoint as a Zarr group: the values of `load`, and no byte that was not verified."""

from __future__ import annotations

import asyncio
import pickle
import sys
from concurrent.futures import Future

import ml_dtypes
import numpy as np
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.abc.store import RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype

from holdfast.backends.wrappers import Metered
from holdfast.registry.errors import (
    Damaged,
    IncompatibleState,
    InvalidInput,
    Malformed,
    MissingObject,
)
from holdfast.registry.face.factory import open_on
from holdfast.registry.loading.zarr import group
from holdfast.registry.loading.zarr import group as view
from holdfast.registry.loading.zarr.layout import ZarrLayout
from holdfast.registry.objects.chunking import RecentChunks
from holdfast.registry.objects.tensor_entry import TensorEntry
from holdfast.registry.values.digest import Digest
from holdfast.registry.values.dtypes import ITEM_SIZES
from tests.support.faults import flip
from tests.support.states import filled
from tests.support.stores import bytes_read, new_backend, packs_of, small_grid
from tests.support.strategies import examples

PROTOTYPE = default_buffer_prototype()


def bits(tensor) -> bytes:
    if isinstance(tensor, np.ndarray):
        return tensor.tobytes()
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


async def collect(items) -> list[str]:
    return [item async for item in items]


@pytest.fixture
def saved(grid, run):
    """A matrix of 41 rows of 100 bytes, two rows a chunk, 21 chunks named by a digest list."""
    state = {"m": {"w": torch.arange(1025).reshape(41, 25).float(), "n": np.arange(600)}}
    return run.save(state, step=1), state


# Values


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", ITEM_SIZES)
def test_every_dtype_and_shape_is_what_was_saved(name, grid, run, open_registry, backend):
    shapes = [(), (0, 5), (4,), (300,), (41, 25), (3, 5, 31), (2, 3, 1, 97), (1, 130)]
    state = {"m": {str(shape): filled(shape, name) for shape in shapes}}
    run.save(state, step=1)
    ck = open_registry(backend).checkpoint("run")
    loaded, group = ck.load()["m"], ck.zarr()["m"]
    shown = np.dtype("uint32" if name == "complex32" else getattr(ml_dtypes, name, name))
    for shape in shapes:
        array = group[str(shape)]
        assert array.shape == shape
        assert array.dtype == shown
        assert array.attrs["holdfast_dtype"] == name
        got = np.asarray(array[...])
        assert (got.shape, got.dtype) == (shape, shown)
        assert bits(got) == bits(loaded[str(shape)])


def test_bfloat16_is_numbers_with_ml_dtypes_and_bits_without(run, monkeypatch):
    ck = run.save({"w": torch.tensor([1.5, -2.0]).bfloat16()}, step=1)
    found = ck.zarr()["w"][...]
    assert (found.dtype, found.tolist()) == (ml_dtypes.bfloat16, [1.5, -2.0])
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert group.native_types.__wrapped__() == frozenset()
    monkeypatch.setattr(view, "native_types", frozenset)
    array = ck.zarr()["w"]
    assert (array.dtype, array[...].tolist()) == (np.uint16, [0x3FC0, 0xC000])
    assert array.attrs["holdfast_dtype"] == "bfloat16"


def test_a_view_of_bfloat16_survives_pickling_of_its_metadata(run):
    array = run.save({"w": torch.ones(2).to(torch.float8_e5m2)}, step=1).zarr()["w"]
    again = pickle.loads(pickle.dumps(array.metadata))
    assert again.data_type == array.metadata.data_type
    assert again.fill_value.dtype == ml_dtypes.float8_e5m2


def test_chunks_are_those_of_the_store(run):
    tensor = np.arange(3 * 1000 * 700, dtype=np.float64).reshape(3, 1000, 700)
    array = run.save({"t": tensor}, step=1).zarr()["t"]
    assert array.chunks == (1, 748, 700)
    assert (array[2, 740:760] == tensor[2, 740:760]).all()
    assert (array[...] == tensor).all()


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    return shape, tuple(
        draw(st.slices(length).filter(lambda one: (one.step or 1) > 0) | st.integers(0, length - 1))
        for length in shape
    )


@examples(80)
@given(cases(), st.sampled_from([64, 100, 256]))
def test_any_slice_is_numpys_answer(case, chunk_bytes):
    shape, index = case
    array = np.random.default_rng(1).random(shape)
    with small_grid(chunk_bytes, list_threshold=4), open_on(new_backend()) as reg:
        got = reg.create_run("r").save({"t": array}, step=1).zarr()["t"][index]
    np.testing.assert_array_equal(got, array[index])


# The hierarchy


def test_groups_arrays_and_attributes(run):
    state = {
        "m": {"layers": [{"w": torch.ones(3)}, {"w": torch.ones(4)}], "plain": 1},
        "bare": np.arange(5),
        "empty": {"lr": 0.1},
    }
    ck = run.save(state, step=1)
    group = ck.zarr()
    assert group.attrs.asdict() == {"ref": ck.ref, "id": str(ck.digest)}
    assert group.read_only
    members = dict(group.members(max_depth=None))
    arrays = {path for path, node in members.items() if isinstance(node, zarr.Array)}
    assert arrays == set(ck.tensors())
    assert set(members) - arrays == {"m", "m/layers", "m/layers/0", "m/layers/1"}
    assert all(members[path].shape == info.shape for path, info in ck.tensors().items())
    again = zarr.open_group(group.store, mode="r")
    assert set(again["m/layers"].group_keys()) == {"0", "1"}


@pytest.mark.parametrize(
    "key", ["a/b", "0", "", "ä ö", "c", "x.y", 3, (1, 2), "null", "/a", "a b", "%2F", "__x"]
)
def test_a_tensor_stands_under_its_path(key, run):
    ck = run.save({"m": {key: torch.arange(20), "other": torch.zeros(2)}}, step=1)
    path = next(path for path in ck.tensors() if path != "m/other")
    group = ck.zarr()
    assert (group[path][...] == np.arange(20)).all()
    assert path in dict(group.members(max_depth=None))


@pytest.mark.parametrize("key", [".", "..", "a\\b", "a//b", '"q"', "zarr.json", "a/../b"])
def test_what_zarr_cannot_name_is_refused(key, run):
    ck = run.save({"m": {key: torch.arange(20)}}, step=1)
    with pytest.raises(IncompatibleState, match="cannot name") as caught:
        ck.zarr()
    assert "m/" in str(caught.value)


def test_a_tensor_within_a_tensor_is_refused():
    entry = TensorEntry("uint8", (1,), inline=b"x")
    with pytest.raises(Malformed, match="within another tensor"):
        ZarrLayout("ref", Digest(bytes(32)), {"a/b/c": entry, "a/b": entry})


def test_listing_agrees_with_what_is_there(saved):
    store = saved[0].zarr().store
    keys = asyncio.run(collect(store.list()))
    chunks = [f"m/w/c/{row}/0" for row in range(21)] + [f"m/n/c/{at}" for at in range(19)]
    nodes = ["zarr.json", "m/zarr.json", "m/w/zarr.json", "m/n/zarr.json"]
    assert sorted(keys) == sorted(chunks + nodes)
    for prefix in ("", "m", "m/", "m/w", "m/w/", "m/w/c", "m/w/c/1", "m/w/c/1/", "x", "m/w/zarr"):
        found = asyncio.run(collect(store.list_prefix(prefix)))
        assert sorted(found) == sorted(key for key in keys if key.startswith(prefix))
    for path in ("", "m", "m/", "m/w", "m/w/c", "m/w/c/1", "m/w/c/1/0", "x", "m/ww"):
        below = path.rstrip("/") + "/" if path else ""
        found = asyncio.run(collect(store.list_dir(path)))
        assert len(found) == len(set(found))
        assert set(found) == {k[len(below) :].split("/")[0] for k in keys if k.startswith(below)}


ABSENT = [
    "m/w/c/21/0",
    "m/w/c/0/1",
    "m/w/c/0",
    "m/w/c",
    "m/w/c/00/0",
    "m/w/c/-1/0",
    "m/w/c/0/0/0",
    "m/w/0/0",
    "m/c/0/0",
    "x/c/0",
    "m/w/c/٣/0",
    "m/.zarray",
    "/",
    "m/w",
    "m/w/c/+1/0",
]


@pytest.mark.parametrize("key", [*ABSENT, "", f"m/w/c/{'9' * 5000}/0"])
def test_other_keys_are_not_there(key, saved):
    store = saved[0].zarr().store
    assert asyncio.run(store.get(key, PROTOTYPE)) is None
    assert not asyncio.run(store.exists(key))
    with pytest.raises(FileNotFoundError):
        asyncio.run(store.getsize(key))


# What is fetched


def metered(backend, path, index, times=1):
    """Return the bytes that an index into an array reads from packs."""
    calls: list = []
    with open_on(Metered(backend, calls)) as reg:
        array = reg.checkpoint("run").zarr()[path]
        array[0]  # the digest list, and the first chunk
        calls.clear()
        for _ in range(times):
            array[index]
    assert all(call.key.startswith("packs/") for call in calls if call.method == "get")
    return bytes_read(calls)


def test_only_the_chunks_that_are_touched_are_read(saved, backend):
    assert metered(backend, "m/w", slice(5, 6)) == 200
    assert metered(backend, "m/w", (slice(5, 7), 3)) == 400
    assert metered(backend, "m/w", 40) == 100
    assert metered(backend, "m/w", slice(10, 10)) == 0


def test_a_chunk_is_kept_and_read_once(saved, backend):
    assert metered(backend, "m/w", slice(4, 8), times=3) == 400
    assert metered(backend, "m/w", 1) == 0


def test_opening_and_listing_read_the_manifest_alone(saved, backend):
    calls: list = []
    with open_on(Metered(backend, calls)) as reg:
        ck = reg.checkpoint("run")
        calls.clear()
        group = ck.zarr()
        store = group.store
        assert len(dict(group.members(max_depth=None))) == 3
        assert asyncio.run(store.getsize("m/w/c/20/0")) == 200
        assert asyncio.run(store.getsize_prefix("m/w/c/")) == 21 * 200
        assert asyncio.run(store.exists("m/w/c/20/0"))
    assert [call.key.split("/")[0] for call in calls] == ["manifests"]


def test_equal_chunks_are_read_once_by_many_threads(grid, run, backend):
    run.save({"t": torch.zeros(41, 25)}, step=1)
    calls: list = []
    with open_on(Metered(backend, calls)) as reg:
        array = reg.checkpoint("run").zarr()["t"]
        assert not array[...].any()
    lengths = [len(c.byte_range) for c in calls if c.key.startswith("packs/") and c.byte_range]
    assert sorted(lengths) == [100, 200, 21 * 32]


def test_what_is_kept_is_bounded(saved, backend, monkeypatch):
    monkeypatch.setattr(view, "RECENT_BYTES", 400)
    calls: list = []
    with open_on(Metered(backend, calls)) as reg:
        group = reg.checkpoint("run").zarr()
        assert (group["m/w"][...] == saved[1]["m"]["w"].numpy()).all()
        kept = group.store._recent
        assert kept._size_bytes == sum(map(len, kept._chunks.values())) == 400
        assert not kept._coming


def test_what_was_used_last_is_kept():
    kept, read = RecentChunks(2), []
    for name in "abacab":
        key = Digest(name.encode() * 32), 1
        kept.get(key, lambda: read.append(name) or memoryview(b"x"))  # noqa: B023
    assert "".join(read) == "abcb"


def test_a_part_of_a_chunk_is_a_slice_of_the_verified_whole(saved, backend):
    calls: list = []
    want = saved[1]["m"]["w"].numpy()[4:6].tobytes()
    with open_on(Metered(backend, calls)) as reg:
        store = reg.checkpoint("run").zarr().store
        part = asyncio.run(store.get("m/w/c/2/0", PROTOTYPE, RangeByteRequest(3, 17)))
        assert part.to_bytes() == want[3:17]
        pairs = [("m/w/c/2/0", SuffixByteRequest(9)), ("none", None), ("m/w/c/2/0", None)]
        last, none, whole = asyncio.run(store.get_partial_values(PROTOTYPE, pairs))
        assert (last.to_bytes(), none, whole.to_bytes()) == (want[-9:], None, want)
        everything = asyncio.run(store.get("m/w/c/2/0", PROTOTYPE, SuffixByteRequest(999)))
        assert everything.to_bytes() == want
        assert (
            asyncio.run(store.get("m/w/c/2/0", PROTOTYPE, SuffixByteRequest(0))).to_bytes() == b""
        )
    lengths = [len(c.byte_range) for c in calls if c.key.startswith("packs/") and c.byte_range]
    assert lengths.count(200) == 1


def test_the_last_chunk_is_filled_up_with_zeros(saved):
    store = saved[0].zarr().store
    last = asyncio.run(store.get("m/w/c/20/0", PROTOTYPE)).to_bytes()
    assert last == saved[1]["m"]["w"].numpy()[40].tobytes() + bytes(100)


def test_the_last_chunk_of_one_tensor_can_be_a_full_one_of_another(grid, run):
    store = run.save({"w": torch.zeros(41, 25), "n": torch.zeros(25)}, step=1).zarr().store
    for key, size in (("n/c/0", 100), ("w/c/20/0", 200)):
        assert asyncio.run(store.get(key, PROTOTYPE)).to_bytes() == bytes(size)


def test_what_is_kept_cannot_be_changed(saved):
    store = saved[0].zarr().store
    array = asyncio.run(store.get("m/w/c/0/0", PROTOTYPE)).as_numpy_array()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


# Damage


def test_a_damaged_chunk_is_refused_and_the_others_are_read(saved, backend, open_registry):
    ck, state = saved
    (pack,) = {key for key in packs_of(ck) if backend.stat(key).size_bytes > 4000}
    flip(backend, pack, 8 * 250)
    array = open_registry(backend).checkpoint("run").zarr()["m/w"]
    for _ in range(2):
        with pytest.raises(Damaged):
            array[2]
        with pytest.raises(Damaged):
            array[...]
    with pytest.raises(Damaged):  # its damaged byte is not among these
        part = RangeByteRequest(150, 160)
        asyncio.run(array.store.get("m/w/c/1/0", PROTOTYPE, part))
    assert (array[4:6] == state["m"]["w"].numpy()[4:6]).all()


def test_a_pack_that_is_gone(saved, backend, open_registry):
    array = open_registry(backend).checkpoint("run").zarr()["m/n"]
    for key in packs_of(saved[0]):
        backend.delete(key)
    with pytest.raises(MissingObject):
        array[0]


def test_every_thread_that_waits_gets_the_error():
    kept, key, coming = RecentChunks(100), (Digest(bytes(32)), 1), Future()

    def fail():
        raise Damaged("damaged")

    kept._coming[key] = coming
    coming.set_exception(Damaged("damaged"))
    with pytest.raises(Damaged):
        kept.get(key, lambda: memoryview(b"x"))
    del kept._coming[key]
    with pytest.raises(Damaged):
        kept.get(key, fail)
    assert kept.get(key, lambda: memoryview(b"y")) == b"y"


# Other things


def test_nothing_can_be_written(saved):
    group = saved[0].zarr()
    with pytest.raises(ValueError, match="read-only"):
        group["m/w"][0] = 1
    with pytest.raises(ValueError, match="read-only"):
        group.create_group("x")
    with pytest.raises(ValueError, match="read-only"):
        asyncio.run(group.store.delete("m/w/c/0/0"))


def test_equal_states_under_one_ref_are_equal_stores(saved, open_registry, backend):
    ck, _ = saved
    store, again = ck.zarr().store, open_registry(backend).checkpoint("run").zarr().store
    assert store == again
    assert hash(store) == hash(again)
    assert store != "store"


def test_a_view_is_not_pickled(saved):
    with pytest.raises(InvalidInput, match="each process"):
        pickle.dumps(saved[0].zarr().store)


def test_without_zarr(saved, monkeypatch):
    monkeypatch.delitem(sys.modules, "holdfast.registry.loading.zarr.group")
    monkeypatch.delattr("holdfast.registry.loading.zarr.group")
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(InvalidInput, match=r"pip install .*\[zarr\]"):
        saved[0].zarr()


def test_dask_reads_the_same(saved):
    dask_array = pytest.importorskip("dask.array", reason="dask is not installed")
    group, want = saved[0].zarr(), saved[1]["m"]["w"].numpy()
    lazy = dask_array.from_zarr(group["m/w"])
    assert lazy.chunksize == (2, 25)
    assert (lazy.compute(scheduler="threads") == want).all()
    assert lazy[7:].sum().compute(scheduler="threads") == want[7:].sum()


def test_xarray_reads_the_same(saved):
    xarray = pytest.importorskip("xarray", reason="xarray, which wants pandas, is not installed")
    store = saved[0].zarr().store
    data = xarray.open_zarr(store, group="m", consolidated=False, zarr_format=3, chunks=None)
    assert (data["w"].values == saved[1]["m"]["w"].numpy()).all()
    assert (data["n"].values == saved[1]["m"]["n"]).all()
    assert dict(data.sizes) == {"axis0_41": 41, "axis1_25": 25, "axis0_600": 600}
