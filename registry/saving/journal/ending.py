"""The end of a program: wait for the registry, and log saves that only the journal holds."""

from __future__ import annotations

import atexit
import secrets
import threading
import time
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet

from holdfast.registry.errors import Fenced
from holdfast.registry.history.actions import SetStatus

# Imported first: callbacks that it registers for the end of the program run after `_finish`.
from holdfast.registry.saving import pending as _pending
from holdfast.registry.saving.journal.folder import RunFolder


class Finishing(Protocol):
    """Work that the end of the program waits for."""

    def finish(self, limit_s: float) -> None:
        """Wait at most `limit_s` seconds, then log the unfinished work."""
        ...


_unfinished: WeakSet[Finishing] = WeakSet()


def finish_at_the_end(one: Finishing) -> None:
    """Finish an object at the end of the program, if it still exists."""
    _unfinished.add(one)


def _finish() -> None:
    limit_s = _pending.DEFAULT_EXIT_WAIT_S
    with suppress(ValueError):
        limit_s = _pending.exit_wait_s()
    until = time.monotonic() + limit_s
    for one in list(_unfinished):
        with suppress(KeyboardInterrupt):
            one.finish(max(0.0, until - time.monotonic()))


def set_status_behind(folder: RunFolder, takeover: int, slot: int, said: SetStatus) -> bool:
    """Put the status behind the waiting saves at the end of a process, unless one is there.

    A save that is carried later makes the run `running` again, so a status in the registry would
    not last. `slot` has the takeover of the handle. Returns whether anything waits.
    """
    waiting = [entry for _, entry in folder.entries(folder.waiting())]
    if waiting and waiting[-1].status in (None, "running"):
        write, follows = secrets.token_hex(8), waiting[-1].write
        with suppress(Fenced):
            folder.acknowledge(folder.new_entry(takeover, slot, follows, write=write, said=said))
    return bool(waiting)


# As in `holdfast.registry.saving.pending`: before the thread pools are closed.
with suppress(RuntimeError):
    getattr(threading, "_register_atexit", atexit.register)(_finish)
