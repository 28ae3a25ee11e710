"""This process: its machine, its rank in a distributed job, and locks that a fork leaves free."""

from __future__ import annotations

import os
from threading import RLock

from holdfast.registry.errors import Conflict, Hint


class ProcessLock:
    """A reentrant lock among the threads of one process, used as `with lock.here():`.

    A fork copies a lock that another thread holds, and nobody would ever release it in the child.
    So the child gets a lock of its own.
    """

    __slots__ = ("_lock", "_pid")

    def __init__(self) -> None:
        self._pid, self._lock = os.getpid(), RLock()

    def here(self) -> RLock:
        """Return the lock of this process."""
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), RLock()
        return self._lock


def host_name() -> str:
    """Return this machine's name; one that holds bytes that are no characters loses those."""
    return os.uname().nodename.encode(errors="replace").decode()


def require_first_rank() -> None:
    """Refuse to write from any rank but 0 of a distributed job."""
    rank = os.environ.get("RANK", "0")
    if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1") and rank not in ("", "0"):
        raise Conflict(
            "only rank 0 may save a run",
            where=f"RANK={rank}",
            hint=Hint.of(
                Hint("Guard the call: `if rank == 0: run.save(...)`.", "Run it on rank 0 alone."),
                "Every rank may load.",
            ),
        )
