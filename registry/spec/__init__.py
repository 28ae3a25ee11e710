"""The specification of a run, as data: the demands of a preset or a user's own file.

- `run_spec`: `RunSpec` with its phases, streams, gates and pool.
- `policies`: which checkpoint is best, and which are kept; `transition_table`: what happens between
  two phases.
- `presets`: the specifications that are shipped, and those of users, read from TOML.
- `precision`: tensors in fewer bits. `requirements`: checks a state against a specification, and
  warns of settings that may be mistakes; `seeds`: the seeds of phases.
- `migrations`: functions of the caller that bring an old state to a new schema.

Nothing here reads a store or decides for a run: `history` plans retention, `deriving` carries
out the tables. A run's first commit holds its specification, so a field that is added needs a
default, and none may change its meaning. Specified in docs/spec.md, sections 20 and 21.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.spec.migrations import MIGRATIONS, CannotMigrate, register_migration
    from holdfast.registry.spec.policies import Monitor, Retention, Tier
    from holdfast.registry.spec.requirements import (
        check_dtypes,
        check_keys,
        doubts,
        first_of,
        flat_dtypes,
        inference_parts,
        manifest_dtypes,
    )
    from holdfast.registry.spec.requirements import (
        check_phase_is_declared as check_phase_is_declared,
    )
    from holdfast.registry.spec.run_spec import (
        Draw,
        DtypeRule,
        Gate,
        Phase,
        Pool,
        RunSpec,
        Signals,
        Stream,
        WhenAsked,
    )
    from holdfast.registry.spec.seeds import child, phase_number, phase_sequence, pivot_child
    from holdfast.registry.spec.transition_table import Change, Pivot, Readiness, Row, Transition
else:
    __getattr__ = at_first_use(__name__)
