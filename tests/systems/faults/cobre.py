"""Faults that tests of the rows of Cobre notice."""

from __future__ import annotations

import importlib
from typing import Any

from tests.systems.faults.form import (
    ALL_KEPT,
    DAMAGED,
    EARLY,
    KEYS,
    NUMBER,
    OLDEST,
    RUN_MANIFEST,
    STATUS,
    Lived,
    Table,
    nudged,
    then,
)
from tests.systems.mutants import Mutant, always, with_option

_STARTING = "registry.deriving.transitions.starting"
_STAGES = "registry.formats.cobre.stages"
FORMAT = "tests/registry/formats/test_cobre.py"
GOLDEN = "tests/registry/formats/test_golden_samples.py"
CIRCLE = "tests/systems/circle/test_cobre.py"
NATIVE = "tests/registry/layouts/test_native_policies.py"
ROUND_TRIPS = "tests/registry/layouts/test_round_trips.py"
COBRE = "tests/systems/test_cobre.py"


def comparing(old: Any) -> Any:
    """Compare what a warm start's source was made with, as a resume does."""

    def start_warm(handle: Any, source: Any, *options: Any) -> Any:
        from holdfast.registry.history.creating import RunOptions, check_same

        created = source.handle.log.run.created
        check_same(handle.log.run, RunOptions(input_hash=created.input_hash))
        return old(handle, source, *options)

    return start_warm


def with_its_base(old: Any) -> Any:
    """Store a view as all of the memory that it is a view of."""

    def leaf(name: str, shape: Any, nbytes: int, value: Any, *more: Any) -> Any:
        if value.base is not None and value.base.dtype == value.dtype:
            value = value.base
        return old(name, value.shape, value.nbytes, value, *more)

    return leaf


FAULTS: Table = (
    (KEYS, {COBRE: ("test_a_state_without_a_part_is_refused",)}),
    (
        NUMBER,
        {
            COBRE: (
                "test_interrupted_training_ends_like_one_that_was_not",
                "test_what_must_be_serialized_comes_back_type_by_type",
                "test_resume_is_bit_for_bit",
                "test_a_preempted_job_is_found_and_continued",
            )
        },
    ),
    (
        OLDEST,
        {COBRE: ("test_the_last_3_are_kept_and_the_rest_goes_in_the_same_commit",)},
    ),
    (DAMAGED, {COBRE: ("test_nothing_is_damaged",)}),
    (
        Mutant(
            "expected values are not compared",
            "registry.deriving.transitions",
            "check_expected",
            always(None),
        ),
        {COBRE: ("test_another_dimension_or_stage_count_is_a_hard_error",)},
    ),
    (
        Mutant(
            "configurations are not compared",
            "registry.history.creating",
            "_compare_configs",
            always(None),
        ),
        {COBRE: ("test_another_configuration_is_a_hard_error_with_both",)},
    ),
    (
        Mutant(
            "any rank saves", "registry.saving.save_request", "require_first_rank", always(None)
        ),
        {COBRE: ("test_only_the_first_rank_saves",)},
    ),
    (
        Mutant(
            "each start draws another seed",
            "registry.spec.seeds",
            "_sequence",
            lambda _: lambda *__: importlib.import_module("numpy").random.SeedSequence(),
        ),
        {COBRE: ("test_fresh_is_determined_by_the_seed",)},
    ),
    (EARLY, {COBRE: ("test_a_process_that_dies_in_a_save_leaves_the_one_before",)}),
    (STATUS, {COBRE: ("test_a_signal_to_two_ranks_saves_the_last_iteration_and_exits_with_0",)}),
    (
        Mutant(
            "a warm start carries what no row names", _STARTING, "Table", with_option(rest="carry")
        ),
        {COBRE: ("test_a_warm_start_has_the_cuts_and_begins_at_iteration_0",)},
    ),
    (
        Mutant(
            "every run draws the scenarios of seed 42",
            "registry.deriving.transitions.execution",
            "child",
            lambda old: lambda _, number, index: old(42, number, index),
        ),
        {COBRE: ("test_a_warm_start_draws_other_scenarios",)},
    ),
    (
        Mutant(
            "a warm start compares the input data",
            "registry.deriving.transitions",
            "start_warm",
            comparing,
        ),
        {COBRE: ("test_a_warm_start_may_have_another_configuration",)},
    ),
    (
        Mutant("every step is due", "registry.face.phases", "RunPhases.is_due", always(True)),
        {COBRE: ("test_no_checkpoint_is_periodic_unless_the_configuration_asks",)},
    ),
    (
        Mutant(
            "input data is not compared",
            "registry.history.creating",
            "_input_hash",
            always(None),
        ),
        {COBRE: ("test_another_system_is_a_hard_error",)},
    ),
    (
        Mutant(
            "a resume may leave out what must match",
            "registry.face.resuming",
            "Resuming._read",
            lambda _: lambda self: self.run.training.refresh(),
        ),
        {COBRE: ("test_a_resume_cannot_leave_the_hashes_out",)},
    ),
    (
        Mutant(
            "every cut is active",
            _STAGES,
            "_cuts",
            then(lambda found: found | {"is_active": found["is_active"] | True}),
        ),
        {GOLDEN: ("test_a_policy",)},
    ),
    (
        Mutant("fields of a cut in another order", _STAGES, "_CUT", lambda old: old[::-1]),
        {FORMAT: ("test_a_real_policy",)},
    ),
    (
        Mutant(
            "absent coefficients are none",
            "registry.formats.cobre.wire",
            "Tables.rows",
            lambda old: lambda self, field, form, absent=None: old(self, field, form),
        ),
        {FORMAT: ("test_absent_coefficients_are_zeros",)},
    ),
    (
        Mutant(
            "a resume compares neither configuration nor input",
            "registry.face.phases",
            "differing",
            always([]),
        ),
        {COBRE: ("test_the_four_hard_errors_come_in_one_call",)},
    ),
    (
        Mutant(
            "hashes of imported files are passed over",
            "registry.deriving.transitions",
            "of_another_run",
            always([]),
        ),
        {NATIVE: ("test_an_imported_policy_has_the_modes_and_the_hard_errors_of_its_run",)},
    ),
    (
        Mutant(
            "policies of a checkout are strangers to an import",
            "registry.layouts.importing",
            "Importer._checked_out",
            then(lambda own: {path: own[path] for path in own if "/" in path}),
        ),
        {CIRCLE: ("test_a_preempted_training_goes_through_another_program_and_back",)},
    ),
    (
        Mutant(
            "values of a policy come back as JSON has them",
            "registry.layouts.cobre",
            "_formed",
            lambda _: lambda value, *_: value,
        ),
        {NATIVE: ("test_native_states_come_back_with_their_bytes",)},
    ),
    (
        Mutant(
            "field 9 counts in new releases only",
            _STAGES,
            "read_stage",
            lambda old: lambda *given, domination: old(*given, domination=not domination),
        ),
        {FORMAT: ("test_field_nine_is_a_domination_count_in_old_releases_only",)},
    ),
    (
        Mutant("`policy` loses its name", "registry.layouts.cobre", "imported_as", always({})),
        {ROUND_TRIPS: ("test_policies_of_cobre_come_back",)},
    ),
    (
        Mutant(
            "latest is the oldest",
            RUN_MANIFEST,
            "RunManifest.latest",
            lambda _: lambda self, phase=None: next(iter(self.live(phase)), None),
        ),
        {COBRE: ("test_the_last_3_are_kept_and_the_rest_goes_in_the_same_commit",)},
    ),
    (
        Mutant("how a block ends is not noted", "registry.face.run", "Run.__exit__", always(None)),
        {COBRE: ("test_a_preempted_job_is_found_and_continued",)},
    ),
    (
        ALL_KEPT,
        {COBRE: ("test_the_last_3_are_kept_and_the_rest_goes_in_the_same_commit",)},
    ),
    (
        Lived(
            "a view is stored with all of its memory",
            "registry.pytree.numpy_arrays",
            "ArrayLeaf",
            with_its_base,
        ),
        {COBRE: ("test_populated_slots_alone_take_space",)},
    ),
    (
        Lived(
            "a restored number is another while the story is lived",
            "registry.saving.restoring",
            "load_to_train",
            then(nudged),
        ),
        {COBRE: ("test_interrupted_training_ends_like_one_that_was_not",)},
    ),
)
