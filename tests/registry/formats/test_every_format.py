"""What every format keeps: a description reads no data, the size limit holds, all faults are told.

The table `SAMPLES` has a sound file of each format, with a few MiB of tensors.
"""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.registry import formats
from holdfast.registry.errors import IncompatibleState, InvalidInput, UnsupportedFormat
from holdfast.registry.formats import source, table, thalia
from tests.registry.formats import test_burn, test_cobre, test_hf, test_thalia

SIZE = 600_000
BIG = np.arange(SIZE, dtype=np.float32)
TENSORS = {"w": torch.from_numpy(BIG.reshape(600, 1000)), "b": torch.ones(3, dtype=torch.int16)}


def of_torch(path: Path) -> None:
    torch.save({"model": TENSORS}, path)


def of_old_torch(path: Path) -> None:
    torch.save({"model": TENSORS}, path, _use_new_zipfile_serialization=False)


def of_arrays(path: Path) -> None:
    formats.write(path, {"model": TENSORS})


def of_brain(path: Path) -> None:
    state = test_thalia.brain()
    state["regions"]["cortex"]["weights"]["w_big"] = BIG
    formats.write(path, state)


def of_document(path: Path) -> None:
    path.write_bytes(test_thalia.documented(dense=BIG.reshape(2, -1))[0])


def of_burn(path: Path) -> None:
    about = {"metadata": test_burn.ABOUT, "item": {"w": TENSORS["w"]}}
    formats.write(path, about)


def of_folder(path: Path) -> None:
    test_hf.small(path)
    formats.write(path / "model.safetensors", {"model": TENSORS}, force=True)
    torch.save({"state": {0: TENSORS["w"]}}, path / "optimizer.pt")


def of_policy(path: Path) -> None:
    state: Any = test_cobre.policy()
    stage = state["cuts"]["stage_000"]
    cuts, dimension = stage["cuts"], 100_000
    count = len(cuts["cut_id"])
    cuts["coefficients"] = np.ones((count, dimension))
    for name in state["cuts"].values():
        name["state_dimension"] = dimension
        name["cuts"]["coefficients"] = np.ones((len(name["cuts"]["cut_id"]), dimension))
    state["metadata"]["state_dimension"] = dimension
    formats.write(path, state, format="cobre")


def of_step(path: Path) -> None:
    part = torch.from_numpy(BIG)
    formats.write(path, {"step": 3, "weights": part, "m": part, "v": part}, format="andrea")


def of_files(path: Path) -> None:
    path.mkdir()
    (path / "notes.bin").write_bytes(BIG.tobytes())


def of_bytes(path: Path) -> None:
    path.write_bytes(b"\x89HDF" + BIG.tobytes())


#: Name of the file or folder -> what makes it, and the format.
SAMPLES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a.pt": (of_torch, "torch"),
    "old.pt": (of_old_torch, "torch"),
    "a.safetensors": (of_arrays, "safetensors"),
    "a.zarr": (of_arrays, "zarr"),
    "a.npz": (of_arrays, "npz"),
    "a.thalia": (of_brain, "thalia"),
    "document.thalia": (of_document, "thalia"),
    "a.mpk": (of_burn, "burn"),
    "checkpoint-1": (of_folder, "hf"),
    "policy": (of_policy, "cobre"),
    "step_000003.bin": (of_step, "andrea"),
    "files": (of_files, "tree"),
    "a.h5": (of_bytes, "opaque"),
}
each_sample = pytest.mark.parametrize("name", SAMPLES)


@pytest.fixture
def sample(name: str, tmp_path: Path) -> Path:
    """A sound file or folder."""
    SAMPLES[name][0](tmp_path / name)
    return tmp_path / name


def size_of(path: Path) -> int:
    return sum(one.stat().st_size for one in [path, *path.rglob("*")] if one.is_file())


class Meter(io.FileIO):
    """A file that counts the bytes that are read."""

    taken = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(-1 if size is None else size)
        Meter.taken += len(data)
        return data

    def readall(self) -> bytes:
        data = super().readall()
        Meter.taken += len(data)
        return data

    def readinto(self, into: Any) -> int:
        count = super().readinto(into)
        Meter.taken += count
        return count


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts every byte that formats read from files."""
    opened, pread, preadv = source._open, os.pread, os.preadv
    monkeypatch.setattr(Meter, "taken", 0)

    def metered(path: Path) -> Meter:
        opened(path).close()  # its checks
        return Meter(path, "rb")

    monkeypatch.setattr(source, "_open", metered)

    def counted(fd: int, size: int, at: int) -> bytes:
        Meter.taken += size
        return pread(fd, size, at)

    def counted_into(fd: int, into: Any, at: int) -> int:
        count = preadv(fd, into, at)
        Meter.taken += count
        return count

    monkeypatch.setattr(os, "pread", counted)
    monkeypatch.setattr(os, "preadv", counted_into)
    return lambda: Meter.taken


def test_there_is_a_sample_of_every_format() -> None:
    assert {form for _, form in SAMPLES.values()} == {one.name for one in table.FORMATS}


@each_sample
def test_a_description_reads_no_data(
    name: str, sample: Path, meter: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = formats.inspect(sample)
    described = meter()
    assert report.format == SAMPLES[name][1]
    assert report.size_bytes == size_of(sample) >= 4 * SIZE
    # The end of an archive is searched in 64 KiB, a row of pickles in a window of 64 KiB.
    assert described < 3 * 2**16 + 20_000, f"{described} of {report.size_bytes} bytes"
    found = formats.read(sample, format=report.format, portable=True)
    assert meter() - described > found.size_bytes * 0.99  # the meter sees what a reading reads
    read = {
        path: (str(one.dtype), one.shape)
        for path, one in leaves_of(found.state).items()
        if report.format not in ("tree", "opaque")
    }
    assert {path: (one.dtype, one.shape) for path, one in report.tensors.items() if read} == read


def leaves_of(state: Any) -> dict[str, Any]:
    """Return arrays and tensors by path."""
    found: dict[str, Any] = {}
    parts = [("", state)]
    while parts:
        path, value = parts.pop()
        if isinstance(value, dict | list | tuple):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            parts += [(f"{path}/{key}" if path else str(key), item) for key, item in items]
        elif hasattr(value, "shape"):
            found[path] = value
    return found


@each_sample
def test_the_size_limit_holds_for_every_call(
    name: str, sample: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, form = size_of(sample), SAMPLES[name][1]
    for call in (formats.read, formats.inspect):
        call(sample, format=form, max_bytes=size)
        with pytest.raises(InvalidInput, match="larger than the size limit"):
            call(sample, format=form, max_bytes=size - 1)
    assert formats.validate(sample, format=form, max_bytes=size) == []
    (line,) = formats.validate(sample, format=form, max_bytes=size - 1)
    assert "larger than the size limit" in line
    monkeypatch.setenv(source.VARIABLE, str(size - 1))
    with pytest.raises(InvalidInput, match=source.VARIABLE):
        formats.read(sample, format=form)
    assert formats.read(sample, format=form, max_bytes=size)  # the caller counts


@pytest.mark.parametrize("ending", ["npz", "thalia.zst", "thalia.lz4", "zarr"])
def test_the_size_limit_is_that_of_what_a_file_becomes(ending: str, tmp_path: Path) -> None:
    path, zeros = tmp_path / f"a.{ending}", np.zeros(500_000, np.float32)
    if ending == "npz":
        np.savez_compressed(path, a=zeros)
    elif ending == "zarr":
        zarr = pytest.importorskip("zarr")
        zarr.create_array(store=path, name="a", data=zeros)
    else:
        state = {"regions": {"a": {"w": zeros + np.float32(1)}}}
        thalia.save(path, state)
    assert size_of(path) < 100_000
    with pytest.raises(InvalidInput, match="larger than the size limit"):
        formats.read(path, max_bytes=1_000_000)
    formats.read(path, max_bytes=3_000_000)


@pytest.mark.parametrize("given", [0, -1, True, "1e9"])
def test_sizes_that_are_none(given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_bytes(tmp_path / "a.h5")
    with pytest.raises(InvalidInput, match="not a size limit"):
        formats.read(tmp_path / "a.h5", max_bytes=given)
    monkeypatch.setenv(source.VARIABLE, str(given))
    with pytest.raises(InvalidInput, match="not a size limit"):
        formats.read(tmp_path / "a.h5")


# Every problem, not only the first


def two_bad_headers(folder: Path) -> Path:
    path = folder / "a.safetensors"
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"a": {**entry, "dtype": "F33"}, "b": {**entry, "shape": [3]}, "c": entry})
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(8))
    return path


def two_gaps(folder: Path) -> Path:
    path = folder / "a.safetensors"
    spans = {"a": [0, 8], "b": [4, 12], "c": [16, 24]}
    header = json.dumps(
        {name: {"dtype": "F32", "shape": [2], "data_offsets": at} for name, at in spans.items()}
    )
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(24))
    return path


def two_bad_nodes(folder: Path) -> Path:
    formats.write(folder / "a.zarr", {"model": TENSORS})
    for name in ("w", "b"):
        document = folder / "a.zarr" / "model" / name / "zarr.json"
        about = json.loads(document.read_text())
        document.write_text(json.dumps({**about, "data_type": f"odd-{name}"}))
    return folder / "a.zarr"


def two_strays(folder: Path) -> Path:
    formats.write(folder / "a.zarr", {"model": TENSORS})
    for name in ("left.tmp", "over.tmp"):
        (folder / "a.zarr" / name).write_bytes(b"x")
    return folder / "a.zarr"


def two_damaged_entries(folder: Path) -> Path:
    path = folder / "a.npz"
    np.savez(path, a=np.full(99, 1.5), b=np.full(99, 2.5))
    data = bytearray(path.read_bytes())
    for value in (1.5, 2.5):
        data[data.index(np.full(9, value).tobytes())] ^= 1
    path.write_bytes(data)
    return path


def two_missing_storages(folder: Path) -> Path:
    import zipfile

    torch.save({"a": torch.ones(9), "b": torch.ones(8), "c": torch.ones(7)}, folder / "a.pt")
    with (
        zipfile.ZipFile(folder / "a.pt") as whole,
        zipfile.ZipFile(folder / "b.pt", "w") as partial,
    ):
        for entry in whole.infolist():
            if not entry.filename.endswith(("data/0", "data/2")):
                partial.writestr(entry, whole.read(entry))
    return folder / "b.pt"


def two_bad_tensors_of_the_document(folder: Path) -> Path:
    data = bytearray(test_thalia.documented()[0])
    first = data.index(np.arange(6, dtype="<f4").tobytes())
    last = data.index(np.array([[1, 2]], "<i1").tobytes(), len(data) - 40)
    for at in (first, last):
        data[at] ^= 1
    path = folder / "document.thalia"
    path.write_bytes(test_thalia.signed(bytes(data[:-32])))
    return path


def two_lies_of_a_delta(folder: Path) -> Path:
    state = test_thalia.brain()
    thalia.save(folder / "base.thalia", state)
    state["regions"]["cortex"]["weights"]["w_ff"] += 1
    path = folder / "next.delta.thalia"
    thalia.save_delta(path, state, folder / "base.thalia")
    data = bytearray(path.read_bytes())
    data[9] ^= 1
    data[49] ^= 1
    path.write_bytes(data)
    return path


def two_bad_names(folder: Path) -> Path:
    (folder / "files").mkdir()
    (folder / "files" / "aux").write_bytes(b"")
    (folder / "files" / "link").symlink_to("aux")
    return folder / "files"


def two_bad_files(folder: Path) -> Path:
    test_hf.small(folder / "a")
    (folder / "a" / "tokenizer_config.json").write_text("{")
    two_bad_headers(folder).replace(folder / "a" / "model.safetensors")
    return folder / "a"


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (two_bad_headers, ["'a' has an element type", "shape of tensor 'b'"]),
        (two_gaps, ["'b' overlaps", "'c' leaves a hole"]),
        (two_bad_nodes, ["odd-b", "odd-w"]),
        (two_strays, ["left.tmp: 1 of", "over.tmp: 1 of"]),
        (two_damaged_entries, ["a.npy", "b.npy"]),
        (two_missing_storages, ["storage '0'", "storage '2'"]),
        (two_bad_tensors_of_the_document, ["weights/0: ", "delays"]),
        (two_lies_of_a_delta, ["base_hash", "current_step"]),
        (two_bad_names, ["aux", "link"]),
        (two_bad_files, ["'a' has an element type", "shape of tensor 'b'", "tokenizer_config"]),
    ],
)
def test_every_problem_is_told(
    make: Callable[[Path], Path], texts: list[str], tmp_path: Path
) -> None:
    path = make(tmp_path)
    found = formats.validate(path, format="hf" if make is two_bad_files else None)
    assert len(found) == len(texts), found
    for text in texts:
        assert sum(text in line for line in found) == 1, (text, found)


# ONNX


@pytest.mark.parametrize("call", [formats.read, formats.inspect, formats.validate])
def test_onnx_is_out_of_scope(call: Any, tmp_path: Path) -> None:
    (tmp_path / "Model.ONNX").write_bytes(b"\x08\x08\x12\x07pytorch")
    with pytest.raises(UnsupportedFormat, match="ONNX is out of scope") as told:
        call(tmp_path / "Model.ONNX")
    assert "torch.onnx.export" in str(told.value)
    assert call(tmp_path / "Model.ONNX", format="opaque") is not None
    with pytest.raises(UnsupportedFormat, match="ONNX is out of scope"):
        call(tmp_path / "Model.ONNX", format="onnx")


def test_onnx_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match="a checkpoint has no graph"):
        formats.write(tmp_path / "x.onnx", {"model": TENSORS})
    with pytest.raises(IncompatibleState, match=r"cannot be written as \.onyx"):
        formats.write(tmp_path / "x.onyx", {"model": TENSORS})
    assert not list(tmp_path.iterdir())
