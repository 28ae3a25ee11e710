"""Put states of one run on its store.

A `StateWriter` writes a new state, imports one from elsewhere, or cuts one out of another one.
It remembers states that later ones can be stored against. It commits nothing:
`holdfast.registry.writing.committer` does. A change holds the writer, and the committer holds both.
`Storing` says how the bytes of a save are stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.backends.escape import quoted
from holdfast.registry import pytree
from holdfast.registry.errors import Archived, Damaged, IntegrityError, InvalidInput
from holdfast.registry.history import PlacedState, RunLog, StateReader, placed_state
from holdfast.registry.history.actions import Place
from holdfast.registry.objects import (
    INLINE_BYTES,
    TRAILER_BYTES,
    PackTable,
    Placement,
    grid,
)
from holdfast.registry.objects.codecs import COMPRESSIONS, RAW, Compression, check_compression
from holdfast.registry.pytree import ArrayLeaf, FlatState
from holdfast.registry.spec.precision import Precision, PrecisionPolicy
from holdfast.registry.store import RegistryConfig, Store
from holdfast.registry.values import Digest, collector_paused
from holdfast.registry.writing.adopting import adopt
from holdfast.registry.writing.encoding import Trials, check_keyframe_every
from holdfast.registry.writing.object_writer import (
    ChosenKeys,
    ObjectWriter,
    check_room,
    placed_keys,
)
from holdfast.registry.writing.packing import cut_groups, group_name, write_state
from holdfast.registry.writing.placing import (
    Written,
    build_placement,
    cover,
    cut_state,
    locations_of,
    make_place,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storing:
    """How a save stores its bytes: `run.save(state, step=1, storing=Storing(compression="zstd"))`.

    Only `precision` changes what is stored, and so the id.

    Attributes:
        compression: `none`, `auto`, `zstd` or `lz4`, for new chunks. `auto` is zstd, in a shorter
            and faster form for bfloat16 and float32. Default: the registry's own.
        keyframe_every: A chunk that changes from save to save is stored whole once in this many
            versions, 1 to 32. In between it is stored as a difference if that is clearly shorter; 1
            turns differences off. Default: the registry's own.
        precision: Which float32 and float64 tensors are stored in fewer bits: one policy for all,
            or policies by path pattern, of which the first match counts:
            `{"model/*": "bf16", "*": "auto"}`. A policy is `bf16`, `fp16`, `auto` (`bf16` for
            tensors of 1 MiB and more), `auto-fp16` (`fp16` above 1 MiB) or `keep`; a name of the
            preset's `precision` stands for its rules. The loss is recorded and shown. Companions
            are not changed.
        allow_lossy_optimizer: Apply `precision` to optimizer state too. Without it optimizer state
            keeps its precision, and a pattern that matches nothing else is an error.

    Raises:
        InvalidInput: A value is wrong, or differences are wanted without compression.
    """

    compression: Compression | None = None
    keyframe_every: int | None = None
    precision: PrecisionPolicy | None = None
    allow_lossy_optimizer: bool = False

    def __post_init__(self) -> None:
        """Check the values, and keep a copy of the policies."""
        check_compression(self.compression)
        check_keyframe_every(self.keyframe_every, compresses=self.compression != "none")
        if isinstance(self.precision, Mapping):
            object.__setattr__(self, "precision", dict(self.precision) or None)
        Precision.check(self.precision)


def check_storing(given: object) -> Storing:
    """Return how a save stores its bytes: as given, or as the registry says."""
    if given is None:
        return Storing()
    if not isinstance(given, Storing):
        raise InvalidInput(
            "not a way to store a checkpoint",
            where="storing",
            expected="holdfast.Storing(...)",
            found=quoted(given),
        )
    return given


def codec_and_distance(storing: Storing, config: RegistryConfig) -> tuple[str, int]:
    """Return the codec of new chunks, and in how many versions one is stored whole."""
    every = storing.keyframe_every or config.keyframe_every or 1
    default: Compression = "none" if every == 1 else "zstd"
    return COMPRESSIONS[storing.compression or config.compression or default], every


#: Checkpoints whose chunks a save can use again.
MAX_BASES = 8
#: States that are remembered, so that they need not be read again: bases of states and of their
#: companions.
_KEPT_BASES = 3 * MAX_BASES


class StateWriter:
    """Puts states of one run on a store; later states can be stored against them."""

    def __init__(self, store: Store, log: RunLog) -> None:
        self.store = store  # the registry's objects
        self.log = log  # the run's log
        self.objects = ObjectWriter(store, log)  # chooses the keys of all objects
        self._bases: dict[Digest, PlacedState] = {}
        #: States that retention cannot thin; each was told once.
        self.unthinnable: set[Digest] = set()
        self._trials = Trials()

    def write(
        self,
        state: FlatState,
        bases: Sequence[PlacedState],
        storing: Storing | None = None,
        watched: Sequence[str] = (),
    ) -> Written:
        """Put a state on the store."""
        codec, every = codec_and_distance(storing or Storing(), self.store.config)
        check_state_fits(self.store, self.objects, state, bases, codec)
        return write_state(
            self.store, self.objects, state, bases, codec, every, self._trials, watched
        )

    def write_plain(self, state: object) -> Written:
        """Put a state on the store that shares no chunks with checkpoints."""
        with collector_paused():
            flat = state if isinstance(state, FlatState) else pytree.flatten(state)
        pytree.await_devices(flat)
        return self.write(flat, ())

    def adopt(
        self, source: Store, places: Sequence[Place], *, verifies: bool = True
    ) -> list[Written]:
        """Import stored states of another registry, a parent run, an eviction or a journal.

        Without `verifies` packs that are there are not read: a fork's saves look at what they need.
        """
        adopted, chosen = adopt(source, self.store, self.objects, places, verifies=verifies)
        return [Written(placed_state(self.store, place), chosen, 0) for place in adopted]

    def cut(self, manifest: Digest, names: Sequence[str]) -> Written:
        """Make a state of some components of a stored one; no chunk is stored again."""
        return cut_state(self.store, self.objects, self.verified(manifest), names)

    def components_of(self, manifest: Digest) -> list[str]:
        """Return the components that a placement of the run covers, in manifest order."""
        return list(self._known(manifest).manifest.components)

    def thin(self, manifest: Digest, names: Sequence[str]) -> Written:
        """Put a placement of some components of a state of the run, and no other object."""
        self.objects.observe()  # before any key is chosen
        base = self._known(manifest)
        part = base.manifest.part(names)
        lists = {digest: base.lists[digest] for digest in part.chunk_lists}
        whole = build_placement(part, lists, locations_of([base]))
        placement = replace(whole, components=tuple(part.components))
        key = self.objects.put_small("placements", placement.digest, placement.encode(), Placement)
        self.store.remember(key, placement)
        place = make_place(base.place.manifest_key, key)
        chosen = ChosenKeys(placed_keys(place, placement), cover([base]))
        return Written(PlacedState(place, part, placement, lists), chosen, 0)

    def _known(self, manifest: Digest) -> PlacedState:
        """Return a state of the run; unlike `base` for any thread, since it remembers nothing."""
        reader = StateReader(self.store, self.log, manifest, f"{self.log.run_id}/{manifest.short}")
        kept = self._bases.get(manifest)
        return kept if kept is not None and kept.place == reader.place else reader.base()

    def verified(self, manifest: Digest) -> PlacedState:
        """Return a state of the run; its packs are read if nothing shows that they are sound."""
        base = self.base(manifest)
        if not self.objects.trusts(base):
            for pack in base.placement.packs:
                if not self.objects.verifies(pack):
                    raise Damaged(
                        "a pack has other bytes than its name promises",
                        where=f"{self.store.backend.url}/{pack.key}",
                        hint="Nothing was committed. `holdfast repair` can bring it from a mirror.",
                    )
        return base

    def base(self, manifest: Digest) -> PlacedState:
        """Return a state of the run with its place."""
        kept = self._known(manifest)
        self.keep(kept)
        return kept

    def keep(self, base: PlacedState) -> None:
        """Remember a state of the run: later states can be stored against it."""
        self._bases.pop(base.manifest.digest, None)
        self._bases[base.manifest.digest] = base
        while len(self._bases) > _KEPT_BASES:
            del self._bases[next(iter(self._bases))]

    def choose_bases(self, wanted: Iterable[Digest]) -> list[PlacedState]:
        """Return the first `MAX_BASES` of these states that are usable as bases."""
        held = self.log.run.held
        bases: dict[Digest, PlacedState] = {}
        for manifest in wanted:
            if len(bases) == MAX_BASES:
                break
            if manifest in bases or manifest not in held:
                continue
            try:
                base = self.base(manifest)
            except (Archived, IntegrityError):
                continue  # such a state is no base; its chunks are stored again
            if self.objects.trusts(base):
                bases[manifest] = base
        return list(bases.values())

    def forget_bases(self) -> None:
        """Forget the remembered states: a sweep may have condemned their objects."""
        self._bases.clear()


# Check that a state fits into the free space of its store, before anything is written.


def check_state_fits(
    store: Store, writer: ObjectWriter, state: FlatState, bases: Sequence[PlacedState], codec: str
) -> None:
    """Refuse a state that cannot fit."""
    free_bytes = store.backend.free_bytes()
    if codec != RAW or free_bytes is None or state.nbytes <= free_bytes:
        return
    needed_bytes = 0
    for pack_bytes in _new_packs(store, writer, state, locations_of(bases).keys()):
        needed_bytes += pack_bytes
        check_room(store.backend, needed_bytes)


def _new_packs(
    store: Store, writer: ObjectWriter, state: FlatState, stored: Collection[Digest]
) -> Iterator[int]:
    """Yield the sizes of the packs that a save would send."""
    seen: set[Digest] = set(stored)
    for group in cut_groups(_chunks(state)):
        views = [leaf.buffer()[start:stop] for leaf, start, stop in group]
        fresh: dict[Digest, int] = {}
        for digest, view in zip(store.pools.hashing.map(Digest.of, views), views, strict=True):
            if digest not in seen:
                seen.add(digest)
                fresh[digest] = len(view)
        for leaf, _, stop in group:
            if stop == leaf.nbytes:
                leaf.release()
        if fresh:
            table = PackTable.of_raw(fresh, [*fresh.values()]).encode()
            size_bytes = sum(fresh.values()) + len(table) + TRAILER_BYTES
            if writer.usable("packs", Digest.of(table), size_bytes) is None:
                yield size_bytes


def _chunks(state: FlatState) -> Iterator[tuple[str, int, tuple[ArrayLeaf, int, int]]]:
    """Yield each chunk: the name of its kind of pack, its length, and its leaf, start and stop."""
    for part in state.components:
        for leaf in part.leaves:
            if leaf.nbytes <= INLINE_BYTES:
                continue
            start = 0
            for size in grid(leaf.dtype, leaf.shape).sizes():
                yield group_name(part), size, (leaf, start, start + size)
                start += size
