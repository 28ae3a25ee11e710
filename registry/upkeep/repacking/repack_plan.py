"""Plan a repack: choose the packs to rewrite, and the chunks of the new packs.

Packs are planned in batches (`holdfast.registry.upkeep.repacking.catalog`), a small registry in
one. The plans depend only on the states that the runs need. So runs that share packs, and repacks
that work at the same time, plan the same new packs: a pack is named by its table. Nothing is
written here.

These packs are rewritten:

- packs whose share of dead bytes is `min_dead` or more: chunks that no run needs, or that another
  pack keeps. Of several packs with a chunk, the one with the most needed bytes keeps it; so a
  repack that broke off, which leaves old and new packs together, is finished by the next one
  without moving those bytes again;
- packs with chunks that get another encoding, or with bases of deltas that nothing needs then
  (`holdfast.registry.upkeep.repacking.recoding`);
- small packs, where putting them together leaves fewer files.

New packs hold chunks in the order in which the states of a run name them, oldest first, component
after component, whichever pack they came from. So chunks that are loaded together are together, and
ranged reads are long. Packs of a save never mix components, so that equal components of two runs
become equal packs; for the chunks that remain of such packs this has no use any more, so a new pack
is filled up to `PACK_BYTES` across components and saves. It is never filled across runs, so that a
save of one run does not change the packs of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import itemgetter
from typing import Literal

from holdfast.registry.errors import NotFound, RegistryError
from holdfast.registry.history.actions import Place
from holdfast.registry.objects import (
    MAX_DEPTH,
    PACK_BYTES,
    TRAILER_BYTES,
    ObjectKey,
    PackEntry,
    PackRef,
    PackTable,
)
from holdfast.registry.objects.codecs import stored_as
from holdfast.registry.store import Store, Workers
from holdfast.registry.upkeep.live import UNREADABLE, with_way_out
from holdfast.registry.upkeep.repacking.catalog import Catalog
from holdfast.registry.upkeep.repacking.chunks import ChunkEncoder
from holdfast.registry.upkeep.repacking.recoding import Recoding, plan_recoding
from holdfast.registry.upkeep.repacking.survey import Chunk, Survey, chunk_of, read_runs
from holdfast.registry.values import Digest, near


@dataclass(frozen=True)
class Target:
    """A pack that holds chunks after a repack: a new one, or one that is there."""

    table: PackTable  # its table of contents
    #: For each entry the pack and the offset of its bytes now; `None` where it has to be encoded.
    sources: tuple[tuple[PackRef, int] | None, ...]
    encoder: ChunkEncoder | None = None
    before_bytes: int = 0  # bytes of those chunks as they are stored now

    @cached_property
    def encoded(self) -> bytes:
        """Its table as it is stored."""
        return self.table.encode()

    @cached_property
    def name(self) -> Digest:
        """The digest that names the pack."""
        return Digest.of(self.encoded)

    def alone(self) -> Target:
        """Return the same with an encoder for its own chunks only, to be sent to a worker."""
        recoded = self.recoded
        only = self.encoder.only(recoded) if self.encoder is not None and recoded else None
        return replace(self, encoder=only)

    @property
    def unchanged(self) -> ObjectKey | None:
        """The pack with the same bytes, if all chunks come from it; otherwise `None`."""
        keys = {None if source is None else source[0].key for source in self.sources}
        return next((k for k in keys if len(keys) == 1 and k and k.digest == self.name), None)

    @property
    def recoded(self) -> list[PackEntry]:
        """Its chunks that have to be encoded."""
        pairs = zip(self.table, self.sources, strict=True)
        return [entry for entry, source in pairs if source is None]

    @property
    def recoded_bytes(self) -> int:
        """Bytes of these chunks after encoding."""
        return sum(entry.stored_bytes for entry in self.recoded)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of its chunks, as stored."""
        return sum(entry.stored_bytes for entry in self.table)

    @property
    def size_bytes(self) -> int:
        """Size of the whole file."""
        return self.chunk_bytes + len(self.encoded) + TRAILER_BYTES


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk of a new pack."""

    rank: int  # its position in the order of the runs' states
    entry: PackEntry  # its entry in the new table, with an offset that does not count
    #: The pack and the offset of its bytes; `None` where they have to be encoded.
    source: tuple[PackRef, int] | None
    before_bytes: int = 0  # its bytes as it is stored now, where it has to be encoded


class Targets:
    """Finds the target of a chunk: a new pack, or one that stays."""

    def __init__(
        self,
        survey: Survey,
        new: Iterable[Target],
        homes: Mapping[Chunk, tuple[ObjectKey, PackEntry]],
    ) -> None:
        self._survey = survey
        self._new = {chunk_of(entry): (target, entry) for target in new for entry in target.table}
        self._homes = homes
        self._existing: dict[ObjectKey, Target] = {}

    def find(self, chunk: Chunk | None) -> tuple[Target, PackEntry] | None:
        """Return the target of a chunk and its entry there; `None` where nothing needs it."""
        if chunk is None or chunk in self._new or chunk not in self._homes:
            return None if chunk is None else self._new.get(chunk)
        home, entry = self._homes[chunk]
        if home not in self._existing:
            entries = tuple(self._survey.tables[home].values())
            pack = self._survey.packs[home]
            sources = tuple((pack, one.offset) for one in entries)
            self._existing[home] = Target(PackTable(entries), sources)
        return self._existing[home], entry


#: Packs smaller than this are put together.
SMALL_BYTES = 16 * 2**20

Reason = Literal["dead", "recoded", "small"]


@dataclass(frozen=True, slots=True)
class RewrittenPack:
    """A pack whose chunks are moved to others."""

    pack: ObjectKey  # its key
    size_bytes: int
    live_bytes: int  # bytes of the chunks that are moved out of it, as they are stored in it
    #: Why: too many of its bytes are `dead`, because no run needs them or another pack keeps them;
    #: chunks of it are `recoded`, or bases that nothing needs any more; or it is `small`.
    reason: Reason


@dataclass(frozen=True)
class RepackPlan:
    """The plan of a repack, or of one of its batches."""

    rewritten: Mapping[ObjectKey, RewrittenPack]  # the packs to rewrite, by key
    new: tuple[Target, ...]  # the packs to make
    #: The needed chunks of rewritten packs, by pack and offset: their target, and their entry
    #: there.
    moves: Mapping[ObjectKey, Mapping[int, tuple[Target, PackEntry]]]
    #: The places of each run that needs a rewritten pack, each with the rewritten packs that it
    #: names: where there are any, it needs a new place.
    places: Mapping[str, Mapping[Place, frozenset[ObjectKey]]]
    #: The targets of bases that recoded deltas need, and of the bases below them.
    locations: Mapping[Digest, tuple[Target, PackEntry]]
    #: The tables of the packs of the batch, by offset.
    tables: Mapping[ObjectKey, Mapping[int, PackEntry]]
    bases: Mapping[Chunk, int]  # bytes of each base of deltas that nothing needs any more
    moved: dict[tuple[str, Place], Place]  # gets new places of states, by run and old place


def plan_repack(
    store: Store,
    runs: Iterable[str] | None = None,
    *,
    min_dead: float = 0.25,
    codec: str | None = None,
    keyframe_every: int | None = None,
    workers: Workers | None = None,
) -> Iterator[RepackPlan]:
    """Choose the packs to rewrite, batch by batch: one is planned when the last is carried out."""
    chosen = None if runs is None else list(runs)
    catalog = _catalog(store, chosen, workers or Workers(None, store))
    for name in chosen or ():
        if name not in catalog.runs:
            hint = near(name, catalog.runs)
            raise NotFound("no such run", where=f"{store.backend.url}: {name}", hint=hint)

    def plan(survey: Survey) -> RepackPlan:
        recoding = plan_recoding(store, survey, codec, keyframe_every)
        return _Planner(survey, min_dead, recoding).plan()

    stored = None if codec is None else stored_as(codec)
    asked = catalog.runs if chosen is None else chosen
    for batch in catalog.batches(asked, stored, keyframe_every is not None, SMALL_BYTES, min_dead):
        # Nothing here refers to a plan or survey that is done with: the next one takes its memory.
        yield plan(catalog.survey(batch))


def _catalog(store: Store, chosen: Collection[str] | None, workers: Workers) -> Catalog:
    """Find what the runs need, without unreadable ones that are given up or not chosen."""
    unreadable: dict[str, RegistryError] = {}
    while True:
        failed: dict[str, RegistryError] = {}
        catalog = Catalog(store, workers, failed)
        try:
            catalog.read(read_runs(store, unreadable))
            break
        except UNREADABLE:
            if not failed:
                raise
            unreadable |= failed
    for name, error in unreadable.items():
        if chosen is None or name in chosen:
            raise with_way_out(error, name, "the others are repacked; or name the runs to repack")
    return catalog


class _Planner:
    """Chooses the packs to rewrite and the targets of their chunks."""

    def __init__(self, survey: Survey, min_dead: float, recoding: Recoding | None = None) -> None:
        self._survey = survey
        self._recoding = recoding or Recoding()
        self._ranks: dict[Chunk, int] = {}
        self._origins: dict[Chunk, tuple[int, ObjectKey, PackEntry]] = {}
        self._bases: dict[Chunk, int] = {}
        self._changed: set[ObjectKey] = set()
        self._rank_chunks()
        self._rank_bases()
        self._homes = self._find_homes()
        self._made_from = self._find_origins()
        self._mostly_dead: list[ObjectKey] = []
        self._small: list[ObjectKey] = []
        for key in (one for one in survey.packs if one in survey.within):
            if key in self._changed:
                self._mostly_dead.append(key)
                continue
            table = survey.tables[key].values()
            held = sum(entry.stored_bytes for entry in table)
            live = self._live_bytes(key)
            if live < held and held - live >= min_dead * held:
                self._mostly_dead.append(key)
            elif survey.packs[key].size_bytes < SMALL_BYTES:
                self._small.append(key)

    def plan(self) -> RepackPlan:
        reasons: dict[ObjectKey, Reason] = {}
        new: list[Target] = []
        dead, small = self._by_run(self._mostly_dead), self._by_run(self._small)
        for run_id in self._survey.packs_of:
            dead_here, small_here = dead.get(run_id, []), small.get(run_id, [])
            made = list(self._fill(dead_here))
            together = list(self._fill([*dead_here, *small_here]))
            reasons |= {key: "recoded" if self._is_recoded(key) else "dead" for key in dead_here}
            if len(together) < len(made) + len(small_here):
                reasons |= dict.fromkeys(small_here, "small")
                made = together
            new += made
        # A pack that would be written again with the same bytes stays.
        same = {key for target in new if (key := target.unchanged) is not None}
        reasons = {key: reason for key, reason in reasons.items() if key not in same}
        new = [target for target in new if target.unchanged is None]
        targets = Targets(self._survey, new, self._homes)
        return RepackPlan(
            {key: self._rewritten(key, reason) for key, reason in reasons.items()},
            tuple(new),
            {key: self._moves(key, targets) for key in reasons},
            self._places(reasons),
            self._locations(targets),
            self._survey.tables,
            self._bases,
            self._survey.moved,
        )

    def _rank_chunks(self) -> None:
        """Rank every chunk that stays needed in the order of the runs' states."""
        for key, named in self._survey.ranks.items():
            table = self._survey.tables[key]
            for offset, rank in named.items():
                entry = table[offset]
                chunk = self._final(entry)
                if chunk != chunk_of(entry):
                    self._changed.add(key)
                if chunk is None:
                    self._bases[chunk_of(entry)] = entry.stored_bytes
                    continue
                self._ranks[chunk] = min(rank, self._ranks.get(chunk, rank))
                if chunk in self._recoding.made:
                    first = (rank, key, entry)
                    self._origins[chunk] = min(
                        first, self._origins.get(chunk, first), key=itemgetter(0)
                    )

    def _rank_bases(self) -> None:
        """Rank new bases right after the first delta on them: its state names them too."""
        by_digest = {chunk.digest: chunk for chunk in self._ranks}
        for chunk in self._recoding.replacements.values():
            for _ in range(MAX_DEPTH):
                if chunk is None or chunk.base not in by_digest:
                    break
                base = by_digest[chunk.base]
                self._ranks[base] = min(self._ranks[base], self._ranks[chunk] | 1)
                chunk = base

    def _final(self, entry: PackEntry) -> Chunk | None:
        """Return a chunk in its new encoding; `None` where nothing needs it any more."""
        chunk = chunk_of(entry)
        return self._recoding.replacements.get(chunk, chunk)

    def _find_homes(self) -> dict[Chunk, tuple[ObjectKey, PackEntry]]:
        """Return the pack that keeps each needed chunk, and its entry there."""

        def order(key: ObjectKey) -> tuple[object, ...]:
            entries = self._survey.tables[key].values()
            needed = sum(e.stored_bytes for e in entries if chunk_of(e) in self._ranks)
            # A condemned pack is the last choice: no other run may name it.
            size_bytes = self._survey.packs[key].size_bytes
            return key in self._survey.condemned, -needed, size_bytes, key

        homes: dict[Chunk, tuple[ObjectKey, PackEntry]] = {}
        for key in sorted(self._survey.packs, key=order):
            for entry in self._survey.tables[key].values():
                chunk = chunk_of(entry)
                if chunk in self._ranks:
                    homes.setdefault(chunk, (key, entry))
        return homes

    def _kept_in(self, key: ObjectKey) -> Iterator[tuple[Chunk, PackEntry]]:
        """Yield the chunks that this pack keeps."""
        for entry in self._survey.tables[key].values():
            chunk = chunk_of(entry)
            if chunk in self._homes and self._homes[chunk][1] is entry:
                yield chunk, entry

    def _find_origins(self) -> dict[ObjectKey, list[tuple[Chunk, PackEntry]]]:
        """Return by pack its chunks to encode again: the new chunk, and the entry that it has."""
        made: dict[ObjectKey, list[tuple[Chunk, PackEntry]]] = {}
        for chunk, (_, key, entry) in self._origins.items():
            if chunk not in self._homes:
                made.setdefault(key, []).append((chunk, entry))
        return made

    def _is_recoded(self, key: ObjectKey) -> bool:
        """Return whether chunks of a pack are encoded again or dropped, not only kept elsewhere."""
        table = self._survey.tables[key]
        finals = [self._final(table[offset]) for offset in self._survey.ranks[key]]
        return any(
            final is None or (final in self._origins and final not in self._homes)
            for final in finals
        )

    def _live_bytes(self, key: ObjectKey) -> int:
        return sum(entry.stored_bytes for _, entry in self._kept_in(key))

    def _by_run(self, keys: Iterable[ObjectKey]) -> dict[str, list[ObjectKey]]:
        runs: dict[str, list[ObjectKey]] = {}
        for key in keys:
            kept = [*self._kept_in(key), *self._made_from.get(key, ())]
            first = min((self._ranks[chunk] for chunk, _ in kept), default=None)
            # The run that will name it first, so that the next repack plans the same.
            run_id = self._survey.first_run[key] if first is None else self._survey.run_of(first)
            runs.setdefault(run_id, []).append(key)
        return runs

    def _fill(self, keys: Sequence[ObjectKey]) -> Iterator[Target]:
        """Yield new packs with the needed chunks of others, in order."""
        kept = [
            Part(self._ranks[c], e, (self._survey.packs[k], e.offset))
            for k in keys
            for c, e in self._kept_in(k)
        ]
        for key in keys:
            for chunk, entry in self._made_from.get(key, ()):
                kept.append(
                    Part(self._ranks[chunk], self._recoding.made[chunk], None, entry.stored_bytes)
                )
        kept.sort(key=lambda part: part.rank)
        group: list[Part] = []
        size, digests = 0, set[Digest]()
        for part in kept:
            entry = part.entry
            # A chunk may be there in two encodings, but a table names each digest once.
            if group and (size + entry.stored_bytes > PACK_BYTES or entry.digest in digests):
                yield self._target(group)
                group, size, digests = [], 0, set()
            group.append(part)
            size += entry.stored_bytes
            digests.add(entry.digest)
        if group:
            yield self._target(group)

    def _target(self, group: Sequence[Part]) -> Target:
        entries, offset = [], 0
        for part in group:
            entries.append(part.entry._replace(offset=offset))
            offset += part.entry.stored_bytes
        return Target(
            PackTable(entries),
            tuple(part.source for part in group),
            self._recoding.encoder,
            sum(part.before_bytes for part in group),
        )

    def _rewritten(self, key: ObjectKey, reason: Reason) -> RewrittenPack:
        size_bytes = self._survey.packs[key].size_bytes
        made = sum(entry.stored_bytes for _, entry in self._made_from.get(key, ()))
        return RewrittenPack(key, size_bytes, self._live_bytes(key) + made, reason)

    def _moves(self, key: ObjectKey, targets: Targets) -> dict[int, tuple[Target, PackEntry]]:
        """Return the targets of the chunks of a rewritten pack, by offset."""
        found = {
            entry.offset: targets.find(self._final(entry))
            for entry in self._survey.tables[key].values()
        }
        return {offset: location for offset, location in found.items() if location is not None}

    def _locations(self, targets: Targets) -> dict[Digest, tuple[Target, PackEntry]]:
        """Return the targets of bases that states may not name yet, and of the bases below them."""
        by_digest = {chunk.digest: chunk for chunk in self._ranks}
        finals = set(self._recoding.replacements.values())
        waiting = [chunk.base for chunk in finals if chunk is not None and chunk.base is not None]
        locations: dict[Digest, tuple[Target, PackEntry]] = {}
        while waiting:
            digest = waiting.pop()
            location = targets.find(by_digest.get(digest))
            if digest not in locations and location is not None:
                locations[digest] = location
                if location[1].base is not None:
                    waiting.append(location[1].base)
        return locations

    def _places(
        self, rewritten: Mapping[ObjectKey, Reason]
    ) -> dict[str, dict[Place, frozenset[ObjectKey]]]:
        @cache  # states in a row share one set
        def going(named: frozenset[ObjectKey]) -> frozenset[ObjectKey]:
            return named.intersection(rewritten)

        touched = {
            run_id: {place: going(named) for place, named in places.items()}
            for run_id, places in self._survey.packs_of.items()
        }
        return {run_id: places for run_id, places in touched.items() if any(places.values())}
