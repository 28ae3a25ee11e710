"""The read path: every byte is checked before it is handed out, and few requests are made."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest

from holdfast.backends.wrappers import Metered, Wrapper
from holdfast.registry.errors import Damaged, IntegrityError, Malformed, MissingObject
from holdfast.registry.objects.keys import ObjectKey
from holdfast.registry.objects.manifest import Component, Manifest
from holdfast.registry.objects.placement import ChunkIndex, ChunkRow, PackRef, Placement, Rows
from holdfast.registry.objects.tensor_entry import TensorEntry
from holdfast.registry.store import fetching, reading
from holdfast.registry.values.digest import Digest, Digests
from tests.support.faults import flip
from tests.support.states import same, small_state
from tests.support.stores import contents, packs_of, small_grid


def fresh(open_registry, backend):
    return open_registry(backend).run("run").latest()


def test_what_was_saved_comes_back(run, backend, open_registry):
    run.save(small_state(), step=1)
    assert same(fresh(open_registry, backend).load(), small_state())


def test_every_flipped_bit_of_a_chunk_is_noticed(run, backend):
    checkpoint = run.save(small_state(), step=1)
    ends = dict.fromkeys(packs_of(checkpoint), 0)
    for row in checkpoint.handle.reader.placement.rows:
        key = packs_of(checkpoint)[row.pack]
        ends[key] = max(ends[key], row.offset + row.stored_bytes)
    for key, end in ends.items():
        original = backend.get(key)
        for bit in range(0, end * 8, 997):
            flip(backend, key, bit)
            with pytest.raises(Damaged, match=key):
                checkpoint.load()
            backend.put(key, original)
    assert same(checkpoint.load(), small_state())


def test_a_damaged_chunk_says_file_offset_expected_and_found(run, backend, open_registry):
    checkpoint = run.save(small_state(), step=1)
    key = packs_of(checkpoint)[0]
    flip(backend, key, 8 * 2500)
    with pytest.raises(Damaged) as caught:
        checkpoint.load()
    assert caught.value.where == f"{key} at offset 2400"
    assert caught.value.expected != caught.value.found
    assert Digest.parse(caught.value.expected) in checkpoint.manifest.direct_chunks


def test_a_pack_that_ends_early_is_damaged(run, backend):
    checkpoint = run.save(small_state(), step=1)
    key = packs_of(checkpoint)[0]
    size = len(backend.get(key))
    backend.put(key, backend.get(key)[:100])
    with pytest.raises(Damaged, match=rf"{key}: damaged pack.*expected {size} bytes; found 100"):
        checkpoint.load()


def test_a_pack_that_is_gone_is_missing(run, backend):
    checkpoint = run.save(small_state(), step=1)
    key = packs_of(checkpoint)[1]
    backend.delete(key)
    with pytest.raises(MissingObject, match=rf"{key}.*gone.*holdfast verify"):
        checkpoint.load()


@pytest.mark.parametrize("kind", ["manifests", "placements"])
def test_a_damaged_or_absent_description_is_noticed(run, backend, open_registry, kind):
    run.save(small_state(), step=1)
    (key,) = contents(backend, kind)
    flip(backend, key)
    with pytest.raises(Damaged, match=key):
        fresh(open_registry, backend).load()
    backend.delete(key)
    with pytest.raises(MissingObject, match=key):
        fresh(open_registry, backend).load()


def test_neighbouring_chunks_are_read_together(backend, open_registry):
    calls = []
    run = open_registry(Metered(backend, calls)).create_run("run")
    state = {"m": {f"w{i}": np.arange(50) + i for i in range(300)}}
    checkpoint = run.save(state, step=1)
    calls.clear()
    assert same(checkpoint.load(), state)
    assert len([call for call in calls if call.key.startswith("packs/")]) == 1


def test_only_what_is_wanted_is_read(backend, open_registry):
    calls = []
    metered = Metered(backend, calls)
    run = open_registry(metered).create_run("run")
    checkpoint = run.save(small_state(), step=1)
    calls.clear()
    with metered.measure() as usage:
        checkpoint.load(only=["optimizer"])
    assert usage.read_bytes == 3600


def test_reads_are_split_by_size(backend, open_registry, monkeypatch):
    monkeypatch.setattr(fetching, "_JOB_BYTES", 2000)
    calls = []
    run = open_registry(Metered(backend, calls)).create_run("run")
    state = {"m": {f"w{i}": np.arange(50) + i for i in range(100)}}
    checkpoint = run.save(state, step=1)
    calls.clear()
    assert same(checkpoint.load(), state)
    ranges = sorted((c.byte_range.start, c.byte_range.stop) for c in calls if c.byte_range)
    assert len(ranges) == 20
    assert all(stop == start for (_, stop), (start, _) in pairwise(ranges))


def test_equal_chunks_are_read_once_and_fill_every_tensor(backend, open_registry):
    metered = Metered(backend)
    run = open_registry(metered).create_run("run")
    one = np.arange(1000)
    state = {"a": {"x": one, "y": one.copy(), "z": one.reshape(10, 100).copy()}}
    checkpoint = run.save(state, step=1)
    with metered.measure() as usage:
        loaded = checkpoint.load()
    assert same(loaded, state)
    assert usage.read_bytes == one.nbytes
    loaded["a"]["x"][0] = 7
    assert loaded["a"]["y"][0] == 0


@pytest.mark.parametrize("lists", [1, 3])
def test_a_lazy_tensor_reads_the_digest_lists_that_it_needs(backend, open_registry, lists):
    dice = np.random.default_rng(0)
    state = {f"w{n}": dice.integers(0, 256, 640, np.uint8) for n in range(3)}
    if lists == 3:  # rows after a chunk that occurs twice are known from all lists alone
        state["w0"][64:128] = state["w0"][:64]
    with small_grid(64, list_threshold=4):
        open_registry(backend).create_run("run").save({"m": state}, step=1)
        calls = []
        checkpoint = fresh(open_registry, Metered(backend, calls))
        found = checkpoint["m/w1"][100:101]
        assert found == state["w1"][100:101]
        packs = [call.byte_range for call in calls if call.key.startswith("packs/")]
        assert sum(map(len, packs)) == lists * 10 * 32 + 64
        assert checkpoint["m/w2"][5] == state["w2"][5]
        assert same(checkpoint.load(), {"m": state})
        # A worker gets digests from its caller, and has read no list.
        digests = checkpoint.handle.reader.chunk_digests(
            checkpoint.manifest.components["m"].tensors[2]
        )
        buffer = bytearray(64)
        fresh(open_registry, backend).handle.reader.read_chunks({digests[3]: memoryview(buffer)})
        assert bytes(buffer) == state["w2"][192:256].tobytes()


# A placement that does not fit


KEY = ObjectKey("packs", Digest.of(b"p"), 0)
ENTRY = TensorEntry("uint8", (100,), chunks=(Digest.of(bytes(100)),))
MANIFEST = Manifest("dict", {"m": Component.build({"B": 0}, [ENTRY])})


def _read(reg, *rows):
    placement = Placement(MANIFEST.digest, (PackRef(KEY, 1000),), Rows(rows))
    reading.read_tensors(
        reg.handle.store, MANIFEST, placement, [(ENTRY, memoryview(bytearray(100)))]
    )


def test_a_row_of_another_length_than_its_tensor_gives_is_malformed(reg):
    with pytest.raises(Malformed, match=r"another length.*expected 100 bytes; found 99"):
        _read(reg, ChunkRow(0, 0, 99))


@pytest.mark.parametrize("count", [0, 2])
def test_a_placement_of_other_rows_is_malformed(reg, count):
    with pytest.raises(Malformed, match="does not cover its manifest"):
        _read(reg, *[ChunkRow(0, 0, 100)] * count)


def test_a_placement_without_a_row_for_a_list_is_malformed(reg):
    with small_grid(50, list_threshold=1):
        entry = TensorEntry("uint8", (100,), chunk_list=Digest.of(b"list"))
        manifest = Manifest("dict", {"m": Component.build({"B": 0}, [entry])})
        placement = Placement(manifest.digest, (PackRef(KEY, 1000),), Rows(()))
        with pytest.raises(IntegrityError):
            reading.read_lists(reg.handle.store, manifest, placement)


@pytest.mark.parametrize("base", [1, 3])
def test_a_list_that_is_a_delta_to_one_of_its_members_is_malformed(reg, base):
    """What lies in the rows of its members nobody knows before the list is read."""
    with small_grid(50, list_threshold=1):
        entry = TensorEntry("uint8", (100,), chunk_list=Digest.of(b"list"))
        manifest = Manifest("dict", {"m": Component.build({"B": 0}, [entry])})
        rows = [ChunkRow(0, 0, 20, 1, base), *[ChunkRow(0, 100, 50)] * 3]
        extra = Digests([Digest.of(b"base")])
        placement = Placement(manifest.digest, (PackRef(KEY, 1000),), Rows(rows), extra)
        places = ChunkIndex(placement, manifest.direct_chunks)
        if base == 3:
            assert places.digest(base) == Digest.of(b"base")
            return
        with pytest.raises(Malformed, match="base of a delta is not known"):
            places.digest(base)


def test_a_list_longer_than_its_tensor_gives_it_takes_no_memory(reg):
    with small_grid(50, list_threshold=1):
        entry = TensorEntry("uint8", (100,), chunk_list=Digest.of(b"list"))
        manifest = Manifest("dict", {"m": Component.build({"B": 0}, [entry])})
        rows = Rows([ChunkRow(0, 0, 65), *[ChunkRow(0, 100, 50)] * 2])
        placement = Placement(manifest.digest, (PackRef(KEY, 1000),), rows)
        with pytest.raises(Malformed, match=r"another length.*expected 64 bytes; found 65"):
            reading.read_lists(reg.handle.store, manifest, placement)


@pytest.mark.parametrize("stored", [100, 101])
def test_an_encoded_row_that_is_no_shorter_is_malformed(reg, stored):
    with pytest.raises(Malformed, match=r"as long as its raw bytes.*fewer than 100 bytes"):
        _read(reg, ChunkRow(0, 0, stored, 1))


def test_a_damaged_digest_list_is_noticed(run, backend, open_registry):
    with small_grid(64, list_threshold=4):
        checkpoint = run.save({"m": {"w": np.arange(640, dtype=np.uint8)}}, step=1)
        list_pack = packs_of(checkpoint)[0]
        flip(backend, list_pack, 5)
        with pytest.raises(Damaged, match=list_pack):
            fresh(open_registry, backend).load()


# Memory of the caller


class LateSecondRead(Wrapper):
    """Lets the read of one pack finish only when told."""

    def __init__(self, inner, late: str):
        super().__init__(inner)
        self.late = late
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.finished = threading.Event()

    def get(self, key, byte_range=None, *, into=None):
        if not key.startswith("packs/") or byte_range is None:
            return super().get(key, byte_range, into=into)
        if key != self.late:
            self.begun.wait(5)
            return super().get(key, byte_range, into=into)
        first = not self.begun.is_set()
        self.begun.set()
        if first:
            self.go_on.wait(0.3)
        try:
            return super().get(key, byte_range, into=into)
        finally:
            self.finished.set()


def test_a_failed_load_has_let_go_of_the_callers_memory(run, backend, open_registry):
    run.save(small_state(1), step=1)
    newest = run.save(small_state(2), step=2)
    damaged, late = packs_of(newest)
    flip(backend, damaged, 8)
    slow = LateSecondRead(backend, late)
    older, newest = open_registry(slow).run("run").checkpoints()
    target = small_state(9)
    with pytest.raises(Damaged):
        newest.load_into(target)
    older.load_into(target)
    slow.finished.clear()
    slow.go_on.set()
    slow.finished.wait(0.3)
    assert same(target["optimizer"]["m"], small_state(1)["optimizer"]["m"])


def test_the_rows_of_a_tensor_are_known_without_the_digests_of_others(backend, open_registry):
    """Opening a state makes no digest but the first of each tensor; the rows are those of all."""
    dice = np.random.default_rng(0)
    state = {"m": {str(n): dice.random(40) for n in range(5)}, "big": dice.random(400)}
    with small_grid(64, list_threshold=8):
        saved = open_registry(backend).create_run("run").save(state, step=1)
        reader = fresh(open_registry, backend).handle.reader
        manifest, placement = reader.manifest, reader.placement
        lists = reading.read_lists(saved.handle.store, manifest, placement)
        whole = reading.index_chunks(manifest, placement, lists)
        for entry in manifest.tensors():
            index = reading.StateIndex(saved.handle.store, manifest, placement, {})
            known = index.learn([entry])
            rows = [index.chunks.row(digest) for digest in entry.chunk_digests(known)]
            assert rows == [whole.row(digest) for digest in entry.chunk_digests(lists)]
            others = [one for one in manifest.tensors() if one.chunks and one is not entry]
            assert not any(digest in index.chunks for one in others for digest in one.chunks)
            assert others[-1].chunks[-1] in index.holding([others[-1].chunks[-1]])
