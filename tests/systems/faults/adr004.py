"""Faults that tests of the rows of ADR-004 notice."""

from __future__ import annotations

import pydoc
from typing import Any

from tests.systems.faults.form import (
    ALL_KEPT,
    BEST,
    COMMITS,
    DAMAGED,
    EARLY,
    KEPT,
    KEYS,
    NUMBER,
    OLDEST,
    ORDER,
    PLAIN,
    STREAM,
    Lived,
    Table,
    then,
)
from tests.systems.mutants import Mutant, always, with_option

_RELEASES = "registry.curation.releases"
CHECKOUT = "tests/registry/layouts/test_checkout.py"
CODECS = "tests/registry/objects/test_codecs.py"
DOCUMENTS = "tests/systems/test_documents.py"
GOLDEN = "tests/registry/formats/test_golden_samples.py"
PAGES = "tests/registry/adapters/trainers/test_pages.py"
PROMISE_5 = "tests/promises/test_promise_5_loading_runs_no_code.py"
TORCH = "tests/registry/formats/test_torch_reading.py"
ROUND_TRIPS = "tests/registry/layouts/test_round_trips.py"
ADR004 = "tests/systems/test_adr004.py"
CIRCLE = "tests/systems/circle/test_adr004.py"
TO_THE_LETTER = "tests/systems/test_to_the_letter.py"


def calling(old: Any) -> Any:
    """Call the function that a node of a skeleton names, and refuse the node only then."""

    def node(self: Any, one: Any, *where: Any) -> Any:
        if isinstance(one, dict) and "call" in one:
            name, arguments = one["call"]
            pydoc.locate(name)(*arguments)
        return old(self, one, *where)

    return node


FAULTS: Table = (
    (KEYS, {ADR004: ("test_missing_keys_are_refused",)}),
    (ORDER, {ADR004: ("test_structure_comes_back_key_by_key",)}),
    (NUMBER, {ADR004: ("test_interrupted_training_ends_like_one_that_was_not",)}),
    (
        BEST,
        {
            ADR004: ("test_best_milestones_by_accuracy_and_by_loss",),
            TO_THE_LETTER: ("test_metrics_in_the_state_choose_best_and_milestones",),
        },
    ),
    (OLDEST, {ADR004: ("test_last_3_and_every_milestone_are_kept",)}),
    (COMMITS, {ADR004: ("test_cleanup_is_part_of_the_save_and_by_log_not_by_clock",)}),
    (DAMAGED, {ADR004: ("test_nothing_is_damaged",)}),
    (
        Mutant(
            "a milestone without its training file is new",
            "registry.layouts.importing",
            "noted_files",
            then(lambda files: dict([*files.items()][:1])),
        ),
        {CIRCLE: ("test_a_training_goes_through_the_class_of_adr004_and_back",)},
    ),
    (
        Mutant("a card needs no field", _RELEASES, "check_card", always(None)),
        {ADR004: ("test_every_field_of_the_card_is_required",)},
    ),
    (
        Mutant(
            "everything is released",
            _RELEASES,
            "inference_parts",
            lambda _: lambda spec, parts, **__: [*parts],
        ),
        {
            ADR004: ("test_release_is_what_inference_needs_and_a_card",),
            TO_THE_LETTER: ("test_a_release_has_what_the_documents_loader_asks_for",),
        },
    ),
    (
        Mutant(
            "a rollback does nothing",
            _RELEASES,
            "Releases.rollback",
            always(None),
        ),
        {ADR004: ("test_releases_are_versioned_and_rolled_back",)},
    ),
    (
        Mutant(
            "a release is the first one",
            _RELEASES,
            "Releases.get",
            lambda _: lambda self, __: self.list()[0],
        ),
        {ADR004: ("test_releases_are_versioned_and_rolled_back",)},
    ),
    (STREAM, {ADR004: ("test_training_history_has_every_epoch",)}),
    (
        Mutant("links are not made", "registry.layouts.checkout", "_Checkout._link", always(None)),
        {
            ROUND_TRIPS: (
                "test_tree_of_adr004_comes_back_with_its_names_links_and_tensors",
                "test_real_tree_of_adr004_comes_back",
            ),
            DOCUMENTS: ("test_the_class_of_adr004_and_its_files_come_and_go",),
        },
    ),
    (
        Mutant("a skeleton calls functions", "registry.pytree.decoding", "Decoder.node", calling),
        {PROMISE_5: ("test_promise_5_loading_runs_no_code",)},
    ),
    (
        Mutant("W&B is told nothing", "wandb", "log", always(None)),
        {PAGES: ("test_wandb_gets_the_ref_and_the_id_and_no_data",)},
    ),
    (
        Mutant(
            "the bytes of a storage are turned",
            "registry.formats.torch.storages",
            "Tensors._data",
            then(lambda data: memoryview(bytes(data)[::-1])),
        ),
        {GOLDEN: ("test_a_checkpoint_of_adr004[milestones]",)},
    ),
    (
        Mutant(
            "files keep torch's class of versions",
            "registry.formats.torch",
            "without_versions",
            lambda _: lambda state: state,
        ),
        {TORCH: ("test_a_version_of_torch_comes_back_as_one_and_is_text_in_a_file",)},
    ),
    (
        Mutant(
            "a file has its name before it is noted",
            "registry.layouts.checkout",
            "_Checkout._place",
            lambda _: (
                lambda self, staged, path, made: (
                    staged.replace(self._folder_of(path) / path.rpartition("/")[2]),
                    self._made.note(path, made),
                    self._done(path),
                )
            ),
        ),
        {CHECKOUT: ("test_death_at_any_step_leaves_whole_files_that_the_next_checkout_knows",)},
    ),
    (
        Mutant(
            "a frame lacks the last element",
            "registry.objects.codecs.blosc",
            "encode",
            lambda old: lambda data, item, codec: old(memoryview(data)[:-item], item, codec),
        ),
        {CODECS: ("test_any_state_any_compression_any_slice",)},
    ),
    (EARLY, {ADR004: ("test_a_publisher_that_dies_leaves_all_or_nothing",)}),
    (KEPT, {ADR004: ("test_equal_trainings_have_equal_ids_whenever_and_wherever",)}),
    (
        Mutant(
            "a release is always cut from its checkpoint",
            _RELEASES,
            "Releases.publish",
            with_option(state=None),
        ),
        {ADR004: ("test_release_can_have_a_smaller_config",)},
    ),
    (
        Mutant(
            "a release has the metrics of its checkpoint",
            _RELEASES,
            "check_metrics",
            always(None),
        ),
        {ADR004: ("test_release_can_have_a_smaller_config",)},
    ),
    (
        Mutant(
            "the last commit is not copied",
            "registry.face.syncing",
            "_RunCopy._missing",
            then(lambda commits: commits[:-1]),
        ),
        {ADR004: ("test_second_registry_has_all_of_it",)},
    ),
    (
        Mutant(
            "metrics in a state are 0",
            "registry.saving.save_request",
            "_numbers",
            then(lambda found: dict.fromkeys(found, 0.0)),
        ),
        {
            DOCUMENTS: ("test_what_the_class_of_adr004_saves_can_be_saved_as_it_is",),
            TO_THE_LETTER: (
                "test_a_metric_has_one_value",
                "test_metrics_in_the_state_come_through_a_journal",
            ),
        },
    ),
    (
        ALL_KEPT,
        {
            ADR004: (
                "test_last_3_and_every_milestone_are_kept",
                "test_cleanup_is_part_of_the_save_and_by_log_not_by_clock",
            )
        },
    ),
    (
        Lived(
            "no save is a milestone",
            "registry.saving.save_commit",
            "choose_tier",
            always("training"),
        ),
        {ADR004: ("test_last_3_and_every_milestone_are_kept",)},
    ),
    (PLAIN, {ADR004: ("test_structure_comes_back_key_by_key",)}),
    (
        Mutant("a release may change", _RELEASES, "_Publication._check_same", always(None)),
        {ADR004: ("test_releases_are_versioned_and_rolled_back",)},
    ),
    (
        Mutant("releases have no history", _RELEASES, "Releases.history", always(())),
        {ADR004: ("test_releases_are_versioned_and_rolled_back",)},
    ),
    (
        Mutant(
            "lines of a card are in another order",
            _RELEASES,
            "Release.card_yaml",
            then(lambda text: "".join(text.splitlines(True)[::-1])),
        ),
        {ADR004: ("test_release_is_what_inference_needs_and_a_card",)},
    ),
    (
        Mutant(
            "a file of a release is its state alone",
            _RELEASES,
            "_ReleaseHandle.file_keys",
            always({}),
        ),
        {
            TO_THE_LETTER: ("test_a_release_has_what_the_documents_loader_asks_for",),
        },
    ),
    (
        Mutant(
            "epochs have three digits",
            "registry.layouts.adr004",
            "written",
            then(lambda path: path.replace("epoch_0", "epoch_")),
        ),
        {DOCUMENTS: ("test_what_the_class_of_adr004_saves_can_be_saved_as_it_is",)},
    ),
)
