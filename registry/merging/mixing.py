"""A merged state being stored: its chunks read, averaged and packed, a group at a time.

What is kept as it is, is named where it lies: its chunks are neither read nor stored again. Memory
is bounded whatever the size of the state, or of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from holdfast.registry.comparing.chunkwise import Piece, reduce_pieces
from holdfast.registry.errors import UnsupportedValue
from holdfast.registry.history.state_reader import PlacedState, StateReader
from holdfast.registry.merging.borrowing import borrow, shorter
from holdfast.registry.pytree import FlatState
from holdfast.registry.storage.manifest import Component, Manifest, TensorEntry
from holdfast.registry.storage.store import Store
from holdfast.registry.values import canonical
from holdfast.registry.values.digest import Digest
from holdfast.registry.values.dtypes import FLOATING
from holdfast.registry.writing.object_writer import Writer, placed_keys
from holdfast.registry.writing.placing import ChunkLocation, Written, locations_of
from holdfast.registry.writing.readable import check_readable
from holdfast.registry.writing.saving import (
    Chunk,
    chunked_entry,
    cut_groups,
    group_name,
    write_stream,
)

if TYPE_CHECKING:
    from holdfast.registry.merging.merge_plan import Blend

#: Memory for reading, beside the group that is made of it and what encoding that takes.
_READING_BYTES = 96 * 2**20
_NAMED_AT_MOST = 8


class Mixed(NamedTuple):
    """A merged state on the store.

    Attributes:
        written: What and where it is.
        nonfinite: Paths of watched tensors that hold NaN or infinity, the first few.
    """

    written: Written
    nonfinite: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Part:
    """One chunk of the result.

    Attributes:
        blend: The tensor that it is of.
        number: Its place in the grid.
        piece: The chunk that it is, or those that it is the average of.
        digest: Its id, as soon as that is known.
    """

    blend: Blend
    number: int
    piece: Piece
    digest: Digest | None


class _Made(NamedTuple):
    """What became of chunks: their bytes, where they are wanted, and what is wrong with them."""

    digest: Digest
    view: memoryview | None
    is_finite: bool
    overflows: bool


class Mixing:
    """One merged state being stored.

    Args:
        store: Where.
        writer: Chooses the keys, for the run that is to hold it.
        materials: The states that it is made of, by number.
        weights: Of the sources of averages, the first of the materials.
        state: Its skeletons; arrays have their names and shapes alone.
        blends: What the arrays are made of, by component.
        watched: Patterns of paths that are looked at for NaN and infinity.
        allow_nonfinite: Whether finite numbers may have an average that is not.
    """

    def __init__(
        self,
        store: Store,
        writer: Writer,
        materials: Sequence[StateReader],
        weights: Sequence[float],
        state: FlatState,
        blends: Mapping[str, Sequence[Blend]],
        watched: Sequence[str],
        *,
        allow_nonfinite: bool,
    ) -> None:
        self._store = store
        self._writer = writer
        self._materials = materials
        self._weights = weights
        self._state = state
        self._blends = blends
        self._watched = watched
        self._allow_nonfinite = allow_nonfinite
        self._parts: dict[int, list[_Part]] = {}
        self._inline: dict[int, bytes] = {}
        self._spots: dict[Digest, ChunkLocation] = {}
        self._made: dict[Digest, bool] = {}
        self._nonfinite: dict[str, None] = {}
        self._lists: dict[Digest, bytes] = {}
        self._components: dict[str, Component] = {}

    def store(self, bases: Sequence[PlacedState], codec: str) -> Mixed:
        """Put it on the store.

        Args:
            bases: States of the run, among them those materials that it holds.
            codec: How chunks are encoded; a name of `holdfast.registry.storage.codecs`.

        Raises:
            IntegrityError: A material is damaged or gone.
            InvalidInput: Reading the result would take more memory than allowed.
            UnsupportedValue: An average of finite numbers is none. What was stored before it was
                met is garbage, as of any save that was broken off.
        """
        skeletons = [canonical.encode(part.skeleton) for part in self._state.components]
        check_readable(self._state, skeletons)
        sound = [base for base in bases if not self._is_suspect(base)]
        self._cut()
        self._spots = self._find(sound)
        written = write_stream(
            self._store,
            self._writer,
            self._groups(),
            lambda: (Manifest(self._state.kind, self._components), self._lists),
            bases=sound,
            locations=self._spots,
            codec=codec,
        )
        return Mixed(written, tuple(self._nonfinite)[:_NAMED_AT_MOST])

    def _is_suspect(self, base: PlacedState) -> bool:
        return not self._writer.suspect.isdisjoint(placed_keys(base.place, base.placement))

    def _each(self) -> Iterator[Blend]:
        for part in self._state.components:
            yield from self._blends[part.name]

    def _cut(self) -> None:
        """Cut every tensor into chunks; compute those that are too small to have any."""
        for blend in self._each():
            if blend.entries[0].inline is not None:
                self._inline[id(blend)] = self._small(blend)
                continue
            sizes = blend.entries[0].grid.sizes()
            chunks = [
                self._materials[of].chunk_digests(entry)
                for of, entry in zip(blend.sources, blend.entries, strict=True)
            ]
            parts = []
            for number, (size, *digests) in enumerate(zip(sizes, *chunks, strict=True)):
                same = len(set(digests)) == 1
                piece = Piece(tuple(digests[:1] if same else digests), blend.leaf.dtype, size)
                parts.append(_Part(blend, number, piece, digests[0] if same else None))
            self._parts[id(blend)] = parts

    def _small(self, blend: Blend) -> bytes:
        data = [entry.inline or b"" for entry in blend.entries]
        found = data[0]
        if len(data) > 1:
            made, overflows = self._average(data, blend.leaf.dtype)
            self._check_range(blend, overflows)
            found = bytes(made)
        if self._is_watched(blend) and not _is_finite(memoryview(found), blend.leaf.dtype):
            self._nonfinite[blend.leaf.path] = None
        return found

    def _find(self, bases: Sequence[PlacedState]) -> dict[Digest, ChunkLocation]:
        """Return where lies what is kept, under keys that may be named."""
        own = locations_of(bases)
        held = {base.manifest.digest for base in bases}
        others = [one.base() for one in self._materials if one.digest not in held]
        if not others:
            return own
        wanted = {part.digest for parts in self._parts.values() for part in parts if part.digest}
        lists = [blend.entries[0].chunk_list for blend in self._each() if not blend.is_average]
        wanted.update(digest for digest in lists if digest)
        return shorter(own, borrow(self._store, self._writer, locations_of(others), wanted))

    def _groups(self) -> Iterator[list[Chunk]]:
        """Yield what is to be stored, as much as one pack may hold."""
        cut = (
            (group_name(part), one.piece.nbytes, one)
            for part in self._state.components
            for blend in self._blends[part.name]
            for one in self._parts.get(id(blend), ())
        )
        for group in cut_groups(cut):
            yield self._make(group)
        for part in self._state.components:
            lists: dict[Digest, bytes] = {}
            entries = [self._entry(blend, lists) for blend in self._blends[part.name]]
            self._components[part.name] = Component.build(part.skeleton, entries)
            self._lists.update(lists)
            yield [Chunk(digest, memoryview(data)) for digest, data in lists.items()]

    def _make(self, group: Sequence[_Part]) -> list[Chunk]:
        """Return the chunks of a group that are not stored, computed or copied."""
        by_sources: dict[tuple[int, ...], list[_Part]] = {}
        for part in group:
            if part.digest is None:
                by_sources.setdefault(part.blend.sources, []).append(part)
            elif self._is_wanted(part):
                by_sources.setdefault(part.blend.sources[:1], []).append(part)
        chunks = []
        for sources, parts in by_sources.items():
            found = reduce_pieces(
                [self._materials[of] for of in sources],
                [part.piece for part in parts],
                self._reduce,
                budget_bytes=_READING_BYTES,
            )
            for part in parts:
                made = found[part.piece]
                self._check_range(part.blend, made.overflows)
                part.digest = made.digest
                self._made[made.digest] = made.is_finite
                if made.view is not None:
                    chunks.append(Chunk(made.digest, made.view, part.blend.leaf, part.number))
        for part in group:
            sound = part.digest is None or self._made.get(part.digest, True)
            if not sound and self._is_watched(part.blend):
                self._nonfinite[part.blend.leaf.path] = None
        return chunks

    def _is_wanted(self, part: _Part) -> bool:
        """Tell whether the bytes of a chunk that is kept are needed."""
        if part.digest in self._made:
            return False
        return part.digest not in self._spots or self._is_watched(part.blend)

    def _is_watched(self, blend: Blend) -> bool:
        path = blend.leaf.path
        return _has_nan(blend.leaf.dtype) and any(fnmatchcase(path, one) for one in self._watched)

    def _reduce(self, piece: Piece, views: Sequence[memoryview]) -> _Made:
        overflows = False
        if len(views) > 1:
            view, overflows = self._average(views, piece.dtype)
            digest = Digest.of(view)
        else:
            digest, view = piece.digests[0], views[0]
        sound = not self._watched or not _has_nan(piece.dtype) or _is_finite(view, piece.dtype)
        if digest in self._spots:
            return _Made(digest, None, sound, overflows)
        # The memory of a chunk that was only read is used again for others.
        kept = view if len(views) > 1 else memoryview(bytes(view))
        return _Made(digest, kept, sound, overflows)

    def _average(self, data: Sequence[memoryview | bytes], dtype: str) -> tuple[memoryview, bool]:
        from holdfast.registry.merging.averaging import (
            average,  # with numpy, which picking needs not
        )

        made = memoryview(bytearray(len(data[0])))
        views = [memoryview(one) for one in data]
        return made, average(views, self._weights, dtype, made)

    def _check_range(self, blend: Blend, overflows: bool) -> None:
        if overflows and not self._allow_nonfinite:
            raise UnsupportedValue(
                "an average of finite numbers would be infinity or NaN",
                where=blend.leaf.path,
                expected=f"sums that {blend.leaf.dtype} holds, and what leads to them too",
                hint="Weights of 0 to 1 keep it in range; or pick the tensor from one of the "
                "sources, or pass allow_nonfinite=True.",
            )

    def _entry(self, blend: Blend, lists: dict[Digest, bytes]) -> TensorEntry:
        """Return a tensor as it stands in the manifest, once its chunks are known."""
        first = blend.entries[0]
        if first.inline is not None:
            return replace(first, inline=self._inline[id(blend)])
        digests = tuple(part.digest for part in self._parts[id(blend)] if part.digest)
        made = chunked_entry(blend.leaf, digests, lists)
        return replace(first, chunks=made.chunks, chunk_list=made.chunk_list)


def _has_nan(dtype: str) -> bool:
    return dtype in FLOATING or dtype.startswith("complex")


def _is_finite(view: memoryview, dtype: str) -> bool:
    from holdfast.registry.comparing.elements import summarise  # with numpy, likewise

    found = summarise(view, dtype)
    return not found.nans and not found.infs
