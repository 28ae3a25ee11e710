"""The notes of a checkout: the files that it made in the folder, and their sources.

They are lines of JSON in `.holdfast-checkout/made.jsonl`. A file is noted before it gets its name,
so after a crash every file that a checkout has made is known. Only files that still
have the noted bytes are replaced or removed: all others belong to somebody.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from holdfast.backends.errors import StoreUnsuitable
from holdfast.backends.local import folders
from holdfast.backends.local.disk import sync_folder
from holdfast.registry.errors import Conflict, InvalidInput, RegistryError
from holdfast.registry.formats import sha256_of, stable, walk
from holdfast.registry.values import check_path_name, max_record_bytes

FOLDER: Final = ".holdfast-checkout"
#: Begins the key of a file that another program wrote and an import took in: it is kept.
TAKEN_IN: Final = "import:"
_FORMAT: Final = "holdfast.checkout/1"


@dataclass(frozen=True, slots=True)
class MadeFile:
    """A file or a link that a checkout has made."""

    key: str  # its source
    sha256: str = ""  # the digest of its bytes in hex; empty for a link
    target: str = ""  # the target of a link; empty for a file
    #: Noted size, time and number of the file; if they are equal, it need not be hashed.
    stamp: tuple[int, ...] = ()
    #: The digest or the target of the replaced file or link: a crash may leave it in place.
    before: str = ""


class Made:
    """List of the files that checkouts have made in a folder."""

    def __init__(self, root: Path, run: str, layout: str) -> None:
        self._root, self._path = root, root / FOLDER / "made.jsonl"
        self._head = {"format": _FORMAT, "run": run, "layout": layout}
        self.files: dict[str, MadeFile] = {}

    @contextmanager
    def locked(self) -> Iterator[Path]:
        """Yield an empty folder for unfinished files, while no other checkout uses the folder."""
        folder = self._path.parent
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise InvalidInput("not the notes of a checkout", where=folder, hint="Remove it.")
        folder.mkdir(exist_ok=True)
        sync_folder(self._root)
        name, flags = folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(name, "ab", opener=lambda path, _: os.open(path, flags, 0o666)) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise Conflict(
                    "another checkout writes to this folder", where=self._root
                ) from error
            self._read()
            staging = folder / "unfinished"
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            self._rewrite(staging)
            try:
                yield staging
                self._rewrite(staging)
            finally:
                shutil.rmtree(staging, ignore_errors=True)

    def read(self) -> dict[str, MadeFile]:
        """Return the noted files; none if the notes are damaged, or of another run."""
        with suppress(RegistryError):
            folders.refuse_links(str(self._root), FOLDER)
            self._read()
            return self.files
        return {}

    def note(self, path: str, made: MadeFile | None) -> None:
        """Note a file before it gets its name, or note its removal."""
        known = self.files.get(path)
        if made is not None and known is not None:
            made = replace(made, before=known.sha256 or known.target)
        line = json.dumps({"path": path, "made": None if made is None else asdict(made)})
        with self._path.open("ab", buffering=0) as file:
            file.write(f"{line}\n".encode())
            os.fsync(file.fileno())
        self._take(path, made)

    def is_ours(self, path: str) -> bool:
        """Return whether the file of this name is a checkout's, byte for byte."""
        made = self.files.get(path)
        if made is None or made.key.startswith(TAKEN_IN):
            return False
        return self._found(path) in (made.sha256 or made.target, made.before)

    def is_current(self, path: str, key: str) -> bool:
        """Return whether the file of this name was made from this key, and is untouched."""
        made = self.files.get(path)
        return (
            made is not None
            and made.key == key
            and self._found(path) == (made.sha256 or made.target)
        )

    def _found(self, path: str) -> str | None:
        """Return the digest of a file, or the target of a link."""
        made, here = self.files[path], self._root / path
        try:
            folders.refuse_links(str(self._root), str(Path(path).parent))
        except StoreUnsuitable:
            return None  # a file beyond a link belongs to somebody else
        if here.is_symlink():
            return str(here.readlink()) if made.target else None
        if made.target or not here.is_file():
            return None
        return made.sha256 if stamp(here) == made.stamp else digest(here)

    def _take(self, path: str, made: MadeFile | None) -> None:
        if made is None:
            self.files.pop(path, None)
        else:
            self.files[path] = made

    def _read(self) -> None:
        if not self._path.is_file():
            return
        with stable(self._path) as file:
            lines = file.read(max_record_bytes()).split(b"\n")
        head = _parse(lines[0])
        if head is not None and head != self._head:
            raise Conflict(
                "the folder is a checkout of something else",
                where=self._root,
                expected=f"run {self._head['run']}, layout {self._head['layout']}",
                found=f"run {head.get('run')}, layout {head.get('layout')}",
                hint="Choose another folder.",
            )
        for line in lines[1:-1]:  # after a crash, the last one may be a part of a line
            self._take_line(_parse(line))

    def _take_line(self, line: dict[str, Any] | None) -> None:
        try:
            assert line is not None
            made = line["made"]
            known = None if made is None else MadeFile(**{**made, "stamp": tuple(made["stamp"])})
            for text in (known.key, known.sha256, known.target, known.before) if known else ():
                assert isinstance(text, str)
            self._take(check_path_name(line["path"]), known)
        except (AssertionError, KeyError, TypeError, InvalidInput) as error:
            raise InvalidInput(
                "the notes of the checkout are damaged",
                where=self._path,
                hint="Remove the folder and check the run out again.",
            ) from error

    def _rewrite(self, staging: Path) -> None:
        lines: list[dict[str, Any]] = [self._head]
        lines += [{"path": path, "made": asdict(made)} for path, made in self.files.items()]
        temporary = staging / "made.jsonl"
        with temporary.open("wb") as file:
            file.write("".join(f"{json.dumps(line)}\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        sync_folder(self._path.parent)


def stamp(path: Path) -> tuple[int, ...]:
    """Return a stamp of a file; it stays equal while nobody touches the file."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and the bytes of a folder's files, in hex."""
    if path.is_dir():
        names = [name for name, seen in walk(path) if stat.S_ISREG(seen.st_mode)]
        return digest_of({name: digest(path / name) for name in names})
    with stable(path) as file:
        return sha256_of(file).hex()


def digest_of(files: Mapping[str, str]) -> str:
    """Return the digest of a folder by those of its files."""
    lines = (f"{name}\n{files[name]}\n" for name in sorted(files, key=lambda one: one.split("/")))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
