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
    from holdfast.registry.collective.trainer import CollectiveTrainer
    from holdfast.registry.comparing.branches import Branches, compare_runs
    from holdfast.registry.comparing.diff import Diff, diff
    from holdfast.registry.following.following import Following
    from holdfast.registry.following.watching import Watch
    from holdfast.registry.journal.trainer import JournaledTrainer
    from holdfast.registry.layouts import (
        CheckoutReport,
        ImportedFile,
        check_out_as,
        import_from,
        watch_folder,
    )
    from holdfast.registry.loop.checkpointer import Checkpointer
    from holdfast.registry.loop.notice import NoticeSource
    from holdfast.registry.loop.options import LoopOptions
    from holdfast.registry.loop.ranks import Ranks
    from holdfast.registry.maintenance.findings import VerifyReport
    from holdfast.registry.maintenance.gc import collect
    from holdfast.registry.maintenance.gc_report import GcReport
    from holdfast.registry.maintenance.last_verify import note_verify
    from holdfast.registry.maintenance.repacking.repack import RepackReport, repack
    from holdfast.registry.maintenance.repair import RepairReport, repair
    from holdfast.registry.maintenance.usage import Usage, measure
    from holdfast.registry.maintenance.verify import Progress, verify
    from holdfast.registry.merging.merge import merge
    from holdfast.registry.names.forking import inherit, inheritance
    from holdfast.registry.names.releases import Releases
    from holdfast.registry.plots.curves import Axis
    from holdfast.registry.plots.figure import StreamKeys, plot_run
    from holdfast.registry.pool.league import OpponentPool
    from holdfast.registry.streams.stream import Stream
    from holdfast.registry.tables.checkpoints import checkpoint_table
    from holdfast.registry.tables.runs import run_table
    from holdfast.registry.transitions import (
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
    from holdfast.registry.writing.deltas import check_keyframe_every
else:
    from holdfast.registry.values.first_use import at_first_use

    __getattr__ = at_first_use(
        __name__,
        {
            "Axis": "plots.curves",
            "Branches": "comparing.branches",
            "CheckoutReport": "layouts",
            "Checkpointer": "loop.checkpointer",
            "CollectiveTrainer": "collective.trainer",
            "Diff": "comparing.diff",
            "Following": "following.following",
            "GcReport": "maintenance.gc_report",
            "ImportedFile": "layouts",
            "Initialise": "transitions",
            "JournaledTrainer": "journal.trainer",
            "LoopOptions": "loop.options",
            "Mode": "transitions",
            "NoticeSource": "loop.notice",
            "OpponentPool": "pool.league",
            "Progress": "maintenance.verify",
            "Ranks": "loop.ranks",
            "Releases": "names.releases",
            "RepackReport": "maintenance.repacking.repack",
            "RepairReport": "maintenance.repair",
            "Sources": "transitions",
            "Started": "transitions",
            "Stream": "streams.stream",
            "StreamKeys": "plots.figure",
            "TransitionOptions": "transitions",
            "Transitioned": "transitions",
            "Usage": "maintenance.usage",
            "VerifyReport": "maintenance.findings",
            "Watch": "following.watching",
            "check_expected": "transitions",
            "check_given": "transitions",
            "check_keyframe_every": "writing.deltas",
            "check_mode": "transitions",
            "check_out_as": "layouts",
            "checkpoint_table": "tables.checkpoints",
            "collect": "maintenance.gc",
            "compare_runs": "comparing.branches",
            "diff": "comparing.diff",
            "find_stale": "transitions",
            "import_from": "layouts",
            "inherit": "names.forking",
            "inheritance": "names.forking",
            "measure": "maintenance.usage",
            "merge": "merging.merge",
            "note_verify": "maintenance.last_verify",
            "pivot": "transitions",
            "pivoted": "transitions",
            "plot_run": "plots.figure",
            "repack": "maintenance.repacking.repack",
            "repair": "maintenance.repair",
            "run_table": "tables.runs",
            "start_fresh": "transitions",
            "start_warm": "transitions",
            "transition": "transitions",
            "verify": "maintenance.verify",
            "watch_folder": "layouts",
        },
    )

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
