"""What a repack is to do: which packs are rewritten, and what the new ones hold.

Reads and chooses; writes nothing. The choice is made once for the whole registry and depends on
nothing but what the runs need, so that runs which share packs, and repackers at work at the same
time, come to the same new packs: a pack is named by its table.

What is chosen:

- packs of which a share of `min_dead` or more is dead: chunks that no run needs, or that lie in
  another pack as well. Where a chunk lies several times, the pack that holds most of what is needed
  keeps it; so a repack that broke off half-way, which leaves old and new packs side by side, is
  finished by the next one without moving those bytes again;
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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from registry.actions import Place
from registry.digest import Digest
from registry.errors import NotFound
from registry.keys import ObjectKey
from registry.maintenance.repack_survey import Chunk, Survey, chunk_of
from registry.pack import PACK_BYTES, TRAILER_BYTES, PackEntry, PackTable
from registry.placement import PackRef
from registry.store import Store
from registry.suggest import near

#: Packs smaller than this are put together.
SMALL_BYTES = 16 * 2**20

Reason = Literal["dead", "small"]


@dataclass(frozen=True)
class Target:
    """A pack in which chunks are to be found from now on: a new one, or one that is there.

    Attributes:
        table: Its table of contents.
        sources: For each entry the pack that holds it now, and where in it.
    """

    table: PackTable
    sources: tuple[tuple[PackRef, int], ...]

    @cached_property
    def encoded(self) -> bytes:
        """Its table as it is stored."""
        return self.table.encode()

    @cached_property
    def name(self) -> Digest:
        """What the pack is named by."""
        return Digest.of(self.encoded)

    @property
    def unchanged(self) -> ObjectKey | None:
        """The pack that this one would repeat, byte for byte, if it is made of one alone."""
        keys = {pack.key for pack, _ in self.sources}
        return next((key for key in keys if len(keys) == 1 and key.digest == self.name), None)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of its chunks, as stored."""
        return sum(entry.stored_bytes for entry in self.table.entries)

    @property
    def size_bytes(self) -> int:
        """Size of the whole file."""
        return self.chunk_bytes + len(self.encoded) + TRAILER_BYTES


@dataclass(frozen=True, slots=True)
class RewrittenPack:
    """A pack that is to go.

    Attributes:
        pack: Its key.
        size_bytes: Its size.
        live_bytes: Bytes of the chunks that are moved out of it.
        reason: Why: too much of it is `dead`, or it is `small`.
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
        places: For each run with such packs the places of what it holds, each with whether it has
            to be placed anew.
        named: Every pack that some run needs.
    """

    rewritten: Mapping[ObjectKey, RewrittenPack]
    new: tuple[Target, ...]
    moves: Mapping[ObjectKey, Mapping[int, tuple[Target, PackEntry]]]
    places: Mapping[str, Mapping[Place, bool]]
    named: frozenset[ObjectKey]


def plan_repack(
    store: Store, runs: Iterable[str] | None = None, *, min_dead: float = 0.25
) -> RepackPlan:
    """Choose what to rewrite.

    Args:
        store: The registry's objects.
        runs: Only packs that these runs need; all without it. Other runs that need one of them
            count as well.
        min_dead: Share of a pack's chunks, in bytes, from which on it is rewritten.

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
    return _Choice(survey, within, min_dead).plan()


class _Choice:
    """Which packs go, and what becomes of what is needed of them."""

    def __init__(self, survey: Survey, within: Iterable[ObjectKey], min_dead: float) -> None:
        self._survey = survey
        self._ranks = self._rank_chunks()
        self._homes = self._find_homes()
        self._dead: list[ObjectKey] = []
        self._small: list[ObjectKey] = []
        for key in within:
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
            reasons |= dict.fromkeys(goes, "dead")
            if len(together) < len(made) + len(joins):
                reasons |= dict.fromkeys(joins, "small")
                made = together
            new += made
        # Nothing is gained by a pack that would come out as it went in.
        same = {key for target in new if (key := target.unchanged) is not None}
        reasons = {key: why for key, why in reasons.items() if key not in same}
        new = [target for target in new if target.unchanged is None]
        return RepackPlan(
            {key: self._rewritten(key, why) for key, why in reasons.items()},
            tuple(new),
            self._moves(reasons, new),
            self._places(reasons),
            frozenset(self._survey.packs),
        )

    def _rank_chunks(self) -> dict[Chunk, int]:
        """Return every chunk that is needed, with its place in the order of the runs' states."""
        ranks: dict[Chunk, int] = {}
        for key, named in self._survey.ranks.items():
            table = self._survey.tables[key]
            for offset, rank in named.items():
                chunk = chunk_of(table[offset])
                ranks[chunk] = min(rank, ranks.get(chunk, rank))
        return ranks

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

    def _live_bytes(self, key: ObjectKey) -> int:
        return sum(entry.stored_bytes for _, entry in self._kept_in(key))

    def _by_run(self, keys: Iterable[ObjectKey]) -> dict[str, list[ObjectKey]]:
        runs: dict[str, list[ObjectKey]] = {}
        for key in keys:
            runs.setdefault(self._survey.first_run[key], []).append(key)
        return runs

    def _fill(self, keys: Sequence[ObjectKey]) -> Iterator[Target]:
        """Yield packs that hold what is needed of others, in order."""
        kept = [(self._ranks[chunk], key, e) for key in keys for chunk, e in self._kept_in(key)]
        kept.sort(key=lambda one: one[0])
        group: list[tuple[PackRef, PackEntry]] = []
        size, digests = 0, set[Digest]()
        for _, key, entry in kept:
            # One chunk in two encodings: a table names each digest once.
            if group and (size + entry.stored_bytes > PACK_BYTES or entry.digest in digests):
                yield _target(group)
                group, size, digests = [], 0, set()
            group.append((self._survey.packs[key], entry))
            size += entry.stored_bytes
            digests.add(entry.digest)
        if group:
            yield _target(group)

    def _rewritten(self, key: ObjectKey, reason: Reason) -> RewrittenPack:
        size_bytes = self._survey.packs[key].size_bytes
        return RewrittenPack(key, size_bytes, self._live_bytes(key), reason)

    def _moves(
        self, going: Iterable[ObjectKey], new: Iterable[Target]
    ) -> dict[ObjectKey, dict[int, tuple[Target, PackEntry]]]:
        found = {
            chunk_of(entry): (target, entry) for target in new for entry in target.table.entries
        }
        standing: dict[ObjectKey, Target] = {}
        moves: dict[ObjectKey, dict[int, tuple[Target, PackEntry]]] = {}
        for key in going:
            moves[key] = {}
            for entry in self._survey.tables[key].values():
                chunk = chunk_of(entry)
                if chunk in found:
                    moves[key][entry.offset] = found[chunk]
                elif chunk in self._homes:
                    home, there = self._homes[chunk]
                    if home not in standing:
                        standing[home] = self._standing(home)
                    moves[key][entry.offset] = standing[home], there
        return moves

    def _standing(self, key: ObjectKey) -> Target:
        """Return a pack that stays, as a target."""
        entries = tuple(self._survey.tables[key].values())
        pack = self._survey.packs[key]
        return Target(PackTable(entries), tuple((pack, entry.offset) for entry in entries))

    def _places(self, going: Mapping[ObjectKey, Reason]) -> dict[str, dict[Place, bool]]:
        touched = {
            run_id: {place: not named.isdisjoint(going) for place, named in places.items()}
            for run_id, places in self._survey.packs_of.items()
        }
        return {run_id: places for run_id, places in touched.items() if any(places.values())}


def _target(group: Sequence[tuple[PackRef, PackEntry]]) -> Target:
    entries, offset = [], 0
    for _, entry in group:
        entries.append(replace(entry, offset=offset))
        offset += entry.stored_bytes
    sources = tuple((pack, entry.offset) for pack, entry in group)
    return Target(PackTable(tuple(entries)), sources)
