"""Read the logs of a registry as far as possible, and report their problems.

Collection stops at the first file that it cannot read; a verification goes on with the slots before
it. Snapshots are not trusted here: they are compared with the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from holdfast.backends.escape import quoted
from holdfast.registry import pytree
from holdfast.registry.errors import Malformed, ObjectNotFound, RegistryError, StorageError
from holdfast.registry.history import (
    COMPLETE_VERSIONS,
    PARTED_VERSION,
    REPLAY_VERSION,
    CommitSlot,
    RunLog,
    Slots,
    Snapshots,
    kept_ref,
)
from holdfast.registry.history.actions import Place, line_digest
from holdfast.registry.history.replay import (
    PART_NAMES,
    NeedsHistory,
    RecentRun,
    RunManifest,
    Slot,
    SnapshotPart,
    advance,
)
from holdfast.registry.objects import (
    log_prefix,
    parse_number,
    slot_key,
    snapshot_key,
    snapshot_slot,
    split_lines,
)
from holdfast.registry.store import Store, gaps
from holdfast.registry.store.heads import Head
from holdfast.registry.upkeep.data_pass import fault_of
from holdfast.registry.upkeep.findings import Finding, Need
from holdfast.registry.upkeep.shelf import Shelf
from holdfast.registry.upkeep.verify_notes import Base, Checked
from holdfast.registry.values import Digest, Json, canonical

#: Slots folded in together, and fetched ahead.
_TOGETHER = 512
_AHEAD = 512
_NO_VALUE = "It is lost; a program can still read the tensors of the checkpoint."
_MEND_LOG = (
    "Restore the slot from a backup of this registry, byte for byte; a mirror's slots name the "
    "mirror's objects and cannot replace it. Without a backup: `holdfast sync` the run from a "
    "mirror into a new registry."
)
_MEND_END = (
    "Restore the slot from a backup of this registry, byte for byte. Without a backup: `holdfast "
    "trust` and `holdfast sync MIRROR REGISTRY` bring the commits back from a mirror; then "
    "`holdfast gc --accept {}` takes the log as it is."
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A run to read, as a unit of work."""

    run_id: str  # its name
    #: Slots of snapshots that were listed before; they are checked on the way.
    snapshots: tuple[int, ...] = ()
    #: Numbers of commits after which the link of the history is wanted.
    commits: frozenset[int] = frozenset()
    #: The slot of which the digest is wanted.
    slot: int | None = None
    base: Base | None = None  # what to begin the replay with
    keeps: bool = False  # whether the next verification may begin with this replay


@dataclass(frozen=True, slots=True)
class History:
    """A run as far as its log can be read, up to the first slot that cannot be used."""

    run_id: str  # its name
    commits: int  # number of its commits
    slots: int  # number of its slots
    epoch: int  # the newest epoch that marks it
    checkpoints: int  # number of its checkpoints that are not evicted
    head: Head | None  # how far the log goes; `None` before the first commit
    links: Mapping[int, Digest]  # links of the history after the requested numbers of commits
    digest: Digest | None  # digest of the requested slot, if it was read
    needs: tuple[Need, ...]  # the states that it holds
    findings: tuple[Finding, ...]  # what is wrong with its log and its snapshots
    size_bytes: int  # bytes that were read
    kept: tuple[Checked, bytes] | None  # for the next verification, if nothing is wrong


class NeededStates:
    """The states that runs hold; not in memory."""

    def __init__(self) -> None:
        self._by_run = Shelf[bytes]()
        self.unplaced: set[str] = set()  # runs that give a state no place

    def take(self, history: History) -> None:
        """Take the states of a run, in the place of those that were taken before."""
        self._by_run[history.run_id] = b"\n".join(one.encode() for one in history.needs)
        is_placed = all(one.place is not None for one in history.needs)
        (self.unplaced.discard if is_placed else self.unplaced.add)(history.run_id)

    def of(self, run_ids: Iterable[str] | None = None) -> Iterator[Need]:
        """Yield the states of some runs, or of all by name; none may be taken meanwhile."""
        for run_id in self._by_run if run_ids is None else run_ids:
            lines = (self._by_run.get(run_id) or b"").split(b"\n")
            yield from (Need.parse(one, where=run_id) for one in lines if one)

    def places(self, run_ids: Iterable[str] | None = None) -> Iterator[tuple[Place, Need]]:
        """Yield those that have a place."""
        return ((one.place, one) for one in self.of(run_ids) if one.place is not None)


def read_history(store: Store, asked: Asked) -> History:
    """Replay a run to its head, or to the first slot that cannot be read.

    It begins with the first slot, unless the last verification gives a later beginning; if then
    anything is wrong, it is read from its first slot.
    """
    return read_run(store, asked)[0]


def read_run(store: Store, asked: Asked) -> tuple[History, RunManifest]:
    """Return the history of a run, and its replay, as `read_history` does."""
    if asked.base is not None:
        with suppress(RegistryError, NeedsHistory, ValueError):
            reading = _Reading(store, asked.base.replay(), asked)
            history = reading.read()
            if not history.findings:
                return history, reading.run
        asked = replace(asked, base=None)
    empty = RunManifest(run_id=asked.run_id)
    try:
        # Compact, with only the numbers of evicted checkpoints: many runs are replayed at once.
        reading = _Reading(store, empty.compact(), asked)
        return reading.read(), reading.run
    except NeedsHistory:
        reading = _Reading(store, empty, asked)
        return reading.read(), reading.run


class _Reading:
    def __init__(self, store: Store, empty: RunManifest, asked: Asked) -> None:
        self._store = store
        self._run_id = empty.run_id
        self._asked, self._base = asked, None if asked.base is None else asked.base.seen
        self._start = empty.next_slot
        self._snapshots = frozenset(slot for slot in asked.snapshots if slot >= self._start)
        self._commits = asked.commits
        self._findings: list[Finding] = []
        self._links: dict[int, Digest] = {}
        self._size_bytes = 0
        self._newest: CommitSlot | None = None
        self._log_bytes, self._modified_ms = 0, 0
        self.run = empty
        if self._base is not None and empty.head is not None:
            self._newest = CommitSlot(self._base.commit, self._base.digest)
            self._log_bytes, self._modified_ms = self._base.size_bytes, self._base.modified_ms
            self._links[empty.commits] = empty.head
        self._digest = self._digest_before()

    def read(self) -> History:
        numbers = self._numbers()
        end = numbers[-1] + 1 if numbers else self._start
        key_of = partial(slot_key, self._run_id)
        gap = next(gaps(self._store.backend, numbers, key_of, self._start), None)
        try:
            self._fold(end if gap is None else gap)
            if gap is not None:
                raise Malformed(
                    "the log has a gap",
                    where=self._run_id,
                    expected=f"slot {gap}",
                    found=f"slot {next(number for number in numbers if number > gap)}",
                )
        except RegistryError as error:
            summary = fault_of(error) if isinstance(error, StorageError) else error.summary
            self._report(summary or "", self.run.next_slot)
        self._check_tail(end)
        self._check_values()
        return self._history()

    def _history(self) -> History:
        run = self.run
        needs = (
            Need.unchecked(
                run_id=run.run_id,
                manifest=manifest,
                place=run.by_manifest.get(manifest),
                parts=run.thinned.get(manifest),
                refs=tuple(f"{run.run_id}/{ref}" for ref in refs),
            )
            for manifest, refs in run.holders().items()
        )
        return History(
            run_id=run.run_id,
            commits=run.commits,
            slots=run.next_slot,
            epoch=run.epoch,
            checkpoints=sum(one.evicted is None for one in run.checkpoints),
            head=self._head(),
            links=self._links,
            digest=self._digest,
            needs=tuple(needs),
            findings=tuple(self._findings),
            size_bytes=self._size_bytes,
            kept=None if self._findings or not self._asked.keeps else self._kept(),
        )

    def _kept(self) -> tuple[Checked, bytes] | None:
        if self._newest is None:
            return None
        seen = Checked.unchecked(
            run=self._run_id,
            slots=self.run.next_slot,
            size_bytes=self._log_bytes,
            modified_ms=self._modified_ms,
            commits=self.run.commits,
            commit=self._newest.number,
            digest=self._newest.digest,
            snapshots=self._asked.snapshots,
        )
        base = self._asked.base
        is_same = base is not None and base.seen.slots == seen.slots
        return seen, base.held if base and is_same else self.run.compact().encode()

    def _digest_before(self) -> Digest | None:
        """Return the digest of the requested slot, if the replay begins after it."""
        slot = self._asked.slot
        if self._base is None or slot is None or slot >= self._start:
            return None
        if slot == self._base.commit:
            return self._base.digest
        found = Slots(self._store, self._run_id).get(slot)
        return None if found is None else Digest.of(found.data)

    def _head(self) -> Head | None:
        run = self.run
        if run.head is None:
            return None
        slot = None if self._newest is None else self._newest.number
        return Head(
            run=run.run_id, commits=run.commits, head=run.head, slots=run.next_slot, slot=slot
        )

    def _numbers(self) -> list[int]:
        if self._asked.base is not None and self._asked.base.is_unchanged:
            return []
        numbers = []
        after = slot_key(self._run_id, self._start - 1) if self._start else ""
        for info in self._store.backend.list(log_prefix(self._run_id), start_after=after):
            try:
                numbers.append(parse_number(info.key))
            except Malformed:
                continue  # `file_names` reports it
            self._log_bytes += info.size_bytes
            self._modified_ms = max(self._modified_ms, int(info.modified_s * 1000))
        return numbers

    def _fold(self, stop: int) -> None:
        """Fold the slots in, many together; one by one where one of them is not legal."""
        waiting: list[Slot] = []
        try:
            for slot in self._slots(stop):
                waiting.append(slot)
                self._size_bytes += len(slot.data)
                if slot.number in self._snapshots or len(waiting) == _TOGETHER:
                    together, waiting = waiting, []
                    self._take(together)
                    if slot.number in self._snapshots:
                        self._check_snapshot(slot)
        finally:
            self._take(waiting)

    def _slots(self, stop: int) -> Iterator[Slot]:
        log = RunLog(self._store, self._run_id)
        for start in range(self._start, stop, _AHEAD):
            yield from log.fetch(range(start, min(start + _AHEAD, stop)))

    def _take(self, slots: Sequence[Slot]) -> None:
        try:
            self._fold_in(slots)
        except RegistryError:
            for slot in slots:  # up to the one that is not legal
                self._fold_in([slot])
            raise

    def _fold_in(self, slots: Sequence[Slot]) -> None:
        self.run = advance(self.run, slots)
        for slot in slots:
            digest = Digest.of(slot.data)
            if slot.number == self._asked.slot:
                self._digest = digest
            for raw, commit in slot.commits:
                self._newest = CommitSlot(slot.number, digest)
                if commit.n + 1 in self._commits:
                    self._links[commit.n + 1] = line_digest(raw)

    def _check_tail(self, slots: int) -> None:
        """Report a log that ends before its own snapshot: its newest slots were deleted."""
        newest = max(self._snapshots, default=-1)
        if newest >= slots:
            self._report(
                f"a snapshot was taken after slot {newest}, and the log has {slots} slots: its end "
                "is gone",
                slots,
                _MEND_END.format(quoted(self._run_id)),
            )
        for slot in self._snapshots:
            if slot >= self.run.next_slot:
                self._check_snapshot(None, slot)

    def _check_values(self) -> None:
        """Report values in the log that cannot be decoded."""
        run, run_id = self.run, self._run_id
        if run.created is not None:
            advice = "The run's configuration is lost; its checkpoints are not affected."
            self._check_value("config", run.created.config, run_id, advice)
        for one in run.pivots:
            self._check_value("config", one.config, f"{run_id}: pivot {one.name}")
            self._check_value("meta", one.meta, f"{run_id}: pivot {one.name}")
        for record in run.checkpoints:
            ref = f"{run_id}/{kept_ref(record)}"
            self._check_value("meta", record.meta, ref)
            if record.commit_keys is not None:
                self._check_value("commit keys", record.commit_keys.values, ref)

    def _check_value(self, name: str, encoded: Json, ref: str, advice: str = _NO_VALUE) -> None:
        try:
            pytree.check_arrays(name, encoded, ())
            pytree.check_values(name, encoded)
        except Malformed as error:
            self._findings.append(Finding("log", self._run_id, error.summary, (ref,), advice))

    def _report(self, message: str, slot: int, advice: str = _MEND_LOG) -> None:
        affected = (f"{self._run_id} from slot {slot} on",)
        self._findings.append(Finding("log", self._run_id, message, affected, advice))

    def _check_snapshot(self, slot: Slot | None, number: int = -1) -> None:
        key = snapshot_key(self._run_id, slot.number if slot is not None else number)
        try:
            data = self._store.backend.get(key)
        except ObjectNotFound:
            return  # a cache; it may go at any time
        except StorageError as error:
            self._findings.append(_bad_snapshot(key, fault_of(error) or ""))
            return
        self._size_bytes += len(data)
        run = None if slot is None else self.run
        finding = _snapshot_finding(self._store, key, data, self._run_id, slot, run)
        if finding is not None:
            self._findings.append(finding)


def _older(run: RunManifest, floor: int) -> SnapshotPart:
    """Return the older records of a replay, in the place of parts that are absent."""
    kept = tuple(one for one in run.checkpoints if one.n < floor and one.evicted is None)
    return SnapshotPart.unchecked(checkpoints=kept, places=run.places)


def _bad_snapshot(key: str, message: str) -> Finding:
    advice = "A cache, ignored on reading; it may be deleted."
    return Finding("snapshot", key, message, advice=advice, severity="note")


def _snapshot_finding(
    store: Store, key: str, data: bytes, run_id: str, slot: Slot | None, run: RunManifest | None
) -> Finding | None:
    try:
        header, body = split_lines(data, where=key)
        fields = canonical.decode(header, where=key)
        if not isinstance(fields, Mapping) or fields.get("format") != "holdfast.snapshot/1":
            shown = header[:80].decode("utf-8", "replace")
            raise Malformed("not a snapshot", where=key, found=shown)
        is_parted = fields.get("replay") == PARTED_VERSION
        if not is_parted and fields.get("replay") not in (REPLAY_VERSION, *COMPLETE_VERSIONS):
            return None  # written by another version, and ignored by this one
        if is_parted and snapshot_slot(key) < PART_NAMES:
            SnapshotPart.decode(body, where=key)
            return None  # it is compared with the log as a part of a snapshot
        found = (RecentRun if is_parted else RunManifest).decode(body, where=key)
        if snapshot_key(found.run_id, found.next_slot - 1) != key or found.run_id != run_id:
            raise Malformed("a snapshot of another run or slot", where=key)
    except (RegistryError, ValueError) as error:
        return _bad_snapshot(key, str(error))
    if slot is None or run is None or fields.get("slot_digest") != Digest.of(slot.data).hex():
        return None
    if isinstance(found, RecentRun):
        found = Snapshots(store, run_id).join(found) or found.joined([_older(run, found.floor)])
    if found.compact().encode() == run.compact().encode():
        return None
    # Readers trust a snapshot whose slot matches, so a wrong one is worse than a damaged one.
    return Finding(
        "snapshot",
        key,
        "it differs from the log that it was made from",
        (f"{run_id} as it is opened",),
        "Delete this file: it is a cache, and the log counts.",
    )
