"""The past of a run, and the words of people about it: `run.history`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput
from holdfast.registry.history import check_labels, check_phase, is_text
from holdfast.registry.history.actions import Action, Commit, SetLabels, SetNote
from holdfast.registry.history.replay import Note, RunManifest
from holdfast.registry.loading import Checkpoint, find_checkpoint
from holdfast.registry.saving import RunHandle

if TYPE_CHECKING:
    from holdfast.registry.plots import Axis, StreamKeys


#: Bytes of a note.
MOST_NOTE = 10_000


class RunHistory:
    """All that a run was: its commits, notes on it, and its metrics as a table or a figure."""

    def __init__(self, handle: RunHandle) -> None:
        self._handle = handle

    def commits(self) -> Iterator[Commit]:
        """Yield every commit, oldest first, as the log holds it now."""
        return self._handle.log.commits()

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

    def notes(self) -> tuple[Note, ...]:
        """Return the notes on the run and on its checkpoints as of now, oldest first.

        A note has `text`, `author` (`user@host`, a claim), `time_ms` (by that author's clock), and
        `checkpoint`: the commit number of its checkpoint, or `None` for the whole run.
        """
        return self._handle.log.refresh().notes or ()

    def set_note(self, text: str, checkpoint: Checkpoint | None = None) -> None:
        """Write a note on the run or on a checkpoint, in place of the one before.

        Anybody may do so while training goes on. Versions of Holdfast that do not know notes can
        neither read nor collect a run that has one.

        Args:
            text: Plain text of at most 10,000 bytes in UTF-8; an empty one removes the note.
            checkpoint: Of this run; not evicted. Default: the whole run.

        Raises:
            InvalidInput: The text is too long or no Unicode; or the checkpoint is another run's.
            Conflict: The checkpoint was evicted.
        """
        from holdfast.registry.curation import kept, own

        if not isinstance(text, str) or not is_text(text) or len(text.encode()) > MOST_NOTE:
            raise InvalidInput(
                "not a note",
                where=self._handle.log.run_id,
                expected=f"text of at most {MOST_NOTE:,} bytes in UTF-8",
                found=f"{len(text):,} characters" if isinstance(text, str) else quoted(text),
            )
        n = None if checkpoint is None else own(self._handle.committer, checkpoint, "a note")

        def compose(run: RunManifest) -> list[Action] | None:
            if n is not None:
                kept(run, n, f"commit {n}" if checkpoint is None else checkpoint.ref)
            before = run.note(n)
            if text == (before.text if before else ""):
                return None
            return [SetNote(checkpoint=n, text=text)]

        self._handle.committer.commit(compose)

    def set_labels(self, labels: Iterable[str]) -> None:
        """Replace the labels of the run; `manifest.labels_now` has them.

        Versions of Holdfast that do not know this can neither read nor collect the run then.

        Args:
            labels: At most 32 texts, as for `create_run`; none removes them all.

        Raises:
            InvalidInput: A label is not legal, or there are too many.
        """
        wanted = check_labels(labels) or ()

        def compose(run: RunManifest) -> list[Action] | None:
            return None if run.labels_now == wanted else [SetLabels(labels=wanted)]

        self._handle.committer.commit(compose)

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
