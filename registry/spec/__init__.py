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
    from holdfast.registry.spec.migrations import MIGRATIONS as MIGRATIONS
    from holdfast.registry.spec.migrations import CannotMigrate as CannotMigrate
    from holdfast.registry.spec.migrations import register_migration as register_migration
    from holdfast.registry.spec.policies import Monitor as Monitor
    from holdfast.registry.spec.policies import Retention as Retention
    from holdfast.registry.spec.policies import Tier as Tier
    from holdfast.registry.spec.requirements import check_dtypes as check_dtypes
    from holdfast.registry.spec.requirements import check_keys as check_keys
    from holdfast.registry.spec.requirements import (
        check_phase_is_declared as check_phase_is_declared,
    )
    from holdfast.registry.spec.requirements import doubts as doubts
    from holdfast.registry.spec.requirements import first_of as first_of
    from holdfast.registry.spec.requirements import flat_dtypes as flat_dtypes
    from holdfast.registry.spec.requirements import inference_parts as inference_parts
    from holdfast.registry.spec.requirements import manifest_dtypes as manifest_dtypes
    from holdfast.registry.spec.run_spec import Draw as Draw
    from holdfast.registry.spec.run_spec import DtypeRule as DtypeRule
    from holdfast.registry.spec.run_spec import Gate as Gate
    from holdfast.registry.spec.run_spec import Phase as Phase
    from holdfast.registry.spec.run_spec import Pool as Pool
    from holdfast.registry.spec.run_spec import RunSpec as RunSpec
    from holdfast.registry.spec.run_spec import Signals as Signals
    from holdfast.registry.spec.run_spec import Stream as Stream
    from holdfast.registry.spec.run_spec import WhenAsked as WhenAsked
    from holdfast.registry.spec.seeds import child as child
    from holdfast.registry.spec.seeds import phase_number as phase_number
    from holdfast.registry.spec.seeds import phase_sequence as phase_sequence
    from holdfast.registry.spec.seeds import pivot_child as pivot_child
    from holdfast.registry.spec.transition_table import Change as Change
    from holdfast.registry.spec.transition_table import Pivot as Pivot
    from holdfast.registry.spec.transition_table import Readiness as Readiness
    from holdfast.registry.spec.transition_table import Row as Row
    from holdfast.registry.spec.transition_table import Transition as Transition
else:
    __getattr__ = at_first_use(__name__)
