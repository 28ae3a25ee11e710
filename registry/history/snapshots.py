"""Snapshots of a run: the compact run as a file, so that opening it need not read its whole log.

Owns the format and its older versions, decides when a snapshot is due, and encodes one without
encoding unchanged records again. The older records of a long run are in parts, files that later
snapshots name again. A snapshot is a cache: one that does not fit is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from holdfast.backends import ObjectInfo
from holdfast.backends.limits import max_record_bytes
from holdfast.registry.errors import IntegrityError, ObjectNotFound, RegistryError, StorageError
from holdfast.registry.history.actions import SetStatus, line_digest
from holdfast.registry.history.replay import (
    PART_NAMES,
    PartRef,
    RecentRun,
    RunManifest,
    Slot,
    SnapshotPart,
)
from holdfast.registry.objects import (
    join_lines,
    snapshot_key,
    snapshot_prefix,
    snapshot_slot,
    split_lines,
)
from holdfast.registry.store import Store
from holdfast.registry.values import Digest, Record, canonical

#: The least number of slots between snapshots at the end of a training.
_EVERY_AT_END = 4
#: Kept checkpoints and names that each slot pays for; the second number at the end of a training.
_KEPT_PER_SLOT, _KEPT_PER_SLOT_AT_END = 16, 64
#: Bytes of tensors that pay for one kept checkpoint: a thousand times its bytes in a snapshot.
_TENSOR_BYTES_PER_KEPT = 600_000
#: After this number of slots a snapshot is written however large it is.
_SLOTS_AT_MOST = 1024
#: Increase this whenever replay gives another result for the same slots; older snapshots are then
#: ignored.
REPLAY_VERSION = 4
#: Versions whose snapshots hold the complete run, as this version would replay it.
COMPLETE_VERSIONS = (3,)
#: The version of snapshots with parts, and of parts: older programs ignore it. A new way of replay
#: must have a higher one.
PARTED_VERSION = 5
_SNAPSHOTS_TRIED = 4
#: Snapshots of a run that stay: the newest, and one in case it cannot be read.
_SNAPSHOTS_KEPT = 2
_LISTS = ("checkpoints", "places", "pins", "pool")
#: Checkpoints that a snapshot has itself: at most, and how many are left when a part is made.
_RECENT_AT_MOST, _RECENT_LEFT = 128, 64
#: With more records than this that differ from those in the parts, the parts are made again.
_CHANGED_AT_MOST = 64
#: Parts are joined up to this number of checkpoints.
_PART_AT_MOST = 8192
#: A newest snapshot of this slot or a later one, and of this size, may name parts.
PARTED_SLOT, _PARTED_BYTES = 128, 8192


class _Parts:
    """The parts of a snapshot, the oldest first, each with its records."""

    def __init__(
        self, refs: tuple[PartRef, ...] = (), parts: tuple[SnapshotPart, ...] = ()
    ) -> None:
        self.refs, self.parts = refs, parts

    @cached_property
    def known(self) -> set[int]:
        """The ids of their records: a record that changes is another object."""
        return {id(one) for part in self.parts for one in (*part.checkpoints, *part.places)}

    @cached_property
    def placed(self) -> dict[Digest, None]:
        """The manifests that they have a place of, in their order."""
        return {place.manifest: None for part in self.parts for place in part.places}

    @property
    def floor(self) -> int:
        """The least commit number after their checkpoints."""
        return self.parts[-1].checkpoints[-1].n + 1 if self.parts else 1

    @property
    def size(self) -> int:
        """How many checkpoints they have."""
        return sum(len(part.checkpoints) for part in self.parts)


class _Cut(NamedTuple):
    """A run that is divided into parts and the rest."""

    recent: RecentRun
    parts: _Parts
    is_new: bool  # whether the last part is not on the store yet


class Snapshots:
    """The snapshots of one run."""

    def __init__(self, store: Store, run_id: str, newest: int = -1) -> None:
        self._store = store
        self._run_id = run_id
        self._lines: dict[int, tuple[Record, bytes]] = {}
        self._parts = _Parts()  # those that were read or written last
        self.newest = newest  # slot of the newest known one; -1 without one
        #: Whether other writers may have written snapshots since.
        self.is_shared = True

    def listed(self) -> list[int]:
        """Return the slots of the newest few, newest first."""
        prefix = snapshot_prefix(self._run_id)
        found = []
        for info in self._store.backend.list(prefix, limit=_SNAPSHOTS_TRIED):
            if info.size_bytes > max_record_bytes():
                continue  # hostile: no writer makes it so long
            with suppress(RegistryError):
                found.append(snapshot_slot(info.key))
        return found

    def read(self, slot: int) -> Sequence[bytes] | None:
        """Return the header and the body of a snapshot, or `None` if it is invalid."""
        key = snapshot_key(self._run_id, slot)
        try:
            lines = split_lines(self._store.backend.get(key), where=key)
        except (IntegrityError, ObjectNotFound):
            return None
        return lines if len(lines) == 2 else None

    def parse(self, lines: Sequence[bytes], slot: Slot) -> RunManifest | None:
        """Return the run after a slot, or `None` if the snapshot does not fit the slot."""
        header, body = lines
        versions = (REPLAY_VERSION, *COMPLETE_VERSIONS)
        is_parted = header == snapshot_header(slot, PARTED_VERSION)
        if not is_parted and header not in [snapshot_header(slot, one) for one in versions]:
            return None
        try:
            kind = RecentRun if is_parted else RunManifest
            run = kind.decode(body, where=snapshot_key(self._run_id, slot.number))
        except (IntegrityError, ValueError):
            return None
        if (run.run_id, run.next_slot) != (self._run_id, slot.number + 1):
            return None
        if not is_coherent(run):
            return None
        if slot.commits and line_digest(slot.commits[-1][0]) != run.head:
            return None
        return run

    def join(self, recent: RecentRun) -> RunManifest | None:
        """Return the whole run, or `None` if a part is absent or another one."""
        try:
            parts = tuple(self._store.pools.small.map(self._read_part, recent.parts))
        except (IntegrityError, ObjectNotFound, ValueError):
            return None
        self._parts = _Parts(recent.parts, parts)
        whole = recent.joined(parts)
        is_whole = len(whole.checkpoints) == len(recent.checkpoints) + recent.older
        return whole if is_whole and is_coherent(whole) else None

    def _read_part(self, ref: PartRef) -> SnapshotPart:
        key = snapshot_key(self._run_id, ref.number)
        data = self._store.backend.get(key)
        if Digest.of(data) != ref.digest:
            raise IntegrityError("another part has this name", where=key)
        _, line = split_lines(data, where=key)
        return SnapshotPart.decode(line, where=key)

    def write(self, run: RunManifest, slot: Slot, every: int, *, at_once: bool) -> None:
        """Write a snapshot after a slot if it is due."""
        if not at_once and not self._has_grown(slot, every):
            return
        if self.is_shared and len(run.checkpoints) > _RECENT_AT_MOST:
            try:
                self._meet_others(slot)
            except StorageError:
                return
            if not at_once and not self._has_grown(slot, every):
                return
        due = at_once or self.is_due(run, slot, every)
        if not due and not self._is_paid(run, slot, 0):
            return
        cut = self._cut(run, anew=due)
        if cut is None and not due:
            return
        files = {slot.number: self.encode(run, slot)} if cut is None else {}
        if cut is not None:
            if cut.is_new:
                files[cut.parts.refs[-1].number] = _part_file(cut.parts.parts[-1])
            header = snapshot_header(slot, PARTED_VERSION)
            files[slot.number] = join_lines([header, self.body(cut.recent)])
        # A snapshot is a cache: the commit is valid even if this fails.
        with suppress(StorageError):
            for number, data in files.items():
                self._store.backend.put(snapshot_key(self._run_id, number), data)
            self._parts = _Parts() if cut is None else cut.parts
        self.newest = slot.number

    def _meet_others(self, slot: Slot) -> None:
        """Leave the parts to another writer whose snapshot is newer: both use the same names."""
        newest = max((one for one in self.listed() if one <= slot.number), default=-1)
        if newest > self.newest:
            self._parts, self.newest = _Parts(), newest
        self.is_shared = False

    def _has_grown(self, slot: Slot, every: int) -> bool:
        least = min(every, _EVERY_AT_END) if _ends_training(slot) else every
        return slot.number - self.newest >= least

    def is_due(self, run: RunManifest, slot: Slot, every: int) -> bool:
        """Return whether the log has grown enough for a snapshot with all kept checkpoints.

        Opening a run reads the slots after its newest snapshot, so snapshots are written often.
        One with all checkpoints is not due before it is small beside the slots and tensors that
        were written meanwhile. Most runs that people look at have ended, so those may have larger
        ones.
        """
        return self._has_grown(slot, every) and self._is_paid(run, slot, len(run.checkpoints))

    def _is_paid(self, run: RunManifest, slot: Slot, checkpoints: int) -> bool:
        """Return whether a snapshot of this size is cheap for the slots since the last one."""
        kept = checkpoints + len(run.pins) + len(run.notes or ())
        grown = slot.number - self.newest
        tensor_bytes = sum(one.size_bytes for one in run.checkpoints[-grown:])
        paid = grown * (_KEPT_PER_SLOT_AT_END if _ends_training(slot) else _KEPT_PER_SLOT)
        paid += tensor_bytes // _TENSOR_BYTES_PER_KEPT
        return kept <= paid or grown >= _SLOTS_AT_MOST

    def _cut(self, run: RunManifest, *, anew: bool) -> _Cut | None:
        """Divide a run that keeps many checkpoints; its parts stay if only a few records differ.

        If more differ, all parts are made `anew`, which takes as long as a whole snapshot, or none.
        """
        if len(run.checkpoints) <= _RECENT_AT_MOST:
            return None
        cut = self._divide(run, self._parts) if self._parts.parts else None
        return cut or (self._divide(run, _Parts()) if anew else None)

    def _divide(self, run: RunManifest, parts: _Parts) -> _Cut | None:
        """Divide a run; return `None` if that does not fit these parts."""
        is_anew = not parts.parts
        own = [one for one in run.checkpoints if id(one) not in parts.known]
        fresh = [one for one in own if one.n >= parts.floor]
        if not is_anew and (
            len(own) - len(fresh) > _CHANGED_AT_MOST
            or len(fresh) < _RECENT_LEFT // 2
            or parts.size > 2 * len(run.checkpoints)
        ):
            return None
        is_new = is_anew or len(fresh) > _RECENT_AT_MOST
        if is_new:
            parts = self._with_part(run, parts, fresh[-_RECENT_LEFT].n)
            own = [one for one in run.checkpoints if id(one) not in parts.known]
        places = [one for one in run.places if id(one) not in parts.known]
        again = [one.manifest for one in places if one.manifest in parts.placed]
        # Readers join the places in this order; what has moved meanwhile fits no part.
        order = [manifest for manifest in parts.placed if manifest in run.held]
        order += [one.manifest for one in places if one.manifest not in parts.placed]
        if len(again) > _CHANGED_AT_MOST or order != [one.manifest for one in run.places]:
            return None
        fields = run.shared(RunManifest) | {"checkpoints": tuple(own), "places": tuple(places)}
        older = len(run.checkpoints) - len(own)
        recent = RecentRun.unchecked(**fields, floor=parts.floor, older=older, parts=parts.refs)
        return _Cut(recent, parts, is_new)

    def _with_part(self, run: RunManifest, parts: _Parts, floor: int) -> _Parts:
        """Return the parts with one more, of the checkpoints before `floor`.

        It takes in the parts before it that are no longer, so that there are few.
        """
        kept, since = list(parts.parts), parts.floor
        size = sum(since <= one.n < floor for one in run.checkpoints)
        while kept and len(kept[-1].checkpoints) <= min(size, _PART_AT_MOST - size):
            last = kept.pop()
            size, since = size + len(last.checkpoints), last.checkpoints[0].n
        taken = tuple(one for one in run.checkpoints if since <= one.n < floor)
        before = _Parts(parts.refs[: len(kept)], tuple(kept))
        rest = [place for place in run.places if id(place) not in before.known]
        manifests = {one.manifest for one in taken}
        last_at = max((at for at, one in enumerate(rest) if one.manifest in manifests), default=-1)
        made = SnapshotPart.unchecked(checkpoints=taken, places=tuple(rest[: last_at + 1]))
        used = [one.number for one in (*parts.refs, *self._parts.refs)]
        start = max(used[-1:], default=-1) + 1
        numbers = (number % PART_NAMES for number in range(start, start + PART_NAMES))
        number = next(number for number in numbers if number not in used)
        ref = PartRef(number=number, digest=Digest.of(_part_file(made)))
        return _Parts((*before.refs, ref), (*before.parts, made))

    def encode(self, run: RunManifest, slot: Slot) -> bytes:
        """Return the snapshot after a slot."""
        return join_lines([snapshot_header(slot, REPLAY_VERSION), self.body(run)])

    def body(self, run: RunManifest) -> bytes:
        """Encode a run as `run.encode()` does, without encoding unchanged records again."""
        before, self._lines = self._lines, {}
        rest = run.to_json(without=_LISTS)
        parts = {name: canonical.encode(value) for name, value in rest.items()}
        for name in _LISTS:
            records: tuple[Record, ...] = getattr(run, name)
            parts[name] = b"[" + b",".join(self._encoded(records, before)) + b"]"
        return (
            b"{"
            + b",".join(b'"%b":%b' % (name.encode(), parts[name]) for name in sorted(parts))
            + b"}"
        )

    def _encoded(
        self, records: Sequence[Record], before: dict[int, tuple[Record, bytes]]
    ) -> Iterator[bytes]:
        for record in records:
            # Keep the record: its id could be reused after it is freed.
            known = before.get(id(record)) or (record, record.encode())
            self._lines[id(record)] = known
            yield known[1]


def _ends_training(slot: Slot) -> bool:
    return any(
        isinstance(action, SetStatus) and action.status != "running"
        for _, commit in slot.commits
        for action in commit.actions
    )


def _part_file(part: SnapshotPart) -> bytes:
    header = {"format": "holdfast.snapshot/1", "replay": PARTED_VERSION}
    return join_lines([canonical.encode(header), part.encode()])


def snapshot_header(slot: Slot, version: int) -> bytes:
    """Return the first line of a snapshot after a slot."""
    # The slot's own digest ties the snapshot to this log and to no other of the same name.
    tie = Digest.of(slot.data).hex()
    return canonical.encode(
        {
            "format": "holdfast.snapshot/1",
            "replay": version,
            "slot": slot.number,
            "slot_digest": tie,
        }
    )


def stale_snapshots(listed: Sequence[ObjectInfo]) -> Sequence[ObjectInfo]:
    """Return the snapshots of a run that newer ones have replaced.

    A collection deletes them, after it has read the whole log; see docs/spec.md, section 13. Files
    that may be parts of the newest stay.
    """
    newest = listed[0] if listed else None
    is_parted = newest is not None and (
        snapshot_slot(newest.key) >= PARTED_SLOT and newest.size_bytes >= _PARTED_BYTES
    )
    least = PART_NAMES if is_parted else 0
    return [one for one in listed[_SNAPSHOTS_KEPT:] if snapshot_slot(one.key) >= least]


def is_coherent(run: RunManifest) -> bool:
    """Return whether the parts of a run from a snapshot are consistent.

    The run was created, its numbers ascend, and everything that is named by number exists. A replay
    of the log always fulfils this, but anybody who can write to the store can make a snapshot.
    """
    numbers = [checkpoint.n for checkpoint in run.checkpoints]
    versions = [entry.version for entry in run.pool]
    named = {pin.checkpoint for pin in run.pins if pin.kind in ("gate", "tag")}
    named |= {one.checkpoint for one in run.holds or () if one.checkpoint is not None}
    named |= {one.checkpoint for one in run.notes or () if one.checkpoint is not None}
    return (
        (run.created is not None) == (run.commits > 0)
        and _ascend([0, *numbers, max(run.commits, 1)])
        and _ascend([0, *versions, run.next_version])
        # A gate may name a checkpoint that is evicted; of those a compact run has the number.
        and all(
            n in run.by_n or (n is not None and (0 < n < run.floor or run.is_evicted(n)))
            for n in named
        )
    )


def _ascend(numbers: list[int]) -> bool:
    return all(first < second for first, second in pairwise(numbers))
