"""The specification of a run, as data: what a preset or a user's own file demands.

- `run_spec`: `RunSpec` with its phases, streams, gates and pool; `policies`: `Retention`, `Tier`.
- `monitors`: which checkpoint is best; `transition_table`: what happens between two phases.
- `presets`: the specifications that are shipped, and those of users, read from TOML.
- `doubts`: warns of settings that may be mistakes; `requirements`: checks a state against a
  specification; `seeds`: the seeds of phases.
- `migrations`: functions of the caller that bring an old state to a new schema.

Nothing here reads a store or decides for a run: `history` plans retention, `transitions` carries
out the tables. A run's first commit holds its specification, so a field that is added needs a
default, and none may change its meaning. Specified in docs/spec.md, sections 20 and 21.
"""

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
from holdfast.registry.spec.transition_table import Change, Pivot, Readiness, Row, Transition

__all__ = [
    "Change",
    "Draw",
    "DtypeRule",
    "Gate",
    "Phase",
    "Pivot",
    "Pool",
    "Readiness",
    "Retention",
    "Row",
    "RunSpec",
    "Stream",
    "Tier",
    "Transition",
]
