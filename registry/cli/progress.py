"""Progress of a command: a bar on stderr if that is a terminal, otherwise nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Called with the number of bytes so far.
Progress = Callable[[int], object]


@contextmanager
def bar(label: str, total: int | None = None) -> Iterator[Progress]:
    """Show a bar while the block runs; yield a function that sets the bytes so far."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from holdfast.registry.cli import terminal

    with terminal.progress_bar(label, total) as progress:
        (task,) = progress.task_ids
        yield lambda done: progress.update(task, completed=done)
