"""Carry out the transition from one phase of a run to the next, and pivots within a phase.

- `execution`: `transition`: find the source, check it, build the new state, commit once.
- `pivot`: `pivot`: change the policy within a phase; `pivoted`: the same for a restored state.
- `starting`: `fresh`, `warm_start` and `resume`; `stale`: names in a state whose source is gone.
- `rows`: the rows of the preset's table.

The tables themselves are data in `holdfast.registry.spec.transition_table`. Specified
in docs/spec.md, section 25.

The names are imported at once: `pivot` is a function and the module that defines it.
"""

from __future__ import annotations

from holdfast.registry.deriving.transitions.execution import (
    Transitioned,
    TransitionOptions,
    transition,
)
from holdfast.registry.deriving.transitions.pivot import Policy, pivot, pivoted
from holdfast.registry.deriving.transitions.rows import Initialise
from holdfast.registry.deriving.transitions.starting import (
    Mode,
    Sources,
    Started,
    check_expected,
    check_given,
    check_mode,
    find_stale,
    of_another_run,
    start_fresh,
    start_warm,
)
