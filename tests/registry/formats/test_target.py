"""Targets: whole or not at all, and never over something else."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast.registry.errors import (
    AccessDenied,
    InvalidInput,
    RegistryError,
    StorageError,
    StoreFull,
)
from holdfast.registry.formats.target import check_target, new_file


def write(path: Path, data: bytes, *, force: bool = False) -> None:
    with new_file(path, len(data), force=force) as file:
        file.write(data)


def test_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with new_file(path, 1) as file:
        file.write(b"a")
        assert not path.exists()
    assert path.read_bytes() == b"a"
    assert list(tmp_path.iterdir()) == [path]


def test_what_stands_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(InvalidInput, match=r"exists.*--force"):
        write(path, b"new")
    assert path.read_bytes() == b"old"
    write(path, b"new", force=True)
    assert path.read_bytes() == b"new"


def test_one_that_appears_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(InvalidInput, match="exists"), new_file(path, 1):
        path.write_bytes(b"theirs")
    assert path.read_bytes() == b"theirs"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("force", [False, True])
def test_symlinks_and_folders_are_refused(force: bool, tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "link").symlink_to("victim")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    for name in ("link", "dangling", "folder"):
        with pytest.raises(InvalidInput, match="the path is a"):
            check_target(tmp_path / name, force=force)
        with pytest.raises(InvalidInput, match="the path is a"):
            write(tmp_path / name, b"x", force=force)
    assert (tmp_path / "victim").read_bytes() == b"precious"


@pytest.mark.parametrize("name", ["absent/x", "file/x", "..", "x\0y"])
def test_bad_paths(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput):
        write(tmp_path / name, b"x")


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StoreFull),
        (errno.EDQUOT, StoreFull),
        (errno.EROFS, AccessDenied),
        (errno.EACCES, AccessDenied),
        (errno.EIO, StorageError),
    ],
)
def test_failures_are_typed_and_leave_nothing(
    number: int, kind: type[RegistryError], tmp_path: Path
) -> None:
    with pytest.raises(kind, match=str(tmp_path)), new_file(tmp_path / "x", 123):
        raise OSError(number, os.strerror(number))
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", no_link)
    write(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"new"
    assert len(list(tmp_path.iterdir())) == 1
