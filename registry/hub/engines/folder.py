"""The versions of a model on the host of its engines, as folders of plain files.

```text
DIR/current                 a link to the version that is newest here: a restarted engine loads it
DIR/versions/NUMBER-.../     the files of one version, and `holdfast.json`, which names it
DIR/status.json             the version, and what each engine has confirmed
```

A folder of a version gets its name when all its files are written and synced, and is never changed
after that: whoever is told of a folder reads one version of it, however long that takes. `current`
is replaced by a rename. Of the version before, every chunk that stayed is copied and hashed again;
of a chunk that is stored as a delta only the delta is fetched.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple

from holdfast.backends.local.disk import sync_folder
from holdfast.registry.errors import Conflict, InvalidInput, StoreFull
from holdfast.registry.formats import fail, put_file
from holdfast.registry.history import StateReader
from holdfast.registry.hub.views import View
from holdfast.registry.loading import Checkpoint, Joined
from holdfast.registry.store import Store
from holdfast.registry.values import Digest, Field, Record

#: Describes the version, in its folder.
MARKER = "holdfast.json"
_VERSIONS, _CURRENT, _LOCK, _NEW = "versions", "current", ".lock", ".new"
_NAME = re.compile(r"\d{8,16}-[0-9a-f]{12}-[0-9a-f]{8}")
_OURS = re.compile(r"versions|current|\.lock|\.new|\.new\.json|status\.json")
_MOST_BYTES = 2**20  # of a file of ours that is read back
#: Bytes that are read together: their chunks are fetched at once.
_PART_BYTES = 32 * 2**20


class FollowedVersion(Record):
    """One version of a model, as files in a folder.

    Attributes:
        format: The format of `holdfast.json` in the folder, which holds the same fields.
        folder: The folder with its files, an absolute path; nothing in it ever changes.
        run: Name of the run.
        ref: Ref of its checkpoint.
        id: Id of the checkpoint: 64 hex digits.
        phase: Its phase.
        step: Its step.
        n: Number of the commit that added it: a newer checkpoint has a greater one.
    """

    format: Literal["holdfast.follow/1"] = "holdfast.follow/1"
    folder: str
    run: str
    ref: str
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    phase: str
    step: int
    n: int


class _Place(NamedTuple):
    """A chunk in a file."""

    path: Path
    offset: int
    size: int


class Here:
    """The chunks of files that are here, as a cache of `Fetch`."""

    def __init__(self, places: Iterable[tuple[Digest, _Place]] = ()) -> None:
        self._places = dict(places)

    def stream(self, file: Joined) -> tuple[StateReader, Iterator[bytes]]:
        """Return the reader of a file, and its parts: what is not here is fetched."""
        reader = file.chunks.source
        assert isinstance(reader, StateReader)
        reader.caches = (self,)
        return reader, file.stream(_PART_BYTES)

    def write(self, files: Mapping[str, Joined], folder: Path) -> int:
        """Write files; return how many stored bytes were fetched."""
        readers = set[StateReader]()
        for name, file in files.items():
            reader, parts = self.stream(file)
            readers.add(reader)
            put_file(folder / name, map(memoryview, parts))
        return sum(one.moved_bytes for one in readers)

    def fill(
        self, wanted: Mapping[Digest, memoryview], *, verified: bool = True
    ) -> Sequence[Digest]:
        """Fill memory with the chunks that are here; return the digests of the others."""
        return [one for one, view in wanted.items() if not self._fill(one, view, verified)]

    def peek(self, digest: Digest, size: int) -> memoryview | None:  # noqa: ARG002
        """Return nothing: a file may shrink while it is mapped."""
        return None

    def _fill(self, digest: Digest, view: memoryview, verified: bool) -> bool:
        place = self._places.get(digest)
        if place is None or place.size != len(view) or not _read(place, view):
            return False
        return not verified or hashlib.sha256(view).digest() == digest


def _read(place: _Place, view: memoryview) -> bool:
    """Read a chunk from its file; return whether all of it was there."""
    try:
        with place.path.open("rb", buffering=0) as file:
            file.seek(place.offset)
            return file.readinto(view) == len(view)
    except OSError:
        return False


class HostFolder:
    """The folder of one follower, which alone writes to it."""

    def __init__(self, store: Store, run_id: str, root: Path) -> None:
        self._store, self._run_id, self._root = store, run_id, root.absolute()
        self._here: Here | None = None  # unknown until the first version is made
        self.moved_bytes = 0  # stored bytes of chunks that were fetched for the newest version
        self._status = b""
        self._lock = lock_folder(root, _OURS)
        try:
            self.current = self._found()  # where `current` leads; `None` before the first version
            shutil.rmtree(root / _VERSIONS / _NEW, ignore_errors=True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another follower have the folder."""
        self._lock.close()

    def make(self, checkpoint: Checkpoint, view: View) -> FollowedVersion:
        """Write a version as files and switch `current` to it; until then nothing changes."""
        if self._lock.closed:
            raise Conflict("the follower is closed", where=self._root)
        size = sum(file.size for file in view.files.values())
        # Never a name that an engine was told before.
        name = f"{checkpoint.handle.n:08d}-{checkpoint.digest.hex()[:12]}-{secrets.token_hex(4)}"
        new, folder = (self._root / _VERSIONS / one for one in (_NEW, name))
        made = FollowedVersion(
            folder=str(folder),
            run=checkpoint.run_id,
            ref=checkpoint.ref,
            id=checkpoint.digest.hex(),
            phase=str(checkpoint.phase),
            step=checkpoint.step,
            n=checkpoint.handle.n,
        )
        self._check_room(size)
        try:
            if self._here is None:
                self._here = Here(self._surveyed(view))
            files = {name: file for name, file in view.files.items() if name != MARKER}
            self.moved_bytes = self._here.write(files, new)
            give_name(new, folder, MARKER, made)
            link = self._root / _NEW
            link.unlink(missing_ok=True)
            link.symlink_to(Path(_VERSIONS, name))
            link.replace(self._root / _CURRENT)
            sync_folder(self._root)
        except OSError as error:
            fail(error, new, size)
        finally:
            shutil.rmtree(new, ignore_errors=True)  # of a version that was broken off
        self._here, self.current = Here(places(view.files, folder)), made
        return made

    def versions(self) -> list[str]:
        """Return the folders of the versions that are here."""
        there = self._root / _VERSIONS
        found = there.iterdir() if there.is_dir() else ()
        return [str(one) for one in found if _NAME.fullmatch(one.name)]

    def clean(self, kept: Collection[str]) -> None:
        """Remove the other versions."""
        for one in self.versions():
            if one not in kept:
                shutil.rmtree(one, ignore_errors=True)

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replace `status.json`, which nobody needs to go on."""
        data = json.dumps({"format": "holdfast.follow/1", **status}, indent=2).encode() + b"\n"
        if data == self._status or self._lock.closed:
            return
        new = self._root / f"{_NEW}.json"
        with suppress(OSError):
            new.write_bytes(data)
            new.replace(self._root / "status.json")
            self._status = data

    def _check_room(self, size: int) -> None:
        """Refuse a version that has no room, before anything of it is fetched."""
        try:
            free = shutil.disk_usage(self._root).free
        except OSError as error:
            fail(error, self._root, size)
        if free < size:
            raise StoreFull(
                "no room for one more version",
                where=self._root,
                expected=f"{size} bytes",
                found=f"{free} bytes",
                hint="Two versions stay while the next one is written.",
            )

    def _surveyed(self, view: View) -> Iterator[tuple[Digest, _Place]]:
        """Hash the version that is here where a new one has chunks: after a restart."""
        here = self.current
        known = [place for _, place in places(view.files, Path(here.folder))] if here else []

        def examined(place: _Place) -> Digest | None:
            data = memoryview(bytearray(place.size))
            return Digest(hashlib.sha256(data).digest()) if _read(place, data) else None

        found = self._store.pools.hashing.map(examined, known)
        yield from ((one, at) for one, at in zip(found, known, strict=True) if one)

    def _found(self) -> FollowedVersion | None:
        """Return the version that `current` leads to, if it is one of this run."""
        link = self._root / _CURRENT
        if not os.path.lexists(link):
            return None
        expected = f"a link to a version of {self._run_id}"
        strange = Conflict("not a folder of this follower", where=link, expected=expected)
        try:
            folder = self._root / link.readlink()
            found = read_version(folder)
        except (OSError, ValueError, RecursionError) as error:
            raise strange from error
        is_ours = _NAME.fullmatch(folder.name) and folder.parent.name == _VERSIONS
        if not is_ours or found.run != self._run_id:
            strange.found = found.run
            raise strange
        return found.changed(folder=str(folder))  # the folder may have been moved


def places(files: Mapping[str, Joined], folder: Path) -> Iterator[tuple[Digest, _Place]]:
    """Yield the chunks of the files, each with its place in a folder."""
    for name, file in files.items():
        at = 0
        for part in file.parts:
            if isinstance(part, bytes) or part.inline is not None:
                at += len(part) if isinstance(part, bytes) else part.nbytes
                continue
            for digest, size in zip(file.chunks.digests(part), part.grid.sizes(), strict=True):
                yield digest, _Place(folder / name, at, size)
                at += size


def read_version(folder: Path) -> FollowedVersion:
    """Return the version that a folder says it has, or raise an error of files or JSON."""
    with (folder / MARKER).open("rb") as file:
        return FollowedVersion.of(json.loads(file.read(_MOST_BYTES)))


def give_name(new: Path, folder: Path, marker: str, about: Record) -> None:
    """Describe a folder whose files are written, sync it, and give it its name."""
    put_file(new / marker, json.dumps(about.to_json(), indent=2).encode() + b"\n")
    for one, _, _ in os.walk(new):
        sync_folder(Path(one))
    new.rename(folder)
    sync_folder(folder.parent)


def lock_folder(root: Path, ours: re.Pattern[str]) -> IO[bytes]:
    """Make a folder and lock it; refuse one in which another program keeps something."""
    with ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True)
            others = sorted(one.name for one in root.iterdir() if not ours.fullmatch(one.name))
            if not others:
                lock = stack.enter_context((root / _LOCK).open("ab"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                stack.pop_all()
                return lock
        except (FileExistsError, NotADirectoryError) as error:
            raise InvalidInput("not a folder", where=root, found=error) from error
        except BlockingIOError as error:
            hint = "One follower can tell several engines."
            raise Conflict("another follower has this folder", where=root, hint=hint) from error
        except OSError as error:  # such as a network file system without locks
            fail(error, root / _LOCK, 0)
    hint = "Choose an empty folder, or that of an earlier follower."
    raise InvalidInput(
        "the folder has other files", where=root, found=", ".join(others[:5]), hint=hint
    )
