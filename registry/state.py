"""What a run is now: the replay of its log by pure functions.

`RunManifest` is the result, a frozen value; `advance` folds further slots into it. The rules that
make a history legal are checked here and nowhere else, so that writers, readers, `verify` and
`sync` agree on them. Reading slots is the business of `registry.log`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from registry.actions import (
    AddCheckpoint,
    Commit,
    CreateRun,
    Line,
    Mark,
    Metrics,
    Monitor,
    PhaseName,
    Place,
    Plain,
    ReportMetrics,
    Rewind,
    RunStatus,
    SetStatus,
    SetTag,
    Step,
    TakeOver,
    decode_line,
    line_digest,
)
from registry.digest import Digest
from registry.errors import Malformed
from registry.framing import join_lines, split_lines
from registry.records import DigestField, Record

FORMAT: Literal["holdfast.run/1"] = "holdfast.run/1"


@dataclass(frozen=True, slots=True)
class Slot:
    """One numbered file of a run's log.

    Attributes:
        number: Its place in the log, dense from 0.
        data: The file's bytes.
        lines: What it says, each with its exact bytes.
    """

    number: int
    data: bytes
    lines: tuple[tuple[bytes, Line], ...]

    @classmethod
    def build(cls, number: int, lines: Sequence[Line | bytes]) -> Slot:
        """Assemble a slot from records, or from lines that are copied byte for byte."""
        encoded = [line if isinstance(line, bytes) else line.encode() for line in lines]
        return cls.decode(number, join_lines(encoded), where=f"slot {number}")

    @classmethod
    def decode(cls, number: int, data: bytes, *, where: str) -> Slot:
        """Verify and parse a file."""
        lines = split_lines(data, where=where)
        return cls(number, data, tuple((line, decode_line(line, where=where)) for line in lines))

    @property
    def commits(self) -> tuple[tuple[bytes, Commit], ...]:
        """The commit lines, each with its exact bytes."""
        return tuple((raw, line) for raw, line in self.lines if isinstance(line, Commit))


class CheckpointRecord(Record):
    """A checkpoint of a run.

    Attributes:
        n: Number of the commit that added it: its name within the run's history.
        manifest: Its id.
        phase: Phase it belongs to.
        step: The counter's value.
        metrics: The newest value of each metric.
        meta: What was kept beside the state.
        size_bytes: Bytes of all tensors.
        time_ms: When it was added, by its author's clock.
        superseded: Whether training resumed from an earlier one; it is never latest or best.
    """

    n: int
    manifest: DigestField
    phase: PhaseName
    step: Step
    metrics: Metrics
    meta: Plain = None
    size_bytes: int
    time_ms: int
    superseded: bool = False


class WriterRecord(Record):
    """The trainer that may save.

    Attributes:
        token: Random, of its handle.
        host: Where it runs.
        time_ms: When it took the run over, by its own clock.
    """

    token: str
    host: str
    time_ms: int


class RunManifest(Record):
    """A run at one slot of its log.

    Attributes:
        run_id: The run.
        next_slot: The slot that the next write goes to.
        commits: Number of commits.
        head: Link to the last commit line; `None` before the first.
        created: What the run was begun with; `None` before the first commit.
        created_ms: When, by its author's clock.
        status: How it stands.
        writer: Who may save.
        checkpoints: Every checkpoint in log order.
        tags: Movable names, each with a checkpoint's `n`.
        places: The place of each manifest in this registry.
        epoch: Highest epoch whose mark stands in the log.
    """

    format: Literal["holdfast.run/1"] = FORMAT
    run_id: str
    next_slot: Annotated[int, Field(ge=0)] = 0
    commits: int = 0
    head: DigestField | None = None
    created: CreateRun | None = None
    created_ms: int = 0
    status: RunStatus = "running"
    writer: WriterRecord | None = None
    checkpoints: tuple[CheckpointRecord, ...] = ()
    tags: dict[str, int] = Field(default={})
    places: tuple[Place, ...] = ()
    epoch: int = 0

    @cached_property
    def by_n(self) -> dict[int, CheckpointRecord]:
        """Checkpoints by the number of the commit that added them."""
        return {checkpoint.n: checkpoint for checkpoint in self.checkpoints}

    @cached_property
    def by_manifest(self) -> dict[Digest, Place]:
        """Places by manifest."""
        return {place.manifest: place for place in self.places}

    @property
    def monitors(self) -> tuple[Monitor, ...]:
        """What decides `best`."""
        return self.created.monitors if self.created else ()

    def live(self, phase: str | None = None) -> list[CheckpointRecord]:
        """Return the checkpoints of the current line of training, in log order."""
        return [
            checkpoint
            for checkpoint in self.checkpoints
            if not checkpoint.superseded and phase in (None, checkpoint.phase)
        ]

    def latest(self, phase: str | None = None) -> CheckpointRecord | None:
        """Return the last live checkpoint in log order."""
        for checkpoint in reversed(self.checkpoints):
            if not checkpoint.superseded and phase in (None, checkpoint.phase):
                return checkpoint
        return None

    def best(self, monitor: Monitor, phase: str | None = None) -> CheckpointRecord | None:
        """Return the live checkpoint with the best value; NaN and missing never win.

        Of equal values the first one stays best, as a tracker that waits for an improvement has it.
        """
        sign = 1.0 if monitor.mode == "min" else -1.0
        rated = [
            (sign * checkpoint.metrics[monitor.metric], checkpoint.n, checkpoint)
            for checkpoint in self.live(phase)
            if not math.isnan(checkpoint.metrics.get(monitor.metric, math.nan))
        ]
        return min(rated)[2] if rated else None


def advance(state: RunManifest, slots: Iterable[Slot]) -> RunManifest:
    """Fold further slots into a run.

    Raises:
        Malformed: They do not continue the log legally; the message names slot and rule.
    """
    draft = _Draft(state)
    for slot in slots:
        draft.apply(slot)
    return draft.freeze()


class _Draft:
    """A run while slots are folded in: the same fields, open to change."""

    def __init__(self, state: RunManifest) -> None:
        self.base = state
        self.fields: dict[str, Any] = {}
        self.where = ""
        self.time_ms = 0
        self.next_slot = state.next_slot
        self.commits = state.commits
        self.head = state.head
        self.created = state.created
        self.checkpoints = {checkpoint.n: checkpoint for checkpoint in state.checkpoints}
        self.tags = dict(state.tags)
        self.places = {place.manifest: place for place in state.places}
        self.epoch = state.epoch

    def apply(self, slot: Slot) -> None:
        self.where = f"{self.base.run_id}: slot {slot.number}"
        self.require(slot.number == self.next_slot, f"a gap before it at {self.next_slot}")
        for raw, line in slot.lines:
            match line:
                case Commit():
                    self.commit(raw, line)
                case Place():
                    self.places[line.manifest] = line
                case Mark():
                    # Collectors may overlap, so an older mark can stand after a newer one.
                    self.epoch = max(self.epoch, line.epoch)
        self.next_slot += 1

    def commit(self, raw: bytes, commit: Commit) -> None:
        self.time_ms = commit.time_ms
        self.require(commit.run == self.base.run_id, f"a commit of run {commit.run}")
        self.require(commit.n == self.commits, f"commit {commit.n} where {self.commits} is due")
        self.require(
            commit.prev == self.head, f"commit {commit.n} does not chain to the one before"
        )
        begins = bool(commit.actions) and isinstance(commit.actions[0], CreateRun)
        self.require(begins == (commit.n == 0), "a run is begun by commit 0 and by no other")
        for action in commit.actions:
            _APPLY[type(action)](self, action)
        self.commits += 1
        self.head = line_digest(raw)

    def require(self, holds: bool, rule: str) -> None:
        if not holds:
            raise Malformed(
                "the history is not legal",
                where=self.where,
                found=rule,
                hint="Run `holdfast verify`; do not write to this run until it is mended.",
            )

    def known(self, n: int) -> CheckpointRecord:
        self.require(n in self.checkpoints, f"checkpoint of commit {n}, which added none")
        return self.checkpoints[n]

    def freeze(self) -> RunManifest:
        kept = {name: getattr(self.base, name) for name in RunManifest.model_fields}
        # Not model_copy: it would carry the cached lookups of the old state along.
        return RunManifest.model_construct(
            **kept
            | self.fields
            | {
                "next_slot": self.next_slot,
                "commits": self.commits,
                "head": self.head,
                "created": self.created,
                "checkpoints": tuple(self.checkpoints.values()),
                "tags": self.tags,
                "places": tuple(self.places.values()),
                "epoch": self.epoch,
            }
        )


def _create(draft: _Draft, action: CreateRun) -> None:
    draft.require(draft.created is None, "the run is begun twice")
    draft.created = action
    draft.fields["created_ms"] = draft.time_ms


def _status(draft: _Draft, action: SetStatus) -> None:
    draft.fields["status"] = action.status


def _take_over(draft: _Draft, action: TakeOver) -> None:
    draft.fields["writer"] = WriterRecord(
        token=action.token, host=action.host, time_ms=draft.time_ms
    )


def _rewind(draft: _Draft, action: Rewind) -> None:
    if action.to is not None:
        draft.known(action.to)
    for n, checkpoint in draft.checkpoints.items():
        if (action.to is None or n > action.to) and not checkpoint.superseded:
            draft.checkpoints[n] = checkpoint.model_copy(update={"superseded": True})


def _add(draft: _Draft, action: AddCheckpoint) -> None:
    n = draft.commits
    draft.require(n > 0, "commit 0 references a manifest")
    draft.require(n not in draft.checkpoints, "two checkpoints in one commit")
    draft.checkpoints[n] = CheckpointRecord(
        n=n,
        manifest=action.manifest,
        phase=action.phase,
        step=action.step,
        metrics=action.metrics,
        meta=action.meta,
        size_bytes=action.size_bytes,
        time_ms=draft.time_ms,
    )


def _report(draft: _Draft, action: ReportMetrics) -> None:
    checkpoint = draft.known(action.checkpoint)
    merged = {**checkpoint.metrics, **action.metrics}
    draft.checkpoints[checkpoint.n] = checkpoint.model_copy(update={"metrics": merged})


def _tag(draft: _Draft, action: SetTag) -> None:
    draft.tags[action.name] = draft.known(action.checkpoint).n


_APPLY: dict[type, Callable[[_Draft, Any], None]] = {
    CreateRun: _create,
    SetStatus: _status,
    TakeOver: _take_over,
    Rewind: _rewind,
    AddCheckpoint: _add,
    ReportMetrics: _report,
    SetTag: _tag,
}
