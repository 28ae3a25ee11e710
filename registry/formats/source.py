"""Read a file of the user: open it once, check that it is a file and that it does not change.

Only what the user has named may be a link. Within the block of `within`, every other file is opened
below the folder of that, and a link there is refused.

A trainer may be writing the file that is being pushed. So its bytes are read into memory before
anything is committed, and never mapped: a mapping would be read while the commit is made, and a
file that gets shorter under a mapping kills the process.

The size limit, set by the caller or the environment, bounds the bytes of a file or folder, and what
a compressed one becomes. So a small file cannot fill memory or disk. What a zip archive claims is
checked before memory is taken for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

from holdfast.backends.errors import StoreUnsuitable
from holdfast.backends.local import folders
from holdfast.registry.errors import AccessDenied, IncompatibleState, InvalidInput, StorageError
from holdfast.registry.formats.digesting import is_digesting
from holdfast.registry.values import Budget, check_bytes, check_json, check_path_name

#: The most folders within each other.
_DEEPEST: Final = 600
#: What the user has named, and the folder out of which nothing leads.
_named: ContextVar[tuple[Path, Path] | None] = ContextVar("named", default=None)

#: The hint for a file that cannot be read.
KEEP = "To keep its bytes unread, read it as format 'opaque' (`--format opaque`)."
#: The environment variable: a number of bytes, for every program and format.
VARIABLE: Final = "HOLDFAST_MAX_FILE_BYTES"
_given: ContextVar[int | None] = ContextVar("max_bytes", default=None)
#: Bytes of memory for a byte of the directory: an entry takes 46 bytes there, and an object here.
_DIRECTORY_BYTES = 24


def unsound(program: str, where: object, rule: str, expected: object, found: object) -> NoReturn:
    """Refuse a file of a program, and name the rule of its format that it breaks."""
    text = None if found is None else str(found)
    raise InvalidInput(
        f"not a sound {program} file: {rule}",
        where=where,
        expected=expected,
        found=text if text is None or len(text) <= 200 else f"{text[:200]}...",
        hint=KEEP,
    )


@contextmanager
def within(named: Path) -> Iterator[None]:
    """Open only files of one folder within a block, and follow no link there."""
    try:
        held, folder = _named.get(), named if named.is_dir() else named.parent
    except PermissionError as error:
        raise _denied(named) from error
    is_inside = held is not None and folder.is_relative_to(held[1])
    token = _named.set(held if is_inside else (named, folder))
    try:
        yield
    finally:
        _named.reset(token)


def beside(path: Path, name: object) -> Path:
    """Return the path of another file that a file names: one in its folder, or below."""
    return path.parent / check_path_name(name, path)


def walk(
    root: Path, enters: Callable[[str], bool] = lambda _: True
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield names and status of all that is below a folder; no link is followed."""
    waiting = [""]
    while waiting:
        above = waiting.pop()
        try:
            if above.count("/") > _DEEPEST:
                raise OSError(f"more than {_DEEPEST} folders are within each other")
            with folders.opened(str(root), above[:-1]) as fd, os.scandir(fd) as entries:
                found = sorted((one.name, one.stat(follow_symlinks=False)) for one in entries)
        except PermissionError as error:
            raise AccessDenied("a folder may not be read", where=root / above) from error
        except (OSError, StoreUnsuitable) as error:
            raise InvalidInput(
                "a folder cannot be read", where=str(root / above)[:1000], found=error
            ) from error
        inner = []
        for name, seen in found:
            yield above + name, seen
            if stat.S_ISDIR(seen.st_mode) and enters(above + name):
                inner.append(f"{above}{name}/")
        waiting += reversed(inner)


@contextmanager
def stable(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; fail at the end of the block if it changed meanwhile."""
    with _open(path) as file:
        before = _identity(os.fstat(file.fileno()))
        yield file
        try:
            with _open(path) as again:
                after = _identity(os.fstat(again.fileno()))
        except (InvalidInput, AccessDenied):
            after = ()
        if not before == after == _identity(os.fstat(file.fileno())):
            raise InvalidInput(
                "the file changed while it was read",
                where=path,
                hint="Nothing was stored. Push it again once its writer is done.",
            )


def _denied(path: Path) -> AccessDenied:
    found = f"user id {os.geteuid()}"
    return AccessDenied("the file may not be read", where=path, found=found)


def _open(path: Path) -> BinaryIO:
    try:
        fd = _descriptor(path)
    except FileNotFoundError as error:
        raise InvalidInput("no such file", where=path) from error
    except PermissionError as error:
        raise _denied(path) from error
    except StoreUnsuitable as error:
        raise InvalidInput(
            "a link in a folder is not followed",
            where=path,
            hint="Copy the folder with the files that its links name: `cp -rL DIR COPY`.",
        ) from error
    except (OSError, ValueError) as error:
        raise InvalidInput("the file cannot be opened", where=path, found=error) from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            kind = "a folder" if stat.S_ISDIR(found.st_mode) else "something else"
            raise InvalidInput("not a file", where=path, found=kind)
        if not found.st_size:
            _check_empty(fd, path)
        return os.fdopen(fd, "rb", buffering=0)
    except BaseException:
        os.close(fd)
        raise


def _descriptor(path: Path) -> int:
    named = _named.get()
    if named is None or path == named[0]:
        # Without O_NONBLOCK the open of a pipe would never return.
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    root, name = named[1], path.relative_to(named[1]).as_posix()
    try:
        return folders.open_file(str(root), name)
    except StoreUnsuitable:
        # `snapshots/REV/` of a hub's cache may lead to `blobs/` of its repository.
        here, (above, _, _) = root.resolve(), name.rpartition("/")
        cache = next(
            (one.parent for one in (here / above).parents if one.name == "snapshots"), here
        )
        blob = os.path.relpath(here / above / path.readlink(), cache)
        if cache == here or os.path.dirname(blob) != "blobs":  # noqa: PTH120
            raise
        return folders.open_file(str(cache), blob)


def _check_empty(fd: int, path: Path) -> None:
    """Refuse a file of the system, as in /proc, whose size is always 0: its bytes would be lost."""
    try:
        data = os.pread(fd, 1, 0)
    except OSError as error:
        raise StorageError("the file cannot be read", where=path, found=error) from error
    if data:
        raise InvalidInput(
            "the file has bytes, but the system says that its size is 0",
            where=path,
            hint="Copy it to another file first.",
        )


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def read_exactly(file: BinaryIO, into: memoryview, path: Path) -> None:
    """Fill memory from the current position of the file."""
    done = 0
    while done < len(into):
        try:
            count = file.readinto(into[done:])  # type: ignore[attr-defined]
        except OSError as error:
            raise StorageError("the file cannot be read", where=path, found=error) from error
        if not count:
            raise InvalidInput(
                "the file ended while it was read",
                where=path,
                expected=f"{len(into)} bytes",
                found=f"{done} bytes",
            )
        done += count


def whole(path: Path) -> tuple[bytearray, os.stat_result]:
    """Return the bytes of a file, and its status."""
    with stable(path) as file:
        found = os.fstat(file.fileno())
        data = bytearray(found.st_size)
        read_exactly(file, memoryview(data), path)
    return data, found


def small(path: Path) -> bytes:
    """Return the bytes of a file that is read as one record, and no longer than one may be."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise InvalidInput("a file cannot be read", where=path, found=error) from error
    check_bytes(size, "reading it", where=path, kind=InvalidInput)
    return bytes(whole(path)[0])


def sha256_of(file: BinaryIO) -> bytes:
    """Return the SHA-256 of a file from its current position to its end."""
    return hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]


def unique_keys(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return the pairs of an object as a dict; a key must not be there twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"{str(twice)[:80]!r} is there twice")
    return found


def json_value(data: bytes, where: object) -> Any:
    """Return the JSON that a part of a file holds."""
    check_json(data, where=where, kind=InvalidInput)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidInput("not JSON", where=where, found=error) from error


def json_object(data: bytes, where: object) -> dict[str, Any]:
    """Return the JSON object in a part of a file; errors as for `json_value`."""
    found = json_value(data, where)
    if not isinstance(found, dict):
        raise InvalidInput("not a JSON object", where=where, found=type(found).__name__)
    return found


def json_text(value: Any, where: str, *, allow_nan: bool = True) -> str:
    """Return a value as JSON, from which the same value can be read."""
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=allow_nan)
        if repr(json.loads(text)) != repr(value):
            raise ValueError("JSON has lists for tuples, and no keys but strings")
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise IncompatibleState("a value is not JSON", where=where, found=error) from error


@contextmanager
def limited(max_bytes: int | None) -> Iterator[None]:
    """Apply a caller's limit within a block; with `None` the environment's limit stays."""
    if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 1):
        raise InvalidInput(
            "not a size limit", expected="a number of bytes from 1", found=repr(max_bytes)
        )
    before = _given.set(_given.get() if max_bytes is None else max_bytes)
    try:
        yield
    finally:
        _given.reset(before)


def max_bytes() -> int | None:
    """Return the limit, in bytes; `None` if nobody has set one."""
    given = _given.get()
    text = os.environ.get(VARIABLE, "")
    if given is not None or not text:
        return given
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text)):
        raise InvalidInput(
            "not a size limit", where=VARIABLE, expected="a number of bytes", found=repr(text)[:40]
        )
    return int(text)


def check_size(size: int, path: Path, *, default: int | None = None) -> None:
    """Check a number of bytes against the limit, before they are read or made."""
    most = max_bytes()
    most = default if most is None else most
    if most is not None and size > most:
        raise InvalidInput(
            "the file is larger than the size limit",
            where=path,
            expected=f"at most {most} bytes",
            found=f"{size} bytes",
            hint=f"If you trust its writer, raise the limit: max_bytes=, --max-bytes, {VARIABLE}.",
        )


def check_room(size: int, path: Path | str, *, copies: int = 1) -> None:
    """Check that the decompressed file is within the limit, and fits into memory if it is kept."""
    check_size(size, Path(path))
    if is_digesting():
        return
    available = available_bytes()
    size *= copies
    if size > available:
        raise IncompatibleState(
            "it does not fit into memory",
            where=path,
            expected=f"at most {available} bytes",
            found=f"{size} bytes",
        )


def check_path(path: Path) -> None:
    """Check the size of a file or folder, if there is a limit."""
    if max_bytes() is None or not path.exists():
        return
    check_size(_size_of(path), path)


def _size_of(path: Path) -> int:
    if not path.is_dir():
        return path.stat().st_size
    return sum(seen.st_size for _, seen in walk(path) if not stat.S_ISDIR(seen.st_mode))


def available_bytes() -> int:
    """Return the memory that can be taken without swapping, as the system sees it."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key == "MemAvailable":
                return int(value.removesuffix("kB")) * 1024
    except (OSError, ValueError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def entries_of(file: BinaryIO, path: Path) -> list[zipfile.ZipInfo]:
    """Return the entries of an archive."""
    with zipfile.ZipFile(_Listed(file, path)) as archive:
        return archive.infolist()


class _Listed:
    """The file of an archive while it is listed: the library reads the directory by one call.

    Where the directory is, and how long, only the library can say: there are many ways to hide it.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._budget = Budget(path, "listing it", InvalidInput)
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, count: int = -1) -> bytes:
        """Return bytes, unless the entries that they describe take too much memory."""
        self._budget.take(max(0, count) * _DIRECTORY_BYTES)
        return self._file.read(count)
