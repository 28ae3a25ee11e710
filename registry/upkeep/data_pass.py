"""Read and hash the packs of a registry, each once: all of them, or a random share.

An object is checked against its name, and a placement against its packs.

Packs are read by their names alone. `holdfast.registry.upkeep.verifying` finds out which runs
need a damaged one.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import random
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from threading import Lock
from typing import Annotated, Literal, Self

from holdfast.backends import ObjectInfo
from holdfast.registry.errors import (
    AccessDenied,
    Archived,
    IntegrityError,
    InvalidInput,
    Malformed,
    ObjectNotFound,
    StorageError,
    StoreUnavailable,
    UnsupportedFormat,
)
from holdfast.registry.objects import (
    NO_BASE,
    ChunkRow,
    Manifest,
    ObjectKey,
    PackEntry,
    PackRef,
    PackTable,
    Placement,
    open_pack,
)
from holdfast.registry.objects.codecs import CODECS
from holdfast.registry.store import (
    Outcome,
    Store,
    Workers,
    decode_manifest,
    index_chunks,
    read_lists,
    verify_pack_chunks,
)
from holdfast.registry.upkeep.findings import DataRead
from holdfast.registry.upkeep.shards import Shard
from holdfast.registry.values import Digest, Field, Record

_LOGGER = logging.getLogger("holdfast")


def check_object(data: bytes, key: ObjectKey) -> PackTable | None:
    """Check every byte of an object; return the table of a pack."""
    where = str(key)
    if key.kind == "manifests":
        decode_manifest(data, key)
    elif key.kind == "placements":
        Placement.decode(data, key.digest, where=where)
    else:
        table = open_pack(data, key.digest, where=where)
        verify_pack_chunks(data, table, key)
        return table
    return None


def check_small(store: Store, key: ObjectKey) -> int:
    """Read and hash a manifest or placement; return its bytes."""
    data = store.backend.get(str(key))
    check_object(data, key)
    return len(data)


class Tables:
    """Tables of contents of packs, kept in memory; even a whole registry's fit there."""

    def __init__(self) -> None:
        self._kept: dict[ObjectKey, PackTable] = {}

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._kept

    def keep(self, key: ObjectKey, table: PackTable) -> None:
        """Remember the table of a pack that was read."""
        self._kept[key] = table

    def of(self, store: Store, pack: PackRef) -> PackTable:
        """Return a pack's table; read it if it is not kept."""
        if pack.key not in self._kept:
            self.keep(pack.key, store.read_table(pack))
        return self._kept[pack.key]


def check_rows(store: Store, tables: Tables, manifest: Manifest, placement: Placement) -> None:
    """Compare each row of a placement with the table of its pack and with the manifest."""
    manifest = manifest.part(placement.components)
    lists = read_lists(store, manifest, placement)
    lengths = manifest.all_chunks(lists)
    index_chunks(manifest, placement, lists)
    digests = [*lengths, *placement.extra]
    by_pack: defaultdict[int, list[int]] = defaultdict(list)
    for number, row in enumerate(placement.rows):
        by_pack[row.pack].append(number)
    raw_bytes: dict[int, int] = {}
    for position, numbers in by_pack.items():
        table = tables.of(store, placement.packs[position])
        for number in numbers:
            row = placement.rows[number]
            raw_bytes[number] = _check_row(
                placement, row, digests[number], digests, table.at(row.offset)
            )
    for number, row in enumerate(placement.rows):
        wanted = lengths.get(digests[number], raw_bytes[number])
        _check_raw(placement, row, raw_bytes[number], wanted)
        if row.base != NO_BASE:
            base = placement.rows[row.base]
            _check_raw(placement, base, raw_bytes[row.base], raw_bytes[number])


def _check_row(
    placement: Placement,
    row: ChunkRow,
    digest: Digest,
    digests: list[Digest],
    entry: PackEntry | None,
) -> int:
    """Compare a row with the table's entry; return the raw length that the entry gives."""
    base = None if row.base == NO_BASE else digests[row.base]
    expected = (digest, row.stored_bytes, CODECS[row.codec], base)
    if entry is None or expected != (entry.digest, entry.stored_bytes, entry.codec, entry.base):
        raise Malformed(
            "a placement and its pack name different chunks at one offset",
            where=_where(placement, row),
            expected=_described(*expected),
            found="no chunk begins there"
            if entry is None
            else _described(entry.digest, entry.stored_bytes, entry.codec, entry.base),
        )
    return entry.raw_bytes


def _check_raw(placement: Placement, row: ChunkRow, found: int, wanted: int) -> None:
    if found != wanted:
        raise Malformed(
            "a pack gives a chunk another raw length than its tensor, or the delta on it, does",
            where=_where(placement, row),
            expected=f"{wanted} bytes",
            found=found,
        )


def _described(digest: Digest, stored_bytes: int, codec: str, base: Digest | None) -> str:
    against = "" if base is None else f", a delta to {base.short}"
    return f"chunk {digest.short}, {stored_bytes} bytes of {codec}{against}"


def _where(placement: Placement, row: ChunkRow) -> str:
    pack = placement.packs[row.pack].key
    return f"placement {placement.digest.short}: {pack} at offset {row.offset}"


#: A pass that began longer ago starts again.
MAX_AGE_S = 30 * 86_400
_DIGEST_CHARS = 16


class _Header(Record):
    format: Literal["holdfast.verify-notes/1"] = "holdfast.verify-notes/1"
    registry: str
    began_s: Annotated[int, Field(ge=0)]
    nonce: str


class PassNotes:
    """The packs that one pass over a registry has read so far."""

    def __init__(self, path: str | os.PathLike[str], registry_id: str) -> None:
        self._path = Path(path)
        self._registry_id = registry_id
        self._read: set[str] = set()
        self._lock = Lock()
        #: Why existing notes were ignored; `None` where they count.
        self.ignored: str | None = None
        try:
            exists = self._path.exists()
            held = self._path.read_bytes() if exists else b""
            self._salt, whole = self._parse(held) if held else (b"", 0)
            if not whole:
                self._salt = self._header()
            self._file = self._path.open("r+b" if exists else "xb", buffering=0)
            self._file.truncate(whole)  # what a crash cut off
            self._file.seek(whole)
            self._is_full = not whole and not self._has_appended(self._salt)
        except OSError as error:
            raise InvalidInput(
                "cannot keep notes of a verification", where=str(path), found=error
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def holds(self, info: ObjectInfo) -> bool:
        """Return whether an object was read in this pass, and not written since."""
        return _entry(info) in self._read

    def add(self, info: ObjectInfo) -> None:
        """Note that an object was read and is whole; may be called from any thread.

        If the disk is full, the verification goes on, and a later one reads the rest again.
        """
        line = _with_digest(_entry(info).encode(), self._salt)
        with self._lock:  # behind a line that was cut off, no other would count
            self._is_full = self._is_full or not self._has_appended(line)

    def finish(self) -> None:
        """End the pass: the next one reads everything again."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _has_appended(self, line: bytes) -> bool:
        # Handed to the system at once, so that the file is valid even if this process is killed.
        start = self._file.tell()
        try:
            if self._file.write(line + b"\n") == len(line) + 1:
                return True
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as caught:
            error = caught
        self._file.truncate(start)
        _LOGGER.warning("%s: a verification is noted no further: %s", self._path, error)
        return False

    def _header(self) -> bytes:
        header = _Header(
            registry=self._registry_id, began_s=int(time.time()), nonce=secrets.token_hex(8)
        )
        return _with_digest(header.encode(), b"")

    def _parse(self, data: bytes) -> tuple[bytes, int]:
        """Read the notes; return the first line, and the number of valid bytes in the file."""
        first, *lines = data.split(b"\n")
        header = self._parse_header(first)
        age_s = time.time() - header.began_s
        if not -86_400 < age_s < MAX_AGE_S:
            days = age_s / 86_400
            self.ignored = f"its pass began {days:.0f} days ago by this machine's clock"
            return b"", 0
        torn = lines.pop() if lines else b""
        for line in lines:
            entry = line[: -_DIGEST_CHARS - 1]
            if line != _with_digest(entry, first):
                raise self._refused("a line does not match its digest")
            self._read.add(entry.decode())
        return first, len(data) - len(torn)

    def _parse_header(self, line: bytes) -> _Header:
        encoded = line[: -_DIGEST_CHARS - 1]
        if line != _with_digest(encoded, b""):
            raise self._refused("not notes of a verification")
        try:
            header = _Header.decode(encoded, where=str(self._path))
        except Malformed as error:
            raise self._refused("notes of another version") from error
        if header.registry != self._registry_id:
            raise self._refused(
                "notes on another registry", expected=self._registry_id, found=header.registry
            )
        return header

    def _refused(self, what: str, **more: object) -> InvalidInput:
        return InvalidInput(
            what,
            where=str(self._path),
            hint="Give another file, or delete this one: everything is then read again.",
            **more,
        )


def _entry(info: ObjectInfo) -> str:
    return f"{info.key} {info.size_bytes} {float(info.modified_s).hex()}"


def _with_digest(entry: bytes, salt: bytes) -> bytes:
    digest = hashlib.sha256(salt + b"\n" + entry).hexdigest()[:_DIGEST_CHARS]
    return entry + b" " + digest.encode()


#: Called with the number of bytes that were read and hashed.
Count = Callable[[int], object]

#: A store that fails like this fails for every object: the verification ends, and may go on later.
_OF_THE_STORE = (AccessDenied, StoreUnavailable)


def check_sample(sample: float | None) -> None:
    """Check a share of the data."""
    if sample is not None and not 0 < sample <= 1:
        raise InvalidInput(
            "not a share of the data", expected="above 0 and at most 1", found=sample
        )


def fault_of(error: Exception | BaseException | None) -> str | None:
    """Return the message of an error that makes an object unusable; `None` without an error."""
    if error is None:
        return None
    if isinstance(error, IntegrityError | UnsupportedFormat):
        return error.summary
    # A verification is there to find a sector that cannot be read.
    if isinstance(error, StorageError) and not isinstance(error, _OF_THE_STORE):
        return error.summary
    raise error


class DataPass:
    """The packs of a registry that are in a shard, read and hashed."""

    def __init__(self, store: Store, workers: Workers, count: Count, shard: Shard) -> None:
        self._store, self._shard = store, shard
        self._workers = workers
        self._count = count
        self._bytes = self._archived = 0
        self.tables = Tables()  # the tables of the packs that were whole
        self.faults: dict[ObjectKey, str] = {}  # the messages about damaged packs, by key
        self.whole: set[ObjectKey] = set()  # the packs that were read and are whole

    def read(self, sample: float | None, notes: PassNotes | None) -> DataRead:
        """Read the packs that are there."""
        packs = dict(self._list())
        noted = {key for key, info in packs.items() if notes is not None and notes.holds(info)}
        rest = [info for key, info in packs.items() if key not in noted]
        wanted = sum(info.size_bytes for info in packs.values())
        chosen = rest if sample is None else list(_drawn(rest, sample * wanted))
        self._bytes = self._archived = 0
        with nullcontext() if notes is None else notes:
            self._workers.each(
                read_pack,
                chosen,
                lambda info, outcome: self._take(info, outcome, notes),
                size_of=lambda info: info.size_bytes,
            )
        return DataRead(
            packs=len(packs),
            packs_read=len(chosen) - self._archived,
            packs_archived=self._archived,
            packs_noted=len(noted),
            pack_bytes=wanted,
            bytes_read=self._bytes,
            bytes_noted=sum(packs[key].size_bytes for key in noted),
        )

    def _list(self) -> Iterator[tuple[ObjectKey, ObjectInfo]]:
        backend = self._store.backend
        for prefix in self._shard.prefixes(backend, "packs"):
            for info in backend.list(prefix):
                with suppress(Malformed):  # `file_names` reports it
                    yield ObjectKey.parse(info.key), info

    def _take(
        self,
        info: ObjectInfo,
        outcome: Outcome[tuple[PackTable | None, int]],
        notes: PassNotes | None,
    ) -> None:
        key, error = ObjectKey.parse(info.key), outcome.error
        if isinstance(error, ObjectNotFound):
            return  # collected meanwhile; if a run needs it, the check of the structure reports it
        if isinstance(error, Archived):
            self._archived += 1
            return
        fault = fault_of(error)
        if fault is not None:
            self.faults[key] = fault
            size_bytes = info.size_bytes
        else:
            if notes is not None:  # at once, so that it counts even if this process is killed
                notes.add(info)
            self.whole.add(key)
            table, size_bytes = outcome.result()
            if table is not None:
                self.tables.keep(key, table)
        self._bytes += size_bytes
        self._count(size_bytes)


def read_pack(store: Store, info: ObjectInfo) -> tuple[PackTable | None, int]:
    """Read and hash a pack; return its table, and the bytes that were read."""
    data = store.backend.get(info.key)
    return check_object(data, ObjectKey.parse(info.key)), len(data)


def _drawn(packs: Iterable[ObjectInfo], size_bytes: float) -> Iterator[ObjectInfo]:
    """Yield packs in a new random order until they make up `size_bytes`; at least one."""
    shuffled = list(packs)
    random.SystemRandom().shuffle(shuffled)
    for info in shuffled:
        if size_bytes <= 0:
            return
        yield info
        size_bytes -= info.size_bytes
