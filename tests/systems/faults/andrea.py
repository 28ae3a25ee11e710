"""Faults that tests of the rows of ANDREA notice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast.registry.history import MAX_STEP
from tests.systems.faults.form import (
    BEST,
    DAMAGED,
    DTYPES,
    EARLY,
    KEYS,
    NUMBER,
    OLDEST,
    RUN_MANIFEST,
    STATUS,
    STREAM,
    Lived,
    Table,
    shown,
    then,
)
from tests.systems.mutants import Mutant, always, with_option

_FILES = "registry.formats.andrea"
_HISTORIES = "registry.layouts.histories"
_PIVOT = "registry.deriving.transitions.pivot"
_LOOP = "registry.saving.loop.checkpointer"
CIRCLE = "tests/systems/circle/test_andrea.py"
FORMAT = "tests/registry/formats/test_andrea.py"
GOLDEN = "tests/registry/formats/test_golden_samples.py"
ROUND_TRIPS = "tests/registry/layouts/test_round_trips.py"
HISTORIES = "tests/registry/layouts/test_histories.py"
IMPORTING = "tests/registry/layouts/test_importing.py"
COBRE = "tests/systems/test_cobre.py"
ANDREA = "tests/systems/test_andrea.py"


def archived_before(old: Any) -> Any:
    """Archive the streams in commits of their own before a pivot."""

    def pivot(self: Any, name: str, **options: Any) -> Any:
        from holdfast.registry.curation.streams import Stream

        for stream in self._handle.log.refresh().streams:
            if stream.count and stream.lifetime == "resettable":
                Stream(self._handle.committer, stream.name).archive(name)
        return old(self, name, **options)

    return pivot


def entered_before(old: Any) -> Any:
    """Append the entries of streams in commits of their own before the save."""

    def save(self: Any, state: Any, *, streams: Any = None, **options: Any) -> Any:
        for name, entries in (streams or {}).items():
            self.streams[name].append(entries)
        return old(self, state, **options)

    return save


FAULTS: Table = (
    (KEYS, {ANDREA: ("test_a_state_without_a_region_is_refused",)}),
    (DTYPES, {ANDREA: ("test_regions_are_float32",)}),
    (
        NUMBER,
        {
            ANDREA: (
                "test_interrupted_training_ends_like_one_that_was_not",
                "test_five_regions_come_back_as_they_are",
            )
        },
    ),
    (BEST, {ANDREA: ("test_best_begins_again_at_a_pivot",)}),
    (
        OLDEST,
        {
            ANDREA: (
                "test_every_100_steps_are_a_recovery_point",
                "test_every_checkpoint_has_a_sample_of_its_own",
            )
        },
    ),
    (DAMAGED, {ANDREA: ("test_nothing_is_damaged",)}),
    (STREAM, {ANDREA: ("test_loss_history_is_unbroken",)}),
    (
        Mutant(
            "archives of a stream are not listed",
            "registry.curation.streams.stream",
            "Stream.archives",
            shown(lambda _: {}),
        ),
        {
            ANDREA: (
                "test_archives_are_in_the_tree_of_a_checkout",
                "test_samples_and_bandit_are_archived_at_each_pivot",
            )
        },
    ),
    (
        Mutant("pivots are not listed", RUN_MANIFEST, "RunManifest.pivots", shown(lambda _: ())),
        {
            ANDREA: (
                "test_pivots_need_no_phases_and_are_in_the_history",
                "test_the_same_pivot_again_does_nothing",
            )
        },
    ),
    (
        Mutant("nothing is stale", "registry.deriving.transitions", "find_stale", always(())),
        {
            ANDREA: ("test_a_zombie_arm_is_reported",),
            HISTORIES: ("test_zombie_arm_of_an_imported_folder_is_found",),
        },
    ),
    (
        Mutant(
            "entries do not wait for their checkpoint",
            _HISTORIES,
            "History.due",
            lambda old: lambda self, _: old(self, MAX_STEP),
        ),
        {HISTORIES: ("test_entries_come_with_their_checkpoint_and_later_ones_wait",)},
    ),
    (
        Mutant("a step has no loss", _HISTORIES, "History.value", always(None)),
        {HISTORIES: ("test_loss_at_a_step_is_the_metric_of_its_checkpoint",)},
    ),
    (
        Mutant("a folder never goes back", _HISTORIES, "Histories.go_back", always([])),
        {
            CIRCLE: ("test_a_training_goes_through_the_files_of_andrea_and_back",),
            HISTORIES: ("test_after_a_crash_the_run_goes_on_from_the_last_common_checkpoint",),
        },
    ),
    (
        Mutant(
            "a file is whole at any size", "registry.layouts.andrea", "is_complete", always(True)
        ),
        {IMPORTING: ("test_step_file_is_taken_once_it_has_its_size",)},
    ),
    (EARLY, {ANDREA: ("test_a_process_that_dies_in_a_save_loses_only_its_steps",)}),
    (STATUS, {ANDREA: ("test_sigterm_finishes_the_step_saves_and_exits_cleanly",)}),
    (
        Mutant(
            "a loop that is asked to stop saves nothing",
            _LOOP,
            "Checkpointer._is_unsaved",
            shown(lambda _: False),
        ),
        {
            ANDREA: ("test_sigterm_finishes_the_step_saves_and_exits_cleanly",),
            COBRE: ("test_a_signal_to_two_ranks_saves_the_last_iteration_and_exits_with_0",),
        },
    ),
    (
        Mutant(
            "SIGUSR1 does not wait for the cadence",
            _LOOP,
            "reaction",
            then(lambda asked: asked.changed(sigusr1="now")),
        ),
        {ANDREA: ("test_sigusr1_saves_at_the_next_boundary_and_continues",)},
    ),
    (
        Mutant(
            "a kept history may be archived",
            "registry.curation.streams.stream",
            "stream_lifetime",
            always("resettable"),
        ),
        {ANDREA: ("test_loss_history_can_never_be_archived",)},
    ),
    (
        Mutant(
            "a pivot resets what its table does not name",
            _PIVOT,
            "Table",
            with_option(rest="reset"),
        ),
        {ANDREA: ("test_weights_and_moments_continue_over_a_pivot",)},
    ),
    (
        Mutant(
            "streams are archived before the pivot",
            "registry.face.phases",
            "RunPhases.pivot",
            archived_before,
        ),
        {ANDREA: ("test_a_process_that_dies_in_a_pivot_leaves_all_or_nothing",)},
    ),
    (
        Mutant(
            "two runs have no different configurations",
            "registry.comparing.branches",
            "compare_configs",
            always(()),
        ),
        {ANDREA: ("test_two_branches_from_one_checkpoint_are_compared",)},
    ),
    (
        Mutant("m and v are exchanged", _FILES, "PARTS", lambda _: ("weights", "v", "m")),
        {GOLDEN: ("test_a_step_file",)},
    ),
    (
        Mutant(
            "a table names the tensors from the last one on",
            _FILES,
            "_part",
            lambda old: (
                lambda file, path, count, table: old(
                    file, path, count, table and dict(reversed(table.items()))
                )
            ),
        ),
        {FORMAT: ("test_names_and_shapes_from_a_table",)},
    ),
    (
        Mutant(
            "names of files have 8 digits",
            "registry.layouts.andrea",
            "CHECKPOINT",
            lambda _: "step_{step:08d}.bin",
        ),
        {ROUND_TRIPS: ("test_tree_of_andrea_comes_back_byte_for_byte",)},
    ),
    (
        Mutant(
            "the step in the name counts",
            "registry.layouts.andrea",
            "reading",
            lambda old: lambda found, *options: replace(old(found, *options), step=found.step),
        ),
        {IMPORTING: ("test_header_counts_and_a_wrong_name_is_told",)},
    ),
    (
        Mutant(
            "every run is called running",
            "registry.face.run",
            "Run.status",
            shown(lambda _: "running"),
        ),
        {
            ANDREA: ("test_sigterm_finishes_the_step_saves_and_exits_cleanly",),
            COBRE: ("test_a_signal_to_two_ranks_saves_the_last_iteration_and_exits_with_0",),
        },
    ),
    (
        Mutant(
            "values from before a pivot count",
            RUN_MANIFEST,
            "RunManifest.restarts",
            always({}),
        ),
        {ANDREA: ("test_best_begins_again_at_a_pivot",)},
    ),
    (
        Mutant(
            "a pivot has no rows",
            _PIVOT,
            "Table",
            lambda old: lambda _, *given, **options: old((), *given, **options),
        ),
        {ANDREA: ("test_weights_and_moments_continue_over_a_pivot",)},
    ),
    (
        Mutant("histories lose their names", "registry.layouts.andrea", "imported_as", always({})),
        {ROUND_TRIPS: ("test_tree_of_andrea_comes_back_byte_for_byte",)},
    ),
    (
        Lived("generators are not restored", "registry.face.rng", "restore", always(None)),
        {ANDREA: ("test_interrupted_training_ends_like_one_that_was_not",)},
    ),
    (
        Lived(
            "every second cadence is due",
            "registry.face.phases",
            "RunPhases.is_due",
            lambda old: lambda self, step, phase=None: old(self, step, phase) and step % 200 == 0,
        ),
        {ANDREA: ("test_every_100_steps_are_a_recovery_point",)},
    ),
    (
        Lived("nothing is thinned", "registry.saving.save_commit", "may_thin", always(False)),
        {ANDREA: ("test_old_checkpoints_keep_their_weights_and_one_of_ten_all",)},
    ),
    (
        Lived("entries come before their save", "registry.face.run", "Run.save", entered_before),
        {ANDREA: ("test_loss_history_is_unbroken",)},
    ),
    (
        Lived(
            "a save has no entries of streams",
            "registry.face.run",
            "Run.save",
            with_option(streams=None),
        ),
        {ANDREA: ("test_every_checkpoint_has_a_sample_of_its_own",)},
    ),
    (
        Mutant(
            "a pivot forgets its configuration",
            RUN_MANIFEST,
            "RunManifest.config_at",
            lambda _: lambda self, _: self.created.config,
        ),
        {ANDREA: ("test_a_pivot_records_the_new_caps_and_floors",)},
    ),
    (
        Lived("a pivot archives nothing", _PIVOT, "_archives", always([])),
        {ANDREA: ("test_samples_and_bandit_are_archived_at_each_pivot",)},
    ),
)
