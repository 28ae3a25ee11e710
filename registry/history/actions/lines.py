"""The closed union of actions, and the lines of a slot: commits, places, marks and ends."""

from typing import Annotated, Literal

from holdfast.registry.errors import Malformed, UnsupportedFormat
from holdfast.registry.history.actions import checkpoints, pool, run
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
    run.CreateRun
    | run.SetStatus
    | run.TakeOver
    | run.Rewind
    | run.EnterPhase
    | run.DropRun
    | run.HideRun
    | run.UndropRun
    | run.RaiseVersion
    | checkpoints.AddCheckpoint
    | checkpoints.ReportMetrics
    | checkpoints.Evict
    | checkpoints.Recover
    | checkpoints.Thin
    | checkpoints.SetTag
    | checkpoints.RemoveTag
    | checkpoints.SetPin
    | checkpoints.PointRelease
    | pool.Promote
    | pool.RateMatch
    | pool.EvictEntries
    | run.AppendStream
    | run.ArchiveStream
    | checkpoints.Claim
    | checkpoints.Acknowledge
    | checkpoints.SetHold
    | checkpoints.RemoveHold
    | checkpoints.SetNote
    | run.SetLabels,
    Tagged("action"),
]


class Commit(Record):
    """A commit of the run, the same bytes in every registry."""

    kind: Literal["commit"] = "commit"
    n: Annotated[int, Field(ge=0)]  # number of the commit, dense from 0
    run: str  # id of the run
    prev: DigestField | None = None  # SHA-256 of the line of the commit before; absent in commit 0
    write: str  # random id of this write; its author recognizes the commit by it
    author: str  # `user@host`, for people
    time_ms: int  # milliseconds since the epoch by the author's clock; nothing depends on it
    actions: tuple[Action, ...]  # the changes that it makes


class Place(Record):
    """Where a manifest is stored in this registry; the last line for a manifest counts."""

    kind: Literal["place"] = "place"
    manifest: DigestField  # the checkpoint's id
    manifest_generation: Annotated[int, Field(ge=0)]  # generation of the manifest's key
    placement: DigestField  # digest of its placement
    placement_generation: Annotated[int, Field(ge=0)]  # generation of the placement's key

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


class Free(Record):
    """The hidden run holds nothing from here on, in this registry."""

    kind: Literal["free"] = "free"


class Seal(Record):
    """A collector has noted what the run holds: a commit after it needs a marker before."""

    kind: Literal["seal"] = "seal"


Line = Commit | Place | Mark | Forget | Free | Seal

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
