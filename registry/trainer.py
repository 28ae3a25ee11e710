"""The one trainer of a run: what a save must find true, and what it then says.

Owns the writer token, the rewind after a resume, the choice of base checkpoints and the save in the
background. How a state reaches the store is the business of `registry.saving`, how a commit lands
that of `registry.log`, which objects it may name that of `registry.writer`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import RLock
from typing import Any

from registry import pytree
from registry.actions import (
    Action,
    AddCheckpoint,
    Line,
    Place,
    ReportMetrics,
    Rewind,
    RunStatus,
    SetStatus,
    TakeOver,
)
from registry.bursts import allocation_burst
from registry.canonical import float_to_hex
from registry.checkpoint import Checkpoint
from registry.digest import Digest
from registry.environment import host_name, require_first_rank
from registry.errors import Conflict, Fenced, IntegrityError
from registry.loading import index_chunks
from registry.log import RunLog, commit_line
from registry.manifest import Manifest
from registry.plain import check_metrics, check_phase, check_step, encode_plain, format_time
from registry.saving import Base, Written, write_state
from registry.staging import Staging
from registry.state import CheckpointRecord, RunManifest
from registry.store import Store
from registry.writer import Condemned, Writer, placed_keys

#: Checkpoints whose chunks a save looks through before it stores any.
MAX_BASES = 8
_PLANS = 5


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What a save says beside its state; checked before anything is written.

    Attributes:
        phase: Phase of the run.
        step: The counter's value.
        metrics: Values known at save.
        meta: Encoded plain value.
        takes_over: Whether who saves is then the run's one trainer; a push is not.
    """

    phase: str
    step: int
    metrics: dict[str, float]
    meta: Any
    takes_over: bool = True

    @classmethod
    def check(
        cls,
        step: object,
        phase: int | str,
        metrics: Mapping[str, object] | None,
        meta: object,
        *,
        takes_over: bool = True,
    ) -> SaveRequest:
        """Check the arguments of a save.

        Raises:
            InvalidInput: One of them is wrong.
            Conflict: This process is not rank 0 of its job.
        """
        require_first_rank()
        encoded = None if meta is None else encode_plain(meta, "meta")
        numbers = check_metrics(metrics)
        return cls(check_phase(phase), check_step(step), numbers, encoded, takes_over)


class PendingSave:
    """A save under way. The state it was given may change meanwhile."""

    def __init__(self, future: Future[Checkpoint]) -> None:
        self._future = future
        self._told = False

    def done(self) -> bool:
        """Return whether it is finished, well or not."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> Checkpoint:
        """Return the checkpoint once its commit is durable.

        Raises:
            RegistryError: The save failed; nothing of it is visible, except that StoreUnavailable
                leaves that open.
            TimeoutError: It is not finished in time.
        """
        try:
            return self._future.result(timeout_s)
        except TimeoutError:
            raise
        except BaseException:
            # Not where the waiting itself was interrupted.
            self._told = self._future.done()
            raise

    def settle(self) -> None:
        """Wait; raise what the save failed with unless `wait` has told the caller already."""
        if self._future.exception() is not None and not self._told:
            self.wait()


class Trainer:
    """The saving side of a run's handle. It is in charge from its first save on."""

    def __init__(self, store: Store, log: RunLog) -> None:
        self._store = store
        self._log = log
        self._writer = Writer(store, log)
        self._token = secrets.token_hex(16)
        self._in_charge = False
        self._resumed_at: int | None = None
        self._bases: dict[Digest, Base] = {}
        self._attempted: tuple[int, Digest] | None = None
        self._lock = RLock()
        self._handing_over = RLock()
        self._pid = os.getpid()
        self._staging = Staging()
        self._background: ThreadPoolExecutor | None = None
        self._pending: PendingSave | None = None

    def save(self, state: object, request: SaveRequest) -> Checkpoint:
        """Store and commit a state."""
        self.settle()
        with allocation_burst():
            flat = pytree.flatten(state)
        pytree.await_devices(flat)
        return self._store_and_commit(flat, request)

    def save_async(self, state: object, request: SaveRequest) -> PendingSave:
        """Copy a state, then store and commit it in the background."""
        with self._handing_over:  # or another thread's copy would land on the one being saved
            self.settle()
            with allocation_burst():
                flat = pytree.flatten(state)
                pytree.await_devices(flat)
                copied = self._staging.copy(flat, self._store.pools.hashing)
            if self._background is None:
                self._background = ThreadPoolExecutor(1, "holdfast-save")
            self._pending = PendingSave(
                self._background.submit(self._store_and_commit, copied, request)
            )
            return self._pending

    def settle(self) -> None:
        """Wait for the save under way; raise what it failed with, unless its caller knows."""
        self._start_anew_after_fork()
        pending = self._pending
        if pending is None:
            return
        try:
            pending.settle()
        finally:
            # An interrupted wait must not forget it: its copy may not be overwritten yet.
            if pending.done():
                self._pending = None

    def close(self) -> None:
        """Finish the save under way and stop the thread."""
        try:
            self.settle()
        finally:
            if self._background is not None:
                self._background.shutdown()
                self._background = None

    def leave(self, status: RunStatus) -> None:
        """Set the run's status, unless somebody else trains it."""

        def compose(state: RunManifest) -> Sequence[Line] | None:
            others = state.writer is not None and self._is_fenced(state)
            return None if others else [commit_line(state, [SetStatus(status=status)])]

        self._log.append(compose)

    def _start_anew_after_fork(self) -> None:
        """In a forked child be another trainer: the thread stayed behind, the token is taken."""
        if self._pid != os.getpid():
            self._pid, self._token = os.getpid(), secrets.token_hex(16)
            self._in_charge, self._attempted = False, None
            self._background, self._pending, self._staging = None, None, Staging()
            self._lock, self._handing_over = RLock(), RLock()

    def resume_at(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint: the next save supersedes whatever came after it.

        That save takes the run over, also where this handle was fenced meanwhile.
        """
        self._resumed_at, self._attempted = checkpoint.record.n, None
        self._in_charge = self._in_charge and not self._is_fenced(self._log.state)

    def distrust(self, checkpoint: Checkpoint) -> None:
        """Never build on what a damaged checkpoint holds; write it anew when it comes up again."""
        with suppress(IntegrityError):
            self._writer.distrusted |= placed_keys(checkpoint.place, checkpoint.placement)

    def _store_and_commit(self, state: pytree.FlatState, request: SaveRequest) -> Checkpoint:
        with self._lock:
            self._check_allowed(self._log.state, request)
            for _ in range(_PLANS):
                written = write_state(self._store, self._writer, state, self._choose_bases())
                try:
                    return self._commit(written, request)
                except Condemned:
                    # A sweep passed between choosing and committing: choose anew, forget the bases.
                    self._bases.clear()
            raise Conflict(
                f"sweeps condemned what this save chose, {_PLANS} times in a row",
                where=self._log.run_id,
                hint="Nothing was committed; save again, and let collectors run less often.",
            )

    def _commit(self, written: Written, request: SaveRequest) -> Checkpoint:
        manifest = written.base.manifest
        outcome: list[int] = []

        def compose(state: RunManifest) -> Sequence[Line] | None:
            outcome.clear()
            self._recognize(state)
            self._check_allowed(state, request)
            actions = self._claim(state) if request.takes_over else []
            known = self._same_step(state, request)
            if known is None:
                self._check_continues(state, request)
                outcome.append(state.commits)
                actions.append(_addition(manifest, request))
                if request.takes_over:
                    self._attempted = (state.commits, manifest.digest)
            elif known.manifest == manifest.digest:
                outcome.append(known.n)
                actions += _news(known, request)
            else:
                raise _step_taken(self._log.run_id, request, known, manifest.digest)
            lines: list[Line] = [*self._places(state, written)]
            if actions:
                lines.append(commit_line(state, actions))
            return lines or None

        state = self._writer.commit(compose, written.choice)
        if request.takes_over:
            self._in_charge, self._resumed_at, self._attempted = True, None, None
        if written.base.place == state.by_manifest.get(manifest.digest):
            self._bases[manifest.digest] = written.base
        return self._view(state.by_n[outcome[0]])

    def _recognize(self, state: RunManifest) -> None:
        """Find out that an earlier save landed after all whose answers were lost."""
        if self._attempted is None or self._is_fenced(state):
            return
        n, digest = self._attempted
        if n in state.by_n and state.by_n[n].manifest == digest:
            self._in_charge, self._resumed_at, self._attempted = True, None, None

    def _places(self, state: RunManifest, written: Written) -> list[Place]:
        place = written.base.place
        return [] if state.by_manifest.get(place.manifest) == place else [place]

    def _claim(self, state: RunManifest) -> list[Action]:
        """Return what the first save says besides its checkpoint: who is in charge, from where."""
        actions: list[Action] = []
        if not self._in_charge:
            actions.append(TakeOver(token=self._token, host=host_name()))
        if state.status != "running":
            actions.append(SetStatus(status="running"))
        if any(self._is_behind(checkpoint) for checkpoint in state.live()):
            actions.append(Rewind(to=self._resumed_at))
        return actions

    def _same_step(self, state: RunManifest, request: SaveRequest) -> CheckpointRecord | None:
        """Return the checkpoint that holds this step on the line of training that is continued."""
        for checkpoint in reversed(state.live(request.phase)):
            behind = request.takes_over and self._is_behind(checkpoint)
            if checkpoint.step == request.step and not behind:
                return checkpoint
        return None

    def _is_behind(self, checkpoint: CheckpointRecord) -> bool:
        """Return whether the next save supersedes a checkpoint."""
        return self._resumed_at is not None and checkpoint.n > self._resumed_at

    def _check_continues(self, state: RunManifest, request: SaveRequest) -> None:
        """Refuse a training that restored nothing in a run that is further on."""
        newest = state.latest(request.phase)
        begins = request.takes_over and not self._in_charge and self._resumed_at is None
        if begins and newest is not None and request.step < newest.step:
            raise Conflict(
                "the run is further on than this training, which restored nothing",
                where=f"{self._log.run_id}: phase {request.phase}, step {request.step}",
                expected=f"a step after {newest.step}",
                hint="Call `run.restore()` first, or train in a run of its own.",
            )

    def _is_fenced(self, state: RunManifest) -> bool:
        return state.writer is None or state.writer.token != self._token

    def _check_allowed(self, state: RunManifest, request: SaveRequest) -> None:
        if state.status == "completed":
            raise Conflict(
                "the run is completed",
                where=self._log.run_id,
                hint="Reopen it with `run.set_status('running')`, or begin another run.",
            )
        if request.takes_over and self._in_charge and self._is_fenced(state):
            winner = state.writer
            raise Fenced(
                "another trainer has taken this run over",
                where=self._log.run_id,
                found=f"{winner.host} at {format_time(winner.time_ms)}" if winner else None,
                hint="Stop this process; what it saved until then is kept.",
            )

    def _choose_bases(self) -> list[Base]:
        """Return up to `MAX_BASES` checkpoints to store against: newest, resumed from, tagged."""
        state = self._log.state
        newest = [state.latest(), *state.checkpoints[-1:]]
        marked = [state.by_n.get(n) for n in (self._resumed_at, *state.tags.values()) if n]
        bases: dict[Digest, Base] = {}
        for record in (*newest, *marked):
            if record is None or record.manifest in bases or len(bases) == MAX_BASES:
                continue
            base = self._base(record)
            if base is not None:
                bases[record.manifest] = base
        self._bases = bases
        return list(bases.values())

    def _base(self, record: CheckpointRecord) -> Base | None:
        checkpoint = self._view(record)
        try:
            place = checkpoint.place
            kept = self._bases.get(record.manifest)
            if kept is not None and kept.place == place:
                return kept
            base = Base(place, checkpoint.manifest, checkpoint.placement, checkpoint.digest_lists())
            index_chunks(base.manifest, base.placement, base.lists)
            return base
        except IntegrityError:
            # A damaged checkpoint saves nothing; what it held is stored again.
            return None

    def _view(self, record: CheckpointRecord) -> Checkpoint:
        return Checkpoint(self._store, self._log, record)


def _addition(manifest: Manifest, request: SaveRequest) -> AddCheckpoint:
    return AddCheckpoint(
        manifest=manifest.digest,
        phase=request.phase,
        step=request.step,
        metrics=request.metrics,
        meta=request.meta,
        size_bytes=manifest.nbytes,
    )


def _news(known: CheckpointRecord, request: SaveRequest) -> list[Action]:
    """Return what a repeated save says that its checkpoint does not say yet: metrics alone."""
    news = {
        name: value
        for name, value in request.metrics.items()
        if name not in known.metrics
        or float_to_hex(known.metrics[name]) != float_to_hex(value)  # NaN equals NaN here
    }
    return [ReportMetrics(checkpoint=known.n, metrics=news)] if news else []


def _step_taken(
    run_id: str, request: SaveRequest, known: CheckpointRecord, digest: Digest
) -> Conflict:
    return Conflict(
        "the step holds another state already",
        where=f"{run_id}: phase {request.phase}, step {request.step}",
        expected=f"the state of {known.manifest.short}, saved at {format_time(known.time_ms)}",
        found=digest.short,
        hint="To train on from an earlier checkpoint call `run.restore()` first; it supersedes "
        "the later ones. Anything else needs another step, phase or run.",
    )
