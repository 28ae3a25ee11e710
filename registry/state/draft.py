"""A run while slots are folded in: the fields of its manifest, open to change."""

from __future__ import annotations

from typing import Any

from registry.actions import Place
from registry.digest import Digest
from registry.errors import Malformed
from registry.state.records import (
    CheckpointRecord,
    GroupRecord,
    PhaseRecord,
    Pin,
    PoolRecord,
    StreamRecord,
)
from registry.state.run_manifest import RunManifest


class Draft:
    """A run while slots are folded in.

    Attributes:
        base: The run before.
        fields: Simple fields that have changed.
        where: The slot that is being folded in, for messages.
        time_ms: The time that the current commit gives.
    """

    def __init__(self, state: RunManifest) -> None:
        self.base = state
        self.fields: dict[str, Any] = {}
        self.where = ""
        self.time_ms = 0
        self.next_slot = state.next_slot
        self.commits = state.commits
        self.head = state.head
        self.created = state.created
        self.phase = state.phase
        self.next_version = state.next_version
        self.phases: list[PhaseRecord] = list(state.phases)
        self.checkpoints: dict[int, CheckpointRecord] = {ck.n: ck for ck in state.checkpoints}
        self.pins: dict[tuple[str, str], Pin] = {(pin.kind, pin.name): pin for pin in state.pins}
        self.pool: dict[int, PoolRecord] = {entry.version: entry for entry in state.pool}
        self.streams: dict[str, StreamRecord] = {s.name: s for s in state.streams}
        self.groups: dict[str, GroupRecord] = {group.name: group for group in state.groups}
        self.places: dict[Digest, Place] = {place.manifest: place for place in state.places}
        self.epoch = state.epoch

    def require(self, holds: bool, rule: str) -> None:
        """Refuse a history that breaks a rule.

        Raises:
            Malformed: It does.
        """
        if not holds:
            raise Malformed(
                "the history is not legal",
                where=self.where,
                found=rule,
                hint="Run `holdfast verify`; do not write to this run until it is mended.",
            )

    def checkpoint(self, n: int) -> CheckpointRecord:
        """Return the checkpoint that commit `n` added."""
        self.require(n in self.checkpoints, f"checkpoint of commit {n}, which added none")
        return self.checkpoints[n]

    def change(self, n: int, **fields: object) -> None:
        """Change a checkpoint's record."""
        self.checkpoints[n] = self.checkpoints[n].model_copy(update=fields)

    def freeze(self) -> RunManifest:
        """Return the run as it is now."""
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
                "phase": self.phase,
                "phases": tuple(self.phases),
                "next_version": self.next_version,
                "checkpoints": tuple(self.checkpoints.values()),
                "pins": tuple(self.pins.values()),
                "pool": tuple(self.pool.values()),
                "streams": tuple(self.streams.values()),
                "groups": tuple(self.groups.values()),
                "places": tuple(self.places.values()),
                "epoch": self.epoch,
            }
        )
