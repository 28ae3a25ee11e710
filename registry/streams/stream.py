"""Streams as users hold them: append-only histories beside the checkpoints of a run.

Owns appending outside of saves, reading by step, and archiving. What a segment is made of is the
business of `segments`, what a commit says of one that of `appends`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from holdfast.backends.escape import quoted
from holdfast.registry import pytree
from holdfast.registry.errors import Conflict, InvalidInput, NotFound, StoreUnavailable
from holdfast.registry.history.actions import Action, AppendStream, ArchiveStream, Lifetime
from holdfast.registry.history.log_values import MAX_STEP, check_name, check_step
from holdfast.registry.history.replay import RunManifest, Segment, StreamRecord
from holdfast.registry.streams.appends import (
    PlannedAppend,
    plan_append,
    read_segments,
    stream_lifetime,
)
from holdfast.registry.streams.segments import check_entries, pack_entries
from holdfast.registry.values import canonical
from holdfast.registry.values.digest import Digest
from holdfast.registry.values.suggest import near
from holdfast.registry.writing.change import Composed
from holdfast.registry.writing.committer import Committer
from holdfast.registry.writing.placing import Written


class Stream:
    """One stream of a run; it need not exist yet. Nothing is read before it is asked for.

    Entries are mappings of strings to plain values, each with a whole `step`; they come back in the
    order in which they were appended, every type and bit as it was. Entries that go with a
    checkpoint ride in `Run.save(streams=...)`; coming back to an older checkpoint takes the stream
    back to what it held then.

    Attributes:
        name: Its name.
    """

    def __init__(self, committer: Committer, name: str) -> None:
        self._committer = committer
        self._attempt: _Attempt | None = None
        self.name = check_name(name, "a stream")

    def __repr__(self) -> str:
        return f"<Stream {self._where}>"

    @property
    def count(self) -> int:
        """Entries in it as of now, archives not counted."""
        stream = self._standing()
        return 0 if stream is None else stream.count

    @property
    def lifetime(self) -> Lifetime | None:
        """`forever` or `resettable`; `None` while nothing has said which."""
        return stream_lifetime(self._committer.log.refresh(), self.name)

    @property
    def archives(self) -> dict[str, int]:
        """Labels of what was put aside, oldest first, each with the number of its entries."""
        stream = self._standing()
        if stream is None:
            return {}
        return {archive.label: archive.count for archive in stream.archives}

    def append(
        self,
        entries: Mapping[str, Any] | Iterable[Mapping[str, Any]],
        *,
        lifetime: Lifetime | None = None,
    ) -> int:
        """Append entries in one commit of their own; needs no writer token.

        An answer that the store loses is made up for within the call. Where even that leaves the
        outcome unknown (`StoreUnavailable`), appending the same entries again through the same
        object appends them once; another object, or another process, cannot tell a retry from
        equal entries and appends them again: it should look at `count` first.

        Args:
            entries: One entry, or several; none is nothing to do.
            lifetime: `forever` (as without it) or `resettable`, for a stream that begins here and
                is not declared by the run's preset.

        Returns:
            Entries in the stream afterwards.

        Raises:
            InvalidInput: An entry has no step or is no mapping; the run declares streams and this
                is none of them; or the stream has another lifetime.
            UnsupportedValue: A value cannot be stored; the message names its path.
            Conflict: Other writers came between too often, or the run was dropped.
            StoreUnavailable: The store did not say whether the entries were appended.
        """
        if lifetime is not None and lifetime not in get_args(Lifetime):
            expected = " or ".join(get_args(Lifetime))
            raise InvalidInput("not a lifetime", expected=expected, found=quoted(lifetime))
        checked = check_entries([entries] if isinstance(entries, Mapping) else entries)
        if not checked:
            return self.count
        attempt = self._attempt
        if attempt is None or attempt.entries != _fingerprint(checked):
            attempt = _Attempt(self._committer, self.name)
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
        """Return entries as of now, in the order in which they were appended.

        Args:
            first_step: Only entries of this step or a later one.
            last_step: Only entries of this step or an earlier one.
            archive: Label of what was put aside, instead of what the stream holds.

        Raises:
            InvalidInput: A bound is not a step, or they are the wrong way round.
            NotFound: There is no such stream or archive.
            IntegrityError: A segment is damaged or gone; nothing is returned.
        """
        low = 0 if first_step is None else check_step(first_step)
        high = MAX_STEP if last_step is None else check_step(last_step)
        if low > high:
            raise InvalidInput(
                "the first step is behind the last one",
                where=self._where,
                expected="bounds from below",
                found=f"{low} to {high}",
            )
        return read_segments(self._committer, self.name, self._segments(archive), low, high)

    def archive(self, label: str) -> int:
        """Put what a resettable stream holds aside for good, and begin it anew.

        Repeated before anything new was appended it changes nothing.

        Args:
            label: Given once; `read(archive=label)` finds the entries.

        Returns:
            Entries that were put aside.

        Raises:
            InvalidInput: The stream is kept for ever, or the label is not legal.
            NotFound: There is no such stream.
            Conflict: The label names another archive, or the run was dropped.
        """
        check_name(label, "an archive")
        self._committer.log.refresh()

        def compose(run: RunManifest) -> Sequence[Action] | None:
            stream = self._resettable(run)
            standing = stream.archive(label)
            if standing is not None:
                if stream.count == 0:
                    return None
                raise Conflict(
                    "an archive of this label stands already",
                    where=f"{self._where}: {label}",
                    found=f"{standing.count} entries",
                    hint="Choose another label.",
                )
            return [ArchiveStream(stream=self.name, label=label)]

        stream = self._committer.commit(compose).stream(self.name)
        archived = stream and stream.archive(label)
        assert archived is not None  # compose has seen to it
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
        stream = self._standing()
        if archive is not None:
            known = self.archives
            found = stream and stream.archive(archive)
            if not found:
                raise NotFound(
                    "no such archive",
                    where=f"{self._where}: {archive}",
                    expected=", ".join(known) or "none yet",
                    hint=near(archive, known),
                )
            return found.segments
        run = self._committer.log.run
        if stream is None and stream_lifetime(run, self.name) is None:
            raise self._absent(run)
        return () if stream is None else stream.segments

    def _standing(self) -> StreamRecord | None:
        run = self._committer.log.refresh()
        stream_lifetime(run, self.name)  # refuses what the run does not declare
        return run.stream(self.name)

    def _absent(self, run: RunManifest) -> NotFound:
        known = [stream.name for stream in run.streams]
        return NotFound("no such stream", where=self._where, hint=near(self.name, known))

    @property
    def _where(self) -> str:
        return f"{self._committer.log.run_id}: stream {self.name}"


class _Attempt:
    """Entries on their way, remembered for as long as nobody knows whether they arrived.

    Attributes:
        entries: What they are; `None` while the outcome is not in doubt.
    """

    def __init__(self, committer: Committer, name: str) -> None:
        self._committer = committer
        self._name = name
        self._tried: list[tuple[int, AppendStream]] = []
        self.entries: Digest | None = None

    def run(self, entries: Sequence[Mapping[str, Any]], lifetime: Lifetime | None) -> RunManifest:
        """Append the entries, unless an earlier attempt has done so after all."""
        doubtful = tuple(self._tried)
        planned: list[PlannedAppend] = []

        def plan() -> Sequence[Written]:
            # Beside other writers merging might never come to an end.
            run, merge = self._committer.log.run, not planned
            planned.append(
                plan_append(self._committer, run, self._name, entries, lifetime, merge=merge)
            )
            return [planned[-1].written]

        def compose(run: RunManifest) -> Sequence[Action] | None:
            if any(self._has_landed(run, *one) for one in doubtful):
                return None
            action = planned[-1].action(run)
            self._tried.append((run.next_slot, action))
            return [action]

        return self._committer.commit(Composed(compose, plan))

    def _has_landed(self, run: RunManifest, number: int, action: AppendStream) -> bool:
        if run.next_slot <= number:
            return False
        slot = next(self._committer.log.slots(number), None)
        commits = () if slot is None else slot.commits
        return any(action in commit.actions for _, commit in commits)


def _fingerprint(entries: Iterable[Mapping[str, Any]]) -> Digest:
    """Return a digest that only equal entries have, types and bits included."""
    (component,) = pytree.flatten(pack_entries(entries)).components
    hashed = hashlib.sha256(canonical.encode(component.skeleton))
    for leaf in component.leaves:
        hashed.update(leaf.buffer())
    return Digest(hashed.digest())
