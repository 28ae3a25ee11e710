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

from holdfast.registry.deriving.transitions.execution import Transitioned as Transitioned
from holdfast.registry.deriving.transitions.execution import TransitionOptions as TransitionOptions
from holdfast.registry.deriving.transitions.execution import transition as transition
from holdfast.registry.deriving.transitions.pivot import Policy as Policy
from holdfast.registry.deriving.transitions.pivot import pivot as pivot
from holdfast.registry.deriving.transitions.pivot import pivoted as pivoted
from holdfast.registry.deriving.transitions.rows import Initialise as Initialise
from holdfast.registry.deriving.transitions.starting import Mode as Mode
from holdfast.registry.deriving.transitions.starting import Sources as Sources
from holdfast.registry.deriving.transitions.starting import Started as Started
from holdfast.registry.deriving.transitions.starting import check_expected as check_expected
from holdfast.registry.deriving.transitions.starting import check_given as check_given
from holdfast.registry.deriving.transitions.starting import check_mode as check_mode
from holdfast.registry.deriving.transitions.starting import find_stale as find_stale
from holdfast.registry.deriving.transitions.starting import of_another_run as of_another_run
from holdfast.registry.deriving.transitions.starting import start_fresh as start_fresh
from holdfast.registry.deriving.transitions.starting import start_warm as start_warm
