"""A run as its trainer uses it: save, end.

`Run` inherits the queries of `holdfast.registry.face.view`, the pins and evictions of
`holdfast.registry.face.curation`, starting, restoring and changes of phase and policy of
`holdfast.registry.face.resuming`, and the checkpointer of `holdfast.registry.face.looping`. Nothing
here touches a store: `holdfast.registry.training` carries saves out,
`holdfast.registry.deriving.transitions` and `holdfast.registry.deriving.merging` the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, get_args

from holdfast.backends.escape import quoted
from holdfast.registry.curation import pruning
from holdfast.registry.errors import InvalidInput, RegistryError
from holdfast.registry.face import rooms
from holdfast.registry.face.looping import LoopingRun
from holdfast.registry.history import RunLog
from holdfast.registry.history.actions import RunStatus
from holdfast.registry.loading import Checkpoint, Stored
from holdfast.registry.objects.codecs import Compression
from holdfast.registry.saving import (
    Backlog,
    Busy,
    OnError,
    PendingSave,
    RunHandle,
    SaveRequest,
    Trainer,
    check_on_error,
)
from holdfast.registry.spec.precision import PrecisionPolicy
from holdfast.registry.store import Store
from holdfast.registry.writing import Committer

if TYPE_CHECKING:
    from holdfast.registry.saving.collective import Group
    from holdfast.registry.saving.journal import Journal

_LOGGER = logging.getLogger("holdfast")


class Run(LoopingRun):
    """A run of a registry. One handle trains; any number of others read and annotate.

    As a context manager the handle that trains sets the run's status: `completed` at the end of
    the block, `interrupted` when it is left by a signal or `sys.exit`, `failed` by any other
    exception, whose type, message and last frames the log keeps. A handle that only reads, or that
    was fenced, leaves the status alone.
    """

    def __init__(
        self,
        store: Store,
        log: RunLog,
        compared: frozenset[str] = frozenset(),
        journal: Journal | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__(_handle(store, log, journal, group), compared, group)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            try:
                self._trainer.settle()
            except BaseException as failed:
                self._trainer.leave("failed", failed)
                raise
            self._trainer.leave("completed")
            return
        # The caller's own error must be raised; an error of the store is only logged.
        try:
            self._trainer.settle()
        except RegistryError as said:
            _LOGGER.error("%s: the running save failed: %s", self.id, said)
        is_failure = issubclass(kind, Exception)
        left: RunStatus = "failed" if is_failure else "interrupted"
        try:
            self._trainer.leave(left, error if is_failure else None)
        except RegistryError as said:
            _LOGGER.warning("%s: the status could not be set to %s: %s", self.id, left, said)

    # Saving

    def save(
        self,
        state: object,
        *,
        step: int,
        phase: int | str | None = None,
        metrics: Mapping[str, object] | None = None,
        meta: object = None,
        tier: str | None = None,
        companions: Mapping[str, object] | None = None,
        streams: Mapping[str, Iterable[Mapping[str, Any]]] | None = None,
        compression: Compression | None = None,
        keyframe_every: int | None = None,
        precision: PrecisionPolicy | None = None,
        allow_lossy_optimizer: bool = False,
        allow_nonfinite: bool = False,
    ) -> Checkpoint:
        """Save a state; return when it is durable.

        On a handle with a `group` every rank calls it with its part of the state: sharded tensors
        as DTensors, everything else equal on all ranks. Each rank stores a share, and all get the
        checkpoint, or an error. `keyframe_every` makes no differences then, and `precision` is
        refused.

        Args:
            state: A dict of tensors (torch or NumPy, of any shape, dtype and device) and plain
                values, nested in any way. Objects with `state_dict()` are replaced by its result.
                If a part changes before this returns, the bytes of some moment of the call are
                stored.
            step: Training step, update or epoch of the state: 0 to 2^53.
            phase: Phase of the run. Default: the phase that the run is in; `main` if the preset
                declares none.
            metrics: Numbers that describe the state; `Checkpoint.report` can add more. Numbers
                under the preset's `metrics_key` of the state count as well.
            meta: Plain values to store with the checkpoint; its id does not depend on them.
            tier: Retention class. Default: chosen by the rules of the phase.
            companions: States by name that are kept and evicted with this one. If the phase
                declares one that is not given, the last checkpoint's is used.
            streams: Entries for streams, by name, each a mapping with a `step`. They become visible
                with the checkpoint; training that resumes from it continues after them.
            compression: `none`, `zstd` or `lz4`: how new chunks are stored; no id depends on it.
                Default: the registry's own.
            keyframe_every: A chunk that changes from save to save is stored whole at least once in
                this many versions, 1 to 32. In between it is stored as a difference if that is
                clearly shorter; 1 turns differences off. Default: the registry's own.
            precision: Which float32 and float64 tensors are stored in fewer bits: one policy for
                all, or policies by path pattern, of which the first match counts:
                `{"model/*": "bf16", "*": "auto"}`. A policy is `bf16`, `fp16`, `auto` (`bf16` for
                tensors of 1 MiB and more), `auto-fp16` (`fp16` above 1 MiB) or `keep`; a name of
                the preset's `precision` stands for its rules. The loss is recorded and shown.
                Companions are not changed.
            allow_lossy_optimizer: Apply `precision` to optimizer state too. Without it optimizer
                state keeps its precision, and a pattern that matches nothing else is an error.
            allow_nonfinite: Let the checkpoint become latest even if weights that the preset
                watches hold NaN or infinity.

        Returns:
            The checkpoint. If the same state was already saved at this step: that checkpoint, with
            `metrics` added; its streams, meta and companions are those of the first save.

        Raises:
            InvalidInput: An argument is wrong; the run has no such phase, tier or stream; a metric
                has another value in the state; or `precision` turns a number into infinity, matches
                nothing, or matches only optimizer state.
            UnsupportedValue: Something in a state cannot be stored; the message names its path.
            IncompatibleState: Keys that the phase requires are missing, tensors have another dtype
                than the preset demands, or no load could read the state's schema version.
            Fenced: Another trainer has taken the run over.
            Conflict: The step holds another state already, the phase is over, or the run is.
            StorageError: The store failed; nothing is visible, except that StoreUnavailable
                leaves that open. Repeating the save is safe either way.
            RankFailed: With a group: another rank is dead or late; the message names it. Nothing is
                visible, unless it says that the outcome is unknown.
        """
        with self._trainer.abstaining():
            request = SaveRequest(
                step,
                takes_over=True,
                phase=phase,
                metrics=metrics,
                meta=meta,
                tier=tier,
                companions=companions,
                streams=streams,
                compression=compression,
                keyframe_every=keyframe_every,
                precision=precision,
                allow_lossy_optimizer=allow_lossy_optimizer,
                allow_nonfinite=allow_nonfinite,
                every_rank=self._trainer.is_collective,
            )
        return self._trainer.save(state, request)

    def push(
        self,
        state: object,
        *,
        step: int,
        phase: int | str | None = None,
        metrics: Mapping[str, object] | None = None,
        meta: object = None,
        tier: str | None = None,
        companions: Mapping[str, object] | None = None,
        streams: Mapping[str, Iterable[Mapping[str, Any]]] | None = None,
        compression: Compression | None = None,
        keyframe_every: int | None = None,
        precision: PrecisionPolicy | None = None,
        allow_lossy_optimizer: bool = False,
        allow_nonfinite: bool = False,
    ) -> Checkpoint:
        """Save a state that another program made; the run keeps its trainer.

        Arguments, result and errors are those of `save`; no trainer is fenced.
        """
        with self._trainer.abstaining():
            request = SaveRequest(
                step,
                takes_over=False,
                phase=phase,
                metrics=metrics,
                meta=meta,
                tier=tier,
                companions=companions,
                streams=streams,
                compression=compression,
                keyframe_every=keyframe_every,
                precision=precision,
                allow_lossy_optimizer=allow_lossy_optimizer,
                allow_nonfinite=allow_nonfinite,
                every_rank=self._trainer.is_collective,
            )
        return self._trainer.save(state, request)

    def merge(
        self,
        sources: Iterable[Stored],
        *,
        step: int,
        average: str | Iterable[str] | None = None,
        weights: Sequence[float] | None = None,
        pick: Mapping[str, Stored] | None = None,
        phase: int | str | None = None,
        metrics: Mapping[str, object] | None = None,
        meta: Mapping[str, object] | None = None,
        tier: str | None = None,
        compression: Compression | None = None,
        allow_nonfinite: bool = False,
    ) -> Checkpoint:
        """Save a state that is made of others: some tensors averaged, the rest picked.

        Committed like `push`: the run keeps its trainer. Tensors that are picked, or equal in all
        sources, are not stored again; the rest is computed chunk by chunk, in less than 256 MiB for
        states of any size. The checkpoint's meta names the sources, under `merge`.

        Args:
            sources: Checkpoints, or other stored states, of any run of this registry. They have the
                same structure, and are equal in everything that is neither averaged nor picked.
            step: Step of the new checkpoint.
            average: Components to average, or patterns of tensors' paths. Default: all floating
                tensors that differ, except optimizer state. Sums are taken in float32 (in float64
                for float64) and rounded once to the stored dtype; elements that are equal in all
                sources keep every bit.
            weights: A number for each source; their sum is 1. Default: equal weights.
            pick: The stored state to take a component from, by the component's name or a pattern
                of tensors' paths; one of the sources or any other.
            phase: As for `save`.
            metrics: As for `save`.
            meta: As for `save`, but a mapping without the key `merge`.
            tier: As for `save`.
            compression: As for `save`.
            allow_nonfinite: As for `save`.

        Raises:
            InvalidInput: The weights do not fit the sources, or a name or pattern matches nothing,
                or nothing that an earlier one does not match.
            UnsupportedValue: An average of finite numbers is not finite in the stored type.
            NotFound: A component, path or source is not there.
            IncompatibleState: The sources have different structures, or differ in something that is
                not averaged, picked, or possible to average; the message names the paths.
            Conflict: A source was evicted, or the step holds another state already.
            IntegrityError: A source is damaged or gone.
        """
        self._trainer.settle()
        self._committer.await_earlier()  # the sources may be among those saves
        request = SaveRequest(
            step,
            takes_over=False,
            phase=phase,
            metrics=metrics,
            tier=tier,
            compression=compression,
            allow_nonfinite=allow_nonfinite,
        )
        return rooms.merge(self._committer, sources, request, average, weights, pick, meta)

    def save_async(
        self,
        state: object,
        *,
        step: int,
        phase: int | str | None = None,
        metrics: Mapping[str, object] | None = None,
        meta: object = None,
        tier: str | None = None,
        companions: Mapping[str, object] | None = None,
        streams: Mapping[str, Iterable[Mapping[str, Any]]] | None = None,
        compression: Compression | None = None,
        keyframe_every: int | None = None,
        precision: PrecisionPolicy | None = None,
        allow_lossy_optimizer: bool = False,
        allow_nonfinite: bool = False,
        busy: Busy = "wait",
        on_error: OnError = "raise",
        give_up_after: int = 3,
    ) -> PendingSave:
        """Save a state in the background; return once it has been copied.

        The copy is in host memory that later saves reuse. One save runs at a time; `busy` says what
        the next one does, and the next call raises the error of an earlier one. The end of the
        program waits for a running save, for up to `HOLDFAST_EXIT_WAIT_S` seconds (600); a save
        that is lost then is logged as an error on the logger `holdfast`, and the exit status is
        120.

        Other arguments and errors are those of `save`.

        Args:
            state: As for `save`.
            step: As for `save`, like all below but the last.
            phase: Phase of the run.
            metrics: Numbers that describe the state.
            meta: Plain values to store with the checkpoint.
            tier: Retention class.
            companions: States by name.
            streams: Entries for streams, by name.
            compression: How new chunks are stored.
            keyframe_every: How often a chunk is stored whole.
            precision: Which tensors are stored in fewer bits.
            allow_lossy_optimizer: Apply `precision` to optimizer state too.
            allow_nonfinite: Let NaN and infinity become latest.
            busy: If an earlier save is running: `wait` for it; `skip` this save; or `supersede`:
                copy the state to a second memory, where it waits until a newer save takes its
                place. Entries for streams go to the newer save.
            on_error: `warn`: log an error of the store, such as an outage, and let the next call go
                on; only `wait` raises it. The next save has the entries for streams.
            give_up_after: With `warn`, the failed save in a row whose error is raised all the same.

        Returns:
            The save: `wait` gives the checkpoint, `waited_s` the seconds for which this call waited
            for an earlier save, and `outcome` says whether it was skipped or superseded.
        """
        with self._trainer.abstaining():
            request = SaveRequest(
                step,
                takes_over=True,
                phase=phase,
                metrics=metrics,
                meta=meta,
                tier=tier,
                companions=companions,
                streams=streams,
                compression=compression,
                keyframe_every=keyframe_every,
                precision=precision,
                allow_lossy_optimizer=allow_lossy_optimizer,
                allow_nonfinite=allow_nonfinite,
                every_rank=self._trainer.is_collective,
                goes_on=check_on_error(
                    on_error, give_up_after, every_rank=self._trainer.is_collective
                ),
            )
        return self._trainer.save_async(state, request, busy)

    def wait(self, *, remote: bool = False, timeout_s: float | None = None) -> None:
        """Wait for the saves of this handle.

        Args:
            remote: Wait until they are in the registry. Without a journal they are there when they
                are durable; with one, the first wait ends when they are durable on this machine.
            timeout_s: Seconds. Default: no limit.

        Raises:
            TimeoutError: They are not finished in time; the wait can be repeated.
            RegistryError: A save failed.
            Stranded: Another machine took the run over while saves were only in the journal.
            Conflict: The run did not allow a save that the journal had acknowledged.
        """
        self._trainer.wait(remote=remote, timeout_s=timeout_s)

    def backlog(self) -> Backlog | None:
        """Return what is only in the journal of this machine; `None` without a journal."""
        return self._trainer.backlog()

    # Ending

    def drop(self, reason: str) -> None:
        """Release everything that the run holds, gates and releases included; there is no undo.

        Args:
            reason: Why, for readers of the log.

        Raises:
            InvalidInput: The reason is empty or cannot be stored.
            Conflict: The run was dropped before.
        """
        self._trainer.settle()
        pruning.drop(self._committer, reason)

    def set_status(self, status: RunStatus) -> None:
        """Set the status of the run.

        Raises:
            InvalidInput: There is no such status.
        """
        if status not in get_args(RunStatus):
            raise InvalidInput(
                "not a status", expected=", ".join(get_args(RunStatus)), found=quoted(status)
            )
        self._trainer.set_status(status)

    def close(self) -> None:
        """Finish a save under way. The handle can be used again."""
        self._trainer.close()


def _handle(store: Store, log: RunLog, journal: Journal | None, group: Group | None) -> RunHandle:
    committer = Committer(store, log)
    saver: Trainer
    if group is not None:
        saver = rooms.CollectiveTrainer(committer, group)
    elif journal is not None:
        saver = rooms.JournaledTrainer(committer, journal)
    else:
        saver = Trainer(committer)
    return RunHandle(store, log, committer, saver)
