"""Processes that start cheaply."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import ForkServerContext

#: The programs of processes. The server starts once, so that it must know all of them by then.
_PROGRAMS = [
    "holdfast.backends.s3",
    "tests.contention.processes",
    "tests.crash.looper",
    "tests.crash.pusher",
    "tests.storm.storm",
]


def servers() -> ForkServerContext:
    """Return what starts processes cheaply: a server that knows their programs, and forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PROGRAMS)
    return context


def environment_of_test() -> dict[str, str]:
    """Return the variables that such a process lacks: its server started in another test."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("AWS_") or name == "XDG_STATE_HOME"
    }
