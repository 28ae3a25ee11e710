"""The end of a program: wait for the registry, and say what is only in the journal."""

from __future__ import annotations

import atexit
import threading
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet

# Imported first, so that what it registers for the end of the program is called after `_finish`.
from holdfast.registry.training import pending as _pending


class Finishing(Protocol):
    """What has to be finished at the end of a program."""

    def finish(self, limit_s: float) -> None:
        """Wait at most `limit_s` seconds, then log what is not done."""
        ...


_unfinished: WeakSet[Finishing] = WeakSet()


def finish_at_the_end(one: Finishing) -> None:
    """Finish an object at the end of the program, if it still exists."""
    _unfinished.add(one)


def _finish() -> None:
    limit_s = _pending.DEFAULT_EXIT_WAIT_S
    with suppress(ValueError):
        limit_s = _pending.exit_wait_s()
    for one in list(_unfinished):
        with suppress(KeyboardInterrupt):
            one.finish(limit_s)


# As in `holdfast.registry.training.pending`: before the thread pools are closed.
with suppress(RuntimeError):
    getattr(threading, "_register_atexit", atexit.register)(_finish)
