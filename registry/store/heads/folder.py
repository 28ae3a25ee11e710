"""The head of a run as it was seen, its file, and the folder in which a user's heads are kept.

The file is made of lines like every JSON file of a registry: a header, a line for each run, and a
digest of all of it. `holdfast verify` writes and reads one, and the folder has one for each
registry, and some files beside it.

Nothing depends on it: a file that cannot be read is ignored. Links are not followed, and foreign
files are left alone. Any number of processes can share the folder.
"""

# pathlib cannot use names in an open folder.
# ruff: noqa: PTH111, PTH117, PTH118
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Annotated, Literal, NamedTuple, Self

from holdfast.backends import Location
from holdfast.registry.errors import Malformed, RolledBack
from holdfast.registry.objects import join_lines, split_lines
from holdfast.registry.store.cache_folder import OPEN, lock_folder, open_folder
from holdfast.registry.values import Digest, DigestField, Field, Record, host_name

#: A file that is longer is not read.
MAX_FILE_BYTES = 64 * 2**20


class Head(Record):
    """The head of a run: how far its log went."""

    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    commits: Annotated[int, Field(ge=1)]  # number of its commits, at least 1
    head: DigestField  # link to the last one, in which all before it are chained
    #: Number of its slots; these belong to one registry, while commits are the same in all.
    slots: Annotated[int, Field(ge=1)]
    #: The slot that holds the last commit, if it is known.
    slot: Annotated[int, Field(ge=0)] | None = None

    def is_further(self, other: "Head | None") -> bool:
        """Return whether this head is later than another one of the same history."""
        return other is None or (self.commits, self.slots) > (other.commits, other.slots)

    def skipped(self, snapshot: int) -> range:
        """Return the slots before a snapshot that prove this head."""
        if self.slot is not None:
            return range(self.slot, min(self.slot + 1, snapshot))
        # The next commit names the last one; it is in one of the slots after those that were seen.
        return range(self.slots, snapshot)

    def require(self, url: str, slots: int, commits: int, link: Digest | None) -> None:
        """Raise if a log does not continue from this head."""
        if slots < self.slots or commits < self.commits:
            raise RolledBack(
                "the log is shorter than this machine has seen it",
                where=f"{url}: {self.run}",
                expected=f"at least {self.commits} commits in {self.slots} slots",
                found=f"{commits} commits in {slots} slots",
                hint=advice(url),
            )
        if link != self.head:
            raise RolledBack(
                "this is not the log that this machine has seen",
                where=f"{url}: {self.run}, commit {self.commits - 1}",
                expected=self.head.hex(),
                found=link.hex() if link is not None else "no such commit in that slot",
                hint=advice(url),
            )


class _Header(Record):
    format: Literal["holdfast.heads/1"] = "holdfast.heads/1"
    registry: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    url: str
    epoch: Annotated[int, Field(ge=0)] = 0


#: A line of a run. There may be thousands, and a reader needs one: each is parsed on request.
_LINE = re.compile(
    rb'\{"commits":[1-9][0-9]{0,15},"head":"[0-9a-f]{64}",'
    rb'"run":"([A-Za-z0-9][A-Za-z0-9._-]{0,127})",'
    rb'(?:"slot":(?:0|[1-9][0-9]{0,15}),)?"slots":[1-9][0-9]{0,15}\}'
)


class HeadLines(Mapping[str, Head]):
    """Heads by run, as lines of a file, in the order in which they were added."""

    def __init__(self, lines: Mapping[str, bytes] | None = None) -> None:
        self.lines = dict(lines or {})

    def __getitem__(self, run_id: str) -> Head:
        return Head.parse(self.lines[run_id], where=run_id)

    def __iter__(self) -> Iterator[str]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def add(self, head: Head) -> None:
        """Add a head at the end, and drop the earlier one of its run."""
        self.lines.pop(head.run, None)
        self.lines[head.run] = head.encode()

    def newest(self, most: int) -> "HeadLines":
        """Return the `most` heads that were added last."""
        return HeadLines(dict(list(self.lines.items())[-most:]))


class HeadsFile(NamedTuple):
    """The heads of one registry."""

    registry: str  # its id
    url: str  # its URL, for people
    epoch: int  # the highest epoch that was seen; 0 before any
    heads: HeadLines  # the heads by run

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        header = _Header(registry=self.registry, url=self.url, epoch=self.epoch)
        return join_lines([header.encode(), *self.heads.lines.values()])

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> Self:
        """Read the bytes of a file."""
        first, *rest = split_lines(data, where=where)
        header = _Header.parse(first, where=where)
        lines = {}
        for line in rest:
            match = _LINE.fullmatch(line)
            run_id = match[1].decode() if match else ""
            if match is None or run_id in lines:
                what = "not a line of a run, or a second line of a run"
                raise Malformed(what, where=where, found=repr(line[:200]))
            lines[run_id] = line
        return cls(header.registry, header.url, header.epoch, HeadLines(lines))


def advice(url: str) -> str:
    """Return advice about a log that was rolled back."""
    return (
        "Somebody replaced it by an older or different copy, or deleted its newest slots: find out "
        "who, and restore the log from a backup. If the change was intended, run "
        f"`holdfast trust {url}`."
    )


#: The most registries with heads; beyond that the files written longest ago are removed.
MAX_FILES = 1000
_SUFFIX = ".heads"
_STAGED = ".new-"
_ABANDONED_S = 3600.0


def state_folder() -> str | None:
    """Return the folder: `holdfast/heads` in the user's state folder."""
    said = os.environ.get("XDG_STATE_HOME", "")
    base = said if os.path.isabs(said) else os.path.expanduser("~/.local/state")
    return os.path.join(base, "holdfast", "heads") if os.path.isabs(base) else None


def place_name(location: Location) -> str:
    """Return the name of a registry's file.

    The name depends on the machine for a folder: another machine with the same home folder may have
    another registry at the same path. It depends on the endpoint for a bucket of S3, and on the
    server or account of other stores: another one may have a bucket of the same name.
    """
    if location.scheme == "file":
        of = host_name()
    elif location.scheme != "s3":
        of = location.server
    else:
        of = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    place = f"{of} {location.url}"
    return hashlib.sha256(os.fsencode(place)).hexdigest()[:40] + _SUFFIX


def beside(name: str, suffix: str) -> str:
    """Return the name of another file of the same registry."""
    return name.removesuffix(_SUFFIX) + suffix


def read(path: str, name: str) -> bytes | None:
    """Return the bytes of a file in the folder at `path`; `None` if there is none."""
    try:
        folder = open_folder(path)
    except FileNotFoundError:
        return None
    try:
        return read_in(folder, name)
    finally:
        os.close(folder)


def read_in(folder: int, name: str) -> bytes | None:
    """Return the bytes of a file in an open folder, as `read` does."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | OPEN, dir_fd=folder)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(f"{name} is no file of this user")
        if found.st_size > MAX_FILE_BYTES:
            raise OSError(f"{name} is longer than {MAX_FILE_BYTES} bytes")
        return file.read(MAX_FILE_BYTES)


@contextmanager
def locked(path: str) -> Iterator[int]:
    """Open the folder at `path` and hold its lock; make the folder if there is none."""
    folder = open_folder(path, make=True)
    try:
        with lock_folder(folder):
            yield folder
    finally:
        os.close(folder)


def replace(folder: int, name: str, data: bytes) -> None:
    """Replace a file atomically; the caller holds the lock."""
    is_new = not _exists(folder, name)
    staged = _STAGED + secrets.token_hex(8)
    fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN, 0o600, dir_fd=folder)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.rename(staged, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(staged, dir_fd=folder)
        raise
    if is_new:
        _tidy(folder)


def remove(folder: int, name: str) -> bool:
    """Remove a file; return whether there was one."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def remove_all(folder: int, name: str) -> None:
    """Remove the file of a registry, and the files beside it."""
    with os.scandir(folder) as entries:
        mine = [one.name for one in entries if one.name.startswith(beside(name, "."))]
    for one in mine:
        remove(folder, one)


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _tidy(folder: int) -> None:
    """Remove the oldest files beyond the bound, and abandoned temporary files."""
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if entry.name.endswith(_SUFFIX):
                    files.append((entry.stat(follow_symlinks=False).st_mtime, entry.name))
                elif entry.name.startswith(_STAGED):
                    written_s = entry.stat(follow_symlinks=False).st_mtime
                    if time.time() - written_s > _ABANDONED_S:
                        remove(folder, entry.name)
    for _, name in sorted(files)[:-MAX_FILES]:
        remove_all(folder, name)
