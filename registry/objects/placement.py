"""The placement `holdfast.placement/1`: WHERE the chunks of one manifest lie in this registry.

Content of the file: a line of canonical JSON (format, manifest, packs, number of rows, extra
digests), then columns of little-endian integers: pack (u32), offset (u64), stored length (u32),
codec (u8), base row (u32, `NO_BASE` for none). Rows follow the manifest's distinct chunks in order;
extra rows hold delta bases outside the manifest. Collection reads placements and nothing else, so
every pack that decoding needs is named.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from registry import canonical
from registry.codecs import RAW, codec_name
from registry.digest import Digest
from registry.errors import Malformed, UnsupportedFormat
from registry.objects.framing import unwrap_frame, wrap_frame
from registry.objects.keys import ObjectKey

FORMAT = "holdfast.placement/1"
NO_BASE = 2**32 - 1
#: Deltas on deltas, at most.
MAX_DEPTH = 32
_COLUMNS = "IQIBI"
_ROW_BYTES = struct.calcsize("<" + _COLUMNS)


@dataclass(frozen=True, slots=True)
class PackRef:
    """A pack that a placement names.

    Attributes:
        key: Its key, generation included.
        size_bytes: Its size; a file of another size is damaged.
    """

    key: ObjectKey
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where one chunk lies.

    Attributes:
        pack: The pack's position in the placement's list.
        offset: Where its stored bytes begin.
        stored_bytes: Their length.
        codec: Number in `registry.codecs`.
        base: Row of the chunk that a delta is against, or `NO_BASE`.
    """

    pack: int
    offset: int
    stored_bytes: int
    codec: int = 0
    base: int = NO_BASE


@dataclass(frozen=True)
class Placement:
    """Where the chunks of one manifest lie.

    Attributes:
        manifest: The checkpoint's id.
        packs: Packs with their keys and sizes.
        rows: A place for each distinct chunk of the manifest, in order, then the extra rows.
        extra: Digests of the extra rows.
    """

    manifest: Digest
    packs: tuple[PackRef, ...]
    rows: tuple[ChunkPlace, ...]
    extra: tuple[Digest, ...] = ()

    @cached_property
    def content(self) -> bytes:
        """The content of the file; the placement is named by its digest."""
        header = canonical.encode(
            {
                "format": FORMAT,
                "manifest": self.manifest.hex(),
                "packs": [[p.key.digest.hex(), p.key.generation, p.size_bytes] for p in self.packs],
                "rows": len(self.rows),
                "extra": [digest.hex() for digest in self.extra],
            }
        )
        fields = [(r.pack, r.offset, r.stored_bytes, r.codec, r.base) for r in self.rows]
        columns = zip(*fields, strict=True) if fields else [()] * len(_COLUMNS)
        packed = [
            struct.pack(f"<{len(column)}{code}", *column)
            for code, column in zip(_COLUMNS, columns, strict=True)
        ]
        return b"".join([header, b"\n", *packed])

    @cached_property
    def digest(self) -> Digest:
        """What the file is named by."""
        return Digest.of(self.content)

    def encode(self) -> bytes:
        """Return the file."""
        return wrap_frame(self.content)

    @cached_property
    def links(self) -> Sequence[int]:
        """How many deltas have to be added to what each row stands on.

        Raises:
            Malformed: More than `MAX_DEPTH`, or they go round in a circle.
        """
        if all(row.base == NO_BASE for row in self.rows):
            return [0] * len(self.rows)
        depths: dict[int, int] = {}
        for start in range(len(self.rows)):
            chain, number = [], start
            while number not in depths and self.rows[number].base != NO_BASE:
                chain.append(number)
                number = self.rows[number].base
                if len(chain) > MAX_DEPTH:
                    break
            depth = depths.setdefault(number, 0)
            if depth + len(chain) > MAX_DEPTH:
                raise Malformed(
                    "deltas on deltas without end",
                    where=f"placement {self.digest.short} of {self.manifest.short}, row {start}",
                    expected=f"at most {MAX_DEPTH}",
                    hint="Run `holdfast verify`; a mirror can restore the checkpoint.",
                )
            for above in reversed(chain):
                depth += 1
                depths[above] = depth
        return [depths[number] for number in range(len(self.rows))]

    def index(self, chunks: Mapping[Digest, int]) -> dict[Digest, ChunkPlace]:
        """Return each chunk's place, given the manifest's distinct chunks in order.

        Raises:
            Malformed: There are fewer or more rows than chunks, or deltas without end.
        """
        digests = [*chunks, *self.extra]
        if len(digests) != len(self.rows):
            raise Malformed(
                "placement does not cover its manifest",
                where=self.digest,
                expected=f"{len(digests)} rows",
                found=len(self.rows),
            )
        _ = self.links  # checked before anything is read by it, or built on it
        return dict(zip(digests, self.rows, strict=True))

    @classmethod
    def decode(cls, data: bytes, expected: Digest, *, where: str) -> Placement:
        """Verify and parse a file.

        Raises:
            Damaged: Its bytes do not match its closing digest.
            Malformed: A rule of the format is broken, or it is another placement.
            UnsupportedFormat: It was written in a format that this version does not know.
        """
        content = unwrap_frame(data, where=where)
        if (found := Digest.of(content)) != expected:
            raise Malformed("another placement", where=where, expected=expected, found=found)
        line, _, columns = content.partition(b"\n")
        header = canonical.decode(line, where=where)
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            kind = header.get("format") if isinstance(header, dict) else type(header).__name__
            raise UnsupportedFormat(
                "unknown placement format", where=where, expected=FORMAT, found=kind
            )
        try:
            return _parse(header, columns, where)
        except (KeyError, TypeError, ValueError, struct.error) as error:
            raise Malformed("breaks the placement format", where=where, found=error) from error


def _parse(header: dict[str, Any], columns: bytes, where: str) -> Placement:
    if set(header) != {"format", "manifest", "packs", "rows", "extra"}:
        raise ValueError(f"keys {sorted(header)}")
    packs = tuple(_pack(*row) for row in header["packs"])
    count = header["rows"]
    if type(count) is not int or len(columns) != count * _ROW_BYTES:
        raise ValueError(f"{len(columns)} bytes of columns for {count} rows")
    rows = tuple(ChunkPlace(*row) for row in zip(*_columns(columns, count), strict=True))
    for row in rows:
        if codec_name(row.codec, where=where) == RAW and row.base != NO_BASE:
            raise ValueError(f"a raw chunk with a base: {row}")
        if not row.stored_bytes:
            raise ValueError(f"a chunk of no bytes: {row}")
        if row.offset + row.stored_bytes > packs[_within(row.pack, len(packs))].size_bytes:
            raise ValueError(f"a chunk ends beyond its pack: {row}")
        if row.base != NO_BASE:
            _within(row.base, count)
    extra = tuple(Digest.from_hex(text) for text in header["extra"])
    return Placement(Digest.from_hex(header["manifest"]), packs, rows, extra)


def _pack(digest: object, generation: Any, size_bytes: Any) -> PackRef:
    for number in (generation, size_bytes):
        if type(number) is not int or number < 0:
            raise ValueError(f"generation {generation!r}, size {size_bytes!r}")
    return PackRef(ObjectKey("packs", Digest.from_hex(digest), generation), size_bytes)


def _columns(data: bytes, count: int) -> Sequence[tuple[int, ...]]:
    columns, start = [], 0
    for code in _COLUMNS:
        layout = struct.Struct(f"<{count}{code}")
        columns.append(layout.unpack_from(data, start))
        start += layout.size
    return columns


def _within(index: int, count: int) -> int:
    if index >= count:
        raise ValueError(f"index {index} of {count}")
    return index
