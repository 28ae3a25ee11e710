"""Faults of one feature each, and the tests of the rows of `docs/systems.md` that notice them.

As a plugin of pytest (`-p tests.systems.features`) it runs each test as it is, which lives the
story of its file, and then once with each fault that names it; such a run passes if the test fails.
`test_mutants.py` does so for every file.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from tests.systems.mutants import Mutant, always

ROOT = Path(__file__).parents[2]
#: Errors of a fault that fits the library no more.
_UNFIT = (TypeError, AttributeError, NameError, ImportError)


def nudged(state: Any) -> Any:
    """Return a state of which the first number of each array is another."""
    if isinstance(state, dict):
        return type(state)((key, nudged(value)) for key, value in state.items())
    if getattr(state, "shape", ()) and 0 not in state.shape and "bool" not in str(state.dtype):
        changed = state.clone() if hasattr(state, "clone") else state.copy()
        changed[(0,) * len(state.shape)] += 1
        return changed
    return state


def turned(state: Any) -> Any:
    """Return a dict in another order."""
    return dict(reversed(state.items())) if isinstance(state, dict) else state


def then(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Change what a function returns."""
    return lambda old: lambda *args, **options: change(old(*args, **options))


def shown(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Change the value of a property."""
    return lambda old: property(lambda self: change(old.__get__(self)))


def refusing(old: Any) -> Any:
    """Raise an error in place of a function."""
    from holdfast.errors import IntegrityError

    def refuse(*_args: Any, **_options: Any) -> Any:
        raise IntegrityError("a fault", where=getattr(old, "__name__", ""))

    return refuse


class _Report:
    """A verification that found something."""

    ok, findings = False, ("a fault",)


_RUN = "registry.history.replay.run_manifest"
_POOL = "registry.curation.pool"
_THALIA = "registry.formats.thalia"
_HYDRA = "tests/systems/test_hydra.py"
_LEAGUE = "tests/systems/test_hydra_league.py"
_ADR = "tests/systems/test_adr004.py"
_ANDREA = "tests/systems/test_andrea.py"
_COBRE = "tests/systems/test_cobre.py"

#: Each fault with the tests that notice it, by file.
FEATURES: tuple[tuple[Mutant, dict[str, tuple[str, ...]]], ...] = (
    (
        Mutant(
            "keys that a phase requires are not looked for",
            "registry.saving.save_request",
            "check_keys",
            always(None),
        ),
        {
            _HYDRA: (
                "test_core_keys_are_required",
                "test_keys_of_phases_2_and_3",
            ),
            _ADR: ("test_missing_keys_are_refused",),
            _ANDREA: ("test_a_state_without_a_region_is_refused",),
            _COBRE: ("test_a_state_without_a_part_is_refused",),
            "tests/systems/test_thalia.py": ("test_a_state_without_regions_is_refused",),
        },
    ),
    (
        Mutant(
            "dtypes are not looked at", "registry.saving.save_request", "check_dtypes", always(None)
        ),
        {
            _HYDRA: ("test_student_stays_bf16_and_moments_fp32",),
            _ANDREA: ("test_regions_are_float32",),
        },
    ),
    (
        Mutant(
            "a state comes back in another order",
            "registry.loading.checkpoint",
            "Checkpoint.load",
            then(turned),
        ),
        {
            _HYDRA: ("test_core_keys_come_back_in_their_order",),
            _ADR: ("test_structure_comes_back_key_by_key",),
        },
    ),
    (
        Mutant(
            "a number of a loaded state is another",
            "registry.loading.stored",
            "Stored.load",
            then(nudged),
        ),
        {
            _HYDRA: (
                "test_grp_and_evaluations_are_added_once",
                "test_death_at_any_write_of_a_save_loses_nothing",
                "test_first_transition_row_by_row",
                "test_second_transition_row_by_row",
            ),
            _COBRE: (
                "test_interrupted_training_ends_like_one_that_was_not",
                "test_what_must_be_serialized_comes_back_type_by_type",
                "test_resume_is_bit_for_bit",
                "test_a_preempted_job_is_found_and_continued",
            ),
            _ADR: ("test_interrupted_training_ends_like_one_that_was_not",),
            _ANDREA: (
                "test_interrupted_training_ends_like_one_that_was_not",
                "test_five_regions_come_back_as_they_are",
            ),
            "tests/systems/test_thalia.py": ("test_a_full_state_with_dataclasses_comes_back",),
        },
    ),
    (
        Mutant(
            "the newest is best",
            _RUN,
            "RunManifest.best",
            lambda _: lambda self, monitor, phase=None: self.latest(phase),
        ),
        {
            _HYDRA: (
                "test_phase_1_keeps_20_and_its_best_among_them",
                "test_phases_2_and_3_keep_20_and_the_best_by_mu_less_3_sigma",
                "test_nan_is_never_latest_best_or_restored",
                "test_gate_keeps_its_checkpoint_for_good",
            ),
            _ADR: ("test_best_milestones_by_accuracy_and_by_loss",),
            _ANDREA: ("test_best_begins_again_at_a_pivot",),
            "tests/systems/test_to_the_letter.py": (
                "test_metrics_in_the_state_choose_best_and_milestones",
                "test_metrics_snapshot_of_hydra_chooses_the_gate",
            ),
        },
    ),
    (
        Mutant("the oldest is not listed", _RUN, "RunManifest.live", then(lambda found: found[1:])),
        {
            _COBRE: (
                "test_the_last_3_are_kept_and_the_rest_goes_in_the_same_commit",
                "test_populated_slots_alone_take_space",
            ),
            _ADR: ("test_last_3_and_every_milestone_are_kept",),
            _ANDREA: (
                "test_every_100_steps_are_a_recovery_point",
                "test_every_checkpoint_has_a_sample_of_its_own",
            ),
        },
    ),
    (
        Mutant("commits are not shown", "registry.face.history", "RunHistory.commits", always(())),
        {
            _HYDRA: ("test_ratings_come_from_elsewhere_and_late",),
            _ADR: ("test_cleanup_is_part_of_the_save_and_by_log_not_by_clock",),
        },
    ),
    (
        Mutant(
            "evictions are not listed",
            "registry.curation.pruning",
            "RunRetention.evicted",
            always([]),
        ),
        {_HYDRA: ("test_evictions_are_part_of_saves",)},
    ),
    (
        Mutant("no step is due", "registry.face.phases", "RunPhases.is_due", always(False)),
        {_HYDRA: ("test_cadence_of_each_phase",)},
    ),
    (
        Mutant(
            "a run has no configuration", "registry.face.run", "Run.config", shown(lambda _: {})
        ),
        {_HYDRA: ("test_run_id_tells_start_and_seed",)},
    ),
    (
        Mutant(
            "a metric below its threshold is ready",
            "registry.deriving.transitions.execution",
            "_unready",
            always(None),
        ),
        {_HYDRA: ("test_readiness_is_checked_before_phase_2",)},
    ),
    (
        Mutant(
            "models are not compared",
            "registry.deriving.transitions.execution",
            "_compare",
            always(()),
        ),
        {_HYDRA: ("test_strict_loading_refuses_another_architecture",)},
    ),
    (
        Mutant(
            "thresholds that are not 0 pass",
            "registry.deriving.transitions.execution",
            "not_zero",
            always(()),
        ),
        {
            "tests/systems/test_hydra_harm.py": ("test_oracle_features_must_be_gone",),
            "tests/systems/test_to_the_letter.py": (
                "test_masks_that_are_left_stop_the_transition",
            ),
        },
    ),
    (
        Mutant(
            "companions are not found",
            "registry.loading.checkpoint",
            "Checkpoint.companion",
            refusing,
        ),
        {_HYDRA: ("test_every_checkpoint_has_the_policy_that_it_may_not_forget",)},
    ),
    (
        Mutant("damage stays unseen", "registry.store.fetching", "verify_chunk", always(None)),
        {
            "tests/systems/test_hydra_harm.py": (
                "test_damaged_latest_is_passed_over",
                "test_all_damaged_is_one_error_that_lists_them",
                "test_damaged_gate_stops_the_transition_and_can_be_replaced",
                "test_damaged_anchor_stops_the_transition",
            )
        },
    ),
    (
        Mutant(
            "a sound registry is called damaged",
            "registry.face.registry",
            "Registry.verify",
            always(_Report()),
        ),
        {
            _ADR: ("test_nothing_is_damaged",),
            _ANDREA: ("test_nothing_is_damaged",),
            _COBRE: ("test_nothing_is_damaged",),
            "tests/systems/test_thalia.py": ("test_nothing_is_damaged",),
            "tests/systems/test_hydra_the_end.py": (
                "test_nothing_is_damaged_and_dropping_ends_it",
            ),
        },
    ),
    (
        Mutant("a card needs no field", "registry.curation.releases", "check_card", always(None)),
        {_ADR: ("test_every_field_of_the_card_is_required",)},
    ),
    (
        Mutant(
            "everything is released",
            "registry.curation.releases",
            "inference_parts",
            lambda _: lambda spec, parts, **__: [*parts],
        ),
        {
            _ADR: ("test_release_is_what_inference_needs_and_a_card",),
            "tests/systems/test_to_the_letter.py": (
                "test_a_release_has_what_the_documents_loader_asks_for",
            ),
        },
    ),
    (
        Mutant(
            "a rollback does nothing",
            "registry.curation.releases",
            "Releases.rollback",
            always(None),
        ),
        {_ADR: ("test_releases_are_versioned_and_rolled_back",)},
    ),
    (
        Mutant(
            "a release is the first one",
            "registry.curation.releases",
            "Releases.get",
            lambda _: lambda self, __: self.list()[0],
        ),
        {_ADR: ("test_releases_are_versioned_and_rolled_back",)},
    ),
    (
        Mutant(
            "the last entry of a stream is lost",
            "registry.curation.streams.stream",
            "Stream.read",
            then(lambda found: found[:-1]),
        ),
        {
            _ADR: ("test_training_history_has_every_epoch",),
            _ANDREA: ("test_loss_history_is_unbroken",),
        },
    ),
    (
        Mutant(
            "archives of a stream are not listed",
            "registry.curation.streams.stream",
            "Stream.archives",
            shown(lambda _: {}),
        ),
        {_ANDREA: ("test_samples_and_bandit_are_archived_at_each_pivot",)},
    ),
    (
        Mutant("pivots are not listed", _RUN, "RunManifest.pivots", shown(lambda _: ())),
        {_ANDREA: ("test_pivots_need_no_phases_and_are_in_the_history",)},
    ),
    (
        Mutant("nothing is stale", "registry.deriving.transitions", "find_stale", always(())),
        {_ANDREA: ("test_a_zombie_arm_is_reported",)},
    ),
    (
        Mutant(
            "expected values are not compared",
            "registry.deriving.transitions",
            "check_expected",
            always(None),
        ),
        {_COBRE: ("test_another_dimension_or_stage_count_is_a_hard_error",)},
    ),
    (
        Mutant(
            "configurations are not compared",
            "registry.history.creating",
            "_compare_configs",
            always(None),
        ),
        {_COBRE: ("test_another_configuration_is_a_hard_error_with_both",)},
    ),
    (
        Mutant(
            "any rank saves", "registry.saving.save_request", "require_first_rank", always(None)
        ),
        {_COBRE: ("test_only_the_first_rank_saves",)},
    ),
    (
        Mutant(
            "models are not kept loaded",
            f"{_POOL}.model_cache",
            "ModelCache.get",
            lambda _: lambda self, version, load: load(),
        ),
        {_LEAGUE: ("test_five_models_stay_loaded",)},
    ),
    (
        Mutant(
            "who left is on the roster",
            f"{_POOL}.league",
            "OpponentPool.roster",
            lambda _: lambda self: [*self.entries(), *self.entries()],
        ),
        {_LEAGUE: ("test_pool_keeps_20_beside_the_anchors",)},
    ),
    (
        Mutant(
            "the last event of an entry is lost",
            f"{_POOL}.league",
            "OpponentPool.history",
            then(lambda found: found[:-1]),
        ),
        {_LEAGUE: ("test_eviction_log_has_the_whole_rating_history",)},
    ),
    (
        Mutant("an entry has no games", f"{_POOL}.entries", "PoolEntry.games", shown(lambda _: -1)),
        {
            _LEAGUE: (
                "test_entries_tell_what_their_sidecar_would",
                "test_anchors_are_played_and_never_rated",
            )
        },
    ),
    (
        Mutant(
            "every game has the opponents of the first",
            f"{_POOL}.league",
            "OpponentPool.draws",
            then(lambda found: found[:1] * len(found)),
        ),
        {_LEAGUE: ("test_composition_is_50_30_20",)},
    ),
    (
        Mutant(
            "a seed is drawn anew each time",
            "registry.spec.seeds",
            "_sequence",
            lambda _: lambda *__: importlib.import_module("numpy").random.SeedSequence(),
        ),
        {_COBRE: ("test_fresh_is_determined_by_the_seed",)},
    ),
    (
        Mutant(
            "a version may be of any format",
            "registry.spec.migrations",
            "Migrations.check",
            always(None),
        ),
        {
            "tests/systems/test_to_the_letter.py": (
                "test_a_version_that_no_load_can_read_is_refused_at_save",
            )
        },
    ),
    (
        Mutant(
            "every state is of today's version",
            "registry.spec.migrations",
            "Migrations.apply",
            lambda _: lambda self, state, *__: state,
        ),
        {
            "tests/systems/test_to_the_letter.py": (
                "test_restore_passes_over_what_it_cannot_migrate",
                "test_restore_fails_if_nothing_can_be_migrated",
            )
        },
    ),
    (
        Mutant("nothing is sparse", f"{_THALIA}.tensors", "_nonzero", always(None)),
        {
            "tests/registry/formats/test_thalia.py": ("test_the_choice_of_dense_and_sparse",),
            "tests/systems/test_thalia.py": ("test_mostly_zero_tensors_are_sparse_in_files",),
        },
    ),
    (
        Mutant(
            "problems are not noted", "registry.formats.state_file", "Faults.note", always(None)
        ),
        {
            "tests/registry/formats/test_thalia.py": (
                "test_every_flipped_byte_is_noticed",
                "test_bodies_with_a_right_checksum_give_a_state_or_a_typed_error",
            ),
            "tests/registry/formats/test_every_format.py": ("test_every_problem_is_told",),
        },
    ),
    (
        Mutant("files have no size limit", "registry.formats.source", "check_size", always(None)),
        {
            "tests/registry/formats/test_every_format.py": (
                "test_the_size_limit_holds_for_every_call",
            )
        },
    ),
    (
        Mutant("links are not made", "registry.layouts.checkout", "_Checkout._link", always(None)),
        {
            "tests/registry/layouts/test_round_trips.py": (
                "test_tree_of_adr004_comes_back_with_its_names_links_and_tensors",
                "test_real_tree_of_adr004_comes_back",
            )
        },
    ),
    (
        Mutant(
            "a file is whole at any size", "registry.layouts.andrea", "is_complete", always(True)
        ),
        {
            "tests/registry/layouts/test_importing.py": (
                "test_step_file_is_taken_once_it_has_its_size",
            )
        },
    ),
    (
        Mutant("files are not synced", "backends.local.disk", "sync", always(None)),
        {"tests/backends/test_local.py": ("test_data_is_synced_before_it_gets_its_name",)},
    ),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test as it is, and with each of its faults."""
    path = metafunc.definition.path.relative_to(ROOT).as_posix()
    name = metafunc.function.__name__
    faults = [fault for fault, files in FEATURES if name in files.get(path, ())]
    metafunc.fixturenames.append("fault")
    metafunc.parametrize("fault", [None, *faults], ids=lambda one: one.fault if one else "sound")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Make the fault while the test itself runs; the test has to fail."""
    fault = item.callspec.params.get("fault")
    if fault is None:
        return (yield)
    module = importlib.import_module(f"holdfast.{fault.module}")
    *above, last = fault.name.split(".")
    owner = attrgetter(".".join(above))(module) if above else module
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, last, fault.change(vars(owner)[last]))
        try:
            yield
        except _UNFIT:
            raise
        except BaseException as noticed:
            if isinstance(noticed, KeyboardInterrupt | SystemExit):
                raise
            return None
    raise AssertionError(f"{fault.fault}: nothing noticed")
