"""A run as users hold it: it trains, or it reads and annotates.

`Run` owns a `RunHandle`, which the rooms below take. It has the calls of a training program itself;
everything else is in facets, such as `run.pins`. A room that only some calls need is imported in
the method that calls it, here and in `registry` alone: a program that reads one checkpoint imports
no collection, merging or pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self, Unpack

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput
from holdfast.registry.face.html import run_html
from holdfast.registry.face.options import SaveOptions, shows_options
from holdfast.registry.face.resuming import Resuming, leave_block
from holdfast.registry.history import check_phase, decode_plain
from holdfast.registry.history.actions import RunStatus
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.loading import Checkpoint
from holdfast.registry.saving import Backlog, Busy, PendingSave, Restored, RunHandle, ask
from holdfast.registry.spec import Monitor
from holdfast.registry.values import is_first_rank, markup, one_of
from holdfast.registry.writing import Storing, check_storing

if TYPE_CHECKING:
    from holdfast.registry.curation import Pins, Releases, RunRetention
    from holdfast.registry.curation.pool import OpponentPool
    from holdfast.registry.curation.streams import Streams
    from holdfast.registry.deriving.transitions import Sources
    from holdfast.registry.face.exchange import RunExchange
    from holdfast.registry.face.follow import RunFollow
    from holdfast.registry.face.history import RunHistory
    from holdfast.registry.face.phases import RunPhases
    from holdfast.registry.saving.loop import Checkpointer, Stopping


class Run:
    """A run of a registry. One handle trains; any number of others read and annotate.

    As a context manager the handle that trains sets the run's status: `completed` at the end of
    the block, `interrupted` when it is left by a signal or `sys.exit`, `failed` by any other
    exception, of which the log keeps type, message and last frames.
    """

    def __init__(self, handle: RunHandle, compared: frozenset[str] = frozenset()) -> None:
        self._handle = handle
        self._resuming = Resuming(handle, compared)
        self._pool: OpponentPool | None = None

    def __repr__(self) -> str:
        return f"<Run {self.id}>"

    def _repr_html_(self) -> str:
        return markup.safely("Run", lambda: run_html(self.manifest))

    @property
    def handle(self) -> RunHandle:
        """Its inner value, which other parts of Holdfast take; not for programs."""
        return self._handle

    @property
    def id(self) -> str:
        """The run's name."""
        return self._handle.log.run_id

    @property
    def manifest(self) -> RunManifest:
        """The run, as far as this handle has read its log; `refresh` reads further.

        For evicted checkpoints and entries of the pool it has only numbers; `history.manifest()`
        has their records.
        """
        return self._handle.log.run

    @property
    def status(self) -> RunStatus:
        """`running`, `interrupted`, `completed` or `failed`; setting it commits.

        Raises:
            InvalidInput: There is no such status.
            Conflict: The run is completed; only `running` reopens it.
        """
        return self.manifest.status

    @status.setter
    def status(self, status: RunStatus) -> None:
        one_of(status, RunStatus, what="not a status")
        self._handle.saver.set_status(status)

    @property
    def config(self) -> Any:
        """The configuration of the newest pivot that gave one, else that of the creation."""
        return decode_plain(self.manifest.config)

    def refresh(self) -> Self:
        """Read the commits that others have made meanwhile."""
        self._handle.log.refresh()
        return self

    # Facets

    @property
    def pins(self) -> Pins:
        """Names that keep states: `pins.tags`, `pins.gates` and `pins.artifacts`."""
        from holdfast.registry.curation import Pins

        return Pins(self._handle.committer)

    @property
    def releases(self) -> Releases:
        """Published states under semantic versions, each with a model card."""
        from holdfast.registry.curation import Releases

        return Releases(self._handle.committer)

    @property
    def pool(self) -> OpponentPool:
        """The opponent pool."""
        from holdfast.registry.curation.pool import OpponentPool

        if self._pool is None:
            self._pool = OpponentPool(self._handle.committer)
        return self._pool

    @property
    def streams(self) -> Streams:
        """Append-only histories beside the checkpoints: `streams["losses"]`."""
        from holdfast.registry.curation.streams import Streams

        return Streams(self._handle.committer)

    @property
    def phases(self) -> RunPhases:
        """How training starts, goes from phase to phase, and pivots."""
        from holdfast.registry.face.phases import RunPhases

        return RunPhases(self._handle, self._resuming)

    @property
    def retention(self) -> RunRetention:
        """The retention: prune and evict checkpoints, bring evicted ones back, drop the run."""
        from holdfast.registry.curation import RunRetention

        return RunRetention(self._handle.committer, self._handle.saver.pipeline.settle)

    @property
    def history(self) -> RunHistory:
        """Every commit, and the metrics as a table or a figure."""
        from holdfast.registry.face.history import RunHistory

        return RunHistory(self._handle)

    @property
    def follow(self) -> RunFollow:
        """Take checkpoints as they come, or keep a model at the newest weights."""
        from holdfast.registry.face.follow import RunFollow

        return RunFollow(self._handle)

    @property
    def exchange(self) -> RunExchange:
        """Push or merge a state, import a folder of another system, or check one out."""
        from holdfast.registry.face.exchange import RunExchange

        return RunExchange(self._handle)

    # Finding

    def checkpoints(self, phase: int | str | None = None) -> list[Checkpoint]:
        """Return the checkpoints of the current line of training as of now, oldest first."""
        records = self._handle.log.refresh().live(None if phase is None else check_phase(phase))
        return [self._checkpoint(record) for record in records]

    def latest(self, phase: int | str | None = None) -> Checkpoint | None:
        """Return the newest checkpoint as of now, or `None` before the first."""
        record = self._handle.log.refresh().latest(None if phase is None else check_phase(phase))
        return None if record is None else self._checkpoint(record)

    def best(
        self, phase: int | str | None = None, *, monitor: Monitor | None = None
    ) -> Checkpoint | None:
        """Return the checkpoint with the best value as of now; `None` while none has one.

        Args:
            phase: Only checkpoints of this phase. Default: all, or, if phases are declared, those
                of the phase that training is in.
            monitor: The metric to compare by. Default: the run's first monitor.

        Raises:
            InvalidInput: The run was created without a monitor, and none is given.
        """
        if monitor is not None and not isinstance(monitor, Monitor):
            raise InvalidInput(
                "not a monitor", expected="Monitor(metric=..., mode=...)", found=quoted(monitor)
            )
        run = self._handle.log.refresh()
        name = None if phase is None else check_phase(phase)
        record = run.best(monitor or self.phases.monitor(phase), name)
        return None if record is None else self._checkpoint(record)

    def _checkpoint(self, record: CheckpointRecord) -> Checkpoint:
        return Checkpoint(self._handle.store, self._handle.log, record)

    # Training

    def restore(
        self,
        at: Checkpoint | None = None,
        *,
        sources: Sources | None = None,
        map_location: object = "cpu",
    ) -> Restored | None:
        """Return the newest state that can be loaded whole, and continue the run from there.

        The next save takes the run over, and everything after the checkpoint that was restored is
        superseded: never latest or best, still readable by its digest. A pivot after the newest
        checkpoint stays, and the state is changed as it says (`Restored.pivot`).

        Args:
            at: Exactly this checkpoint, without falling back; pivots after it are superseded too.
                Default: the newest sound one.
            sources: The names of the sources that exist, by the place where the state has a key for
                each: `{"bandit/arms": ["wiki", "books"]}`, or `"streams/state/arms"` for the last
                entry of a stream. Keys without a source are reported and warned of, not removed.
            map_location: Device for the tensors.

        Returns:
            The state, its checkpoint and the skipped ones; `None` if nothing was saved yet.
            Tensors that were saved with less precision have their earlier types again.

        Raises:
            InvalidInput: `at` is another run's; a place of `sources` has no keys; or the run was
                opened without what the preset demands (`must_match`).
            Conflict: `at` is superseded or evicted, or the run was dropped.
            RestoreFailed: Every checkpoint is damaged; the message lists each one with the reason.
        """
        return self._resuming.restore(at, sources, map_location)

    def restore_into(
        self,
        target: object,
        at: Checkpoint | None = None,
        *,
        component: str | None = None,
        strict: bool = True,
    ) -> Checkpoint | None:
        """Fill the tensors of a model from the newest checkpoint, and continue the run from there.

        For models of which no process has memory for a copy: nothing but the target's tensors is
        loaded, and no older checkpoint is tried. On a handle with a `group` every rank calls it;
        sharded tensors may have any layout, and each rank fetches about its share. Plain values,
        such as a step or a generator, are read with `checkpoint.load(only=...)`.

        Args:
            target: An object with `state_dict()`, or a dict of tensors.
            at: Exactly this checkpoint. Default: the newest one.
            component: The component for the target; by default the target's top-level keys are
                components.
            strict: Whether a path on only one side is an error.

        Returns:
            The checkpoint; `None` if nothing was saved yet.

        Raises:
            IncompatibleState: Paths, shapes or dtypes differ; nothing was read.
            Conflict: `at` is superseded or evicted, the run was dropped, or a pivot came after the
                checkpoint: `restore` applies it.
            IntegrityError: An object is damaged; do not use the target's tensors then.
            RankFailed: With a group: another rank is dead or late.
        """
        return self._resuming.restore_into(target, at, component, strict=strict)

    @shows_options(SaveOptions)
    def save(self, state: object, *, step: int, **options: Unpack[SaveOptions]) -> Checkpoint:
        """Save a state; return when it is durable.

        On a handle with a `group` every rank calls it with its part of the state: sharded tensors
        as DTensors, everything else equal on all ranks. Each rank stores a share, without
        differences and `precision`, and all get the checkpoint, or an error.

        Args:
            state: A dict of tensors (torch or NumPy, of any shape, dtype and device) and plain
                values, nested in any way. Objects with `state_dict()` are replaced by its result;
                only inside a dict does it keep the versions of modules. If a part changes before
                this returns, the bytes of some moment of the call are stored.
            step: Training step, update or epoch of the state: 0 to 2^53.
            phase: Phase of the run. Default: the one that the run is in; `main` without a preset's.
            metrics: Numbers that describe the state; `Checkpoint.report` can add more. Numbers
                under the preset's `metrics_key` of the state count as well.
            meta: Plain values to store with the checkpoint; its id does not depend on them.
            tier: Retention class. Default: chosen by the rules of the phase.
            companions: States by name that are kept and evicted with this one. If the phase
                declares one that is not given, the last checkpoint's is used.
            streams: Entries for streams, by name, each a mapping with a `step`. They become visible
                with the checkpoint; training that resumes from it continues after them.
            storing: How its bytes are stored: compression, differences, precision. Default: as the
                registry says.
            allow_nonfinite: Let the checkpoint become latest even if weights that the preset
                watches hold NaN or infinity.

        Returns:
            The checkpoint. If the same state was already saved at this step: that checkpoint, with
            `metrics` added; its streams, meta and companions are those of the first save.

        Raises:
            InvalidInput: An argument is wrong; the run has no such phase, tier or stream; a metric
                has another value in the state; or `precision` cannot be applied.
            UnsupportedValue: Something in a state cannot be stored; the message names its path.
            IncompatibleState: Keys that the phase requires are missing, tensors have another dtype
                than the preset demands, or no load could read the state's schema version.
            Fenced: Another trainer has taken the run over.
            Conflict: The step holds another state already, the phase is over, or the run is.
            StorageError: The store failed; nothing is visible, but StoreUnavailable leaves that
                open. Repeating the save is safe either way.
            RankFailed: With a group: another rank is dead or late. Nothing is visible, unless the
                message says that the outcome is unknown.
        """
        request = ask(self._handle, step, takes_over=True, **options)
        return self._handle.saver.pipeline.save(state, request)

    @shows_options(SaveOptions)
    def save_async(
        self,
        state: object,
        *,
        step: int,
        busy: Busy = "wait",
        may_fail: int = 0,
        **options: Unpack[SaveOptions],
    ) -> PendingSave:
        """Save a state in the background; return once it has been copied.

        The copy is in host memory that later saves reuse. One save runs at a time; the next call
        raises the error of an earlier one. The end of the program waits for a running save, for up
        to `HOLDFAST_EXIT_WAIT_S` seconds (600); a save that is lost then is logged as an error, and
        the exit status is 120. All other options, and the errors, are those of `save`.

        Args:
            state: As for `save`.
            step: Training step, update or epoch of the state.
            busy: If an earlier save is running: `wait` for it; `skip` this save; or `supersede`:
                copy the state to a second memory, where it waits until a newer save takes its
                place, and its entries for streams.
            may_fail: How many saves in a row may fail by an error of the store: it is logged, only
                `wait` raises it, and the next save has the entries for streams. Not with a `group`.

        Returns:
            The save: `wait` gives the checkpoint, `waited_s` the seconds for which this call waited
            for an earlier save, and `outcome` says whether it was skipped or superseded.
        """
        request = ask(self._handle, step, takes_over=True, may_fail=may_fail, **options)
        return self._handle.saver.pipeline.save_async(state, request, busy)

    def log(self, values: Mapping[str, object], *, step: int, system: bool = False) -> None:
        """Log numbers, texts and pictures of a step, such as its loss. Never waits, never raises.

        The next save of this step or a later one commits them with its checkpoint. Without a save
        they get a commit of their own within a minute, which takes the run over like a save; with a
        journal or a `group` they wait for a save. A crash loses what was in memory. Only rank 0
        logs; other ranks may call it. `run.history.logged()` returns the numbers, each step once.

        Args:
            values: By name, except `step`. Numbers of Python, NumPy or torch go to the stream
                `log`; a tensor on a GPU is waited for. To the stream `log-samples` go texts and
                pictures, alone or in a list: bytes of a PNG, JPEG or WebP file, an image of Pillow,
                a figure of matplotlib, an array of height x width (x 1 to 4 channels), a tensor of
                (channels x) height x width; uint8, or floats from 0 to 1. At most 2^24 pixels and
                8 MiB as a file.
            step: The step, 0 to 2^53. What cannot be logged is lost: a warning says why, and the
                next entry has the number of lost ones as `lost`.
            system: Add what the machine does, as `system/...`: CPU, memory and disk in percent,
                bytes of this process, of the network, and of torch on the GPU. Needs psutil (extra
                `system`); without it a warning says so once.
        """
        if is_first_rank() and (self._handle.ranks is None or self._handle.ranks.leads):
            self._handle.ownership.logged.add(values, step, system=system)

    def checkpointer(
        self,
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        on_best: bool | Monitor = False,
        background: bool = True,
        busy: Busy = "wait",
        save_at_end: bool = True,
        stopping: Stopping | None = None,
        may_fail: int = 0,
        phase: int | str | None = None,
        storing: Storing | None = None,
        allow_nonfinite: bool = False,
    ) -> Checkpointer:
        """Return a checkpointer for a training loop: `with run.checkpointer(every_steps=9) as it:`.

        At the end of each step the loop calls `it.step(step, state, metrics)`, which saves if it is
        time. SIGTERM and SIGINT wait for that call: it saves the state, sets the run to
        `interrupted`, and raises SystemExit (`docs/training.md`). On a handle with a `group` every
        rank has a checkpointer and all save together, when rank 0 says so and with its arguments.

        Args:
            every_steps: Save at each multiple of this step.
            every_s: Save when the last save began this many seconds ago. Default of both: the
                cadence of the preset's phase; without one only the other reasons save.
            on_best: Save also if the metric of the run's first monitor, or of this monitor, is
                the best so far.
            background: Save in the background: training waits only while the state is copied to
                host memory. `False`: training waits until the checkpoint is durable.
            busy: As for `save_async`; saves for another reason than the cadence always wait.
            save_at_end: Save the last step at the end of the block.
            stopping: How the loop is asked to stop, and how it leaves.
            may_fail: As for `save_async`, for saves by the cadence and of the best; the error of
                any other save is raised.
            phase: As for `save`, like all below.
            storing: How its bytes are stored; with a `group` without `precision`.
            allow_nonfinite: Let NaN and infinity become latest.

        Raises:
            InvalidInput: An argument is wrong; with a `group` also `precision`, another `busy` than
                `wait`, and `ranks` that are not those of the group.
        """
        from holdfast.registry.saving.loop import Checkpointer, LoopOptions, Stopping

        ranks = self._handle.ranks
        options = LoopOptions(
            every_steps=every_steps,
            every_s=every_s,
            on_best=on_best,
            background=background,
            busy=busy,
            save_at_end=save_at_end,
            stopping=Stopping() if stopping is None else stopping,
            may_fail=may_fail,
            phase=phase,
            storing=check_storing(storing),
            allow_nonfinite=allow_nonfinite,
            group=None if ranks is None else ranks.group,
        )
        return Checkpointer(self._handle, options)

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
        self._handle.wait(remote=remote, timeout_s=timeout_s)

    def backlog(self) -> Backlog | None:
        """Count the saves that only this machine's journal holds; `None` without a journal."""
        return self._handle.backlog()

    def close(self) -> None:
        """Finish a save under way. The handle can be used again."""
        self._handle.saver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        leave_block(self._handle, error)
