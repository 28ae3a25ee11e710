"""The closed union of actions, and the lines of a slot: commits, places, marks and ends."""

from __future__ import annotations

from typing import Annotated, Literal

from holdfast.registry.errors import Malformed, UnsupportedFormat
from holdfast.registry.history.actions.checkpoints import (
    Acknowledge,
    AddCheckpoint,
    Claim,
    Evict,
    PointRelease,
    Recover,
    RemoveTag,
    ReportMetrics,
    SetPin,
    SetTag,
    Thin,
)
from holdfast.registry.history.actions.pool import EvictEntries, Promote, RateMatch
from holdfast.registry.history.actions.run import (
    AppendStream,
    ArchiveStream,
    CreateRun,
    DropRun,
    EnterPhase,
    Rewind,
    SetStatus,
    TakeOver,
)
from holdfast.registry.objects import ObjectKey
from holdfast.registry.values import (
    Digest,
    DigestField,
    Field,
    InvalidRecord,
    Record,
    Tagged,
    canonical,
    read_as,
)

Action = Annotated[
    CreateRun
    | SetStatus
    | TakeOver
    | Rewind
    | EnterPhase
    | DropRun
    | AddCheckpoint
    | ReportMetrics
    | Evict
    | Recover
    | Thin
    | SetTag
    | RemoveTag
    | SetPin
    | PointRelease
    | Promote
    | RateMatch
    | EvictEntries
    | AppendStream
    | ArchiveStream
    | Claim
    | Acknowledge,
    Tagged("action"),
]


class Commit(Record):
    """A commit of the run, the same bytes in every registry.

    Attributes:
        n: Number of the commit, dense from 0.
        run: Id of the run.
        prev: SHA-256 of the line of the commit before; absent in commit 0.
        write: Random id of this write; its author recognizes the commit by it.
        author: `user@host`, for people.
        time_ms: Milliseconds since the epoch by the author's clock; nothing depends on it.
        actions: The changes that it makes.
    """

    kind: Literal["commit"] = "commit"
    n: Annotated[int, Field(ge=0)]
    run: str
    prev: DigestField | None = None
    write: str
    author: str
    time_ms: int
    actions: tuple[Action, ...]


class Place(Record):
    """Where a manifest is stored in this registry; the last line for a manifest counts.

    Attributes:
        manifest: The checkpoint's id.
        manifest_generation: Generation of the manifest's key.
        placement: Digest of its placement.
        placement_generation: Generation of the placement's key.
    """

    kind: Literal["place"] = "place"
    manifest: DigestField
    manifest_generation: Annotated[int, Field(ge=0)]
    placement: DigestField
    placement_generation: Annotated[int, Field(ge=0)]

    @property
    def manifest_key(self) -> ObjectKey:
        """The key of the manifest."""
        return ObjectKey("manifests", self.manifest, self.manifest_generation)

    @property
    def placement_key(self) -> ObjectKey:
        """The key of its placement."""
        return ObjectKey("placements", self.placement, self.placement_generation)


class Mark(Record):
    """A collector wrote this mark: later commits know of the epochs up to `epoch`."""

    kind: Literal["mark"] = "mark"
    epoch: Annotated[int, Field(ge=1)]


class Forget(Record):
    """An operator gave the run up, since no collector could read it: nothing may follow."""

    kind: Literal["forget"] = "forget"


Line = Commit | Place | Mark | Forget

_LINE = Annotated[Line, Tagged("kind")]


def decode_line(line: bytes, *, where: str) -> Line:
    """Parse one line of a slot."""
    try:
        found: Line = read_as(_LINE, canonical.decode(line, where=where))
        return found
    except InvalidRecord as error:
        path, text, kind, value = error.problems[0]
        if kind == "tag":
            raise UnsupportedFormat(
                "unknown kind of line or action",
                where=where,
                found=value,
                hint="It was written by a newer Holdfast: upgrade this one.",
            ) from error
        named = ".".join(map(str, path))
        raise Malformed("breaks the slot format", where=where, found=f"{named}: {text}") from error


def line_digest(line: bytes) -> Digest:
    """Return the digest of a commit line, which the next commit has as `prev`."""
    return Digest.of(line)
