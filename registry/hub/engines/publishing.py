"""Versions as folders on a shared file system, for engines that pull their weights from there.

```text
DIR/weight_v000012/   a whole version: files in the layout of Hugging Face
DIR/weight_v000013/   a delta: of each tensor that changed the bytes that did, and an index
DIR/latest            the name of the newest folder
```

The format is that of `/pull_weights` in SGLang, slime and miles. A reader copies the newest whole
version into a checkpoint of its own and applies the deltas after it in turn. Of their two encodings
this one may be applied twice, as happens if a reader is killed.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, Self

import numpy as np
import zstandard

from holdfast.backends.local.disk import sync_folder
from holdfast.registry.errors import Conflict
from holdfast.registry.formats import encode_header, fail, put_file
from holdfast.registry.hub.engines.folder import (
    MARKER,
    FollowedVersion,
    give_name,
    lock_folder,
    read_version,
)
from holdfast.registry.hub.views import CARD
from holdfast.registry.objects import TensorEntry
from holdfast.registry.values import Record, cores

_OURS = re.compile(r"weight_v(\d{6,9})|latest|\.lock|\.new.*|\.old.*")
_INDEX, _TENSORS = "model.safetensors.index.json", ".safetensors"
#: What a folder says of itself. It lies in a subfolder, which readers do not copy.
_ABOUT = ".holdfast/version.json"
_MOST_DELTAS = 32  # that a late reader applies
_BLOCK_BYTES = 2**23
_MOST_THREADS = 8


class _Published(Record):
    """A folder, as it describes itself."""

    format: Literal["holdfast.weights/1"] = "holdfast.weights/1"
    number: int  # that in its name
    is_whole: bool  # otherwise it is a delta to the number before
    size_bytes: int
    version: FollowedVersion


class WeightFolders:
    """Publishes versions as folders `weight_v{N:06d}`: a `notify` for engines that pull them.

    The newest whole version, the one before it, and all deltas after these stay. Numbers only grow:
    a reader that has a greater one than it is asked for keeps what it has.

    Args:
        into: An empty folder on a shared file system, or that of an earlier follower.
        then: What to call with each version once it is published, such as to tell engines.

    Raises:
        InvalidInput: The folder has other files.
        Conflict: Another follower keeps it, or it has other folders of weights.
    """

    def __init__(
        self, into: str | os.PathLike[str], then: Callable[[FollowedVersion], object] | None = None
    ) -> None:
        self._root, self._then = Path(into).absolute(), then
        self._turn = threading.Lock()  # a thread may still publish when this is left
        self._lock = lock_folder(self._root, _OURS)
        try:
            for one in (*self._root.glob(".new*"), *self._root.glob(".old*")):
                shutil.rmtree(one, ignore_errors=True)
            self._there = sorted(self._found(), key=lambda one: one.number)
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._turn:
            self._lock.close()

    def __call__(self, version: FollowedVersion) -> None:
        """Publish a version, unless it is the newest one there, and call `then`."""
        with self._turn:
            self._publish(version)
        if self._then is not None:
            self._then(version)

    def _publish(self, version: FollowedVersion) -> None:
        if self._lock.closed:
            raise Conflict("the folder was left to other followers", where=self._root)
        last = self._there[-1].version if self._there else version
        if last.run != version.run:
            what = "the folder has versions of another run"
            raise Conflict(what, where=self._root, expected=version.run, found=last.run)
        new = self._root / ".new"
        try:
            if not self._there or last.id != version.id:
                shutil.rmtree(new, ignore_errors=True)
                made = self._write_delta(version, new) or self._write(version, new)
                give_name(new, self._named(made.number), _ABOUT, made)
                self._there.append(made)
            pointer = self._root / ".new-latest"
            pointer.unlink(missing_ok=True)
            put_file(pointer, self._named(self._there[-1].number).name.encode())
            pointer.replace(self._root / "latest")
            sync_folder(self._root)  # before the versions go that the older one names
            self._free()
        except OSError as error:
            fail(error, new, 0)

    def _write(self, version: FollowedVersion, new: Path) -> _Published:
        shutil.rmtree(new, ignore_errors=True)
        source = Path(version.folder)
        size = sum(put_file(new / name, _blocks(source / name)) for name in _files(source))
        # As great as that of the commit: greater than any before, also in a folder that is new.
        number = max([version.n, *(one.number + 1 for one in self._there)])
        return _Published(number=number, is_whole=True, size_bytes=size, version=version)

    def _write_delta(self, version: FollowedVersion, new: Path) -> _Published | None:
        """Write a delta, or return `None` where a whole version costs less."""
        whole = max((i for i, one in enumerate(self._there) if one.is_whole), default=None)
        chain = [] if whole is None else self._there[whole:]
        if not 0 < len(chain) <= _MOST_DELTAS:
            return None
        old, now = Path(chain[-1].version.folder), Path(version.folder)
        size, weight_map = 0, dict[str, str]()
        try:
            if read_version(old).id != chain[-1].version.id or not _is_alike(old, now):
                return None
            for name in _files(now):
                if name.endswith(_TENSORS):
                    data, names = _changes(old / name, now / name)
                    size += put_file(new / name, data) if names else 0
                    weight_map |= dict.fromkeys(names, name)
        except (FileNotFoundError, ValueError):  # the old files are gone, or much has changed
            return None
        if sum(one.size_bytes for one in chain[1:]) + size > chain[0].size_bytes:
            return None
        number = chain[-1].number + 1
        about = {"version": f"{number:06d}", "base_version": f"{number - 1:06d}"}
        about |= {"delta_encoding": "overwrite", "compression_format": "zstd"}
        index = {"metadata": {**about, "checksum_format": "adler32"}, "weight_map": weight_map}
        size += put_file(new / _INDEX, json.dumps(index).encode())
        return _Published(number=number, is_whole=False, size_bytes=size, version=version)

    def _free(self) -> None:
        """Remove what is older than the last whole version but one."""
        whole = [0, 0, *(one.number for one in self._there if one.is_whole)]
        while self._there[0].number < whole[-2]:
            number = self._there.pop(0).number
            # It goes at once: readers take a folder without its index for a whole version.
            freed = self._named(number).rename(self._root / f".old-{number}")
            shutil.rmtree(freed, ignore_errors=True)

    def _named(self, number: int) -> Path:
        return self._root / f"weight_v{number:06d}"

    def _found(self) -> Iterator[_Published]:
        for folder in self._root.glob("weight_v*"):
            try:
                found = _Published.of(json.loads((folder / _ABOUT).read_bytes()))
                if self._named(found.number) != folder:
                    raise ValueError
            except (OSError, ValueError, RecursionError) as error:
                hint = "Choose an empty folder, or that of an earlier follower."
                raise Conflict("not a folder of a follower", where=folder, hint=hint) from error
            yield found


def _files(folder: Path) -> list[str]:
    """Return the files that engines read; card and markers name one version."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted({str(path.relative_to(folder)) for path in paths} - {CARD, MARKER, _ABOUT})


def _is_alike(old: Path, new: Path) -> bool:
    """Return whether two versions differ in the values of tensors alone."""
    return _files(old) == _files(new) and all(
        _head(old / name) == _head(new / name)
        if name.endswith(_TENSORS)
        else filecmp.cmp(old / name, new / name, shallow=False)
        for name in _files(new)
    )


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))


def _blocks(path: Path) -> Iterator[memoryview]:
    with path.open("rb", buffering=0) as file:
        while data := file.read(_BLOCK_BYTES):
            yield memoryview(data)


def _changes(old: Path, new: Path) -> tuple[bytes, list[str]]:
    """Return a file of the changes of each tensor, and the names of those that have some."""
    head = _head(new)
    tensors = {name: one for name, one in json.loads(head).items() if name != "__metadata__"}
    spent = [0]  # bytes, before they are compressed
    threads = ThreadPoolExecutor(min(_MOST_THREADS, cores()))
    with old.open("rb") as left, new.open("rb") as right, threads as pool:
        most = os.fstat(right.fileno()).st_size

        def changed(tensor: dict[str, list[int]]) -> tuple[bytes, str]:
            begin, end = (8 + len(head) + at for at in tensor["data_offsets"])
            places, values, checksum = [], [], 1
            for at in range(begin, end, _BLOCK_BYTES):
                size = min(_BLOCK_BYTES, end - at)
                before, now = (
                    np.frombuffer(os.pread(file.fileno(), size, at), np.uint8)
                    for file in (left, right)
                )
                where = np.flatnonzero(before != now)
                places.append((where + (at - begin)).astype("<u4"))
                values.append(now[where])
                checksum = zlib.adler32(now.data, checksum)
                spent[0] += 5 * len(where)
                if spent[0] > most or end - begin > 2**32 or not len(before) == len(now) == size:
                    raise ValueError("a whole version costs less, or a file is too short")
            count = sum(map(len, places))
            raw = count.to_bytes(4, "little") + b"".join(map(bytes, [*places, *values]))
            return zstandard.compress(raw, 1) if count else b"", f"{checksum:08x}"

        found = dict(zip(tensors, pool.map(changed, tensors.values()), strict=True))
    blobs = {
        name: TensorEntry("uint8", (len(one),), one) for name, (one, _) in found.items() if one
    }
    header, order = encode_header(blobs, {name: found[name][1] for name in blobs})
    return b"".join([header, *(one.inline or b"" for one in order)]), [*blobs]
