"""The write path: from a flat state to objects on the store, ready for a commit.

Chunks are copied and hashed in the thread pool, in groups of up to the size of a pack
(`holdfast.registry.writing.hashing`). In the order of the manifest, the new chunks of each group
are sent as one pack, while later groups are hashed. In a folder, a raw pack of several blocks is
written while its own chunks are hashed. `holdfast.registry.writing.object_writer` chooses the keys
of objects; nothing here commits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain, islice, repeat
from math import inf
from operator import itemgetter
from typing import Any, NamedTuple, ParamSpec, TypeVar

from holdfast.backends import Buffer
from holdfast.backends.base import Unfinished
from holdfast.registry.history import PlacedState
from holdfast.registry.objects import (
    INLINE_BYTES,
    LIST_THRESHOLD,
    PACK_BYTES,
    Component,
    Manifest,
    ObjectKey,
    PackRef,
    PackTable,
    TensorEntry,
    trailer,
)
from holdfast.registry.objects.codecs import RAW
from holdfast.registry.pytree import ArrayLeaf, FlatComponent, FlatState, NamedLeaf
from holdfast.registry.store import Store, abandon, results, together
from holdfast.registry.values import DIGEST_BYTES, Digest, canonical, collector_paused
from holdfast.registry.writing.encoding import (
    Encoded,
    Encoding,
    Predecessors,
    Trials,
    chain_entries,
)
from holdfast.registry.writing.hashing import (
    NAMED_AT_MOST,
    Group,
    GrowingPack,
    Hashing,
    Piece,
    in_use,
    is_finite,
    is_watched,
    pieces_of,
)
from holdfast.registry.writing.object_writer import ChosenKeys, ObjectWriter, placed_keys
from holdfast.registry.writing.placing import (
    ChunkLocation,
    Written,
    build_placement,
    cover,
    locations_of,
    place_manifest,
)
from holdfast.registry.writing.readable import check_readable

#: The most packs that are sent at once. With copied chunks it is fewer: blocks are used up first.
_PACKS_IN_FLIGHT = 8
#: The same for encoded chunks, whose bytes are in no block.
_ENCODED_IN_FLIGHT = 2
#: Smaller packs are not looked for under older generations if they only change what a base has: it
#: costs less to store one of a hundred twice than to look for all in vain.
_LOOKED_FOR_BYTES = PACK_BYTES // 4

_P = ParamSpec("_P")
_T = TypeVar("_T")
_C = TypeVar("_C", bound="Chunk | Piece")


def write_state(
    store: Store,
    writer: ObjectWriter,
    state: FlatState,
    bases: Sequence[PlacedState],
    codec: str = RAW,
    keyframe_every: int = 1,
    trials: Trials | None = None,
    watched: Sequence[str] = (),
) -> Written:
    """Store a state; only its new chunks are sent."""
    made = _Writing(store, writer, bases, codec, keyframe_every, trials or Trials())
    return made.write(state, watched)


def write_stream(
    store: Store,
    writer: ObjectWriter,
    groups: Iterable[list[Chunk]],
    finish: Callable[[], tuple[Manifest, Mapping[Digest, bytes]]],
    *,
    bases: Sequence[PlacedState],
    locations: Mapping[Digest, ChunkLocation],
    codec: str = RAW,
) -> Written:
    """Store a state whose chunks are made one batch after another; one batch is in memory."""
    made = _Writing(store, writer, bases, codec, 1, Trials())
    return made.write_stream(groups, finish, locations)


def write_packs(
    store: Store, writer: ObjectWriter, groups: Iterable[list[Chunk]], codec: str = RAW
) -> Mapping[Digest, ChunkLocation]:
    """Store chunks without a manifest; about two batches are in memory."""
    return _Writing(store, writer, (), codec, 1, Trials()).write_packs(groups)


class Chunk(NamedTuple):
    """A chunk to store: a part of a tensor, or a list of digests."""

    digest: Digest  # its id
    view: memoryview
    leaf: ArrayLeaf | None = None  # the tensor; `None` for a list
    number: int = 0  # its number in the tensor's grid


class _Writing:
    """The writing of one state."""

    def __init__(
        self,
        store: Store,
        writer: ObjectWriter,
        bases: Sequence[PlacedState],
        codec: str,
        keyframe_every: int,
        trials: Trials,
    ) -> None:
        self._store = store
        self._writer = writer
        self._codec = codec
        self._encoding = Encoding(codec)
        self._bases = writer.sound(bases)
        self._stored = locations_of(self._bases)
        self._predecessors: Predecessors | None = None
        if codec != RAW and keyframe_every > 1:
            self._predecessors = Predecessors(
                store, self._bases, self._stored, keyframe_every, trials
            )
        self._known_components = {name for base in bases for name in base.manifest.components}
        self._is_found: bool | None = None  # whether the first large pack of them was there already
        self._fresh: set[Digest] = set()  # the chunks of these packs
        #: By name the size, the chunks and the table of each pack, and its key to come.
        self._packs: dict[Digest, tuple[int, list[Digest], PackTable, Future[ObjectKey]]] = {}
        self._files: list[Unfinished] = []  # packs that were written while they were hashed
        self._in_flight: deque[Future[ObjectKey]] = deque()
        self._under_way: list[Future[Any]] = []
        self._lease = store.blocks.lease()
        self._pieces: dict[int, list[Piece]] = {}
        self._nonfinite: set[int] = set()
        self._lists: dict[Digest, bytes] = {}
        self._components: dict[str, Component] = {}
        self._cut_until: list[int] = []
        self._skeletons: list[bytes] = []

    def write(self, state: FlatState, watched: Sequence[str]) -> Written:
        self._writer.begin()  # whoever chooses a key waits for it
        submit = partial(self._submit, self._store.pools.hashing)
        begin = self._store.backend.begin if self._codec == RAW else lambda _: None
        hashing = Hashing(submit, self._lease, self._stored, begin)
        try:
            # It would look at the pieces of every tensor. It stays on where packs are waited for.
            with collector_paused(self._moved_bytes(state)):
                groups = hashing.groups(cut_groups(self._cut(state, watched)))
                self._pack_groups(groups, state, watched)
                nonfinite = self._named(state) if watched else ()
                self._pieces.clear()
            written = self._place(Manifest(state.kind, self._components))
        finally:
            self._end()
        return replace(written, nonfinite=nonfinite)

    def _moved_bytes(self, state: FlatState) -> float:
        """Return the bytes of a state; without limit if some packs wait for others to be sent."""
        sizes = [sum(leaf.nbytes for leaf in part.leaves) for part in state.components]
        packs = sum(map(bool, sizes)) + sum(sizes) // PACK_BYTES
        return sum(sizes) if self._codec == RAW and packs <= _PACKS_IN_FLIGHT else inf

    def _pack_groups(
        self, groups: Iterator[Group], state: FlatState, watched: Sequence[str]
    ) -> None:
        packed = 0
        first = next(groups, None)  # meanwhile the next batches are hashed
        self._skeletons = [canonical.encode(part.skeleton) for part in state.components]
        check_readable(state, self._skeletons)
        for group in groups if first is None else chain([first], groups):
            self._pack_group(group)
            packed += len(group.pieces)
            self._assemble(state, packed, watched)
        self._assemble(state, packed, watched)

    def _end(self) -> None:
        """Give the blocks back once no thread uses them; an interrupt may end that wait."""
        try:
            abandon(self._under_way)
        except BaseException:
            self._lease.lose()
            raise
        self._lease.close()
        for file in self._files:
            file.close()

    def write_stream(
        self,
        groups: Iterable[list[Chunk]],
        finish: Callable[[], tuple[Manifest, Mapping[Digest, bytes]]],
        locations: Mapping[Digest, ChunkLocation],
    ) -> Written:
        self._stored = dict(locations)
        try:
            for group in groups:
                self._pack(group)
                group.clear()
                while self._in_flight:
                    self._in_flight.popleft().result()
                self._under_way.clear()  # finished futures keep the bytes of their results
            manifest, lists = finish()
            self._lists.update(lists)
            return self._place(manifest)
        finally:
            abandon(self._under_way)

    def write_packs(self, groups: Iterable[list[Chunk]]) -> Mapping[Digest, ChunkLocation]:
        self._writer.observe()  # before any key is chosen
        try:
            for group in groups:
                self._pack(group)
                group.clear()
                while len(self._in_flight) > 1:
                    self._in_flight.popleft().result()
                # Finished futures keep the bytes of their results.
                self._under_way = [one for one in self._under_way if not one.done()]
            return self._fresh_locations()
        finally:
            abandon(self._under_way)

    def _cut(self, state: FlatState, watched: Sequence[str]) -> Iterator[tuple[str, int, Piece]]:
        """Yield each chunk after the name of its kind of pack and its length."""
        cut = 0
        for component in state.components:
            group = group_name(component)
            is_known = component.name in self._known_components
            for leaf in component.leaves:
                if leaf.nbytes <= INLINE_BYTES:
                    continue
                pieces = pieces_of(leaf, is_known=is_known)
                self._pieces[id(leaf)] = pieces
                if watched and is_watched(leaf, watched):
                    for piece in pieces:
                        piece.is_watched = True
                cut += len(pieces)
                for piece in pieces:
                    yield group, piece.stop - piece.start, piece
            self._cut_until.append(cut)

    def _named(self, state: FlatState) -> tuple[str, ...]:
        """Return the paths of the tensors in which NaN or infinity was found, the first few."""
        wrong = (
            leaf.path
            for leaf in state.leaves
            if id(leaf) in self._nonfinite
            or not all(piece.is_finite for piece in self._pieces.get(id(leaf), ()))
        )
        return tuple(islice(wrong, NAMED_AT_MOST))

    def _submit(
        self, pool: Executor, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> Future[_T]:
        future = pool.submit(work, *args, **kwargs)
        self._under_way.append(future)
        return future

    def _pack_group(self, group: Group) -> None:
        chunks = [one for one in group.pieces if one.view]
        growing = group.pack
        if growing is None or (group.is_last and not growing.written):
            self._pack(chunks, group.blocks, is_known=group.is_known)
        else:
            self._grow(growing, chunks, group.blocks)
            if group.is_last:
                self._pack((), is_known=group.is_known, growing=growing)
        group.release()

    def _grow(self, growing: GrowingPack, chunks: list[Piece], blocks: list[memoryview]) -> None:
        """Write the chunks of a part that are not stored yet, while later parts are hashed."""
        fresh = self._only_new(chunks)
        if not fresh:
            self._lease.give(blocks)
            return
        growing.await_part()
        if not growing.written:
            self._files.append(growing.file)
        growing.written.update((digest, len(chunk.view)) for digest, chunk in fresh.items())
        self._fresh.update(fresh)
        views = [chunk.view for chunk in fresh.values()]
        part = self._submit(self._store.pools.bulk, growing.file.write, views)
        part.add_done_callback(lambda _: self._lease.give(blocks))
        growing.await_part = part.result

    def _pack(
        self,
        chunks: Iterable[Chunk | Piece],
        blocks: Sequence[memoryview] = (),
        *,
        is_known: bool = False,
        growing: GrowingPack | None = None,
    ) -> None:
        """Send the chunks that are not stored yet as one pack, or end one that is written."""
        fresh = self._only_new(chunks)
        if not fresh and growing is None:
            self._lease.give(blocks)
            return
        at_most = _PACKS_IN_FLIGHT if self._codec == RAW else _ENCODED_IN_FLIGHT
        while len(self._in_flight) >= at_most:
            self._in_flight.popleft().result()
        with collector_paused():
            digests, table, stored = self._encode(fresh, growing)
            encoded = table.encode()
            name = Digest.of(encoded)
            self._fresh.update(digests)
        sent = in_use(blocks, stored)
        self._lease.give(block for block in blocks if not any(block is one for one in sent))
        stored += [encoded, trailer(encoded)]
        size = sum(map(len, stored))
        put: Callable[..., ObjectKey] = self._writer.put_pack
        if growing is not None:
            growing.await_part()
            size += growing.file.size_bytes
            put = partial(self._put_grown, growing.file)
        is_looked_for = not is_known or self._may_exist(name, size)
        future = self._submit(self._store.pools.bulk, put, name, stored, size, is_looked_for)
        # Only after the put, which may send the same bytes again.
        future.add_done_callback(lambda _: self._lease.give(sent))
        self._in_flight.append(future)
        self._packs[name] = (size, digests, table, future)

    def _put_grown(self, file: Unfinished, name: Digest, end: list[Buffer], *how: Any) -> ObjectKey:
        with closing(file):
            file.write(end)
            return self._writer.put_pack(name, file, *how)

    @collector_paused()
    def _only_new(self, chunks: Iterable[_C]) -> dict[Digest, _C]:
        fresh: dict[Digest, _C] = {}
        for chunk in chunks:
            if chunk.digest not in self._stored and chunk.digest not in self._fresh:
                fresh.setdefault(chunk.digest, chunk)
        return fresh

    def _may_exist(self, name: Digest, size: int) -> bool:
        """Return whether to look for a pack of a component that a base has.

        Only a push of files repeats such packs, and then all of them: the first large one decides.
        """
        if size < _LOOKED_FOR_BYTES:
            return False
        if self._is_found is None:
            self._is_found = self._writer.usable("packs", name, size) is not None
        return self._is_found

    def _encode(
        self, fresh: Mapping[Digest, Chunk | Piece], growing: GrowingPack | None
    ) -> tuple[list[Digest], PackTable, list[Buffer]]:
        """Return the chunks of a pack, its table, and their stored bytes, unless written."""
        if growing is not None:
            written = growing.written
            return [*written], PackTable.of_raw(written, [*written.values()]), []
        if self._codec == RAW:
            views: list[Buffer] = [chunk.view for chunk in fresh.values()]
            return [*fresh], PackTable.of_raw(fresh, [*map(len, views)]), views
        # Deltas have to read their bases first; such threads mostly wait.
        pools = self._store.pools
        pool = pools.bulk if self._predecessors else pools.hashing
        # Not added to `_under_way`: each future keeps the bytes of its result.
        made = results([pool.submit(self._encode_one, chunk) for chunk in fresh.values()])
        kept = dict(zip(fresh, made, strict=True))
        for one in made:
            if one.base is not None and one.base_again is not None and one.base not in self._fresh:
                kept.setdefault(one.base, one.base_again)
        stored = [one.stored for one in kept.values()]
        return [*kept], PackTable(chain_entries(kept, [*kept.values()])), stored

    def _encode_one(self, chunk: Chunk | Piece) -> Encoded:
        base = None
        if self._predecessors is not None and chunk.leaf is not None:
            base = self._predecessors.base_of(chunk.leaf, chunk.number)
            if self._store.cache is not None:
                # The next save needs it as a base.
                self._store.cache.offer({chunk.digest: chunk.view})
        is_in_memory = chunk.leaf is not None and not isinstance(chunk.leaf, NamedLeaf)
        whole = chunk.leaf.buffer() if chunk.leaf is not None and is_in_memory else None
        return self._encoding.encode(chunk.view, chunk.leaf, base, whole)

    def _assemble(self, state: FlatState, packed: int, watched: Sequence[str]) -> None:
        """Make the components whose chunks are all packed, while later ones are hashed."""
        with collector_paused():
            for part in state.components[len(self._components) :]:
                position = len(self._components)
                if position >= len(self._cut_until) or self._cut_until[position] > packed:
                    return
                self._components[part.name] = self._component(
                    part, self._skeletons[position], watched
                )

    def _component(self, part: FlatComponent, skeleton: bytes, watched: Sequence[str]) -> Component:
        known = len(self._lists)
        entries = [self._entry(leaf, watched) for leaf in part.leaves]
        component = Component.build(part.skeleton, entries, skeleton)
        lists = islice(self._lists.items(), known, None)
        chunks = (Chunk(digest, memoryview(data)) for digest, data in lists)
        self._pack(chunks, is_known=part.name in self._known_components)
        return component

    def _entry(self, leaf: ArrayLeaf, watched: Sequence[str]) -> TensorEntry:
        pieces = self._pieces.get(id(leaf))
        if pieces is None:
            data = bytes(leaf.buffer())
            if watched and is_watched(leaf, watched) and not is_finite(data, leaf.dtype):
                self._nonfinite.add(id(leaf))
            return TensorEntry(leaf.dtype, leaf.shape, inline=data)
        if len(pieces) == 1:
            return TensorEntry(leaf.dtype, leaf.shape, chunks=(pieces[0].digest,))
        return chunked_entry(leaf, b"".join([piece.digest for piece in pieces]), self._lists)

    def _place(self, manifest: Manifest) -> Written:
        """Put manifest and placement after all packs; neither if a base is the same state."""
        for base in self._bases:
            if base.manifest.digest == manifest.digest and base.placement.components is None:
                keys = placed_keys(base.place, base.placement)
                return Written(base, ChosenKeys(keys, cover(self._bases)), 0)
        for *_, put in self._packs.values():
            put.result()
        self._writer.observe()  # not in the threads that put both
        with collector_paused():
            made = self._fresh_locations()
            locations = {**self._stored, **made}
            new_bytes = sum(location.stored_bytes for location in made.values())
            placement = build_placement(manifest, self._lists, locations)
            del made, locations  # or the collector would look at each of them
        return place_manifest(
            self._store, self._writer, manifest, placement, self._lists, self._bases, new_bytes
        )

    def _fresh_locations(self) -> dict[Digest, ChunkLocation]:
        """Return where the new chunks are, once all packs are on the store."""
        made: Any = partial(tuple.__new__, ChunkLocation)
        found: dict[Digest, ChunkLocation] = {}
        for size, digests, table, put in self._packs.values():
            places = zip(repeat(PackRef(put.result(), size)), *table.columns(), strict=False)
            found.update(zip(digests, map(made, places), strict=True))
        return found


def chunked_entry(leaf: ArrayLeaf, chunks: bytes, lists: dict[Digest, bytes]) -> TensorEntry:
    """Return the entry of a tensor in a manifest; a long list of digests is added to `lists`."""
    if len(chunks) <= LIST_THRESHOLD * DIGEST_BYTES:
        return TensorEntry(leaf.dtype, leaf.shape, chunks=tuple(Digest.each(chunks)))
    digest = Digest.of(chunks)
    lists[digest] = chunks
    return TensorEntry(leaf.dtype, leaf.shape, chunk_list=digest)


def group_name(component: FlatComponent) -> str:
    """Return the name of a component's kind of pack: bare tensors share one, others do not."""
    return "" if component.is_bare else component.name


def cut_groups(pieces: Iterable[tuple[str, int, _T]]) -> Iterator[list[_T]]:
    """Split chunks, in manifest order, into batches for one pack each.

    The groups depend on the state alone, not on the chunks that are stored already. So equal
    components make equal packs in any run.
    """
    for group in together(pieces, itemgetter(1), PACK_BYTES, itemgetter(0)):
        yield [piece for _, _, piece in group]
