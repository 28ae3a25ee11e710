"""`Checkpointer`: save a training loop at its step boundaries, and exit on request."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

from holdfast.registry.curation.streams import check_entries
from holdfast.registry.errors import Conflict, InvalidInput, RegistryError
from holdfast.registry.history import (
    check_metrics,
    check_name,
    check_not_completed,
    check_phase,
    check_step,
)
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.loading import Checkpoint
from holdfast.registry.saving.loop.notice import META_KEY, Notice, Overhead
from holdfast.registry.saving.loop.options import LoopOptions, ranks_here, reaction, stop_step
from holdfast.registry.saving.loop.stopping import Deadline, SignalHandlers
from holdfast.registry.saving.pending import Forgiven, PendingSave, end_at_once
from holdfast.registry.saving.save_request import SaveRequest, named
from holdfast.registry.saving.saver import RunHandle
from holdfast.registry.spec import Monitor


class Cadence:
    """The cadence of one training run."""

    def __init__(self, every_steps: int | None, every_s: float | None, after: int | None) -> None:
        self.every_steps, self.every_s = every_steps, every_s
        self._before = after
        self._began_s = time.monotonic()

    def reaches(self, step: int) -> bool:
        """Return whether a multiple of `every_steps` was reached since the step before."""
        before, self._before = self._before, step
        if self.every_steps is None or step == 0:
            return False
        if before is None or before >= step:
            return step % self.every_steps == 0
        return step // self.every_steps > before // self.every_steps

    def is_time(self) -> bool:
        """Return whether the last save, or the start, is `every_s` seconds ago."""
        return self.every_s is not None and time.monotonic() - self._began_s >= self.every_s

    def saves(self) -> None:
        """Note that a save starts."""
        self._began_s = time.monotonic()


class BestSoFar:
    """Whether a metric is better than ever before."""

    def __init__(self, monitor: Monitor, metrics: Mapping[str, float]) -> None:
        self._monitor = monitor
        self._rank = monitor.rank(metrics)

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the value is the best one so far, and remember it."""
        rank = self._monitor.rank(metrics)
        # NaN is a missing value, and every value is better than none.
        if not (rank < self._rank or (rank == rank and self._rank != self._rank)):
            return False
        self._rank = rank
        return True


_LOGGER = logging.getLogger("holdfast")
#: Requests that the ranks agree on; the highest one counts.
_NOTHING, _SAVE, _SAVE_NOW, _STOP, _INTERRUPT = range(5)
_REQUESTS: dict[int | None, int] = {
    None: _NOTHING,
    signal.SIGTERM: _STOP,
    signal.SIGINT: _INTERRUPT,
}
#: Seconds for which a process tries to set the status after the deadline.
_STATUS_S = 2.0

_T = TypeVar("_T")
Why = Literal["cadence", "best", "converged", "signal", "end"]


@dataclass(frozen=True, slots=True)
class _Boundary:
    """A state at the end of a step, with the arguments of its save, except `streams`."""

    step: int
    state: object
    metrics: Mapping[str, object] | None
    arguments: dict[str, Any]


class Checkpointer:
    """Saves a training loop: `with run.checkpointer(every_steps=100) as checkpointer: ...`.

    Attributes:
        stopped: Whether a signal or a notice has ended the training run at a step boundary.
    """

    def __init__(self, handle: RunHandle, options: LoopOptions) -> None:
        self._handle, self._options = handle, options
        self.stopped = False
        self._is_open = self._is_noticed = False
        self._overhead = Overhead()
        self._signals = SignalHandlers(_nothing)
        self._last: _Boundary | None = None
        self._saved_step: int | None = None
        self._saved: PendingSave | None = None
        self._sent: list[tuple[PendingSave, SaveRequest]] = []  # the newest, and what ran then
        self._streams: dict[str, list[Mapping[str, Any]]] = {}

    def __enter__(self) -> Self:
        run, options = self._handle.training.run, self._options
        self._reaction = reaction(options.stopping, run.spec.signals)
        self._ranks = ranks_here(options.stopping.ranks, options.stopping.barrier_s, options.group)
        self._saves = self._ranks.rank == 0 or options.group is not None
        has_own = options.every_steps is not None or options.every_s is not None
        phase = run.present_phase if options.phase is None else check_phase(options.phase)
        every_steps = options.every_steps if has_own else run.spec.phase(phase).save_every
        self._cadence = Cadence(every_steps, options.every_s, self._handle.training.resumed_step)
        self._best = _best_so_far(run, options.on_best)
        self._notice = Notice(options.stopping.notice)
        self._overhead = Overhead()
        self._deadline = Deadline(self._reaction.deadline_s, self._announce, self._leave_late)
        self._stop_step = stop_step()
        self._signals = SignalHandlers(self._deadline.begin)
        self._signals.install(self._deadline.fd)
        self._is_open = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self._break_off()
            elif not self.stopped:
                self._end()
        finally:
            self._is_open = False
            self._signals.remove()
            self._deadline.close()
            if error is None and not self.stopped:
                self._signals.pass_on()
            getattr(self._ranks, "close", _nothing)()
            _LOGGER.info(
                "%s: training waited for saves for %.1f %% of %.0f s; %d saves failed",
                self._handle.log.run_id,
                100 * self.waited_share,
                self._overhead.ran_s,
                self.failed_saves,
            )

    @property
    def waited_share(self) -> float:
        """The share of the time since the block started in which training waited, 0 to 1."""
        return self._overhead.share

    @property
    def failed_saves(self) -> int:
        """How many saves have failed that the training went on past (`may_fail`)."""
        return self._handle.saver.pipeline.failed_saves

    @property
    def stop_requested(self) -> bool:
        """Whether a signal or a notice has asked this process to stop."""
        return self._signals.stop is not None

    def step(
        self,
        step: int,
        state: object | Callable[[], object],
        metrics: Mapping[str, object] | None = None,
        *,
        meta: Mapping[str, object] | None = None,
        tier: str | None = None,
        companions: Mapping[str, object] | None = None,
        streams: Mapping[str, Iterable[Mapping[str, Any]]] | None = None,
        converged: bool = False,
    ) -> PendingSave | None:
        """End a step: save its state if a save is due, and exit if asked to.

        Args:
            step: The step that is complete; larger at each call.
            state: As for `Run.save`, or a function that returns it, which is called when it is
                needed (then by every rank). Until the next call, or the end of the block, it has
                to stay the state of this step.
            metrics: As for `Run.save`.
            meta: As for `Run.save`, but a mapping without the key `checkpointer`.
            tier: As for `Run.save`.
            companions: As for `Run.save`.
            streams: As for `Run.save`. Entries of steps that are not saved are kept for the next
                save.
            converged: Save now, and wait until the checkpoint is durable.

        Returns:
            The save that was started; `None` if there was none. Only rank 0 gets one, unless all
            ranks save together. `outcome` shows whether it was skipped.

        Raises:
            InvalidInput: An argument is wrong.
            SystemExit: The process was asked to stop, and the state is durable.
            Conflict: Another rank could not save.
            RegistryError: As for `Run.save`; also the error of an earlier save in the background.
        """
        self._check_step(step, meta)
        arguments = {"meta": dict(meta or {}), "tier": tier, "companions": companions}
        self._last = _Boundary(check_step(step), state, metrics, arguments)
        for name, entries in named("streams", streams).items() if self._ranks.rank == 0 else ():
            checked = check_entries(entries)
            self._streams.setdefault(check_name(name, "a stream"), []).extend(checked)
        why, forced = self._why(self._last, converged=converged)
        agreed = self._ranks.highest(self._request(why))
        if agreed >= _STOP:
            self._stop(agreed)
            return None
        if agreed == _NOTHING:
            return None
        now = agreed == _SAVE_NOW or not self._options.background
        return self._save(why or "signal", now=now, forced=forced or why is None)

    # Deciding

    def _check_step(self, step: object, meta: object) -> None:
        if not self._is_open:
            raise InvalidInput(
                "the checkpointer is not open",
                where=self._handle.log.run_id,
                expected="with run.checkpointer(...) as checkpointer: ...",
            )
        checked = check_step(step)
        if self._last is None and self._saves:
            check_not_completed(self._handle.training.run)  # the first save may be hours away
        if self._last is not None and checked <= self._last.step:
            raise InvalidInput(
                "the steps of a loop do not grow",
                where="step",
                expected=f"a step after {self._last.step}",
                found=checked,
            )
        if meta is not None and (not isinstance(meta, Mapping) or META_KEY in meta):
            raise InvalidInput(
                "not the meta of a step", where="meta", expected=f"a mapping without {META_KEY!r}"
            )

    def _why(self, last: _Boundary, *, converged: bool) -> tuple[Why | None, bool]:
        """Return why this process wants to save, and whether it insists during another save."""
        is_best = self._best is not None and self._best.improves(check_metrics(last.metrics))
        reaches, is_time = self._cadence.reaches(last.step), self._cadence.is_time()
        waits = self._reaction.sigusr1 == "at_cadence" and self._cadence.every_steps is not None
        if self._signals.save and (reaches or not waits):
            self._signals.save = False
            return "signal", True
        if self._ranks.rank != 0:
            return None, False  # rank 0 decides
        if converged:
            return "converged", True
        if reaches or is_time:
            return "cadence", False
        return ("best", True) if is_best else (None, False)

    def _request(self, why: Why | None) -> int:
        if self._signals.stop is None and self._notice.has_come():
            self._is_noticed = True
            self._signals.stop = signal.SIGTERM
            self._deadline.begin(signal.SIGTERM)
        if self._stop_step is not None and self._last and self._last.step >= self._stop_step:
            return _STOP
        own = _SAVE_NOW if why == "converged" else _SAVE if why else _NOTHING
        return max(_REQUESTS[self._signals.stop], own)

    # Saving

    def _save(self, why: Why, *, now: bool, forced: bool = False) -> PendingSave | None:
        """Save the last state; in the foreground the other ranks wait."""
        assert self._last is not None
        self._cadence.saves()
        with self._overhead.waiting():
            if now:
                return self._together(lambda: self._save_here(why, now=True, forced=forced))
            return self._save_here(why, now=False, forced=forced)

    def _save_here(self, why: Why, *, now: bool, forced: bool) -> PendingSave | None:
        assert self._last is not None
        last, options = self._last, self._options
        with self._handle.telling_ranks(last.step):
            state = last.state() if callable(last.state) else last.state
            if not self._saves:
                return None
            request = self._save_request(last, why)
        if now:
            saved = self._save_now(state, request)
        else:
            busy = "wait" if forced else options.busy
            saved = self._handle.saver.pipeline.save_async(state, request, busy)
        if saved.outcome != "skipped":
            running = [one for one in self._sent if one[0].outcome == "running"]
            self._sent = [*running, (saved, request.without_states())]
            self._saved_step, self._saved, self._streams = last.step, saved, {}
        return saved

    def _save_now(self, state: object, request: SaveRequest) -> PendingSave:
        future: Future[Checkpoint] = Future()
        saved = PendingSave(future, f"{self._handle.log.run_id}: step {request.step}")
        try:
            future.set_result(self._handle.saver.pipeline.save(state, request))
        except Forgiven as forgiven:
            saved.mark_reported()
            future.set_exception(forgiven.error)
        except BaseException:
            saved.mark_reported()
            raise
        return saved

    def _save_request(self, last: _Boundary, why: Why) -> SaveRequest:
        told = self._overhead.meta(
            why=why, every_steps=self._cadence.every_steps, every_s=self._cadence.every_s
        )
        if self.failed_saves:
            told["failed_saves"] = self.failed_saves
        meta = {**last.arguments["meta"], META_KEY: told}
        options, together = self._options, self._options.group is not None
        arguments = {**last.arguments, "metrics": last.metrics, "meta": meta}
        return SaveRequest.of(
            last.step,
            takes_over=True,
            phase=options.phase,
            streams=self._streams,
            storing=options.storing,
            allow_nonfinite=options.allow_nonfinite,
            every_rank=together,
            first_rank_decides=together,
            may_fail=options.may_fail if why in ("cadence", "best") else 0,
            **arguments,
        )

    def _together(self, act: Callable[[], _T]) -> _T:
        """Do something on every rank, and wait until all have done it."""
        try:
            result = act()
        except BaseException:
            self._ranks.highest(1)
            raise
        if self._ranks.highest(0):
            raise Conflict(
                "another rank could not save, so this rank stops too",
                where=self._handle.log.run_id,
                hint="The error is in the output of that rank.",
            )
        return result

    # Ending

    def _end(self) -> None:
        """Save the last step, if it is not saved, and finish; a request to stop still counts."""
        agreed = self._ranks.highest(self._request(None))
        if agreed >= _STOP:
            self._stop(agreed)
            return
        with self._overhead.waiting():
            self._together(self._handle.saver.pipeline.settle)
        if self._options.save_at_end and self._ranks.highest(self._is_unsaved):
            self._save("end", now=True)
            if (agreed := self._ranks.highest(self._request(None))) >= _STOP:
                self._stop(agreed)

    def _stop(self, agreed: int) -> None:
        """Save the last step and exit: raise SystemExit, or set `stopped` if `exits` is false."""
        if self._signals.stop is None and self._stop_step is None:  # another rank was asked
            self._deadline.begin(signal.SIGINT if agreed == _INTERRUPT else signal.SIGTERM)
        has_failed = False
        for _ in range(2):  # in the background one save may run, and one wait
            try:
                self._handle.saver.pipeline.settle()
            except Exception as error:
                _LOGGER.error("%s: an earlier save failed: %s", self._handle.log.run_id, error)
                self._saved_step = None  # the failed save may have been this step's
                has_failed = True
        if has_failed:
            self._keep_entries()
        if self._ranks.highest(self._is_unsaved):
            self._save("signal", now=True)
        self.stopped = self._handle.ownership.is_stopped = True
        if self._ranks.rank == 0:
            self._say_interrupted()
            step = None if self._last is None else self._last.step
            _LOGGER.warning("%s: step %s is durable; exiting", self._handle.log.run_id, step)
            self._await_registry()
        self._together(_nothing)
        self._deadline.cancel()
        if self._options.stopping.exits:
            raise SystemExit(self._exit_code(agreed == _INTERRUPT))

    def _keep_entries(self) -> None:
        """Let the next save take along the stream entries of saves whose error was logged."""
        failed = self._handle.ownership.failed
        known = {one.step for one in failed}
        lost = [request for saved, request in self._sent if saved.outcome == "failed"]
        failed += [one for one in lost if one.step not in known]

    def _await_registry(self) -> None:
        """With a journal, wait until the registry has its saves; the deadline ends the wait."""
        try:
            self._handle.wait(remote=True, timeout_s=None)
        except RegistryError as error:  # the saves stay in the journal
            _LOGGER.error("%s: saves are only in the journal: %s", self._handle.log.run_id, error)

    @property
    def _is_unsaved(self) -> bool:
        """Whether rank 0 has a step that no save has."""
        has_failed = self._saved is not None and self._saved.outcome == "failed"
        is_saved = self._last is None or (self._last.step == self._saved_step and not has_failed)
        return self._ranks.rank == 0 and not is_saved

    def _break_off(self) -> None:
        """Finish the running saves after an exception; after a signal it counts as its doing."""
        try:
            self._handle.saver.pipeline.settle()
        except RegistryError as error:
            _LOGGER.error("%s: the running save failed: %s", self._handle.log.run_id, error)
        if self.stop_requested:
            self._handle.ownership.is_stopped = True

    def _exit_code(self, is_interrupt: bool) -> int:
        return self._reaction.sigint_exit_code if is_interrupt else self._reaction.exit_code

    # In the thread of the deadline

    def _announce(self, signum: int) -> None:
        _LOGGER.warning(
            "%s: asked to stop (%s); saving after this step, at most %g s from now%s",
            self._handle.log.run_id,
            "a notice of preemption" if self._is_noticed else signal.Signals(signum).name,
            self._reaction.deadline_s,
            "; a second Ctrl-C ends at once" if signum == signal.SIGINT else "",
        )

    def _leave_late(self, signum: int) -> None:
        """End the process before it is killed; a thread reports, for the store may not answer."""
        trying = threading.Thread(target=self._report_late, daemon=True)
        try:
            trying.start()
            trying.join(_STATUS_S)
        finally:
            end_at_once(self._exit_code(signum == signal.SIGINT))

    def _report_late(self) -> None:
        latest = self._handle.training.run.latest()
        _LOGGER.error(
            "%s: the deadline of %g s passed during a step or a save; exiting with %s",
            self._handle.log.run_id,
            self._reaction.deadline_s,
            f"step {latest.step}, the newest durable one" if latest else "no checkpoint",
        )
        backlog = self._handle.backlog()
        if backlog is not None and backlog.entries:
            _LOGGER.warning(
                "%s: %d saves are only in the journal of this machine; the next program with it "
                "carries them",
                self._handle.log.run_id,
                backlog.entries,
            )
        if self._ranks.rank == 0:
            self._say_interrupted()

    def _say_interrupted(self) -> None:
        try:
            self._handle.saver.leave("interrupted")
        except RegistryError as error:
            _LOGGER.warning("%s: the status was not set: %s", self._handle.log.run_id, error)


def _best_so_far(run: RunManifest, on_best: bool | Monitor) -> BestSoFar | None:
    """Return the best value of a run so far."""
    if on_best is False:
        return None
    monitor = on_best if isinstance(on_best, Monitor) else run.monitor()
    best = run.best(monitor)
    return BestSoFar(monitor, best.metrics if best else {})


def _nothing(_: object = None) -> None:
    """Do nothing."""
