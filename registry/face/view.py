"""The read side of a run: query checkpoints, pins and streams; follow new ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self

from holdfast.backends.escape import quoted, shown
from holdfast.registry.curation import pins
from holdfast.registry.errors import InvalidInput, NotFound
from holdfast.registry.face import rooms
from holdfast.registry.face.html import run_html
from holdfast.registry.history import check_phase, decode_plain, phase_value
from holdfast.registry.history.actions import Commit, RunStatus
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.loading import Checkpoint, StateHandle, Stored
from holdfast.registry.saving import DEFAULT_PHASE, RunHandle
from holdfast.registry.spec import Monitor, RunSpec, child, phase_number
from holdfast.registry.values import markup

if TYPE_CHECKING:
    from numpy.random import SeedSequence

    from holdfast.registry.face.rooms import (
        Axis,
        Following,
        OpponentPool,
        Releases,
        Stream,
        StreamKeys,
        Watch,
    )


class RunView:
    """The queries of a run. None of them needs the writer token."""

    def __init__(self, handle: RunHandle) -> None:
        self._handle = handle
        self._store = handle.store
        self._log = handle.log
        self._committer = handle.committer
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
        declared = phase is not None
        known = self.spec.phase(check_phase(phase)).monitors if declared else self.manifest.monitors
        for monitor in known:
            return monitor
        raise InvalidInput(
            "nothing says which checkpoint is best",
            where=self.id,
            hint="Create the run with monitor=Monitor(metric='loss', mode='min'), or pass one.",
        )

    def find(self, n: int) -> Checkpoint:
        """Return the checkpoint that commit `n` added, superseded or not.

        Raises:
            NotFound: The commit added none.
        """
        known = self._log.knowing(n).by_n
        if n not in known:
            raise NotFound("this commit added no checkpoint", where=f"{self.id}: commit {shown(n)}")
        return self._checkpoint(known[n])

    def _checkpoint(self, record: CheckpointRecord) -> Checkpoint:
        return Checkpoint(self._store, self._log, record)

    @property
    def releases(self) -> Releases:
        """Published states under semantic versions, each with a model card."""
        return rooms.Releases(self._committer)

    @property
    def pool(self) -> OpponentPool:
        """The opponent pool."""
        if self._pool is None:
            self._pool = rooms.OpponentPool(self._committer)
        return self._pool

    def stream(self, name: str) -> Stream:
        """Return an append-only history of this run; it need not exist yet."""
        return rooms.Stream(self._committer, name)

    def gate(self, name: str) -> Checkpoint:
        """Return a gate. Loading it never falls back: damage is an error.

        Raises:
            NotFound: It is not set.
        """
        found = pins.find_pin(self._log.refresh(), "gate", name)
        assert found.checkpoint is not None  # replay has every gate name one
        return self.find(found.checkpoint)

    def artifact(self, name: str) -> Stored:
        """Return an artifact.

        Raises:
            NotFound: There is none of that name.
        """
        found = pins.find_pin(self._log.refresh(), "artifact", name)
        return Stored(StateHandle(self._store, self._log, found.manifest, found.ref))

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
        name = None if phase is None else check_phase(phase)
        run = self._log.refresh()
        records = self._log.history().checkpoints if history else run.live()
        chosen = (one for one in records if name in (None, one.phase))
        return rooms.checkpoint_table(self.id, chosen)

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
        name = None if phase is None else check_phase(phase)
        return rooms.plot_run(
            self._committer, metrics, streams=streams, phase=name, x=x, history=history
        )

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
        return rooms.Watch(
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
        return rooms.Following(
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
