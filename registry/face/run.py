"""A run as users hold it: it trains, or it reads and annotates.

`Run` owns a `RunHandle`, which the rooms below take; each method calls the room that does the work.
A room that only some calls need is imported in the method that calls it, here and in `registry`
alone: a program that reads one checkpoint imports no collection, merging or pool.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, get_args

from holdfast.backends.escape import quoted
from holdfast.registry.curation import pins, pruning
from holdfast.registry.errors import InvalidInput, RegistryError
from holdfast.registry.face.html import run_html
from holdfast.registry.face.resuming import Resuming
from holdfast.registry.history import (
    RetentionPlan,
    RunLog,
    check_phase,
    decode_plain,
    phase_value,
)
from holdfast.registry.history.actions import Commit, Evict, RunStatus
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.loading import Checkpoint, Stored, find_checkpoint
from holdfast.registry.saving import (
    DEFAULT_PHASE,
    Backlog,
    Busy,
    PendingSave,
    Restored,
    RunHandle,
    SaveRequest,
    ask,
)
from holdfast.registry.spec import Monitor, Retention, RunSpec, child, phase_number
from holdfast.registry.store import Store
from holdfast.registry.values import markup
from holdfast.registry.writing import Committer, StateWriter, Storing, check_storing

if TYPE_CHECKING:
    from numpy.random import SeedSequence

    from holdfast.registry.curation import Pins, Releases
    from holdfast.registry.curation.pool import OpponentPool
    from holdfast.registry.curation.streams import Streams
    from holdfast.registry.deriving.transitions import (
        Initialise,
        Mode,
        Sources,
        Started,
        Transitioned,
    )
    from holdfast.registry.layouts import CheckoutReport, ImportedFile
    from holdfast.registry.loading.following import Following, Watch
    from holdfast.registry.plots import Axis, StreamKeys
    from holdfast.registry.saving.collective import Group
    from holdfast.registry.saving.journal import Journal
    from holdfast.registry.saving.loop import Checkpointer, Stopping

_LOGGER = logging.getLogger("holdfast")


class Run:
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
        self._handle = _handle(store, log, journal, group)
        self._store, self._log, self._committer = store, log, self._handle.committer
        self._resuming = Resuming(self._handle, compared)
        self._group = group
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
        return self._log.run_id

    @property
    def manifest(self) -> RunManifest:
        """The run, as far as this handle has read its log; `refresh` reads further.

        For evicted checkpoints and entries of the pool it has only numbers; `full_manifest` has
        their records.
        """
        return self._log.run

    def full_manifest(self) -> RunManifest:
        """Return the manifest with the records of everything that was ever evicted.

        This reads the log from its beginning.
        """
        return self._log.history()

    @property
    def status(self) -> RunStatus:
        """`running`, `interrupted`, `completed` or `failed`."""
        return self.manifest.status

    @property
    def config(self) -> Any:
        """The configuration that the run was created with."""
        return decode_plain(self.manifest.created.config if self.manifest.created else None)

    @property
    def spec(self) -> RunSpec:
        """The rules of the run: the preset that it was created with."""
        return self.manifest.spec

    @property
    def phase(self) -> int | str | None:
        """The phase that training is in, as far as this handle has read; `None` before any."""
        found = self.manifest.phase
        return None if found is None else phase_value(found)

    def is_due(self, step: int, phase: int | str | None = None) -> bool:
        """Return whether the preset's cadence asks for a checkpoint at this step of a phase."""
        name = self.manifest.phase if phase is None else check_phase(phase)
        first = self.spec.phases[0].name if self.spec.phases else ""
        every = self.spec.phase(name or first).save_every
        return every is not None and step > 0 and step % every == 0

    def refresh(self) -> Self:
        """Read the commits that others have made meanwhile."""
        self._log.refresh()
        return self

    # Finding

    def checkpoints(self, phase: int | str | None = None) -> list[Checkpoint]:
        """Return the checkpoints of the current line of training as of now, oldest first."""
        records = self._log.refresh().live(None if phase is None else check_phase(phase))
        return [self._checkpoint(record) for record in records]

    def latest(self, phase: int | str | None = None) -> Checkpoint | None:
        """Return the newest checkpoint as of now, or `None` before the first."""
        record = self._log.refresh().latest(None if phase is None else check_phase(phase))
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
        run = self._log.refresh()
        name = None if phase is None else check_phase(phase)
        record = run.best(monitor or self.monitor(phase), name)
        return None if record is None else self._checkpoint(record)

    def monitor(self, phase: int | str | None = None) -> Monitor:
        """Return the monitor that decides `best`: the first of the phase, or of the run.

        Raises:
            InvalidInput: There is none.
        """
        return self.manifest.monitor(None if phase is None else check_phase(phase))

    def find(self, n: int) -> Checkpoint:
        """Return the checkpoint that commit `n` added, superseded or not.

        Raises:
            NotFound: The commit added none.
        """
        return find_checkpoint(self._store, self._log, n)

    def _checkpoint(self, record: CheckpointRecord) -> Checkpoint:
        return Checkpoint(self._store, self._log, record)

    @property
    def releases(self) -> Releases:
        """Published states under semantic versions, each with a model card."""
        from holdfast.registry.curation import Releases

        return Releases(self._committer)

    @property
    def pool(self) -> OpponentPool:
        """The opponent pool."""
        from holdfast.registry.curation.pool import OpponentPool

        if self._pool is None:
            self._pool = OpponentPool(self._committer)
        return self._pool

    @property
    def pins(self) -> Pins:
        """Names that keep states: `pins.tags`, `pins.gates` and `pins.artifacts`."""
        from holdfast.registry.curation import Pins

        return Pins(self._committer)

    @property
    def streams(self) -> Streams:
        """Append-only histories beside the checkpoints: `streams["losses"]`."""
        from holdfast.registry.curation.streams import Streams

        return Streams(self._committer)

    def evicted(self) -> list[Checkpoint]:
        """Return the checkpoints that are evicted now, oldest first.

        This reads the log from its beginning.
        """
        self._log.refresh()
        return [self._checkpoint(one) for one in self._log.history().evicted]

    def history(self) -> Iterator[Commit]:
        """Yield every commit, oldest first, as the log holds it now."""
        for slot in self._log.slots():
            for _, commit in slot.commits:
                yield commit

    def seed_sequence(self, component: int, phase: int | str | None = None) -> SeedSequence:
        """Return the `numpy.random.SeedSequence` of one component that a phase seeds.

        Args:
            component: Its index among the components that are seeded.
            phase: The phase. Default: the one that the run is in.

        Raises:
            InvalidInput: The phase has no number and is not declared.
        """
        created, first = self.manifest.created, self.spec.phases[:1]
        assert created is not None  # only a run that was created has a handle
        named = check_phase(phase) if phase is not None else self.manifest.phase
        name = named or (first[0].name if first else DEFAULT_PHASE)
        return child(int(created.seed, 16), phase_number(self.spec, name), component)

    # Tables

    def metrics(self, phase: int | str | None = None, *, history: bool = False) -> Any:
        """Return the checkpoints as of now as a `pyarrow.Table`, in log order.

        A row for each checkpoint of the current line of training; a float64 column for each metric,
        null where a checkpoint has no value. docs/notebooks.md lists the other columns.

        Args:
            phase: Only checkpoints of this phase.
            history: Also superseded and evicted checkpoints. This reads the log from its beginning.

        Raises:
            InvalidInput: pyarrow is not installed, or the phase is no name.
        """
        from holdfast.registry.tables import checkpoint_table

        name = None if phase is None else check_phase(phase)
        run = self._log.refresh()
        records = self._log.history().checkpoints if history else run.live()
        chosen = (one for one in records if name in (None, one.phase))
        return checkpoint_table(self.id, chosen)

    def plot(
        self,
        metrics: str | Iterable[str] | None = None,
        *,
        streams: StreamKeys | None = None,
        phase: int | str | None = None,
        x: Axis = "step",
        history: bool = False,
    ) -> Any:
        """Return a `plotly.graph_objects.Figure` of metrics and streams, as of now.

        The best checkpoint of a monitored metric has a star, a gate a dotted line, a phase a band
        where phases follow each other on the axis; each phase has a line of its own.

        Args:
            metrics: Metrics, or labels of monitors. Default: the run's monitors; without any, its
                first 8 metrics. None of them: `()`.
            streams: Streams whose numbers are drawn, by name; a mapping gives their keys:
                `{"losses": ["train", "test"]}`.
            phase: Only checkpoints of this phase.
            x: `step` (counted within the phase), `time` of the save in UTC, or `commit`.
            history: Also evicted checkpoints of the current line. This reads the log from its
                beginning.

        Raises:
            InvalidInput: plotly is not installed, or there is no such axis, also for streams.
            NotFound: There is no such metric, stream or key.
            IntegrityError: A segment of a stream is damaged or gone.
        """
        from holdfast.registry.plots import plot_run

        name = None if phase is None else check_phase(phase)
        return plot_run(self._committer, metrics, streams=streams, phase=name, x=x, history=history)

    # Following

    def watch(
        self,
        phase: int | str | None = None,
        *,
        group: str = "default",
        hold_s: float = 3600,
        poll_s: float = 1.0,
        longest_poll_s: float = 30.0,
        timeout_s: float | None = None,
        follow: bool = True,
        follower: str | None = None,
    ) -> Watch:
        """Follow the run: each checkpoint goes to one follower of a group, in log order.

        A checkpoint is claimed before the loop gets it, and acknowledged when the loop asks for the
        next one. If an exception or `break` ends the loop, the last checkpoint is not acknowledged,
        and is given out again when its hold is over: at least once, never lost. Before a `break`,
        call `acknowledge()` on the returned object if the checkpoint is done. The loop does not get
        superseded and evicted checkpoints, and those that are held back because their weights are
        not finite.

        The loop ends when the run is completed, failed or dropped and the group has done all of its
        checkpoints. Waiting costs one request for each poll.

        Args:
            phase: Only checkpoints of this phase.
            group: Followers that share the checkpoints; every other group gets all of them again.
            hold_s: Seconds for which no other follower of the group gets the checkpoint and
                retention keeps it. A follower that is silent for longer counts as dead.
            poll_s: Seconds between looks at the log; twice as long after each look that finds
                nothing new.
            longest_poll_s: The longest time between two looks.
            timeout_s: End the loop after this many seconds without a checkpoint. Default: never.
            follow: Whether to wait for more; `False` ends after the checkpoints that exist now.
            follower: A name that outlives this process, such as a job's id: a follower that is
                started again under this name continues with the checkpoint that it held. Only one
                follower may use a name at a time. Default: random.

        Raises:
            InvalidInput: The run has no such phase, or a name or a time is not legal.
        """
        from holdfast.registry.loading.following import Watch

        return Watch(
            self._committer,
            phase,
            group=group,
            hold_s=hold_s,
            poll_s=poll_s,
            longest_poll_s=longest_poll_s,
            timeout_s=timeout_s,
            follow=follow,
            follower=follower,
        )

    def follow_into(
        self,
        model: object,
        *,
        component: str | None = None,
        phase: int | str | None = None,
        strict: bool = True,
        latest_only: bool = True,
        rehash: bool | None = None,
        poll_s: float = 1.0,
        longest_poll_s: float = 30.0,
        timeout_s: float | None = None,
        follow: bool = True,
    ) -> Following:
        """Keep a model at the run's newest weights: `for ck in run.follow_into(model): ...`.

        The loop gets each checkpoint when its weights are in the model: in the same tensors, in
        the same memory. Only chunks that differ from those in the model are fetched; of a chunk
        that is stored as a delta only the delta, since the model has its base. All chunks are
        verified before the first is copied into the model, so an error leaves the model as it was,
        unless a device fails during the copies. This takes as much host memory as the changed
        chunks have bytes.

        Followers do not share checkpoints: each one gets the newest, nothing is claimed or
        acknowledged, and the right to read is enough. Waiting costs one request for each poll. A
        checkpoint that is evicted and collected while it is read is skipped for a newer one. After
        an error the same object can be used again.

        In a loop of your own, call `poll()` on the returned object: it takes newer weights, if
        there are any, without waiting. Its two halves are `fetch()`, which a thread may call while
        the model is in use, and `swap()`, which copies.

        The next checkpoint overwrites everything that the program wrote to the model: afterwards
        the model equals the checkpoint, bit for bit. To ensure that, each step hashes the chunks
        that it does not replace, and the results of deltas. It hashes whole tensors if torch has
        counted a write, or cannot count (NumPy arrays, tensors made in inference mode). A program
        that never bypasses torch's counter (through `.data` or foreign kernels) may skip that with
        `rehash=False`. The program must not write to the model while weights are copied into it.

        Args:
            model: An object with `state_dict()`, or a dict of tensors or arrays, on any device.
            component: The component that the model is. Default: the model's top-level keys are
                components. Other components are not read.
            phase: Only checkpoints of this phase.
            strict: Whether a path that only one side has is an error.
            latest_only: Take the newest checkpoint only: the one that `latest` gives, also after a
                rewind. `False`: every kept checkpoint, in log order.
            rehash: Which weights without counted writes to hash before each checkpoint: by default
                those that it does not replace; all (`True`), or none (`False`).
            poll_s: Seconds between looks at the log; twice as long after each look that finds
                nothing new.
            longest_poll_s: The longest time between two looks.
            timeout_s: End the loop after this many seconds without a checkpoint. Default: never.
            follow: Whether to wait for more; `False` ends after the checkpoints that exist now.

        Raises:
            InvalidInput: The run has no such phase, or a time is not legal. By the loop:
            IncompatibleState: The weights do not fit the model, nothing of it is in the checkpoint,
                or its tensors overlap in memory or cannot be written to.
            NotFound: There is no such component.
            IntegrityError: Something is damaged or gone.
        """
        from holdfast.registry.loading.following import Following

        return Following(
            self._committer,
            model,
            component=component,
            phase=phase,
            strict=strict,
            latest_only=latest_only,
            rehash=rehash,
            poll_s=poll_s,
            longest_poll_s=longest_poll_s,
            timeout_s=timeout_s,
            follow=follow,
        )

    # Folders of other systems

    def checkout(
        self, root: str | os.PathLike[str], *, layout: str | None = None
    ) -> CheckoutReport:
        """Write the run as the folder of a system, or bring such a folder up to date.

        Files have the names and formats of the system, links are relative and replaced atomically,
        and every file is whole or absent. What an earlier checkout has made and the run has no
        longer is removed; files that it has not made, or that were changed, are left alone. No file
        shares memory with the registry: a folder may be edited.

        Args:
            root: The folder; it is made if it does not exist.
            layout: `hydra`, `adr004`, `andrea`, `thalia`, `cobre` or `hf`. Default: that of the
                run's preset.

        Returns:
            The names of files that were written, kept, removed and left alone.

        Raises:
            InvalidInput: There is no such layout, or a name cannot be that of a file.
            IncompatibleState: A state does not fit the formats of the layout.
            Conflict: The folder is a checkout of something else, or another checkout is running.
            IntegrityError: An object is damaged.
            StoreFull: The disk is full.
        """
        from holdfast.registry.layouts import check_out_as

        return check_out_as(self._committer, root, layout)

    def import_tree(
        self,
        root: str | os.PathLike[str],
        *,
        layout: str | None = None,
        table: str | os.PathLike[str] | None = None,
        dry_run: bool = False,
    ) -> list[ImportedFile]:
        """Take the folder of a system into this run: each file once, verified, in its order.

        A file whose `.sha256` file says something else is refused, and so is one that breaks its
        format; the others are taken in. A second import takes in only what is new.

        Args:
            root: The folder.
            layout: As for `checkout`.
            table: For `andrea`: a JSON file with the names and shapes of the parameters.
            dry_run: Read and check everything, and commit nothing.

        Returns:
            A report for each file, in the order in which they were taken in.

        Raises:
            InvalidInput: There is no such folder or layout, or two names in the folder would be one
                file on some systems.
            StorageError: The registry or the folder failed; what was taken in before stays.
        """
        from holdfast.registry.layouts import import_from

        return import_from(self._committer, root, layout, table, dry_run=dry_run)

    def watch_folder(
        self,
        root: str | os.PathLike[str],
        *,
        layout: str | None = None,
        table: str | os.PathLike[str] | None = None,
        quiet_s: float = 10.0,
        poll_s: float = 1.0,
        longest_poll_s: float = 10.0,
        timeout_s: float | None = None,
    ) -> Iterator[ImportedFile]:
        """Follow a folder into which a program writes: yield each file once it was taken in.

        A file is taken in when it is complete: its content or size says so by the rules of the
        layout, or it was quiet for a while. After a restart, files that were taken in are not taken
        in again.

        Args:
            root: The folder.
            layout: As for `checkout`.
            table: As for `import_tree`.
            quiet_s: Seconds without a change after which a file counts as complete if its content
                cannot tell.
            poll_s: Seconds between looks at the folder; twice as long after each look that finds
                nothing new.
            longest_poll_s: The longest time between two looks.
            timeout_s: End after this many seconds without a new file. Default: never.

        Raises:
            InvalidInput: As for `import_tree`, or a time is not legal.
            StorageError: The registry or the folder failed.
        """
        from holdfast.registry.layouts import watch_folder

        return watch_folder(
            self._committer,
            root,
            layout,
            table,
            quiet_s=quiet_s,
            poll_s=poll_s,
            longest_poll_s=longest_poll_s,
            timeout_s=timeout_s,
        )

    # Evicting

    def prune(self, retention: Retention | None = None, *, dry_run: bool = False) -> RetentionPlan:
        """Evict the checkpoints that retention does not keep; each save does it, too.

        Args:
            retention: A policy. Default: the preset's.
            dry_run: Only plan.

        Returns:
            The checkpoints that stay and those that go, each with its reasons.

        Raises:
            InvalidInput: The run has no policy, and none is given; or the policy keeps the best,
                and there is no monitor.
            Conflict: The run was dropped.
        """
        return pruning.prune(self._committer, retention, dry_run=dry_run)

    def evict(self, checkpoint: Checkpoint, reason: str) -> None:
        """Evict one checkpoint; `undo` brings it back until it is collected.

        Args:
            checkpoint: Of this run. It may be superseded, or one that was brought back before.
            reason: Why, for readers of the log.

        Raises:
            Conflict: It is protected (the newest of its phase, the best by a monitor, named by a
                gate or a tag, held by a follower), or it is evicted already.
            InvalidInput: It is another run's, or the reason is empty or cannot be stored.
        """
        pruning.evict(self._committer, checkpoint, reason)

    def undo(self, *checkpoints: Checkpoint) -> list[Checkpoint]:
        """Bring evicted checkpoints back: the given ones, or those of the last eviction.

        Args:
            *checkpoints: Of this run, from `evicted`.

        Returns:
            The checkpoints. Retention does not evict them again.

        Raises:
            NotFound: One of them is not evicted, or nothing is.
            Conflict: Another checkpoint holds its step now.
            MissingObject: Its objects were collected, or this mirror never had them.
        """
        chosen = [pins.own(self._committer, one, "undo") for one in checkpoints]
        self._committer.await_earlier()  # those saves may evict
        back = pruning.undo(self._committer, chosen or self._last_evicted())
        return [self._checkpoint(record) for record in back]

    def _last_evicted(self) -> list[int]:
        said = [a for commit in self.history() for a in commit.actions if isinstance(a, Evict)]
        self._log.refresh()  # those commits may be newer than what this handle has read
        return pruning.last_evicted(self._log.history(), said)

    @property
    def group(self) -> Group | None:
        """The ranks of a job that save together; `None` if this process saves alone."""
        return self._group

    # Coming back

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
        checkpoint stays, and the state is changed as it says (`Restored.pivot`); parts that it
        resets are not in the state.

        Args:
            at: Exactly this checkpoint, without falling back; pivots after it are superseded too.
                Default: the newest sound one.
            sources: The names of the sources that exist, by the place where the state has a key for
                each: `{"bandit/arms": ["wiki", "books"]}`, or `"streams/state/arms"` for the last
                entry of a stream. Keys without a source are reported and warned of, not removed.
            map_location: Device for the tensors.

        Returns:
            The state, its checkpoint and the skipped ones; `None` if nothing was saved yet.
            Tensors that were saved with less precision have the types that they had before, and a
            warning names them.

        Raises:
            InvalidInput: `at` is another run's; a place of `sources` has no keys; or the preset
                demands a configuration or an input hash (`must_match`), and the run was opened
                without.
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
        sharded tensors may have any layout, and each rank fetches about its share. With a journal
        the newest checkpoint may be one that is only on this machine. Plain values, such as a step
        or a generator, are read with `checkpoint.load(only=...)`.

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

    def start(
        self,
        mode: Mode,
        source: Stored | None = None,
        *,
        expected: Mapping[str, object] | None = None,
        carry: str | Iterable[str] = (),
        sources: Sources | None = None,
        initialise: Initialise | None = None,
        map_location: object = "cpu",
    ) -> Started:
        """Start training in a mode: from nothing, from another run's checkpoint, or where it was.

        - `fresh`: nothing is carried; random numbers come from the run's seed.
        - `warm_start`: the preset's `warm_start` rows say what is carried from another run's
          checkpoint; random numbers come from the run's seed, and steps begin again.
        - `resume`: everything is carried, and training continues exactly where it was.

        A warm start is recorded in the log with its source and its rows; it can be repeated until
        the first save. Every check is made before anything is loaded or committed.

        Args:
            mode: `fresh`, `warm_start` or `resume`.
            source: For `warm_start` a checkpoint or a release of any run. For `resume` exactly this
                checkpoint of the run; default: the newest sound one.
            expected: Plain values that the checkpoint must have, by path, such as
                `{"state_dimension": 12}`. Those that the preset lists as `compatible_keys` must be
                given.
            carry: For `warm_start`: the top-level keys that are carried, in place of the preset's
                rows. Without either they are the keys that inference needs.
            sources: For `resume`, as for `restore`; places that the preset lists must be given.
            initialise: For `warm_start`: functions that make the reset parts, as for `transition`.
            map_location: Device for the tensors, as `torch.device` or its name.

        Returns:
            The state, the seeds, the source, and the rows that were applied.

        Raises:
            InvalidInput: An argument is missing or does not belong to the mode, or the preset
                demands a configuration or an input hash, and the run was opened without.
            IncompatibleState: A value differs from the expected one, or a row fits nothing; the
                message lists all.
            NotFound: There is nothing to resume from.
            Conflict: The run has checkpoints and the mode is not `resume`, or the run is over.
            RestoreFailed: Every checkpoint is damaged.
        """
        return self._resuming.start(
            mode, source, expected, carry, sources, initialise, map_location
        )

    # From phase to phase

    def transition(
        self,
        to: int | str,
        *,
        targets: Mapping[str, Any] | None = None,
        metrics: Mapping[str, object] | None = None,
        enable: str | Iterable[str] = (),
        initialise: Initialise | None = None,
        zero: str | Iterable[str] | None = None,
        map_location: object = "cpu",
    ) -> Transitioned:
        """Begin a phase by the transition that the preset declares, in one commit.

        The source is loaded whole and verified; every check is made before the commit. A second
        call before the first save in the phase returns the same and commits nothing. Like a save it
        takes the run over; after `restore` it supersedes the checkpoints after the restored one.

        Args:
            to: The phase.
            targets: Modules or states, by part, that the strictly checked parts must fit.
            metrics: Metrics that decide whether the source is ready; they override its own.
            enable: Conditions of the preset that hold.
            initialise: Functions that make the reset parts, by part. For a pattern, the function
                returns new values by their paths below the key. A part without one is left out.
            zero: Patterns of the paths that must be zero, if the state has other names for them
                than the preset; each must match something.
            map_location: Device for the tensors, as `torch.device` or its name.

        Returns:
            The state that the phase begins with, the frozen companions, the seeds, the source, and
            every row of the transition that was applied.

        Raises:
            IncompatibleState: The source does not fit: it differs from a target, a part that must
                be zero is not, a metric has not reached its bound, or rows and parts do not cover
                each other. The message lists everything.
            InvalidInput: No such transition is declared, or an argument names nothing.
            NotFound: The source, or an anchor of the pool, does not exist.
            IntegrityError: The source, or an anchor, is damaged; no other one is used instead.
            Conflict: The phase has begun already, or the run is over.
            Fenced: Another trainer has taken the run over.
        """
        from holdfast.registry.deriving.transitions import TransitionOptions, transition

        options = TransitionOptions(targets, metrics, enable, initialise, zero, map_location)
        return transition(self._handle, to, options)

    def pivot(
        self,
        name: str,
        *,
        initialise: Initialise | None = None,
        map_location: object = "cpu",
    ) -> Transitioned:
        """Change the policy of training within its phase, in one commit; as often as wanted.

        The newest checkpoint is loaded and changed by the preset's `pivot` table: parts without a
        row are carried. Resettable streams are archived under the name of the pivot, `forever`
        ones continue, and `best` begins again. Like a save it takes the run over; after `restore`
        it supersedes the checkpoints after the restored one. A pivot of the same name again
        commits nothing and continues where the run is, so a job script may repeat it.

        Args:
            name: Its name.
            initialise: Functions that make the reset parts, as for `transition`.
            map_location: Device for the tensors, as `torch.device` or its name.

        Returns:
            The state that training continues with, the seeds, the source, and every row that was
            applied: none if the run has saved since it pivoted under this name.

        Raises:
            NotFound: The present phase has no checkpoint yet.
            IncompatibleState: A row of the table names a part that the state does not have.
            InvalidInput: The name is not legal, or `initialise` names a part that is not reset.
            IntegrityError: The checkpoint is damaged: call `restore` first, to pivot from an older
                one.
            Conflict: The run is over.
            Fenced: Another trainer has taken the run over.
        """
        return self._resuming.pivot(name, initialise, map_location)

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
                self._handle.saver.pipeline.settle()
            except BaseException as failed:
                self._handle.saver.leave("failed", failed)
                raise
            self._handle.saver.leave("completed")
            return
        # The caller's own error must be raised; an error of the store is only logged.
        try:
            self._handle.saver.pipeline.settle()
        except RegistryError as said:
            _LOGGER.error("%s: the running save failed: %s", self.id, said)
        is_failure = issubclass(kind, Exception)
        left: RunStatus = "failed" if is_failure else "interrupted"
        try:
            self._handle.saver.leave(left, error if is_failure else None)
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
        storing: Storing | None = None,
        allow_nonfinite: bool = False,
    ) -> Checkpoint:
        """Save a state; return when it is durable.

        On a handle with a `group` every rank calls it with its part of the state: sharded tensors
        as DTensors, everything else equal on all ranks. Each rank stores a share, and all get the
        checkpoint, or an error. No differences are stored then, and a `precision` is refused.

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
            storing: How its bytes are stored: compression, differences, precision. Default: as the
                registry says.
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
        request = ask(
            self._handle,
            step,
            takes_over=True,
            phase=phase,
            metrics=metrics,
            meta=meta,
            tier=tier,
            companions=companions,
            streams=streams,
            storing=storing,
            allow_nonfinite=allow_nonfinite,
        )
        return self._handle.saver.pipeline.save(state, request)

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
        storing: Storing | None = None,
        allow_nonfinite: bool = False,
    ) -> Checkpoint:
        """Save a state that another program made; the run keeps its trainer.

        Arguments, result and errors are those of `save`; no trainer is fenced.
        """
        request = ask(
            self._handle,
            step,
            takes_over=False,
            phase=phase,
            metrics=metrics,
            meta=meta,
            tier=tier,
            companions=companions,
            streams=streams,
            storing=storing,
            allow_nonfinite=allow_nonfinite,
        )
        return self._handle.saver.pipeline.save(state, request)

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
        storing: Storing | None = None,
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
            storing: As for `save`, but without `precision`; no differences are made.
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
        from holdfast.registry.deriving.merging import merge

        self._handle.saver.pipeline.settle()
        self._committer.await_earlier()  # the sources may be among those saves
        request = SaveRequest.of(
            step,
            takes_over=False,
            phase=phase,
            metrics=metrics,
            tier=tier,
            storing=storing,
            allow_nonfinite=allow_nonfinite,
        )
        return merge(self._committer, sources, request, average, weights, pick, meta)

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
        storing: Storing | None = None,
        allow_nonfinite: bool = False,
        busy: Busy = "wait",
        may_fail: int = 0,
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
            storing: How its bytes are stored.
            allow_nonfinite: Let NaN and infinity become latest.
            busy: If an earlier save is running: `wait` for it; `skip` this save; or `supersede`:
                copy the state to a second memory, where it waits until a newer save takes its
                place. Entries for streams go to the newer save.
            may_fail: How many saves in a row may fail: an error of the store, such as an outage, is
                then logged and only `wait` raises it; the next call goes on, and its save has the
                entries for streams. Not with a `group`.

        Returns:
            The save: `wait` gives the checkpoint, `waited_s` the seconds for which this call waited
            for an earlier save, and `outcome` says whether it was skipped or superseded.
        """
        request = ask(
            self._handle,
            step,
            takes_over=True,
            phase=phase,
            metrics=metrics,
            meta=meta,
            tier=tier,
            companions=companions,
            streams=streams,
            storing=storing,
            allow_nonfinite=allow_nonfinite,
            may_fail=may_fail,
        )
        return self._handle.saver.pipeline.save_async(state, request, busy)

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

    # Ending

    def drop(self, reason: str) -> None:
        """Release everything that the run holds, gates and releases included; there is no undo.

        Args:
            reason: Why, for readers of the log.

        Raises:
            InvalidInput: The reason is empty or cannot be stored.
            Conflict: The run was dropped before.
        """
        self._handle.saver.pipeline.settle()
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
        self._handle.saver.set_status(status)

    def close(self) -> None:
        """Finish a save under way. The handle can be used again."""
        self._handle.saver.close()

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
            group=self.group,
        )
        return Checkpointer(self._handle, options)


def _handle(store: Store, log: RunLog, journal: Journal | None, group: Group | None) -> RunHandle:
    committer = Committer(StateWriter(store, log))
    if group is not None:
        from holdfast.registry.saving.collective import CollectiveSaver

        ranks = CollectiveSaver(committer, group)
        line = ranks.line
        return RunHandle(store, log, committer, line, ranks, line, ranks=ranks)
    if journal is not None:
        from holdfast.registry.saving.journal import JournaledSaver

        saver = JournaledSaver(committer, journal)
        return RunHandle(store, log, committer, saver.own, saver, saver, journal=saver)
    return RunHandle.local(committer)
