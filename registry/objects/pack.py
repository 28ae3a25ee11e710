r"""The pack `holdfast.pack/1`: a file of encoded chunks and its table of contents.

Layout: the encoded chunks one after another from offset 0; the table, canonical JSON; then a
trailer of 48 bytes: length of the table (u64, little-endian), SHA-256 of the table, the 8 bytes
`HFPACK1\n`.
A pack is named by the digest of its table, the table names every chunk's digest, and offsets are
running sums of stored lengths. So the name covers every byte of the file.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate, repeat, starmap
from typing import Any, NamedTuple

from holdfast.registry.errors import Damaged, Malformed, UnsupportedFormat
from holdfast.registry.objects.codecs import RAW, codec_name, codec_number
from holdfast.registry.values import Digest, canonical, check_bytes

FORMAT = "holdfast.pack/1"
#: A pack is closed once its chunks have this many raw bytes.
PACK_BYTES = 64 * 2**20
_MAGIC = b"HFPACK1\n"
_TRAILER = struct.Struct("<Q32s8s")
TRAILER_BYTES = _TRAILER.size
#: A chunk in memory: its digest, stored and raw length, codec, and whether it is a delta.
_KEPT = struct.Struct("<32sQQB?")
#: An encoded chunk has two more digests: of its stored bytes, and of its base or zeros.
_PROOF = struct.Struct("<32s32s")
#: Bytes that are read from the end of a pack for its table; most tables are shorter.
TAIL_GUESS_BYTES = 64 * 1024


class PackEntry(NamedTuple):
    """One chunk of a pack."""

    digest: Digest  # SHA-256 of the chunk's raw bytes
    offset: int  # offset of its stored bytes
    stored_bytes: int  # length as stored
    raw_bytes: int  # length when decoded
    codec: str = RAW  # name in `holdfast.registry.objects.codecs`
    base: Digest | None = None  # for a delta, the digest of its base
    #: SHA-256 of the stored bytes if `codec` is not `raw`; it is checked before decoding.
    stored_digest: Digest | None = None


class PackTable:
    """A pack's table of contents: the entries of its chunks, in the order of their offsets.

    A chunk takes 58 bytes, and 64 more if any chunk of the pack is encoded; an entry is made on
    demand. As objects, entries would take ten times that, and reading a state with deltas holds
    dozens of tables, checking a registry all of them.
    """

    __slots__ = ("_kept", "_offsets", "_proofs")

    @classmethod
    def of_raw(cls, digests: Collection[Digest], lengths: Sequence[int]) -> PackTable:
        """Return the table of raw chunks."""
        made = cls(())
        made._offsets = array("Q", accumulate(lengths[:-1], initial=0)) if digests else array("Q")
        fields = zip(digests, lengths, lengths, repeat(0), repeat(False), strict=False)
        made._kept = b"".join(starmap(_KEPT.pack, fields))
        return made

    def __init__(self, entries: Iterable[PackEntry]) -> None:
        entries = list(entries)
        self._offsets = array("Q", (entry.offset for entry in entries))
        self._kept = b"".join(map(_kept, entries))
        self._proofs = b""
        if any(entry.codec != RAW for entry in entries):
            self._proofs = b"".join(
                _PROOF.pack(entry.stored_digest or b"", entry.base or b"") for entry in entries
            )

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, number: int) -> PackEntry:
        offset = self._offsets[number]
        number %= len(self)
        digest, stored, raw, codec, is_delta = _KEPT.unpack_from(self._kept, number * _KEPT.size)
        stored_digest = base = None
        if codec:
            proof, below = _PROOF.unpack_from(self._proofs, number * _PROOF.size)
            stored_digest, base = Digest(proof), Digest(below) if is_delta else None
        name = codec_name(codec, where="a pack's table")
        return PackEntry(Digest(digest), offset, stored, raw, name, base, stored_digest)

    def __iter__(self) -> Iterator[PackEntry]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackTable) and list(self) == list(other)

    def columns(self) -> Iterable[Sequence[Any]]:
        """Return the offsets, the stored lengths, the numbers of the codecs, and the bases."""
        kept = [*_KEPT.iter_unpack(self._kept)]
        _, stored, _, codecs, are_deltas = zip(*kept, strict=True) if kept else ((),) * 5
        bases = [self[n].base if is_delta else None for n, is_delta in enumerate(are_deltas)]
        return self._offsets, stored, codecs, bases

    def at(self, offset: int) -> PackEntry | None:
        """Return the chunk at an offset, if one begins there."""
        number = bisect_left(self._offsets, offset)
        is_found = number < len(self) and self._offsets[number] == offset
        return self[number] if is_found else None

    def encode(self) -> bytes:
        """Return the canonical JSON; its SHA-256 is the pack's name."""
        if not self._proofs:
            raw = [
                f'["{digest.hex()}",{stored},{length},"raw",null,null]'
                for digest, stored, length, _, _ in _KEPT.iter_unpack(self._kept)
            ]
            return f'{{"chunks":[{",".join(raw)}],"format":"{FORMAT}"}}'.encode("ascii")
        rows = [
            [
                entry.digest.hex(),
                entry.stored_bytes,
                entry.raw_bytes,
                entry.codec,
                entry.base.hex() if entry.base else None,
                entry.stored_digest.hex() if entry.stored_digest else None,
            ]
            for entry in self
        ]
        return canonical.encode({"format": FORMAT, "chunks": rows})

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> PackTable:
        """Parse a table."""
        body = canonical.decode(data, where=where)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            found = body.get("format") if isinstance(body, dict) else type(body).__name__
            raise UnsupportedFormat(
                "unknown pack format", where=where, expected=FORMAT, found=found
            )
        entries, offset = [], 0
        try:
            if set(body) != {"format", "chunks"}:
                raise ValueError(f"keys {sorted(body)}")
            if type(body["chunks"]) is not list:
                raise ValueError(f"chunks: {type(body['chunks']).__name__}")
            for row in body["chunks"]:
                entry = _entry(row, offset, where=where)
                entries.append(entry)
                offset += entry.stored_bytes
                if offset > canonical.MAX_INTEGER:
                    raise ValueError(f"a chunk that ends at {offset}")
        except (ValueError, TypeError) as error:
            raise Malformed("breaks the pack format", where=where, found=error) from error
        return cls(entries)


def trailer(table: bytes) -> bytes:
    """Return the 48 bytes that end a pack with this table."""
    return _TRAILER.pack(len(table), Digest.of(table), _MAGIC)


def parse_trailer(data: bytes | memoryview, file_bytes: int, *, where: str) -> tuple[int, Digest]:
    """Return length and digest of a pack's table."""
    table_bytes, digest, magic = _TRAILER.unpack(data)
    if magic != _MAGIC or not 0 < table_bytes <= file_bytes - TRAILER_BYTES:
        raise Damaged(
            "damaged pack: not a trailer",
            where=where,
            expected=f"{_MAGIC!r} and a table within {file_bytes} bytes",
            found=f"{magic!r} and {table_bytes}",
        )
    return table_bytes, Digest(digest)


def read_pack_table(
    read: Callable[[int, int], bytes], file_bytes: int, name: Digest, *, where: str, after: int = 0
) -> PackTable:
    """Read and verify the table of a pack without the rest of it, nearly always in one request."""
    begin = min(max(after, file_bytes - TAIL_GUESS_BYTES), file_bytes - TRAILER_BYTES)
    if file_bytes < TRAILER_BYTES:
        raise Damaged("damaged pack: too short", where=where, found=f"{file_bytes} bytes")
    tail = read(begin, file_bytes)
    table_bytes, digest = parse_trailer(tail[-TRAILER_BYTES:], file_bytes, where=where)
    start = file_bytes - TRAILER_BYTES - table_bytes
    check_bytes(table_bytes, "reading its table", where=where)
    if start < begin:
        tail = read(start, begin) + tail
        begin = start
    encoded = tail[start - begin : len(tail) - TRAILER_BYTES]
    found = Digest.of(encoded)
    if not found == digest == name:
        raise Damaged("damaged pack: table of contents", where=where, expected=name, found=found)
    return PackTable.decode(encoded, where=where)


def open_pack(data: bytes | memoryview, name: Digest, *, where: str) -> PackTable:
    """Verify the frame of a whole pack (not its chunks) and return its table."""
    file_bytes = len(data)
    if file_bytes < TRAILER_BYTES:
        raise Damaged("damaged pack: too short", where=where, found=f"{file_bytes} bytes")
    table_bytes, digest = parse_trailer(data[-TRAILER_BYTES:], file_bytes, where=where)
    start = file_bytes - TRAILER_BYTES - table_bytes
    encoded = bytes(data[start : start + table_bytes])
    found = Digest.of(encoded)
    if not found == digest == name:
        raise Damaged("damaged pack: table of contents", where=where, expected=name, found=found)
    table = PackTable.decode(encoded, where=where)
    filled = sum(entry.stored_bytes for entry in table)
    if filled != start:
        raise Malformed(
            "chunks do not fill the pack", where=where, expected=f"{start} bytes", found=filled
        )
    return table


def _kept(entry: PackEntry) -> bytes:
    number = codec_number(entry.codec, where=f"chunk {entry.digest.short}")
    is_delta = entry.base is not None
    return _KEPT.pack(entry.digest, entry.stored_bytes, entry.raw_bytes, number, is_delta)


def _entry(row: Any, offset: int, *, where: str) -> PackEntry:
    digest, stored, raw, codec, base, stored_digest = row
    if type(stored) is not int or type(raw) is not int or stored <= 0 or raw <= 0:
        raise ValueError(f"lengths {stored}, {raw}")
    codec_number(codec, where=where)
    if codec == RAW and (stored != raw or base is not None or stored_digest is not None):
        raise ValueError("a raw chunk with another stored length, a base or a stored digest")
    if codec != RAW and (stored >= raw or stored_digest is None):
        raise ValueError("an encoded chunk that is not shorter, or without a stored digest")
    return PackEntry(
        Digest.from_hex(digest),
        offset,
        stored,
        raw,
        codec,
        None if base is None else Digest.from_hex(base),
        None if stored_digest is None else Digest.from_hex(stored_digest),
    )
