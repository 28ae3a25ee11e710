"""Faults that tests of the rows of Thalia notice."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from tests.systems.faults.form import (
    DAMAGED,
    KEYS,
    NUMBER,
    RUN_MANIFEST,
    Table,
    nudged,
    shown,
    then,
)
from tests.systems.mutants import Mutant, always, with_option

_PRECISION = "registry.spec.precision.policy"
_THALIA = "registry.formats.thalia"
COLLECTIVE = "tests/registry/saving/collective/test_processes.py"
DOCUMENTS = "tests/systems/test_documents.py"
EXAMPLE = "tests/test_example.py"
EVERY_FORMAT = "tests/registry/formats/test_every_format.py"
FILES = "tests/registry/cli/test_files.py"
FORMAT = "tests/registry/formats/test_thalia.py"
GOLDEN = "tests/registry/formats/test_golden_samples.py"
CIRCLE = "tests/systems/circle/test_thalia.py"
ROUND_TRIPS = "tests/registry/layouts/test_round_trips.py"
THALIA = "tests/systems/test_thalia.py"


def reading_first(old: Any) -> Any:
    """Read a file before it is described."""

    def inspect(path: Any, **options: Any) -> Any:
        importlib.import_module("holdfast.registry.formats").read(path)
        return old(path, **options)

    return inspect


def unchecked(tensor: Any, dtype: str, path: str) -> Any:
    """Convert a tensor, whatever its numbers become."""
    del path
    tensors = importlib.import_module(f"holdfast.{_THALIA}.tensors")
    with np.errstate(over="ignore"):
        return tensors.as_bytes(tensors.as_array(tensor).astype(dtype))


def first_bytes(old: Any) -> Any:
    """Tell chunks apart by their first 4 KiB."""

    def copy_and_hash(source: Any, target: Any) -> Any:
        from holdfast.registry.values import Digest

        old(source, target)
        return Digest.of(bytes(target[:4096]))

    return copy_and_hash


FAULTS: Table = (
    (KEYS, {THALIA: ("test_a_state_without_regions_is_refused",)}),
    (NUMBER, {THALIA: ("test_a_full_state_with_dataclasses_comes_back",)}),
    (DAMAGED, {THALIA: ("test_nothing_is_damaged",)}),
    *(
        (fault, {CIRCLE: ("test_a_brain_goes_on_in_files_and_comes_back",)})
        for fault in (
            Mutant(
                "a dataclass of a file is a dict",
                f"{_THALIA}.tensors",
                "fields_of",
                lambda _: lambda value: value,
            ),
            Mutant("meta is not in the file", f"{_THALIA}.writing", "described", always({})),
            Mutant("stages are no phases", "registry.layouts.thalia", "_phase", always(None)),
            Mutant(
                "a delta has no changes of metadata",
                f"{_THALIA}.delta",
                "_apply",
                lambda old: (
                    lambda state, delta, path: old(
                        state,
                        replace(delta, changes={**delta.changes, "metadata_changes": {}}),
                        path,
                    )
                ),
            ),
        )
    ),
    (
        Mutant("nothing is sparse", f"{_THALIA}.tensors", "_nonzero", always(None)),
        {
            FORMAT: ("test_the_choice_of_dense_and_sparse",),
            THALIA: ("test_mostly_zero_tensors_are_sparse_in_files",),
        },
    ),
    (
        Mutant(
            "problems are not noted", "registry.formats.state_file", "Faults.note", always(None)
        ),
        {
            FORMAT: (
                "test_every_flipped_byte_is_noticed",
                "test_bodies_with_a_right_checksum_give_a_state_or_a_typed_error",
            ),
            EVERY_FORMAT: ("test_every_problem_is_told",),
        },
    ),
    (
        Mutant("files have no size limit", "registry.formats.source", "check_size", always(None)),
        {EVERY_FORMAT: ("test_the_size_limit_holds_for_every_call",)},
    ),
    (
        Mutant(
            "a restored number is another",
            "registry.saving.restoring",
            "load_to_train",
            then(nudged),
        ),
        {
            THALIA: (
                "test_a_curriculum_in_four_processes_ends_like_one_in_a_single_process",
                "test_training_resumes_from_any_stage",
            ),
            EXAMPLE: ("test_a_curriculum_continues_bit_for_bit",),
        },
    ),
    (
        Mutant(
            "a restore takes the newest always",
            "registry.face.run",
            "Run.restore",
            with_option(at=None),
        ),
        {THALIA: ("test_load_checkpoint_goes_back_to_a_stage",)},
    ),
    (
        Mutant(
            "the newest of all phases is that of each",
            RUN_MANIFEST,
            "RunManifest.latest",
            lambda old: lambda self, phase=None: old(self),
        ),
        {
            THALIA: (
                "test_each_stage_is_a_phase_that_is_saved_at_its_end",
                "test_a_brain_grows_between_saves",
            )
        },
    ),
    (
        Mutant(
            "metadata of a save does not come back",
            "registry.loading.checkpoint",
            "Checkpoint.meta",
            shown(lambda _: {}),
        ),
        {THALIA: ("test_growth_history_comes_back_from_the_metadata",)},
    ),
    (
        Mutant(
            "a curve lacks its first point",
            "registry.plots",
            "_records",
            then(lambda found: list(found)[1:]),
        ),
        {THALIA: ("test_growth_over_time_is_plotted",)},
    ),
    (
        Mutant(
            "stored chunks are not known", "registry.writing.packing", "locations_of", always({})
        ),
        {THALIA: ("test_growth_by_neurons_stores_the_new_rows_alone",)},
    ),
    (
        Mutant(
            "chunks that begin alike are one",
            "registry.writing.hashing",
            "copy_and_hash",
            first_bytes,
        ),
        {THALIA: ("test_growth_by_inputs_writes_the_tensor_again",)},
    ),
    (
        Mutant(
            "everything is read before some is chosen",
            "registry.loading.stored",
            "Stored.load",
            lambda old: lambda self, **options: (old(self), old(self, **options))[1],
        ),
        {THALIA: ("test_single_regions_are_loaded_and_nothing_else_is_read",)},
    ),
    (
        Mutant(
            "the first of two states that are merged counts",
            "registry.deriving.merging.merged_save",
            "check_weights",
            always((1.0, 0.0)),
        ),
        {THALIA: ("test_two_trainings_are_merged",)},
    ),
    (
        Mutant("tensors stay narrow", "registry.spec.precision", "widen_all", always(None)),
        {THALIA: ("test_fp16_keeps_thresholds_and_membrane_and_loads_as_fp32",)},
    ),
    (
        Mutant("no tensor is too small to be narrowed", _PRECISION, "AUTO_BYTES", lambda _: 0),
        {THALIA: ("test_mixed_narrows_only_large_weights",)},
    ),
    (
        Mutant(
            "the last pattern that matches counts",
            _PRECISION,
            "_first_match",
            lambda old: lambda uses, path: old(uses[::-1], path),
        ),
        {THALIA: ("test_a_custom_policy_is_a_mapping_of_patterns",)},
    ),
    (
        Mutant("nothing is narrowed", _PRECISION, "Precision._choose", always({})),
        {THALIA: ("test_the_archive_of_a_stage_is_half_as_large",)},
    ),
    (
        Mutant(
            "a policy converts nothing",
            f"{_THALIA}.brain",
            "converted",
            lambda _: lambda state, __: state,
        ),
        {
            FORMAT: ("test_precision_policies",),
            THALIA: ("test_a_file_is_compressed_narrowed_and_validated",),
        },
    ),
    (
        Mutant(
            "a large number becomes infinite", f"{_THALIA}.precision", "cast", lambda _: unchecked
        ),
        {FORMAT: ("test_a_number_that_is_too_large_for_half_precision_is_refused",)},
    ),
    (
        Mutant("nothing is compressed", f"{_THALIA}.writing", "Options.compressor", always(None)),
        {THALIA: ("test_a_file_is_compressed_narrowed_and_validated",)},
    ),
    (
        Mutant(
            "every level is the default one",
            f"{_THALIA}.writing",
            "partial",
            lambda old: lambda function, level: old(function, level=None),
        ),
        {
            FORMAT: ("test_levels_of_compression",),
            FILES: ("test_a_file_is_written_in_another_form",),
        },
    ),
    (
        Mutant(
            "a compressed file has its checksum behind the frame",
            f"{_THALIA}.framing",
            "_take_checksum",
            lambda old: (
                lambda body: setattr(body, "problem", "none") if body.compression else old(body)
            ),
        ),
        {FORMAT: ("test_the_older_frame_of_compressed_files",)},
    ),
    (
        Mutant("a header has no time", f"{_THALIA}.writing", "_seconds", always(0)),
        {FORMAT: ("test_a_real_file_is_written_byte_for_byte",)},
    ),
    (
        Mutant("a header counts no neurons", f"{_THALIA}.writing", "_membrane", always(0)),
        {DOCUMENTS: ("test_examples_of_inspection",)},
    ),
    (
        Mutant(
            "nothing is lazy", f"{_THALIA}.brain", "BrainCheckpoint.load", with_option(lazy=False)
        ),
        {DOCUMENTS: ("test_examples_of_single_regions",)},
    ),
    (
        Mutant("no pattern fits", f"{_THALIA}.precision", "fnmatchcase", always(False)),
        {DOCUMENTS: ("test_examples_of_mixed_precision",)},
    ),
    (
        Mutant(
            "homeostatic state is always there",
            f"{_THALIA}.brain",
            "_state_of",
            with_option(homeostatic=True),
        ),
        {DOCUMENTS: ("test_homeostatic_state_can_be_left_out",)},
    ),
    (
        Mutant("connections are not read", f"{_THALIA}.document", "_connections", always({})),
        {FORMAT: ("test_the_layout_of_the_document",)},
    ),
    (
        Mutant(
            "the first value of a region is lost",
            f"{_THALIA}.container",
            "filled",
            then(lambda region: dict([*region.items()][1:])),
        ),
        {GOLDEN: ("test_a_brain",)},
    ),
    (
        Mutant("regions are not chosen", _THALIA, "load", with_option(regions=None)),
        {FORMAT: ("test_single_regions",)},
    ),
    (
        Mutant(
            "no difference is below the threshold",
            f"{_THALIA}.delta_writing",
            "changes",
            lambda old: lambda *given: old(*given[:-1], 0),
        ),
        {FORMAT: ("test_differences_below_the_threshold_are_left_out",)},
    ),
    (
        Mutant("a chain has one delta", f"{_THALIA}.delta", "_MAX_CHAIN", lambda _: 1),
        {FORMAT: ("test_deltas_and_their_chains",)},
    ),
    (
        Mutant(
            "the base of a delta is not compared",
            f"{_THALIA}.delta",
            "_compared_base",
            lambda old: lambda delta, path: nullcontext() if path.exists() else old(delta, path),
        ),
        {FORMAT: ("test_a_delta_needs_its_very_base",)},
    ),
    (
        Mutant(
            "a delta has every region as a whole",
            f"{_THALIA}.delta_writing",
            "_change",
            lambda _: lambda _, slim, *__: {"type": "new", "state": slim},
        ),
        {
            DOCUMENTS: ("test_examples_of_deltas",),
            THALIA: ("test_a_delta_in_half_precision_and_compressed_is_a_fraction_of_a_file",),
        },
    ),
    (
        Mutant(
            "half precision stays in version 0.1",
            f"{_THALIA}.brain",
            "widened",
            lambda _: lambda state: state,
        ),
        {FORMAT: ("test_migration_between_versions",)},
    ),
    (
        Mutant(
            "a file is read before it is described", "registry.formats", "inspect", reading_first
        ),
        {EVERY_FORMAT: ("test_a_description_reads_no_data",)},
    ),
    (
        Mutant("content decides no format", "registry.formats.table", "by_content", always(None)),
        {FILES: ("test_a_file_is_described_by_its_content",)},
    ),
    (
        Mutant("ONNX is like any name", "registry.formats.table", "check_scope", always(None)),
        {EVERY_FORMAT: ("test_onnx_is_never_written",)},
    ),
    (
        Mutant(
            "a file beside a brain has no tensors",
            "registry.layouts.thalia",
            "_metadata",
            then(lambda found: found | {"tensors": {}}),
        ),
        {ROUND_TRIPS: ("test_brains_of_thalia_come_back",)},
    ),
    (
        Mutant(
            "a single process has no tensors in manifests",
            "registry.writing.packing",
            "INLINE_BYTES",
            lambda _: 0,
        ),
        {COLLECTIVE: ("test_every_layout_has_the_id_of_the_plain_state_and_stores_it_once",)},
    ),
    (
        Mutant(
            "dataclasses come back as dicts",
            "registry.pytree.encoding",
            "AdapterTable.of_name",
            then(lambda adapter: adapter._replace(from_plain=dict)),
        ),
        {THALIA: ("test_a_full_state_with_dataclasses_comes_back",)},
    ),
    (
        Mutant(
            "nothing is superseded",
            "registry.history.replay.draft",
            "Draft.supersede",
            always(None),
        ),
        {THALIA: ("test_load_checkpoint_goes_back_to_a_stage",)},
    ),
    (
        Mutant(
            "a policy spares no tensor",
            _PRECISION,
            "Precision.resolved",
            lambda _: lambda self, __: type(self)((("*", "fp16"),)),
        ),
        {THALIA: ("test_fp16_keeps_thresholds_and_membrane_and_loads_as_fp32",)},
    ),
    (
        Mutant(
            "fp32 is fp16",
            _PRECISION,
            "Precision.resolved",
            lambda old: (
                lambda self, spec: old(
                    replace(self, name=self.name and self.name.replace("32", "16")), spec
                )
            ),
        ),
        {THALIA: ("test_a_custom_policy_is_a_mapping_of_patterns",)},
    ),
    (
        Mutant(
            "checksums are not compared",
            f"{_THALIA}.framing",
            "_compared",
            lambda _: lambda *__, **___: nullcontext(),
        ),
        {FORMAT: ("test_every_flipped_byte_is_noticed",)},
    ),
)
