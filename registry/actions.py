"""What can be written into a run's history: the closed union of actions, and the lines of a slot.

A commit is a list of actions. What a run is now is their replay (`registry.state`). A kind that is
not listed here is an error on reading, never skipped: a reader that skipped an eviction or a pin
would hand out, or collect, the wrong thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from registry import canonical
from registry.digest import Digest
from registry.errors import InvalidInput, Malformed, UnsupportedFormat
from registry.keys import ObjectKey
from registry.records import DigestField, FloatField, Record

#: Number of a training step, PPO update or epoch; any counter that a run saves by.
Step = Annotated[int, Field(ge=0, le=2**53)]
PhaseName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
TagName = PhaseName
Metrics = dict[str, FloatField]
#: A value encoded by `registry.pytree` without arrays.
Plain = Any

RunStatus = Literal["running", "interrupted", "completed", "failed"]


class Monitor(Record):
    """The metric that decides which checkpoint is best.

    Attributes:
        metric: Name of the metric, as given to `save` or `report`.
        mode: Whether the lowest (`min`) or the highest (`max`) value wins.
    """

    metric: str
    mode: Literal["min", "max"]

    def __init__(self, **fields: Any) -> None:
        # Users make monitors by hand; their mistakes get an error of this project's tree.
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise InvalidInput(
                "not a monitor", expected="metric: a name, mode: 'min' or 'max'", found=fields
            ) from error


class CreateRun(Record):
    """Begin a run. The first action of commit 0; it references no manifest.

    Attributes:
        config: The training configuration.
        config_hash: SHA-256 of its canonical encoding.
        input_hash: SHA-256 of the input data, where the caller gives one.
        seed: The master seed, 64 bits in hexadecimal: beyond 2^53 other readers' numbers round.
        environment: Git commit, versions, device, host.
        monitors: What decides `best`; the first one is `best` itself.
    """

    action: Literal["run.create"] = "run.create"
    config: Plain = None
    config_hash: DigestField
    input_hash: str | None = None
    seed: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    environment: dict[str, str]
    monitors: tuple[Monitor, ...] = ()


class SetStatus(Record):
    """Say how the run stands."""

    action: Literal["run.status"] = "run.status"
    status: RunStatus


class TakeOver(Record):
    """Make this trainer the only one that may save.

    Attributes:
        token: Random, of the training handle.
        host: Where it runs, for the message that the fenced one gets.
    """

    action: Literal["run.take_over"] = "run.take_over"
    token: str
    host: str


class Rewind(Record):
    """Supersede every checkpoint after the one that training resumed from.

    Attributes:
        to: Commit number of the checkpoint that was resumed from; `None` supersedes all.
    """

    action: Literal["run.rewind"] = "run.rewind"
    to: int | None = None


class AddCheckpoint(Record):
    """Add a checkpoint.

    Attributes:
        manifest: Its id.
        phase: Name or number of the phase.
        step: The counter's value.
        metrics: Values known at save.
        meta: Anything else worth keeping beside the state.
        size_bytes: Bytes of all tensors.
    """

    action: Literal["checkpoint.add"] = "checkpoint.add"
    manifest: DigestField
    phase: PhaseName
    step: Step
    metrics: Metrics = Field(default={})
    meta: Plain = None
    size_bytes: Annotated[int, Field(ge=0)]


class ReportMetrics(Record):
    """Add or replace metrics of a checkpoint.

    Attributes:
        checkpoint: Commit number of the checkpoint.
        metrics: The values.
    """

    action: Literal["checkpoint.report"] = "checkpoint.report"
    checkpoint: int
    metrics: Metrics


class SetTag(Record):
    """Point a movable name at a checkpoint."""

    action: Literal["tag.set"] = "tag.set"
    name: TagName
    checkpoint: int


Action = Annotated[
    CreateRun | SetStatus | TakeOver | Rewind | AddCheckpoint | ReportMetrics | SetTag,
    Field(discriminator="action"),
]


class Commit(Record):
    """A line of history, the same bytes in every registry.

    Attributes:
        n: Position among the run's commits, dense from 0.
        run: Id of the run.
        prev: SHA-256 of the commit line before it; absent in commit 0.
        write: Random id of this write, by which its author knows it again.
        author: `user@host` for people to read.
        time_ms: Milliseconds since the epoch by the author's clock, for information.
        actions: What happened.
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
    """Where a manifest lies in this registry; the last line for a manifest wins.

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
    """A sweep passed here: whoever commits after this line has observed epoch `epoch`."""

    kind: Literal["mark"] = "mark"
    epoch: Annotated[int, Field(ge=1)]


Line = Commit | Place | Mark

_LINE: TypeAdapter[Line] = TypeAdapter(
    Annotated[Line, Field(discriminator="kind")], config=ConfigDict(defer_build=True)
)
_KINDS = {"commit", "place", "mark"}


def decode_line(line: bytes, *, where: str) -> Line:
    """Parse one line of a slot.

    Raises:
        UnsupportedFormat: A kind of line or action that this version does not know.
        Malformed: It breaks the format.
    """
    body = canonical.decode(line, where=where)
    try:
        return _LINE.validate_json(line)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=False)[0]
        if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
            raise UnsupportedFormat(
                "unknown kind of line or action",
                where=where,
                found=_tag(body, detail["loc"]),
                hint="It was written by a newer Holdfast: upgrade this one.",
            ) from error
        place = ".".join(str(part) for part in detail["loc"])
        raise Malformed(
            "breaks the slot format", where=where, found=f"{place}: {detail['msg']}"
        ) from error
    except ValueError as error:
        raise Malformed("breaks the slot format", where=where, found=error) from error


def _tag(body: Any, place: tuple[int | str, ...]) -> object:
    for part in place:
        if isinstance(body, Mapping) and part in _KINDS:
            continue
        if isinstance(body, Mapping | list | tuple):
            body = body[part]  # type: ignore[index]
    return (
        (body.get("action") or body.get("kind"))
        if isinstance(body, Mapping)
        else type(body).__name__
    )


def line_digest(line: bytes) -> Digest:
    """Return the link by which the next commit chains to a commit line."""
    return Digest.of(line)
