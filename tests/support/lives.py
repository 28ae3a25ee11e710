"""Runs as the log tells them, put together by hand: to test what is a pure function of a run."""

from __future__ import annotations

from typing import Any

from holdfast.registry.history.actions import (
    Acknowledge,
    Action,
    AddCheckpoint,
    Claim,
    Commit,
    CreateRun,
    Evict,
    Eviction,
    Place,
    Recover,
    ReportMetrics,
    Rewind,
    SetPin,
    SetTag,
    line_digest,
)
from holdfast.registry.history.replay import RunManifest, Slot, advance
from holdfast.registry.history.retention import RetentionPlan
from holdfast.registry.spec import RunSpec
from holdfast.registry.values.digest import Digest

DAY_MS = 24 * 60 * 60 * 1000


def digest(i: object) -> Digest:
    return Digest.of(f"{i}".encode())


def place(manifest: Digest, number: int = 0, *, generation: int = 0) -> Place:
    """Return the place of a manifest, with another placement for every number."""
    return Place(
        manifest=manifest,
        manifest_generation=generation,
        placement=digest(f"placement {number} of {manifest}"),
        placement_generation=0,
    )


def creation(spec: RunSpec | None = None, **fields: Any) -> CreateRun:
    return CreateRun(
        config=None, config_hash=Digest.of(b""), seed="0" * 16, environment={}, spec=spec, **fields
    )


class Life:
    """A run as it is lived: one call, one commit in a slot of its own; one day each."""

    def __init__(self, spec: RunSpec | None = None) -> None:
        self.manifest = RunManifest(run_id="r")
        self.slots: list[Slot] = []
        self.then(creation(spec))

    def then(self, *actions: Action) -> Life:
        """Commit."""
        commit = Commit(
            n=self.manifest.commits,
            run="r",
            prev=self.manifest.head,
            write=f"w{self.manifest.commits}",
            author="me@here",
            time_ms=self.manifest.commits * DAY_MS,
            actions=actions,
        )
        self.slots.append(Slot.build(self.manifest.next_slot, [commit]))
        self.manifest = advance(self.manifest, self.slots[-1:])
        assert self.manifest.head == line_digest(commit.encode())
        return self

    def save(
        self,
        step: int,
        phase: str = "main",
        *,
        metrics: dict[str, float] | None = None,
        **fields: Any,
    ) -> Life:
        """Add a checkpoint; the content is that of its commit."""
        fields.setdefault("manifest", digest(self.manifest.commits))
        fields.setdefault("size_bytes", 1)
        return self.then(AddCheckpoint(step=step, phase=phase, metrics=metrics or {}, **fields))

    def report(self, n: int, tier: str | None = None, **metrics: float) -> Life:
        return self.then(ReportMetrics(checkpoint=n, metrics=metrics, tier=tier))

    def rewind(self, to: int | None) -> Life:
        return self.then(Rewind(to=to))

    def tag(self, n: int, name: str = "t") -> Life:
        return self.then(SetTag(name=name, checkpoint=n))

    def gate(self, n: int, name: str = "g") -> Life:
        manifest = self.manifest.by_n[n].manifest
        return self.then(SetPin(kind="gate", name=name, manifest=manifest, checkpoint=n))

    def claim(self, n: int, until_ms: int, group: str = "evals") -> Life:
        return self.then(Claim(group=group, checkpoint=n, follower="f", until_ms=until_ms))

    def acknowledge(self, n: int, group: str = "evals") -> Life:
        return self.then(Acknowledge(group=group, checkpoint=n, follower="f"))

    def evict(self, *checkpoints: int, reason: str = "for room") -> Life:
        gone = tuple(Eviction(checkpoint=n, reason=reason) for n in checkpoints)
        return self.then(Evict(evictions=gone))

    def recover(self, *checkpoints: int) -> Life:
        return self.then(Recover(checkpoints=checkpoints))

    def execute(self, plan: RetentionPlan) -> Life:
        """Evict the checkpoints that a plan evicts."""
        return self.evict(*evicted(plan)) if plan.evicted else self

    def __repr__(self) -> str:
        """Return the actions of all commits, for the message of a failed test."""
        said = [f"{n}: {self._line(n)}" for n in range(self.manifest.commits)]
        return "\n".join(said)

    def _line(self, n: int) -> str:
        ((_, commit),) = self.slots[n].commits
        return ", ".join(repr(action) for action in commit.actions)

    @property
    def now_ms(self) -> int:
        """The time of the last commit."""
        return (self.manifest.commits - 1) * DAY_MS


def kept(plan: RetentionPlan) -> list[int]:
    return [verdict.checkpoint.n for verdict in plan.kept]


def evicted(plan: RetentionPlan) -> list[int]:
    return [verdict.checkpoint.n for verdict in plan.evicted]


def reasons(plan: RetentionPlan, n: int) -> tuple[str, ...]:
    (found,) = [one.reasons for one in (*plan.kept, *plan.evicted) if one.checkpoint.n == n]
    return found
