"""The real code of collective saves with one rule taken out of it: the known counterexamples."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from holdfast.registry.errors import RankFailed
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.objects.keys import ObjectKey
from holdfast.registry.saving.collective.exchange import ChunkReport
from holdfast.registry.saving.collective.saver import CollectiveSaver
from holdfast.registry.saving.collective.sides import Following, Leading
from holdfast.registry.saving.collective.talk import Message, Talk, split
from holdfast.registry.values.digest import Digest
from holdfast.registry.writing.object_writer import ChosenKeys, Condemned, ObjectWriter, placed_keys
from tests.schedules.broken import (
    Patch,
    epoch_observed_early,
    generations_ignored,
    marks_ignored,
    rechecked_once,
)

#: What the actor that runs in this thread has done.
_here = threading.local()


def only_own_names_checked(patch: Patch) -> None:
    """CS3: the packs of the other ranks are not checked."""
    stored, recheck = Leading._have_stored, ObjectWriter._recheck

    def note(self: Leading, *args: Any) -> list[ChunkReport]:
        reports = stored(self, *args)
        packs = {pack.key for report in reports[1:] for pack in report.stored.packs}
        self.writer.objects.theirs = packs
        return reports

    def check_own(self: ObjectWriter, run: RunManifest, chosen: ChosenKeys) -> None:
        own = chosen.keys - getattr(self, "theirs", set())
        recheck(self, run, ChosenKeys(frozenset(own), chosen.covered_by))

    patch.setattr(Leading, "_have_stored", note)
    patch.setattr(ObjectWriter, "_recheck", check_own)


def sweeps_after_the_ranks(patch: Patch) -> None:
    """CS3: keys are checked only against the sweeps after the highest epoch of a rank."""
    encode, of, store = ChunkReport.encode, ChunkReport.of, Following._store

    def note(self: Following, *args: Any) -> bytes:
        _here.epoch = self.writer.objects.observe()
        return store(self, *args)

    def tell(self: ChunkReport) -> bytes:
        return encode(
            ChunkReport(self.digests, [*self.nonfinite, getattr(_here, "epoch", 0)], self.stored)
        )

    def hear(header: Any, columns: Any) -> ChunkReport:
        *nonfinite, _here.epoch = header["nonfinite"]
        return of({**header, "nonfinite": nonfinite}, columns)

    def recheck(self: ObjectWriter, run: RunManifest, chosen: ChosenKeys) -> None:
        if not chosen.keys:
            return
        since, self._observed = _here.epoch, max(run.epoch, self.observe())
        unproven, later = chosen.unproven(run), range(since + 1, self._observed + 1)
        refused = {key for one in later for key in self._epochs.condemned_by(one, unproven)}
        if refused:
            raise Condemned(refused)

    patch.setattr(Following, "_store", note)
    patch.setattr(ChunkReport, "encode", tell)
    patch.setattr(ChunkReport, "of", hear)
    patch.setattr(ObjectWriter, "_recheck", recheck)


def old_replay_believed(patch: Patch) -> None:
    """CS3: what the run used when the save began needs no check."""
    begin, recheck = Leading.__init__, ObjectWriter._recheck

    def note(self: Leading, writer: Any, *args: Any) -> None:
        begin(self, writer, *args)
        run, store = writer.log.run, writer.store
        writer.objects.used = {
            key
            for place in run.by_manifest.values()
            if place is not None
            for key in placed_keys(place, store.placement(place.placement_key))
        }

    def check_rest(self: ObjectWriter, run: RunManifest, chosen: ChosenKeys) -> None:
        rest = chosen.keys - getattr(self, "used", set())
        recheck(self, run, ChosenKeys(frozenset(rest), chosen.covered_by))

    patch.setattr(Leading, "__init__", note)
    patch.setattr(ObjectWriter, "_recheck", check_rest)


def reported_before_it_is_put(patch: Patch) -> None:
    """CS2: a rank reports its packs, and puts them then."""
    begin, put_pack, report = Following.__init__, ObjectWriter.put_pack, Talk.report
    store = Following._store

    def begin_empty(self: Following, *args: Any) -> None:
        _here.follows, _here.waiting = False, []
        begin(self, *args)

    def put_later(
        self: ObjectWriter, digest: Digest, body: Sequence[Any], size: int, *options: Any
    ) -> ObjectKey:
        if not getattr(_here, "follows", False):
            return put_pack(self, digest, body, size, *options)
        _here.waiting.append((self, digest, [bytes(one) for one in body], size))
        return ObjectKey("packs", digest, self.observe())

    def begin_store(*args: Any) -> bytes:
        _here.follows = True
        try:
            return store(*args)
        finally:
            _here.follows = False

    def report_first(self: Talk, data: bytes) -> None:
        report(self, data)
        waiting, _here.waiting = getattr(_here, "waiting", []), []
        for one in waiting:
            put_pack(*one)

    patch.setattr(Following, "__init__", begin_empty)
    patch.setattr(ObjectWriter, "put_pack", put_later)
    patch.setattr(Following, "_store", begin_store)
    patch.setattr(Talk, "report", report_first)


def attempts_mixed(patch: Patch) -> None:
    """CS2: rank 0 takes what a rank has stored for another attempt."""
    gather = Talk.gather

    def gather_any(self: Talk, own: bytes, doing: str) -> list[Message]:
        first, _, number = self.name.rpartition("/")
        if doing == "storing their parts" and number != "1":
            old = self._group.receive(f"{first}/1/report/3", [1], 0)
            if old and "packs" in split(old[1])[0]:
                self._reports += 1
                return [split(own), split(old[1])]
        return gather(self, own, doing)

    patch.setattr(Talk, "gather", gather_any)


def failed_because_absent(patch: Patch) -> None:
    """CS5: a rank that finds no write in the log says that nothing was committed."""
    look = Following._look_for_it

    def be_sure(self: Following, error: RankFailed) -> int:
        try:
            return look(self, error)
        except RankFailed:
            raise error from None

    patch.setattr(Following, "_look_for_it", be_sure)


def puts_deleted_after_a_failure(patch: Patch) -> None:
    """CS6: a rank whose save has failed deletes what it has put."""
    save = CollectiveSaver.make

    def clean_up(self: CollectiveSaver, prepared: Any, carries: Any) -> Any:
        try:
            return save(self, prepared, carries)
        except BaseException:
            writer = self.ownership.committer.writer
            for key in sorted(writer.objects._durable):
                writer.store.backend.delete(str(key))
            raise

    patch.setattr(CollectiveSaver, "make", clean_up)


BROKEN: dict[str, Callable[[Patch], None]] = {
    rule.__name__: rule
    for rule in (
        marks_ignored,
        only_own_names_checked,
        sweeps_after_the_ranks,
        epoch_observed_early,
        rechecked_once,
        old_replay_believed,
        reported_before_it_is_put,
        generations_ignored,
        attempts_mixed,
        failed_because_absent,
        puts_deleted_after_a_failure,
    )
}


@contextmanager
def without(rule: str) -> Iterator[None]:
    """Break one rule."""
    with pytest.MonkeyPatch.context() as patch:
        BROKEN[rule](patch)
        yield
