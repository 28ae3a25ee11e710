"""Processes that start cheaply."""

from __future__ import annotations

import multiprocessing
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
