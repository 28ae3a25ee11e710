"""The real code with one rule of the protocol taken out of it, each in its own way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import pytest

import holdfast.registry.history.log
import holdfast.registry.upkeep.gc
import holdfast.registry.upkeep.planning
import holdfast.registry.writing.object_writer
from holdfast.backends import ObjectInfo
from holdfast.registry.history.epochs import Epochs
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.objects.keys import Kind, ObjectKey, stem
from holdfast.registry.store.store import Store
from holdfast.registry.upkeep.gc import Collector
from holdfast.registry.upkeep.live import list_run_ids
from holdfast.registry.values.digest import Digest
from holdfast.registry.writing.object_writer import ChosenKeys, Writer
from tests.schedules.plays import OTHER

Patch = pytest.MonkeyPatch


def no_mark(patch: Patch) -> None:
    """Without G3 and G4: keys are deleted that were unneeded when they were chosen."""

    def mark(self: Collector) -> None:
        if self._sweep is not None:
            self._sweep.spared = frozenset()

    patch.setattr(Collector, "mark", mark)


def no_second_look(patch: Patch) -> None:
    """Without G4: runs are marked, but the replays from before the marks are used."""
    mark = Collector.mark

    def mark_and_forget(self: Collector) -> None:
        mark(self)
        if self._sweep is not None:
            self._sweep.spared = frozenset()

    patch.setattr(Collector, "mark", mark_and_forget)


def deletes_before_all_marks(patch: Patch) -> None:
    """G5 begins when the first run is marked."""
    mark_run = Collector._mark_run

    def mark_one_and_delete(self: Collector, sweep: object, run_id: str) -> set[ObjectKey]:
        needed = mark_run(self, sweep, run_id)
        before, sweep.spared = sweep.spared, frozenset(needed)
        self.delete()
        sweep.spared = before
        return needed

    patch.setattr(Collector, "_mark_run", mark_one_and_delete)


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
    patch.setattr(Writer, "_recheck", lambda *_: None)


def rechecked_once(patch: Patch) -> None:
    """W3 only at the first attempt: after a lost race keys are not checked again."""
    commit, recheck = Writer.commit, Writer._recheck
    looked: set[int] = set()

    def commit_anew(self: Writer, *arguments: object) -> RunManifest:
        looked.discard(id(self))
        return commit(self, *arguments)

    def recheck_once(self: Writer, *arguments: object) -> None:
        if id(self) not in looked:
            looked.add(id(self))
            recheck(self, *arguments)

    patch.setattr(Writer, "commit", commit_anew)
    patch.setattr(Writer, "_recheck", recheck_once)


def marks_ignored(patch: Patch) -> None:
    """A mark before the head does not move the observed epoch."""

    def recheck(self: Writer, state: RunManifest, choice: ChosenKeys) -> None:
        refused = self._epochs.condemned(choice.unproven(state), self.epoch)
        if refused:
            raise holdfast.registry.writing.object_writer.Condemned(refused)

    patch.setattr(Writer, "_recheck", recheck)


def epoch_observed_early(patch: Patch) -> None:
    """W1 broken: the epoch is observed before the run's slot 0 exists."""
    begin = RunLog.__init__

    def observe_first(self: RunLog, store: object, run_id: str, **options: object) -> None:
        begin(self, store, run_id, **options)
        self.early = Epochs(store).observe()

    def epoch(self: Writer) -> int:
        if self._observed is None:
            self._observed = self.log.early
        return self._observed

    patch.setattr(RunLog, "__init__", observe_first)
    patch.setattr(Writer, "epoch", property(epoch))


def condemned_keys_named(patch: Patch) -> None:
    """W2 and W3 broken: condemned objects are used again as long as they exist."""
    patch.setattr(Epochs, "condemned", lambda *_: set())


def condemned_packs_chosen(patch: Patch) -> None:
    """W2 broken: a condemned pack is chosen as long as it exists; W3 refuses it for ever."""

    def usable(self: Writer, kind: str, digest: Digest, size_bytes: int) -> ObjectKey | None:
        for info in self._store.backend.list(stem(kind, digest)):
            if info.size_bytes == size_bytes:
                return ObjectKey.parse(info.key)
        return None

    patch.setattr(Writer, "usable", usable)


def generations_ignored(patch: Patch) -> None:
    """Without generations: once a condemned object is deleted, its key is used again."""

    def put(self: Writer, kind: Kind, digest: Digest, body: object) -> ObjectKey:
        for generation in dict.fromkeys((0, self.epoch)):
            key = ObjectKey(kind, digest, generation)
            created = self._store.backend.put_if_absent(str(key), body)
            if created or not self._epochs.condemned([key], self.epoch):
                break
        return key

    def put_pack(
        self: Writer, digest: Digest, body: object, size_bytes: int, **_: object
    ) -> ObjectKey:
        return self.usable("packs", digest, size_bytes) or put(self, "packs", digest, body)

    def put_small(self: Writer, kind: Kind, digest: Digest, data: bytes, form: object) -> ObjectKey:
        return put(self, kind, digest, data)

    def recheck(self: Writer, state: RunManifest, choice: ChosenKeys) -> None:
        if state.epoch > self.epoch:
            self._observed = state.epoch
            refused = self._epochs.condemned(choice.unproven(state), self.epoch)
            if refused:
                raise holdfast.registry.writing.object_writer.Condemned(refused)

    patch.setattr(Writer, "put_pack", put_pack)
    patch.setattr(Writer, "put_small", put_small)
    patch.setattr(Writer, "_recheck", recheck)


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
    patch.setattr(Writer, "_make_durable", lambda *_: None)


def slots_not_synced(patch: Patch) -> None:
    """W5 broken: slots are followed, and acknowledged, before they are durable."""
    patch.setattr(RunLog, "make_durable", lambda _: None)


def epochs_not_synced(patch: Patch) -> None:
    """W5 broken: an epoch of another collector is marked and used before it is durable."""
    patch.setattr(Epochs, "make_durable", lambda *_: None)


def log_not_looked_at(patch: Patch) -> None:
    """W4 broken: nobody checks whether the newest slot is still the one that was read."""
    patch.setattr(holdfast.registry.history.log, "check_newest", lambda *_: None)


BROKEN: dict[str, Callable[[Patch], None]] = {
    rule.__name__: rule
    for rule in (
        no_mark,
        no_second_look,
        deletes_before_all_marks,
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
    )
}


@contextmanager
def without(rule: str) -> Iterator[None]:
    """Break one rule."""
    with pytest.MonkeyPatch.context() as patch:
        BROKEN[rule](patch)
        yield
