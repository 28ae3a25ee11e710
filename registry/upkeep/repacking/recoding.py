"""Choose the encoding of each chunk in a repack: compressed, as a delta, or as it is.

After a repack every chunk of a batch has one encoding, whichever states name it. It starts from the
encoding that the chunk has, or, of several, the one with the shortest chain of bases. Then come:

- *compression*, if it was asked for: other chunks are stored in that codec, by the rule of a save
  (`holdfast.registry.writing.encoding`), or raw again;
- *short chains*, if they were asked for: a delta with too many bases below it is stored whole;
- *bases that no state names*: a chunk that is kept only for deltas on it is dropped, and the deltas
  are stored again, whole or against the nearest chunk of their chain that a state names, if all of
  it together then takes fewer bytes.

Chunks are read and encoded here to learn their real lengths, so a second repack finds nothing to
do. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from holdfast.registry.errors import Malformed
from holdfast.registry.history.actions import Place
from holdfast.registry.objects import MAX_DEPTH, Manifest, ObjectKey, PackEntry, Placement
from holdfast.registry.objects.codecs import AUTO, RAW, ZSTD, stored_as
from holdfast.registry.pytree import NamedLeaf
from holdfast.registry.store import Store, in_batches, read_lists
from holdfast.registry.upkeep.repacking.chunks import (
    ChunkEncoder,
    RawChunks,
    StoredChunk,
    encode_chunk,
)
from holdfast.registry.upkeep.repacking.survey import VERIFY_DEEP, Chunk, Survey, chunk_of
from holdfast.registry.values import Digest
from holdfast.registry.writing import DELTA_WORTH, Encoding

#: A tensor as it is stored: its element type, and its chunks in order with their lengths.
_Tensor = tuple[str, Sequence[Digest], tuple[int, ...]]


@dataclass(slots=True)
class Tensors:
    """The tensors of chunks."""

    #: Element type of each chunk; the first tensor's if several have it. Digest lists have none.
    dtypes: dict[Digest, str] = field(default_factory=dict)
    #: The chunks of each tensor that no tensor before it has, in order.
    groups: list[list[Digest]] = field(default_factory=list)
    #: Length of each known chunk in bytes, digest lists included.
    sizes: dict[Digest, int] = field(default_factory=dict)


def read_tensors(
    store: Store, survey: Survey, wanted: Collection[Digest], known: Collection[Digest]
) -> Tensors:
    """Find the tensors of wanted chunks, and the lengths of known ones, in manifests of states."""
    found = Tensors()
    seen: set[Digest] = set()
    # Runs that share a state and its placement have a place each for it; one of them is enough.
    distinct: dict[tuple[Digest, Digest], Place] = {}
    for places in survey.packs_of.values():
        for place, named in places.items():
            if named:
                distinct.setdefault((place.manifest, place.placement), place)

    def read(place: Place) -> tuple[Manifest, list[_Tensor]]:
        placement = store.placement(place.placement_key)
        manifest = store.manifest(place.manifest_key).part(placement.components)
        return manifest, list(_tensors(store, placement, manifest))

    for manifest, tensors in in_batches(store.pools.bulk, read, distinct.values()):
        lists = ((d, manifest.direct_chunks[d]) for d in manifest.chunk_lists)
        found.sizes.update((d, size) for d, size in lists if d in known)
        for dtype, digests, sizes in tensors:
            found.sizes.update((d, n) for d, n in zip(digests, sizes, strict=True) if d in known)
            fresh = [d for d in dict.fromkeys(digests) if d in wanted and d not in seen]
            seen.update(fresh)
            found.dtypes.update(dict.fromkeys(fresh, dtype))
            if fresh:
                found.groups.append(fresh)
    return found


def _tensors(store: Store, placement: Placement, manifest: Manifest) -> Iterator[_Tensor]:
    lists = read_lists(store, manifest, placement)
    for tensor in manifest.tensors():
        if tensor.inline is None:
            yield tensor.dtype, tensor.chunk_digests(lists), tensor.grid.sizes()


def check_bases(entries: Collection[tuple[ObjectKey, PackEntry]]) -> None:
    """Compare the lengths of deltas with those of their bases: they are joined byte by byte."""
    lengths: dict[Digest, int] = {}
    for key, entry in entries:
        length = lengths.setdefault(entry.digest, entry.raw_bytes)
        _check_length(key, entry, length, "as another table has it")
    for key, entry in entries:
        if entry.base is not None and entry.base in lengths:
            _check_length(key, entry, lengths[entry.base], "as its base has")


def check_sizes(
    entries: Iterable[tuple[ObjectKey, PackEntry]],
    sizes: Mapping[Digest, int],
    named: Collection[Digest],
) -> None:
    """Compare the lengths in tables with the manifests, because memory is allocated by them."""
    for key, entry in entries:
        if entry.digest in sizes:
            _check_length(key, entry, sizes[entry.digest], "as its manifest has it")
        elif entry.digest in named:
            raise Malformed(
                "a placement names a chunk that no manifest has",
                where=f"{key}: {entry.digest}",
                hint=VERIFY_DEEP,
            )


def _check_length(key: ObjectKey, entry: PackEntry, length: int, of_what: str) -> None:
    if entry.raw_bytes != length:
        raise Malformed(
            "a pack gives a chunk another length than it has",
            where=f"{key}: {entry.digest}",
            expected=f"{length} bytes, {of_what}",
            found=entry.raw_bytes,
            hint=VERIFY_DEEP,
        )


#: Batches of chunks that are encoded at once.
_BATCHES_IN_FLIGHT = 4
#: About the bytes of a line in the table of a pack, and of each digest more in it.
_LINE_BYTES, _DIGEST_BYTES = 110, 64
#: Bytes by which a row of a placement may grow when its chunk gets another length.
_ROW_BYTES = 24

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True, slots=True)
class Recoding:
    """The chunks whose encoding changes."""

    #: The new encoding of each of them; `None` where nothing needs it any more.
    replacements: Mapping[Chunk, Chunk | None] = field(default_factory=dict)
    #: The new encodings that are not stored yet, as entries at offset 0.
    made: Mapping[Chunk, PackEntry] = field(default_factory=dict)
    encoder: ChunkEncoder | None = None


def plan_recoding(
    store: Store, survey: Survey, codec: str | None = None, keyframe_every: int | None = None
) -> Recoding:
    """Choose the encoding of every chunk."""
    if not survey.is_recoded:
        return Recoding()
    forest = _Forest(store, survey, AUTO if codec == AUTO else ZSTD)
    if codec is not None:
        codec = stored_as(codec)
        forest.recode(codec)
    if keyframe_every is not None:
        forest.shorten_chains(keyframe_every)
    if codec != RAW:
        forest.drop_unnamed_bases(codec)
    return forest.recoding()


class _Forest:
    """The new encoding of each chunk; deltas and their bases form trees."""

    def __init__(self, store: Store, survey: Survey, zstd: str) -> None:
        self._store = store
        self._survey = survey
        self._zstd = zstd
        self._stored: dict[Chunk, StoredChunk] = {}
        self._ranks: dict[Digest, int] = {}
        self._uses: dict[Digest, int] = {}
        self._fixed = set(survey.fixed)
        self._note()
        self._forms = self._choose()
        self._sources = {d: self._stored[chunk_of(entry)] for d, entry in self._forms.items()}
        self._known: Tensors | None = None
        self._drop_unneeded()

    def _note(self) -> None:
        entries: list[tuple[ObjectKey, PackEntry]] = []
        for key, named in self._survey.ranks.items():
            table, pack = self._survey.tables[key], self._survey.packs[key]
            for offset, rank in named.items():
                entry = table[offset]
                self._stored.setdefault(chunk_of(entry), (pack, entry))
                entries.append((key, entry))
                self._ranks[entry.digest] = min(rank, self._ranks.get(entry.digest, rank))
                if key not in self._survey.within:
                    self._fixed.add(entry.digest)
            for offset, count in self._survey.own[key].items():
                digest = table[offset].digest
                self._uses[digest] = self._uses.get(digest, 0) + count
        check_bases(entries)

    def _choose(self) -> dict[Digest, PackEntry]:
        """Return of each chunk the encoding with the shortest chain of bases."""
        waiting: dict[Digest, list[PackEntry]] = {}
        for _, entry in self._stored.values():
            waiting.setdefault(entry.digest, []).append(entry)
        forms: dict[Digest, PackEntry] = {}

        def order(entry: PackEntry) -> tuple[object, ...]:
            # Prefer bases that states name: a repack that broke off left deltas on both kinds.
            is_loose = entry.base is not None and entry.base not in self._uses
            return is_loose, entry.stored_bytes, entry.codec, entry.base or b""

        levels = 0
        while waiting:
            level = {
                digest: min(ready, key=order)
                for digest, entries in waiting.items()
                if (ready := [e for e in entries if e.base is None or e.base in forms])
            }
            if not level:
                break  # a base is missing: the load of a state that needs it will fail
            if levels > MAX_DEPTH:  # each level costs a pass over all waiting chunks
                raise Malformed(
                    "a chain of deltas is too long",
                    where=self._stored[chunk_of(next(iter(level.values())))][0].key,
                    expected=f"at most {MAX_DEPTH}",
                    found=f"{levels} or more",
                    hint=VERIFY_DEEP,
                )
            levels += 1
            forms |= level
            waiting = {d: entries for d, entries in waiting.items() if d not in level}
        self._fixed |= waiting.keys()
        return forms

    @cached_property
    def _chunks(self) -> RawChunks:
        return RawChunks(self._store, self._sources)

    # What a chunk costs

    def _weight(self, entry: PackEntry) -> int:
        lines = (entry.base is not None) + (entry.stored_digest is not None)
        return entry.stored_bytes + _LINE_BYTES + lines * _DIGEST_BYTES

    def _gains(self, before: Iterable[PackEntry], after: Sequence[PackEntry]) -> bool:
        """Return whether the store gets smaller, the lines in tables and placements included."""
        rows = sum(self._uses.get(entry.digest, 0) for entry in after) * _ROW_BYTES
        return sum(map(self._weight, after)) + rows < sum(map(self._weight, before))

    # Compression

    def recode(self, codec: str) -> None:
        """Store the chunks of other codecs in this one."""
        wanted = {d for d, e in self._forms.items() if e.codec != codec and d not in self._fixed}
        if codec == RAW:
            if wanted:
                self._tensors()  # check the lengths first: memory is allocated by them
            self._forms |= {digest: _raw(self._forms[digest]) for digest in wanted}
            self._drop_unneeded()
            return
        groups = [
            [digest for digest in group if digest in wanted]
            for group in (self._tensors().groups if wanted else ())
        ]
        groups = [group for group in groups if group]
        # If the first chunk of a tensor does not shrink, the others are not tried.
        firsts = [group[0] for group in groups]
        shrunk = self._shrink(firsts, codec)
        self._shrink([d for group in groups if group[0] in shrunk for d in group[1:]], codec)

    def _shrink(self, digests: Sequence[Digest], codec: str) -> set[Digest]:
        """Store chunks in a codec where that is worth it; return these chunks."""

        def attempt(batch: list[Digest]) -> list[PackEntry]:
            bases = [base for digest in batch if (base := self._forms[digest].base) is not None]
            raw = self._chunks.read(dict.fromkeys([*batch, *bases]))
            return [self._encode(digest, codec, raw, self._forms[digest].base) for digest in batch]

        # In the order of packs, so that neighbours are read together.
        batches = self._chunks.batches(sorted(digests, key=self._source))
        found = [e for batch in self._in_flight(attempt, batches) for e in batch]
        changed = {entry.digest: entry for entry in found if self._is_better(entry)}
        self._forms |= changed
        return set(changed)

    def _is_better(self, entry: PackEntry) -> bool:
        before = self._forms[entry.digest]
        if entry.codec == RAW or entry.base != before.base:
            return False
        return before.codec != RAW or self._gains([before], [entry])

    def _source(self, digest: Digest) -> tuple[ObjectKey, int]:
        pack, entry = self._sources[digest]
        return pack.key, entry.offset

    # Chains

    def shorten_chains(self, keyframe_every: int) -> None:
        """Store a delta whole where its chain is too long."""
        links: dict[Digest, int] = {}
        long: list[Digest] = []
        for digest, entry in self._in_order():
            links[digest] = 0 if entry.base is None else links[entry.base] + 1
            if links[digest] >= keyframe_every and digest not in self._fixed:
                links[digest] = 0
                long.append(digest)

        def whole(batch: list[Digest]) -> list[PackEntry]:
            raw = self._chunks.read(batch)
            return [self._encode(digest, self._forms[digest].codec, raw) for digest in batch]

        if long:
            self._tensors()
        made = list(self._in_flight(whole, self._chunks.batches(long)))
        self._forms |= {entry.digest: entry for batch in made for entry in batch}
        self._drop_unneeded()

    def drop_unnamed_bases(self, codec: str | None) -> None:
        """Drop bases that no state names, where their deltas take fewer bytes without them."""
        groups: dict[Digest, list[Digest]] = {}
        tops: dict[Digest, Digest] = {}
        for digest, entry in self._in_order():
            if digest not in self._uses:
                top = digest if entry.base is None else tops.get(entry.base, digest)
                tops[digest] = top
                groups.setdefault(top, []).append(digest)
            elif entry.base in tops:
                groups[tops[entry.base]].append(digest)
        wanted = [group for group in groups.values() if self._fixed.isdisjoint(group)]
        if not wanted:
            return
        self._tensors()
        found = list(self._in_flight(lambda group: self._without_bases(group, codec), wanted))
        for entries in found:
            self._forms |= {entry.digest: entry for entry in entries}
        self._drop_unneeded()

    def _without_bases(self, group: Sequence[Digest], codec: str | None) -> list[PackEntry]:
        """Return the deltas of a chain encoded without bases; nothing if that gains nothing."""
        deltas = sorted((d for d in group if d in self._uses), key=self._ranks.__getitem__)
        # The first of a chain is its lowest base; a state names the base below that one.
        anchor = self._forms[group[0]].base
        after = []
        for digest in deltas:
            below = deltas[0] if anchor is None else anchor
            raw = self._chunks.read(dict.fromkeys([digest, below]))
            chosen = codec or self._forms[digest].codec
            after.append(self._encode(digest, chosen, raw, None if below == digest else below))
        return after if self._gains([self._forms[digest] for digest in group], after) else []

    def _drop_unneeded(self) -> None:
        """Forget chunks that no state names and that are no base of a kept chunk."""
        needed = set(self._fixed)
        for chunk in self._stored:
            if chunk.digest in self._fixed and chunk.base is not None:
                needed.add(chunk.base)
        for digest, entry in reversed(self._in_order()):
            if digest in self._uses or digest in needed:
                needed.add(digest)
                if entry.base is not None:
                    needed.add(entry.base)
        self._forms = {d: entry for d, entry in self._forms.items() if d in needed}

    def _in_order(self) -> list[tuple[Digest, PackEntry]]:
        """Return all chunks, each after its base."""
        links: dict[Digest, int] = {}
        for digest in self._forms:
            chain: list[Digest] = []
            below: Digest | None = digest
            while below is not None and below not in links:
                chain.append(below)
                below = self._forms[below].base
            count = -1 if below is None else links[below]
            links |= {one: n for n, one in enumerate(reversed(chain), count + 1)}
        return sorted(self._forms.items(), key=lambda item: links[item[0]])

    # Encoding

    def _tensors(self) -> Tensors:
        if self._known is None:
            known = self._ranks.keys()
            self._known = read_tensors(self._store, self._survey, self._uses.keys(), known)
            entries = ((pack.key, entry) for pack, entry in self._stored.values())
            check_sizes(entries, self._known.sizes, self._uses.keys())
            # A base that no state names has the type of the deltas on it.
            for digest, entry in reversed(self._in_order()):
                if entry.base is not None and digest in self._known.dtypes:
                    self._known.dtypes.setdefault(entry.base, self._known.dtypes[digest])
        return self._known

    def _encode(
        self,
        digest: Digest,
        codec: str,
        raw: Mapping[Digest, memoryview],
        base: Digest | None = None,
    ) -> PackEntry:
        """Return the entry of a chunk as a save would store it."""
        dtype, data = self._tensors().dtypes.get(digest), raw[digest]
        leaf = None if dtype is None else NamedLeaf(dtype, (), len(data), "")
        # A new `Encoding` for each, so that the order of the chunks does not matter.
        found = Encoding(self._zstd if codec == ZSTD else codec).encode(data, leaf)
        if base is not None and dtype is not None:
            delta = encode_chunk(data, raw[base], codec, dtype)
            if len(delta) <= DELTA_WORTH * len(found.stored):
                stored = Digest.of(delta)
                return PackEntry(digest, 0, len(delta), len(data), codec, base, stored)
        return PackEntry(digest, 0, len(found.stored), len(data), found.codec, None, found.digest)

    def _in_flight(self, work: Callable[[_In], _Out], items: Iterable[_In]) -> Iterator[_Out]:
        return in_batches(self._store.pools.bulk, work, items, at_once=_BATCHES_IN_FLIGHT)

    def recoding(self) -> Recoding:
        """Return the chunks whose encoding changes."""
        replacements: dict[Chunk, Chunk | None] = {}
        made: dict[Chunk, PackEntry] = {}
        for chunk in self._stored:
            form = self._forms.get(chunk.digest)
            if chunk.digest in self._fixed:
                continue
            final = None if form is None else chunk_of(form)
            if final == chunk:
                continue
            replacements[chunk] = final
            if form is not None and final is not None and final not in self._stored:
                made[final] = form
        dtypes = self._known.dtypes if self._known is not None else {}
        encoder = ChunkEncoder(self._sources, dtypes, self._zstd) if made else None
        return Recoding(replacements, made, encoder)


def _raw(entry: PackEntry) -> PackEntry:
    return PackEntry(entry.digest, 0, entry.raw_bytes, entry.raw_bytes)
