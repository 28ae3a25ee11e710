"""The status of the runs that a process trains when it ends without saying one.

`with run:` sets the status itself. Otherwise a run would stay `running` for ever. The callbacks run
after those of `holdfast.registry.training.pending`, which finish the saves: of callbacks the first
one registered is called last, and `pending` imports this module.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.process
import os
import sys
import threading
from contextlib import suppress
from typing import Protocol

from holdfast.registry.errors import RegistryError, RolledBack
from holdfast.registry.history.actions import RunStatus

#: Seconds for which the end of a process tries.
_LONGEST_S = 10.0
_LOGGER = logging.getLogger("holdfast")


class Trains(Protocol):
    """A trainer, as the end of a process needs it."""

    name: str

    def end(self, status: RunStatus) -> None:
        """Set the status, if the run is still running and this trainer owns it."""


#: The trainers of this process that have taken a run over, with the process that did.
_trainers: dict[Trains, int] = {}


def owns(trainer: Trains) -> None:
    """Note that a trainer of this process has taken a run over."""
    _trainers[trainer] = os.getpid()


def forget_all() -> None:
    """Forget the trainers; for tests, whose runs end before the process."""
    _trainers.clear()


def _end() -> None:
    mine = [trainer for trainer, pid in _trainers.items() if pid == os.getpid()]
    _trainers.clear()
    if not mine:
        return
    status: RunStatus = "failed" if _has_failed() else "interrupted"
    ending = threading.Thread(target=_set_all, args=(mine, status), daemon=True)
    try:
        ending.start()
    except RuntimeError:  # some versions of Python start no thread this late
        _set_all(mine, status)
        return
    ending.join(_LONGEST_S)
    if ending.is_alive():
        _LOGGER.warning("the store did not answer in time: the status of a run was not set")


def _set_all(trainers: list[Trains], status: RunStatus) -> None:
    for trainer in trainers:
        try:
            trainer.end(status)
        except RolledBack:
            _LOGGER.info("%s: the run is gone, so it has no status", trainer.name)
        except (RegistryError, OSError, RuntimeError) as error:
            _LOGGER.warning("%s: the status was not set to %s: %s", trainer.name, status, error)


def _has_failed() -> bool:
    """Return whether an exception that nobody caught has ended the program."""
    last = getattr(sys, "last_value", None)  # Python sets it where it prints the traceback
    return isinstance(last, Exception) and not hasattr(sys, "ps1")


def _end_worker() -> None:
    """End a process of `multiprocessing`, which never calls the callbacks of `atexit`."""
    if multiprocessing.process.parent_process() is not None:
        _end()


# As in `pending`: a program that is already ending cannot register it.
with suppress(RuntimeError):
    getattr(threading, "_register_atexit", atexit.register)(_end_worker)
atexit.register(_end)
