"""Zarr folders: zarr reads what was saved, and they are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from holdfast import Run
from holdfast.registry import formats
from holdfast.registry.errors import (
    Damaged,
    IncompatibleState,
    InvalidInput,
    NotFound,
    StorageError,
)
from tests.support.stores import small_grid

STATE = {
    "model": {
        "w": torch.arange(1025).reshape(41, 25).float(),
        "half": torch.arange(300).bfloat16(),
        "deep": [{"a/b": np.arange(7)}],
        "zeros": torch.zeros(41, 25),
    },
    "optimizer": {"lr": 0.1, "step": torch.tensor(7), "none": torch.zeros(0, 5)},
}


@pytest.fixture
def saved(run: Run):
    with small_grid(256, list_threshold=8):
        yield run.save(STATE, step=1)


def test_zarr_reads_what_the_view_shows(saved, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("holdfast.registry.formats.zarr._HELD_BYTES", 800)
    written = formats.write(tmp_path / "x.zarr", saved)
    files = [path for path in written.path.rglob("*") if path.is_file()]
    assert written.format == "zarr"
    assert written.size_bytes == sum(path.stat().st_size for path in files)
    found, view = zarr.open_group(written.path, mode="r"), saved.zarr()
    said = found.attrs.asdict()
    assert set(said.pop("holdfast_state")) == {"kind", "components"}
    assert said == {"ref": saved.ref, "id": str(saved.digest)}
    members = dict(found.members(max_depth=None))
    assert set(members) == set(dict(view.members(max_depth=None)))
    for path, info in saved.tensors().items():
        # Folders are for all readers of Zarr, and most know no bfloat16.
        is_shown = info.dtype == "bfloat16"
        assert (str(view[path].dtype), str(found[path].dtype)) == (
            ("bfloat16", "uint16") if is_shown else (info.dtype, info.dtype)
        )
        np.testing.assert_array_equal(found[path][...], view[path][...].view(found[path].dtype))
        assert is_shown or found[path].metadata == view[path].metadata
    assert {str(path.relative_to(written.path)) for path in files} == set(
        view.store._layout.all_keys()
    )
    assert list(tmp_path.glob(".*")) == []


def test_one_component(saved, tmp_path: Path) -> None:
    formats.write(tmp_path / "x.zarr", saved, only=["optimizer"])
    assert set(zarr.open_group(tmp_path / "x.zarr", mode="r")) == {"optimizer"}
    with pytest.raises(NotFound, match="optimizer"):
        formats.write(tmp_path / "y.zarr", saved, only=["optimiser"])


@pytest.mark.parametrize("force", [False, True])
def test_what_stands_there_stays(force, saved, tmp_path: Path) -> None:
    (tmp_path / "file.zarr").write_bytes(b"precious")
    (tmp_path / "folder.zarr").mkdir()
    (tmp_path / "link.zarr").symlink_to("folder.zarr")
    for name in ("file.zarr", "folder.zarr", "link.zarr"):
        early = "the path exists" if force and name == "file.zarr" else "the path is|exists"
        with pytest.raises(InvalidInput, match=early):
            formats.write(tmp_path / name, saved, force=force)
    assert (tmp_path / "file.zarr").read_bytes() == b"precious"
    assert list((tmp_path / "folder.zarr").iterdir()) == []
    assert list(tmp_path.glob(".*")) == []


def test_one_that_appears_meanwhile_stays(saved, tmp_path: Path, monkeypatch) -> None:
    theirs = tmp_path / "x.zarr"
    monkeypatch.setattr(
        "holdfast.registry.formats.zarr._sync_folders", lambda folder: theirs.mkdir()
    )
    with pytest.raises(InvalidInput, match="the path exists"):
        formats.write(theirs, saved)
    assert list(tmp_path.glob("*")) == [theirs, tmp_path / "registry"]
    assert list(theirs.iterdir()) == []


def test_damage_leaves_nothing(saved, tmp_path: Path) -> None:
    for pack in (tmp_path / "registry" / "packs").rglob("*"):
        if pack.is_file():
            pack.chmod(0o600)
            data = bytearray(pack.read_bytes())
            data[40] ^= 1
            pack.write_bytes(data)
    with pytest.raises(Damaged):
        formats.write(tmp_path / "x.zarr", saved)
    assert [path.name for path in tmp_path.iterdir()] == ["registry"]


def test_what_has_no_place(run: Run, tmp_path: Path) -> None:
    with pytest.raises(IncompatibleState, match="no tensor"):
        formats.write(tmp_path / "x.zarr", run.save({"m": {"lr": 0.1}}, step=1))
    with pytest.raises(IncompatibleState, match="cannot name"):
        formats.write(tmp_path / "x.zarr", run.save({"m": {"..": torch.zeros(3)}}, step=2))
    with pytest.raises(IncompatibleState, match="not a file name"):
        formats.write(tmp_path / "x.zarr", run.save({"m": {"a\0b": torch.zeros(3)}}, step=4))
    with pytest.raises(StorageError):
        formats.write(tmp_path / "x.zarr", run.save({"m": {"x" * 300: torch.zeros(3)}}, step=3))
    assert [path.name for path in tmp_path.iterdir()] == ["registry"]
