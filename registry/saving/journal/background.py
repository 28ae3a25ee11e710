"""The carrier's thread, its pools, and the end of a program.

The pools never delay it. At the end the program waits for the registry, and logs the saves that
only the journal holds.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Condition, Event, Thread, current_thread
from typing import ParamSpec, Protocol, TypeVar
from weakref import WeakSet

from holdfast.registry.errors import (
    Fenced,
    Frozen,
    IntegrityError,
    RegistryError,
    StorageError,
    StoreUnsuitable,
    UnsupportedFormat,
)
from holdfast.registry.history import Epochs
from holdfast.registry.history.actions import SetStatus

# Imported first: callbacks that it registers for the end of the program run after `_finish`.
from holdfast.registry.saving import pending as _pending
from holdfast.registry.saving.journal.carrier import Carrier
from holdfast.registry.saving.journal.folder import RunFolder
from holdfast.registry.saving.journal.records import Entry, Note
from holdfast.registry.store import Pools, Store
from holdfast.registry.values import HERE


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
        entry = Entry.now(folder.run_id, takeover, slot, follows, write=write, said=said)
        with suppress(Fenced):
            folder.acknowledge(entry)
    return bool(waiting)


# As in `holdfast.registry.saving.pending`: before the thread pools are closed.
with suppress(RuntimeError):
    getattr(threading, "_register_atexit", atexit.register)(_finish)


_LOGGER = logging.getLogger("holdfast")
#: Seconds to wait after a failure, doubled after each further one, and the maximum.
RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
#: Seconds after which a waiting carrier or caller looks again: another process may carry.
LOOK_S = 0.5
#: Seconds after which a wait for the registry is logged, and seconds between further messages.
SILENT_S, REMINDER_S = 2.0, 60.0
#: Threads that move objects.
_THREADS = 8

_P = ParamSpec("_P")
_T = TypeVar("_T")


class BackgroundCarrier:
    """Carries the entries of one run in a thread of this process."""

    def __init__(self, store: Store, folder: RunFolder) -> None:
        self._registry = store
        self._folder = folder
        self._work = Event()
        self._stopped = Event()
        self._thread: Thread | None = None
        self._pid = os.getpid()
        self._is_awaited = False
        self.told = Condition()  # notified at each outcome and at each failure
        #: The failure of the last attempt; `None` after a success.
        self.error: Exception | None = None
        self.outcomes: dict[int, Note] = {}  # the outcomes of entries that this process has carried

    def wake(self) -> None:
        """Carry the waiting entries; the thread starts at the first call.

        If the system cannot start a thread, the entries wait: they are durable.
        """
        self._work.set()
        if self._thread is None or not self._thread.is_alive():
            self._stopped.clear()
            thread = Thread(target=self._run, name="holdfast-carrier", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self.error = error
            else:
                self._thread = thread

    def stop(self, within_s: float) -> None:
        """Stop after the present entry, or leave it to a later process."""
        self._stopped.set()
        self._work.set()
        if self._thread is not None:
            self._thread.join(within_s)

    def take(self) -> None:
        """Carry an entry that was just acknowledged; the end of the program waits for it."""
        self._is_awaited = True
        finish_at_the_end(self)
        self.wake()

    def await_all(self, timeout_s: float | None) -> None:
        """Wait until each entry that waits now has an outcome; log a wait that takes long."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        said = time.monotonic() + SILENT_S - REMINDER_S
        last = max(self._folder.waiting(), default=0)  # a training may acknowledge without end
        while waiting := [number for number in self._folder.waiting() if number <= last]:
            if time.monotonic() - said >= REMINDER_S:
                said = time.monotonic()
                _LOGGER.warning(
                    "%s: waiting until the registry has %d saves that are durable in the journal "
                    "%s%s: %s",
                    self._folder.run_id,
                    len(waiting),
                    self._folder.path,
                    "" if until is None else f", at most {until - said:.0f} s",
                    self.why(),
                )
            left_s = LOOK_S if until is None else min(LOOK_S, until - time.monotonic())
            if left_s <= 0:
                raise TimeoutError(
                    f"{self._folder.run_id}: {len(waiting)} saves are only in the journal "
                    f"{self._folder.path}: {self.why()}"
                )
            self.sleep(left_s)
            self.raise_hopeless()

    def finish(self, limit_s: float) -> None:
        """Wait for the entries of this process, log those that only the journal holds, and stop."""
        if self._pid != os.getpid():
            return
        is_awaited, self._is_awaited = self._is_awaited, False
        try:
            if is_awaited:
                self.await_all(limit_s)
        except (TimeoutError, RegistryError) as error:
            _LOGGER.warning(
                "%s; the next program with this journal carries them, or `holdfast journal push`",
                error,
            )
        finally:
            self.stop(1.0)

    def sleep(self, most_s: float) -> None:
        """Wait until something was carried, or for some time."""
        with self.told:
            self.wake()
            self.told.wait(most_s)

    def raise_hopeless(self) -> None:
        """Raise an error for which waiting does not help; the carrier tries again anyway."""
        self.raise_frozen()
        if isinstance(self.error, (IntegrityError, StoreUnsuitable, UnsupportedFormat)):
            raise self.error

    def raise_frozen(self) -> None:
        """Raise `Frozen` if the last attempt met it, and nobody has thawed the registry since."""
        if isinstance(self.error, Frozen):
            with suppress(StorageError):
                Epochs(self._registry).observe()

    def why(self) -> str:
        """Return why entries wait, for messages."""
        if self.error is None:
            return "they are being carried"
        return f"the last attempt failed: {self.error}"

    def _run(self) -> None:
        store = Store(self._registry.backend, self._registry.config, heads=self._registry.heads)
        store.pools = DaemonPools()
        pause_s = RETRY_S
        carrier: Carrier | None = None
        try:
            while not self._stopped.is_set():
                self._work.clear()
                try:
                    carrier = carrier or Carrier(store, self._folder, self._tell)
                    carrier.carry(lambda: not self._stopped.is_set())
                    waits = self._folder.waiting()
                except Exception as error:
                    self._fail(error)
                    carrier = None  # open the log again: it may have been replaced
                    self._stopped.wait(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_RETRY_S)
                    self._work.set()
                else:
                    self.error, pause_s = None, RETRY_S
                    # Another process is the carrier, if anything still waits.
                    self._work.wait(LOOK_S if waits else None)
        finally:
            store.pools.close()

    def _tell(self, number: int, note: Note) -> None:
        with self.told:
            self.outcomes[number] = note
            self.told.notify_all()

    def _fail(self, error: Exception) -> None:
        if str(error) != str(self.error):
            _LOGGER.warning(
                "%s: the journal cannot be carried into the registry now; trying again: %s: %s",
                self._folder.run_id,
                type(error).__name__,
                error,
            )
        HERE.fail(error, "journal")
        with self.told:
            self.error = error
            self.told.notify_all()


class DaemonPools(Pools):
    """Pools whose threads do not delay the end of a program, even if the store is silent."""

    def __init__(self) -> None:
        super().__init__(_THREADS)
        self._daemons = _Daemons(_THREADS)

    def close(self) -> None:
        """Stop the threads when their present work is done."""
        self._daemons.shutdown()

    def pool(self, name: str) -> Executor:  # noqa: ARG002
        """Return the threads, which are the same for all work."""
        return self._daemons


class _Daemons(Executor):
    """Threads that the end of a program does not wait for. Work submitted by one runs in it."""

    def __init__(self, threads: int) -> None:
        self._most = threads
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[Thread] = []

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        future: Future[_T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        if current_thread() in self._threads:
            work()
            return future
        self._queue.put(work)
        if len(self._threads) < self._most:
            thread = Thread(target=self._serve, name="holdfast-carrying", daemon=True)
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError:  # the system cannot start more threads
                self._threads.remove(thread)
                if not self._threads:
                    self._queue.get()  # nobody else is there to take it
                    work()
        return future

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        for _ in self._threads:
            self._queue.put(None)
