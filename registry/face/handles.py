"""Runs and the refs into them; they are imported with the first run that a registry opens.

A registry can be opened, checked and collected without them. `holdfast.registry.face.rooms` says
how and why parts of the package are imported late; this table is apart because it is above the
runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.registry.face.refs import find_by_id, find_in_run, is_digest
    from holdfast.registry.face.run import Run
    from holdfast.registry.history import (
        RunLog,
        RunOptions,
        begin,
        check_not_dropped,
        check_same,
        creation,
        default_ids,
        forked,
        list_runs,
    )
    from holdfast.registry.loading import Checkpoint
    from holdfast.registry.spec import RunSpec
    from holdfast.registry.store import Progress, Transfers, bar
else:
    from holdfast.registry.values.first_use import at_first_use

    __getattr__ = at_first_use(__name__)

__all__ = [
    "Checkpoint",
    "Progress",
    "Run",
    "RunLog",
    "RunOptions",
    "RunSpec",
    "Transfers",
    "bar",
    "begin",
    "check_not_dropped",
    "check_same",
    "creation",
    "default_ids",
    "find_by_id",
    "find_in_run",
    "forked",
    "is_digest",
    "list_runs",
]
