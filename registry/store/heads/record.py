"""The head of a run as it was seen, and the file with the heads of one registry.

The file is made of lines like every JSON file of a registry: a header, a line for each run, and a
digest of all of it. `holdfast verify` writes and reads one, and a user's state folder has one for
each registry.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, NamedTuple, Self

from holdfast.registry.errors import Malformed, RolledBack
from holdfast.registry.objects import join_lines, split_lines
from holdfast.registry.values import Digest, DigestField, Field, Record

#: A file that is longer is not read.
MAX_FILE_BYTES = 64 * 2**20


class Head(Record):
    """The head of a run: how far its log went."""

    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    commits: Annotated[int, Field(ge=1)]  # number of its commits, at least 1
    head: DigestField  # link to the last one, in which all before it are chained
    #: Number of its slots; these belong to one registry, while commits are the same in all.
    slots: Annotated[int, Field(ge=1)]
    #: The slot that holds the last commit, if it is known.
    slot: Annotated[int, Field(ge=0)] | None = None

    def is_further(self, other: Head | None) -> bool:
        """Return whether this head is later than another one of the same history."""
        return other is None or (self.commits, self.slots) > (other.commits, other.slots)

    def skipped(self, snapshot: int) -> range:
        """Return the slots before a snapshot that prove this head."""
        if self.slot is not None:
            return range(self.slot, min(self.slot + 1, snapshot))
        # The next commit names the last one; it is in one of the slots after those that were seen.
        return range(self.slots, snapshot)

    def require(self, url: str, slots: int, commits: int, link: Digest | None) -> None:
        """Raise if a log does not continue from this head."""
        if slots < self.slots or commits < self.commits:
            raise RolledBack(
                "the log is shorter than this machine has seen it",
                where=f"{url}: {self.run}",
                expected=f"at least {self.commits} commits in {self.slots} slots",
                found=f"{commits} commits in {slots} slots",
                hint=advice(url),
            )
        if link != self.head:
            raise RolledBack(
                "this is not the log that this machine has seen",
                where=f"{url}: {self.run}, commit {self.commits - 1}",
                expected=self.head.hex(),
                found=link.hex() if link is not None else "no such commit in that slot",
                hint=advice(url),
            )


class _Header(Record):
    format: Literal["holdfast.heads/1"] = "holdfast.heads/1"
    registry: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    url: str
    epoch: Annotated[int, Field(ge=0)] = 0


#: A line of a run. There may be thousands, and a reader needs one: each is parsed on request.
_LINE = re.compile(
    rb'\{"commits":[1-9][0-9]{0,15},"head":"[0-9a-f]{64}",'
    rb'"run":"([A-Za-z0-9][A-Za-z0-9._-]{0,127})",'
    rb'(?:"slot":(?:0|[1-9][0-9]{0,15}),)?"slots":[1-9][0-9]{0,15}\}'
)


class HeadLines(Mapping[str, Head]):
    """Heads by run, as lines of a file, in the order in which they were added."""

    def __init__(self, lines: Mapping[str, bytes] | None = None) -> None:
        self.lines = dict(lines or {})

    def __getitem__(self, run_id: str) -> Head:
        return Head.parse(self.lines[run_id], where=run_id)

    def __iter__(self) -> Iterator[str]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def add(self, head: Head) -> None:
        """Add a head at the end, and drop the earlier one of its run."""
        self.lines.pop(head.run, None)
        self.lines[head.run] = head.encode()

    def newest(self, most: int) -> HeadLines:
        """Return the `most` heads that were added last."""
        return HeadLines(dict(list(self.lines.items())[-most:]))


class HeadsFile(NamedTuple):
    """The heads of one registry."""

    registry: str  # its id
    url: str  # its URL, for people
    epoch: int  # the highest epoch that was seen; 0 before any
    heads: HeadLines  # the heads by run

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        header = _Header(registry=self.registry, url=self.url, epoch=self.epoch)
        return join_lines([header.encode(), *self.heads.lines.values()])

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> Self:
        """Read the bytes of a file."""
        first, *rest = split_lines(data, where=where)
        header = _Header.parse(first, where=where)
        lines = {}
        for line in rest:
            match = _LINE.fullmatch(line)
            run_id = match[1].decode() if match else ""
            if match is None or run_id in lines:
                what = "not a line of a run, or a second line of a run"
                raise Malformed(what, where=where, found=repr(line[:200]))
            lines[run_id] = line
        return cls(header.registry, header.url, header.epoch, HeadLines(lines))


def advice(url: str) -> str:
    """Return advice about a log that was rolled back."""
    return (
        "Somebody replaced it by an older or different copy, or deleted its newest slots: find out "
        "who, and restore the log from a backup. If the change was intended, run "
        f"`holdfast trust {url}`."
    )
