"""The files of a foreign folder: checked names, sidecars, patterns of names, `.pt` files.

A pattern such as `epoch_{step:04d}_step_{global_step:08d}.pt` has the fields of Python's format
strings: `{step:08d}` a whole number with at least this many digits, `{value:.4f}` a number with
that many decimals, `{name}` text without a slash. Reading takes any number of digits: programs and
documents do not always agree on it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any, Final

from holdfast.backends.escape import quoted
from holdfast.registry.errors import IncompatibleState, InvalidInput, RegistryError
from holdfast.registry.formats import check_scope, stable, walk
from holdfast.registry.layouts.made import FOLDER, digest, stamp
from holdfast.registry.layouts.table import Found
from holdfast.registry.values import check_path_name, check_path_names

#: The end record of a zip archive without a comment, as torch writes it.
_END, _END_BYTES = b"PK\x05\x06", 22


def counted(found: Found, state: Mapping[str, Any], counter: str) -> tuple[int, tuple[str, ...]]:
    """Return the step of a file by its name, else by its state; and a warning if they differ."""
    held = state.get(counter)
    step = held if found.step is None and type(held) is int else found.step or 0
    if type(held) is int and held != step:
        return step, (f"its name says {counter} {step}, its state {held}; the name counts",)
    return step, ()


def metrics_of(state: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers at the top of the `metrics` of a state."""
    found = state.get("metrics")
    if not isinstance(found, dict):
        return {}
    metrics = {}
    for name, value in found.items():
        if isinstance(name, str) and type(value) in (int, float):
            try:
                metrics[name] = float(value)
            except OverflowError as error:
                raise InvalidInput(
                    "a metric is too large", where=name[:100], found=error
                ) from error
    return metrics


def ends_like_torch(path: Path) -> bool | None:
    """Return whether a file ends like an archive; `None` for other files."""
    with stable(path) as file:
        if file.read(4) != b"PK\x03\x04":
            return None
        size = file.seek(0, 2)
        file.seek(max(0, size - _END_BYTES))
        return file.read(4) == _END


_SPEC = re.compile(r"(0\d{1,2}d|\.\d{1,2}f|)", re.ASCII)
_READS = {"d": r"\d{1,18}", "f": r"-?\d{1,300}(?:\.\d{1,20})?", "": r"[^/]{1,255}"}


def written(pattern: str, fields: Mapping[str, Any]) -> str:
    """Return the name for some fields; unknown fields are ignored."""
    made = []
    for literal, name, spec in _parts(pattern):
        made.append(literal)
        if name is None:
            continue
        try:
            text = format(fields[name], spec)
        except (KeyError, ValueError, TypeError) as error:
            raise IncompatibleState(
                "a file cannot be named", where=pattern, expected=f"a value of {name}", found=error
            ) from error
        if "/" in text:
            raise InvalidInput("a field of a file name has a slash", where=pattern, found=text)
        made.append(text)
    return check_path_name("".join(made), pattern)


def fields_of(pattern: str, name: str) -> dict[str, Any] | None:
    """Return the fields of a name, numbers as numbers; `None` if the name does not match."""
    found = _reader(pattern).fullmatch(name)
    if found is None:
        return None
    kinds = {field: spec[-1:] for _, field, spec in _parts(pattern) if field}
    reads = {"d": int, "f": float, "": str}
    return {field: reads[kinds[field]](text) for field, text in found.groupdict().items()}


@cache
def _reader(pattern: str) -> re.Pattern[str]:
    text, known = "", set[str]()
    for literal, name, spec in _parts(pattern):
        text += re.escape(literal)
        if name in known:
            text += f"(?P={name})"
        elif name is not None:
            known.add(name)
            text += f"(?P<{name}>{_READS[spec[-1:]]})"
    return re.compile(text, re.ASCII)


@cache
def _parts(pattern: str) -> list[tuple[str, str | None, str]]:
    try:
        parts = [(text, name, spec or "") for text, name, spec, _ in Formatter().parse(pattern)]
    except ValueError as error:
        raise InvalidInput("not a pattern of names", where=pattern, found=error) from error
    for _, name, spec in parts:
        if name is not None and (not name.isidentifier() or not _SPEC.fullmatch(spec)):
            raise InvalidInput("not a field of a name", where=pattern, found=f"{name}:{spec}")
    return parts


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
        return _named_digest(path)[0] is not None
    except RegistryError:
        return False


def _named_digest(path: Path) -> tuple[str | None, str]:
    """Return the digest in the sidecar of a file, if it has the form of one; and its text."""
    with stable(path.with_name(path.name + SIDECAR)) as file:
        text = file.read(4096).decode(errors="replace")
    match = _LINE.fullmatch(text)
    return match[1].lower() if match and match[2] == path.name else None, text


def verified_digest(path: Path, *, wants_sidecar: bool) -> tuple[str, list[str]]:
    """Return the SHA-256 of a file in hex, compared with its sidecar, and warnings."""
    found, sidecar = digest(path), path.with_name(path.name + SIDECAR)
    if sidecar.is_symlink() or not sidecar.is_file():
        return found, [f"it has no {SIDECAR} file"] if wants_sidecar else []
    expected, text = _named_digest(path)
    if expected is None:
        raise InvalidInput(
            f"its {SIDECAR} file is not in the form of sha256sum",
            where=sidecar,
            expected=f"64 hex digits, two spaces, {path.name}",
            found=quoted(text[:200]),
        )
    if expected != found:
        raise InvalidInput(
            f"its bytes do not have the digest of its {SIDECAR} file",
            where=path,
            expected=expected,
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
