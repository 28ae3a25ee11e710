"""Files of `torch.save`: the only module that reads and writes them. It never runs code in them.

Reading is `torch.load(weights_only=True)`, whose unpickler knows tensors and plain values and looks
up nothing else. The archive is checked before: every entry must be stored uncompressed and only
once, so that the content is no larger than the file. Nothing in a refused file has run.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NoReturn

from holdfast.registry.errors import IncompatibleState, InvalidInput, UnsupportedValue
from holdfast.registry.formats.archive import entries_of
from holdfast.registry.formats.content import Content
from holdfast.registry.formats.source import KEEP, stable, unsound
from holdfast.registry.formats.state_file import (
    FileReport,
    FileState,
    TensorHeader,
    WrittenFile,
    problems,
)
from holdfast.registry.formats.target import new_file
from holdfast.registry.values.parse_limits import check_bytes, max_record_bytes

#: The most values in a file, if each shared list counts everywhere it is used.
MAX_VALUES = 20_000_000
#: Bytes of memory for each byte of a pickle, and more for a byte that makes a list, a dict or a
#: set.
_PICKLED_BYTES = 8
_CONTAINER_BYTES = 64
_CONTAINERS = (b"]", b"}", b"\x8f")
#: The most bytes of views on the data of a file, in multiples of its size, if that is more than the
#: bound of a record.
_MAX_SHARING = 16
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)|(?:unrecognized function|but got) (?:<\w+ ')?([\w.]+)")
_broken = partial(unsound, "torch")


def detect(path: Path) -> bool:
    """Return whether a file is a zip archive with a pickle where `torch.save` puts one."""
    with stable(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                return any(name.partition("/")[2] == "data.pkl" for name in archive.namelist())
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
            return False


def read(path: Path) -> FileState:
    """Read a file.

    Raises:
        UnsupportedValue: It names a class or function; nothing in it was run.
        InvalidInput: It is not an archive of `torch.save`, or it is damaged.
        IncompatibleState: torch is not installed.
    """
    state, size = _loaded(path, "cpu")
    return FileState(state, "torch", size)


def validate(path: Path) -> list[str]:
    """Return the first rule that a file breaks, if it breaks one."""
    return problems(read, path)


def inspect(path: Path) -> FileReport:
    """Read the pickle of a file, but none of its tensors' data.

    Raises:
        UnsupportedValue: It names a class or function; nothing in it was run.
        InvalidInput: It is not an archive of `torch.save`, or it is damaged.
        IncompatibleState: torch is not installed.
    """
    state, size = _loaded(path, "meta")
    return FileReport("torch", size, dict(_headers(state, (), _torch(path).Tensor)))


def _loaded(path: Path, device: str) -> tuple[dict[str, Any], int]:
    """Return the dict in a file with its tensors on a device, and the size of the file."""
    torch = _torch(path)
    with stable(path) as file:
        size = _check_archive(file, path)
        file.seek(0)
        try:
            state = torch.load(file, map_location=device, weights_only=True)
        except Exception as error:  # hostile bytes can provoke anything
            _refuse(path, error)
    if not isinstance(state, dict):
        raise InvalidInput(
            "the file does not hold a dict",
            where=path,
            expected="a dict with string keys at the top",
            found=type(state).__name__,
            hint="Save it as {'model': ...} instead.",
        )
    _check_extent(state, size, path)
    return state, size


def _headers(value: Any, above: tuple[str, ...], tensor: Any) -> Iterator[tuple[str, TensorHeader]]:
    """Yield the tensors of a state by path; `_check_extent` has bounded its depth."""
    if isinstance(value, tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        yield "/".join(above), TensorHeader(dtype, tuple(value.shape))
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _headers(item, (*above, str(key)), tensor)


def _torch(where: object) -> ModuleType:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise IncompatibleState(
            "torch is not installed",
            where=where,
            hint="Install it: pip install torch.",
        ) from error
    return torch


def _check_archive(file: BinaryIO, path: Path) -> int:
    """Refuse an archive that `torch.save` would not write; return the size of the file."""
    head = file.read(512)
    size = file.seek(0, 2)
    if not head.startswith(b"PK\x03\x04"):
        _refuse_legacy(head, path)
    try:
        entries = entries_of(file, path)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        _broken(path, "a damaged archive", "a whole zip archive", error)
    names = [entry.filename for entry in entries]
    inner = {name.partition("/")[2] for name in names}
    if "constants.pkl" in inner or any(name.startswith("code/") for name in inner):
        raise InvalidInput(
            "a TorchScript archive: it holds a program",
            where=path,
            expected="a file of torch.save(state_dict, path)",
            hint=f"Save module.state_dict() instead. {KEEP}",
        )
    if "data.pkl" not in inner:
        _broken(path, "not an archive of torch.save", "an entry data.pkl", ", ".join(names[:4]))
    if len(set(names)) != len(names) or len({name.partition("/")[0] for name in names}) != 1:
        _broken(path, "ambiguous entries in the archive", "each entry once, in one folder", None)
    total = sum(entry.file_size for entry in entries)
    if total > size or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        _broken(path, "the archive is compressed or overlaps itself", f"{size} bytes", total)
    with zipfile.ZipFile(file) as archive:
        pickles = [archive.read(entry) for entry in entries if entry.filename.endswith("/data.pkl")]
    _check_objects(pickles, path)
    return size


def _check_objects(pickles: Iterable[bytes], path: Path) -> None:
    """Refuse a pickle whose objects would take too much memory: one byte can make a list."""
    wanted = sum(
        len(data) * _PICKLED_BYTES + sum(map(data.count, _CONTAINERS)) * _CONTAINER_BYTES
        for data in pickles
    )
    check_bytes(wanted, "unpickling it", where=path, kind=InvalidInput)


def _refuse_legacy(head: bytes, path: Path) -> NoReturn:
    if head[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        kind = "a bare pickle, or torch.save's format before 1.6"
    elif head[257:262] == b"ustar":
        kind = "a tar archive: torch.save's format before 0.2"
    else:
        kind = "not a file of torch.save" if head else "an empty file"
    raise InvalidInput(
        kind,
        where=path,
        expected="the zip archive that torch.save writes since 1.6",
        hint=f"Load it where you trust it, and save it again with today's torch. {KEEP}",
    )


def _refuse(path: Path, error: Exception) -> NoReturn:
    text = str(error)
    found = _GLOBAL.search(text)
    if found is None:
        # The library's first line; the rest is advice that does not apply here.
        _broken(path, "it cannot be read as tensors and plain values", None, text.split("\n")[0])
    name = found[1] or found[2]
    raise UnsupportedValue(
        f"the file names {name}, which a load would look up and call",
        where=path,
        expected="tensors and plain values",
        hint="Nothing in it was run. Save state dicts and plain values only, or call run.save() in "
        f"the program that has the objects. {KEEP}",
    ) from error


# Extent


def _check_extent(state: dict[Any, Any], size: int, path: Path) -> None:
    """Refuse a small file that would become a huge state."""
    try:
        values, nbytes = _extent(state, {}, _torch(path))
    except RecursionError as error:
        _broken(path, "nested too deeply, or within itself", None, error)
    if values > MAX_VALUES:
        _broken(path, "it holds too many values", f"at most {MAX_VALUES}", values)
    most = max(size * _MAX_SHARING, max_record_bytes())
    if nbytes > most:
        raise InvalidInput(
            "its tensors are views that are far larger than the file",
            where=path,
            expected=f"at most {most} bytes",
            found=f"{nbytes} bytes",
            hint="A checkpoint stores expanded tensors element by element: save the tensors before "
            "they are expanded.",
        )


def _extent(value: Any, known: dict[int, tuple[int, int]], torch: ModuleType) -> tuple[int, int]:
    """Return the number of values and of tensor bytes; shared ones count everywhere they are."""
    if isinstance(value, torch.Tensor):
        return 1, value.numel() * value.element_size() if value.layout is torch.strided else 0
    if isinstance(value, dict):
        items: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple | set):
        items = value
    else:
        return 1, 0
    if id(value) not in known:
        parts = [_extent(item, known, torch) for item in items]
        known[id(value)] = 1 + sum(part[0] for part in parts), sum(part[1] for part in parts)
    return known[id(value)]


# Writing


def write(path: Path, content: Content, *, metadata: None, force: bool) -> WrittenFile:  # noqa: ARG001
    """Write a state; equal states give equal files.

    Raises:
        IncompatibleState: A value in it would make a file that cannot be loaded without running
            code, or torch is not installed.
    """
    torch = _torch(path)
    state = content.load()
    with new_file(path, content.size_bytes, force=force) as file:
        try:
            # To a file object, not a path: a path's name would end up in the bytes.
            torch.save(state, file)
        except (RuntimeError, TypeError, AttributeError) as error:
            # The archive's writer wraps errors of the system.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise _unfit(content, path, error) from error
        file.flush()
        size = file.tell()
        _check_loads(content, path, file)
    return WrittenFile(path, "torch", size)


def _check_loads(content: Content, path: Path, file: BinaryIO) -> None:
    file.seek(0)
    try:
        _torch(path).load(file, map_location="meta", weights_only=True)
    except Exception as error:  # with any error the file is useless
        raise _unfit(content, path, error) from error


def _unfit(content: Content, path: Path, error: Exception) -> IncompatibleState:
    found = _GLOBAL.search(str(error))
    culprit = (found[1] or found[2]) if found else str(error).split("\n")[0]
    return IncompatibleState(
        "a torch file of this state could only be loaded by running code",
        where=content.where,
        expected=f"tensors and plain values for {path.name}",
        found=culprit,
        hint="Choose components with `--only`, or load the checkpoint in Python: "
        "holdfast.open(URL).checkpoint(REF).load().",
    )
