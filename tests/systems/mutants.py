"""One change to the library for each test of `test_demands.py`: with it, that test fails.

As a plugin of pytest (`-p tests.systems.mutants`) it makes the change that the environment variable
HOLDFAST_MUTANT names, one of these or of `faults`. `test_mutants.py` runs all of them.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

VARIABLE = "HOLDFAST_MUTANT"


class Mutant(NamedTuple):
    """A change: what the library does wrong with it, and how it is made.

    Attributes:
        fault: What is wrong then.
        module: The module, below `holdfast`.
        name: The name in it, with dots.
        change: Makes the new value of the old one.
    """

    fault: str
    module: str
    name: str
    change: Callable[[Any], Any]

    @property
    def old(self) -> Any:
        """The part of the library that the name stands for, unchanged."""
        return attrgetter(self.name)(importlib.import_module(f"holdfast.{self.module}"))

    def make(self) -> None:
        """Change the library in this process."""
        module = importlib.import_module(f"holdfast.{self.module}")
        *above, last = self.name.split(".")
        owner = attrgetter(".".join(above))(module) if above else module
        setattr(owner, last, self.change(self.old))


def always(value: Any) -> Callable[[Any], Any]:
    """Put a function in place of the old one that returns this value."""
    return lambda _: lambda *_args, **_options: value


def with_option(**options: Any) -> Callable[[Any], Any]:
    """Call the old function with these options."""
    return lambda old: lambda *args, **given: old(*args, **{**given, **options})


def newest(old: Any) -> Any:
    """Return the newest checkpoint, whatever is in it."""
    del old
    return lambda self, phase=None: next(self.newest_first(phase), None)


def last_of_equals(old: Any) -> Any:
    """Return the last one of those that are as good as the best."""

    def best(self: Any, monitor: Any, phase: str | None = None) -> Any:
        found = self.rated(monitor, phase)
        least = old(self, monitor, phase)
        rank = next((one[0] for one in found if one[2] is least), None)
        return max(((one[1], one[2]) for one in found if one[0] == rank), default=(0, None))[1]

    return best


def writes_first(old: Any) -> Any:
    """Write something to the store before the state is looked at."""

    def save(self: Any, state: Any, request: Any) -> Any:
        self._ownership.store.backend.put(f"packs/early-{request.step}", b"early")
        return old(self, state, request)

    return save


def one_way(old: Any) -> Any:
    """Compare only what the source has."""
    return lambda source, target: old(
        source, {name: target[name] for name in source if name in target}
    )


def without_folders(old: Any) -> Any:
    """Make a folder only where the one above it is there."""
    del old
    return lambda folder, mode=0o777, exist_ok=False: os.mkdir(folder, mode)  # noqa: PTH102


def whole(old: Any) -> Any:
    """Load all parts of a component at once."""
    del old
    return lambda self, component: self.load(only=component)[component]


def undocumented(old: Any) -> Any:
    """Take the documentation of a method away."""

    def save(self: Any, state: Any, **options: Any) -> Any:
        return old(self, state, **options)

    return save


#: By the name of the test that must fail.
MUTANTS = {
    "test_latest_is_the_newest_save_whose_weights_are_finite": Mutant(
        "NaN becomes latest", "registry.history.replay.run_manifest", "RunManifest.latest", newest
    ),
    "test_links_move_with_each_save": Mutant(
        "no link to the best", "registry.layouts.contents", "RunContents.best", always(None)
    ),
    "test_evaluations_have_a_folder_of_their_own": Mutant(
        "no folder `eval`", "registry.layouts.hydra", "_is_evaluation", always(False)
    ),
    "test_a_value_that_cannot_be_stored_is_named_and_nothing_is_written": Mutant(
        "the store is written to before the state is checked",
        "registry.saving.pipeline",
        "Pipeline.save",
        writes_first,
    ),
    "test_a_changed_byte_of_any_file_of_a_save_is_noticed": Mutant(
        "chunks are not hashed", "registry.store.fetching", "verify_chunk", always(None)
    ),
    "test_the_tracker_of_the_best_begins_again_in_each_phase": Mutant(
        "values of all phases are compared",
        "registry.history.replay.run_manifest",
        "RunManifest._compared",
        always(None),
    ),
    "test_twenty_checkpoints_take_no_more_than_twenty_files": Mutant(
        "nothing is evicted", "registry.history.retention", "_Group.evicted", lambda _: ()
    ),
    "test_the_teacher_shares_nothing_with_the_student_and_is_cast": Mutant(
        "a frozen part is the part itself",
        "registry.pytree.traversal",
        "frozen",
        lambda _: lambda leaf, dtype=None: leaf,
    ),
    "test_strict_loading_compares_both_ways_and_dtypes": Mutant(
        "what only the target has is not seen",
        "registry.deriving.transitions.execution",
        "_compare",
        one_way,
    ),
    "test_of_equal_values_the_first_stays_best": Mutant(
        "of equal values the last is best",
        "registry.history.replay.run_manifest",
        "RunManifest.best",
        last_of_equals,
    ),
    "test_folders_that_are_not_there_are_made": Mutant(
        "folders above are not made", "backends.local.backend", "os.makedirs", without_folders
    ),
    "test_what_is_not_found_is_answered_with_near_names": Mutant(
        "no near names", "registry.face.refs", "near", always(None)
    ),
    "test_days_decide_of_checkpoints_and_never_of_releases": Mutant(
        "days are not counted", "registry.history.retention", "_DAY_MS", lambda _: 0
    ),
    "test_one_documented_object_saves_and_loads_everything": Mutant(
        "`Run.save` is not documented", "registry.face.run", "Run.save", undocumented
    ),
    "test_every_claim_is_traced_to_an_entry_and_the_commit_that_wrote_it": Mutant(
        "the loss may be archived",
        "registry.curation.streams.stream",
        "stream_lifetime",
        always("resettable"),
    ),
    "test_a_step_file_has_8_bytes_and_12_for_each_parameter": Mutant(
        "the header has more",
        "registry.formats.andrea",
        "_HEAD",
        lambda _: importlib.import_module("struct").Struct("<ii4x"),
    ),
    "test_each_policy_of_a_run_has_a_folder_that_comes_back": Mutant(
        "folders have other names", "registry.layouts.cobre", "CHECKPOINT", lambda _: "{step}"
    ),
    "test_a_comparison_says_what_was_added_grown_and_changed": Mutant(
        "a grown tensor is like any changed one",
        "registry.comparing.state_diff",
        "compare_tensors",
        lambda old: (
            lambda before, after: old(
                {
                    name: one
                    for name, one in before.items()
                    if name in after and one.shape == after[name].shape
                },
                after,
            )
        ),
    ),
    "test_every_stage_of_a_chain_comes_back_with_every_bit": Mutant(
        "a delta has nothing but regions",
        "registry.formats.thalia.delta_writing",
        "ASIDE",
        lambda _: ("training_steps",),
    ),
    "test_the_end_of_a_stage_is_saved_without_a_call": Mutant(
        "the end is not saved",
        "registry.face.run",
        "Run.checkpointer",
        with_option(save_at_end=False),
    ),
    "test_regions_that_are_not_asked_for_are_read_at_their_first_access": Mutant(
        "all regions are read at once", "registry.loading.stored", "Stored.lazily", whole
    ),
    "test_what_is_on_a_gpu_is_saved_as_its_bytes_and_loaded_to_the_cpu": Mutant(
        "loads go elsewhere",
        "registry.loading.checkpoint",
        "Checkpoint.load",
        with_option(map_location="meta"),
    ),
}


def make_named() -> None:
    """Make the fault that the environment names: of a demand, or of a feature."""
    if name := os.environ.get(VARIABLE):
        features = importlib.import_module("tests.systems.faults").FEATURES
        faults = {**{fault.fault: fault for fault in features}, **MUTANTS}
        faults[name].make()


def pytest_configure() -> None:
    """Make the change that is asked for."""
    make_named()
