"""Saves in the background: one runs; with `supersede` a second one waits, with its own copy.

`Background` decides what a save does if an earlier one is running. The caller,
`holdfast.registry.saving.pipeline`, copies and saves the states.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from threading import Lock
from typing import Generic, get_args

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput, StorageError
from holdfast.registry.loading import Checkpoint
from holdfast.registry.pytree import FlatState
from holdfast.registry.saving.pending import Busy, PendingSave
from holdfast.registry.saving.save_request import Save, copied
from holdfast.registry.store import Threads
from holdfast.registry.writing import Staging


def check_busy(busy: object) -> None:
    """Refuse a value that is not a policy."""
    if busy not in get_args(Busy):
        raise InvalidInput(
            "not a policy for a save during another save",
            where="busy",
            expected=" or ".join(get_args(Busy)),
            found=quoted(busy),
        )


class Forgiven(Exception):
    """A save failed, and the training run continues.

    Attributes:
        error: The failure.
    """

    def __init__(self, error: StorageError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True, eq=False)
class _Job(Generic[Save]):
    """A save with its copy."""

    #: The save; its states are in the memory `side`. `None` once it has ended.
    save: Save | None
    side: int  # which of the two memories
    future: Future[Checkpoint]  # its result
    pending: PendingSave  # what the caller holds


class Background(Generic[Save]):
    """The thread of a saver's saves, and the memory of their copies."""

    def __init__(
        self,
        make: Callable[[Save], Checkpoint],
        copy: Callable[[Staging, FlatState], FlatState],
    ) -> None:
        self._make: Callable[[Save], Checkpoint] = make
        self._copy = copy
        self.reset()

    def reset(self) -> None:
        """Forget everything, in a forked process: thread and saves belong to the parent."""
        self._threads: Threads | None = None
        self._stagings: tuple[dict[str, Staging], dict[str, Staging]] = ({}, {})
        self._jobs: list[
            _Job[Save]
        ] = []  # running, or failed with an error that was not raised yet
        self._running: _Job[Save] | None = None
        self._waiting: _Job[Save] | None = None
        self._lock = Lock()

    @property
    def is_busy(self) -> bool:
        """Whether a save is running."""
        return self._running is not None

    def submit(self, prepared: Save, name: str, exit_wait_s: float, waited_s: float) -> PendingSave:
        """Copy a save and start it; if another one is running, keep the copy and wait.

        One thread at a time may call this. The new save replaces a waiting one, which ends as
        `superseded`.
        """
        with self._lock:
            replaced, self._waiting = self._waiting, None
            running = self._running
            side = replaced.side if replaced else 1 - running.side if running else 0
        if replaced is not None and replaced.save is not None:
            request = prepared.request.after([replaced.save.request])
            prepared = replace(prepared, request=request)
            self._forget(replaced)
            replaced.pending.give_up("superseded")
        copy = copied(prepared, lambda part, flat: self._stage(side, part, flat))
        future: Future[Checkpoint] = Future()
        job = _Job(copy, side, future, PendingSave(future, name, exit_wait_s, waited_s))
        if self._threads is None:
            self._threads = Threads(1, "holdfast-save")
        self._jobs.append(job)
        with self._lock:
            if self._running is None:
                self._running = job
            else:
                self._waiting = job
        self._threads.submit(self._run, job)
        return job.pending

    def settle(self) -> None:
        """Wait for every save; raise the first error that was not raised already."""
        for job in list(self._jobs):
            try:
                job.pending.settle()
            finally:
                # After an interrupted wait the save still runs: its copy may not be overwritten.
                if job.pending.done():
                    self._forget(job)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until no save is running or waiting; their errors stay."""
        _, late = wait([job.future for job in list(self._jobs)], timeout_s)
        if late:
            raise TimeoutError(f"{len(late)} saves are not finished")

    def raise_failure(self) -> None:
        """Raise the error of a save that has failed already."""
        for job in [job for job in self._jobs if job.pending.done()]:
            self._forget(job)
            job.pending.settle()

    def _forget(self, job: _Job[Save]) -> None:
        # Another thread may have forgotten it too.
        self._jobs = [one for one in self._jobs if one is not job]

    def close(self) -> None:
        """Stop the thread."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _stage(self, side: int, name: str, state: FlatState) -> FlatState:
        return self._copy(self._stagings[side].setdefault(name, Staging()), state)

    def _run(self, job: _Job[Save]) -> None:
        with self._lock:
            if job is self._waiting:
                self._running, self._waiting = job, None
            if job is not self._running:
                return  # a newer save has replaced it
        assert job.save is not None
        try:
            made = self._make(job.save)
        except Forgiven as forgiven:
            self._end(job)
            job.pending.mark_reported()
            job.future.set_exception(forgiven.error)
        except BaseException as error:
            self._end(job)
            job.future.set_exception(error)
        else:
            self._end(job)
            job.future.set_result(made)

    def _end(self, job: _Job[Save]) -> None:
        job.save = None  # thousands of objects, which the next call would free while it blocks
        with self._lock:
            self._running = None
