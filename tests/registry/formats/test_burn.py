"""Records of Burn. No golden file exists: the tests build records byte by byte.

The facts, from the source of Burn (`burn-core/src/record`, `burn-tensor/src/tensor/data.rs`):
`NamedMpkFileRecorder` calls `rmp_serde::encode::write_named` on `BurnRecord {metadata, item, _b}`,
so that a struct is a map of its fields in order; `_b` is `PhantomData`, a nil. `BurnMetadata` has
the strings float, int, format, version, settings. A `Param` is `ParamSerde {id, param}`, a tensor
`TensorData {bytes, shape, dtype}`; `Bytes` is a bin, the shape an array of integers, `DType` a
string for a plain variant and a map of one for a variant with content (`Bool`, `QFloat`).
rmp writes the shortest form of each length and integer.
"""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import Run
from holdfast.registry import formats
from holdfast.registry.errors import IncompatibleState, InvalidInput
from tests.support.states import same

pytest.importorskip("msgpack")
ABOUT = {
    "float": "f32",
    "int": "i32",
    "format": "burn_core::record::file::NamedMpkFileRecorder<FullPrecisionSettings>",
    "version": "0.20.0",
    "settings": "FullPrecisionSettings",
}


def pack(value: Any) -> bytes:
    """Write a value as rmp does."""
    match value:
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int() if 0 <= value < 128:
            return bytes([value])
        case int() if 0 <= value < 256:
            return b"\xcc" + bytes([value])
        case int():
            return b"\xcd" + struct.pack(">H", value)
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case str() if len(value.encode()) < 32:
            return bytes([0xA0 + len(value.encode())]) + value.encode()
        case str():
            return b"\xd9" + bytes([len(value.encode())]) + value.encode()
        case bytes() if len(value) < 256:
            return b"\xc4" + bytes([len(value)]) + value
        case bytes():
            return b"\xc5" + struct.pack(">H", len(value)) + value
        case list():
            return bytes([0x90 + len(value)]) + b"".join(map(pack, value))
        case dict():
            parts = b"".join(pack(key) + pack(item) for key, item in value.items())
            return bytes([0x80 + len(value)]) + parts
    raise TypeError(value)


def param(array: Any, dtype: Any) -> dict[str, Any]:
    data = {"bytes": array.tobytes(), "shape": list(array.shape), "dtype": dtype}
    return {"id": "0HJ4L2", "param": data}


def record(item: Any, about: Any = ABOUT) -> bytes:
    return pack({"metadata": about, "item": item, "_b": None})


WEIGHT = np.arange(96, dtype="<f4").reshape(8, 12)
ITEM = {
    "conv": {"weight": param(WEIGHT, "F32"), "bias": None, "stride": [1, 2]},
    "blocks": [
        {"gamma": param(np.ones(3, "<f2"), "F16")},
        {"gamma": param(np.ones(3, "<f8"), "F64")},
    ],
    "mask": {"bytes": b"\1\0", "shape": [2], "dtype": "Bool"},
    "native": {"bytes": b"\1\0\1", "shape": [3, 1], "dtype": {"Bool": "Native"}},
    "empty": {"bytes": b"", "shape": [0, 4], "dtype": "I64"},
    "epsilon": 1e-5,
    "quantized": {"bytes": b"\1\2", "shape": [2], "dtype": {"QFloat": {"mode": "Symmetric"}}},
}


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_a_record(run: Run, tmp_path: Path) -> None:
    path = written(tmp_path / "model.mpk", record(ITEM))
    assert formats.detect(path) == "burn"
    assert formats.validate(path) == []
    found: Any = formats.read(path)
    assert found.metadata == ABOUT
    item = found.state["item"]
    assert same(item["conv"]["weight"], {"id": "0HJ4L2", "param": torch.from_numpy(WEIGHT.copy())})
    assert item["conv"]["bias"] is None
    assert item["conv"]["stride"] == [1, 2]
    assert [one["gamma"]["param"].dtype for one in item["blocks"]] == [torch.half, torch.double]
    assert item["mask"].tolist() == [True, False]
    assert item["native"].tolist() == [[True], [False], [True]]
    assert item["empty"].shape == (0, 4)
    assert item["quantized"] == ITEM["quantized"]
    report = formats.inspect(path)
    assert report.tensors["item/conv/weight/param"].shape == (8, 12)
    assert report.metadata == ABOUT
    formats.write(tmp_path / "out.mpk", run.save(found.state, step=1))
    assert (tmp_path / "out.mpk").read_bytes() == path.read_bytes()


def test_a_record_in_gzip_is_the_same_record(tmp_path: Path) -> None:
    data = gzip.compress(record(ITEM))
    path = written(tmp_path / "model.mpk.gz", data)
    assert formats.detect(path) == "burn"
    assert formats.validate(path) == []
    plain = formats.read(written(tmp_path / "model.mpk", record(ITEM)))
    assert same(formats.read(path).state, plain.state)
    assert formats.inspect(path).tensors == formats.inspect(tmp_path / "model.mpk").tensors
    formats.write(tmp_path / "out.mpk.gz", plain.state)
    assert gzip.decompress((tmp_path / "out.mpk.gz").read_bytes()) == record(ITEM)
    for bad, message in ((data[:-9], "breaks off"), (data + b"x", "bytes after"),
                         (data[:60] + b"\xff" + data[61:], "damaged|MessagePack")):  # fmt: skip
        with pytest.raises(InvalidInput, match=message):
            formats.read(written(tmp_path / "bad.mpk.gz", bad))


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_a_record_without_names_is_known_and_kept_as_bytes(tmp_path: Path, compress: Any) -> None:
    about = {**ABOUT, "format": ABOUT["format"].replace("NamedMpk", "Bin")}
    texts = [text.encode() for text in about.values()]
    data = compress(b"".join(bytes([len(one)]) + one for one in texts) + b"\x07" * 40)
    path = written(tmp_path / "model.bin", data)
    assert formats.inspect(path).metadata == about
    found = formats.read(path)
    assert (found.format, found.metadata) == ("opaque", about)
    assert found.state["file"]["bytes"].tobytes() == data


def test_every_bad_tensor_is_named(tmp_path: Path) -> None:
    bad = {"bytes": b"\0" * 7, "shape": [2], "dtype": "F32"}
    path = written(
        tmp_path / "x.mpk", record({"a": bad, "b": {**bad, "shape": [2**15]}, "c": ITEM})
    )
    found = formats.validate(path)
    assert len(found) == 2
    assert "item/a" in found[0]
    with pytest.raises(InvalidInput, match="item/a"):
        formats.read(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "breaks off"),
        (record(ITEM)[:-1], "breaks off"),
        (record(ITEM) + b"\0", "after its end"),
        (pack([1]), "no record"),
        (pack({"metadata": ABOUT}), "no record"),
        (record(1, {"float": 1}), "strings"),
        (b"\x82" + pack("metadata") + pack(ABOUT) + pack("metadata") + pack(1), "twice"),
        (b"\x82" + pack("metadata") + pack(ABOUT) + pack("item") + b"\xdd\xff\xff\xff\xff", "rest"),
        (b"\x82" + pack("metadata") + pack(ABOUT) + pack("item") + b"\xc6\xff\xff\xff\xff", "rest"),
        (b"\x82" + pack("metadata") + pack(ABOUT) + pack("item") + b"\xd4\x01x", "unknown kind"),
        (b"\x82" + pack("metadata") + pack(ABOUT) + pack("item") + b"\x91" * 200 + b"\0", "nested"),
        (b"\x91" * 1_000_000, "nested"),
        (b"\xdd\x00\x5b\x8d\x80" + b"\xc0" * 6_000_000, "values"),
        (b"\x81\x01\x02", "not MessagePack"),
    ],
)
def test_bad_records(data: bytes, message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "x.mpk", data)
    with pytest.raises(InvalidInput, match=message):
        formats.read(path)
    assert formats.validate(path)


def test_states_that_are_no_record(tmp_path: Path) -> None:
    for state in (
        {"item": {}},
        {"item": {"w": torch.ones(2, dtype=torch.complex64)}, "metadata": ABOUT},
        {"item": {"w": (1,)}, "metadata": ABOUT},
        {"item": {}, "metadata": ABOUT, "more": 1},
        {"item": torch.ones(2), "metadata": ABOUT, "dtypes": {"item": "I8"}},
    ):
        with pytest.raises(IncompatibleState):
            formats.write(tmp_path / "x.mpk", state)
    assert not list(tmp_path.iterdir())
