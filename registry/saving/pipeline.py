"""The steps that every save goes through: wait, prepare, copy if it is in the background, make.

A saver gives a `Pipeline` two steps: `prepare` takes a state apart and plans the save, `make`
writes and commits it. Some savers also guard the steps before these, or start again in a forked
process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import RLock
from typing import Generic

from holdfast.registry.errors import InvalidInput, StorageError
from holdfast.registry.loading import Checkpoint
from holdfast.registry.pytree import FlatState
from holdfast.registry.saving.logged import StepLog
from holdfast.registry.saving.ownership import Ownership
from holdfast.registry.saving.pending import (
    Background,
    Busy,
    Forgiven,
    PendingSave,
    check_busy,
    exit_wait_s,
)
from holdfast.registry.saving.save_request import Save, SaveRequest, copied
from holdfast.registry.values import HERE

_LOGGER = logging.getLogger("holdfast")

#: Guards the steps before a save: ranks that save together tell each other of an error in them.
Guard = Callable[[int | None], AbstractContextManager[None]]


class Pipeline(Generic[Save]):
    """The saves of one handle, one after another."""

    def __init__(
        self,
        ownership: Ownership,
        prepare: Callable[[object, SaveRequest], Save],
        make: Callable[[Save, Sequence[SaveRequest]], Checkpoint],
        *,
        guard: Guard = lambda step: nullcontext(),  # noqa: ARG005
        begin_anew: Callable[[], None] = lambda: None,
        only_waits: bool = False,
    ) -> None:
        self._ownership = ownership
        self._prepare: Callable[[object, SaveRequest], Save] = prepare
        self._make: Callable[[Save, Sequence[SaveRequest]], Checkpoint] = make
        self._guard, self._begin_anew, self._only_waits = guard, begin_anew, only_waits
        self._handing_over = RLock()
        self._background: Background[Save] = Background(
            self._make_or_forgive,
            lambda staging, state: staging.copy(state, ownership.store.pools.copying),
        )
        self.failed_saves = 0  # number of failed saves after which the training run continued

    def save(self, state: object, request: SaveRequest) -> Checkpoint:
        """Store and commit a state."""
        with self._timing():
            with self._guard(request.step):
                self.settle()
            return self._make_or_forgive(self._prepared(state, request))

    def save_async(self, state: object, request: SaveRequest, busy: Busy = "wait") -> PendingSave:
        """Copy a state, then store and commit it in the background."""
        check_busy(busy)
        if self._only_waits and busy != "wait":
            raise InvalidInput(
                'a collective save cannot be skipped by single ranks; use busy="wait"',
                where="busy",
                expected="wait",
                found=repr(busy),
            )
        limit_s = exit_wait_s()
        name = f"{self._ownership.log.run_id}: step {request.step}"
        # Otherwise another thread would overwrite the copy that is being saved.
        with self._timing(), self._handing_over:
            self.reset_after_fork()
            began = time.monotonic()
            with self._guard(request.step):
                if busy == "wait":
                    self._background.settle()
                else:
                    self._background.raise_failure()
            waited_s = time.monotonic() - began
            if busy == "skip" and self._background.is_busy:
                skipped = PendingSave(Future(), name, limit_s)
                skipped.give_up("skipped")
                return skipped
            return self._background.submit(self._prepared(state, request), name, limit_s, waited_s)

    def stage(
        self, state: object, request: SaveRequest, copy: Callable[[str, FlatState], FlatState]
    ) -> Save:
        """Copy a state for `save_staged`; another thread or process may call that."""
        self.settle()
        return copied(self._prepare(state, request), copy)

    def save_staged(self, staged: Save) -> Checkpoint:
        """Store and commit a staged state."""
        with self._guard(staged.request.step):
            self.settle()
        return self._make_with_logged(staged, ())

    @property
    def is_busy(self) -> bool:
        """Whether a save in the background is running."""
        return self._background.is_busy

    def settle(self) -> None:
        """Wait for the running saves; raise the first error that was not raised already."""
        self.reset_after_fork()
        self._background.settle()

    def wait(self, timeout_s: float | None) -> None:
        """Wait for the running saves for a limited time; their errors stay."""
        self._background.wait(timeout_s)

    def close(self) -> None:
        """Finish the running saves and stop the thread."""
        try:
            self.settle()
        finally:
            self._background.close()

    def reset_after_fork(self) -> None:
        """Start over in a forked process, since thread and token belong to the parent."""
        if self._ownership.is_forked:
            self._ownership.reset()
            self._background.reset()
            self._handing_over = RLock()
            self._begin_anew()

    @contextmanager
    def _timing(self) -> Iterator[None]:
        """Count the time in which the training waits for a call."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            took_s = time.monotonic() - began_s
            HERE.add("save_blocked_seconds_total", took_s, run=self._ownership.log.run_id)

    def _prepared(self, state: object, request: SaveRequest) -> Save:
        compare = self._ownership.at_first_saves
        if compare is not None and request.takes_over and compare(state, request.step):
            self._ownership.at_first_saves = None
        with self._guard(request.step):
            return self._prepare(state, request)

    def _make_with_logged(self, save: Save, failed: Sequence[SaveRequest]) -> Checkpoint:
        """Make a save, and let it take along what was logged up to its step."""
        logged: StepLog = self._ownership.logged
        run = self._ownership.log.run_id
        try:
            made = self._make(save, (*failed, *logged.for_save(save.request)))
        except BaseException as error:
            logged.saved(None)
            HERE.add("saves_total", outcome="failed", run=run)
            HERE.fail(error, "save")
            raise
        logged.saved(save.request)
        HERE.add("saves_total", outcome="saved", run=run)
        HERE.add("saved_bytes_total", made.size_bytes, run=run)
        HERE.put("saved_timestamp_seconds", time.time(), run=run)
        return made

    def _make_or_forgive(self, save: Save) -> Checkpoint:
        """Make a save; turn an error of the store into `Forgiven` if the training run continues."""
        failed, request = self._ownership.failed, save.request
        try:
            made = self._make_with_logged(save, tuple(failed))
        except StorageError as error:
            if len(failed) >= request.may_fail:
                raise
            failed.append(request.without_states())
            self.failed_saves += 1
            _LOGGER.warning(
                "%s: step %d was not saved, and training continues (%d failed in a row, %d may): "
                "%s",
                self._ownership.log.run_id,
                request.step,
                len(failed),
                request.may_fail,
                error,
            )
            raise Forgiven(error) from error
        failed.clear()
        return made
