"""Reading the packs of a registry, each once: all of them, or a share drawn anew each time.

Owns which packs one verification reads, and what was wrong with them. Who needs them is the
business of `holdfast.registry.maintenance.verify`: a pack is read by its name alone, whatever runs
say.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import partial

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
from holdfast.registry.maintenance.window import each
from holdfast.registry.storage.keys import ObjectKey
from holdfast.registry.storage.pack import PackTable
from holdfast.registry.storage.store import Store

#: Told of bytes that were read and hashed.
Count = Callable[[int], object]

#: A store that fails like this fails for every object: the verification ends, and may go on later.
_OF_THE_STORE = (AccessDenied, StoreUnavailable)


def check_sample(sample: float | None) -> None:
    """Refuse a share that is none.

    Raises:
        InvalidInput: It is not above 0 and at most 1.
    """
    if sample is not None and not 0 < sample <= 1:
        raise InvalidInput(
            "not a share of the data", expected="above 0 and at most 1", found=sample
        )


def fault_of(error: Exception | BaseException | None) -> str | None:
    """Return what an error says of an object that cannot be used; `None` where there is none.

    Raises:
        StorageError: The error is the store's and says nothing of the object.
    """
    if error is None:
        return None
    if isinstance(error, IntegrityError | UnsupportedFormat):
        return error.summary
    # A sector that cannot be read is what a verification is there to find.
    if isinstance(error, StorageError) and not isinstance(error, _OF_THE_STORE):
        return error.summary
    raise error


class DataPass:
    """The packs of a registry, read and hashed.

    Args:
        store: The registry's objects.
        count: Told of bytes as they are read.

    Attributes:
        tables: The tables of the packs that were whole.
        faults: What is wrong with the others.
    """

    def __init__(self, store: Store, count: Count) -> None:
        self._store = store
        self._count = count
        self._bytes = 0
        self.tables = Tables(store)
        self.faults: dict[ObjectKey, str] = {}

    def read(self, sample: float | None, notes: PassNotes | None) -> DataRead:
        """Read the packs that are there.

        Args:
            sample: The share of all their bytes that is read, drawn at random.
            notes: What was read before in this pass is not read again; what is read now is added.
        """
        packs = dict(self._list())
        noted = {key for key, info in packs.items() if notes is not None and notes.holds(info)}
        rest = [(key, info) for key, info in packs.items() if key not in noted]
        wanted = sum(info.size_bytes for info in packs.values())
        chosen = rest if sample is None else list(_drawn(rest, sample * wanted))
        self._bytes = 0
        with nullcontext() if notes is None else notes:
            each(
                self._store.pools.bulk,
                partial(self._read_pack, notes),
                chosen,
                self._take,
                size_of=lambda one: one[1].size_bytes,
            )
            if notes is not None and len(chosen) == len(rest):
                notes.finish()
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
            with suppress(Malformed):  # told where the names are looked at
                yield ObjectKey.parse(info.key), info

    def _read_pack(
        self, notes: PassNotes | None, one: tuple[ObjectKey, ObjectInfo]
    ) -> tuple[PackTable | None, int]:
        key, info = one
        data = self._store.backend.get(info.key)
        table = check_object(data, key)
        if notes is not None:  # here and now: what was read counts, whatever ends this process
            notes.add(info)
        return table, len(data)

    def _take(
        self, one: tuple[ObjectKey, ObjectInfo], done: Future[tuple[PackTable | None, int]]
    ) -> None:
        key, info = one
        error = done.exception()
        if isinstance(error, ObjectNotFound):
            return  # collected meanwhile; if somebody needs it, the structure tells
        fault = fault_of(error)
        if fault is not None:
            self.faults[key] = fault
            size_bytes = info.size_bytes
        else:
            table, size_bytes = done.result()
            if table is not None:
                self.tables.keep(key, table)
        self._bytes += size_bytes
        self._count(size_bytes)


def _drawn(
    packs: Iterable[tuple[ObjectKey, ObjectInfo]], size_bytes: float
) -> Iterator[tuple[ObjectKey, ObjectInfo]]:
    """Yield packs in a new random order until they make up so many bytes; at least one."""
    shuffled = list(packs)
    random.SystemRandom().shuffle(shuffled)
    for key, info in shuffled:
        if size_bytes <= 0:
            return
        yield key, info
        size_bytes -= info.size_bytes
