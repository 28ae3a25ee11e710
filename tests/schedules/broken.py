"""The real code with one rule of the protocol taken out of it, each in its own way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import pytest

import holdfast.registry.history.log
import holdfast.registry.upkeep.gc
import holdfast.registry.upkeep.planning
import holdfast.registry.upkeep.sealing
import holdfast.registry.writing.object_writer
from holdfast.backends import ObjectInfo
from holdfast.registry.history.epochs import Epochs
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.objects.keys import Kind, ObjectKey, parse_marker, stem
from holdfast.registry.store.store import Store
from holdfast.registry.upkeep.gc import Collector
from holdfast.registry.upkeep.live import list_run_ids
from holdfast.registry.upkeep.run_notes import Notes
from holdfast.registry.upkeep.sealing import QuietRuns
from holdfast.registry.upkeep.sorted_rows import SPARED, SortedRows, object_rows
from holdfast.registry.values.digest import Digest
from holdfast.registry.writing.object_writer import ChosenKeys, ObjectWriter
from tests.schedules.plays import OTHER
from tests.schedules.store import Asking

Patch = pytest.MonkeyPatch


def no_mark(patch: Patch) -> None:
    """Without G3 and G4: keys are deleted that were unneeded when they were chosen."""

    def mark(self: Collector) -> None:
        if self._sweep is not None:
            self._sweep.spared = SortedRows()

    patch.setattr(Collector, "mark", mark)


def no_second_look(patch: Patch) -> None:
    """Without G4: runs are marked, but the replays from before the marks are used."""
    mark = Collector.mark

    def mark_and_forget(self: Collector) -> None:
        mark(self)
        if self._sweep is not None:
            self._sweep.spared = SortedRows()

    patch.setattr(Collector, "mark", mark_and_forget)


def deletes_before_all_marks(patch: Patch) -> None:
    """G5 begins when the first run is marked."""
    mark_run = Collector._mark_run

    def mark_one_and_delete(self: Collector, sweep: object, run_id: str) -> set[bytes]:
        needed = mark_run(self, sweep, run_id)
        before, sweep.spared = sweep.spared, SortedRows()
        sweep.spared.add(object_rows(needed, SPARED))
        self.delete()
        sweep.spared = before
        return needed

    patch.setattr(Collector, "_mark_run", mark_one_and_delete)


def shards_mark_their_own_runs(patch: Patch) -> None:
    """G5 of a shard waits for the marks of a part of the runs; it reads the others as they are."""
    mark_run = Collector._mark_run

    def mark_own(self: Collector, sweep: object, run_id: str) -> set[bytes]:
        if self._shard.number == (2 if run_id == OTHER else 1):
            return mark_run(self, sweep, run_id)
        log = RunLog(self._store, run_id)
        log.read_to(log.length())
        return self._planner.needed_by(log)

    patch.setattr(Collector, "_mark_run", mark_own)


def runs_listed_too_early(patch: Patch) -> None:
    """G2 before G1: a run that is created in between is not marked."""
    condemn = Collector.condemn
    listed: dict[int, list[str]] = {}

    def list_and_condemn(self: Collector) -> int | None:
        listed[id(self._store)] = list_run_ids(self._store)
        return condemn(self)

    patch.setattr(Collector, "condemn", list_and_condemn)
    patch.setattr(
        holdfast.registry.upkeep.gc, "list_run_ids", lambda store, _: listed.pop(id(store))
    )


def no_recheck(patch: Patch) -> None:
    """Without W3: chosen keys are committed in spite of new marks."""
    patch.setattr(ObjectWriter, "_recheck", lambda *_: None)


def rechecked_once(patch: Patch) -> None:
    """W3 only at the first attempt: after a lost race keys are not checked again."""
    commit, recheck = ObjectWriter.commit, ObjectWriter._recheck
    looked: set[int] = set()

    def commit_anew(self: ObjectWriter, *arguments: object) -> RunManifest:
        looked.discard(id(self))
        return commit(self, *arguments)

    def recheck_once(self: ObjectWriter, *arguments: object) -> None:
        if id(self) not in looked:
            looked.add(id(self))
            recheck(self, *arguments)

    patch.setattr(ObjectWriter, "commit", commit_anew)
    patch.setattr(ObjectWriter, "_recheck", recheck_once)


def marks_ignored(patch: Patch) -> None:
    """A mark before the head does not move the observed epoch."""

    def recheck(self: ObjectWriter, state: RunManifest, choice: ChosenKeys) -> None:
        refused = self._epochs.condemned(choice.unproven(state), self.observe())
        if refused:
            raise holdfast.registry.writing.object_writer.Condemned(refused)

    patch.setattr(ObjectWriter, "_recheck", recheck)


def epoch_observed_early(patch: Patch) -> None:
    """W1 broken: the epoch is observed before the run's slot 0 exists."""
    begin = RunLog.__init__

    def observe_first(self: RunLog, store: object, run_id: str, **options: object) -> None:
        begin(self, store, run_id, **options)
        self.early = Epochs(store).observe()

    def observe(self: ObjectWriter) -> int:
        if self._observed is None:
            self._observed = self.log.early
        return self._observed

    patch.setattr(RunLog, "__init__", observe_first)
    patch.setattr(ObjectWriter, "observe", observe)


def condemned_keys_named(patch: Patch) -> None:
    """W2 and W3 broken: condemned objects are used again as long as they exist."""
    patch.setattr(Epochs, "condemned", lambda *_: set())


def condemned_packs_chosen(patch: Patch) -> None:
    """W2 broken: a condemned pack is chosen as long as it exists; W3 refuses it for ever."""

    def usable(self: ObjectWriter, kind: str, digest: Digest, size_bytes: int) -> ObjectKey | None:
        for info in self._store.backend.list(stem(kind, digest)):
            if info.size_bytes == size_bytes:
                return ObjectKey.parse(info.key)
        return None

    patch.setattr(ObjectWriter, "usable", usable)


def generations_ignored(patch: Patch) -> None:
    """Without generations: once a condemned object is deleted, its key is used again."""

    def put(self: ObjectWriter, kind: Kind, digest: Digest, body: object) -> ObjectKey:
        for generation in dict.fromkeys((0, self.observe())):
            key = ObjectKey(kind, digest, generation)
            created = self._store.backend.put_if_absent(str(key), body)
            if created or not self._epochs.condemned([key], self.observe()):
                break
        return key

    def put_pack(
        self: ObjectWriter, digest: Digest, body: object, size_bytes: int, *_: object, **__: object
    ) -> ObjectKey:
        return self.usable("packs", digest, size_bytes) or put(self, "packs", digest, body)

    def put_small(
        self: ObjectWriter, kind: Kind, digest: Digest, data: bytes, form: object
    ) -> ObjectKey:
        return put(self, kind, digest, data)

    def recheck(self: ObjectWriter, state: RunManifest, choice: ChosenKeys) -> None:
        if state.epoch > self.observe():
            self._observed = state.epoch
            refused = self._epochs.condemned(choice.unproven(state), self.observe())
            if refused:
                raise holdfast.registry.writing.object_writer.Condemned(refused)

    patch.setattr(ObjectWriter, "put_pack", put_pack)
    patch.setattr(ObjectWriter, "put_small", put_small)
    patch.setattr(ObjectWriter, "_recheck", recheck)


def cover_by_evicted(patch: Patch) -> None:
    """W2a stretched: objects of an evicted checkpoint are named without a check."""

    def is_placed(self: RunManifest, place: object) -> bool:
        return self.by_manifest.get(place.manifest) in (place, None)  # of the dead it has none

    patch.setattr(RunManifest, "is_placed", is_placed)


def run_overlooked(patch: Patch) -> None:
    """G2 to G4 leave out a run that the collector cannot see, such as one behind a link."""
    by_run = holdfast.registry.upkeep.planning.list_by_run

    def seen_files(store: Store) -> Iterator[tuple[str, Iterable[ObjectInfo]]]:
        return (found for found in by_run(store) if found[0] != OTHER)

    def seen_ids(store: Store, known: Collection[str]) -> list[str]:
        return [name for name in list_run_ids(store, known) if name != OTHER]

    patch.setattr(holdfast.registry.upkeep.planning, "list_by_run", seen_files)
    patch.setattr(holdfast.registry.upkeep.gc, "list_run_ids", seen_ids)


def objects_not_synced(patch: Patch) -> None:
    """W5 broken: objects of another writer are named before they are durable."""
    patch.setattr(ObjectWriter, "_make_durable", lambda *_: None)


def slots_not_synced(patch: Patch) -> None:
    """W5 broken: slots are followed, and acknowledged, before they are durable."""
    patch.setattr(RunLog, "make_durable", lambda _: None)


def epochs_not_synced(patch: Patch) -> None:
    """W5 broken: an epoch of another collector is marked and used before it is durable."""
    patch.setattr(Epochs, "make_durable", lambda *_: None)


def log_not_looked_at(patch: Patch) -> None:
    """W4 broken: nobody checks whether the newest slot is still the one that was read."""
    patch.setattr(holdfast.registry.history.log, "check_newest", lambda *_: None)


# Sealed runs


def no_marker(patch: Patch) -> None:
    """W1' broken: a writer behind a seal puts no marker."""
    patch.setattr(RunLog, "announce", lambda self: self.run.sealed_at)


def marker_after_the_epoch(patch: Patch) -> None:
    """W1' broken: the epoch is observed first, and the marker put before the slot."""

    def observe(self: ObjectWriter) -> int:
        self._sealed_at = self.log.run.sealed_at
        return self._epochs.observe()

    patch.setattr(ObjectWriter, "_observe", observe)


def no_marker_after_a_new_seal(patch: Patch) -> None:
    """W3' broken: who has read the log before it was sealed puts no marker."""
    announce = RunLog.announce

    def announce_once(self: RunLog, **given: bool) -> int | None:
        if not hasattr(self, "first"):
            self.first = self.run.sealed_at
            return announce(self, **given)
        return self.run.sealed_at

    patch.setattr(RunLog, "announce", announce_once)


def epoch_kept_after_a_new_seal(patch: Patch) -> None:
    """W3' broken: the epoch that was observed before the new marker is used on."""
    recheck = ObjectWriter._recheck

    def recheck_as_before(self: ObjectWriter, run: RunManifest, chosen: ChosenKeys) -> None:
        self._sealed_at = run.sealed_at
        recheck(self, run, chosen)

    patch.setattr(ObjectWriter, "_recheck", recheck_as_before)


def markers_without_a_number(patch: Patch) -> None:
    """W1' and S3 broken: a marker that is put again may be removed late."""
    for module in (holdfast.registry.history.log, holdfast.registry.upkeep.sealing):
        patch.setattr(module, "marker_key", lambda run_id, _: f"active/{run_id}.0")


def notes_read_before_the_markers(patch: Patch) -> None:
    """G4' broken: notes that were put after the first look are not read."""
    patch.setattr(Notes, "newer", lambda *_: set())


def markers_listed_before_the_epoch(patch: Patch) -> None:
    """G2' broken: a run that was quiet when the collection began counts as quiet."""
    patch.setattr(QuietRuns, "still", lambda self: self.runs)


def markers_removed_before_the_note(patch: Patch) -> None:
    """S3 broken: the markers go once the seal stands."""
    put = Notes.put

    def remove_and_put(self: Notes, store: Store, notes: Iterable[object], **how: bool) -> None:
        made = list(notes)
        for seen, _ in made:
            for info in list(store.backend.list(f"active/{seen.run}.")):
                if seen.sealed is not None and parse_marker(info.key)[1] <= seen.sealed:
                    store.backend.delete(info.key)
        put(self, store, made, **how)

    patch.setattr(Notes, "put", remove_and_put)


def the_note_put_last_counts(patch: Patch) -> None:
    """S2 broken: of two notes of a run that of the newest table counts, not that of more slots."""
    take = Notes._take

    def take_new(self: Notes, header: object, lines: list[bytes], where: str) -> None:
        known = dict(self.by_run)
        take(self, header, lines, where)
        self.by_run |= known

    patch.setattr(Notes, "_take", take_new)


def markers_not_synced(patch: Patch) -> None:
    """W5' broken: a marker of another writer is relied on before it is durable."""
    make_durable = Asking.make_durable

    def sync_others(self: Asking, keys: Iterable[str]) -> None:
        make_durable(self, [key for key in keys if not key.startswith("active/")])

    patch.setattr(Asking, "make_durable", sync_others)


def notes_not_synced(patch: Patch) -> None:
    """W5' broken: markers are removed before another collector's note is durable."""
    make_durable = Asking.make_durable

    def sync_others(self: Asking, keys: Iterable[str]) -> None:
        make_durable(self, [key for key in keys if not key.startswith("notes/")])

    patch.setattr(Asking, "make_durable", sync_others)


BROKEN: dict[str, Callable[[Patch], None]] = {
    rule.__name__: rule
    for rule in (
        no_mark,
        no_second_look,
        deletes_before_all_marks,
        shards_mark_their_own_runs,
        runs_listed_too_early,
        no_recheck,
        rechecked_once,
        marks_ignored,
        epoch_observed_early,
        condemned_keys_named,
        condemned_packs_chosen,
        generations_ignored,
        cover_by_evicted,
        run_overlooked,
        objects_not_synced,
        slots_not_synced,
        epochs_not_synced,
        log_not_looked_at,
        no_marker,
        marker_after_the_epoch,
        no_marker_after_a_new_seal,
        epoch_kept_after_a_new_seal,
        markers_without_a_number,
        notes_read_before_the_markers,
        markers_listed_before_the_epoch,
        markers_removed_before_the_note,
        the_note_put_last_counts,
        markers_not_synced,
        notes_not_synced,
    )
}


@contextmanager
def without(rule: str) -> Iterator[None]:
    """Break one rule."""
    with pytest.MonkeyPatch.context() as patch:
        BROKEN[rule](patch)
        yield
