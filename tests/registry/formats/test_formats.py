"""The face of all formats: one table, the same calls for each."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import Run, formats
from holdfast.registry.errors import IncompatibleState, InvalidInput, NotFound
from holdfast.registry.formats import table
from tests.support.states import same

TENSORS = {"w": torch.arange(4000.0).reshape(40, 100), "b": torch.ones(3, dtype=torch.int16)}
NAMES = ["x.pt", "x.safetensors", "x.zarr", "x.npz"]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    for name in NAMES:
        formats.write(tmp_path / name, {"model": TENSORS})
    return {name: tmp_path / name for name in NAMES}


def test_the_table_is_sound() -> None:
    names = [one.name for one in table.FORMATS]
    claimed = [extension for one in table.FORMATS for extension in one.extensions]
    assert len(set(names)) == len(names)
    assert len(set(claimed)) == len(claimed)
    written = {f"x{one.extensions[0]}" for one in table.FORMATS if one.extensions}
    # Both hold states of one program only.
    assert set(NAMES) | {"x.thalia", "x.mpk"} == written
    offered = {"detect", "read", "inspect", "validate", "write"}
    assert all(offered <= set(dir(one.module)) for one in table.FORMATS)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_in_memory_is_written_as_a_stored_one(
    name: str, run: Run, files: dict[str, Path], tmp_path: Path
) -> None:
    """Zarr names the checkpoint in its root; all other bytes are equal."""
    stored = run.save({"model": TENSORS}, step=1)
    other = tmp_path / f"stored{files[name].suffix}"
    assert formats.write(other, stored).format == formats.detect(other)
    if files[name].is_dir():
        parts = [path.relative_to(other) for path in other.rglob("*/*") if path.is_file()]
        assert len(parts) == 5
        assert all((other / one).read_bytes() == (files[name] / one).read_bytes() for one in parts)
    else:
        assert other.read_bytes() == files[name].read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_described_and_found_sound(name: str, files: dict[str, Path]) -> None:
    report = formats.inspect(files[name])
    found = formats.read(files[name])
    assert report.format == found.format == formats.detect(files[name])
    assert report.size_bytes == found.size_bytes
    described = {path.split("/")[-1]: one for path, one in report.tensors.items()}
    assert described["w"] == formats.TensorHeader("float32", (40, 100))
    assert described["b"] == formats.TensorHeader("int16", (3,))
    assert formats.validate(files[name]) == []
    (arrays,) = found.state.values()
    assert {key: one.tolist() for key, one in arrays.items()} == {
        key: one.tolist() for key, one in TENSORS.items()
    }


def test_the_content_tells_the_format_where_the_name_does_not(tmp_path: Path) -> None:
    torch.save({"model": TENSORS}, tmp_path / "model.bin")
    assert formats.detect(tmp_path / "model.bin") == "torch"
    assert formats.inspect(tmp_path / "model.bin").format == "torch"
    assert formats.read(tmp_path / "model.bin", format="opaque").format == "opaque"
    assert same(formats.read(tmp_path / "model.bin").state["model"], TENSORS)
    assert formats.validate(tmp_path / "model.bin") == []
    shutil.copy(tmp_path / "model.bin", tmp_path / "model.safetensors")
    assert same(formats.read(tmp_path / "model.safetensors").state["model"], TENSORS)
    (problem,) = formats.validate(tmp_path / "model.safetensors")
    assert "another format than torch" in problem
    (tmp_path / "x.h5").write_bytes(b"\x89HDF")
    assert formats.detect(tmp_path / "x.h5") is None
    assert formats.inspect(tmp_path / "x.h5").tensors["file/bytes"].shape == (4,)
    assert formats.validate(tmp_path / "x.h5") == []


def test_problems_are_listed(tmp_path: Path) -> None:
    for name in ("x.pt", "x.safetensors", "x.npz"):
        (tmp_path / name).write_bytes(b"nonsense")
        (line,) = formats.validate(tmp_path / name)
        assert name in line
        assert "\n" not in line
    (tmp_path / "x.zarr").mkdir()
    assert "not a Zarr folder" in formats.validate(tmp_path / "x.zarr")[0]
    with pytest.raises(InvalidInput, match="no such file"):
        formats.validate(tmp_path / "absent.npz")


def test_one_file_becomes_another(tmp_path: Path, files: dict[str, Path]) -> None:
    for source in files.values():
        for portable in (False, True):
            found = formats.read(source, portable=portable)
            formats.write(tmp_path / "out.npz", found.state, force=True)
            (back,) = formats.read(tmp_path / "out.npz").state.values()
            arrays = {name: TENSORS[name].numpy() for name in back}
            assert same(back, arrays)
    found = formats.read(files["x.safetensors"], portable=True)
    formats.write(tmp_path / "out.pt", found.state)
    assert same(formats.read(tmp_path / "out.pt").state["model"], dict(sorted(TENSORS.items())))


def test_metadata_is_kept_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    formats.write(path, {"model": TENSORS}, {"format": "pt"})
    found = formats.read(path)
    assert found.metadata == formats.inspect(path).metadata == {"format": "pt"}
    formats.write(path, found.state, found.metadata, force=True)
    assert formats.read(path).metadata == {"format": "pt"}
    with pytest.raises(InvalidInput, match="other metadata"):
        formats.write(path, found.state, {"format": "np"}, force=True)
    with pytest.raises(IncompatibleState, match="keeps no metadata"):
        formats.write(tmp_path / "x.npz", {"model": TENSORS}, {"format": "np"})


@pytest.mark.parametrize(
    ("options", "kind"),
    [({"format": "torhc"}, InvalidInput), ({"only": ["modle"]}, NotFound)],
)
def test_a_name_that_does_not_exist(
    options: dict[str, Any], kind: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(kind, match="Did you mean"):
        formats.write(tmp_path / "x.pt", {"model": TENSORS}, **options)
    assert not (tmp_path / "x.pt").exists()


def test_an_opaque_file_in_memory(tmp_path: Path) -> None:
    (tmp_path / "in.h5").write_bytes(b"\x89HDF")
    state = formats.read(tmp_path / "in.h5").state
    formats.write(tmp_path / "out", state)
    assert (tmp_path / "out").read_bytes() == b"\x89HDF"
    with pytest.raises(IncompatibleState, match="no opaque file"):
        formats.write(tmp_path / "y", {"model": TENSORS}, format="opaque")


def test_large_tensors_in_memory_are_cut_as_stored_ones(tmp_path: Path) -> None:
    data = np.arange(3 * 5_000_000, dtype=np.uint8).reshape(3, 5_000_000)
    formats.write(tmp_path / "x.zarr", {"model": {"w": data}})
    assert same(formats.read(tmp_path / "x.zarr").state, {"model": {"w": data}})
