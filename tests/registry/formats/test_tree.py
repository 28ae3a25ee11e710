"""Folders of files: what is pulled is what was pushed."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from holdfast import Run
from holdfast.registry import formats
from holdfast.registry.errors import IncompatibleState, InvalidInput, Malformed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like a checkpoint of a model: tensors, configuration, code, an empty folder."""
    root = tmp_path / "model"
    (root / "original/parts").mkdir(parents=True)
    (root / "logs").mkdir()
    tensors = {"b.weight": torch.randn(300, 40), "a": torch.ones(3, dtype=torch.bfloat16)}
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    (root / "original/parts/step_000007.bin").write_bytes(
        struct.pack("<ii6f", 7, 2, 1, 2, 3, 4, 5, 6)
    )
    (root / "config.json").write_bytes(b'{ "odd":   1}\r\n')
    (root / "empty.txt").touch()
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    torch.save({"lr": 0.1}, root / "scheduler.pt")
    return root


def contents(root: Path) -> dict[str, tuple[bytes, bool] | None]:
    return {
        str(one.relative_to(root)): None if one.is_dir()
        else (one.read_bytes(), os.access(one, os.X_OK))
        for one in sorted(root.rglob("*"))
    }  # fmt: skip


def kept(folder: Path) -> Any:
    """Return a folder file by file: by its content it would be one of Hugging Face."""
    return formats.read(folder, format="tree", portable=True).state


def pushed(run: Run, folder: Path, step: int = 1) -> Any:
    return run.exchange.push(kept(folder), step=step)


def test_folder_comes_back_byte_for_byte(run: Run, folder: Path, tmp_path: Path) -> None:
    checkpoint = pushed(run, folder)
    formats.write(tmp_path / "out", checkpoint)
    assert contents(tmp_path / "out") == contents(folder)


def test_files_are_known_by_their_plain_digest(run: Run, folder: Path, tmp_path: Path) -> None:
    files = pushed(run, folder).files()
    assert {name: one.format for name, one in files.items()} == {
        "config.json": "opaque",
        "empty.txt": "opaque",
        "model.safetensors": "safetensors",
        "original/parts/step_000007.bin": "andrea",
        "run.sh": "opaque",
        "scheduler.pt": "opaque",
    }
    for name, one in files.items():
        data = (folder / name).read_bytes()
        assert one.sha256 == hashlib.sha256(data).hexdigest()
        assert one.size_bytes == len(data)
    if shutil.which("sha256sum"):
        lines = "".join(f"{one.sha256}  {name}\n" for name, one in files.items())
        subprocess.run(
            ["sha256sum", "--strict", "-c"], input=lines.encode(), cwd=folder, check=True
        )


def test_tensors_of_a_folder_are_tensors(run: Run, folder: Path) -> None:
    checkpoint = pushed(run, folder)
    (path,) = [one for one in checkpoint.tensors() if one.endswith("b.weight")]
    assert checkpoint.tensors()[path].shape == (300, 40)


def test_file_that_cannot_be_rebuilt_stays_bytes(run: Run, folder: Path, tmp_path: Path) -> None:
    file = folder / "model.safetensors"
    size = struct.unpack("<Q", file.read_bytes()[:8])[0]
    header, rest = file.read_bytes()[8 : 8 + size], file.read_bytes()[8 + size :]
    padded = header + b" " * 64  # legal, and nobody writes it like that
    file.write_bytes(struct.pack("<Q", len(padded)) + padded + rest)
    checkpoint = pushed(run, folder)
    assert checkpoint.files()["model.safetensors"].format == "opaque"
    formats.write(tmp_path / "out", checkpoint)
    assert contents(tmp_path / "out") == contents(folder)


def test_second_push_stores_only_what_is_new(run: Run, folder: Path) -> None:
    first = pushed(run, folder)
    (folder / "config.json").write_bytes(b"{}")
    second = pushed(run, folder, 2)
    same = {one.content for one in first.tensors().values()}
    new = [path for path, one in second.tensors().items() if one.content not in same]
    assert new == ["files/config.json"]


@pytest.mark.parametrize("name", ["con.txt", "a\\b", "x.", "c:d", "new\nline", "Config.JSON"])
def test_unsafe_names_are_refused(folder: Path, name: str) -> None:
    (folder / name).touch()
    with pytest.raises(InvalidInput, match=r"safe name|one file"):
        kept(folder)


def test_links_are_refused(folder: Path) -> None:
    (folder / "link").symlink_to("/etc/passwd")
    with pytest.raises(InvalidInput, match="neither a file nor a folder"):
        kept(folder)


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "a/../../b"])
def test_hostile_description_writes_nothing(run: Run, tmp_path: Path, name: str) -> None:
    info = {"size_bytes": 1, "sha256": "00" * 32, "format": "opaque", "executable": False}
    state = {
        "tree": {"files": {name: info}, "folders": []},
        "files": {name: np.zeros(1, np.uint8)},
    }
    checkpoint = run.exchange.push(state, step=1)
    with pytest.raises(Malformed, match="description of a folder"):
        formats.write(tmp_path / "out", checkpoint)
    assert [one.name for one in tmp_path.iterdir()] == ["registry"]


def test_wrong_digest_writes_nothing(run: Run, folder: Path, tmp_path: Path) -> None:
    state = kept(folder)
    state["tree"]["files"]["config.json"]["sha256"] = "00" * 32
    with pytest.raises(IncompatibleState, match=r"config\.json"):
        formats.write(tmp_path / "out", run.exchange.push(state, step=1))
    assert not (tmp_path / "out").exists()
