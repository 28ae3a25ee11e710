"""The beginning of a file, and the index of its regions."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.registry.errors import IncompatibleState, InvalidInput, UnsupportedFormat
from holdfast.registry.formats.thalia.framing import MAGIC, Body

HEADER_BYTES: Final = 256
ENTRY_BYTES: Final = 48
#: Pathways stand behind the regions in the same index, under names with this prefix.
PATHWAY: Final = "pathway:"
_NAME_BYTES: Final = 31
_FORM: Final = struct.Struct("<4sHHHHQQQQQQQQQQII")
#: Values of `checksum_type`: none, and SHA-256. A checksum is always there.
_CHECKSUMS: Final = (0, 1)


@dataclass(slots=True)
class Header:
    """The fields of the header, in the order of the file; offsets and lengths in bytes."""

    major: int = 0
    minor: int = 1
    patch: int = 0
    flags: int = 0
    timestamp: int = 0
    metadata_offset: int = HEADER_BYTES
    metadata_length: int = 0
    index_offset: int = 0
    index_length: int = 0
    connectivity_offset: int = 0
    connectivity_length: int = 0
    total_neurons: int = 0
    total_synapses: int = 0
    training_steps: int = 0
    num_regions: int = 0
    checksum_type: int = 1

    @property
    def version(self) -> str:
        """The version of the format."""
        return f"{self.major}.{self.minor}.{self.patch}"

    def totals(self) -> dict[str, Any]:
        """Return the fields about the whole brain, for a description."""
        names = ("timestamp", "total_neurons", "total_synapses", "training_steps", "num_regions")
        return {"version": self.version, **{name: getattr(self, name) for name in names}}

    def pack(self) -> bytes:
        """Return its bytes."""
        fields = [getattr(self, name) for name in self.__slots__]
        return _FORM.pack(MAGIC, *fields).ljust(HEADER_BYTES, b"\0")


def read_header(body: Body) -> Header:
    """Read a header."""
    magic, *fields = _FORM.unpack(body.read(0, HEADER_BYTES, "the header")[: _FORM.size])
    header = Header(*fields)
    if magic != MAGIC:
        raise InvalidInput("not a file of Thalia", where=body.where, expected=MAGIC, found=magic)
    if header.major > 0:
        raise UnsupportedFormat(
            "the file has another major version",
            where=body.where,
            expected="version 0.x",
            found=header.version,
            hint="Major versions are not migrated: write it again by the program that made it.",
        )
    return header


def check_header(header: Header, where: Path) -> None:
    """Refuse a header that the programs of Thalia refuse."""
    if header.checksum_type not in _CHECKSUMS:
        raise InvalidInput(
            "an unknown kind of checksum",
            where=where,
            expected="0 or 1",
            found=header.checksum_type,
        )
    if not header.num_regions:
        raise InvalidInput("the file has no regions", where=where)


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the index."""

    name: str  # the name, without the prefix of a pathway
    is_pathway: bool  # whether it is a pathway
    offset: int  # position of its JSON
    length: int  # length of its JSON

    def pack(self) -> bytes:
        """Return its bytes."""
        name = f"{PATHWAY if self.is_pathway else ''}{self.name}".encode()
        if len(name) > _NAME_BYTES or b"\0" in name or (not self.is_pathway and self.is_prefixed):
            kind = "pathway" if self.is_pathway else "region"
            raise IncompatibleState(
                f"the name of a {kind} does not fit into the index of a .thalia file",
                where=self.name,
                expected=f"{_NAME_BYTES} bytes with the prefix of a pathway, without zero bytes",
                found=f"{len(name)} bytes",
            )
        return struct.pack("<32sQQ", name, self.offset, self.length)

    @property
    def is_prefixed(self) -> bool:
        """Whether the name of a region looks like a pathway's name."""
        return self.name.startswith(PATHWAY)


def read_index(body: Body, header: Header) -> list[Entry]:
    """Read the index of a file."""
    data = body.read(header.index_offset, header.index_length, "the index of regions")
    count, rest = divmod(len(data), ENTRY_BYTES)
    if rest or count != header.num_regions:
        raise InvalidInput(
            "the index has another length than its entries",
            where=body.where,
            expected=f"{header.num_regions} entries of {ENTRY_BYTES} bytes",
            found=f"{len(data)} bytes",
        )
    return [_entry(data[at : at + ENTRY_BYTES]) for at in range(0, len(data), ENTRY_BYTES)]


def _entry(data: bytes) -> Entry:
    raw, offset, length = struct.unpack("<32sQQ", data)
    # The writer cuts names to 31 bytes, within a character if it has to.
    name = raw.split(b"\0", 1)[0].decode(errors="ignore")
    is_pathway = name.startswith(PATHWAY)
    return Entry(name.removeprefix(PATHWAY), is_pathway, offset, length)


def repeated(entries: Iterable[Entry]) -> list[str]:
    """Return names that more than one entry has; a reader sees the last of each."""
    seen: set[tuple[str, bool]] = set()
    twice = []
    for entry in entries:
        key = (entry.name, entry.is_pathway)
        if key in seen:
            twice.append(f"{PATHWAY if entry.is_pathway else ''}{entry.name}")
        seen.add(key)
    return twice


def path_of(entry: Entry) -> str:
    """Return the path of a region or pathway in the state."""
    return f"{'pathways' if entry.is_pathway else 'regions'}/{entry.name}"
