"""The packs that chunks are in after a repack: new ones, and some that stay.

Which chunks those are is the business of `holdfast.registry.maintenance.repacking.repack_plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from holdfast.registry.maintenance.repacking.chunks import Workshop
from holdfast.registry.maintenance.repacking.survey import Chunk, Survey, chunk_of
from holdfast.registry.storage.keys import ObjectKey
from holdfast.registry.storage.pack import TRAILER_BYTES, PackEntry, PackTable
from holdfast.registry.storage.placement import PackRef
from holdfast.registry.values.digest import Digest


@dataclass(frozen=True)
class Target:
    """A pack in which chunks are to be found from now on: a new one, or one that is there.

    Attributes:
        table: Its table of contents.
        sources: For each entry the pack that holds it now, and where in it; `None` where it has to
            be encoded.
        workshop: Encodes those.
        before_bytes: What those take as they are stored now.
    """

    table: PackTable
    sources: tuple[tuple[PackRef, int] | None, ...]
    workshop: Workshop | None = None
    before_bytes: int = 0

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
        keys = {None if source is None else source[0].key for source in self.sources}
        return next((k for k in keys if len(keys) == 1 and k and k.digest == self.name), None)

    @property
    def recoded(self) -> list[PackEntry]:
        """Its chunks that have to be encoded."""
        pairs = zip(self.table, self.sources, strict=True)
        return [entry for entry, source in pairs if source is None]

    @property
    def recoded_bytes(self) -> int:
        """Bytes of those, as they will be stored."""
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
    """A chunk of a new pack.

    Attributes:
        rank: Its place in the order of the runs' states.
        entry: How it is stored.
        source: Where its bytes lie; `None` where they have to be made.
        before_bytes: What it takes now, where they have to be made.
    """

    rank: float
    entry: PackEntry
    source: tuple[PackRef, int] | None
    before_bytes: int = 0


class Whereabouts:
    """Where chunks are to be found: in new packs, or in some that stay."""

    def __init__(
        self,
        survey: Survey,
        new: Iterable[Target],
        homes: Mapping[Chunk, tuple[ObjectKey, PackEntry]],
    ) -> None:
        self._survey = survey
        self._new = {chunk_of(entry): (target, entry) for target in new for entry in target.table}
        self._homes = homes
        self._standing: dict[ObjectKey, Target] = {}

    def find(self, chunk: Chunk | None) -> tuple[Target, PackEntry] | None:
        """Return the pack of a chunk and its entry there; `None` where nobody will need it."""
        if chunk is None or chunk in self._new or chunk not in self._homes:
            return None if chunk is None else self._new.get(chunk)
        home, there = self._homes[chunk]
        if home not in self._standing:
            entries = tuple(self._survey.tables[home].values())
            pack = self._survey.packs[home]
            sources = tuple((pack, entry.offset) for entry in entries)
            self._standing[home] = Target(PackTable(entries), sources)
        return self._standing[home], there
