"""The new placement of a state whose chunks move to other packs, encodings or bases.

The chunks of a state do not change, so its own rows stay in their order. The bases that its deltas
need from now on come after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from holdfast.registry.errors import Malformed
from holdfast.registry.maintenance.repacking.repack_plan import RepackPlan
from holdfast.registry.maintenance.repacking.targets import Target
from holdfast.registry.storage.codecs import codec_number
from holdfast.registry.storage.pack import PackEntry, PackTable
from holdfast.registry.storage.placement import (
    MAX_DEPTH,
    NO_BASE,
    ChunkRow,
    PackRef,
    Placement,
    Rows,
)
from holdfast.registry.values.digest import Digest, Digests


@dataclass(frozen=True, slots=True)
class _NewLocation:
    """The location of a chunk after the repack.

    Attributes:
        pack: A target of the plan, or the pack that holds the chunk now.
        entry: Its entry there.
    """

    pack: Target | PackRef
    entry: PackEntry


class NewPlacement:
    """The placement of one state after the repack.

    Args:
        before: Its placement now.
        plan: The plan.
        table_of: Reads the table of a pack that was written after the plan was made.

    Attributes:
        targets: The packs of the plan that it needs.
    """

    def __init__(
        self, before: Placement, plan: RepackPlan, table_of: Callable[[PackRef], PackTable]
    ) -> None:
        self._before = before
        self._plan = plan
        self._table_of = table_of
        self._own = len(before.rows) - len(before.extra)
        locations = dict(self._locations())
        own, bases = list(locations)[: self._own], list(locations)[self._own :]
        needed = (
            self._needed(own, locations) if self._is_changed(locations) else dict.fromkeys(bases)
        )
        order = [
            *own,
            *(d for d in bases if d in needed),
            *(d for d in needed if d not in locations),
        ]
        found = {digest: locations.get(digest) or self._elsewhere(digest) for digest in order}
        self._order = {
            digest: location for digest, location in found.items() if location is not None
        }
        used = [location.pack for location in self._order.values()]
        self.targets = {id(one): one for one in used if isinstance(one, Target)}

    def placement(self, packs: Mapping[int, PackRef]) -> Placement:
        """Return the placement.

        Args:
            packs: The packs of the targets, by `id` of the target.
        """
        numbers = {digest: number for number, digest in enumerate(self._order)}
        known: dict[PackRef, int] = {}
        rows = []
        for location in self._order.values():
            pack, entry = location.pack, location.entry
            if isinstance(pack, Target):
                pack = packs[id(pack)]
            number = known.setdefault(pack, len(known))
            base = NO_BASE if entry.base is None else numbers[entry.base]
            codec = codec_number(entry.codec, where=str(pack.key))
            rows.append(ChunkRow(number, entry.offset, entry.stored_bytes, codec, base))
        extra = Digests(list(self._order)[self._own :])
        return replace(self._before, packs=tuple(known), rows=Rows(rows), extra=extra)

    @property
    def is_sound(self) -> bool:
        """Whether every chain of deltas ends at a chunk that is no delta.

        This holds where one plan has moved the whole chain. If others have stored chunks of it in
        another encoding since, the two may not fit together; then the state keeps its place.
        """
        for digest in self._order:
            links, below = 0, self._order[digest].entry.base
            while below is not None:
                if below not in self._order or links == MAX_DEPTH:
                    return False
                links, below = links + 1, self._order[below].entry.base
        return True

    def _locations(self) -> Iterator[tuple[Digest, _NewLocation]]:
        """Yield the chunks of all rows with their new locations."""
        before, plan = self._before, self._plan
        moves = [plan.moves.get(pack.key, {}) for pack in before.packs]
        for row in before.rows:
            pack = before.packs[row.pack]
            if row.offset in moves[row.pack]:
                target, entry = moves[row.pack][row.offset]
                yield entry.digest, _NewLocation(target, entry)
            else:
                entry = self._entry(pack, row.offset)
                yield entry.digest, _NewLocation(pack, entry)

    def _entry(self, pack: PackRef, offset: int) -> PackEntry:
        table = self._plan.tables.get(pack.key)
        entry = self._table_of(pack).at(offset) if table is None else table.get(offset)
        if entry is None:
            raise Malformed(
                "a placement and its pack name different chunks at one offset",
                where=pack.key,
                hint="Run `holdfast verify --deep`; nothing was changed.",
            )
        return entry

    def _is_changed(self, locations: Mapping[Digest, _NewLocation]) -> bool:
        """Return whether a chunk gets another base than it has now."""
        digests = list(locations)
        for row, location in zip(self._before.rows, locations.values(), strict=True):
            base = None if row.base == NO_BASE else digests[row.base]
            if location.entry.base != base:
                return True
        return False

    def _needed(
        self, own: list[Digest], locations: Mapping[Digest, _NewLocation]
    ) -> dict[Digest, None]:
        """Return the bases of the state's chunks, and the bases of these, and so on."""
        needed: dict[Digest, None] = {}
        named, waiting = set(own), list(own)
        while waiting:
            digest = waiting.pop()
            location = locations.get(digest) or self._elsewhere(digest)
            base = None if location is None else location.entry.base
            if base is not None and base not in needed:
                needed[base] = None
                waiting.append(base)
        return {digest: None for digest in needed if digest not in named}

    def _elsewhere(self, digest: Digest) -> _NewLocation | None:
        """Return the new location of a base that the state does not name yet."""
        found = self._plan.locations.get(digest)
        return None if found is None else _NewLocation(*found)
