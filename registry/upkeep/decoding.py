"""Decode encoded chunks, apply deltas, and check the digests of their raw bytes.

Other checks prove that stored bytes did not change; this check proves that the writer encoded the
right bytes. It reads the store as a load does, but without the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from threading import Lock

from holdfast.registry.errors import Damaged, IntegrityError, MissingObject
from holdfast.registry.objects import Manifest, ObjectKey, Placement
from holdfast.registry.objects.codecs import CODECS, RAW
from holdfast.registry.store import Fetch, Store, index_chunks, read_lists
from holdfast.registry.values import Digest

#: Raw bytes that are decoded at once for one state.
_BATCH_BYTES = 8 * 2**20
#: Memory that this takes: the raw bytes, their stored bytes, and one base.
HELD_BYTES = 3 * _BATCH_BYTES


class DecodePass:
    """Decodes chunks of a registry, each once, even if several states hold it.

    Attributes:
        bytes_read: Stored bytes that were read, bases of deltas included.
    """

    def __init__(self, store: Store) -> None:
        self._store = copy(store)
        self._store.cache = None  # check the store's own bytes
        self._lock = Lock()
        self._sound: dict[ObjectKey, set[int]] = {}
        self.bytes_read = 0

    @property
    def chunks(self) -> int:
        """Chunks that were found to be right so far."""
        return sum(map(len, self._sound.values()))

    def check(self, manifest: Manifest, placement: Placement) -> dict[ObjectKey, str]:
        """Decode the encoded chunks of a state that were not decoded before."""
        manifest = manifest.part(placement.components)
        lists = read_lists(self._store, manifest, placement)
        lengths = manifest.all_chunks(lists)
        places = index_chunks(manifest, placement, lists)
        fetch = Fetch(self._store, placement, places)
        faults: dict[ObjectKey, str] = {}
        for batch in self._batches(lengths, placement):
            views = {digest: memoryview(bytearray(lengths[digest])) for digest in batch}
            try:
                fetch.read(views)
            except (Damaged, MissingObject):
                for digest, (key, offset) in batch.items():
                    fault = _fault(fetch, digest, views[digest])
                    if fault is not None:
                        faults.setdefault(key, fault)
                    else:
                        self._keep(key, offset)
            else:
                for key, offset in batch.values():
                    self._keep(key, offset)
        with self._lock:
            self.bytes_read += fetch.moved_bytes
        return faults

    def _batches(
        self, lengths: dict[Digest, int], placement: Placement
    ) -> Iterator[dict[Digest, tuple[ObjectKey, int]]]:
        """Yield the chunks to decode in batches, each with its pack and offset."""
        batch: dict[Digest, tuple[ObjectKey, int]] = {}
        size = 0
        for digest, row in zip(lengths, placement.rows, strict=False):
            key = placement.packs[row.pack].key
            if CODECS[row.codec] == RAW or row.offset in self._sound.get(key, ()):
                continue
            batch[digest] = key, row.offset
            size += lengths[digest]
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = {}, 0
        if batch:
            yield batch

    def _keep(self, key: ObjectKey, offset: int) -> None:
        with self._lock:
            self._sound.setdefault(key, set()).add(offset)


def _fault(fetch: Fetch, digest: Digest, view: memoryview) -> str | None:
    try:
        fetch.read({digest: view})
    except IntegrityError as error:
        return error.summary
    return None
