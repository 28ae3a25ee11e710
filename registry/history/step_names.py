"""The names of phases and steps: as in refs, and as callers gave them."""

from __future__ import annotations

from typing import Protocol

from holdfast.registry.history.actions import Parent
from holdfast.registry.values import Digest


class _AtStep(Protocol):
    """A checkpoint, or a state made from one, with its phase and step."""

    @property
    def phase(self) -> str: ...
    @property
    def step(self) -> int: ...


def step_ref(at: _AtStep) -> str:
    """Return the name of a step within its run, such as `main/step00000200`."""
    return f"{phase_segment(at.phase)}/step{at.step:08d}"


class _Kept(_AtStep, Protocol):
    """A checkpoint of a run."""

    @property
    def manifest(self) -> Digest: ...
    @property
    def superseded(self) -> bool: ...


def kept_ref(record: _Kept) -> str:
    """Return the name within its run that finds a checkpoint: of a superseded one its id."""
    return record.manifest.short if record.superseded else step_ref(record)


def parent_ref(parent: Parent) -> str:
    """Return the name of the checkpoint that a fork continues from."""
    return f"{parent.run}/{step_ref(parent)}"


def phase_segment(phase: str) -> str:
    """Return a phase as in a ref: `phase2` for a number, otherwise its name."""
    return f"phase{phase}" if phase.isdigit() else phase


def phase_value(phase: str) -> int | str:
    """Return a phase as the caller gave it: a number, or a name."""
    return int(phase) if phase.isdigit() else phase
