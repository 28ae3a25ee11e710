"""The packs that hold chunks after a repack: new ones, and some that stay.

`holdfast.registry.upkeep.repacking.repack_plan` chooses their chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from holdfast.registry.objects import TRAILER_BYTES, ObjectKey, PackEntry, PackRef, PackTable
from holdfast.registry.upkeep.repacking.chunks import ChunkEncoder
from holdfast.registry.upkeep.repacking.survey import Chunk, Survey, chunk_of
from holdfast.registry.values import Digest


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

    rank: float  # its position in the order of the runs' states
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
