"""Run specifications: what a preset, or a user's own file, says about a run."""

from __future__ import annotations

from holdfast.registry.spec.policies import Retention, Tier
from holdfast.registry.spec.run_spec import (
    Draw,
    DtypeRule,
    Gate,
    Phase,
    Pool,
    RunSpec,
    Stream,
)
from holdfast.registry.spec.transition_table import Change, Readiness, Row, Transition

__all__ = [
    "Change",
    "Draw",
    "DtypeRule",
    "Gate",
    "Phase",
    "Pool",
    "Readiness",
    "Retention",
    "Row",
    "RunSpec",
    "Stream",
    "Tier",
    "Transition",
]
