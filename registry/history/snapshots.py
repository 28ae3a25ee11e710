"""Snapshots of a run: the compact run as a file, so that opening it need not read its whole log.

Owns the format and its older versions, decides when a snapshot is due, and encodes one without
encoding unchanged records again. A snapshot is a cache: one that does not fit is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise

from holdfast.backends import ObjectInfo
from holdfast.backends.limits import max_record_bytes
from holdfast.registry.errors import IntegrityError, ObjectNotFound, RegistryError
from holdfast.registry.history.actions import SetStatus, line_digest
from holdfast.registry.history.replay import RunManifest, Slot
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
#: Kept checkpoints that each of these slots pays for; the second number at the end of a training.
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
_SNAPSHOTS_TRIED = 4
#: Snapshots of a run that stay: the newest, and one in case it cannot be read.
_SNAPSHOTS_KEPT = 2
_LISTS = ("checkpoints", "places", "pins", "pool")


class Snapshots:
    """The snapshots of one run."""

    def __init__(self, store: Store, run_id: str, newest: int = -1) -> None:
        self._store = store
        self._run_id = run_id
        self._lines: dict[int, tuple[Record, bytes]] = {}
        self.newest = newest  # slot of the newest known one; -1 without one

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
        if header not in [snapshot_header(slot, version) for version in versions]:
            return None
        try:
            run = RunManifest.decode(body, where=snapshot_key(self._run_id, slot.number))
        except (IntegrityError, ValueError):
            return None
        if (run.run_id, run.next_slot) != (self._run_id, slot.number + 1):
            return None
        if not _is_coherent(run):
            return None
        if slot.commits and line_digest(slot.commits[-1][0]) != run.head:
            return None
        return run

    def is_due(self, run: RunManifest, slot: Slot, every: int) -> bool:
        """Return whether the log has grown enough since the newest snapshot for another one.

        Opening a run reads the slots after its newest snapshot, so snapshots are written often.
        Each has all kept checkpoints, so it is not due before it is small beside the slots and
        tensors that were written meanwhile. Most runs that people look at have ended, so those may
        have larger ones.
        """
        grown = slot.number - self.newest
        ends = _ends_training(slot)
        if grown < (min(every, _EVERY_AT_END) if ends else every):
            return False
        tensor_bytes = sum(one.size_bytes for one in run.checkpoints[-grown:])
        paid = grown * (_KEPT_PER_SLOT_AT_END if ends else _KEPT_PER_SLOT)
        paid += tensor_bytes // _TENSOR_BYTES_PER_KEPT
        return len(run.checkpoints) <= paid or grown >= _SLOTS_AT_MOST

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

    A collection deletes them, after it has read the whole log; see docs/spec.md, section 13.
    """
    return listed[_SNAPSHOTS_KEPT:]


def _is_coherent(run: RunManifest) -> bool:
    """Return whether the parts of a run from a snapshot are consistent.

    The run was created, its numbers ascend, and everything that is named by number exists. A replay
    of the log always fulfils this, but anybody who can write to the store can make a snapshot.
    """
    numbers = [checkpoint.n for checkpoint in run.checkpoints]
    versions = [entry.version for entry in run.pool]
    named = {pin.checkpoint for pin in run.pins if pin.kind in ("gate", "tag")}
    named |= {one.checkpoint for one in run.holds or () if one.checkpoint is not None}
    return (
        (run.created is not None) == (run.commits > 0)
        and _ascend([0, *numbers, max(run.commits, 1)])
        and _ascend([0, *versions, run.next_version])
        # A gate may name a checkpoint that is evicted; of those a compact run has the number.
        and all(n in run.by_n or (n is not None and run.is_evicted(n)) for n in named)
    )


def _ascend(numbers: list[int]) -> bool:
    return all(first < second for first, second in pairwise(numbers))
