"""The streams of a folder, and how they continue those of a run.

A program writes each history in a file of its own beside the checkpoints. In a layout that is
`STEPPED` an entry is committed with the first checkpoint at or after its step, and entries after
the newest checkpoint wait in their file. A kept history that no longer continues its stream shows
that the program went back to an older checkpoint; the run then goes back to that one, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from holdfast.registry.curation.streams import Stream, check_entries, stream_lifetime
from holdfast.registry.errors import Conflict, InvalidInput, RegistryError
from holdfast.registry.history import MAX_STEP, check_rewind, store_time_ms
from holdfast.registry.history.actions import Action, ReportMetrics, Rewind
from holdfast.registry.history.replay import CheckpointRecord, RunManifest, Segment
from holdfast.registry.layouts.contents import import_notes
from holdfast.registry.layouts.scanning import identity
from holdfast.registry.layouts.table import Found
from holdfast.registry.saving import LocalSaver
from holdfast.registry.writing import Committer, Composed

Entries = list[dict[str, Any]]


@dataclass(frozen=True)
class HistoryFile:
    """Content of a file: all entries, or the newest state alone."""

    entries: Entries
    state: dict[str, Any] | None = None

    @cached_property
    def ends(self) -> dict[int, int]:
        """For each step the number of entries up to its last one."""
        return {entry["step"]: at + 1 for at, entry in enumerate(self.entries)}


@dataclass(frozen=True, slots=True)
class History:
    """A stream of the run, and the file that continues it."""

    name: str
    is_kept: bool  # whether the stream is kept for ever
    held: Entries  # the entries of the stream
    file: HistoryFile
    agreeing: int  # number of first entries that stream and file share

    @property
    def is_continued(self) -> bool:
        """Whether one of stream and file continues the other."""
        is_whole = self.file.state is None
        return not is_whole or self.agreeing == min(len(self.held), len(self.file.entries))

    def due(self, step: int) -> Entries:
        """Return the entries of a file with all of them that the stream lacks at a checkpoint."""
        entries, start = self.file.entries, self.agreeing if self.is_continued else 0
        later = (at for at in range(start, len(entries)) if entries[at]["step"] > step)
        return entries[start : max(next(later, len(entries)), self.file.ends.get(step, 0))]

    def due_state(self, step: int) -> Entries:
        """Return the newest state as an entry, if it is new and not of a later step."""
        state, newest = self.file.state or {}, self.held[-1] if self.held else {}
        is_old = _same({**state, "step": 0}, {**newest, "step": 0})
        return [] if is_old or state.get("step", step) > step else [{"step": step, **state}]

    def value(self, step: int) -> float | None:
        """Return the number of a step under the stream's own name: the loss, in `loss`."""
        end = self.file.ends.get(step)
        found: Any = None if end is None else self.file.entries[end - 1].get(self.name)
        is_number = type(found) is float or (type(found) is int and abs(found) < 2**1023)
        return float(found) if is_number else None


class Histories:
    """The histories of a folder, compared with the streams of a run."""

    def __init__(
        self,
        committer: Committer,
        root: Path,
        layout: str,
        read: Callable[[Found], Any],
        *,
        stepped: bool,
        dry_run: bool,
    ) -> None:
        self._committer, self._root, self._layout, self._read = committer, root, layout, read
        self._stepped, self._dry_run = stepped, dry_run
        self._files: list[Found] = []
        self._written: list[tuple[int, int, str]] = []  # times, steps and paths of checkpoint files
        self._newest: str | None = None  # the one that was written last
        self._parsed: dict[str, tuple[tuple[int, ...], HistoryFile]] = {}
        self._held: dict[str, tuple[tuple[Segment, ...], Entries]] = {}
        self._gone: set[str] = set()
        self._continued: set[str] = set()  # streams that got entries since they were reported

    def look(self, found: Sequence[Found]) -> None:
        """Note the files of a folder."""
        if self._stepped:
            self._files = [one for one in found if one.kind == "stream"]
            states = [one for one in found if one.kind == "checkpoint"]
            self._written = sorted((self._time_ns(one), one.step or 0, one.path) for one in states)
            self._newest = self._written[-1][2] if states else None

    def lacks(self, checkpoint: Found) -> bool:
        """Return whether a history was not written yet since a checkpoint file."""
        return any(self._is_behind(one, checkpoint) for one in self._files)

    def _is_behind(self, one: Found, checkpoint: Found) -> bool:
        try:
            file = self._file(one)
            if file.state is None:
                return bool(file.entries) and file.entries[-1]["step"] < (checkpoint.step or 0)
            is_older = self._time_ns(one) < self._time_ns(checkpoint)
            return is_older and checkpoint.path == self._newest
        except (RegistryError, OSError):
            return True

    # With a checkpoint

    def left_behind(self, found: Found) -> str:
        """Return why a file is of a line that training has left; empty if it is not.

        Training went back and has not written it again: an earlier step was written later.
        """
        step, files = found.step or 0, []
        for one in self._files:
            with suppress(InvalidInput, OSError):
                files.append(self._file(one).entries)
        ends = [entries[-1]["step"] for entries in files if entries]
        if not ends or max(ends) >= step:
            return ""
        later = self._overtaken_by(found)
        return f"training went back: it wrote {later} later" if later else ""

    def _overtaken_by(self, found: Found) -> str:
        """Return a file of an earlier step that was written later; empty without one."""
        written_ns, step = self._time_ns(found), found.step or 0
        later = [one[2] for one in self._written if one[0] > written_ns and one[1] < step]
        return later[-1] if later else ""

    def comes_back(self, found: Found, n: int) -> bool:
        """Return whether a superseded checkpoint is on the folder's line: its loss is the file's.

        Without its loss the times of files decide. Not if a training program has superseded it.
        """
        log = self._committer.log
        record, run = log.knowing(n).by_n[n], log.run
        if not record.superseded or run.is_evicted(n):
            return False
        values = {one.name: one.value(record.step) for one in self._all(run) if one.is_kept}
        known = {name: value for name, value in values.items() if value is not None}
        rated = {name: value for name, value in record.metrics.items() if name in known}
        is_ours = all(self._source(one) for one in run.live() if one.n > n)
        is_ours &= all(one.n < n for one in run.pivots)
        is_on_line = _same(rated, known) if rated else not self._overtaken_by(found)
        return bool(known) and is_ours and is_on_line

    def take_gone(self) -> set[str]:
        """Return the files whose checkpoints were superseded since the last call."""
        gone, self._gone = self._gone, set()
        return gone

    def go_back(self, path: str, step: int, *, is_replaced: bool) -> list[str]:
        """Rewind the run if the folder went back to an older checkpoint; return a warning of it.

        It goes back for the file that is to be saved; `is_replaced`: another content of it is here.
        """
        run = self._committer.log.refresh()
        is_taken = any(one.step == step and self._source(one) != path for one in run.live())
        if not self._stepped or is_taken:
            return []  # the save refuses another state at a step
        found = self._common(run, path if is_replaced else None, step)
        if found is None:
            return []
        last, gone = found
        if last is None or not all(map(self._source, gone)):
            raise Conflict(
                "the folder does not continue the run",
                where=path,
                expected="histories and files that agree with a checkpoint of the run",
                found="no such checkpoint" if last is None else "later ones of a training program",
                hint="Import the folder into another run.",
            )
        if not self._dry_run:
            self._rewind(last.n, [one.n for one in gone])
            self._gone |= {self._source(one) for one in gone}
        steps = ", ".join(str(one.step) for one in gone) or "entries of streams"
        return [f"the folder went back to step {last.step}; superseded: {steps}"]

    def due(self, path: str, step: int) -> tuple[dict[str, Entries], dict[str, float]]:
        """Return the entries that are committed with a checkpoint, and its metrics."""
        histories, streams = self._all(self._committer.log.refresh()), dict[str, Entries]()
        for one in histories:
            if one.file.state is None:
                streams[one.name] = one.due(step)
            elif path == self._newest:
                streams[one.name] = one.due_state(step)
            if not one.is_continued and streams[one.name]:
                self._archive(one.name)
        self._continued |= {name for name, entries in streams.items() if entries}
        metrics = {one.name: value for one in histories if (value := one.value(step)) is not None}
        return streams, metrics

    def took(self, new: Mapping[str, Entries]) -> None:
        """Note that a commit has appended entries, so that they need not be read again."""
        for name, entries in new.items():
            stream = self._committer.log.run.stream(name)
            held = [*self._held[name][1], *entries]
            if stream is not None and stream.count == len(held):
                self._held[name] = stream.segments, held

    def _common(
        self, run: RunManifest, path: str | None = None, step: int = MAX_STEP
    ) -> tuple[CheckpointRecord | None, list[CheckpointRecord]] | None:
        """Return the last checkpoint that the folder continues, and those after it.

        Without contradiction it is `None`. The checkpoint whose file is replaced, and those with
        entries of a kept stream that its file has otherwise, contradict the folder. With a history,
        so do imported ones of later steps than the next: they are saved again if they come back.
        """
        histories = [one for one in self._all(run) if one.is_kept]
        kept = [one for one in histories if not one.is_continued]

        def contradicts(one: CheckpointRecord) -> bool:
            marks = one.streams
            if histories and one.step > step and self._source(one):
                return True
            return (path is not None and self._source(one) == path) or any(
                history.name in marks and marks[history.name].count > history.agreeing
                for history in kept
            )

        live = run.live()
        end = next((at for at, one in enumerate(live) if contradicts(one)), len(live))
        if end == len(live) and not kept:
            return None
        return live[end - 1] if end else None, live[end:]

    def _rewind(self, to: int, gone: list[int]) -> None:
        """Supersede checkpoints of earlier imports; a trainer that went on from them is fenced."""

        def compose(run: RunManifest) -> list[Action]:
            if [one.n for one in run.live() if one.n > to] != gone:
                raise Conflict("another program has saved meanwhile", where=run.run_id)
            check_rewind(
                run, to, partial(store_time_ms, self._committer.store, self._committer.log)
            )
            return [Rewind(to=to)]

        saver = LocalSaver(self._committer)
        saver.commit(Composed(compose))
        saver.ownership.ended()

    def _source(self, record: CheckpointRecord) -> str:
        return str(import_notes(record, self._layout).get("file", ""))

    # Without a checkpoint

    def late(self, found: Found, seen_step: int) -> tuple[bool, str]:
        """Append entries whose checkpoints are there already; without steps, all new ones.

        Return whether the stream got entries, here or with checkpoints, and why others wait.
        """
        run = self._committer.log.refresh()
        history, newest = self._of(found, run), next(run.newest_first(), None)
        step = max(seen_step, newest.step if newest else 0)
        if history.file.state is None:
            due = history.due(step if self._stepped else MAX_STEP)
        else:
            is_there = self._stepped and history.held and history.held[-1]["step"] >= step
            due = [] if is_there else history.due_state(step)
        why = ""
        if not history.is_continued:
            common = self._common(run) if self._stepped else None
            if history.is_kept and (common is None or common[0] is None):
                raise Conflict(
                    "the file does not continue the stream, which is kept for ever",
                    where=found.path,
                    expected=f"{len(history.held)} entries as before, and more",
                    found=f"only the first {history.agreeing} are as before",
                )
            if self._stepped:
                due, why = [], "it begins again: its entries wait for their checkpoint"
            else:
                self._archive(found.name)
        elif (waiting := len(history.file.entries) - len(history.held) - len(due)) > 0:
            why = f"{waiting} entries wait for their checkpoint"
        is_new = bool(due) or found.name in self._continued
        self._continued.discard(found.name)
        if not self._dry_run:
            if due:
                Stream(self._committer, found.name).append(due)
            self._report(history)
        return is_new, why

    def _archive(self, name: str) -> None:
        stream = Stream(self._committer, name)
        if not self._dry_run:
            stream.archive(f"import-{len(stream.archives) + 1}")

    def _report(self, history: History) -> None:
        """Give imported checkpoints the metrics that came after them."""

        def compose(run: RunManifest) -> list[Action] | None:
            unrated = (one for one in run.live() if history.name not in one.metrics)
            values = ((one, history.value(one.step)) for one in unrated if self._source(one))
            return [
                ReportMetrics(checkpoint=one.n, metrics={history.name: value})
                for one, value in values
                if value is not None
            ] or None

        if self._stepped:
            self._committer.commit(compose)

    # Files

    def _all(self, run: RunManifest) -> list[History]:
        """Compare all files that can be read; the others are refused when their turn comes."""
        histories = []
        for one in self._files:
            with suppress(InvalidInput, OSError):
                histories.append(self._of(one, run, may_be_older=True))
        return histories

    def _of(self, found: Found, run: RunManifest, *, may_be_older: bool = False) -> History:
        """Compare a file with its stream."""
        is_kept = stream_lifetime(run, found.name) == "forever"
        file = self._file(found, may_be_older=may_be_older)
        held = self._entries(found.name, run)
        return History(found.name, is_kept, held, file, _agreeing(held, file.entries))

    def _file(self, found: Found, *, may_be_older: bool = False) -> HistoryFile:
        seen = identity(self._root / found.path)
        known = self._parsed.get(found.path)
        if known is None or known[0] != seen:
            try:
                value = self._read(found)
            except InvalidInput:
                if known is None or not may_be_older:
                    raise
                return known[1]  # it is being written
            is_state = isinstance(value, dict)
            entries = check_entries([{"step": 0, **value}] if is_state else value)
            file = HistoryFile([], value) if is_state else HistoryFile(entries)
            known = self._parsed[found.path] = seen, file
        return known[1]

    def _entries(self, name: str, run: RunManifest) -> Entries:
        stream = run.stream(name)
        segments = stream.segments if stream else ()
        known = self._held.get(name)
        if known is None or known[0] != segments:
            held = Stream(self._committer, name).read() if segments else []
            known = self._held[name] = segments, held
        return known[1]

    def _time_ns(self, found: Found) -> int:
        with suppress(OSError):  # it was removed meanwhile
            return (self._root / found.path).stat().st_mtime_ns
        return 0


def _agreeing(one: Entries, other: Entries) -> int:
    """Return the number of first entries that two lists share."""
    count = min(len(one), len(other))
    if one[:count] == other[:count]:
        return count
    return next((at for at in range(count) if not _same(one[at], other[at])), count)


def _same(one: object, other: object) -> bool:
    """Return whether two entries are equal; NaN equals NaN here."""
    return one == other or json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
