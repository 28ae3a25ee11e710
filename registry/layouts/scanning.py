"""The files of a foreign folder: their names, checked, and their sidecars."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Final

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput, RegistryError
from holdfast.registry.formats import check_scope, stable, walk
from holdfast.registry.layouts.made import FOLDER, digest, stamp
from holdfast.registry.values import check_path_name, check_path_names

#: Maximum number of files in a folder.
MOST: Final = 1_000_000
SIDECAR: Final = ".sha256"
_LINE: Final = re.compile(r"([0-9a-fA-F]{64}) [ *]([^\n\\]+)\n?", re.ASCII)


class Scan:
    """Contents of a folder and the folders below it."""

    def __init__(self, root: Path) -> None:
        #: The names of files; a symlink within a folder counts as the file it points to.
        self.files: dict[str, str | None] = {}
        #: Names that are not safe, and links elsewhere, each with the reason.
        self.refused: dict[str, str] = {}
        self.folders: set[str] = set()  # the names of folders, checked too
        check_folder(root)
        for name, seen in walk(root, self.folders.__contains__):
            if len(self.files) >= MOST:
                raise InvalidInput("the folder has too many files", where=root, expected=MOST)
            if name not in (FOLDER, ".git"):
                self._add(root / name, name, seen.st_mode)
        check_path_names(self.files, root)

    def _add(self, path: Path, name: str, mode: int) -> None:
        try:
            check_path_name(name)
        except InvalidInput as error:
            self.refused[quoted(name)] = error.summary
            return
        if stat.S_ISLNK(mode):
            self._link(path, name)
        elif stat.S_ISDIR(mode):
            self.folders.add(name)
        elif stat.S_ISREG(mode):
            self.files[name] = None
        else:
            self.refused[name] = "it is neither a file nor a folder"

    def _link(self, path: Path, name: str) -> None:
        target = str(path.readlink())
        beside = path.parent / target
        if "/" in target or target in (os.curdir, os.pardir) or beside.is_symlink():
            self.refused[name] = "a symlink that leaves its folder, or points to another symlink"
        elif not beside.exists():
            self.refused[name] = "a symlink to nothing"
        else:
            self.files[name] = target


def check_folder(root: Path) -> None:
    """Check that a path is a folder that can be imported."""
    if root.is_dir():
        return
    check_scope(root)
    raise InvalidInput(
        "not a folder",
        where=root,
        found="a file" if root.is_file() else None,
        hint="To store one file, use `holdfast push`." if root.is_file() else None,
    )


def has_sidecar(path: Path) -> bool:
    """Return whether a file has a sidecar that is complete."""
    try:
        with stable(path.with_name(path.name + SIDECAR)) as file:
            match = _LINE.fullmatch(file.read(4096).decode(errors="replace"))
    except RegistryError:
        return False
    return match is not None and match[2] == path.name


def verified_digest(path: Path, *, wants_sidecar: bool) -> tuple[str, list[str]]:
    """Return the SHA-256 of a file in hex, compared with its sidecar, and warnings."""
    found, sidecar = digest(path), path.with_name(path.name + SIDECAR)
    if sidecar.is_symlink() or not sidecar.is_file():
        return found, [f"it has no {SIDECAR} file"] if wants_sidecar else []
    with stable(sidecar) as file:
        text = file.read(4096).decode(errors="replace")
    match = _LINE.fullmatch(text)
    if match is None or match[2] != path.name:
        raise InvalidInput(
            f"its {SIDECAR} file is not in the form of sha256sum",
            where=sidecar,
            expected=f"64 hex digits, two spaces, {path.name}",
            found=quoted(text[:200]),
        )
    if match[1].lower() != found:
        raise InvalidInput(
            f"its bytes do not have the digest of its {SIDECAR} file",
            where=path,
            expected=match[1].lower(),
            found=found,
            hint="It was damaged or replaced. Nothing of it was saved.",
        )
    return found, []


def identity(path: Path) -> tuple[int, ...]:
    """Return a stamp that changes when the file, or a file in the folder, changes."""
    if not path.is_dir():
        return stamp(path)
    inside = [seen for _, seen in walk(path) if stat.S_ISREG(seen.st_mode)]
    return tuple(n for one in inside for n in (one.st_size, one.st_mtime_ns, one.st_ino))
