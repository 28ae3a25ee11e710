"""Store a merged state: read, average and pack its chunks, a batch at a time.

Tensors that are kept name the chunks that are already stored: these are not stored again. They are
not read, except to prove a pack of another run once. Memory is bounded, whatever the size of the
state or of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from holdfast.registry.comparing import PARTS, Piece, blocks, decoded, float8_values, reduce_pieces
from holdfast.registry.errors import Hint, UnsupportedValue
from holdfast.registry.history import PlacedState, StateReader
from holdfast.registry.objects import Component, Manifest, ObjectKey, PackRef, TensorEntry
from holdfast.registry.pytree import FlatState
from holdfast.registry.store import Store, Workers
from holdfast.registry.values import Digest, canonical, item_size
from holdfast.registry.writing import (
    NAMED_AT_MOST,
    Chunk,
    ChunkLocation,
    ObjectWriter,
    Written,
    check_readable,
    chunked_entry,
    cut_groups,
    group_name,
    is_finite,
    is_watched,
    locations_of,
    write_stream,
)

if TYPE_CHECKING:
    from holdfast.registry.deriving.merging.merge_plan import MergedTensor

_Array = np.ndarray[Any, Any]


def borrow(
    store: Store,
    writer: ObjectWriter,
    locations: Mapping[Digest, ChunkLocation],
    wanted: Iterable[Digest],
) -> dict[Digest, ChunkLocation]:
    """Return the locations of the wanted chunks that the run may name, and of their bases."""
    chains = [_chain(digest, locations) for digest in dict.fromkeys(wanted) if digest in locations]
    packs = {locations[digest].pack for chain in chains for digest in chain}
    usable = _usable(store, writer, packs)
    borrowed: dict[Digest, ChunkLocation] = {}
    for chain in chains:
        if all(locations[digest].pack in usable for digest in chain):
            for digest in chain:
                location = locations[digest]
                pack = PackRef(usable[location.pack], location.pack.size_bytes)
                borrowed[digest] = location._replace(pack=pack)
    return borrowed


def _chain(digest: Digest, locations: Mapping[Digest, ChunkLocation]) -> list[Digest]:
    chain = [digest]
    while (below := locations[chain[-1]].base) is not None:
        chain.append(below)
    return chain


def _usable(
    store: Store, writer: ObjectWriter, packs: Iterable[PackRef]
) -> dict[PackRef, ObjectKey]:
    writer.observe()  # before any key is chosen, and not by several threads at once

    def verified(_: Store, pack: PackRef) -> ObjectKey | None:
        return writer.verified(pack.key.digest, pack.size_bytes)

    asked = list(packs)
    found = zip(asked, Workers(None, store).all(verified, asked), strict=True)
    return {pack: key for pack, key in found if key is not None}


def shorter(
    one: Mapping[Digest, ChunkLocation], other: Mapping[Digest, ChunkLocation]
) -> dict[Digest, ChunkLocation]:
    """Return the locations of both; of two for one chunk, that with the shorter chain of deltas.

    So two chains that cross do not become a longer one.
    """
    better = {
        digest: location
        for digest, location in other.items()
        if digest not in one or len(_chain(digest, other)) < len(_chain(digest, one))
    }
    return {**one, **better}


#: Memory for reading; the group that is computed and its encoding take more.
_READING_BYTES = 96 * 2**20


@dataclass(slots=True, eq=False)
class _ResultChunk:
    """One chunk of the result."""

    tensor: MergedTensor
    number: int  # its number in the grid
    piece: Piece  # the chunk that is kept, or the chunks that are averaged
    digest: Digest | None  # its digest, as soon as it is known


class _Made(NamedTuple):
    """A computed or copied chunk: its bytes, if they are to be stored, and what is wrong there."""

    digest: Digest
    view: memoryview | None
    is_finite: bool
    overflows: bool


class Mixing:
    """Stores one merged state."""

    def __init__(
        self,
        store: Store,
        writer: ObjectWriter,
        inputs: Sequence[StateReader],
        weights: Sequence[float],
        state: FlatState,
        tensors: Mapping[str, Sequence[MergedTensor]],
        watched: Sequence[str],
        *,
        allow_nonfinite: bool,
    ) -> None:
        self._store = store
        self._writer = writer
        self._inputs = inputs
        self._weights = weights
        self._state = state
        self._tensors = tensors
        self._watched = watched
        self._allow_nonfinite = allow_nonfinite
        self._parts: dict[int, list[_ResultChunk]] = {}
        self._inline: dict[int, bytes] = {}
        self._locations: dict[Digest, ChunkLocation] = {}
        self._made: dict[Digest, bool] = {}
        self._nonfinite: dict[str, None] = {}
        self._lists: dict[Digest, bytes] = {}
        self._components: dict[str, Component] = {}

    def store(self, bases: Sequence[PlacedState], codec: str) -> Written:
        """Put the state on the store."""
        skeletons = [canonical.encode(part.skeleton) for part in self._state.components]
        check_readable(self._state, skeletons)
        sound = self._writer.sound(bases)
        self._cut()
        self._locations = self._find(sound)
        written = write_stream(
            self._store,
            self._writer,
            self._groups(),
            lambda: (Manifest(self._state.kind, self._components), self._lists),
            bases=sound,
            locations=self._locations,
            codec=codec,
        )
        return replace(written, nonfinite=tuple(self._nonfinite)[:NAMED_AT_MOST])

    def _each(self) -> Iterator[MergedTensor]:
        for part in self._state.components:
            yield from self._tensors[part.name]

    def _cut(self) -> None:
        """Cut every tensor into chunks; compute tensors that are too small to have any."""
        for tensor in self._each():
            if tensor.entries[0].inline is not None:
                self._inline[id(tensor)] = self._small(tensor)
                continue
            sizes = tensor.entries[0].grid.sizes()
            chunks = [
                self._inputs[of].chunk_digests(entry)
                for of, entry in zip(tensor.sources, tensor.entries, strict=True)
            ]
            parts = []
            for number, (size, *digests) in enumerate(zip(sizes, *chunks, strict=True)):
                same = len(set(digests)) == 1
                piece = Piece(tuple(digests[:1] if same else digests), tensor.leaf.dtype, size)
                parts.append(_ResultChunk(tensor, number, piece, digests[0] if same else None))
            self._parts[id(tensor)] = parts

    def _small(self, tensor: MergedTensor) -> bytes:
        data = [entry.inline or b"" for entry in tensor.entries]
        found = data[0]
        if len(data) > 1:
            made, overflows = self._average(data, tensor.leaf.dtype)
            self._check_range(tensor, overflows)
            found = bytes(made)
        if self._is_watched(tensor) and not is_finite(found, tensor.leaf.dtype):
            self._nonfinite[tensor.leaf.path] = None
        return found

    def _find(self, bases: Sequence[PlacedState]) -> dict[Digest, ChunkLocation]:
        """Return the locations of kept chunks in packs that the run may name."""
        own = locations_of(bases)
        held = {base.manifest.digest for base in bases}
        others = [one.base() for one in self._inputs if one.digest not in held]
        if not others:
            return own
        wanted = {part.digest for parts in self._parts.values() for part in parts if part.digest}
        lists = [one.entries[0].chunk_list for one in self._each() if not one.is_average]
        wanted.update(digest for digest in lists if digest)
        return shorter(own, borrow(self._store, self._writer, locations_of(others), wanted))

    def _groups(self) -> Iterator[list[Chunk]]:
        """Yield the chunks to store, as many as one pack may hold."""
        cut = (
            (group_name(part), one.piece.nbytes, one)
            for part in self._state.components
            for tensor in self._tensors[part.name]
            for one in self._parts.get(id(tensor), ())
        )
        for group in cut_groups(cut):
            yield self._make(group)
        for part in self._state.components:
            lists: dict[Digest, bytes] = {}
            entries = [self._entry(tensor, lists) for tensor in self._tensors[part.name]]
            self._components[part.name] = Component.build(part.skeleton, entries)
            self._lists.update(lists)
            yield [Chunk(digest, memoryview(data)) for digest, data in lists.items()]

    def _make(self, group: Sequence[_ResultChunk]) -> list[Chunk]:
        """Compute or copy the chunks of a group that are not stored yet, and return them."""
        by_sources: dict[tuple[int, ...], list[_ResultChunk]] = {}
        for part in group:
            if part.digest is None:
                by_sources.setdefault(part.tensor.sources, []).append(part)
            elif self._is_wanted(part):
                by_sources.setdefault(part.tensor.sources[:1], []).append(part)
        chunks = []
        for sources, parts in by_sources.items():
            found = reduce_pieces(
                [self._inputs[of] for of in sources],
                [part.piece for part in parts],
                self._reduce,
                budget_bytes=_READING_BYTES,
            )
            for part in parts:
                made = found[part.piece]
                self._check_range(part.tensor, made.overflows)
                part.digest = made.digest
                self._made[made.digest] = made.is_finite
                if made.view is not None:
                    chunks.append(Chunk(made.digest, made.view, part.tensor.leaf, part.number))
        for part in group:
            sound = part.digest is None or self._made.get(part.digest, True)
            if not sound and self._is_watched(part.tensor):
                self._nonfinite[part.tensor.leaf.path] = None
        return chunks

    def _is_wanted(self, part: _ResultChunk) -> bool:
        """Return whether the bytes of a kept chunk have to be read."""
        if part.digest in self._made:
            return False
        return part.digest not in self._locations or self._is_watched(part.tensor)

    def _is_watched(self, tensor: MergedTensor) -> bool:
        return is_watched(tensor.leaf, self._watched)

    def _reduce(self, piece: Piece, views: Sequence[memoryview]) -> _Made:
        overflows = False
        if len(views) > 1:
            view, overflows = self._average(views, piece.dtype)
            digest = Digest.of(view)
        else:
            digest, view = piece.digests[0], views[0]
        sound = not self._watched or is_finite(view, piece.dtype)
        if digest in self._locations:
            return _Made(digest, None, sound, overflows)
        # Copied, because the memory of a chunk that was only read is used again for others.
        kept = view if len(views) > 1 else memoryview(bytes(view))
        return _Made(digest, kept, sound, overflows)

    def _average(self, data: Sequence[memoryview | bytes], dtype: str) -> tuple[memoryview, bool]:
        made = memoryview(bytearray(len(data[0])))
        views = [memoryview(one) for one in data]
        return made, average(views, self._weights, dtype, made)

    def _check_range(self, tensor: MergedTensor, overflows: bool) -> None:
        if overflows and not self._allow_nonfinite:
            raise UnsupportedValue(
                "an average of finite numbers would be infinity or NaN",
                where=tensor.leaf.path,
                expected=f"sums and intermediate sums in the range of {tensor.leaf.dtype}",
                hint=Hint.of(
                    "Weights of 0 to 1 keep it in range; or pick the tensor from one source.",
                    Hint("Or pass allow_nonfinite=True."),
                ),
            )

    def _entry(self, tensor: MergedTensor, lists: dict[Digest, bytes]) -> TensorEntry:
        """Return the manifest entry of a tensor, once its chunks are known."""
        first = tensor.entries[0]
        if first.inline is not None:
            return first._replace(inline=self._inline[id(tensor)])
        digests = b"".join(part.digest for part in self._parts[id(tensor)] if part.digest)
        made = chunked_entry(tensor.leaf, digests, lists)
        return first._replace(chunks=made.chunks, chunk_list=made.chunk_list)


def average(
    sources: Sequence[memoryview], weights: Sequence[float], dtype: str, into: memoryview
) -> bool:
    """Write the weighted sum of elements, in the order of the sources.

    Each product and each sum is one operation in float32 (in float64 for float64 and complex128)
    with the weight rounded to that type first; the last sum is rounded to the stored type, ties to
    even. A source of weight 0 adds nothing, not even a NaN.
    """
    overflows = False
    kind = PARTS.get(dtype, dtype)
    wide = np.dtype("f8") if kind == "float64" else np.dtype("f4")
    with np.errstate(all="ignore"):
        for *data, out in blocks(kind, *sources, into):
            words = [np.frombuffer(one, f"<u{item_size(kind)}") for one in data]
            equal = words[0] == words[1] if len(words) > 1 else np.ones(words[0].shape, "?")
            for one in words[2:]:
                equal &= words[0] == one
            found = np.frombuffer(out, words[0].dtype)
            found[...] = _rounded(_sum(data, weights, kind, wide), kind)
            np.copyto(found, words[0], where=equal)
            overflows = overflows or _overflows(out, data, weights, kind)
    return overflows


def _overflows(
    made: memoryview, data: Sequence[memoryview], weights: Sequence[float], kind: str
) -> bool:
    wrong = ~np.isfinite(decoded(made, kind))
    if not wrong.any():
        return False
    for one, weight in zip(data, weights, strict=True):
        if weight:
            wrong &= np.isfinite(decoded(one, kind))
    return bool(wrong.any())


def _sum(data: Sequence[memoryview], weights: Sequence[float], kind: str, wide: Any) -> _Array:
    total: _Array | None = None
    for one, weight in zip(data, weights, strict=True):
        if weight:
            product = decoded(one, kind).astype(wide, copy=False) * wide.type(weight)
            total = product if total is None else np.add(total, product, out=total)
    if total is None:
        total = np.zeros(len(data[0]) // item_size(kind), wide)
    return total


def _rounded(total: _Array, kind: str) -> _Array:
    """Return the bits of the nearest element of each number."""
    if kind == "bfloat16":
        bits = total.view("u4")
        # To nearest, ties to even: up by a half less one, and by one more above an odd result.
        up = (bits >> np.uint32(16) & np.uint32(1)) + np.uint32(0x7FFF)
        rounded = ((bits + up) >> np.uint32(16)).astype("u2")
        return np.where(np.isnan(total), np.uint16(0x7FC0), rounded)
    if kind.startswith("float8"):
        return _rounded_float8(total, kind)
    # The bits of a NaN in a sum depend on its position in numpy's loops: make all of them equal.
    np.copyto(total, np.nan, where=np.isnan(total))
    return total.astype(kind).view(f"u{item_size(kind)}")


def _rounded_float8(total: _Array, kind: str) -> _Array:
    middles = _middles(kind)
    magnitude = np.abs(total.astype("f8"))
    code = np.searchsorted(middles, magnitude)  # below each middle, and at it, what is smaller
    tied = middles[np.minimum(code, len(middles) - 1)] == magnitude
    code += tied & (code % 2 == 1)
    if kind.endswith("uz"):  # 0x80, the code after the greatest number, is NaN; there is no -0
        code[np.signbit(total) & (code > 0) & (code < 0x80)] += 0x80
        code[np.isnan(total)] = 0x80
    else:
        code[np.isnan(total)] = 0x7F
        code[np.signbit(total)] += 0x80
    rounded: _Array = code.astype("u1")
    return rounded


@lru_cache
def _middles(kind: str) -> _Array:
    """Return the numbers half way between one code's number and the next code's.

    The last one is between the greatest number and the one that would follow it: larger numbers
    round to the next code, which is infinity or NaN, depending on the type.
    """
    values = float8_values(kind)[:0x80]
    values = values[np.isfinite(values)]
    values = np.append(values, 2 * values[-1] - values[-2])
    middles: _Array = (values[:-1] + values[1:]) / 2
    return middles
