"""What only some calls of a registry or a run need; it is imported when it is first used.

`Registry` and `Run` are the face of everything, so a program that opens a registry to read one
checkpoint would import collection, merging, pools and all the rest. They take those from here:
`rooms.merge(...)`. This is the one place where a part of the package is imported late, apart from
the public face `holdfast` and the commands. Type checkers and the check of the layers see plain
imports; the table below them says the same at run time, and a test compares the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.registry.comparing import Branches, Diff, compare_runs, diff
    from holdfast.registry.curation import Releases, inherit, inheritance
    from holdfast.registry.curation.pool import OpponentPool
    from holdfast.registry.curation.streams import Stream
    from holdfast.registry.deriving.merging import merge
    from holdfast.registry.deriving.transitions import (
        Initialise,
        Mode,
        Sources,
        Started,
        Transitioned,
        TransitionOptions,
        check_expected,
        check_given,
        check_mode,
        find_stale,
        pivot,
        pivoted,
        start_fresh,
        start_warm,
        transition,
    )
    from holdfast.registry.layouts import (
        CheckoutReport,
        ImportedFile,
        check_out_as,
        import_from,
        watch_folder,
    )
    from holdfast.registry.loading.following import Following, Watch
    from holdfast.registry.plots import Axis, StreamKeys, plot_run
    from holdfast.registry.saving.collective import CollectiveTrainer
    from holdfast.registry.saving.journal import JournaledTrainer
    from holdfast.registry.saving.loop import Checkpointer, LoopOptions, NoticeSource, Ranks
    from holdfast.registry.tables import checkpoint_table, run_table
    from holdfast.registry.upkeep import (
        GcReport,
        Progress,
        RepairReport,
        Usage,
        VerifyReport,
        collect,
        measure,
        note_verify,
        repair,
        verify,
    )
    from holdfast.registry.upkeep.repacking import RepackReport, repack
    from holdfast.registry.writing import check_keyframe_every
else:
    from holdfast.registry.values.first_use import at_first_use

    __getattr__ = at_first_use(__name__)

__all__ = [
    "Axis",
    "Branches",
    "CheckoutReport",
    "Checkpointer",
    "CollectiveTrainer",
    "Diff",
    "Following",
    "GcReport",
    "ImportedFile",
    "Initialise",
    "JournaledTrainer",
    "LoopOptions",
    "Mode",
    "NoticeSource",
    "OpponentPool",
    "Progress",
    "Ranks",
    "Releases",
    "RepackReport",
    "RepairReport",
    "Sources",
    "Started",
    "Stream",
    "StreamKeys",
    "TransitionOptions",
    "Transitioned",
    "Usage",
    "VerifyReport",
    "Watch",
    "check_expected",
    "check_given",
    "check_keyframe_every",
    "check_mode",
    "check_out_as",
    "checkpoint_table",
    "collect",
    "compare_runs",
    "diff",
    "find_stale",
    "import_from",
    "inherit",
    "inheritance",
    "measure",
    "merge",
    "note_verify",
    "pivot",
    "pivoted",
    "plot_run",
    "repack",
    "repair",
    "run_table",
    "start_fresh",
    "start_warm",
    "transition",
    "verify",
    "watch_folder",
]
