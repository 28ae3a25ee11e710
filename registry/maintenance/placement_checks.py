"""Check the manifest, the placement and the packs of states, and that they fit together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeVar

from holdfast.registry import pytree
from holdfast.registry.errors import (
    IntegrityError,
    MissingObject,
    ObjectNotFound,
    RegistryError,
    UnsupportedFormat,
)
from holdfast.registry.history.actions import Place
from holdfast.registry.maintenance.data_pass import fault_of
from holdfast.registry.maintenance.decoding import DecodePass
from holdfast.registry.maintenance.object_checks import Tables, check_rows
from holdfast.registry.storage.framing import content_bytes
from holdfast.registry.storage.keys import ObjectKey
from holdfast.registry.storage.manifest import Manifest
from holdfast.registry.storage.placement import PackRef, Placement
from holdfast.registry.storage.store import Store, decode_manifest, missing
from holdfast.registry.values.digest import Digest

#: Manifests that unpack to more are checked one at a time.
_LARGE_BYTES = 2**20

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with an object.

    Attributes:
        message: The fault in words.
        is_gone: Whether the object is missing.
        size_bytes: The size that it should have, where a placement gives one.
        is_within: Whether its bytes are as they were stored, but decode to wrong ones.
    """

    message: str
    is_gone: bool = False
    size_bytes: int | None = None
    is_within: bool = False


@dataclass(slots=True)
class Checked:
    """The result of a check of some places.

    Attributes:
        packs: The packs that each place needs, where its placement can be read.
        faults: The faults, by object.
        unfit: Places whose placement is undamaged but wrong, or another state's, each with what is
            wrong: other bytes under the same key cannot repair that.
        size_bytes: Bytes that were read.
    """

    packs: dict[Place, tuple[PackRef, ...]] = field(default_factory=dict)
    faults: dict[ObjectKey, Fault] = field(default_factory=dict)
    unfit: dict[Place, str] = field(default_factory=dict)
    size_bytes: int = 0

    def blame(self, key: ObjectKey, fault: Fault) -> None:
        """Note a fault of an object, unless it has one already."""
        self.faults.setdefault(key, fault)


class PlaceCheck:
    """Checks places.

    Args:
        store: The registry's objects.
        size_of: Returns the size of an object; `None` where it is gone.
        may_check_rows: Returns whether the packs of a placement were read, so that its rows can be
            compared with their tables.
        tables: These tables.
        decoding: Decodes encoded chunks, if that is asked for.
    """

    def __init__(
        self,
        store: Store,
        size_of: Callable[[ObjectKey], int | None],
        may_check_rows: Callable[[Placement], bool],
        tables: Tables,
        decoding: DecodePass | None = None,
    ) -> None:
        self._store = store
        self._size_of = size_of
        self._may_check_rows = may_check_rows
        self._tables = tables
        self._proven: set[Digest] = set()  # components: most checkpoints share some
        self._turn = Lock()
        self._decoding = decoding

    def check(self, places: Sequence[Place]) -> Checked:
        """Check places of one manifest, which is read once for all of them."""
        checked = Checked()
        key = places[0].manifest_key
        data = self._get(key, checked)
        if data is None:
            return self._check(places, None, checked)
        # A large manifest stays in memory until it is checked: only one of them at a time.
        with self._turn if content_bytes(data) > _LARGE_BYTES else nullcontext():
            manifest = self._decode(self._manifest, data, key, checked)
            return self._check(places, manifest, checked)

    def _check(
        self, places: Sequence[Place], manifest: Manifest | None, checked: Checked
    ) -> Checked:
        for place in places:
            placement = self._read(_placement, place.placement_key, checked)
            if placement is None:
                continue
            checked.packs[place] = placement.packs
            lacking = [pack for pack in placement.packs if not self._check_pack(pack, checked)]
            unfit = self._unfit(place, manifest, placement, checked, there=not lacking)
            if unfit is not None:
                checked.unfit[place] = unfit
        return checked

    def _read(
        self, decode: Callable[[bytes, ObjectKey], _T], key: ObjectKey, checked: Checked
    ) -> _T | None:
        data = self._get(key, checked)
        return None if data is None else self._decode(decode, data, key, checked)

    def _get(self, key: ObjectKey, checked: Checked) -> bytes | None:
        # Not from the handle's cache: the bytes on the store count.
        try:
            data = self._store.backend.get(str(key))
        except ObjectNotFound:
            checked.blame(key, Fault(missing(key).summary, is_gone=True))
        except RegistryError as error:
            checked.blame(key, Fault(fault_of(error) or ""))
        else:
            checked.size_bytes += len(data)
            return data
        return None

    def _decode(
        self,
        decode: Callable[[bytes, ObjectKey], _T],
        data: bytes,
        key: ObjectKey,
        checked: Checked,
    ) -> _T | None:
        try:
            return decode(data, key)
        except RegistryError as error:
            checked.blame(key, Fault(fault_of(error) or ""))
        return None

    def _manifest(self, data: bytes, key: ObjectKey) -> Manifest:
        """Return a manifest from which the state can be rebuilt."""
        manifest = decode_manifest(data, key)
        for name, part in manifest.components.items():
            if part.digest not in self._proven:
                pytree.check_values(name, part.skeleton)
                self._proven.add(part.digest)
        return manifest

    def _check_pack(self, pack: PackRef, checked: Checked) -> bool:
        found = self._size_of(pack.key)
        if found == pack.size_bytes:
            return True
        if found is None:
            fault = Fault(missing(pack.key).summary, is_gone=True, size_bytes=pack.size_bytes)
        else:
            message = f"{pack.key}: expected {pack.size_bytes} bytes; found {found}"
            fault = Fault(message, size_bytes=pack.size_bytes)
        checked.blame(pack.key, fault)
        return False

    def _unfit(
        self,
        place: Place,
        manifest: Manifest | None,
        placement: Placement,
        checked: Checked,
        *,
        there: bool,
    ) -> str | None:
        """Return what is wrong in an undamaged placement; `None` where nothing is."""
        if placement.manifest != place.manifest:
            return f"{place.placement_key}: another checkpoint's placement"
        if manifest is None:
            return None
        # Lists of chunks are read with the packs; here only the manifest's own chunks count.
        if len(placement.rows) < len(manifest.direct_chunks):
            return f"{place.placement_key}: the placement does not cover its manifest"
        if not there or not self._may_check_rows(placement):
            return None
        for pack in placement.packs:
            try:
                self._tables.of(pack)
            except (IntegrityError, UnsupportedFormat) as error:
                is_gone = isinstance(error, MissingObject)
                checked.blame(pack.key, Fault(error.summary, is_gone, pack.size_bytes))
                return None
        try:
            check_rows(self._store, self._tables, manifest, placement)
            if self._decoding is not None:
                for key, message in self._decoding.check(manifest, placement).items():
                    checked.blame(key, Fault(message, is_within=True))
        except (IntegrityError, UnsupportedFormat) as error:
            return error.summary
        return None


def _placement(data: bytes, key: ObjectKey) -> Placement:
    return Placement.decode(data, key.digest, where=str(key))
