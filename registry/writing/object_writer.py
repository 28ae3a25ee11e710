"""The writer's side of collection: the only module that chooses a key for an object.

It obeys rules W1 to W5 of docs/spec.md, "Collecting garbage":

- W1: the run exists before the epoch is observed.
- W2: a condemned object is never named again; its content is put under the observed epoch.
- W2a: an object of a needed manifest of this run needs no check if the commit follows directly.
- W3: a newer mark in the log moves the observed epoch, and all chosen keys are checked again. After
  a new seal the epoch is observed again, behind the new marker.
- W4: `RunLog.append` puts the slot behind the one that was read.
- W5: objects of other writers are made durable before a commit names them.

Every commit that names objects goes through `ObjectWriter`. Before a commit relies on a pack of
another writer, `ObjectWriter` reads that pack whole (section 11).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.backends import Backend, Body, refuse_links
from holdfast.backends.base import Unfinished
from holdfast.registry.errors import IntegrityError, Malformed, ObjectNotFound, StoreFull
from holdfast.registry.history import Epochs, Look, PlacedState, RunLog
from holdfast.registry.history.actions import Line, Place
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.objects import Kind, ObjectKey, PackRef, Placement, stem
from holdfast.registry.store import Store, VerifiedPacks, is_sound
from holdfast.registry.values import Digest

_FREED_WITHIN_S = 0.1
_LOGGER = logging.getLogger("holdfast")


class Condemned(Exception):
    """Chosen keys may not be named any more; choose again."""

    def __init__(self, keys: Collection[ObjectKey]) -> None:
        super().__init__(f"{len(keys)} objects were condemned meanwhile")
        self.keys = frozenset(keys)  # the condemned keys


class _Decodable(Protocol):
    def decode(self, data: bytes, expected: Digest, *, where: str) -> object: ...


@dataclass(frozen=True)
class ChosenKeys:
    """The keys of the objects that a commit will name."""

    keys: frozenset[ObjectKey] = frozenset()
    #: The places of those manifests of this run that used a key when it was chosen. While one of
    #: these places is current, the key needs no check (W2a).
    covered_by: Mapping[ObjectKey, Collection[Place]] = field(default_factory=dict)

    def unproven(self, run: RunManifest) -> set[ObjectKey]:
        """Return the keys that no needed manifest of a run uses."""
        return {
            key
            for key in self.keys
            if not any(run.is_placed(place) for place in self.covered_by.get(key, ()))
        }

    def __or__(self, other: ChosenKeys) -> ChosenKeys:
        """Return both together."""
        covered = {key: [*places] for key, places in self.covered_by.items()}
        for key, places in other.covered_by.items():
            covered.setdefault(key, []).extend(places)
        return ChosenKeys(self.keys | other.keys, covered)


@dataclass(frozen=True, slots=True)
class NewPack:
    """A pack that is put under a new key."""

    key: ObjectKey
    #: Whether an object that was found damaged or archived may be there: it is replaced.
    replaces: bool


class ObjectWriter:
    """Puts objects for one run, and commits lines that name them."""

    def __init__(self, store: Store, log: RunLog) -> None:
        self._store = store
        self._epochs = Epochs.of(store)
        self._observed: int | None = None
        #: The observation that `begin` has started, and the process whose thread makes it.
        self._begun: tuple[int, Future[int]] | None = None
        #: The newest seal of the run when the epoch was observed.
        self._sealed_at: int | None = None
        self._checked = 0  # the newest mark after which this program may write
        # Keys for the next commit whose objects this writer has put or made durable.
        self._durable: set[ObjectKey] = set()
        self.log = log  # the run's log; its slot 0 must exist (W1)
        #: Keys of objects that were found damaged or archived. They are never used again, and
        #: replaced when the same content is written again.
        self.suspect: set[ObjectKey] = set()
        #: Places of states that this handle has loaded whole, every byte verified.
        self.read: set[Place] = set()
        self._verified = VerifiedPacks.of(store)

    def begin(self) -> None:
        """Start to observe the epoch, unless it was observed, while the caller hashes."""
        if self._observed is None:
            self._begun = os.getpid(), self._store.pools.small.submit(self._observe)

    def observe(self) -> int:
        """Return the observed epoch; the first call observes it, before any key is chosen (W1)."""
        if self._observed is None:
            pid, begun = self._begun or (0, None)
            is_failed = begun is not None and begun.done() and begun.exception() is not None
            if begun is None or is_failed or pid != os.getpid():
                self._observed = self._observe()
            else:
                self._observed = begun.result()
        return self._observed

    def _observe(self) -> int:
        self.log.prepare_writing()
        self._sealed_at = self.log.announce()
        observed = self._epochs.observe()
        if self._sealed_at is None and self._epochs.seals(observed):
            self.log.announce(is_sealing=True)
            observed = self._epochs.observe()
        self._epochs.check_not_forgotten(self.log.run_id, observed)
        self._epochs.make_durable(observed)
        return observed

    def hear(self, epoch: int) -> None:
        """Take the epoch that rank 0 has observed and made durable; an older one changes nothing.

        Rank 0 checks it for all ranks, so that they ask the store for nothing.
        """
        if self._observed is None:
            self.log.prepare_writing()
        self._observed = max(epoch, self._observed or 0)

    def usable(self, kind: Kind, digest: Digest, size_bytes: int) -> ObjectKey | None:
        """Return an existing object of the right size that may be named (W2), or `None`."""
        for info in self._store.backend.list(stem(kind, digest)):
            try:
                key = ObjectKey.parse(info.key)
            except Malformed:
                continue  # a foreign file, which `verify` reports
            if info.is_archived:
                self.suspect.add(key)
            is_sound = info.size_bytes == size_bytes and key not in self.suspect
            if is_sound and not self._epochs.condemned([key], self.observe()):
                refuse_links(self._store.backend, info.key)
                return key
        return None

    def put_pack(
        self, digest: Digest, body: Body, size_bytes: int, is_looked_for: bool = True
    ) -> ObjectKey:
        """Make sure that a pack exists; return its key.

        The put finds it under the observed epoch, also if it was not looked for.
        """
        is_known = is_looked_for or self.new_pack(digest).key in self._verified
        if is_known and (key := self.verified(digest, size_bytes)) is not None:
            return key
        new = self.new_pack(digest)
        self.note_pack(new, is_ours=put_pack(self._store, new, body, size_bytes))
        return new.key

    def verified(self, digest: Digest, size_bytes: int) -> ObjectKey | None:
        """Return an existing pack that may be named and is verified, or `None`."""
        while (key := self.usable("packs", digest, size_bytes)) is not None:
            if self.verifies(PackRef(key, size_bytes)):
                return key
        return None

    def verifies(self, pack: PackRef) -> bool:
        """Return whether a pack holds the bytes that its name promises; otherwise suspect it.

        It is read whole, unless this machine has put it or read it before.
        """
        if self._verified.verifies(self._store, pack):
            return True
        self.suspect.add(pack.key)
        _LOGGER.warning(
            "%s/%s: the pack has other bytes than its name promises: it was put wrong, or is "
            "damaged. It is replaced if this program has its content, and not used otherwise",
            self._store.backend.url,
            pack.key,
        )
        return False

    def sound(self, states: Iterable[PlacedState]) -> list[PlacedState]:
        """Return the states of which no object is suspect."""
        keys = self.suspect
        return [one for one in states if keys.isdisjoint(placed_keys(one.place, one.placement))]

    def trusts(self, base: PlacedState) -> bool:
        """Return whether a save may rely on the packs of a state of the run without reading them.

        The author of a place has verified its packs, except in a fork, which names what its parent
        has: there this handle has to have loaded the state, or this machine to know its packs.
        """
        run = self.log.run
        parent = run.created.parent if run.created is not None else None
        if parent is None or base.place in self.read:
            return True
        origins = (one.n for one in run.checkpoints if one.manifest == parent.checkpoint)
        origin = next(origins, run.commits)  # its own saves come after it
        return any(
            base.manifest.digest in (one.manifest, *one.companions.values())
            for one in run.checkpoints
            if one.n > origin
        ) or all(pack.key in self._verified for pack in base.placement.packs)

    def new_pack(self, digest: Digest) -> NewPack:
        """Return the key of a pack that is put because none may be named (W2)."""
        key = ObjectKey("packs", digest, self.observe())
        return NewPack(key, replaces=key in self.suspect)

    def note_pack(self, pack: NewPack, *, is_ours: bool) -> None:
        """Note that a new pack is on the store."""
        self.suspect.discard(pack.key)
        self._verified.add(pack.key)
        if is_ours:
            self._durable.add(pack.key)

    def note_small(self, keys: Collection[ObjectKey]) -> None:
        """Note manifests and placements that were put for this writer, so that they are durable."""
        self._durable.update(keys)

    def put_small(self, kind: Kind, digest: Digest, data: bytes, form: _Decodable) -> ObjectKey:
        """Make sure that a manifest or placement exists; return its key."""
        key = ObjectKey(kind, digest, self.observe())
        if put_small(self._store, key, data, form):
            self._durable.add(key)
        return key

    def commit(
        self,
        compose: Callable[[RunManifest], Sequence[Line | bytes] | None],
        chosen: ChosenKeys,
        look: Look | None = None,
    ) -> RunManifest:
        """Put the next slot with lines that name the chosen keys (W3 to W5)."""

        def guarded(run: RunManifest) -> Sequence[Line | bytes] | None:
            lines = compose(run)
            if lines is not None:
                self._check_epoch(run)
                self._recheck(run, chosen)
                self._make_durable(run, chosen)
            return lines

        committed = self.log.append(guarded, look=look)
        self._durable.difference_update(chosen.keys)
        return committed

    def _check_epoch(self, run: RunManifest) -> None:
        """Check that this program may write after the newest mark of the run."""
        if run.epoch > max(self._observed or 0, self._checked):
            self._epochs.require(run.epoch)
            self._checked = run.epoch

    def _recheck(self, run: RunManifest, chosen: ChosenKeys) -> None:
        if not chosen.keys:
            return
        if run.sealed_at != self._sealed_at:
            self._observed = self._begun = (
                None  # `append` has put the marker behind the new seal (W3')
            )
        self._observed = max(run.epoch, self.observe())
        refused = self._epochs.condemned(chosen.unproven(run), self.observe())
        if refused:
            raise Condemned(refused)

    def _make_durable(self, run: RunManifest, chosen: ChosenKeys) -> None:
        """Make chosen objects of other writers durable that no place covers (W5).

        Their writer may have died before they were durable. The author of a place has made its
        objects durable.
        """
        unsure = chosen.unproven(run) - self._durable
        if unsure:
            self._store.backend.make_durable(map(str, sorted(unsure)))
            self._durable |= unsure


def put_pack(store: Store, pack: NewPack, body: Body, size_bytes: int) -> bool:
    """Put a pack under the key that a writer has chosen for it."""
    name = str(pack.key)
    if not isinstance(body, Unfinished):  # which takes its space already
        check_room(store.backend, size_bytes)
    if not pack.replaces and store.backend.put_if_absent(name, body):
        return True
    # Another writer has put it, or the answer was lost. Replace it if it is damaged or archived.
    if (
        not pack.replaces
        and _is_readable(store.backend, name, size_bytes)
        and is_sound(store, PackRef(pack.key, size_bytes))
    ):
        return False
    # The key is made from the content, so only these bytes are right here.
    store.backend.put(name, body)
    return True


def put_small(store: Store, key: ObjectKey, data: bytes, form: _Decodable) -> bool:
    """Put a manifest or placement under the key that a writer has chosen for it.

    Two versions of zstd may write different bytes for one content, so an existing file is decoded
    and not compared.
    """
    if store.backend.put_if_absent(str(key), data):
        return True
    try:
        form.decode(store.backend.get(str(key)), key.digest, where=str(key))
    except (IntegrityError, ObjectNotFound):
        store.backend.put(str(key), data)
        return True
    return False


def _is_readable(backend: Backend, name: str, size_bytes: int) -> bool:
    """Return whether an object is there, has its size, and is in no archive."""
    try:
        info = backend.stat(name)
    except ObjectNotFound:
        return False
    return info.size_bytes == size_bytes and not info.is_archived


def check_room(backend: Backend, needed_bytes: int) -> None:
    """Refuse bytes that do not fit, before any of them are written."""
    free_bytes = backend.free_bytes()
    if free_bytes is not None and needed_bytes > free_bytes:
        # Some file systems free deleted files a moment later.
        time.sleep(_FREED_WITHIN_S)
        free_bytes = backend.free_bytes()
    if free_bytes is not None and needed_bytes > free_bytes:
        raise StoreFull(
            "not enough free space",
            where=backend.url,
            expected=f"{needed_bytes} bytes free",
            found=f"{free_bytes} bytes free",
            hint="Evict checkpoints (`holdfast prune`) and collect unneeded objects (`holdfast "
            "gc --grace 0`), or free space in another way. Nothing was committed.",
        )


def placed_keys(place: Place, placement: Placement) -> frozenset[ObjectKey]:
    """Return every object that a placed manifest needs: itself, its placement and its packs."""
    return frozenset({place.manifest_key, place.placement_key, *(p.key for p in placement.packs)})
