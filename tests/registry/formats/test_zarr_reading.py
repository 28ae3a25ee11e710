"""Zarr folders as states: what was written comes back, others are read, hostile ones refused."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import pickle
import shutil
import struct
import tracemalloc
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import ml_dtypes
import numcodecs
import numpy as np
import pytest
import torch
import zarr
import zstandard
from zarr.codecs import (
    BloscCodec,
    BytesCodec,
    Crc32cCodec,
    GzipCodec,
    TransposeCodec,
    ZstdCodec,
)

import holdfast
from holdfast import Run, Storing
from holdfast.registry import formats
from holdfast.registry.errors import IncompatibleState, InvalidInput, RegistryError, StorageError
from holdfast.registry.loading.zarr import foreign_arrays, native_types
from holdfast.registry.loading.zarr.foreign_arrays import check_expansion
from holdfast.registry.loading.zarr.nodes import array_v2
from tests.support.commands import invoke
from tests.support.states import same
from tests.support.stores import small_grid

STATE: dict[Any, Any] = {
    "model": OrderedDict(
        w=torch.arange(1025).reshape(41, 25).float(),
        half=torch.arange(300).bfloat16(),
        tiny=torch.arange(8).to(torch.float8_e4m3fn),
    ),
    "optimizer": {
        0: {"a/b": np.arange(7), "step": torch.tensor(7.0)},
        "lr": 0.1,
        "none": torch.zeros(0, 5),
        "tuple": (1, None, {"x"}, -(2**80)),
        "text": "q" * 100_000,
        "bytes": b"z" * 5000,
        "days": np.array(["2020-01-01"], "datetime64[D]"),
    },
    "step": 5,
    "config": {"made": datetime(2020, 1, 1)},
}


def written(run: Run, state: Any, path: Path, **options: Any) -> Any:
    with small_grid(256, list_threshold=8):
        checkpoint = run.save(state, step=1, **options)
        formats.write(path, checkpoint)
    return checkpoint


def edit(path: Path, **fields: Any) -> None:
    """Change fields of a document; None takes one away."""
    document = json.loads(path.read_text()) | fields
    kept = {name: value for name, value in document.items() if value is not None}
    path.write_text(json.dumps(kept))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one array `g/a`, of 10 x 100 float32."""
    folder = tmp_path_factory.mktemp("made") / "one.zarr"
    group = zarr.open_group(folder, mode="w")
    group.create_array("g/a", data=np.ones((10, 100), "f4"), chunks=(3, 7))
    return folder


@pytest.fixture
def one(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(made, tmp_path / "one.zarr"))


# What Holdfast wrote


def test_what_was_written_comes_back_as_the_same_checkpoint(run: Run, tmp_path: Path) -> None:
    checkpoint = written(run, STATE, tmp_path / "x.zarr")
    found = formats.read(tmp_path / "x.zarr")
    files = [path for path in (tmp_path / "x.zarr").rglob("*") if path.is_file()]
    assert found.format == "zarr"
    assert found.size_bytes == sum(path.stat().st_size for path in files)
    assert list(found.state) == list(STATE)
    with small_grid(256, list_threshold=8):
        assert run.exchange.push(found.state, step=2).digest == checkpoint.digest


def test_arrays_without_elements_come_back_whatever_shape_they_have(
    run: Run, tmp_path: Path
) -> None:
    state = {
        "n": np.zeros((0, 32, 131072, 4096), "f4"),
        "b": torch.zeros(2**40, 0, 2**20, dtype=torch.bfloat16),
        "w": np.arange(5),
    }
    checkpoint = written(run, state, tmp_path / "x.zarr")
    found = formats.read(tmp_path / "x.zarr").state
    assert found["n"].shape == (0, 32, 131072, 4096)
    assert run.exchange.push(found, step=2).digest == checkpoint.digest


def test_the_type_of_the_state_comes_back(run: Run, tmp_path: Path) -> None:
    checkpoint = written(run, OrderedDict(b=torch.ones(3), a=1), tmp_path / "x.zarr")
    found = formats.read(tmp_path / "x.zarr").state
    assert type(found) is OrderedDict
    assert run.exchange.push(found, step=2).digest == checkpoint.digest


def test_keys_that_the_commit_keeps_come_back(tmp_path: Path) -> None:
    preset = tmp_path / "kept.toml"
    preset.write_text(
        'format = "holdfast.preset/1"\nname = "kept"\ncommit_keys = ["metadata", "metrics"]\n'
        '[[phases]]\nname = "main"\n'
    )
    with holdfast.init(tmp_path / "registry", skip_race_probe=True) as opened:
        run = opened.create_run("run", seed=0, preset=str(preset))
        state = {"metadata": {"a": 7}, "model": {"w": np.arange(9)}, "metrics": {"loss": 0.5}}
        checkpoint = run.exchange.push(state, step=1)
        assert set(checkpoint.manifest.components) == {"model"}
        formats.write(tmp_path / "x.zarr", checkpoint)
        formats.write(tmp_path / "y.zarr", checkpoint, only=["model"])
    found = formats.read(tmp_path / "x.zarr").state
    assert list(found) == list(state)
    assert same(found, state)
    assert same(formats.read(tmp_path / "y.zarr").state, {"model": state["model"]})


def test_a_true_element_type_counts_without_the_rest(run: Run, tmp_path: Path) -> None:
    written(run, STATE, tmp_path / "x.zarr")
    edit(tmp_path / "x.zarr" / "zarr.json", attributes={})
    with small_grid(256, list_threshold=8):
        found = run.exchange.push(formats.read(tmp_path / "x.zarr").state, step=2).load()
    assert torch.equal(found["model"]["half"], STATE["model"]["half"])
    assert found["model"]["tiny"].dtype == torch.float8_e4m3fn
    assert found["optimizer"]["0"]['"a']['b"'].tolist() == list(range(7))


@pytest.mark.parametrize(
    "described",
    [
        None,
        7,
        {"kind": "dict"},
        {"kind": "dict", "components": 3},
        {"kind": "dict", "components": [["g"]]},
        {"kind": "dict", "components": [[3, {"n": 0}]]},
        {"kind": "dict", "components": []},
        {"kind": "dict", "components": [["g", {"d": [["b", {"n": 0}]]}]]},
        {"kind": "dict", "components": [["g", {"d": [["a", {"n": 1}]]}]]},
        {"kind": "dict", "components": [["g", {"d": [["a", {"S": 0}]]}]]},
        {"kind": "dict", "components": [["g", {"d": [["a", {"n": 0}], ["x", {"f": 1.5}]]}]]},
        {"kind": "dict", "components": [["g", {"d": [["a", {"n": 0}]]}]] * 2},
        {"kind": "list", "components": [["g", {"d": [["a", {"n": 0}]]}]]},
        {"kind": ["dict"], "components": [["g", {"d": [["a", {"n": 0}]]}]]},
        {"kind": "dict", "components": [["g", {"d": [["a", {"n": 0}]], "x": 1}]]},
        {"kind": "dict", "components": [["g", {"eval": ["a", {"n": 0}]}]]},
    ],
)
def test_a_state_that_does_not_describe_the_arrays_is_refused(described: Any, one: Path) -> None:
    edit(one / "zarr.json", attributes={"holdfast_state": described})
    with pytest.raises(InvalidInput):
        formats.read(one)


@pytest.mark.parametrize(("policy", "tensor"), [("bf16", torch.rand), ("fp16", np.ones)])
@pytest.mark.parametrize("shape", [(3,), (60, 70)])
def test_what_was_saved_with_less_precision_says_so_again(
    policy: str, tensor: Any, shape: tuple[int, ...], run: Run, tmp_path: Path
) -> None:
    state = {"m": {"a/b": tensor(shape), "n": torch.ones(3).half(), "i": 7}}
    checkpoint = written(
        run, state, tmp_path / "x.zarr", storing=Storing(precision={'m/"a/b"': policy})
    )
    (was,) = {entry.original for entry in checkpoint.manifest.tensors()} - {None}
    with small_grid(256, list_threshold=8):
        pushed = run.exchange.push(formats.read(tmp_path / "x.zarr", portable=True).state, step=2)
        artifact = run.pins.artifacts.set(
            "x", formats.read(tmp_path / "x.zarr", portable=True).state
        )
    assert pushed.digest == artifact.digest == checkpoint.digest
    edit(tmp_path / "x.zarr" / "zarr.json", attributes={})
    with small_grid(256, list_threshold=8):
        foreign = run.exchange.push(formats.read(tmp_path / "x.zarr", portable=True).state, step=3)
    assert sorted(str(entry.original) for entry in foreign.manifest.tensors()) == ["None", was]


# Other hierarchies


def test_any_hierarchy_is_read(one: Path, run: Run) -> None:
    group = zarr.open_group(one, mode="a")
    deep = np.arange(1000, dtype="i4").reshape(10, 100)
    group.create_array("n/sharded", data=deep, chunks=(2, 10), shards=(4, 20))
    group.create_array("n/2/scalar", data=np.float16(3))
    group.create_array("filled", shape=(5, 5), dtype="f8", fill_value=7.5)
    group.create_array("partly", shape=(10,), dtype="u1", chunks=(3,), fill_value=9)[4] = 1
    big = group.create_array(
        "big", shape=(5,), dtype="f4", serializer=BytesCodec(endian="big"), compressors=None
    )
    big[:] = np.arange(5)
    group.create_array(
        "turned",
        data=np.arange(60, dtype="u2").reshape(3, 4, 5),
        filters=[TransposeCodec(order=(2, 0, 1))],
        compressors=[GzipCodec(), Crc32cCodec()],
    )
    group.create_array("blosc", data=np.ones((50, 50), "f2"), compressors=BloscCodec())
    group.create_array("zstd", data=np.ones((50, 50), "i8"), compressors=ZstdCodec())
    group.create_array("complex", data=np.ones(3, "c16"))
    group.create_array("flags", data=np.ones(3, "?"))
    group.create_array("empty", shape=(0, 4), dtype="i2", chunks=(1, 4))
    group.create_group("nothing")
    state = formats.read(one).state
    assert list(state) == sorted(state)
    for path, array in group.arrays():
        assert state[path].tobytes() == array[...].tobytes(), path
        assert (state[path].dtype, state[path].shape) == (array.dtype, array.shape), path
    assert np.array_equal(state["n"]["sharded"], deep)
    assert state["n"]["2"]["scalar"] == 3
    assert state["g"]["a"].dtype == np.float32
    assert state["nothing"] == {}
    assert (
        run.exchange.push(state, step=1).digest
        == run.exchange.push(formats.read(one).state, step=2).digest
    )


def test_one_array_is_a_component(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "x.zarr", data=np.arange(9))
    assert formats.read(tmp_path / "x.zarr").state["array"].tolist() == list(range(9))


def test_version_2_is_read(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=2)
        rows = np.arange(1000, dtype=">f4").reshape(10, 100)
        group.create_array("rows", data=rows, chunks=(3, 7), order="F")
        group.create_array(
            "n/deltas",
            data=np.arange(1000, dtype="<i8"),
            chunks=(30,),
            filters=[numcodecs.Delta(dtype="<i8")],
            compressors=numcodecs.LZ4(),
        )
        group.create_array("scalar", data=np.float64(3))
    state = formats.read(tmp_path / "x.zarr").state
    assert state["rows"].dtype == np.float32
    assert np.array_equal(state["rows"], rows)
    assert state["n"]["deltas"].tolist() == list(range(1000))
    assert state["scalar"] == 3


@pytest.mark.parametrize(
    "name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu"]
)
def test_types_of_ml_dtypes_that_zarr_wrote(name: str, run: Run, tmp_path: Path) -> None:
    assert name in native_types()
    dtype = np.dtype(getattr(ml_dtypes, name))
    bits = np.arange(64, dtype=f"u{dtype.itemsize}").reshape(8, 8)
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    for title, shards in (("plain", None), ("sharded", (4, 8))):
        made = group.create_array(title, shape=(8, 8), dtype=dtype, chunks=(2, 8), shards=shards)
        made[...] = bits.view(dtype)
    for title, fill in (("number", 0.5), ("nan", np.nan)):
        group.create_array(title, shape=(3,), dtype=dtype, fill_value=dtype.type(fill))
    found = run.save(formats.read(tmp_path / "x.zarr").state, step=1)
    shown = found.zarr()
    for title in ("plain", "sharded", "number", "nan"):
        assert shown[title].dtype == group[title].dtype == dtype
        assert shown[title][...].tobytes() == group[title][...].tobytes()
    assert shown["plain"][...].tobytes() == bits.tobytes()


def test_bfloat16_of_other_programs(run: Run, one: Path) -> None:
    shutil.rmtree(one / "g" / "a" / "c")
    for step, (fill, value) in enumerate(((0.0, 0.0), ("0x3fc0", 1.5))):
        edit(one / "g" / "a" / "zarr.json", data_type="bfloat16", fill_value=fill)
        found = run.exchange.push(formats.read(one).state, step=step).load()["g"]["a"]
        assert found.dtype == torch.bfloat16
        assert torch.all(found == value)


# What is refused


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"data_type": "string"}, "element type"),
        ({"data_type": "int4"}, "element type"),
        ({"data_type": {"name": "numpy.datetime64", "configuration": {}}}, "element type"),
        ({"shape": [2**60, 100], "chunk_grid": [2**59, 100]}, "fit into memory"),
        ({"shape": [2**45, 100], "chunk_grid": [2**44, 100]}, "fit into memory"),
        ({"chunk_grid": [2**44, 100]}, "fit into memory"),
        ({"shape": [2**60, 100]}, "too many chunks"),
        ({"shape": [2**64, 100]}, "bad shape"),
        ({"shape": [-1, 100]}, "bad shape"),
        ({"shape": [True, 100]}, "bad shape"),
        ({"shape": "10"}, "bad shape"),
        ({"shape": [1] * 65}, "bad shape"),
        ({"shape": [10]}, "number of axes"),
        ({"chunk_grid": [0, 7]}, "bad chunk_shape"),
        ({"chunk_grid": None}, "grid"),
        ({"chunk_key_encoding": {"name": "mine"}}, "naming of chunks"),
        ({"node_type": "thing"}, "neither array nor group"),
        ({"codecs": [{"name": "pickle"}]}, "not supported"),
        ({"codecs": [{"name": "numcodecs.pickle"}]}, "not supported"),
        ({"codecs": [{"name": "numcodecs.json2"}]}, "not supported"),
        ({"codecs": [{"name": "vlen-utf8"}]}, "not supported"),
        ({"codecs": [{"name": "os.system"}]}, "not supported"),
        ({"codecs": ["bytes"]}, "without a name"),
        ({"codecs": "bytes"}, "not a list"),
        ({"codecs": [{"name": "numcodecs.astype", "configuration": {"decode_dtype": "O"}}]}, "num"),
        ({"attributes": {"holdfast_dtype": "bfloat16"}}, "holdfast_dtype"),
        ({"attributes": {"holdfast_dtype": 3}}, "holdfast_dtype"),
        ({"attributes": {"holdfast_original": "float64"}}, "holdfast_original"),
        ({"data_type": "float16", "attributes": {"holdfast_original": "int8"}}, "holdfast_or"),
        ({"data_type": "float16", "attributes": {"holdfast_original": ["float32"]}}, "holdfast_or"),
        ({"zarr_format": 2}, "another version of Zarr"),
        ({"chunk_key_encoding": {"name": "default", "configuration": 3}}, "naming of chunks"),
        (
            {"chunk_key_encoding": {"name": "v2", "configuration": {"separator": ".."}}},
            "separator in names",
        ),
        ({"codecs": []}, "zarr cannot read"),
        ({"storage_transformers": [{"name": "x"}]}, "zarr cannot read"),
        ({"fill_value": "no number"}, "zarr cannot read"),
        ({"data_type": "bfloat16", "fill_value": "0x123456"}, "fill value"),
    ],
)
def test_hostile_metadata_is_refused_by_name(fields: dict, match: str, one: Path) -> None:
    if isinstance(shape := fields.get("chunk_grid"), list):
        fields["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": shape}}
    edit(one / "g" / "a" / "zarr.json", **fields)
    with pytest.raises(InvalidInput, match=match) as caught:
        formats.read(one)
    assert "one.zarr: g/a" in str(caught.value)


LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}


def sharded(codecs: object, chunk: object) -> dict:
    return {
        "name": "sharding_indexed",
        "configuration": {"chunk_shape": chunk, "codecs": codecs, "index_codecs": []},
    }


def test_shards_are_looked_into(one: Path) -> None:
    nest: Any = [{"name": "bytes"}]
    for _ in range(300):
        nest = [sharded(nest, [1, 1])]
    for codecs, match in (
        ([sharded([{"name": "pickle"}], [1, 1])], "not supported"),
        ([sharded([{"name": "bytes"}], [0, 1])], "within a shard"),
        ([sharded([{"name": "bytes"}], [1])], "within a shard"),
        (nest, "nest too deeply"),
    ):
        edit(one / "g" / "a" / "zarr.json", codecs=codecs)
        with pytest.raises(InvalidInput, match=match):
            formats.read(one)
    edit(
        one / "g" / "a" / "zarr.json",
        codecs=[sharded([{"name": "bytes"}], [1, 1])],
        shape=[4096, 4096],
        chunk_grid={"name": "regular", "configuration": {"chunk_shape": [4096, 4096]}},
    )
    with pytest.raises(InvalidInput, match="too many chunks"):
        formats.read(one)


class Planted:
    ran = False

    def __reduce__(self) -> Any:
        return (setattr, (Planted, "ran", True))


@pytest.mark.parametrize("codec", ["pickle", "json2", "msgpack2", "vlen-utf8", "categorize"])
@pytest.mark.parametrize("place", ["compressor", "filters"])
def test_objects_of_version_2_are_refused(codec: str, place: str, tmp_path: Path) -> None:
    folder = tmp_path / "x.zarr"
    folder.mkdir()
    named = {"id": codec}
    document = {
        "zarr_format": 2,
        "shape": [1],
        "chunks": [1],
        "dtype": "|O",
        "fill_value": 0,
        "order": "C",
        "compressor": named if place == "compressor" else None,
        "filters": [named] if place == "filters" else None,
    }
    (folder / "0").write_bytes(pickle.dumps(Planted()))
    for dtype, match in (("|O", "element type"), ("<f4", "not supported")):
        (folder / ".zarray").write_text(json.dumps({**document, "dtype": dtype}))
        with pytest.raises(InvalidInput, match=match):
            formats.read(folder)
    assert not Planted.ran


@pytest.mark.parametrize("dtype", ["|S5", "<U3", "<M8[s]", "|V4", "<f16", [["a", "<f4"]], None])
def test_other_types_of_version_2_are_refused(dtype: Any, tmp_path: Path) -> None:
    (tmp_path / "x.zarr").mkdir()
    document = {"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": dtype, "order": "C"}
    (tmp_path / "x.zarr" / ".zarray").write_text(json.dumps(document))
    with pytest.raises(InvalidInput, match="element type"):
        formats.read(tmp_path / "x.zarr")


def test_a_chunk_that_is_broken_is_refused(one: Path) -> None:
    chunk = one / "g" / "a" / "c" / "1" / "1"
    for data in (b"", b"x", chunk.read_bytes()[:-3]):
        chunk.write_bytes(data)
        with pytest.raises(InvalidInput, match="cannot be decoded") as caught:
            formats.read(one)
        assert str(caught.value).startswith(f"{one}: g/a/c/1/1: ")
        assert caught.value.expected == "84 bytes of float32, encoded by the codecs in the metadata"
        assert f"{len(data)} bytes of file" in str(caught.value.found)
        assert caught.value.hint
    chunk.unlink()
    assert formats.read(one).state["g"]["a"][4].tolist() == [1.0] * 7 + [0.0] * 7 + [1.0] * 86


def lose_metadata(one: Path) -> str:
    (one / "g" / "a" / "zarr.json").unlink()
    return "g/a/c/0/0"


def leave_a_chunk_behind(one: Path) -> str:
    shutil.copy(one / "g/a/c/0/0", one / "g/a/c/0/15")
    return "g/a/c/0/15"


def leave_a_chunk_of_other_axes(one: Path) -> str:
    shutil.copy(one / "g/a/c/0/0", one / "g/a/c/00")
    return "g/a/c/00"


def leave_attributes_alone(one: Path) -> str:
    (one / "g" / ".zattrs").write_text("{}")
    return "g/.zattrs"


def leave_notes(one: Path) -> str:
    (one / "notes.txt").write_text("kept")
    return "notes.txt"


@pytest.mark.parametrize(
    "leave",
    [
        lose_metadata,
        leave_a_chunk_behind,
        leave_a_chunk_of_other_axes,
        leave_attributes_alone,
        leave_notes,
    ],
)
def test_a_file_of_no_node_is_refused_by_name(leave: Callable[[Path], str], one: Path) -> None:
    group = zarr.open_group(one, mode="a")
    group.create_array("b", data=np.ones(3))
    name = leave(one)
    with pytest.raises(InvalidInput, match="belong to no node") as caught:
        formats.read(one)
    assert f"one.zarr: {name}: " in str(caught.value)


@pytest.mark.parametrize("separator", [".", "/"])
@pytest.mark.parametrize("naming", ["default", "v2"])
@pytest.mark.parametrize("shape", [(), (5,), (5, 0), (5, 12)])
def test_chunks_are_known_by_every_naming(
    shape: tuple[int, ...], naming: Any, separator: Any, tmp_path: Path
) -> None:
    data = np.ones(shape)
    named = {"name": naming, "separator": separator}
    chunks = tuple(max(1, n // 3) for n in shape)
    zarr.create_array(tmp_path / "x.zarr", data=data, chunks=chunks, chunk_key_encoding=named)
    assert same(formats.read(tmp_path / "x.zarr").state["array"], data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        group = zarr.open_group(tmp_path / "y.zarr", mode="w", zarr_format=2)
        named = {"name": "v2", "separator": separator}
        group.create_array("a", data=data, chunks=chunks, chunk_key_encoding=named)
        group.attrs["of"] = "the group"
        zarr.consolidate_metadata(tmp_path / "y.zarr", zarr_format=2)
    assert (tmp_path / "y.zarr" / ".zmetadata").is_file()
    assert same(formats.read(tmp_path / "y.zarr").state["a"], data)


ZEROS = bytes(50_000_000)
ONE_V2 = {"zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "<f4", "fill_value": 0}


def zstd_without_length(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


@pytest.mark.parametrize(
    ("codec", "compress"),
    [
        ("bz2", bz2.compress),
        pytest.param("bz2", lambda data: bz2.compress(b"") + bz2.compress(data), id="bz2 twice"),
        ("zlib", zlib.compress),
        ("gzip", gzip.compress),
        pytest.param(
            "gzip",
            lambda data: gzip.compress(b"") + bytes(9) + gzip.compress(data),
            id="gzip twice",
        ),
        ("zstd", lambda data: numcodecs.Zstd().encode(data)),
        ("zstd", zstd_without_length),
        ("lz4", lambda data: numcodecs.LZ4().encode(data)),
        ("blosc", lambda data: numcodecs.Blosc().encode(data)),
    ],
)
def test_a_chunk_that_expands_too_far_is_never_decoded(
    codec: str,
    compress: Callable[[bytes], bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "x.zarr").mkdir()
    (tmp_path / "x.zarr" / "0").write_bytes(compress(ZEROS))
    document = {**ONE_V2, "order": "C", "filters": None, "compressor": {"id": codec}}
    (tmp_path / "x.zarr" / ".zarray").write_text(json.dumps(document))
    kind = type(numcodecs.get_codec({"id": codec}))
    monkeypatch.setattr(kind, "decode", lambda *_: pytest.fail("decoded"))
    with pytest.raises(InvalidInput, match="expands to more") as caught:
        formats.read(tmp_path / "x.zarr")
    assert "x.zarr/0: " in str(caught.value)
    document["filters"] = [{"id": codec}]
    (tmp_path / "x.zarr" / ".zarray").write_text(json.dumps(document))
    with pytest.raises(InvalidInput, match="around a compressor"):
        formats.read(tmp_path / "x.zarr")


def sharded_file(inner: list[tuple[int, int]], data: bytes, order: str, first: bool) -> bytes:
    """Return a shard: chunks of `data` by start and length, with its index first or last."""
    index = b"".join(struct.pack(f"{order}2Q", *place) for place in inner)
    return index + data if first else data + index


BLOSC = {"typesize": 4, "cname": "lz4", "clevel": 5, "shuffle": "noshuffle", "blocksize": 0}
INNER: dict[str, tuple[Callable[[bytes], bytes], Any]] = {
    "gzip": (gzip.compress, {"level": 5}),
    "zstd": (lambda data: numcodecs.Zstd().encode(data), {"level": 0, "checksum": False}),
    "blosc": (lambda data: numcodecs.Blosc().encode(data), BLOSC),
}


@pytest.mark.parametrize("codec", INNER)
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize(("order", "first"), [("<", False), (">", True)])
def test_a_chunk_in_a_shard_that_expands_too_far_is_never_decoded(
    codec: str, is_nested: bool, order: str, first: bool, one: Path
) -> None:
    compress, configuration = INNER[codec]
    data = compress(ZEROS)
    skipped = 32 if first else 0
    places = [(2**64 - 1, 2**64 - 1), (skipped, len(data))]
    index = [{"name": "bytes", "configuration": {"endian": "big" if order == ">" else "little"}}]
    codecs: list[Any] = [LITTLE, {"name": codec, "configuration": configuration}]
    document: dict[str, Any] = sharded(codecs, [5, 100])
    document["configuration"] |= {
        "index_codecs": index,
        "index_location": "start" if first else "end",
    }
    shard = sharded_file(places, data, order, first)
    if is_nested:
        shard = sharded_file([(16 if first else 0, len(shard))], shard, order, first)
        document = sharded([document], [10, 100])
        document["configuration"] |= {
            "index_codecs": index,
            "index_location": "start" if first else "end",
        }
    shutil.rmtree(one / "g" / "a" / "c")
    edit(
        one / "g" / "a" / "zarr.json",
        codecs=[document],
        chunk_grid={"name": "regular", "configuration": {"chunk_shape": [10, 100]}},
    )
    (one / "g" / "a" / "c" / "0").mkdir(parents=True)
    (one / "g" / "a" / "c" / "0" / "0").write_bytes(shard)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match="expands to more") as caught:
            formats.read(one)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    assert "g/a/c/0/0: " in str(caught.value)


PACKED = [{"id": "packbits"}] * 8
WIDENED = [{"id": "astype", "encode_dtype": "u1", "decode_dtype": "c16"}] * 5


@pytest.mark.parametrize("compressor", [None, {"id": "zlib", "level": 1}])
@pytest.mark.parametrize("filters", [PACKED, WIDENED, [{"id": "delta", "dtype": "u1"}] * 40])
def test_filters_that_expand_too_far_are_never_run(
    filters: list[dict], compressor: dict | None, tmp_path: Path
) -> None:
    """Each of these makes a chunk 8 or 16 times longer, or copies it once more."""
    array = {
        "zarr_format": 2,
        "shape": [300],
        "chunks": [300],
        "dtype": "|u1",
        "order": "C",
        "fill_value": 0,
        "filters": filters,
        "compressor": compressor,
    }
    (tmp_path / "a.zarr").mkdir()
    (tmp_path / "a.zarr" / ".zarray").write_text(json.dumps(array))
    data = bytes(300)
    (tmp_path / "a.zarr" / "0").write_bytes(zlib.compress(data) if compressor else data)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match=r"expands to more|too many codecs"):
            formats.read(tmp_path / "a.zarr")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_honest_filters_are_run(tmp_path: Path) -> None:
    values = np.arange(3000.0)
    filters = [
        numcodecs.FixedScaleOffset(offset=0, scale=1, dtype="f8", astype="u2"),
        numcodecs.Delta(dtype="u2"),
    ]
    zarr.create_array(tmp_path / "a.zarr", data=values, filters=filters, zarr_format=2, chunks=500)
    assert np.array_equal(formats.read(tmp_path / "a.zarr").state["array"], values)
    packed = tmp_path / "b.zarr"
    zarr.create_array(packed, data=values > 9, filters=[numcodecs.PackBits()], zarr_format=2)
    assert np.array_equal(formats.read(packed).state["array"], values > 9)


@pytest.mark.parametrize(("length", "times"), [(60_000, 1000), (100_000, 1)])
def test_no_chunk_of_a_shard_takes_what_is_for_others(length: int, times: int, one: Path) -> None:
    """One may be named by each place of the index, and is decoded as often."""
    data = gzip.compress(bytes(length))
    places = [(0, len(data))] * times + [(2**64 - 1, 2**64 - 1)] * (1000 - times)
    shutil.rmtree(one / "g" / "a" / "c")
    document = sharded([LITTLE, {"name": "gzip", "configuration": {"level": 5}}], [1, 1])
    document["configuration"]["index_codecs"] = [LITTLE]
    edit(
        one / "g" / "a" / "zarr.json",
        codecs=[document],
        chunk_grid={"name": "regular", "configuration": {"chunk_shape": [10, 100]}},
    )
    (one / "g" / "a" / "c" / "0").mkdir(parents=True)
    (one / "g" / "a" / "c" / "0" / "0").write_bytes(sharded_file(places, data, "<", False))
    with pytest.raises(InvalidInput, match="expands to more"):
        formats.read(one)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"index_codecs": [{"name": "bytes"}, {"name": "gzip"}]}, "another encoding of a shard"),
        ({"chunk_shape": [3, 1]}, "not a whole number of chunks"),
    ],
)
def test_shards_that_zarr_does_not_write_are_refused(changes: Any, match: str, one: Path) -> None:
    document = sharded([{"name": "bytes"}], [1, 1])
    document["configuration"] |= changes
    grid = {"name": "regular", "configuration": {"chunk_shape": [10, 100]}}
    edit(one / "g" / "a" / "zarr.json", codecs=[document], chunk_grid=grid)
    with pytest.raises(InvalidInput, match=match):
        formats.read(one)
    around = [{"name": "gzip"}, {"name": "transpose"}]
    for codecs in ([document, around[0]], [around[1], document]):
        edit(one / "g" / "a" / "zarr.json", codecs=codecs)
        with pytest.raises(InvalidInput):
            formats.read(one)


def test_chunks_that_are_not_there_cost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """zarr takes its time for each; an array of a million is said in 200 bytes."""
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    made = group.create_array("a", shape=(1024, 1024), chunks=(1, 1), dtype="f4", fill_value=np.nan)
    places = [(0, 0), (511, 512), (1023, 1023), (512, 3)]
    for number, place in enumerate(places):
        made[place] = number
    asked: list[str] = []
    reading = foreign_arrays._ArrayStore._bounded

    def counted(self: Any, key: str, part: slice) -> bytes | None:
        asked.append(key)
        return reading(self, key, part)

    monkeypatch.setattr(foreign_arrays._ArrayStore, "_bounded", counted)
    array = formats.read(tmp_path / "x.zarr").state["a"]
    assert len(asked) < 1000
    assert [array[place] for place in places] == [0, 1, 2, 3]
    array[tuple(zip(*places, strict=True))] = np.nan
    assert np.isnan(array).all()


def test_many_short_streams_are_looked_at_in_linear_time(tmp_path: Path) -> None:
    """What follows a stream is copied at its end: 2 MiB of them must not copy 2 MiB each."""
    node = array_v2("x", {**ONE_V2, "order": "C", "compressor": {"id": "gzip"}}, None)
    check_expansion(node, "0", gzip.compress(b"") * 200_000)
    node = array_v2("x", {**ONE_V2, "order": "C", "compressor": {"id": "bz2"}}, None)
    with pytest.raises(InvalidInput, match="expands to more"):
        check_expansion(node, "0", bz2.compress(b"") * 200_000)


def test_only_files_are_read(one: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"mine")
    chunk = one / "g" / "a" / "c" / "1" / "1"
    chunk.unlink()
    chunk.symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidInput, match="more than files"):
        formats.read(one)
    chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(InvalidInput, match="more than files"):
        formats.read(one)
    chunk.unlink()
    (one / "g" / "b").symlink_to(one / "g" / "a")
    with pytest.raises(InvalidInput, match="more than files"):
        formats.read(one)


def test_a_folder_that_changes_is_refused(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def also_written(*_: object) -> None:
        (one / "g" / "new").write_bytes(b"")

    monkeypatch.setattr("holdfast.registry.formats.zarr.read_zarr_array", also_written)
    with pytest.raises(InvalidInput, match="changed while it was read"):
        formats.read(one)


def test_what_is_no_hierarchy_is_refused(one: Path, tmp_path: Path) -> None:
    (tmp_path / "x.zarr").mkdir()
    with pytest.raises(InvalidInput, match="not a Zarr folder"):
        formats.read(tmp_path / "x.zarr")
    for text in ("{", "[]", '"x"', "[" * 100_000, '{"zarr_format": 3}'):
        (tmp_path / "x.zarr" / "zarr.json").write_text(text)
        with pytest.raises(InvalidInput):
            formats.read(tmp_path / "x.zarr")
    zarr.open_group(tmp_path / "y.zarr", mode="w").create_group("a")
    with pytest.raises(InvalidInput, match="holds no array"):
        formats.read(tmp_path / "y.zarr")
    (one / "g" / "a" / "b").mkdir()
    (one / "g" / "a" / "b" / "zarr.json").write_text((one / "zarr.json").read_text())
    with pytest.raises(InvalidInput, match="inside an array"):
        formats.read(one)


def test_a_folder_that_may_not_be_read(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(path)

    monkeypatch.setattr("holdfast.registry.formats.source.os.scandir", refuse)
    with pytest.raises(StorageError):
        formats.read(one)


def test_memory_is_asked_first(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.registry.formats.zarr.available_bytes", lambda: 4083)
    with pytest.raises(IncompatibleState, match="fit into memory"):
        formats.read(one)
    monkeypatch.setattr("holdfast.registry.formats.zarr.available_bytes", lambda: 4084)
    assert formats.read(one).state["g"]["a"].nbytes == 4000


def test_what_an_array_without_elements_declares_takes_no_memory_and_hides_none(
    one: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = [0, 2**20, 2**20, 2**20]
    zarr.open_group(one).create_array("g/none", shape=shape, chunks=[1, *shape[1:]], dtype="f4")
    monkeypatch.setattr("holdfast.registry.formats.zarr.available_bytes", lambda: 4083)
    with pytest.raises(IncompatibleState, match=r"one\.zarr: g/a.* 84 for a chunk"):
        formats.read(one)
    monkeypatch.setattr("holdfast.registry.formats.zarr.available_bytes", lambda: 4084)
    assert formats.read(one).state["g"]["none"].shape == tuple(shape)
    # What no array of NumPy can have as its shape is refused, not tried.
    edit(one / "g" / "none" / "zarr.json", shape=[0, 2**62, 2**62, 2**62])
    with pytest.raises(InvalidInput, match="g/none"):
        formats.read(one)


def test_a_file_of_that_name_stays_opaque(tmp_path: Path) -> None:
    (tmp_path / "x.zarr").write_bytes(b"abc")
    assert formats.read(tmp_path / "x.zarr").format == "opaque"


def test_the_command_takes_a_folder(one: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "reg")
    with holdfast.init(url, skip_race_probe=True):
        pass
    arguments = ["push", str(one), "new", "--create", "--step", "1", "--registry", url]
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    assert "opaque" not in result.output
    with holdfast.open(url) as opened:
        found = opened.checkpoint("new/latest").load()
    assert same(found, formats.read(one).state)
    result = invoke("push", tmp_path, *arguments[2:])
    assert result.exit_code != 0
    assert isinstance(result.exception, (SystemExit, RegistryError))
