"""Opaque files: byte for byte, under any name, and never a mixture of two states of a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast import Run
from holdfast.registry import formats
from holdfast.registry.errors import Damaged, IncompatibleState, InvalidInput, StorageError
from holdfast.registry.formats import source


@pytest.mark.parametrize("size", [0, 1, 64, 65, 5_000_000])
def test_round_trip(size: int, run: Run, tmp_path: Path) -> None:
    data = os.urandom(size)
    (tmp_path / "model.h5").write_bytes(data)
    found = formats.read(tmp_path / "model.h5")
    assert (found.format, found.size_bytes) == ("opaque", size)
    saved = run.save(found.state, step=1)
    assert formats.opaque_name(saved) == "model.h5"
    formats.write(tmp_path / "copy.of.any.name", saved)
    assert (tmp_path / "copy.of.any.name").read_bytes() == data
    formats.write(tmp_path / "even.pt", saved)
    assert (tmp_path / "even.pt").read_bytes() == data


@pytest.mark.parametrize("name", ["x.pkl", "x.npy", "x.joblib", "x.zip", "x.hdf5", "x", "ü.bin"])
def test_files_of_other_programs_are_not_parsed(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n")
    assert formats.read(tmp_path / name).format == "opaque"


def test_a_state_is_no_opaque_file(run: Run, tmp_path: Path) -> None:
    saved = run.save({"file": {"name": "x", "bytes": b"x"}}, step=1)
    assert formats.opaque_name(saved) is None
    with pytest.raises(IncompatibleState, match=r"\.h5"):
        formats.write(tmp_path / "x.h5", saved)


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"1" * 100)
    with pytest.raises(InvalidInput, match="changed while"), source.stable(path):
        path.write_bytes(b"2" * 101)
    with pytest.raises(InvalidInput, match="changed while"), source.stable(path):
        path.rename(tmp_path / "y.bin")
    with pytest.raises(InvalidInput, match="ended"), source.stable(tmp_path / "y.bin") as file:
        source.read_exactly(file, memoryview(bytearray(102)), path)


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="no files of the kernel here")
def test_a_file_of_the_system_that_tells_no_size() -> None:
    with pytest.raises(InvalidInput, match="its size is 0"):
        formats.read("/proc/version", format="opaque")
    with pytest.raises(StorageError, match="cannot be read"):
        formats.read("/proc/self/mem", format="opaque")


@pytest.mark.parametrize("kind", ["absent", "folder", "pipe"])
def test_what_is_no_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(InvalidInput, match=r"no such file|not a file"):
        formats.read(path, format="opaque")


def test_damage_leaves_no_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in.bin").write_bytes(os.urandom(100_000))
    saved = run.save(formats.read(tmp_path / "in.bin").state, step=1)
    (pack,) = (tmp_path / "registry" / "packs").rglob("*.0")
    pack.chmod(0o644)
    data = bytearray(pack.read_bytes())
    data[500] ^= 1
    pack.write_bytes(data)
    with pytest.raises(Damaged):
        formats.write(tmp_path / "out.bin", saved)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.bin", "registry"]
