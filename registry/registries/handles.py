"""Runs and the refs into them; they are imported with the first run that a registry opens.

A registry can be opened, checked and collected without them. `holdfast.registry.runs.rooms` says
how and why parts of the package are imported late; this table is apart because it is above the
runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.registry.history.creation import (
        RunOptions,
        begin,
        check_same,
        creation,
        default_ids,
        forked,
    )
    from holdfast.registry.history.log import RunLog, list_runs
    from holdfast.registry.history.writer_token import check_not_dropped
    from holdfast.registry.loading.checkpoint import Checkpoint
    from holdfast.registry.registries.refs import find_by_id, find_in_run, is_digest, refs_of
    from holdfast.registry.runs.run import Run
    from holdfast.registry.runs.view import committer_of
    from holdfast.registry.spec import RunSpec
    from holdfast.registry.storage.progress import Progress, Transfers, bar
else:
    from holdfast.registry.values.first_use import at_first_use

    __getattr__ = at_first_use(
        __name__,
        {
            "Checkpoint": "loading.checkpoint",
            "Progress": "storage.progress",
            "Run": "runs.run",
            "RunLog": "history.log",
            "RunOptions": "history.creation",
            "RunSpec": "spec",
            "Transfers": "storage.progress",
            "bar": "storage.progress",
            "begin": "history.creation",
            "check_not_dropped": "history.writer_token",
            "check_same": "history.creation",
            "committer_of": "runs.view",
            "creation": "history.creation",
            "default_ids": "history.creation",
            "find_by_id": "registries.refs",
            "find_in_run": "registries.refs",
            "forked": "history.creation",
            "is_digest": "registries.refs",
            "list_runs": "history.log",
            "refs_of": "registries.refs",
        },
    )

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
    "committer_of",
    "creation",
    "default_ids",
    "find_by_id",
    "find_in_run",
    "forked",
    "is_digest",
    "list_runs",
    "refs_of",
]
