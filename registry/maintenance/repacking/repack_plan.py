"""What a repack is to do: which packs are rewritten, and what the new ones hold.

Reads and chooses; writes nothing. The choice is made once for the whole registry and depends on
nothing but what the runs need, so that runs which share packs, and repackers at work at the same
time, come to the same new packs: a pack is named by its table.

What is chosen:

- packs of which a share of `min_dead` or more is dead: chunks that no run needs, or that lie in
  another pack as well. Where a chunk lies several times, the pack that holds most of what is needed
  keeps it; so a repack that broke off half-way, which leaves old and new packs side by side, is
  finished by the next one without moving those bytes again;
- packs with chunks that are to be stored in another encoding, or with bases of deltas that nothing
  needs then (`holdfast.registry.maintenance.repacking.recoding`);
- small packs, where putting them together leaves fewer files.

What the new packs hold: chunks in the order in which the states of a run name them, oldest first,
component after component, whichever pack they came from. What is loaded together then lies
together, and ranged reads find long stretches. Packs of a save never mix components, so that equal
components of two runs become equal packs; what has outlived its neighbours cannot do that any more,
so a new pack is filled up to `PACK_BYTES` across components and saves, though never across runs:
what one run saves meanwhile leaves the packs of the others as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.registry.errors import NotFound
from holdfast.registry.history.actions import Place
from holdfast.registry.maintenance.repacking.recoding import Recoding, plan_recoding
from holdfast.registry.maintenance.repacking.survey import Chunk, Survey, chunk_of
from holdfast.registry.maintenance.repacking.targets import Part, Target, Whereabouts
from holdfast.registry.storage.keys import ObjectKey
from holdfast.registry.storage.pack import PACK_BYTES, PackEntry, PackTable
from holdfast.registry.storage.placement import MAX_DEPTH
from holdfast.registry.storage.store import Store
from holdfast.registry.values.digest import Digest
from holdfast.registry.values.suggest import near

#: Packs smaller than this are put together.
SMALL_BYTES = 16 * 2**20

Reason = Literal["dead", "recoded", "small"]


@dataclass(frozen=True, slots=True)
class RewrittenPack:
    """A pack that is to go.

    Attributes:
        pack: Its key.
        size_bytes: Its size.
        live_bytes: Bytes of the chunks that are moved out of it, as it has them.
        reason: Why: too much of it is `dead`, or lies in another pack in the encoding that stays;
            chunks of it are `recoded`, or bases that nothing needs any more; or it is `small`.
    """

    pack: ObjectKey
    size_bytes: int
    live_bytes: int
    reason: Reason


@dataclass(frozen=True)
class RepackPlan:
    """What a repack is to do.

    Attributes:
        rewritten: The packs that are to go, by key.
        new: The packs that are to be made.
        moves: For each chunk that is needed of a pack that goes, by pack and offset: where it is to
            be found, and its entry there.
        places: For each run with such packs the places of what it holds, each with those that it
            names: where there are any, it has to be placed anew.
        named: Every pack that some run needs.
        locations: Where bases of deltas are to be found that are stored otherwise as yet, and the
            bases of those.
        tables: The tables of the packs that some run needs, by offset.
        bases: Bytes of each base of deltas that nothing needs any more.
    """

    rewritten: Mapping[ObjectKey, RewrittenPack]
    new: tuple[Target, ...]
    moves: Mapping[ObjectKey, Mapping[int, tuple[Target, PackEntry]]]
    places: Mapping[str, Mapping[Place, frozenset[ObjectKey]]]
    named: frozenset[ObjectKey]
    locations: Mapping[Digest, tuple[Target, PackEntry]]
    tables: Mapping[ObjectKey, Mapping[int, PackEntry]]
    bases: Mapping[Chunk, int]


def plan_repack(
    store: Store,
    runs: Iterable[str] | None = None,
    *,
    min_dead: float = 0.25,
    codec: str | None = None,
    keyframe_every: int | None = None,
) -> RepackPlan:
    """Choose what to rewrite.

    Args:
        store: The registry's objects.
        runs: Only packs that these runs need; all without it. Other runs that need one of them
            count as well.
        min_dead: Share of a pack's chunks, in bytes, from which on it is rewritten.
        codec: In which codec of `holdfast.registry.storage.codecs` chunks are to be stored; as they
            are without it.
        keyframe_every: So many versions of a chunk at most are to be read for the last of them.

    Raises:
        NotFound: There is no such run.
        MissingObject: Something is gone: lost, or let go while this looked.
        IntegrityError: Something is damaged.
    """
    survey = Survey(store)
    survey.read()
    chosen = None if runs is None else list(runs)
    for name in chosen or ():
        if name not in survey.packs_of:
            hint = near(name, survey.packs_of)
            raise NotFound("no such run", where=f"{store.backend.url}: {name}", hint=hint)
    within = survey.packs.keys() if chosen is None else survey.needed_by(chosen)
    recoding = plan_recoding(store, survey, within, codec, keyframe_every)
    return _Choice(survey, within, min_dead, recoding).plan()


class _Choice:
    """Which packs go, and what becomes of what is needed of them."""

    def __init__(
        self,
        survey: Survey,
        within: Iterable[ObjectKey],
        min_dead: float,
        recoding: Recoding | None = None,
    ) -> None:
        self._survey = survey
        self._recoding = recoding or Recoding()
        self._ranks: dict[Chunk, float] = {}
        self._origins: dict[Chunk, tuple[int, ObjectKey, PackEntry]] = {}
        self._bases: dict[Chunk, int] = {}
        self._changed: set[ObjectKey] = set()
        self._rank_chunks()
        self._rank_bases()
        self._homes = self._find_homes()
        self._made_from = self._find_origins()
        self._dead: list[ObjectKey] = []
        self._small: list[ObjectKey] = []
        for key in within:
            if key in self._changed:
                self._dead.append(key)
                continue
            table = survey.tables[key].values()
            held = sum(entry.stored_bytes for entry in table)
            live = self._live_bytes(key)
            if live < held and held - live >= min_dead * held:
                self._dead.append(key)
            elif survey.packs[key].size_bytes < SMALL_BYTES:
                self._small.append(key)

    def plan(self) -> RepackPlan:
        reasons: dict[ObjectKey, Reason] = {}
        new: list[Target] = []
        dead, small = self._by_run(self._dead), self._by_run(self._small)
        for run_id in self._survey.packs_of:
            goes, joins = dead.get(run_id, []), small.get(run_id, [])
            made, together = list(self._fill(goes)), list(self._fill([*goes, *joins]))
            reasons |= {key: "recoded" if self._is_recoded(key) else "dead" for key in goes}
            if len(together) < len(made) + len(joins):
                reasons |= dict.fromkeys(joins, "small")
                made = together
            new += made
        # Nothing is gained by a pack that would come out as it went in.
        same = {key for target in new if (key := target.unchanged) is not None}
        reasons = {key: why for key, why in reasons.items() if key not in same}
        new = [target for target in new if target.unchanged is None]
        whereabouts = Whereabouts(self._survey, new, self._homes)
        return RepackPlan(
            {key: self._rewritten(key, why) for key, why in reasons.items()},
            tuple(new),
            {key: self._moves(key, whereabouts) for key in reasons},
            self._places(reasons),
            frozenset(self._survey.packs),
            self._spots(whereabouts),
            self._survey.tables,
            self._bases,
        )

    def _rank_chunks(self) -> None:
        """Rank every chunk that will be needed in the order of the runs' states."""
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
                    self._origins[chunk] = min(first, self._origins.get(chunk, first), key=_rank)

    def _rank_bases(self) -> None:
        """Rank new bases of deltas behind the first of these: whoever needs it names them too."""
        by_digest = {chunk.digest: chunk for chunk in self._ranks}
        for chunk in self._recoding.becomes.values():
            for _ in range(MAX_DEPTH):
                if chunk is None or chunk.base not in by_digest:
                    break
                base = by_digest[chunk.base]
                self._ranks[base] = min(self._ranks[base], self._ranks[chunk] + 0.5)
                chunk = base

    def _final(self, entry: PackEntry) -> Chunk | None:
        """Return in which encoding a chunk will be needed; `None` where it will not."""
        chunk = chunk_of(entry)
        return self._recoding.becomes.get(chunk, chunk)

    def _find_homes(self) -> dict[Chunk, tuple[ObjectKey, PackEntry]]:
        """Return for every chunk that is needed the pack that keeps it, and its entry there."""

        def order(key: ObjectKey) -> tuple[object, ...]:
            entries = self._survey.tables[key].values()
            needed = sum(e.stored_bytes for e in entries if chunk_of(e) in self._ranks)
            # What was condemned no other run may name; it is copied first where one has to.
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
        """Yield the chunks of which this pack is the home."""
        for entry in self._survey.tables[key].values():
            chunk = chunk_of(entry)
            if chunk in self._homes and self._homes[chunk][1] is entry:
                yield chunk, entry

    def _find_origins(self) -> dict[ObjectKey, list[tuple[Chunk, PackEntry]]]:
        """Return by pack what is encoded anew of it: the new form, and the entry that it has."""
        made: dict[ObjectKey, list[tuple[Chunk, PackEntry]]] = {}
        for chunk, (_, key, entry) in self._origins.items():
            if chunk not in self._homes:
                made.setdefault(key, []).append((chunk, entry))
        return made

    def _is_recoded(self, key: ObjectKey) -> bool:
        """Return whether chunks of a pack are encoded anew or left: not only kept in another."""
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
            # As the runs will name it, so that the next repack comes to the same.
            run_id = self._survey.first_run[key] if first is None else self._survey.run_of(first)
            runs.setdefault(run_id, []).append(key)
        return runs

    def _fill(self, keys: Sequence[ObjectKey]) -> Iterator[Target]:
        """Yield packs that hold what is needed of others, in order."""
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
            # One chunk in two encodings: a table names each digest once.
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
            self._recoding.workshop,
            sum(part.before_bytes for part in group),
        )

    def _rewritten(self, key: ObjectKey, reason: Reason) -> RewrittenPack:
        size_bytes = self._survey.packs[key].size_bytes
        made = sum(entry.stored_bytes for _, entry in self._made_from.get(key, ()))
        return RewrittenPack(key, size_bytes, self._live_bytes(key) + made, reason)

    def _moves(
        self, key: ObjectKey, whereabouts: Whereabouts
    ) -> dict[int, tuple[Target, PackEntry]]:
        """Return where the chunks of a pack that goes are to be found, by offset."""
        found = {
            entry.offset: whereabouts.find(self._final(entry))
            for entry in self._survey.tables[key].values()
        }
        return {offset: where for offset, where in found.items() if where is not None}

    def _spots(self, whereabouts: Whereabouts) -> dict[Digest, tuple[Target, PackEntry]]:
        """Return where bases are to be found that states may not name as yet, and their bases."""
        by_digest = {chunk.digest: chunk for chunk in self._ranks}
        finals = set(self._recoding.becomes.values())
        waiting = [chunk.base for chunk in finals if chunk is not None and chunk.base is not None]
        locations: dict[Digest, tuple[Target, PackEntry]] = {}
        while waiting:
            digest = waiting.pop()
            where = whereabouts.find(by_digest.get(digest))
            if digest not in locations and where is not None:
                locations[digest] = where
                if where[1].base is not None:
                    waiting.append(where[1].base)
        return locations

    def _places(
        self, going: Mapping[ObjectKey, Reason]
    ) -> dict[str, dict[Place, frozenset[ObjectKey]]]:
        touched = {
            run_id: {place: named.intersection(going) for place, named in places.items()}
            for run_id, places in self._survey.packs_of.items()
        }
        return {run_id: places for run_id, places in touched.items() if any(places.values())}


def _rank(origin: tuple[int, ObjectKey, PackEntry]) -> int:
    return origin[0]
