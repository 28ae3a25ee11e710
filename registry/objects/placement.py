"""The placement `holdfast.placement/1`: WHERE this registry stores the chunks of one manifest.

Content of the file: a line of canonical JSON (format, manifest, packs, number of rows, extra
digests), then columns of little-endian integers: pack (u32), offset (u64), stored length (u32),
codec (u8), base row (u32, `NO_BASE` for none). There is a row for each distinct chunk of the
manifest, in order; extra rows are for bases of deltas outside the manifest. Collection reads
placements and nothing else, so a placement names every pack that decoding needs. After a thinning,
`holdfast.placement/2` also names the components that it covers.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from operator import add
from typing import Any, NamedTuple, overload

from holdfast.registry.errors import (
    BeyondLimit,
    Hint,
    InvalidInput,
    Malformed,
    RegistryError,
    Thinned,
    UnsupportedFormat,
)
from holdfast.registry.objects.codecs import RAW, codec_name
from holdfast.registry.objects.framing import content_bytes, unwrap_frame, wrap_frame
from holdfast.registry.objects.keys import ObjectKey
from holdfast.registry.values import (
    ROW_BYTES,
    Digest,
    Digests,
    canonical,
    check_bytes,
    check_json,
    collector_paused,
    taking_turns,
)

FORMAT = "holdfast.placement/1"
#: The format of a placement that covers only some components of its manifest.
PARTS_FORMAT = "holdfast.placement/2"
NO_BASE = 2**32 - 1
#: The most deltas in a chain.
MAX_DEPTH = 32
_COLUMNS = "IQIBI"
_ROW_BYTES = struct.calcsize("<" + _COLUMNS)
#: Bytes of a digest in the line of JSON.
_EXTRA_BYTES = 67
_IS_BIG_ENDIAN = sys.byteorder == "big"


class PackRef(NamedTuple):
    """A pack that a placement names."""

    key: ObjectKey  # its key, generation included
    size_bytes: int  # its size; a file of another size is damaged


class ChunkRow(NamedTuple):
    """A row of a placement: where one chunk is stored."""

    pack: int  # the pack's position in the placement's list
    offset: int  # offset of its stored bytes
    stored_bytes: int  # their length
    codec: int = 0  # number in `holdfast.registry.objects.codecs`
    base: int = NO_BASE  # for a delta, the row of its base; otherwise `NO_BASE`


class Rows(Sequence[ChunkRow]):
    """Rows in columns, `_ROW_BYTES` each; a `ChunkRow` is made on demand.

    As objects they would take six times that, and the bases of chains of deltas can make a
    placement many times as long as its manifest.
    """

    __slots__ = ("_columns",)

    def __init__(self, rows: Iterable[ChunkRow]) -> None:
        columns = list(zip(*rows, strict=True)) or [()] * len(_COLUMNS)
        self._columns = [*map(array, _COLUMNS, columns)]

    @classmethod
    def of_columns(cls, columns: Sequence[Sequence[int]]) -> Rows:
        """Return the rows with these columns, in the order of the fields of `ChunkRow`."""
        rows = cls(())
        rows._columns = [*map(array, _COLUMNS, columns)]
        return rows

    @classmethod
    def parse(cls, data: bytes, count: int) -> Rows:
        """Read the columns of `count` rows."""
        rows, start = cls(()), 0
        for column in rows._columns:
            column.frombytes(data[start : start + count * column.itemsize])
            start += count * column.itemsize
            if _IS_BIG_ENDIAN:
                column.byteswap()
        return rows

    def encode(self) -> bytes:
        """Return the columns, little-endian, one after another."""
        columns = [array(column.typecode, column) for column in self._columns]
        if _IS_BIG_ENDIAN:
            for column in columns:
                column.byteswap()
        return b"".join(column.tobytes() for column in columns)

    @property
    def bases(self) -> Sequence[int]:
        """The row of each one's base, or `NO_BASE`."""
        return self._columns[-1]

    @property
    def columns(self) -> Sequence[Sequence[int]]:
        """The columns, in the order of the fields of `ChunkRow`."""
        return self._columns

    @property
    def has_deltas(self) -> bool:
        """Whether some chunk has a base."""
        return self._columns[-1].count(NO_BASE) < len(self)

    @property
    def codecs(self) -> set[int]:
        """The numbers of all codecs."""
        return set(self._columns[3])

    def ends(self, packs: int) -> list[int]:
        """Return the end of the last known chunk of each pack; 0 if none is known."""
        ends = [0] * packs
        pack, offset, stored, *_ = self._columns
        if max(pack, default=-1) >= packs:
            raise ValueError(f"pack {max(pack)} of {packs}")
        for number, end in zip(pack, map(add, offset, stored), strict=True):
            if end > ends[number]:
                ends[number] = end
        return ends

    @property
    def has_empty(self) -> bool:
        """Whether some chunk has no bytes."""
        return 0 in self._columns[2]

    def __len__(self) -> int:
        return len(self._columns[0])

    @overload
    def __getitem__(self, number: int) -> ChunkRow: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[ChunkRow]: ...
    def __getitem__(self, number: int | slice) -> ChunkRow | Sequence[ChunkRow]:
        if isinstance(number, slice):
            return Rows(list(self)[number])
        pack, offset, stored_bytes, codec, base = self._columns
        return ChunkRow(
            pack[number], offset[number], stored_bytes[number], codec[number], base[number]
        )

    def __iter__(self) -> Iterator[ChunkRow]:
        return map(ChunkRow, *self._columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and self._columns == other._columns

    def __hash__(self) -> int:
        return hash(self.encode())


@dataclass(frozen=True)
class Placement:
    """Where the chunks of one manifest are stored."""

    manifest: Digest  # the state's id
    packs: tuple[PackRef, ...]  # packs with their keys and sizes
    rows: Rows  # a row for each distinct chunk of the manifest, in order, then the extra rows
    extra: Digests = field(default_factory=lambda: Digests(()))  # digests of the extra rows
    #: The components that it covers, after a thinning; `None`: all. Rows are then for the chunks of
    #: these alone.
    components: tuple[str, ...] | None = None

    @cached_property
    def content(self) -> bytes:
        """The content of the file; its digest names the placement."""
        return self._content()

    def _content(self) -> bytes:
        header = canonical.encode(
            {
                **({} if self.components is None else {"components": [*self.components]}),
                "format": FORMAT if self.components is None else PARTS_FORMAT,
                "manifest": self.manifest.hex(),
                "packs": [[p.key.digest.hex(), p.key.generation, p.size_bytes] for p in self.packs],
                "rows": len(self.rows),
                "extra": [digest.hex() for digest in self.extra],
            }
        )
        return b"".join([header, b"\n", self.rows.encode()])

    @cached_property
    def digest(self) -> Digest:
        """The digest that names the file."""
        return Digest.of(self.content)

    @cached_property
    def content_bytes(self) -> int:
        """About the length of `content`, without making it."""
        return len(self.rows) * _ROW_BYTES + len(self.extra) * _EXTRA_BYTES

    def encode(self) -> bytes:
        """Return the file."""
        _check_memory(self.content, f"placement {self.digest.short}", InvalidInput)
        return wrap_frame(self.content)

    @cached_property
    def ends(self) -> Sequence[int]:
        """The end of the last known chunk of each pack: the table comes after it."""
        return self.rows.ends(len(self.packs))

    @cached_property
    def depths(self) -> Sequence[int]:
        """The number of deltas in the chain of each row; 0 for a chunk that is no delta."""
        bases = self.rows.bases
        depths = bytearray(len(bases))  # 0: no delta, or not known yet
        if not self.rows.has_deltas:
            return depths
        for start in range(len(bases)):
            chain: list[int] = []
            number = start
            while not depths[number] and bases[number] != NO_BASE and len(chain) <= MAX_DEPTH:
                chain.append(number)
                number = bases[number]
            depth = depths[number]
            if depth + len(chain) > MAX_DEPTH:
                raise Malformed(
                    "a chain of deltas is too long",
                    where=f"placement {self.digest.short} of {self.manifest.short}, row {start}",
                    expected=f"at most {MAX_DEPTH}",
                    hint="Run `holdfast verify`; a mirror can restore the checkpoint.",
                )
            for above in reversed(chain):
                depth += 1
                depths[above] = depth
        return depths

    def index(self, chunks: Mapping[Digest, int]) -> ChunkIndex:
        """Return the index of the rows, given the manifest's distinct chunks in order."""
        count = len(chunks) + len(self.extra)
        if count != len(self.rows):
            raise Malformed(
                "placement does not cover its manifest",
                where=self.digest,
                expected=f"{count} rows",
                found=len(self.rows),
            )
        _ = self.depths  # checks the chains before anything is read
        return ChunkIndex(self, chunks)

    @classmethod
    def decode(cls, data: bytes, expected: Digest, *, where: str) -> Placement:
        """Verify and parse a file."""
        with taking_turns(content_bytes(data)), collector_paused():
            return cls._decode(unwrap_frame(data, where=where), expected, where)

    @classmethod
    def _decode(cls, content: bytes, expected: Digest, where: str) -> Placement:
        _check_memory(content, where, BeyondLimit)
        if (found := Digest.of(content)) != expected:
            raise Malformed("another placement", where=where, expected=expected, found=found)
        line, _, columns = content.partition(b"\n")
        header = canonical.parse(line, where=where)
        if not isinstance(header, dict) or header.get("format") not in (FORMAT, PARTS_FORMAT):
            kind = header.get("format") if isinstance(header, dict) else type(header).__name__
            raise UnsupportedFormat(
                "unknown placement format", where=where, expected=FORMAT, found=kind
            )
        try:
            placement = _parse(header, columns, where)
        except (KeyError, TypeError, ValueError) as error:
            raise Malformed("breaks the placement format", where=where, found=error) from error
        del header, line, columns  # they are long if there are many extra rows
        canonical.check(content, placement._content(), where=where)
        return placement


def thinned(held: Sequence[str], where: str, wanted: Sequence[str] = ()) -> Thinned:
    """Return the error for parts of a state that a thinning gave up."""
    return Thinned(
        "a part of this state was given up when its checkpoint was thinned",
        where=where,
        expected=", ".join(wanted) or None,
        found=f"only {', '.join(held)}",
        hint=Hint(
            f"Load what is there: `only={list(held)!r}`. `run.retention.undo(checkpoint)` brings "
            "the rest back until it is collected.",
            f"Ask for what is there: `--only {held[0]}`. `holdfast undo` brings the rest back "
            "until it is collected.",
        ),
    )


class ChunkIndex:
    """The index of a placement: from a chunk to its row number, and back.

    The given chunks are those of its first rows, in order; it names those of extra rows itself.
    """

    def __init__(self, placement: Placement, chunks: Iterable[Digest]) -> None:
        self._placement = placement
        self._rows = {digest: row for row, digest in enumerate(chunks)}

    def add(self, first: int, chunks: Iterable[Digest]) -> None:
        """Name the chunks of further rows, in order; no row may have a base then."""
        self._rows.update(zip(chunks, count(first), strict=False))

    @cached_property
    def _chunks(self) -> list[Digest]:
        return list(self._rows)

    def __contains__(self, digest: Digest) -> bool:
        """Return whether a chunk is in a known row that is not extra."""
        return digest in self._rows

    def row(self, digest: Digest) -> int:
        """Return the row of a chunk that is not in an extra row."""
        if digest not in self._rows and self._placement.components is not None:
            raise thinned(self._placement.components, self._placement.manifest.short)
        return self._rows[digest]

    def rows_of(self, digests: Collection[Digest]) -> list[int]:
        """Return the rows of chunks."""
        try:
            return [*map(self._rows.__getitem__, digests)]
        except KeyError:
            return [*map(self.row, digests)]  # it tells of a thinning

    def digest(self, row: int) -> Digest:
        """Return the chunk of any row."""
        if row < len(self._chunks):
            return self._chunks[row]
        extra = self._placement.extra
        number = row - len(self._placement.rows) + len(extra)
        if number < 0:
            raise Malformed(
                "the base of a delta is not known",
                where=f"placement {self._placement.digest.short}, row {row}",
                expected=f"one of the first {len(self._chunks)} rows, or an extra one",
                hint="Run `holdfast verify`; a mirror can restore the checkpoint.",
            )
        return extra[number]


def _check_memory(content: bytes, where: str, kind: type[RegistryError]) -> None:
    """Check the memory for reading a content: its line of JSON and its rows."""
    line = content.find(b"\n") + 1
    check_json(content[:line], where=where, kind=kind)
    rows = (len(content) - line) // _ROW_BYTES
    check_bytes(rows * (_ROW_BYTES + ROW_BYTES), f"reading {rows} rows", where=where, kind=kind)


def _parse(header: dict[str, Any], columns: bytes, where: str) -> Placement:
    keys, components = {"format", "manifest", "packs", "rows", "extra"}, None
    if header["format"] == PARTS_FORMAT:
        keys.add("components")
        components = tuple(header["components"])
        if any(type(name) is not str for name in components) or not components:
            raise ValueError(f"components {components!r}")
    if set(header) != keys:
        raise ValueError(f"keys {sorted(header)}")
    packs = tuple(_pack(*row) for row in header["packs"])
    total = header["rows"]
    if type(total) is not int or len(columns) != total * _ROW_BYTES:
        raise ValueError(f"{len(columns)} bytes of columns for {total} rows")
    rows = Rows.parse(columns, total)
    for codec in rows.codecs:
        codec_name(codec, where=where)
    for row in rows if rows.has_deltas else ():
        if codec_name(row.codec, where=where) == RAW and row.base != NO_BASE:
            raise ValueError(f"a raw chunk with a base: {row}")
        if row.base != NO_BASE:
            _within(row.base, total)
    if rows.has_empty:
        raise ValueError("a chunk of no bytes")
    extra = Digests(Digest.from_hex(text) for text in header["extra"])
    placement = Placement(Digest.from_hex(header["manifest"]), packs, rows, extra, components)
    for pack, end in zip(packs, placement.ends, strict=True):
        if end > pack.size_bytes:
            raise ValueError(f"a chunk ends beyond its pack: {pack}")
    return placement


def _pack(digest: object, generation: Any, size_bytes: Any) -> PackRef:
    for number in (generation, size_bytes):
        if type(number) is not int or number < 0:
            raise ValueError(f"generation {generation!r}, size {size_bytes!r}")
    return PackRef(ObjectKey("packs", Digest.from_hex(digest), generation), size_bytes)


def _within(index: int, count: int) -> int:
    if index >= count:
        raise ValueError(f"index {index} of {count}")
    return index
