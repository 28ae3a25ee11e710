"""A run at one slot of its log, and the questions that it answers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from registry.actions import CreateRun, Place, RunStatus
from registry.digest import Digest
from registry.monitors import Monitor
from registry.records import AtFirstUse, DigestField, PhaseName, Record
from registry.spec import RunSpec
from registry.state.records import (
    CheckpointRecord,
    GroupRecord,
    PhaseRecord,
    Pin,
    PoolRecord,
    StreamRecord,
    WriterRecord,
)

FORMAT: Literal["holdfast.run/1"] = "holdfast.run/1"


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
        dropped: Why everything that it held was released; `None` while it holds it.
        writer: Who may save.
        phase: The phase that training is in; `None` before the first checkpoint.
        phases: Phases that were entered by a transition.
        checkpoints: Every checkpoint in log order, evicted ones included.
        pins: Gates, releases, artifacts and tags.
        release: The version that `releases/latest` names.
        pool: Every entry of the opponent pool by version, evicted ones included.
        next_version: Version that the next entry gets.
        matches: The newest matches that were recorded.
        streams: Streams.
        groups: Groups of followers.
        places: The place of each manifest in this registry.
        epoch: Highest epoch whose mark stands in the log.
    """

    format: Literal["holdfast.run/1"] = FORMAT
    run_id: str
    next_slot: Annotated[int, Field(ge=0)] = 0
    commits: int = 0
    head: DigestField | None = None
    created: Annotated[CreateRun, AtFirstUse()] | None = None
    created_ms: int = 0
    status: RunStatus = "running"
    dropped: str | None = None
    writer: WriterRecord | None = None
    phase: PhaseName | None = None
    phases: tuple[PhaseRecord, ...] = ()
    checkpoints: tuple[CheckpointRecord, ...] = ()
    pins: tuple[Pin, ...] = ()
    release: str | None = None
    pool: tuple[PoolRecord, ...] = ()
    next_version: int = 1
    matches: tuple[str, ...] = ()
    streams: tuple[StreamRecord, ...] = ()
    groups: tuple[GroupRecord, ...] = ()
    places: tuple[Place, ...] = ()
    epoch: int = 0

    @classmethod
    def empty(cls, run_id: str) -> Self:
        """Return a run before its first slot; the rules for what is read are not built for it."""
        return cls.model_construct(run_id=run_id)

    @cached_property
    def by_n(self) -> dict[int, CheckpointRecord]:
        """Checkpoints by the number of the commit that added them."""
        return {checkpoint.n: checkpoint for checkpoint in self.checkpoints}

    @cached_property
    def by_manifest(self) -> dict[Digest, Place]:
        """Places by manifest."""
        return {place.manifest: place for place in self.places}

    @cached_property
    def spec(self) -> RunSpec:
        """What the run is to be; without a preset, its monitors and nothing else."""
        if self.created is None:
            return RunSpec()
        # Not checked again: a run of an older version may have two monitors of one metric.
        return self.created.spec or RunSpec.model_construct(monitors=self.created.monitors)

    @property
    def monitors(self) -> tuple[Monitor, ...]:
        """What decides `best` in the phase that training is in."""
        return self.spec.phase(self.phase or self._first_phase).monitors

    @property
    def _first_phase(self) -> str:
        return self.spec.phases[0].name if self.spec.phases else ""

    @property
    def tags(self) -> dict[str, int]:
        """Checkpoints by the tags that name them, as commit numbers."""
        return {pin.name: pin.checkpoint or 0 for pin in self.pins if pin.kind == "tag"}

    def pin(self, kind: str, name: str) -> Pin | None:
        """Return the pin of a kind and name."""
        for pin in self.pins:
            if (pin.kind, pin.name) == (kind, name):
                return pin
        return None

    def pins_of(self, kind: str) -> list[Pin]:
        """Return the pins of a kind, in the order in which they were set."""
        return [pin for pin in self.pins if pin.kind == kind]

    def stream(self, name: str) -> StreamRecord | None:
        """Return a stream by name."""
        return next((stream for stream in self.streams if stream.name == name), None)

    def group(self, name: str) -> GroupRecord:
        """Return a group of followers by name; an empty one before its first claim."""
        found = (group for group in self.groups if group.name == name)
        return next(found, GroupRecord(name=name))

    def roster(self) -> list[PoolRecord]:
        """Return the entries of the pool that play, oldest first."""
        return [entry for entry in self.pool if entry.evicted is None]

    def entered(self, phase: str) -> PhaseRecord | None:
        """Return how a phase was entered last on the current line of training."""
        for record in reversed(self.phases):
            if record.to_phase == phase and not record.superseded:
                return record
        return None

    def live(self, phase: str | None = None) -> list[CheckpointRecord]:
        """Return the kept checkpoints of the current line of training, in log order."""
        if phase is None:
            return list(self._live)
        return [checkpoint for checkpoint in self._live if checkpoint.phase == phase]

    @cached_property
    def _live(self) -> tuple[CheckpointRecord, ...]:
        if self.dropped is not None:
            return ()
        return tuple(one for one in self.checkpoints if one.evicted is None and not one.superseded)

    def latest(self, phase: str | None = None) -> CheckpointRecord | None:
        """Return the last live checkpoint in log order whose weights are finite."""
        for checkpoint in reversed(self._live):
            if not checkpoint.held_back and phase in (None, checkpoint.phase):
                return checkpoint
        return None

    def best(self, monitor: Monitor, phase: str | None = None) -> CheckpointRecord | None:
        """Return the live checkpoint with the best value; NaN and missing never win.

        Of equal values the first one stays best, as a tracker that waits for an improvement has it.
        Where phases are declared, the values of different phases are not compared: without `phase`
        it is the best of the phase that training is in.
        """
        return next(iter(self.ranked(monitor, phase)), None)

    def ranked(self, monitor: Monitor, phase: str | None = None) -> list[CheckpointRecord]:
        """Return the live checkpoints that have a value, the best first."""
        if phase is None and self.spec.phases:
            phase = self.phase
        rated = [
            (monitor.rank(checkpoint.metrics), checkpoint.n, checkpoint)
            for checkpoint in self.live(phase)
            if not checkpoint.held_back
        ]
        # Before they are sorted: among NaN nothing has an order.
        return [found for *_, found in sorted(one for one in rated if not math.isnan(one[0]))]

    @cached_property
    def held(self) -> frozenset[Digest]:
        """Every manifest that the run needs.

        What is not among these is dead: collection may remove what it alone uses, and nobody may
        name it again without making sure that it is still there.
        """
        return frozenset(manifest for manifest, *_ in self._holdings())

    def holders(self) -> dict[Digest, tuple[str, ...]]:
        """Return the manifests in `held`, each with refs within the run of what needs it."""
        found: dict[Digest, list[str]] = {}
        for manifest, *parts in self._holdings():
            shown = (part.short if isinstance(part, Digest) else part for part in parts)
            found.setdefault(manifest, []).append("/".join(shown))
        return {manifest: tuple(refs) for manifest, refs in found.items()}

    def _holdings(self) -> Iterator[tuple[Any, ...]]:
        """Yield every manifest that is needed, with the parts of a ref of what needs it."""
        if self.dropped is not None:
            return
        for checkpoint in self.checkpoints:
            if checkpoint.evicted is None:
                yield checkpoint.manifest, checkpoint.manifest
                for name, manifest in checkpoint.companions.items():
                    yield manifest, checkpoint.manifest, "companions", name
        for pin in self.pins:
            yield pin.manifest, pin.ref
            if pin.card is not None:
                yield pin.card, pin.ref, "card"
        for entry in self.roster():
            yield entry.manifest, f"pool/v{entry.version:04d}"
        for stream in self.streams:
            for segment in stream.segments:
                yield segment.manifest, "streams", stream.name
            for archive in stream.archives:
                for segment in archive.segments:
                    yield segment.manifest, "streams", stream.name, archive.label
        for phase in self.phases:
            if not phase.superseded:
                for name, manifest in phase.companions.items():
                    yield manifest, "companions", name

    def is_placed(self, place: Place) -> bool:
        """Return whether a place is current and the manifest that it is of is needed: rule W2a."""
        current = self.by_manifest.get(place.manifest) == place
        return current and place.manifest in self.held
