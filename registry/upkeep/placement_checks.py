"""Check the manifest, the placement and the packs of states, and that they fit together.

Deep checks also decode chunks, apply deltas, and check the digests of their raw bytes. Other checks
prove that stored bytes did not change; this one proves that the writer encoded the right bytes. It
reads the store as a load does, but without the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field
from threading import Lock
from typing import Literal, TypeVar

from holdfast.registry import pytree
from holdfast.registry.errors import (
    Damaged,
    IntegrityError,
    Malformed,
    MissingObject,
    ObjectNotFound,
    RegistryError,
    UnsupportedFormat,
)
from holdfast.registry.history import Epochs
from holdfast.registry.history.actions import Place
from holdfast.registry.objects import Manifest, ObjectKey, PackRef, Placement, content_bytes
from holdfast.registry.objects.codecs import CODECS, RAW
from holdfast.registry.store import (
    Fetch,
    Store,
    decode_manifest,
    index_chunks,
    missing,
    read_lists,
    together,
)
from holdfast.registry.upkeep.data_pass import Tables, check_rows, fault_of
from holdfast.registry.upkeep.shelf import Shelf
from holdfast.registry.values import Digest

#: Raw bytes that are decoded at once for one state.
_BATCH_BYTES = 8 * 2**20
#: Memory that this takes: the raw bytes, their stored bytes, and one base.
HELD_BYTES = 3 * _BATCH_BYTES


class DecodePass:
    """Decodes chunks of a registry, each once, even if several states hold it."""

    def __init__(self, store: Store) -> None:
        self._store = copy(store)
        self._store.cache = None  # check the store's own bytes
        self._lock = Lock()
        self._sound: dict[ObjectKey, set[int]] = {}
        self.bytes_read = 0  # stored bytes that were read, bases of deltas included

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
        unproven = self._unproven(lengths, placement)
        for some in together(unproven, lambda one: lengths[one[0]], _BATCH_BYTES):
            batch = dict(some)
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

    def _unproven(
        self, digests: Iterable[Digest], placement: Placement
    ) -> Iterator[tuple[Digest, tuple[ObjectKey, int]]]:
        """Yield the chunks to decode, each with its pack and offset."""
        for digest, row in zip(digests, placement.rows, strict=False):
            key = placement.packs[row.pack].key
            if CODECS[row.codec] != RAW and row.offset not in self._sound.get(key, ()):
                yield digest, (key, row.offset)

    def _keep(self, key: ObjectKey, offset: int) -> None:
        with self._lock:
            self._sound.setdefault(key, set()).add(offset)


def _fault(fetch: Fetch, digest: Digest, view: memoryview) -> str | None:
    try:
        fetch.read({digest: view})
    except IntegrityError as error:
        return error.summary
    return None


#: Manifests that unpack to more are checked one at a time.
_LARGE_BYTES = 2**20

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Fault:
    """A problem of an object."""

    message: str  # the fault in words
    is_gone: bool = False  # whether the object is missing
    size_bytes: int | None = None  # the size that it should have, where a placement gives one
    is_within: bool = False  # whether its bytes are as they were stored, but decode to wrong ones


@dataclass(slots=True)
class Checked:
    """The result of a check of some places."""

    #: The packs that each place needs, where its placement can be read.
    packs: dict[Place, tuple[PackRef, ...]] = field(default_factory=dict)
    faults: dict[ObjectKey, Fault] = field(default_factory=dict)  # the faults, by object
    #: Places whose placement is undamaged but wrong, or another state's, each with what is wrong:
    #: other bytes under the same key cannot repair that.
    unfit: dict[Place, str] = field(default_factory=dict)
    #: The result of a comparison of each place with its packs.
    rows: dict[Place, CheckedRows] = field(default_factory=dict)
    #: The components that the placements of thinned states cover.
    covers: dict[Place, tuple[str, ...]] = field(default_factory=dict)
    size_bytes: int = 0  # bytes that were read


@dataclass(slots=True)
class CheckedRows:
    """The result of a comparison of a placement with the tables of its packs.

    It counts only if the packs are there and whole.
    """

    faults: dict[ObjectKey, Fault] = field(default_factory=dict)  # the faults of packs
    unfit: str | None = None  # what is wrong in the placement, or `None`


#: Whose rows are compared with the tables of their packs: those of no placement, of the placements
#: whose packs were all read, or of every placement.
WhichRows = Literal["none", "read", "all"]


class PlaceCheck:
    """Checks places. A copy in another process reads the tables of packs itself."""

    def __init__(
        self, rows: WhichRows, tables: Tables | None = None, decoding: DecodePass | None = None
    ) -> None:
        self._rows: WhichRows = rows
        self._tables = tables or Tables()
        self._decoding = decoding
        self._proven = Shelf[int]()  # components: most checkpoints share some
        self._turn = Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return (PlaceCheck, (self._rows,))

    def __call__(self, store: Store, places: Sequence[Place]) -> Checked:
        """Check places of one manifest, which is read once for all of them."""
        checked = Checked()
        key = places[0].manifest_key
        data = _get(store, key, checked)
        if data is None:
            return self._check(store, places, None, checked)
        # A large manifest stays in memory until it is checked: only one of them at a time.
        with self._turn if content_bytes(data) > _LARGE_BYTES else nullcontext():
            manifest = _decode(self._manifest, data, key, checked)
            return self._check(store, places, manifest, checked)

    def _check(
        self, store: Store, places: Sequence[Place], manifest: Manifest | None, checked: Checked
    ) -> Checked:
        for place in places:
            key = place.placement_key
            data = _get(store, key, checked)
            placement = None if data is None else _decode(_placement, data, key, checked)
            if placement is None:
                continue
            checked.packs[place] = placement.packs
            if placement.components is not None:
                checked.covers[place] = placement.components
            unfit = _unfit(place, manifest, placement)
            if unfit is not None:
                checked.unfit[place] = unfit
            elif manifest is not None and self._may_check_rows(placement):
                checked.rows[place] = self._check_rows(store, manifest, placement)
        return checked

    def _manifest(self, data: bytes, key: ObjectKey) -> Manifest:
        """Return a manifest from which the state can be rebuilt."""
        manifest = decode_manifest(data, key)
        for name, part in manifest.components.items():
            if part.digest.hex() not in self._proven:
                pytree.check_values(name, part.skeleton)
                self._proven[part.digest.hex()] = 1
        return manifest

    def _may_check_rows(self, placement: Placement) -> bool:
        if self._rows == "read":
            return all(pack.key in self._tables for pack in placement.packs)
        return self._rows == "all"

    def _check_rows(self, store: Store, manifest: Manifest, placement: Placement) -> CheckedRows:
        checked = CheckedRows()
        for pack in placement.packs:
            try:
                self._tables.of(store, pack)
            except RegistryError as error:
                message, is_gone = fault_of(error) or "", isinstance(error, MissingObject)
                checked.faults[pack.key] = Fault(message, is_gone, pack.size_bytes)
                return checked
        try:
            check_rows(store, self._tables, manifest, placement)
            if self._decoding is not None:
                for key, message in self._decoding.check(manifest, placement).items():
                    checked.faults[key] = Fault(message, is_within=True)
        except RegistryError as error:
            checked.unfit = fault_of(error)
        return checked


class PacksOf:
    """The packs of places whose placements are known, with their sizes; not in memory."""

    def __init__(self) -> None:
        self._shelf = Shelf[str]()

    def keep(self, place: Place, objects: Mapping[str, int]) -> None:
        """Keep the packs among the objects of a place."""
        packs = (f"{key} {size}" for key, size in objects.items() if key.startswith("packs/"))
        self._shelf[place_name(place)] = " ".join(packs)

    def of(self, place: Place) -> list[PackRef]:
        """Return the packs of a place, as far as they are known."""
        words = (self._shelf.get(place_name(place)) or "").split()
        pairs = zip(words[::2], words[1::2], strict=True)
        return [PackRef(ObjectKey.parse(key), int(size)) for key, size in pairs]

    def __contains__(self, place: Place) -> bool:
        return place_name(place) in self._shelf


def place_name(place: Place) -> str:
    """Return the two keys of a place, that of the manifest first."""
    return f"{place.manifest_key} {place.placement_key}"


def check_pack(pack: PackRef, found_bytes: int | None) -> Fault | None:
    """Compare a pack's size with its object's; `found_bytes` is `None` if the object is gone."""
    if found_bytes == pack.size_bytes:
        return None
    if found_bytes is None:
        return Fault(missing(pack.key).summary, is_gone=True, size_bytes=pack.size_bytes)
    message = f"{pack.key}: expected {pack.size_bytes} bytes; found {found_bytes}"
    return Fault(message, size_bytes=pack.size_bytes)


def _get(store: Store, key: ObjectKey, checked: Checked) -> bytes | None:
    # Not from the handle's cache: the bytes on the store count.
    try:
        data = store.backend.get(str(key))
    except ObjectNotFound:
        checked.faults.setdefault(key, Fault(missing(key).summary, is_gone=True))
    except RegistryError as error:
        checked.faults.setdefault(key, Fault(fault_of(error) or ""))
    else:
        checked.size_bytes += len(data)
        return data
    return None


def _decode(
    decode: Callable[[bytes, ObjectKey], _T], data: bytes, key: ObjectKey, checked: Checked
) -> _T | None:
    try:
        return decode(data, key)
    except RegistryError as error:
        checked.faults.setdefault(key, Fault(fault_of(error) or ""))
    return None


def _placement(data: bytes, key: ObjectKey) -> Placement:
    return Placement.decode(data, key.digest, where=str(key))


def _unfit(place: Place, manifest: Manifest | None, placement: Placement) -> str | None:
    """Return the fault of an undamaged placement against its manifest, packs not looked at."""
    if placement.manifest != place.manifest:
        return f"{place.placement_key}: another checkpoint's placement"
    try:
        part = None if manifest is None else manifest.part(placement.components)
    except Malformed as error:
        return f"{place.placement_key}: {fault_of(error)}"
    # Lists of chunks are read with the packs; here only the manifest's own chunks count.
    if part is not None and len(placement.rows) < len(part.direct_chunks):
        return f"{place.placement_key}: the placement does not cover its manifest"
    return None


def condemned_by(store: Store, key: ObjectKey) -> str:
    """Name the epochs that condemned a missing object: if there are any, a rule was broken."""
    epochs = Epochs(store)
    try:
        found = [
            e
            for e in range(key.generation + 1, epochs.observe() + 1)
            if epochs.condemned_by(e, [key])
        ]
    except (IntegrityError, UnsupportedFormat):
        return ""
    return f"; condemned by epoch {', '.join(map(str, found))}" if found else ""
