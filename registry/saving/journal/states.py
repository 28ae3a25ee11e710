"""The states of one entry: a small separate store with every byte that the entry needs.

Objects that an entry shares with the one before are linked into its folder, so that either can be
deleted alone.
"""

# Paths are strings here, as in the store of folders.
# ruff: noqa: PTH103, PTH116, PTH118, PTH120
from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property

from holdfast.registry.errors import IntegrityError, Malformed
from holdfast.registry.history import PlacedState, RunLog, placed_state
from holdfast.registry.history.actions import Place
from holdfast.registry.objects import ObjectKey, stem
from holdfast.registry.saving.journal.folder import RunFolder
from holdfast.registry.saving.journal.registries import PrivateFolder
from holdfast.registry.store import Store, index_chunks
from holdfast.registry.upkeep import check_object
from holdfast.registry.writing import ChosenKeys, StateWriter, Written, placed_keys


class _Folder(PrivateFolder):
    """A folder without a reserve, since nothing is evicted or collected in it."""

    def keep_reserve(self, below: str) -> None:
        """Reserve nothing."""


class EntryStates:
    """The states of one entry."""

    def __init__(self, folder: RunFolder, write: str, registry: Store) -> None:
        self._folder = folder
        self._path = folder.states_path(write)
        self._registry = registry
        self.write = write  # the `write` of the entry's commit; it names their folder
        self.store = Store(_Folder(self._path), registry.config)  # the store of the states
        self.store.pools, self.store.blocks = registry.pools, registry.blocks

    @cached_property
    def writer(self) -> StateWriter:
        """Puts the states of the entry."""
        return StateWriter(self.store, RunLog(self.store, self._folder.run_id))

    def link(self, other: EntryStates, bases: Iterable[PlacedState]) -> bool:
        """Link the objects of another entry into this one; return whether all are still there.

        Manifests and placements too: a state that did not change is not written again.
        """
        keys, sizes = set[str](), dict[str, int]()
        for base in bases:
            keys |= {str(key) for key in placed_keys(base.place, base.placement)}
            sizes |= {str(pack.key): pack.size_bytes for pack in base.placement.packs}
        try:
            for key in sorted(keys):
                path = os.path.join(self._path, key)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                os.link(os.path.join(other._path, key), path)
                if key in sizes and os.stat(path).st_size != sizes[key]:
                    return False  # it was cut off
        except OSError:
            return False  # the other entry was deleted, or the file system allows no more links
        self.store.backend.make_durable(keys)
        return True

    def keep_only(self, written: Sequence[Written]) -> None:
        """Delete the objects that no state of this entry needs."""
        needed = {str(key) for one in written for key in one.chosen.keys}
        for info in list(self.store.backend.list()):
            with suppress(Malformed):  # somebody else's file
                if str(ObjectKey.parse(info.key)) not in needed:
                    self.store.backend.delete(info.key)

    def read(self, place: Place) -> Written:
        """Return a state that was written earlier."""
        base = placed_state(self.store, place)
        return Written(base, ChosenKeys(placed_keys(place, base.placement)), 0)

    def check_whole(self, places: Iterable[Place]) -> bool:
        """Verify every byte of some states; return whether the registry replaced damaged ones."""
        taken = False
        for place in places:
            taken |= self._check(place.manifest_key) | self._check(place.placement_key)
            base = self.read(place).state
            index_chunks(base.manifest, base.placement, base.lists)
            for ref in base.placement.packs:
                taken |= self._check(ref.key)
        return taken

    def _check(self, key: ObjectKey) -> bool:
        try:
            check_object(self.store.read(key), key)
        except IntegrityError as error:
            registry = self._registry.backend
            for info in registry.list(stem(key.kind, key.digest)):
                data = registry.get(info.key)
                try:
                    check_object(data, key)
                except IntegrityError:
                    continue
                self.store.backend.put(str(key), data)
                return True
            raise error
        return False

    def remove(self) -> None:
        """Delete them all."""
        self._folder.remove_states(self.write)
