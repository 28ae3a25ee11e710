"""Read and hash the packs of a registry, each once: all of them, or a random share.

Packs are read by their names alone. `holdfast.registry.maintenance.verify` finds out which runs
need a damaged one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress

from holdfast.backends import ObjectInfo
from holdfast.registry.errors import (
    AccessDenied,
    IntegrityError,
    InvalidInput,
    Malformed,
    ObjectNotFound,
    StorageError,
    StoreUnavailable,
    UnsupportedFormat,
)
from holdfast.registry.maintenance.findings import DataRead
from holdfast.registry.maintenance.object_checks import Tables, check_object
from holdfast.registry.maintenance.pass_notes import PassNotes
from holdfast.registry.storage.keys import ObjectKey
from holdfast.registry.storage.pack import PackTable
from holdfast.registry.storage.store import Store
from holdfast.registry.storage.workers import Outcome, Workers

#: Called with the number of bytes that were read and hashed.
Count = Callable[[int], object]

#: A store that fails like this fails for every object: the verification ends, and may go on later.
_OF_THE_STORE = (AccessDenied, StoreUnavailable)


def check_sample(sample: float | None) -> None:
    """Check a share of the data.

    Raises:
        InvalidInput: It is not above 0 and at most 1.
    """
    if sample is not None and not 0 < sample <= 1:
        raise InvalidInput(
            "not a share of the data", expected="above 0 and at most 1", found=sample
        )


def fault_of(error: Exception | BaseException | None) -> str | None:
    """Return the message of an error that makes an object unusable; `None` without an error.

    Raises:
        StorageError: The error is about the whole store and not about the object.
    """
    if error is None:
        return None
    if isinstance(error, IntegrityError | UnsupportedFormat):
        return error.summary
    # A verification is there to find a sector that cannot be read.
    if isinstance(error, StorageError) and not isinstance(error, _OF_THE_STORE):
        return error.summary
    raise error


class DataPass:
    """The packs of a registry, read and hashed.

    Args:
        store: The registry's objects.
        workers: Read and hash them.
        count: Called with the bytes of each pack that was read.

    Attributes:
        tables: The tables of the packs that were whole.
        faults: The messages about damaged packs, by key.
        whole: The packs that were read and are whole.
    """

    def __init__(self, store: Store, workers: Workers, count: Count) -> None:
        self._store = store
        self._workers = workers
        self._count = count
        self._bytes = 0
        self.tables = Tables()
        self.faults: dict[ObjectKey, str] = {}
        self.whole: set[ObjectKey] = set()

    def read(self, sample: float | None, notes: PassNotes | None) -> DataRead:
        """Read the packs that are there.

        Args:
            sample: The share of all their bytes that is read, drawn at random.
            notes: The packs that were read earlier in this pass; they are not read again, and the
                packs that are read now are added.
        """
        packs = dict(self._list())
        noted = {key for key, info in packs.items() if notes is not None and notes.holds(info)}
        rest = [info for key, info in packs.items() if key not in noted]
        wanted = sum(info.size_bytes for info in packs.values())
        chosen = rest if sample is None else list(_drawn(rest, sample * wanted))
        self._bytes = 0
        with nullcontext() if notes is None else notes:
            self._workers.each(
                read_pack,
                chosen,
                lambda info, outcome: self._take(info, outcome, notes),
                size_of=lambda info: info.size_bytes,
            )
        return DataRead(
            packs=len(packs),
            packs_read=len(chosen),
            packs_noted=len(noted),
            pack_bytes=wanted,
            bytes_read=self._bytes,
            bytes_noted=sum(packs[key].size_bytes for key in noted),
        )

    def _list(self) -> Iterator[tuple[ObjectKey, ObjectInfo]]:
        for info in self._store.backend.list("packs/"):
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
    """Read and hash a pack; return its table, and the bytes that were read.

    Raises:
        IntegrityError: Its bytes do not match its name.
        UnsupportedFormat: This version does not know its format.
    """
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
