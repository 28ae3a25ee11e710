"""Streams: append-only histories beside the checkpoints of a run.

Owns appending outside of saves, reading by step, and archiving. `segments` defines segments;
`appends` writes and reads them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from holdfast.registry import pytree
from holdfast.registry.curation.streams.appends import (
    PlannedAppend,
    plan_append,
    read_segments,
    stream_lifetime,
)
from holdfast.registry.curation.streams.segments import check_entries, pack_entries
from holdfast.registry.errors import Conflict, InvalidInput, NotFound, StoreUnavailable
from holdfast.registry.history import MAX_STEP, check_name, check_step
from holdfast.registry.history.actions import Action, AppendStream, ArchiveStream, Lifetime
from holdfast.registry.history.replay import RunManifest, Segment, StreamRecord
from holdfast.registry.tables import entry_table
from holdfast.registry.values import Digest, canonical, near, one_of, unknown
from holdfast.registry.writing import Committer, Composed, Written


class Stream:
    """One stream of a run; it need not exist yet. Entries are read only by `read`.

    Entries are mappings of strings to plain values, each with a whole `step`. They are returned in
    the order in which they were appended, every type and bit as it was. Pass entries of a
    checkpoint to `Run.save(streams=...)`: a training that goes back takes them back too.

    Attributes:
        name: Its name.
    """

    def __init__(self, committer: Committer, name: str) -> None:
        self._committer = committer
        self._attempt: AppendAttempt | None = None
        self.name = check_name(name, "a stream")

    def __repr__(self) -> str:
        return f"<Stream {self._where}>"

    @property
    def count(self) -> int:
        """The present number of entries, without archives."""
        stream = self._current()
        return 0 if stream is None else stream.count

    @property
    def lifetime(self) -> Lifetime | None:
        """`forever` or `resettable`; `None` before it is known."""
        return stream_lifetime(self._committer.log.refresh(), self.name)

    @property
    def archives(self) -> dict[str, int]:
        """Labels of its archives, oldest first, each with the number of entries."""
        stream = self._current()
        if stream is None:
            return {}
        return {archive.label: archive.count for archive in stream.archives}

    def append(
        self,
        entries: Mapping[str, Any] | Iterable[Mapping[str, Any]],
        *,
        lifetime: Lifetime | None = None,
    ) -> int:
        """Append entries in one commit of their own. This needs no writer token.

        If the outcome is unknown (`StoreUnavailable`), append the same entries again through the
        same object: they are appended once. Another object or process cannot tell a retry from new,
        equal entries; it should compare `count` first.

        Args:
            entries: One entry, or several, or none.
            lifetime: `forever` (the default) or `resettable`, for a new stream that the run's
                preset does not declare.

        Returns:
            The number of entries in the stream afterwards.

        Raises:
            InvalidInput: An entry has no step or is no mapping; the run declares streams, but not
                this one; or the stream has another lifetime.
            UnsupportedValue: A value cannot be stored; the message names its path.
            Conflict: Other writers interfered too often, or the run was dropped.
            StoreUnavailable: The store did not say whether the entries were appended.
        """
        if lifetime is not None:
            one_of(lifetime, Lifetime, what="not a lifetime")
        checked = check_entries([entries] if isinstance(entries, Mapping) else entries)
        if not checked:
            return self.count
        attempt = self._attempt
        if attempt is None or attempt.entries != _fingerprint(checked):
            attempt = AppendAttempt(self._committer, self.name)
        try:
            run = attempt.run(checked, lifetime)
        except StoreUnavailable:
            attempt.entries = attempt.entries or _fingerprint(checked)
            self._attempt = attempt
            raise
        self._attempt = None
        stream = run.stream(self.name)
        return 0 if stream is None else stream.count

    def read(
        self,
        first_step: int | None = None,
        last_step: int | None = None,
        *,
        archive: str | None = None,
    ) -> list[dict[str, Any]]:
        """Return the present entries, in the order in which they were appended.

        Args:
            first_step: Only entries of this step or a later one.
            last_step: Only entries of this step or an earlier one.
            archive: Label of an archive to read instead of the stream.

        Raises:
            InvalidInput: A bound is not a step, or the first one is greater than the last one.
            NotFound: There is no such stream or archive.
            IntegrityError: A segment is damaged or missing; nothing is returned.
        """
        low = 0 if first_step is None else check_step(first_step)
        high = MAX_STEP if last_step is None else check_step(last_step)
        if low > high:
            raise InvalidInput(
                "the first step is greater than the last one",
                where=self._where,
                expected="the lower bound first",
                found=f"{low} to {high}",
            )
        return read_segments(self._committer.writer, self.name, self._segments(archive), low, high)

    def to_arrow(
        self,
        first_step: int | None = None,
        last_step: int | None = None,
        *,
        archive: str | None = None,
    ) -> Any:
        """Return the entries as a `pyarrow.Table`: a row for each, a column for each key.

        `step` is int64 and the first column; a key that an entry lacks is null. A column has the
        type of its values: bool, string, int64 or float64. Others are strings of JSON.

        Args:
            first_step: As for `read`.
            last_step: As for `read`.
            archive: As for `read`.

        Raises:
            InvalidInput: As for `read`, or pyarrow is not installed.
            NotFound: As for `read`.
            IntegrityError: As for `read`.
        """
        return entry_table(self.read(first_step, last_step, archive=archive))

    def archive(self, label: str) -> int:
        """Archive the entries of a resettable stream for ever, and empty it.

        A repeated call changes nothing, as long as nothing new was appended.

        Args:
            label: A new label; `read(archive=label)` returns the entries.

        Returns:
            The number of archived entries.

        Raises:
            InvalidInput: The stream is kept for ever, or the label is not legal.
            NotFound: There is no such stream.
            Conflict: The label names another archive, or the run was dropped.
        """
        check_name(label, "an archive")
        self._committer.log.refresh()

        def compose(run: RunManifest) -> Sequence[Action] | None:
            stream = self._resettable(run)
            archived = stream.archive(label)
            if archived is not None:
                if stream.count == 0:
                    return None
                raise Conflict(
                    "an archive of this label exists already",
                    where=f"{self._where}: {label}",
                    found=f"{archived.count} entries",
                    hint="Choose another label.",
                )
            return [ArchiveStream(stream=self.name, label=label)]

        stream = self._committer.commit(compose).stream(self.name)
        archived = stream and stream.archive(label)
        assert archived is not None  # `compose` has archived it
        return archived.count

    def _resettable(self, run: RunManifest) -> StreamRecord:
        if stream_lifetime(run, self.name) == "forever":
            raise InvalidInput(
                "this stream is kept for ever",
                where=self._where,
                expected="a resettable stream",
                hint="Its lifetime was fixed by the run's preset, or by the first append.",
            )
        stream = run.stream(self.name)
        if stream is None:
            raise self._absent(run)
        return stream

    def _segments(self, archive: str | None) -> tuple[Segment, ...]:
        stream = self._current()
        if archive is not None:
            found = stream and stream.archive(archive)
            if not found:
                raise unknown("no such archive", self._where, archive, self.archives, "none yet")
            return found.segments
        run = self._committer.log.run
        if stream is None and stream_lifetime(run, self.name) is None:
            raise self._absent(run)
        return () if stream is None else stream.segments

    def _current(self) -> StreamRecord | None:
        run = self._committer.log.refresh()
        stream_lifetime(run, self.name)  # refuses a stream that the run does not declare
        return run.stream(self.name)

    def _absent(self, run: RunManifest) -> NotFound:
        known = [stream.name for stream in run.streams]
        return NotFound("no such stream", where=self._where, hint=near(self.name, known))

    @property
    def _where(self) -> str:
        return f"{self._committer.log.run_id}: stream {self.name}"


#: The streams of `run.log`: of its numbers, and of its texts and pictures.
LOG, SAMPLES = "log", "log-samples"


def each_step_once(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return logged entries, each step once, in the order of the steps.

    A training that crashed logs the steps after its checkpoint again: an entry of a lower step than
    the one before it supersedes those from its step on. Entries of one step are joined.
    """
    found: list[dict[str, Any]] = []
    for entry in entries:
        if found and found[-1]["step"] > entry["step"]:
            while found and found[-1]["step"] >= entry["step"]:
                found.pop()
        if found and found[-1]["step"] == entry["step"]:
            found[-1] |= entry
        else:
            found.append(dict(entry))
    return found


class Streams:
    """The streams of a run: `run.streams["losses"]` is one; iterating yields their names."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer

    def __getitem__(self, name: str) -> Stream:
        """Return a stream; it need not exist yet: its first entry makes it."""
        return Stream(self._committer, name)

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the streams that exist as of now."""
        return iter([stream.name for stream in self._committer.log.refresh().streams])

    def list(self) -> list[Stream]:
        """Return the streams that exist as of now."""
        return [self[name] for name in self]


class AppendAttempt:
    """An append whose outcome may be unknown, so that a retry can find out."""

    def __init__(
        self,
        committer: Committer,
        name: str,
        commit: Callable[[Composed], RunManifest] | None = None,
    ) -> None:
        self._committer = committer
        self._name = name
        self._commit = commit or committer.commit
        self._tried: list[tuple[int, AppendStream]] = []
        #: Digest of the entries; `None` unless the outcome is unknown.
        self.entries: Digest | None = None

    def run(self, entries: Sequence[Mapping[str, Any]], lifetime: Lifetime | None) -> RunManifest:
        """Append the entries, unless an earlier attempt has landed."""
        unknown = tuple(self._tried)
        planned: list[PlannedAppend] = []

        def plan() -> Sequence[Written]:
            # Merge only at the first attempt: with other writers, merging might never end.
            run, merge = self._committer.log.run, not planned
            planned.append(
                plan_append(self._committer.writer, run, self._name, entries, lifetime, merge=merge)
            )
            return [planned[-1].written]

        def compose(run: RunManifest) -> Sequence[Action] | None:
            if any(self._has_landed(run, *one) for one in unknown):
                return None
            action = planned[-1].action(run)
            # `run` is after the claims of the same slot.
            self._tried.append((self._committer.log.run.next_slot, action))
            return [action]

        return self._commit(Composed(compose, plan))

    def _has_landed(self, run: RunManifest, number: int, action: AppendStream) -> bool:
        if run.next_slot <= number:
            return False
        slot = next(self._committer.log.slots(number), None)
        commits = () if slot is None else slot.commits
        return any(action in commit.actions for _, commit in commits)


def _fingerprint(entries: Iterable[Mapping[str, Any]]) -> Digest:
    """Return a digest that is equal only for equal entries, types and bits included."""
    (component,) = pytree.flatten(pack_entries(entries)).components
    hashed = hashlib.sha256(canonical.encode(component.skeleton))
    for leaf in component.leaves:
        hashed.update(leaf.buffer())
    return Digest(hashed.digest())
