"""Carry out the transition from one phase of a run to the next.

- `execution`: `transition`: find the source, check it, build the new state, commit once.
- `readiness`: checks that must pass before the phase ends; `rows`: the rows of the preset's table.

The tables themselves are data in `holdfast.registry.spec.transition_table`. `run` depends on this
room. Specified in docs/spec.md, section 25.
"""

from __future__ import annotations

from holdfast.registry.transitions.execution import Transitioned, TransitionOptions, transition
from holdfast.registry.transitions.rows import Applied, Initialise

__all__ = ["Applied", "Initialise", "TransitionOptions", "Transitioned", "transition"]
