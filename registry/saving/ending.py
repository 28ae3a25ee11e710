"""The status of a process's runs, if the process ends without setting one.

`with run:` sets the status itself. Otherwise a run would stay `running` for ever. The callbacks run
after those of `holdfast.registry.saving.pending`, which finish the saves: of callbacks the first
one registered is called last, and `pending` imports this module. A run that failed gets its
exception as a few lines of text.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from traceback import walk_tb

from holdfast.backends.escape import printable, shortened
from holdfast.backends.secrets import Secrets, may_be_secret
from holdfast.registry.errors import NotFound, RegistryError, RolledBack
from holdfast.registry.history import RunLog
from holdfast.registry.history.actions import Action, SetStatus
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.store import Store
from holdfast.registry.writing import Committer, StateWriter

#: Characters of the message and of a line, and frames.
_MESSAGE, _LINE, _FRAMES = 600, 200, 5
_ASSIGNED = re.compile(r"\b(\w{1,64})=([^\s,;&)]+)")


def failure_text(error: BaseException) -> str:
    """Return an exception as text: its type and message, then the innermost frames.

    The text has no source lines and no values of variables. Secrets of the environment, of URLs and
    behind names such as `token=` are hidden. The log keeps it for everybody who can read the run.
    """
    secrets = Secrets(dict(os.environ))
    try:
        said = printable(str(error)[: 4 * _MESSAGE])
    except Exception:  # its class is what makes the text
        said = ""
    said = _ASSIGNED.sub(
        lambda one: f"{one[1]}=***" if may_be_secret(one[1]) else one[0], secrets.hide(said)
    )
    name = type(error).__qualname__
    lines = [shortened(f"{name}: {said}" if said else name, _MESSAGE)]
    frames = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    for code, line in islice(reversed(frames), _FRAMES):
        place = secrets.hide(printable(f"{code.co_filename}:{line}"))[-_LINE:]
        lines.append(f"at {place} in {shortened(printable(code.co_name), _LINE)}")
    return "\n".join(lines)


#: Seconds for which the end of a process tries.
_LONGEST_S = 10.0
_LOGGER = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True)
class Owned:
    """A run that this process trains. It holds no handle: a program may have thousands of runs."""

    run_id: str
    token: str
    pid: int
    #: Puts the status behind the saves that only a journal holds; returns whether there are any.
    set_behind: Callable[[SetStatus], bool] | None

    def end(self, store: Store, said: SetStatus) -> None:
        """Set the status, if the run is still running and this token is its newest."""

        def actions(run: RunManifest) -> Sequence[Action] | None:
            is_ours = run.writer is not None and run.writer.token == self.token
            is_over = run.status != "running" or run.dropped is not None
            return [said] if is_ours and not is_over else None

        if self.set_behind is not None and self.set_behind(said):
            return
        log = RunLog(store, self.run_id)
        log.open()
        if actions(log.run) is not None:
            Committer(StateWriter(store, log)).commit(actions)


#: The runs of this process, by the id of their registry and their name.
_owned: dict[tuple[str, str], Owned] = {}
#: The newest store of each of these registries: a program may open one thousands of times.
_stores: dict[str, Store] = {}


def owns(
    store: Store, run_id: str, token: str, set_behind: Callable[[SetStatus], bool] | None = None
) -> None:
    """Note that a handle of this process has taken a run over; see `Owned`."""
    _stores[store.config.id] = store
    _owned[store.config.id, run_id] = Owned(run_id, token, os.getpid(), set_behind)


def has_ended(store: Store, run_id: str, token: str) -> None:
    """Note that the status of a run was set, unless another handle owns it now."""
    registry = store.config.id
    if (registry, run_id) in _owned and _owned[registry, run_id].token == token:
        del _owned[registry, run_id]
        if not any(one == registry for one, _ in _owned):
            del _stores[registry]


def forget_all() -> None:
    """Forget all runs."""
    _owned.clear()
    _stores.clear()


def _end() -> None:
    found = _owned.items()
    mine = [(_stores[key[0]], one) for key, one in found if one.pid == os.getpid()]
    forget_all()
    if not mine:
        return
    status = SetStatus(status="interrupted")
    uncaught = getattr(sys, "last_value", None)  # Python sets it where it prints the traceback
    if isinstance(uncaught, Exception) and not hasattr(sys, "ps1"):
        status = SetStatus(status="failed", reason=failure_text(uncaught))
    ending = threading.Thread(target=_set_all, args=(mine, status), daemon=True)
    try:
        ending.start()
    except RuntimeError:  # some versions of Python start no thread this late
        _set_all(mine, status)
        return
    ending.join(_LONGEST_S)
    if ending.is_alive():
        _LOGGER.warning("the store did not answer in time: the status of a run was not set")


def _set_all(owned: Sequence[tuple[Store, Owned]], said: SetStatus) -> None:
    for store, one in owned:
        try:
            one.end(store, said)
        except (NotFound, RolledBack):
            _LOGGER.info("%s: the run is gone, so it has no status", one.run_id)
        except (RegistryError, OSError, RuntimeError) as error:
            _LOGGER.warning("%s: the status was not set to %s: %s", one.run_id, said.status, error)


def _end_worker() -> None:
    """End a process of `multiprocessing`, which never calls the callbacks of `atexit`."""
    processes = sys.modules.get("multiprocessing.process")  # loaded in each of its processes
    if processes is not None and processes.parent_process() is not None:
        _end()


# As in `pending`: a program that is already ending cannot register it.
with suppress(RuntimeError):
    getattr(threading, "_register_atexit", atexit.register)(_end_worker)
atexit.register(_end)
