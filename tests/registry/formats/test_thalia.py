"""Files of Thalia: those of the real programs, those written here, and damaged ones."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
import random
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lz4.frame
import numpy as np
import pytest
import zstandard

from holdfast.backends import limits
from holdfast.registry import formats
from holdfast.registry.errors import (
    IncompatibleState,
    InvalidInput,
    NotFound,
    RegistryError,
    UnsupportedFormat,
    UnsupportedValue,
)
from holdfast.registry.formats import thalia
from holdfast.registry.formats.content import MemoryContent
from holdfast.registry.formats.thalia import delta, framing
from holdfast.registry.formats.thalia.tensors import as_array
from holdfast.registry.pytree import TensorBytes, encoding
from tests.support.foreign import foreign
from tests.support.states import same


@pytest.mark.parametrize("name", ["minimal.thalia", "delta/stage0.thalia"])
def test_a_real_file_is_written_byte_for_byte(name: str, tmp_path: Path) -> None:
    path = foreign(f"thalia/{name}")
    found = formats.read(path, portable=True)
    formats.write(tmp_path / "again.thalia", found.state)
    assert (tmp_path / "again.thalia").read_bytes() == path.read_bytes()


# Files that are written here, read by a reader of their own


def plain_reader(data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read an uncompressed file as the facts describe it: metadata, and values by region."""
    assert hashlib.sha256(data[:-32]).digest() == data[-32:]
    header = struct.unpack("<4sHHHHQQQQQQQQQQII", data[:100])
    assert header[:5] == (b"THAL", 0, 1, 0, 0)
    assert header[16] == 1
    metadata = json.loads(data[header[6] : header[6] + header[7]])
    start, length = header[8], header[9]
    assert length == 48 * header[15]
    assert start + length == len(data) - 32
    found = {}
    for at in range(start, start + length, 48):
        name, offset, size = struct.unpack("<32sQQ", data[at : at + 48])
        found[name.rstrip(b"\0").decode()] = resolved(
            data, json.loads(data[offset : offset + size])
        )
    return metadata, found


def resolved(data: bytes, value: Any) -> Any:
    if isinstance(value, dict) and value.get("_type") == "tensor":
        array, end = tensor_at(data, value["_offset"])
        assert end == value["_offset"] + value["_bytes"]
        return array
    if isinstance(value, dict):
        return {key: resolved(data, item) for key, item in value.items()}
    return [resolved(data, item) for item in value] if isinstance(value, list) else value


def tensor_at(data: bytes, at: int) -> tuple[np.ndarray[Any, Any], int]:
    encoding, code, axes = struct.unpack_from("<III", data, at)
    shape = struct.unpack_from(f"<{axes}I", data, at + 12)
    kind = np.dtype(["<f4", "<f8", "<i4", "<i8", "?", "<f2"][code])
    at += 12 + 4 * axes
    if encoding == 0:
        count = int(np.prod(shape))
        return np.frombuffer(data, kind, count, at).reshape(shape), at + count * kind.itemsize
    (nnz,) = struct.unpack_from("<Q", data, at)
    where = np.frombuffer(data, "<i8", axes * nnz, at + 8).reshape(axes, nnz)
    at += 8 + 8 * axes * nnz
    array = np.zeros(shape, kind)
    array[tuple(where)] = np.frombuffer(data, kind, nnz, at)
    return array, at + nnz * kind.itemsize


def brain() -> dict[str, Any]:
    """A state with every element type, sparse and dense tensors, and odd values."""
    sparse = np.zeros((30, 20), np.float32)
    sparse[3, 4], sparse[29, 19] = 1.5, np.nan
    negative = np.zeros(200, np.float32)
    negative[7] = -0.0
    cortex = {
        "weights": {"w_ff": np.arange(12, dtype=np.float32).reshape(3, 4), "w_rec": sparse},
        "neuron_state": {
            "membrane": np.array([1.0, -2.0, np.inf]),
            "spikes": np.array([True, False]),
        },
        "counts": np.arange(150, dtype=np.int64) // 149,
        "refractory": np.array(3, np.int32),
        "negative": negative,
        "narrow": np.zeros(300, np.float16),
        "history": [1, 2.5, "x", None, True, {"t": np.zeros((0, 3), np.float32)}],
        "text": "na\u00efve \u2603",
        "big": 2**70,
    }
    return {
        "regions": {"cortex": cortex, "empty": {}},
        "pathways": {"c2h": {"weights": {"w": np.ones((2, 2), np.float32)}, "neuron_state": None}},
        "config": {"n": 3},
        "training_steps": 7000,
        "metadata": {"experiment": "mine", "growth_history": [{"step": 1}]},
    }


def arrays(value: Any) -> Any:
    if isinstance(value, TensorBytes):
        return as_array(value)
    if isinstance(value, dict):
        return {key: arrays(item) for key, item in value.items()}
    return [arrays(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("suffix", ["", ".zst", ".lz4"])
def test_round_trip(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"brain.thalia{suffix}"
    formats.write(path, brain(), {"experiment": "other"})
    data = path.read_bytes()
    if suffix:
        assert hashlib.sha256(data[:-32]).digest() == data[-32:]
        decoder = zstandard.ZstdDecompressor() if suffix == ".zst" else None
        unpack = decoder.decompress if decoder else lz4.frame.decompress
        body = unpack(data[:-32])
        data = body + hashlib.sha256(body).digest()
    metadata, found = plain_reader(data)
    state = brain()
    assert same(found["cortex"], state["regions"]["cortex"])
    assert same(found["pathway:c2h"], state["pathways"]["c2h"])
    assert metadata["experiment"] == "other"
    assert metadata["config"] == {"n": 3}
    read = formats.read(path, portable=True)
    assert same(arrays(read.state["regions"]), state["regions"])
    assert read.state["training_steps"] == 7000
    formats.write(tmp_path / "again.thalia", read.state)
    formats.write(tmp_path / "first.thalia", brain(), {"experiment": "other"})
    assert (tmp_path / "again.thalia").read_bytes() == (tmp_path / "first.thalia").read_bytes()


@pytest.mark.parametrize("compress", [zstandard.ZstdCompressor().compress, lz4.frame.compress])
def test_the_older_frame_of_compressed_files(tmp_path: Path, compress: Any) -> None:
    formats.write(tmp_path / "plain.thalia", brain())
    path = tmp_path / "old.thalia"
    path.write_bytes(compress((tmp_path / "plain.thalia").read_bytes()))
    assert same(arrays(formats.read(path, portable=True).state["regions"]), brain()["regions"])


def test_the_choice_of_dense_and_sparse(tmp_path: Path) -> None:
    formats.write(tmp_path / "brain.thalia", brain())
    data = (tmp_path / "brain.thalia").read_bytes()
    _, found = plain_reader(data)
    (start,) = struct.unpack_from("<Q", data, 0x24)
    offset, size = struct.unpack_from("<QQ", data, start + 32)
    text = json.loads(data[offset : offset + size])
    encodings = {
        name: struct.unpack_from("<I", data, reference["_offset"])[0]
        for name, reference in {**text, **text["weights"]}.items()
        if isinstance(reference, dict) and "_offset" in reference
    }
    # A negative zero has no sparse form; the programs cannot read sparse float16.
    assert encodings == {
        "w_ff": 0,
        "w_rec": 1,
        "counts": 1,
        "refractory": 0,
        "negative": 0,
        "narrow": 0,
    }
    assert (
        found["cortex"]["negative"].tobytes() == brain()["regions"]["cortex"]["negative"].tobytes()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": {}}, "no place for a component"),
        ({"regions": {}, "pathways": {}}, "at least one region"),
        ({"regions": {"a": {"x": np.zeros(2, np.uint8)}}}, "no such element type"),
        ({"regions": {"a" * 32: {}}}, "does not fit into the index"),
        ({"pathways": {"a" * 24: {}}}, "does not fit into the index"),
        ({"regions": {"a": {"x": b"bytes"}}}, "no form for this value"),
        ({"regions": {"a": {1: 0}}}, "no string"),
        ({"regions": {"a": {"x": (1, 2)}}}, "no form for this value"),
        ({"metadata": {"x": np.zeros(2)}}, "no tensors"),
    ],
)
def test_states_that_do_not_fit(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(IncompatibleState, match=message):
        formats.write(tmp_path / "brain.thalia", {**brain(), **change})
    assert not list(tmp_path.iterdir())


# Hostile files


def signed(body: bytes) -> bytes:
    return body + hashlib.sha256(body).digest()


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("suffix", ["", ".zst", ".lz4"])
def test_every_flipped_byte_is_noticed(
    tmp_path: Path, suffix: str, in_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a thread compares the checksum while the file is read, as for long files."""
    if in_thread:
        monkeypatch.setattr(framing, "_LARGE_BYTES", 0)
    path = tmp_path / f"brain.thalia{suffix}"
    formats.write(path, brain())
    sound = path.read_bytes()
    assert formats.validate(path) == []
    for at in range(0, len(sound), 97):
        data = bytearray(sound)
        data[at] ^= 1
        path.write_bytes(data)
        with pytest.raises(InvalidInput) as told:
            formats.read(path, portable=True, format="thalia")
        if not suffix and at >= 256:
            assert "the checksum is wrong" in str(told.value)  # whatever else went wrong
        assert formats.validate(path, format="thalia")


def test_bodies_with_a_right_checksum_give_a_state_or_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "brain.thalia"
    formats.write(path, brain())
    body, chance, refused = path.read_bytes()[:-32], random.Random(3), 0
    for _ in range(400):
        data = bytearray(body)
        for _ in range(chance.randint(1, 3)):
            data[chance.choice([chance.randrange(100), chance.randrange(len(data))])] = (
                chance.choice([0, 1, 127, 255, chance.randrange(256)])
            )
        path.write_bytes(signed(bytes(data)))
        try:
            formats.read(path, portable=True, format="thalia")
            formats.inspect(path, format="thalia")
        except RegistryError:
            refused += 1
            assert formats.validate(path, format="thalia")
    assert refused > 50


def with_tensor(head: bytes, data: bytes = b"") -> bytes:
    """Return a file with one region with one tensor."""
    metadata = b"{}"
    tensor = head + data
    at = 256 + len(metadata)
    text = json.dumps({"w": {"_type": "tensor", "_offset": at, "_bytes": len(tensor)}}).encode()
    offset = at + len(tensor)
    index = struct.pack("<32sQQ", b"a", offset, len(text))
    header = struct.pack(
        "<4sHHHHQQQQQQQQQQII",
        *(b"THAL", 0, 1, 0, 0, 0, 256, 2, offset + len(text), 48, 0, 0, 0, 0, 0, 1, 1),
    )
    return signed(header.ljust(256, b"\0") + metadata + tensor + text + index)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (
            struct.pack("<III3I", 1, 0, 3, 2**31, 2**31, 2**31) + struct.pack("<Q", 0),
            "too much memory",
        ),
        (struct.pack("<III2I", 0, 0, 2, 2**31, 2**31), "not within the file"),
        (
            struct.pack("<IIII", 1, 0, 1, 8) + struct.pack("<Qqf", 1, 8, 1.0),
            "outside of the tensor",
        ),
        (
            struct.pack("<IIII", 1, 0, 1, 8) + struct.pack("<Qqf", 1, -1, 1.0),
            "outside of the tensor",
        ),
        (struct.pack("<IIII", 1, 0, 1, 8) + struct.pack("<Qqqff", 2, 1, 1, 1.0, 2.0), "repeated"),
        (
            struct.pack("<IIII", 1, 0, 1, 1) + struct.pack("<Qqqff", 2, 0, 0, 1.0, 2.0),
            "more elements",
        ),
        (struct.pack("<IIII", 0, 4, 1, 1) + b"\x02", "neither 0 nor 1"),
        (struct.pack("<III", 0, 6, 0), "not the header of a tensor"),
        (struct.pack("<III", 0, 0, 2**32 - 1), "not the header of a tensor"),
    ],
)
def test_hostile_tensors(tmp_path: Path, head: bytes, message: str) -> None:
    path = tmp_path / "evil.thalia"
    path.write_bytes(with_tensor(head))
    with pytest.raises(InvalidInput, match=message):
        formats.read(path, portable=True)
    assert any(message in line for line in formats.validate(path))


def test_sparse_float16_is_read(tmp_path: Path) -> None:
    path = tmp_path / "half.thalia"
    half = np.array([1.5], np.float16).tobytes()
    path.write_bytes(
        with_tensor(struct.pack("<IIII", 1, 5, 1, 8) + struct.pack("<Qq", 1, 3) + half)
    )
    found = as_array(formats.read(path, portable=True).state["regions"]["a"]["w"])
    assert found.tolist() == [0, 0, 0, 1.5, 0, 0, 0, 0]


def test_a_bomb_is_refused_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_MAX_FILE_BYTES", "1000000")
    for suffix, compress in (
        ("zst", zstandard.ZstdCompressor().compress),
        ("lz4", lz4.frame.compress),
    ):
        path = tmp_path / f"bomb.thalia.{suffix}"
        path.write_bytes(compress(b"THAL" + bytes(30_000_000)))
        with pytest.raises(InvalidInput, match="larger than the size limit"):
            formats.read(path)


def test_a_delta_needs_its_very_base(tmp_path: Path) -> None:
    base, link = tmp_path / "stage0.thalia", tmp_path / "stage1.delta.thalia"
    thalia.save(base, large_brain())
    thalia.save_delta(link, grown(large_brain()), base)
    base.unlink()
    with pytest.raises(InvalidInput, match="is missing"):
        formats.read(link)
    thalia.save(base, large_brain(), {"written": "again"})  # sound, with the same tensors
    with pytest.raises(InvalidInput, match="another file"):
        formats.read(link)


def test_a_base_that_is_exchanged_behind_the_comparison_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = foreign("thalia/delta")
    for name in ("stage1.delta.thalia", "stage0.thalia"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    base, other = tmp_path / "stage0.thalia", tmp_path / "other"
    thalia.write(other, MemoryContent(brain(), None, "other"), metadata=None, force=False)
    opened = delta.framing.opened

    def exchanging(path: Path, **given: Any) -> Any:
        if path == base:
            other.replace(base)
        return opened(path, **given)

    monkeypatch.setattr(delta.framing, "opened", exchanging)
    with pytest.raises(InvalidInput, match="changed while it was read"):
        formats.read(tmp_path / "stage1.delta.thalia", portable=True)


def test_a_delta_within_itself_is_refused(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    about = b'{"delta_info": {"base_checkpoint": "base.thalia"}}'
    head = struct.pack("<5sI32sQQ7s", b"\xce\x94THL", 1, b"", 0, 1, b"")
    content = pickle.dumps({"regions": {}, "more": loop}, 2)
    (tmp_path / "x.thalia").write_bytes(head + content + struct.pack("<I", len(about)) + about)
    with pytest.raises(InvalidInput, match="within itself"):
        formats.inspect(tmp_path / "x.thalia")


# The layout of the document


def documented(
    *, checksum: int = 1, dense: np.ndarray[Any, Any] | None = None
) -> tuple[bytes, np.ndarray[Any, Any]]:
    """Return a file as the document's tables describe it, with two regions and a connection."""
    dense = np.arange(6, dtype="<f4").reshape(2, 3) if dense is None else dense
    half = np.array([1, 2], "<f2")

    def tensor(array: np.ndarray[Any, Any]) -> bytes:
        shape = [*array.shape, 0, 0, 0][:3]
        code = {"float32": 0, "float16": 1, "int8": 2}[array.dtype.name]
        data = array.tobytes()
        return struct.pack("<BBHQQQI", code, array.ndim, 0, *shape, zlib.crc32(data)) + data

    def matrix(array: np.ndarray[Any, Any]) -> bytes:
        rows, columns = np.nonzero(array)
        starts = np.searchsorted(rows, np.arange(array.shape[0] + 1)).astype("<u4")
        data = starts.tobytes() + columns.astype("<u4").tobytes() + array[rows, columns].tobytes()
        return struct.pack("<B3xQQQI", 0, *array.shape, len(rows), zlib.crc32(data)) + data

    def region(
        config: bytes, weights: bytes, encoding: int, homeostatic: bytes, more: bytes
    ) -> bytes:
        at = 64
        sections = []
        for part in (config, weights, homeostatic):
            sections += [at, len(part)]
            at += len(part)
        head = struct.pack("<IIIIQQQQQQ", 2, 3, 1, encoding, *sections)
        return head + config + weights + homeostatic + more

    state = struct.pack("<IIQ", 2, 0, 99) + np.array([1, 2, 3, 4], "<f4").tobytes()
    regions = {
        b"cortex": region(b'{"tau": 1.5}', tensor(dense) + tensor(half), 0, state, b'{"note": 1}'),
        b"striatum": region(b"", matrix(dense), 1, b"", b""),
    }
    metadata = b'{"version": "0.1.0"}'
    index_at = 256 + len(metadata)
    at = index_at + 48 * len(regions)
    index = body = b""
    for name, data in regions.items():
        index += struct.pack("<32sQQ", name, at + len(body), len(data))
        body += data
    links_at = at + len(body)
    first = links_at + 32 + 96
    weights, delays = matrix(dense), tensor(np.array([[1, 2]], "<i1"))
    links = struct.pack("<I28x", 1) + struct.pack(
        "<32s32sQQQQ",
        *(b"cortex", b"striatum", first, len(weights), first + len(weights), len(delays)),
    )
    links += weights + delays
    header = struct.pack(
        "<4sHHHHQQQQQQQQQQII",
        *(b"THAL", 0, 1, 0, 0, 0, 256, len(metadata), index_at, len(index)),
        *(links_at, len(links), 4, 6, 500, len(regions), checksum),
    )
    data = header.ljust(256, b"\0") + metadata + index + body + links
    if checksum == 2:
        return data + struct.pack("<I28x", zlib.crc32(data)), dense
    return signed(data), dense


@pytest.mark.parametrize("checksum", [1, 2])
def test_the_layout_of_the_document(tmp_path: Path, checksum: int) -> None:
    path = tmp_path / "seed.thalia"
    data, dense = documented(checksum=checksum)
    path.write_bytes(data)
    found = formats.read(path, portable=True)
    state: Any = arrays(found.state)
    cortex, striatum = state["regions"]["cortex"], state["regions"]["striatum"]
    assert same(cortex["weights"], {"0": dense, "1": np.array([1, 2], np.float16)})
    assert (cortex["config"], cortex["metadata"]) == ({"tau": 1.5}, {"note": 1})
    assert cortex["homeostatic"]["thresholds"].tolist() == [1, 2]
    assert cortex["homeostatic"]["scaling_factors"].tolist() == [3, 4]
    assert same(striatum["weights"], {"0": dense})
    link = state["pathways"]["cortex->striatum"]
    assert same(link["weights"], dense)
    assert link["delays"].tolist() == [[1, 2]]
    assert state["training_steps"] == 500
    assert formats.validate(path) == []
    assert set(formats.inspect(path).tensors) >= {
        "regions/cortex/weights/1",
        "regions/striatum/weights/0",
    }


def test_damaged_files_of_the_document_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "seed.thalia"
    body, chance = documented()[0][:-32], random.Random(5)
    for at in range(256, len(body)):
        damaged = bytearray(body)
        damaged[at] ^= 1 << chance.randrange(8)
        path.write_bytes(bytes(damaged) + hashlib.sha256(body).digest())
        with pytest.raises(InvalidInput):
            formats.read(path, portable=True)
        path.write_bytes(signed(bytes(damaged)))  # a right sum over damaged bytes
        try:
            formats.read(path, portable=True)
        except RegistryError:
            assert formats.validate(path)


def test_one_region_under_many_names_may_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = np.zeros(2**14, "<f4").tobytes()
    head = struct.pack("<BBHQQQI", 0, 1, 0, 2**14, 0, 0, zlib.crc32(weights))
    sections = (64, 0, 64, len(head) + len(weights), 64, 0)
    region = struct.pack("<IIIIQQQQQQ", 2, 3, 1, 0, *sections) + head + weights
    index_at, count = 256 + 2, 50
    at = index_at + 48 * count
    index = b"".join(
        struct.pack("<32sQQ", f"region{number}".encode(), at, len(region))
        for number in range(count)
    )
    header = struct.pack(
        "<4sHHHHQQQQQQQQQQII",
        *(b"THAL", 0, 1, 0, 0, 0, 256, 2, index_at, len(index), 0, 0, 4, 6, 500, count, 1),
    )
    path = tmp_path / "many.thalia"
    path.write_bytes(signed(header.ljust(256, b"\0") + b"{}" + index + region))
    formats.read(path, portable=True)
    monkeypatch.setenv(limits.VARIABLE, str(2**20))
    with pytest.raises(InvalidInput, match="filling its tensors"):
        formats.read(path, portable=True)


# Precision, deltas, single regions, other versions


def large_brain() -> dict[str, Any]:
    """A state with a tensor of each class, one of them above 1 MiB."""
    ramp = np.linspace(-2, 2, 300_000, dtype=np.float32)
    region = {
        "weights": {"w_big": ramp, "w_small": ramp[:10].copy(), "bias": ramp[:3].copy()},
        "neuron_state": {"membrane": ramp[:5].copy(), "v_thresh": ramp[:5].astype(np.float64)},
        "learning_state": {"stdp": ramp[:4].copy(), "bcm": ramp[:4].copy()},
        "gains": ramp[:2].astype(np.float16),
        "counts": np.arange(3),
    }
    return {"regions": {"cortex": region, "other": {"x": np.ones(2, np.float32)}}}


@pytest.mark.parametrize(
    ("policy", "narrow"),
    [
        ("fp32", set()),
        ("fp16", {"w_big", "w_small", "bias", "stdp", "bcm"}),
        ("mixed", {"w_big", "stdp", "bcm"}),
        (thalia.PrecisionPolicy(membrane="fp16", default="fp16"), {"membrane", "gains", "x"}),
    ],
)
def test_precision_policies(tmp_path: Path, policy: Any, narrow: set[str]) -> None:
    """A bias below `weights` is a weight; `learning_state` contains the `g_` of conductances."""
    path = tmp_path / "brain.thalia"
    thalia.save(path, large_brain(), precision=policy)
    found = formats.inspect(path)
    dtypes = {name.split("/")[-1]: one.dtype for name, one in found.tensors.items()}
    floats = {name for name, dtype in dtypes.items() if dtype.startswith("float")}
    assert {name for name in floats if dtypes[name] == "float16"} == narrow
    assert all(dtypes[name] == "float32" for name in floats - narrow)
    assert dtypes["counts"] == "int64"
    loaded: Any = arrays(thalia.load(path, portable=True).state)
    if policy != "fp32":
        assert all(
            array.dtype != np.float16
            for part in ("weights", "neuron_state", "learning_state")
            for array in loaded["regions"]["cortex"][part].values()
        )
    weight = loaded["regions"]["cortex"]["weights"]["w_big"]
    assert np.abs(weight - large_brain()["regions"]["cortex"]["weights"]["w_big"]).max() < 1e-3


def test_a_number_that_is_too_large_for_half_precision_is_refused(tmp_path: Path) -> None:
    state = {"regions": {"a": {"weights": {"w": np.array([1e6], np.float32)}}}}
    with pytest.raises(InvalidInput, match=r"regions/a/weights/w.*too large for float16"):
        thalia.save(tmp_path / "a.thalia", state, precision="fp16")
    with pytest.raises(InvalidInput, match="no such precision policy"):
        thalia.save(tmp_path / "a.thalia", state, precision="fp8")
    assert not list(tmp_path.iterdir())


def test_single_regions(tmp_path: Path) -> None:
    path = tmp_path / "brain.thalia"
    thalia.save(path, large_brain())
    found: Any = thalia.load(path, regions=["other"], portable=True).state
    assert list(found["regions"]) == ["other"]
    assert arrays(found["regions"]["other"]["x"]).tolist() == [1, 1]
    with pytest.raises(NotFound, match="no such region"):
        thalia.load(path, regions=["corteks"])


@pytest.mark.parametrize(("suffix", "levels"), [(".zst", (1, 22)), (".lz4", (1, 12))])
def test_levels_of_compression(tmp_path: Path, suffix: str, levels: tuple[int, int]) -> None:
    sizes = [
        thalia.save(tmp_path / f"{level}.thalia{suffix}", large_brain(), level=level).size_bytes
        for level in levels
    ]
    assert sizes[1] < sizes[0]
    with pytest.raises(InvalidInput, match="not a level"):
        thalia.save(tmp_path / f"x.thalia{suffix}", large_brain(), level=levels[1] + 1)
    with pytest.raises(InvalidInput, match="not a level"):
        thalia.save(tmp_path / "x.thalia", large_brain(), level=1)


def grown(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state after some training: changed, new and untouched parts."""
    cortex = copy.deepcopy(state["regions"]["cortex"])
    cortex["weights"]["w_big"][17] += 0.5
    cortex["weights"]["w_small"] += 0.25
    cortex["weights"]["w_new"] = np.ones((2, 2), np.float32)
    cortex["neuron_state"]["membrane"][0] = np.nan
    regions = {**state["regions"], "cortex": cortex, "newborn": {"weights": {"w": np.ones(3)}}}
    return {"regions": regions, "training_steps": 2000}


@pytest.mark.parametrize("suffix", ["", ".zst", ".lz4"])
def test_deltas_and_their_chains(tmp_path: Path, suffix: str) -> None:
    first = large_brain()
    second = grown(first)
    third = grown(second)
    third["training_steps"] = 3000
    thalia.save(tmp_path / "stage0.thalia", first)
    names = ["stage0.thalia", *(f"stage{number}.delta.thalia{suffix}" for number in (1, 2))]
    for number, state in ((1, second), (2, third)):
        written = thalia.save_delta(
            tmp_path / names[number], state, tmp_path / names[number - 1], threshold=0
        )
        assert written.size_bytes < 10_000
    path = tmp_path / f"stage2.delta.thalia{suffix}"
    assert formats.detect(path) == "thalia"
    assert formats.validate(path) == []
    found: Any = arrays(formats.read(path, portable=True).state)
    assert found["training_steps"] == 3000
    for name, region in third["regions"].items():
        for part, values in region.items():
            if isinstance(values, dict):
                assert same({key: found["regions"][name][part][key] for key in values}, values)
    if not suffix:
        head = struct.unpack("<5sI32sQQ", path.read_bytes()[:57])
        base_bytes = (tmp_path / "stage1.delta.thalia").read_bytes()
        assert head == (b"\xce\x94THL", 1, hashlib.sha256(base_bytes).digest(), 2000, 3000)
        # Python's own unpickler, with the program's names, reads it too.
        with path.open("rb") as file:
            file.seek(64)
            content = pickle.load(file)
        change = content["regions"]["cortex"]["weights"]["w_big"]
        assert (change["type"], change["indices"].tolist(), change["values"].tolist()) == (
            "sparse",
            [[17]],
            [0.5],
        )


def edited(*edits: str) -> dict[str, Any]:
    """Return a brain of which parts were removed, made null, added or changed."""
    state: dict[str, Any] = large_brain() | {"theta": {"phase": 0.5}, "config": {"n": 1}}
    state["regions"]["cortex"]["weights"]["none"] = None
    for edit in edits:
        path, _, value = edit.partition("=")
        *above, last = path.split("/")
        here = state
        for key in above:
            here = here[key]
        if value:
            here[last] = json.loads(value)
        else:
            del here[last]
    return state


@pytest.mark.parametrize(
    "edits",
    [
        ("regions/other", "theta"),
        ("regions/other/x",),
        ("regions/cortex/gains=3", "config/n=2", "scheduler={}"),
        ("regions/cortex/weights/bias",),
        ("regions/cortex/weights/bias=null", "regions/cortex/learning_state/bcm=[true]"),
        ("regions/cortex/weights/none",),
        ("regions/cortex/weights/new=null",),
        ("regions/cortex/weights/none=[1]",),
        ("regions/other/weights={}",),
        ("regions/other/neuron_state=null",),
        ("regions/cortex/neuron_state",),
        ("regions/cortex/neuron_state=null", "regions/cortex/oscillator_state={}"),
    ],
)
def test_a_delta_without_a_threshold_says_every_difference(
    tmp_path: Path, edits: tuple[str, ...]
) -> None:
    for before, after in ((edited(), edited(*edits)), (edited(*edits), edited())):
        states = {"base.thalia": before, "whole.thalia": after}
        for name, state in states.items():
            thalia.save(tmp_path / name, state, force=True)
        path = tmp_path / "d.delta.thalia"
        thalia.save_delta(path, after, tmp_path / "base.thalia", threshold=0, force=True)
        found, whole = (
            arrays(formats.read(tmp_path / name, portable=True).state)
            for name in (path, "whole.thalia")
        )
        for state in (found, whole):
            del state["metadata"]
        # A part of the metadata that a file has not is there as an empty one.
        for key in set(whole) - set(found):
            assert whole.pop(key) == {}
        assert same(dict(sorted(found.items())), dict(sorted(whole.items())))


@dataclass
class Neurons:
    membrane: Any
    inner: Any = None


def test_dataclasses_are_kept_under_the_names_of_their_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file and deltas need no adapter; one that the program has makes the objects again."""
    name = f"{__name__}.Neurons"

    def brain(number: float) -> dict[str, Any]:
        membrane = np.full(3, number, np.float32)
        state = Neurons(membrane, [Neurons(np.arange(2), {"a": 1})])
        return {"regions": {"cortex": {"weights": {"w": membrane[:2]}, "neuron_state": state}}}

    full, link = tmp_path / "a.thalia", tmp_path / "b.delta.thalia"
    thalia.save(full, brain(1.5), precision="fp16")
    thalia.save_delta(link, brain(2.5), full)
    _, regions = plain_reader(full.read_bytes())
    state = regions["cortex"]["neuron_state"]
    assert (list(state), state["_dataclass"]) == (["_dataclass", "_fields"], name)
    assert state["_fields"]["inner"][0]["_fields"]["inner"] == {"a": 1}
    assert formats.inspect(full).header["total_neurons"] == 3
    with link.open("rb") as file:
        file.seek(64)
        made = pickle.load(file)["regions"]["cortex"]["neuron_state"]
    assert type(made) is Neurons
    assert type(made.inner[0]) is Neurons
    for path, number in ((full, 1.5), (link, 2.5)):
        assert formats.validate(path) == []
        assert "regions/cortex/neuron_state/membrane" in str(formats.inspect(path).tensors)
        as_dict: Any = thalia.load(path).state["regions"]["cortex"]["neuron_state"]
        assert as_dict["_dataclass"] == name
        assert as_dict["_fields"]["membrane"].tolist() == [number] * 3
        formats.write(
            tmp_path / "again.thalia", formats.read(path, portable=True).state, force=True
        )
        _, again = plain_reader((tmp_path / "again.thalia").read_bytes())
        assert again["cortex"]["neuron_state"]["_dataclass"] == name
        with monkeypatch.context() as patch:
            patch.setattr(encoding, "ADAPTERS", encoding.AdapterTable())
            adapter = encoding.Adapter(name, Neurons, vars, lambda given: Neurons(**given))
            encoding.ADAPTERS.add(adapter)
            known: Any = formats.read(path).state["regions"]["cortex"]["neuron_state"]
            assert type(known) is Neurons
            assert known.inner[0].inner == {"a": 1}


@pytest.mark.parametrize(
    "value", [b"cos\ngetcwd\n", b"cos\ngetcwd\n)R", b"cos\nsystem\nX\2\0\0\0ls\x85R"]
)
def test_a_name_in_a_delta_is_a_dataclass_or_refused(tmp_path: Path, value: bytes) -> None:
    thalia.save(tmp_path / "a.thalia", large_brain())
    thalia.save_delta(tmp_path / "b.delta.thalia", large_brain(), tmp_path / "a.thalia")
    data = (tmp_path / "b.delta.thalia").read_bytes()
    key = b"X\5\0\0\0theta"
    at = data.index(b"metadata_changes") + len(b"metadata_changes")
    assert data[at : at + 3] == b"}(u"
    (tmp_path / "b.delta.thalia").write_bytes(data[: at + 2] + key + value + data[at + 2 :])
    with pytest.raises(UnsupportedValue, match=r"names os\.|names (posix|nt)\."):
        formats.read(tmp_path / "b.delta.thalia", portable=True)


def test_names_in_a_delta_take_memory_that_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two long texts that are kept once make a name of both, again and again."""
    monkeypatch.setenv("HOLDFAST_MAX_RECORD_BYTES", "10000000")
    long = b"X" + struct.pack("<I", 2000) + b"a" * 2000
    pickle_of = b"\x80\x04" + long + b"q\0" + b"(" + b"h\0h\0\x93" * 5000 + b"t."
    head = struct.pack("<5sI32sQQ7x", b"\xce\x94THL", 1, bytes(32), 0, 0)
    path = tmp_path / "b.delta.thalia"
    path.write_bytes(head + pickle_of + struct.pack("<I", 2) + b"{}")
    with pytest.raises(RegistryError, match="reading the delta"):
        formats.read(path, portable=True)


def test_differences_below_the_threshold_are_left_out(tmp_path: Path) -> None:
    state = large_brain()
    thalia.save(tmp_path / "base.thalia", state)
    state["regions"]["cortex"]["weights"]["w_big"][:2] += np.array([1e-6, 1e-2], np.float32)
    thalia.save_delta(tmp_path / "d.delta.thalia", state, tmp_path / "base.thalia")
    found: Any = arrays(formats.read(tmp_path / "d.delta.thalia", portable=True).state)
    weight, before = found["regions"]["cortex"]["weights"]["w_big"], large_brain()
    assert weight[0] == before["regions"]["cortex"]["weights"]["w_big"][0]
    assert abs(weight[1] - state["regions"]["cortex"]["weights"]["w_big"][1]) < 1e-6


def test_migration_between_versions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    thalia.save(tmp_path / "a.thalia", brain(), precision="fp16")
    thalia.migrate(tmp_path / "a.thalia", tmp_path / "b.thalia.zst", "0.2")
    assert not caplog.records
    assert (
        formats.inspect(tmp_path / "b.thalia.zst").metadata["checkpoint_format_version"] == "0.2.0"
    )
    thalia.migrate(tmp_path / "b.thalia.zst", tmp_path / "c.thalia", "0.1")
    assert "neither sparse tensors nor half precision" in caplog.text
    data = (tmp_path / "c.thalia").read_bytes()
    assert data[4:10] == struct.pack("<HHH", 0, 1, 0)
    assert {one.dtype for one in formats.inspect(tmp_path / "c.thalia").tensors.values()} == {
        "float32",
        "int32",
        "int64",
        "bool",
    }
    with pytest.raises(UnsupportedFormat, match="no such version"):
        thalia.migrate(tmp_path / "a.thalia", tmp_path / "d.thalia", "1.0")
    changed = bytearray(data[:-32])
    changed[4] = 1
    (tmp_path / "v1.thalia").write_bytes(signed(bytes(changed)))
    with pytest.raises(UnsupportedFormat, match="another major version"):
        formats.read(tmp_path / "v1.thalia")
