"""This process: its machine, its rank in a distributed job, and locks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import RLock, Semaphore

from holdfast.backends.escape import quoted
from holdfast.registry.errors import Conflict, Hint, InvalidInput

#: Characters of the name that an author claims.
_MOST_NAME = 64


class ProcessLock:
    """A reentrant lock among the threads of one process, used as `with lock.here():`.

    A fork copies a lock that another thread holds, and nobody would ever release it in the child.
    So the child gets a lock of its own. `make` can make a semaphore instead.
    """

    __slots__ = ("_lock", "_make", "_pid")

    def __init__(self, make: Callable[[], RLock | Semaphore] = RLock) -> None:
        self._make = make
        self._lock, self._pid = make(), os.getpid()

    def here(self) -> RLock | Semaphore:
        """Return the lock of this process."""
        if self._pid != os.getpid():
            # In this order: no other thread must find the new pid and the old lock.
            self._lock, self._pid = self._make(), os.getpid()
        return self._lock


def host_name() -> str:
    """Return this machine's name; one that holds bytes that are no characters loses those."""
    return os.uname().nodename.encode(errors="replace").decode()


def cores() -> int:
    """Return how many processor cores this process may keep busy.

    These are the cores that it is bound to, or else its share of the machine: `LOCAL_WORLD_SIZE`,
    which torchrun sets, says how many ranks are here.
    """
    all_cores = bound = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        # `os.cpu_count` is the smaller one where `PYTHON_CPU_COUNT` sets it.
        bound = min(bound, len(os.sched_getaffinity(0)))
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    is_shared = bound == all_cores and ranks.isdecimal()
    return max(1, bound // max(1, int(ranks))) if is_shared else bound


def is_first_rank() -> bool:
    """Return whether this is rank 0 of a distributed job, or no rank of one."""
    is_alone = os.environ.get("WORLD_SIZE", "1") in ("", "0", "1")
    return is_alone or os.environ.get("RANK", "0") in ("", "0")


def require_first_rank() -> None:
    """Refuse to write from any rank but 0 of a distributed job."""
    if not is_first_rank():
        raise Conflict(
            "only rank 0 may save a run",
            where=f"RANK={os.environ['RANK']}",
            hint=Hint.of(
                Hint("Guard the call: `if rank == 0: run.save(...)`.", "Run it on rank 0 alone."),
                "Every rank may load.",
            ),
        )


#: The name that somebody claims, while `as_author` runs.
_CLAIMED: ContextVar[str | None] = ContextVar("holdfast_author", default=None)


@contextmanager
def as_author(name: str) -> Iterator[None]:
    """Let the commits of this thread have the name that their author claims, during the block."""
    if not (isinstance(name, str) and name.isprintable() and 0 < len(name.strip()) <= _MOST_NAME):
        raise InvalidInput(
            "not the name of an author",
            expected=f"1 to {_MOST_NAME} printable characters",
            found=quoted(name),
        )
    before = _CLAIMED.set(name.strip())
    try:
        yield
    finally:
        _CLAIMED.reset(before)


def author() -> str:
    """Return `user@host`, as commits show it: a claim."""
    import getpass  # not needed to read

    try:
        user = _CLAIMED.get() or getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no entry anywhere
        user = "unknown"
    return f"{user.encode(errors='replace').decode()}@{host_name()}"
