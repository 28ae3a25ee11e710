"""The past of a run: `run.history`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from holdfast.registry.history import check_phase
from holdfast.registry.history.actions import Commit
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.loading import Checkpoint, find_checkpoint
from holdfast.registry.saving import RunHandle

if TYPE_CHECKING:
    from holdfast.registry.plots import Axis, StreamKeys


class RunHistory:
    """All that a run was: its commits, and its metrics as a table or a figure."""

    def __init__(self, handle: RunHandle) -> None:
        self._handle = handle

    def commits(self) -> Iterator[Commit]:
        """Yield every commit, oldest first, as the log holds it now."""
        for slot in self._handle.log.slots():
            for _, commit in slot.commits:
                yield commit

    def manifest(self) -> RunManifest:
        """Return the manifest with the records of everything that was ever evicted.

        This reads the log from its beginning.
        """
        return self._handle.log.history()

    def checkpoint(self, n: int) -> Checkpoint:
        """Return the checkpoint that commit `n` added, superseded or not.

        Raises:
            NotFound: The commit added none.
        """
        return find_checkpoint(self._handle.store, self._handle.log, n)

    def logged(self) -> list[dict[str, Any]]:
        """Return the entries of `run.log`, each step once: `[{"step": 1, "loss": 0.5}, ...]`.

        Steps that a training logged again after a crash are those of the last time. An entry with
        `lost` tells how many were lost before it. `run.streams["log"]` has every entry.

        Raises:
            NotFound: Nothing was logged.
            IntegrityError: A segment of the stream is damaged or missing.
        """
        from holdfast.registry.curation.streams import LOG, Stream, each_step_once

        return each_step_once(Stream(self._handle.committer, LOG).read())

    def table(self, phase: int | str | None = None, *, evicted: bool = False) -> Any:
        """Return the checkpoints as of now as a `pyarrow.Table`, in log order.

        A row for each checkpoint of the current line of training; a float64 column for each metric,
        null where a checkpoint has no value. docs/notebooks.md lists the other columns.

        Args:
            phase: Only checkpoints of this phase.
            evicted: Also superseded and evicted checkpoints. This reads the log from its beginning.

        Raises:
            InvalidInput: pyarrow is not installed, or the phase is no name.
        """
        from holdfast.registry.tables import checkpoint_table

        name = None if phase is None else check_phase(phase)
        run = self._handle.log.refresh()
        records = self._handle.log.history().checkpoints if evicted else run.live()
        chosen = (one for one in records if name in (None, one.phase))
        return checkpoint_table(self._handle.log.run_id, chosen)

    def plot(
        self,
        metrics: str | Iterable[str] | None = None,
        *,
        streams: StreamKeys | None = None,
        phase: int | str | None = None,
        x: Axis = "step",
        evicted: bool = False,
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
            evicted: Also evicted checkpoints of the current line. This reads the log from its
                beginning.

        Raises:
            InvalidInput: plotly is not installed, or there is no such axis, also for streams.
            NotFound: There is no such metric, stream or key.
            IntegrityError: A segment of a stream is damaged or gone.
        """
        from holdfast.registry.plots import plot_run

        name = None if phase is None else check_phase(phase)
        return plot_run(
            self._handle.committer, metrics, streams=streams, phase=name, x=x, history=evicted
        )
