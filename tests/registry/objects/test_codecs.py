"""Compressed chunks: the same state, the same id, fewer bytes; and nothing believed unchecked."""

from __future__ import annotations

import struct
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast import Storing, sync
from holdfast.registry.errors import Damaged, IntegrityError, InvalidInput, Malformed
from holdfast.registry.face.factory import open_on
from holdfast.registry.history.log import RunLog
from holdfast.registry.objects import codecs
from holdfast.registry.objects.codecs import CODECS, COMPRESSIONS, LZ4, PLANES, RAW, ZSTD
from holdfast.registry.objects.codecs import blosc as frames
from holdfast.registry.objects.keys import ObjectKey
from holdfast.registry.objects.pack import PackTable, trailer
from holdfast.registry.objects.placement import PackRef, Rows
from holdfast.registry.values.digest import Digest
from tests.support.faults import flip
from tests.support.loads import refused
from tests.support.states import same
from tests.support.stores import codecs_of, contents, new_backend, packs_of, small_grid
from tests.support.strategies import examples

COMPRESSED = ("auto", "zstd", "lz4")


def state(seed: int = 0, rows: int = 400) -> dict:
    """Return a state of weights that shrink by a third, counters that shrink, and noise."""
    fresh = np.random.default_rng(seed)
    weights = torch.from_numpy(fresh.normal(size=(rows, 50)).astype(np.float32)).bfloat16()
    return {
        "model": {"w": weights, "ids": torch.arange(rows * 20) + seed},
        "noise": {"x": fresh.integers(0, 256, rows * 100, np.uint8)},
        "step": seed,
    }


def stored_bytes(checkpoint) -> int:
    return sum(pack.size_bytes for pack in checkpoint.handle.reader.placement.packs)


@pytest.fixture(params=COMPRESSED)
def compressed(request, run):
    return run.save(state(), step=1, storing=Storing(compression=request.param))


# The same state, fewer bytes


def test_what_is_compressed_has_the_same_id_and_comes_back_bit_for_bit(compressed, reg):
    plain = reg.create_run("plain").save(state(), step=1)
    assert compressed.digest == plain.digest
    assert stored_bytes(compressed) < 0.75 * stored_bytes(plain)
    assert same(compressed.load(), state())
    assert reg.verify(deep=True).findings == ()


def test_what_does_not_shrink_stays_raw(compressed):
    assert RAW in codecs_of(compressed)
    assert len(codecs_of(compressed)) == 2


def test_a_tensor_is_given_up_after_a_sample(run, monkeypatch):
    tried = []
    encode = codecs.encode
    monkeypatch.setattr(
        codecs, "encode", lambda data, *more: tried.append(len(data)) or encode(data, *more)
    )
    with small_grid(512 * 1024):
        noise = np.random.default_rng(0).integers(0, 256, 3 * 2**20, np.uint8)
        run.save({"noise": noise}, step=1, storing=Storing(compression="zstd"))
    assert max(tried) <= 128 * 1024
    assert sum(tried) <= 2 * 128 * 1024  # two threads may try at once


def test_a_registry_has_a_compression_of_its_own(tmp_path):
    with holdfast.init(tmp_path, compression="lz4", skip_race_probe=True) as reg:
        run = reg.create_run("r")
        assert LZ4 in codecs_of(run.save(state(1), step=1))
        assert ZSTD in codecs_of(run.save(state(2), step=2, storing=Storing(compression="zstd")))
        assert codecs_of(run.save(state(3), step=3, storing=Storing(compression="none"))) == {RAW}
    with holdfast.open(tmp_path) as reg:
        assert LZ4 in codecs_of(reg.run("r").save(state(4), step=4))


@pytest.mark.parametrize("wanted", ["zst", "", "gzip", 3])
def test_a_compression_that_is_none(run, tmp_path, wanted):
    with pytest.raises(InvalidInput, match="no such compression"):
        run.save(state(), step=1, storing=Storing(compression=wanted))
    with pytest.raises(InvalidInput, match="no such compression"):
        holdfast.init(tmp_path / "r", compression=wanted)
    assert not (tmp_path / "r").exists()


def test_what_is_stored_already_is_used_however_it_is_stored(run):
    first = run.save(state(), step=1)
    second = run.save(state() | {"step": 1}, step=2, storing=Storing(compression="zstd"))
    assert set(packs_of(second)) <= set(packs_of(first))


def test_parts_are_read_as_well(compressed):
    whole = state()["model"]["w"]
    assert torch.equal(compressed["model/w"][17:300:13, ::-1], whole[17:300:13].flip(1))


def test_compressed_checkpoints_travel_move_and_are_collected(run, reg, backend, open_registry):
    for step in range(4):
        run.save(state(step), step=step, storing=Storing(compression="zstd"))
    mirror = open_registry(new_backend("codecs-mirror"))
    sync(reg, mirror)
    assert same(mirror.checkpoint("run").load(), state(3))
    run.retention.prune(holdfast.Retention(last=1))
    assert reg.repack().packs_written
    assert reg.gc(grace_s=0).deleted.objects
    fresh = open_registry(backend)
    assert same(fresh.checkpoint("run").load(), state(3))
    assert ZSTD in codecs_of(fresh.checkpoint("run"))
    for report in (fresh.verify(deep=True), mirror.verify(deep=True)):
        assert report.findings == ()


@st.composite
def states(draw):
    dtype = draw(st.sampled_from([np.uint8, np.int16, np.float32, np.int64, np.complex128]))
    size = draw(st.integers(0, 3000))
    kind = draw(st.sampled_from(["zeros", "steps", "noise", "few"]))
    fresh = np.random.default_rng(size)
    raw = {
        "zeros": np.zeros(size),
        "steps": np.arange(size) % 120,
        "noise": fresh.integers(0, 120, size),
        "few": fresh.choice([0, 1, 7], size),
    }[kind].astype(dtype)
    return {"m": {"a": raw, "b": raw[: size // 2].copy(), "c": draw(st.integers())}}


@examples(60)
@given(states(), st.sampled_from(list(COMPRESSIONS)), st.sampled_from([200, 700]), st.slices(40))
def test_any_state_any_compression_any_slice(value, compression, chunk_bytes, part):
    with small_grid(chunk_bytes, list_threshold=4), open_on(new_backend()) as reg:
        checkpoint = reg.create_run("r").save(
            value, step=1, storing=Storing(compression=compression)
        )
        assert same(checkpoint.load(), value)
        assert checkpoint["m/a"][part].tobytes() == value["m"]["a"][part].tobytes()
        assert reg.verify(deep=True).findings == ()


def test_a_registry_of_raw_chunks_never_loads_the_compressor(tmp_path):
    code = (
        "import sys, numpy as np, holdfast\n"
        f"reg = holdfast.init({str(tmp_path / 'r')!r}, skip_race_probe=True)\n"
        "ck = reg.create_run('r').save({'m': {'w': np.arange(5000)}}, step=1)\n"
        "assert ck.load()['m']['w'][7] == 7\n"
        "assert 'numcodecs' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Nothing is believed unchecked


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_every_byte_of_a_compressed_pack_matters(compressed, backend, open_registry, every):
    key = packs_of(compressed)[0]
    size = backend.stat(key).size_bytes
    original = backend.get(key)
    for bit in range(4, size * 8, size * 8 // 40)[::every]:
        flip(backend, key, bit)
        fresh = open_registry(backend)
        with pytest.raises(IntegrityError):
            fresh.checkpoint("run").load()
        assert not fresh.verify(deep=True).ok
        backend.put(key, original)


@pytest.mark.parametrize("keep", [0, 10, 5000, -1, -48])
def test_a_compressed_pack_that_is_cut(compressed, backend, open_registry, keep):
    for key in packs_of(compressed):
        backend.put(key, backend.get(key)[:keep])
    with pytest.raises(IntegrityError):
        open_registry(backend).checkpoint("run").load()


def forged(reg, checkpoint, frame: bytes, codec: str = ZSTD, **claims):
    """Put a pack whose first encoded chunk is another frame, its digests fitting, and place it."""
    before = checkpoint.handle.reader.placement
    row = next(number for number, row in enumerate(before.rows) if row.codec)
    place = before.rows[row]
    table = reg.handle.store.table(before.packs[place.pack])
    digest = table.at(place.offset).digest
    entry = {
        "digest": digest,
        "offset": 0,
        "stored_bytes": len(frame),
        "raw_bytes": table.at(place.offset).raw_bytes,
        "codec": codec,
        "stored_digest": Digest.of(frame),
    }
    made = PackTable((type(table[0])(**(entry | claims)),)).encode()
    data = frame + made + trailer(made)
    pack = PackRef(ObjectKey("packs", Digest.of(made), 0), len(data))
    reg.handle.store.backend.put(str(pack.key), data)
    rows = list(before.rows)
    number = CODECS.index(codec)
    rows[row] = type(place)(len(before.packs), 0, len(frame), number, place.base)
    after = type(before)(before.manifest, (*before.packs, pack), Rows(rows), before.extra)
    moved = checkpoint.handle.reader.place.changed(placement=after.digest)
    reg.handle.store.backend.put(str(moved.placement_key), after.encode())
    log = RunLog(reg.handle.store, "run")
    log.open()
    log.append(lambda _: [moved])
    return table.at(place.offset)


@pytest.fixture
def zipped(run):
    return run.save(state(), step=1, storing=Storing(compression="zstd"))


def test_a_frame_that_claims_gigabytes_takes_none(zipped, reg, backend, open_registry):
    bomb = struct.pack("<BBBBIII", 2, 1, 0x91, 1, 2**31 - 1, 2**18, 1000) + bytes(984)
    forged(reg, zipped, bomb)
    refused(backend, open_registry, "other lengths")


def test_a_frame_of_another_chunk_is_found_by_its_hash(zipped, reg, backend, open_registry):
    row = next(row for row in zipped.handle.reader.placement.rows if row.codec)
    table = reg.handle.store.table(zipped.handle.reader.placement.packs[row.pack])
    frame = codecs.encode(bytes(table.at(row.offset).raw_bytes), 2, ZSTD)
    forged(reg, zipped, frame)
    refused(backend, open_registry, "do not hash")


@pytest.mark.parametrize(
    ("mangle", "match"),
    [
        (lambda frame: frame[:10], "not a Blosc frame|other lengths"),
        (lambda frame: bytes([7]) + frame[1:], "other lengths"),
        (lambda frame: frame[:3] + b"\0" + frame[4:], "other lengths"),
        (lambda frame: frame[:8] + b"\0\0\0\0" + frame[12:], "other lengths"),
        (lambda frame: frame[:2] + bytes([frame[2] & 0x1F | 0x20]) + frame[3:], "compressor"),
        (lambda frame: frame[:40] + bytes(len(frame) - 40), "damaged|hash"),
        (lambda frame: frame[:-1], "other lengths"),
    ],
)
def test_a_forged_frame_is_refused(zipped, reg, backend, open_registry, mangle, match):
    place = next(row for row in zipped.handle.reader.placement.rows if row.codec)
    pack = zipped.handle.reader.placement.packs[place.pack]
    frame = backend.get(str(pack.key))[place.offset : place.offset + place.stored_bytes]
    forged(reg, zipped, mangle(frame))
    refused(backend, open_registry, match)


def test_a_chunk_that_encoding_made_longer_is_refused(zipped, reg, backend, open_registry):
    with pytest.raises(Malformed, match=r"not shorter|as long as"):
        forged(reg, zipped, bytes(100_000))
        open_registry(backend).checkpoint("run").load()


def test_a_placement_and_a_table_that_differ(zipped, reg, backend, open_registry):
    place = next(row for row in zipped.handle.reader.placement.rows if row.codec)
    pack = zipped.handle.reader.placement.packs[place.pack]
    frame = backend.get(str(pack.key))[place.offset : place.offset + place.stored_bytes]
    forged(reg, zipped, frame, digest=Digest.of(b"another"))
    refused(backend, open_registry, "different chunks")


@examples(80)
@given(
    st.binary(min_size=1, max_size=4000),
    st.sampled_from([ZSTD, LZ4]),
    st.sampled_from([1, 2, 4, 8, 16]),
)
def test_frames_come_back(data, codec, item_bytes):
    frame = frames.encode(data, item_bytes, codec)
    into = bytearray(len(data))
    frames.decode(frame, codec, memoryview(into), where="x")
    assert bytes(into) == data
    with pytest.raises(Malformed):
        frames.decode(frame, codec, memoryview(bytearray(len(data) + 1)), where="x")


@examples(200)
@given(
    st.binary(max_size=300),
    st.sampled_from([ZSTD, LZ4]),
    st.integers(0, 600),
    st.sampled_from([0x91, 0x81, 0x31, 0x21]),  # of either compressor, blocks whole or split
    st.sampled_from([1, 2, 4]),
)
def test_noise_is_never_a_crash(noise, codec, size, flags, item_bytes):
    header = struct.pack("<BBBBIII", 2, 1, flags, item_bytes, size, max(size, 1), len(noise) + 16)
    for frame in (noise, header + noise):
        into = bytearray(size)
        try:
            frames.decode(frame, codec, memoryview(into), where="x")
        except (Damaged, Malformed):
            continue
        assert len(into) == size


# Planes of bytes apart


def floats(count: int, dtype: object = np.float32) -> bytes:
    return np.random.default_rng(count).normal(size=count).astype(dtype).tobytes()


def streams(frame: bytes) -> list[bytes]:
    """Return the streams of each block of a frame, one after another."""
    flags, item, raw, block = struct.unpack_from("<xxBBII", frame)
    found = []
    for number, at in enumerate(struct.unpack_from(f"<{-(-raw // block)}I", frame, 16)):
        is_split = not flags & 16 and (number + 1) * block <= raw
        for _ in range(item if is_split else 1):
            (length,) = struct.unpack_from("<I", frame, at)
            found.append(frame[at + 4 : at + 4 + length])
            at += 4 + length
    return found


@pytest.mark.parametrize(
    ("dtype", "zipped"),
    [(ml_dtypes.bfloat16, [1]), (np.float16, [1]), (np.float32, [3]), (np.float64, [6, 7])],
)
def test_only_planes_that_shrink_are_compressed(dtype, zipped):
    data = floats(40_000, dtype)
    size = len(data) // 40_000
    parts = streams(codecs.encode(data, size, PLANES))
    planes = [data[plane::size] for plane in range(size)]
    assert [n for n, part in enumerate(parts) if part != planes[n]] == zipped
    assert [zstandard.decompress(parts[n]) for n in zipped] == [planes[n] for n in zipped]


@pytest.mark.parametrize(("dtype", "share"), [(ml_dtypes.bfloat16, 0.975), (np.float32, 0.988)])
def test_planes_are_shorter_than_what_blosc_makes(dtype, share):
    data = floats(500_000, dtype)
    size = len(data) // 500_000
    assert len(codecs.encode(data, size, PLANES)) < share * len(codecs.encode(data, size, ZSTD))


@examples(60)
@given(
    st.one_of(st.integers(1, 3000), st.integers(260_000, 270_000)),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 7),
    st.sampled_from(["noise", "floats", "zeros"]),
)
def test_planes_come_back(items, item_bytes, odd, kind):
    fresh = np.random.default_rng(items)
    raw = {"noise": fresh.bytes, "floats": lambda n: floats(n // 4 + 1), "zeros": bytes}[kind](
        items * item_bytes
    )
    data = raw + fresh.bytes(odd % item_bytes)
    frame = codecs.encode(data, item_bytes, PLANES)
    into = bytearray(len(data))
    codecs.decode(frame, ZSTD, memoryview(into), where="x")
    assert bytes(into) == data


def test_where_the_lowest_bytes_repeat_blosc_makes_the_frame():
    data = (np.arange(30_000, dtype=np.float32) % 9).tobytes()
    assert codecs.encode(data, 4, PLANES) == codecs.encode(data, 4, ZSTD)


def test_auto_chooses_by_the_type_of_elements(run, reg, backend):
    kinds = (ml_dtypes.bfloat16, np.float32, np.float64, np.int32)
    value = {"m": {np.dtype(kind).name: np.frombuffer(floats(9000, kind), kind) for kind in kinds}}
    checkpoint = run.save(value, step=1, storing=Storing(compression="auto"))
    assert codecs_of(checkpoint) <= {RAW, ZSTD}  # what every version reads
    placement = checkpoint.handle.reader.placement
    split = set()
    for row, tensor in zip(placement.rows, checkpoint.manifest.tensors(), strict=True):
        stored = backend.get(str(placement.packs[row.pack].key))[row.offset :][: row.stored_bytes]
        if row.codec and not stored[2] & 16:
            split.add(tensor.dtype)
    assert split == {"bfloat16", "float32"}
    assert same(checkpoint.load(), value)


def test_the_list_is_closed(backend, run):
    assert CODECS == ("raw", "blosc-zstd", "blosc-lz4")
    with pytest.raises(Malformed, match="codec not allowed"):
        codecs.codec_number("pickle", where="x")
    with pytest.raises(Malformed, match="codec not allowed"):
        codecs.codec_name(3, where="x")
    assert contents(backend)
