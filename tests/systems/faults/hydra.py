"""Faults that tests of the rows of Hydra notice."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tests.systems.faults.form import (
    ALL_KEPT,
    BEST,
    COMMITS,
    DAMAGED,
    DTYPES,
    EARLY,
    KEPT_LIVED,
    KEYS,
    NUMBER,
    ORDER,
    PLAIN,
    RUN_MANIFEST,
    Lived,
    Table,
    refusing,
    shown,
    then,
)
from tests.systems.mutants import Mutant, always

_ROWS = "registry.deriving.transitions.rows"
_POOL = "registry.curation.pool"
_TRANSITIONS = "registry.deriving.transitions.execution"
BYTES = "tests/damage/test_bytes.py"
PROMISE_8 = "tests/promises/test_promise_8_no_file_is_trusted_unread.py"
BURN = "tests/registry/formats/test_burn.py"
IMPORTING = "tests/registry/layouts/test_importing.py"
ROUND_TRIPS = "tests/registry/layouts/test_round_trips.py"
LOCAL = "tests/backends/test_local.py"
HYDRA = "tests/systems/test_hydra.py"
CIRCLE = "tests/systems/circle/test_hydra.py"
HYDRA_HARM = "tests/systems/test_hydra_harm.py"
HYDRA_LEAGUE = "tests/systems/test_hydra_league.py"
HYDRA_THE_END = "tests/systems/test_hydra_the_end.py"
TO_THE_LETTER = "tests/systems/test_to_the_letter.py"


def carrying(name: str, *value: Any) -> Any:
    """Add a part of the source, or a value, to the state that a phase begins with."""

    def change(old: Any) -> Any:
        def carry_out(self: Any, *given: Any) -> Any:
            made = old(self, *given)
            made.state[name] = value[0] if value else self._source[name]
            return made

        return carry_out

    return change


def taking_all(old: Any) -> Any:
    """Take all leaves of a part of which a row names some."""

    def take(self: Any, found: Any) -> Any:
        from holdfast.registry.pytree import traversal

        leaves = traversal.walk(found.key, self._source[found.key])
        return old(self, replace(found, paths=tuple(path for path, _ in leaves)))

    return take


FAULTS: Table = (
    (KEYS, {HYDRA: ("test_core_keys_are_required", "test_keys_of_phases_2_and_3")}),
    (
        DTYPES,
        {
            HYDRA: ("test_student_stays_bf16_and_moments_fp32",),
            CIRCLE: ("test_moments_of_burn_stay_fp32",),
        },
    ),
    (
        Mutant(
            "a record loses what is not its item",
            "registry.layouts.hydra",
            "_noted_record",
            always(None),
        ),
        {CIRCLE: ("test_a_league_goes_through_records_of_burn_and_back",)},
    ),
    (
        Mutant(
            "evaluation games are of all entries alike",
            f"{_POOL}.selection",
            "Draws.evaluation",
            lambda old: lambda *given: old(*given[:-1], dict.fromkeys(given[-1], 1.0)),
        ),
        {TO_THE_LETTER: ("test_evaluation_games_are_of_the_entries_whose_rating_is_uncertain",)},
    ),
    (
        Mutant(
            "games of an imported model are forgotten",
            f"{_POOL}.promoting",
            "EntryImport._played",
            always([]),
        ),
        {CIRCLE: ("test_a_league_goes_through_records_of_burn_and_back",)},
    ),
    (ORDER, {HYDRA: ("test_core_keys_come_back_in_their_order",)}),
    (
        NUMBER,
        {
            HYDRA: (
                "test_grp_and_evaluations_are_added_once",
                "test_death_at_any_write_of_a_save_loses_nothing",
                "test_first_transition_row_by_row",
                "test_second_transition_row_by_row",
            )
        },
    ),
    (
        BEST,
        {
            HYDRA: (
                "test_phase_1_keeps_20_and_its_best_among_them",
                "test_phases_2_and_3_keep_20_and_the_best_by_mu_less_3_sigma",
                "test_nan_is_never_latest_best_or_restored",
                "test_gate_keeps_its_checkpoint_for_good",
            ),
            TO_THE_LETTER: ("test_metrics_snapshot_of_hydra_chooses_the_gate",),
        },
    ),
    (COMMITS, {HYDRA: ("test_ratings_come_from_elsewhere_and_late",)}),
    (
        Mutant(
            "evictions are not listed",
            "registry.curation.pruning",
            "RunRetention.evicted",
            always([]),
        ),
        {HYDRA: ("test_evictions_are_part_of_saves",)},
    ),
    (
        Mutant("no step is due", "registry.face.phases", "RunPhases.is_due", always(False)),
        {HYDRA: ("test_cadence_of_each_phase",)},
    ),
    (
        Mutant(
            "a run has no configuration", "registry.face.run", "Run.config", shown(lambda _: {})
        ),
        {HYDRA: ("test_run_id_tells_start_and_seed",)},
    ),
    (
        Mutant(
            "a metric below its threshold is ready",
            "registry.deriving.transitions.execution",
            "_unready",
            always(None),
        ),
        {HYDRA: ("test_readiness_is_checked_before_phase_2",)},
    ),
    (
        Mutant(
            "models are not compared",
            "registry.deriving.transitions.execution",
            "_compare",
            always(()),
        ),
        {HYDRA: ("test_strict_loading_refuses_another_architecture",)},
    ),
    (
        Mutant(
            "thresholds that are not 0 pass",
            "registry.deriving.transitions.execution",
            "not_zero",
            always(()),
        ),
        {
            HYDRA_HARM: ("test_oracle_features_must_be_gone",),
            TO_THE_LETTER: ("test_masks_that_are_left_stop_the_transition",),
        },
    ),
    (
        Mutant(
            "companions are not found",
            "registry.loading.checkpoint",
            "Checkpoint.companion",
            refusing,
        ),
        {HYDRA: ("test_every_checkpoint_has_the_policy_that_it_may_not_forget",)},
    ),
    (
        Mutant("damage stays unseen", "registry.store.fetching", "verify_chunk", always(None)),
        {
            PROMISE_8: ("test_promise_8_no_file_is_trusted_unread[pack]",),
            HYDRA_HARM: (
                "test_damaged_latest_is_passed_over",
                "test_all_damaged_is_one_error_that_lists_them",
                "test_damaged_gate_stops_the_transition_and_can_be_replaced",
                "test_damaged_anchor_stops_the_transition",
            ),
        },
    ),
    (DAMAGED, {HYDRA_THE_END: ("test_nothing_is_damaged_and_dropping_ends_it",)}),
    (
        Mutant(
            "models are not kept loaded",
            f"{_POOL}.league",
            "ModelCache.get",
            lambda _: lambda self, version, load: load(),
        ),
        {HYDRA_LEAGUE: ("test_five_models_stay_loaded",)},
    ),
    (
        Mutant(
            "who left is on the roster",
            f"{_POOL}.league",
            "OpponentPool.roster",
            lambda _: lambda self: [*self.entries(), *self.entries()],
        ),
        {HYDRA_LEAGUE: ("test_pool_keeps_20_beside_the_anchors",)},
    ),
    (
        Mutant(
            "the last event of an entry is lost",
            f"{_POOL}.league",
            "OpponentPool.history",
            then(lambda found: found[:-1]),
        ),
        {HYDRA_LEAGUE: ("test_eviction_log_has_the_whole_rating_history",)},
    ),
    (
        Mutant("an entry has no games", f"{_POOL}.entries", "PoolEntry.games", shown(lambda _: -1)),
        {
            HYDRA_LEAGUE: (
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
        {HYDRA_LEAGUE: ("test_composition_is_50_30_20",)},
    ),
    (
        Mutant(
            "a version may be of any format",
            "registry.spec.migrations",
            "Migrations.check",
            always(None),
        ),
        {
            TO_THE_LETTER: (
                "test_a_version_that_no_load_can_read_is_refused_at_save",
                "test_one_command_raises_the_version_of_a_running_run",
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
            TO_THE_LETTER: (
                "test_restore_passes_over_what_it_cannot_migrate",
                "test_restore_fails_if_nothing_can_be_migrated",
            )
        },
    ),
    (
        Mutant("files are not synced", "backends.local.disk", "sync", always(None)),
        {LOCAL: ("test_data_is_synced_before_it_gets_its_name",)},
    ),
    (
        Mutant(
            "a new folder is not synced into the one above it",
            "backends.local.backend",
            "LocalBackend._sync_path",
            always(None),
        ),
        {LOCAL: ("test_every_new_folder_is_synced_into_its_parent",)},
    ),
    (
        Mutant(
            "files without a name yet are listed", "backends.local.walk", "TEMPORARY", lambda _: "t"
        ),
        {LOCAL: ("test_leftovers_of_a_dead_process_are_invisible",)},
    ),
    (
        Mutant(
            "what the system leaves over is dropped", "backends.local.disk", "_rest", always(())
        ),
        {LOCAL: ("test_short_writes_and_reads_are_continued",)},
    ),
    (
        Mutant(
            "a key may be made twice",
            "backends.local.backend",
            "LocalBackend.put_if_absent",
            lambda _: lambda self, key, body: self.put(key, body) is None,
        ),
        {LOCAL: ("test_two_processes_race_for_a_key",)},
    ),
    (
        Mutant(
            "a verification finds nothing",
            "registry.upkeep.verifying",
            "Verification._object_findings",
            always(()),
        ),
        {BYTES: ("test_file_that_is_gone",)},
    ),
    (
        Mutant(
            "shapes are read from their end",
            "registry.formats.burn",
            "_shape",
            then(lambda shape: shape and shape[::-1]),
        ),
        {BURN: ("test_a_record",)},
    ),
    (
        Mutant(
            "digests beside files have another name",
            "registry.layouts.scanning",
            "SIDECAR",
            lambda _: ".sha1",
        ),
        {
            IMPORTING: (
                "test_file_that_its_sidecar_denies_is_refused_and_no_other",
                "test_missing_sidecar_is_a_warning",
            )
        },
    ),
    (
        Mutant(
            "metadata beside models of a pool are not read",
            "registry.layouts.hydra",
            "find",
            then(lambda found: [replace(one, beside=None) for one in found]),
        ),
        {IMPORTING: ("test_best_and_gates_are_those_of_the_tree",)},
    ),
    (
        Mutant(
            "states are written in another format",
            "registry.layouts.hydra",
            "_file",
            then(lambda file: replace(file, format="safetensors")),
        ),
        {ROUND_TRIPS: ("test_files_of_a_checkout_are_read_by_torch",)},
    ),
    (
        Mutant(
            "a sidecar names a file of the folder above",
            "registry.layouts.checkout",
            "_Checkout._text",
            lambda old: lambda self, path, data: old(self, path, data.replace(b"  ", b"  ../")),
        ),
        {ROUND_TRIPS: ("test_sidecars_pass_sha256sum",)},
    ),
    (
        Mutant(
            "models of an imported pool come out without their metadata",
            "registry.layouts.hydra",
            "entries",
            then(lambda found: [one for one in found if not one.path.endswith(".meta.json")]),
        ),
        {ROUND_TRIPS: ("test_tree_of_hydra_comes_back_byte_for_byte",)},
    ),
    (
        Lived("a transition that is repeated is made again", _TRANSITIONS, "_same", always(False)),
        {HYDRA: ("test_a_process_that_dies_in_a_transition_repeats_it",)},
    ),
    (
        Lived(
            "the components of a phase have its seed",
            _TRANSITIONS,
            "child",
            lambda old: lambda seed, phase, _: old(seed, phase, 0),
        ),
        {HYDRA: ("test_seeds_are_children_of_the_phase",)},
    ),
    (
        Mutant(
            "any phase may be saved in",
            "registry.saving.save_commit",
            "SaveCommit._check_phase",
            always(None),
        ),
        {HYDRA: ("test_phases_are_entered_in_order",)},
    ),
    (KEPT_LIVED, {HYDRA: ("test_time_of_a_save_is_no_part_of_its_id",)}),
    (
        Mutant(
            "conditions switch nothing on",
            _TRANSITIONS,
            "Table",
            lambda old: lambda rows, _, source: old(rows, (), source),
        ),
        {
            HYDRA_HARM: ("test_pgoi_keeps_the_stem_of_the_teacher",),
            TO_THE_LETTER: ("test_thresholds_and_a_new_value_head_are_switched_on",),
        },
    ),
    (
        Mutant(
            "all conditions are switched on",
            _TRANSITIONS,
            "Table",
            lambda old: lambda rows, _, source: old(rows, {one.when for one in rows}, source),
        ),
        {TO_THE_LETTER: ("test_transition_needs_only_what_the_document_names",)},
    ),
    (
        Mutant("masks have one name", _TRANSITIONS, "_zero", always(("dropout_mask",))),
        {TO_THE_LETTER: ("test_masks_have_the_names_of_the_program",)},
    ),
    (EARLY, {HYDRA_HARM: ("test_sigkill_in_a_save_is_as_if_it_had_not_begun",)}),
    (
        Mutant(
            "every match is another",
            f"{_POOL}.league",
            "check_match",
            lambda old: lambda _: old(None),
        ),
        {HYDRA_LEAGUE: ("test_a_match_told_twice_counts_once",)},
    ),
    (
        Mutant(
            "a version is used again",
            f"{_POOL}.promoting",
            "Promote",
            lambda old: lambda **fields: old(**{**fields, "version": 1}),
        ),
        {HYDRA_LEAGUE: ("test_versions_are_not_used_again_after_reopening",)},
    ),
    (
        Lived(
            "a save promotes nothing",
            "registry.saving.save_commit",
            "SaveCommit._promotion",
            always([]),
        ),
        {HYDRA_LEAGUE: ("test_versions_are_dense_and_every_save_promotes",)},
    ),
    (
        Lived(
            "whole checkpoints enter the pool",
            "registry.saving.save_commit",
            "inference_parts",
            lambda _: lambda spec, parts, **__: [*parts],
        ),
        {HYDRA_LEAGUE: ("test_entries_are_weights_alone_and_store_none",)},
    ),
    (
        Lived(
            "a rating stays as it was",
            f"{_POOL}.matches",
            "rate",
            lambda _: lambda before, *__: before,
        ),
        {HYDRA_LEAGUE: ("test_matches_are_rated_by_plackett_luce_and_once",)},
    ),
    (
        Lived(
            "a model enters as sure as it is",
            f"{_POOL}.promoting",
            "inherited",
            lambda _: lambda rating: rating,
        ),
        {HYDRA_LEAGUE: ("test_promotion_inherits_mu_and_widens_sigma",)},
    ),
    (
        Mutant(
            "draws are random",
            f"{_POOL}.selection",
            "Draws._words",
            lambda old: lambda self, game: old(self, game + random.getrandbits(32)),
        ),
        {HYDRA_LEAGUE: ("test_matchups_are_the_same_after_a_restart_elsewhere",)},
    ),
    (
        Mutant(
            "draws are of versions, not of places",
            f"{_POOL}.selection",
            "Draws._words",
            lambda old: lambda self, game: old(self, game + self._roster[0]),
        ),
        {HYDRA_LEAGUE: ("test_matchups_follow_the_pool_and_the_seed",)},
    ),
    (
        Mutant(
            "models of the pool are collected",
            RUN_MANIFEST,
            "RunManifest.held",
            lambda old: property(
                lambda self: old.__get__(self) - {one.manifest for one in self.roster()}
            ),
        ),
        {HYDRA_LEAGUE: ("test_entries_outlive_their_checkpoints",)},
    ),
    (
        Mutant(
            "a `.meta.json` has other keys",
            "registry.layouts.hydra",
            "_metadata",
            then(lambda found: {**found, "step": found.pop("global_step")}),
        ),
        {ROUND_TRIPS: ("test_tree_of_hydra_comes_back_byte_for_byte",)},
    ),
    (PLAIN, {HYDRA: ("test_core_keys_come_back_in_their_order",)}),
    (
        Lived(
            "a run id has no seed",
            "registry.history.creating",
            "default_ids",
            then(lambda names: [f"{one[:16]}{at:08x}" for at, one in enumerate(names)]),
        ),
        {HYDRA: ("test_run_id_tells_start_and_seed",)},
    ),
    (
        Mutant(
            "an artifact may be replaced",
            "registry.curation.pins",
            "Artifacts.set",
            lambda _: lambda self, name, state: None,
        ),
        {HYDRA: ("test_grp_and_evaluations_are_added_once",)},
    ),
    (
        Lived(
            "what is discarded comes along", _ROWS, "Table.carry_out", carrying("optimizer_record")
        ),
        {HYDRA: ("test_first_transition_row_by_row", "test_second_transition_row_by_row")},
    ),
    (
        Lived("what is reset stays", _ROWS, "_cut", lambda _: lambda found, value, _: value),
        {HYDRA: ("test_first_transition_row_by_row",)},
    ),
    (
        Lived("a part of a part is taken whole", _ROWS, "Table._take", taking_all),
        {
            HYDRA: (
                "test_first_transition_row_by_row",
                "test_every_checkpoint_has_the_policy_that_it_may_not_forget",
            )
        },
    ),
    (
        Lived("the step begins again", _ROWS, "Table.carry_out", carrying("global_step", 0)),
        {HYDRA: ("test_first_transition_row_by_row",)},
    ),
    (
        Lived(
            "no anchor enters the pool", _TRANSITIONS, "_TransitionCommit._promotion", always([])
        ),
        {HYDRA: ("test_second_transition_row_by_row",)},
    ),
    (
        Lived(
            "anchors have a rating of their own",
            _TRANSITIONS,
            "DEFAULT",
            lambda old: replace(old, mu=30),
        ),
        {
            HYDRA: ("test_second_transition_row_by_row",),
            HYDRA_LEAGUE: ("test_anchors_are_played_and_never_rated",),
        },
    ),
    (
        Lived(
            "anchors are rated again",
            f"{_POOL}.matches",
            "rate",
            lambda old: lambda before, ranks, _: old(before, ranks),
        ),
        {HYDRA_LEAGUE: ("test_anchors_are_played_and_never_rated",)},
    ),
    (
        Lived(
            "a model enters as an unknown one",
            "registry.saving.save_commit",
            "rating_of",
            lambda old: lambda *_: old.__globals__["DEFAULT"],
        ),
        {HYDRA_LEAGUE: ("test_promotion_inherits_mu_and_widens_sigma",)},
    ),
    (
        Lived(
            "nobody leaves the pool",
            f"{_POOL}.promoting",
            "pool_rules",
            then(lambda rules: rules.changed(size=1000)),
        ),
        {HYDRA_LEAGUE: ("test_pool_keeps_20_beside_the_anchors",)},
    ),
    (
        Lived(
            "anchors leave the pool first",
            f"{_POOL}.promoting",
            "EvictEntries",
            lambda old: lambda versions, reason: old(versions=(1,), reason=reason),
        ),
        {HYDRA_LEAGUE: ("test_pool_keeps_20_beside_the_anchors",)},
    ),
    (
        Mutant(
            "an entry has the step of another",
            f"{_POOL}.entries",
            "PoolEntry.step",
            shown(lambda step: step + 1),
        ),
        {HYDRA_LEAGUE: ("test_entries_tell_what_their_sidecar_would",)},
    ),
    (
        ALL_KEPT,
        {
            HYDRA: (
                "test_phase_1_keeps_20_and_its_best_among_them",
                "test_evictions_are_part_of_saves",
                "test_phases_2_and_3_keep_20_and_the_best_by_mu_less_3_sigma",
            )
        },
    ),
    (
        Lived(
            "nothing is protected", "registry.history.retention", "_Group.protected", lambda _: {}
        ),
        {
            HYDRA: (
                "test_phase_1_keeps_20_and_its_best_among_them",
                "test_gate_keeps_its_checkpoint_for_good",
            )
        },
    ),
    (
        Mutant(
            "checkpoints are listed newest first",
            RUN_MANIFEST,
            "RunManifest.live",
            then(lambda found: found[::-1]),
        ),
        {HYDRA: ("test_phase_1_keeps_20_and_its_best_among_them",)},
    ),
    (
        Lived("a report is lost", "registry.loading.checkpoint", "Checkpoint.report", always(None)),
        {HYDRA: ("test_ratings_come_from_elsewhere_and_late",)},
    ),
    (
        Lived("a commit comes first while the story is lived", *EARLY[1:]),
        {HYDRA: ("test_death_at_any_write_of_a_save_loses_nothing",)},
    ),
)
