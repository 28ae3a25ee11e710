"""Collecting: what nothing needs goes, what anything needs stays, and doubt stops it."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import Event, Lock
from uuid import uuid4

import pytest

import holdfast
from holdfast import Retention, sync
from holdfast.backends.local.backend import LocalBackend
from holdfast.backends.wrappers import Fault, Faulty, InjectedCrash, Metered, ReadOnly, Wrapper
from holdfast.registry.errors import (
    AccessDenied,
    Conflict,
    IntegrityError,
    InvalidInput,
    Malformed,
    MissingObject,
    RegistryError,
    StoreFull,
    UnsupportedFormat,
)
from holdfast.registry.face.factory import open_on
from holdfast.registry.history.actions import DropRun, Mark, Place
from holdfast.registry.history.epochs import encode_sweep, encode_upgrade
from holdfast.registry.history.log import SNAPSHOT_EVERY, RunLog
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.objects.framing import join_lines
from holdfast.registry.objects.keys import (
    RUNS,
    ObjectKey,
    epoch_key,
    note_key,
    slot_key,
    snapshot_key,
    snapshot_prefix,
)
from holdfast.registry.spec import Draw, Phase, Pool, RunSpec
from holdfast.registry.store import Workers
from holdfast.registry.upkeep import live
from holdfast.registry.upkeep.gc import DAY_S, Collector, collect
from holdfast.registry.upkeep.live import Needs
from holdfast.registry.upkeep.shelf import Shelf
from holdfast.registry.upkeep.sorted_rows import keys_of
from holdfast.registry.upkeep.usage import measure
from holdfast.registry.values.digest import Digest
from tests.support.faults import Hooked, Once, flip
from tests.support.states import same, save_small, small_state
from tests.support.stores import contents, needed, new_backend, objects


class Aged(Wrapper):
    """A store whose objects can be made older by its own clock."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.ages: dict[str, float] = {}

    def grow_older(self, seconds: float) -> None:
        for info in self.inner.list():
            self.ages[info.key] = self.ages.get(info.key, 0.0) + seconds

    def stat(self, key):
        return self._aged(super().stat(key))

    def list(self, prefix="", **options):
        yield from map(self._aged, super().list(prefix, **options))

    def _aged(self, info):
        return type(info)(info.key, info.size_bytes, info.modified_s - self.ages.get(info.key, 0))


def marks(registry, run_id: str) -> list[int]:
    slots = RunLog(registry.handle.store, run_id).slots()
    return [line.epoch for slot in slots for _, line in slot.lines if isinstance(line, Mark)]


@pytest.fixture
def thinned(run):
    """A run that evicted all but the newest of five checkpoints."""
    save_small(run, 1, 2, 3, 4, 5)
    run.retention.prune(Retention(last=1))
    return run


# What goes and what stays


def test_where_nothing_is_to_collect_nothing_is_written(run, reg, backend):
    save_small(run, 1, 2)
    before = contents(backend)
    report = reg.gc(grace_s=0)
    noted = contents(backend)
    assert noted.keys() - before.keys() == {note_key(1)}
    assert {key: noted[key] for key in before} == before
    assert reg.gc(grace_s=0) == report
    assert contents(backend) == noted
    assert (report.epoch, report.condemned.objects, report.deleted.objects) == (None, 0, 0)
    assert report.objects.objects == len(objects(backend)) > 0
    assert report.objects.size_bytes == sum(len(before[key]) for key in objects(backend))


def test_many_objects_are_listed_in_parts_and_none_is_missed(monkeypatch):
    """The first page ends within the first sixteenth of the digests, or after it."""
    monkeypatch.setattr(live, "_PAGE", 20)
    for count, parts in ((1500, 16), (120, 0)):
        backend, calls = new_backend(), []
        keys = {str(ObjectKey("packs", Digest.of(b"%d" % n), n % 3)) for n in range(count)}
        for key in keys:
            backend.put(key, b"x")
        with open_on(Metered(backend, calls)) as opened:
            calls.clear()
            (rows,) = live.list_objects(opened.handle.store).rows
            assert set(map(str, keys_of(rows))) == keys
            assert len([call for call in calls if len(call.key) == 7]) == (
                parts if parts > 1 else 0
            )
            backend.put("packs/zz/foreign", b"x")
            with pytest.raises(Malformed, match="packs/zz/foreign"):
                live.list_objects(opened.handle.store)


def test_an_empty_registry_is_collected(reg):
    report = reg.gc(grace_s=0)
    assert (report.runs, report.objects.objects, report.epoch) == (0, 0, None)


def test_what_was_let_go_is_deleted_and_the_rest_loads(thinned, reg, backend, open_registry):
    before = contents(backend)
    report = reg.gc(grace_s=0)
    after = contents(backend)
    fresh = open_registry(backend)
    assert objects(backend) == needed(fresh)
    assert same(fresh.checkpoint("run").load(), small_state(5))
    assert fresh.verify(deep=True).findings == ()
    gone = {key: len(data) for key, data in before.items() if key not in after}
    assert report.deleted.objects == len(gone) == report.condemned.objects > 0
    assert report.deleted.size_bytes == sum(gone.values()) == report.freed_bytes
    assert (report.epoch, report.spared.objects, report.recent.objects) == (1, 0, 0)
    assert marks(fresh, "run") == [1]


def test_what_a_crashed_save_left_is_deleted(run, reg, backend):
    save_small(run, 1)
    whole = objects(backend)
    for at in range(1, 6):
        dying = open_on(Faulty(backend, [Fault(at=at)]))
        with pytest.raises(InjectedCrash):
            dying.run("run").save(small_state(100 + at), step=2)
        dying.close()
    assert objects(backend) > whole
    reg.gc(grace_s=0)
    assert objects(backend) == whole


def test_a_dropped_run_keeps_its_log_alone(reg, backend):
    save_small(reg.create_run("a"), 1, 2)
    save_small(reg.create_run("b"), 2, 3)
    reg.run("a").retention.drop(reason="a mistake", now=True)
    reg.gc(grace_s=0)
    assert objects(backend) == needed(reg) != set()
    assert same(reg.checkpoint("b/main/step3").load(), small_state(3))
    assert reg.run("a").manifest.dropped == "a mistake"


def test_everything_that_a_run_holds_stays(reg, backend, open_registry):
    league = Pool(phase="main", size=2, seed_child=1, draws=(Draw(kind="roster", weight=1),))
    spec = RunSpec(phases=(Phase(name="main"),), inference=("model",), pool=league)
    run = reg.create_run("run", preset=spec)
    first, second, third, fourth, _ = save_small(run, 1, 2, 3, 4, 5)
    run.pins.gates.set("g", first)
    run.releases.publish("1.0.0", second, card={"about": "it"})
    run.pins.artifacts.set("seeds", {"bank": small_state(77)["model"]["w"]})
    run.pool.promote(third)
    run.pins.tags.set("keeper", fourth)
    run.streams["loss"].append([{"step": i, "loss": 1.0 / (i + 1)} for i in range(300)])
    child = reg.fork(second, "child")
    run.retention.prune(Retention(last=1))
    child.save(small_state(9), step=9)
    refs = [
        "run/gates/g",
        "run/releases/1.0.0",
        "run/artifacts/seeds",
        "run/pool/v0001",
        "run/tags/keeper",
        "run/latest",
        "child/latest",
    ]
    before = {ref: reg.stored(ref).load() for ref in refs}
    reg.gc(grace_s=0)
    fresh = open_registry(backend)
    assert objects(backend) == needed(fresh)
    for ref, state in before.items():
        assert same(fresh.stored(ref).load(), state), ref
    assert fresh.run("run").streams["loss"].count == 300
    assert fresh.run("run").releases.get("1.0.0").card["about"] == "it"
    assert fresh.verify(deep=True).findings == ()


def test_old_generations_and_replaced_places_are_deleted(reg, backend):
    """The same state under two generations: the older one goes when no run names it any more."""
    save_small(reg.create_run("a"), 1)
    keys = sorted(objects(backend))
    backend.put(epoch_key(1), encode_sweep(1, map(ObjectKey.parse, keys)))
    save_small(reg.create_run("b"), 1)
    assert len(objects(backend)) == 2 * len(keys)
    reg.run("a").retention.drop(reason="moved", now=True)
    reg.gc(grace_s=0)
    assert len(objects(backend)) == len(keys)
    assert {key[-2:] for key in objects(backend)} == {".1"}
    assert same(reg.checkpoint("b").load(), small_state(1))


def test_what_is_saved_again_after_it_was_collected_is_stored_anew(thinned, reg, backend):
    reg.gc(grace_s=0)
    again = thinned.save(small_state(2), step=20)
    assert all(str(pack.key).endswith(".1") for pack in again.handle.reader.placement.packs)
    assert same(reg.checkpoint("run").load(), small_state(2))
    assert reg.verify(deep=True).findings == ()


def test_what_was_collected_cannot_be_undone(thinned, reg):
    reg.gc(grace_s=0)
    with pytest.raises(MissingObject, match="collected"):
        thinned.retention.undo()


def grow(registry) -> None:
    """Write slots to the run's log until it has four further snapshots."""
    log = RunLog(registry.handle.store, "run")
    log.open()
    for _ in range(4 * SNAPSHOT_EVERY):
        log.append(lambda state: [Mark(epoch=1)])


@pytest.fixture
def long_log(run, reg, backend):
    """A run with four snapshots; its keys, newest first."""
    backend.put(epoch_key(1), encode_sweep(1, []))
    grow(reg)
    listed = [info.key for info in backend.list(snapshot_prefix("run"))]
    assert len(listed) == 4
    return listed


def test_snapshots_but_the_newest_two_are_deleted(long_log, reg, backend, open_registry):
    planned = reg.gc(grace_s=0, dry_run=True)
    before = measure(reg.handle.store)
    report = reg.gc(grace_s=0)
    assert [info.key for info in backend.list(snapshot_prefix("run"))] == long_log[:2]
    assert report.stale == planned.stale
    assert report.stale.objects == 2
    assert report.freed_bytes == report.stale.size_bytes > 0
    assert before.unneeded_bytes == report.stale.size_bytes
    noted = len(backend.get(note_key(1)))
    other_bytes = before.other_bytes + noted
    assert measure(reg.handle.store) == replace(before, unneeded_bytes=0, other_bytes=other_bytes)
    assert open_registry(backend).run("run").manifest.epoch == 1


class Meanwhile(Wrapper):
    """A store on which others act right after its first listing of a prefix."""

    def __init__(self, inner, prefix: str, act: Callable[[], object]) -> None:
        super().__init__(inner)
        self.prefix, self.act = prefix, act

    def list(self, prefix="", **more):
        found = [*super().list(prefix, **more)]
        if prefix == self.prefix:
            self.prefix = "done"
            self.act()
        yield from found


@pytest.mark.parametrize("others", ["wrote newer ones", "damaged those that stay"])
def test_a_reader_may_hold_names_of_snapshots_that_are_deleted(
    long_log, reg, backend, open_registry, others
):
    def collected() -> None:
        if others == "wrote newer ones":
            grow(reg)
        else:
            for key in long_log[:2]:
                flip(backend, key)
        reg.gc(grace_s=0)
        left = {info.key for info in backend.list(snapshot_prefix("run"))}
        assert left.isdisjoint(long_log[2:])
        assert left.isdisjoint(long_log) == (others == "wrote newer ones")

    log = RunLog(reg.handle.store, "run")
    before = log.length()
    store = Meanwhile(backend, snapshot_prefix("run"), collected)
    read = open_registry(store).run("run").manifest
    assert store.prefix == "done"
    # It has listed the slots before, between or after theirs.
    assert before <= read.next_slot <= log.length()
    assert read == log.read_to(read.next_slot).compact()


def test_a_verification_may_hold_names_of_snapshots_that_are_deleted(long_log, reg, backend):
    with open_on(Meanwhile(backend, RUNS, lambda: reg.gc(grace_s=0))) as opened:
        assert opened.verify().findings == ()
    assert len(list(backend.list(snapshot_prefix("run")))) == 2


def test_where_a_slot_is_damaged_the_snapshots_after_it_stay(long_log, backend, open_registry):
    """They may be the only source of that slot: readers still open the run."""
    flip(backend, slot_key("run", 1))
    opened = open_registry(backend)
    with pytest.raises(IntegrityError, match=r"Nothing was deleted\."):
        opened.gc(grace_s=0)
    assert [info.key for info in backend.list(snapshot_prefix("run"))] == long_log
    assert opened.run("run").manifest.epoch == 1


def test_what_dead_writers_left_unfinished_is_deleted(tmp_path):
    with holdfast.init(tmp_path / "r", skip_race_probe=True) as opened:
        save_small(opened.create_run("run"), 1)
        old, young = f"1-{'a' * 16}", f"1-{'b' * 16}"
        for name in (old, young):
            (tmp_path / "r/.tmp" / name).write_bytes(b"x" * 5000)
        os.utime(tmp_path / "r/.tmp" / old, (0, 0))
        assert opened.gc(grace_s=0).unfinished_bytes == 5000
        left = {path.name for path in (tmp_path / "r/.tmp").iterdir()}
        assert left == {young, "reserve"}


def test_files_of_dead_probes_are_deleted(reg, backend):
    aged = Aged(backend)
    backend.put(f".probe/{'a' * 16}/0001", b"old")
    backend.put(".probe/notes/0001", b"old, and nobody knows whose")
    aged.grow_older(2 * 3600)
    backend.put(f".probe/{'b' * 16}-race/0001", b"young")
    with open_on(aged) as opened:
        assert opened.gc(grace_s=0).stale.size_bytes == 3
    kept = [f".probe/{'b' * 16}-race/0001", ".probe/notes/0001"]
    assert list(contents(backend, ".probe/")) == kept


# Grace


@pytest.fixture
def aged(backend):
    return Aged(backend)


@pytest.fixture
def old(aged, open_registry):
    return open_registry(aged)


def test_what_was_let_go_lately_stays_and_can_be_undone(old, aged, backend):
    run = old.create_run("run")
    save_small(run, 1, 2, 3)
    aged.grow_older(10 * DAY_S)
    run.retention.prune(Retention(last=1))
    before = objects(backend)
    report = old.gc()
    assert objects(backend) == before
    assert (report.epoch, report.condemned.objects, report.recent.objects) == (None, 0, 8)
    aged.grow_older(DAY_S / 2)
    old.gc()
    run.retention.undo()
    assert same(old.checkpoint("run/main/step1").load(), small_state(1))
    run.retention.prune(Retention(last=1))
    aged.grow_older(1.1 * DAY_S)
    assert old.gc().deleted.objects == 8
    assert objects(backend) == needed(old)


def test_what_was_saved_and_let_go_within_the_grace_stays(old, aged, backend):
    """Saved out of old packs, so that the age of the objects does not protect it."""
    run = old.create_run("run")
    save_small(run, 1)
    run.retention.prune(Retention(last=1))
    old.create_run("other").save(small_state(7), step=1)
    old.run("other").retention.drop(reason="gone", now=True)
    aged.grow_older(10 * DAY_S)
    save_small(run, 7, 8)
    run.retention.prune(Retention(last=1))
    assert old.gc().deleted.objects == 0
    run.retention.undo()
    assert same(old.checkpoint("run/main/step7").load(), small_state(7))


@pytest.mark.parametrize("how", ["undo", "save"])
def test_what_was_held_again_for_a_while_within_the_grace_stays(old, aged, how):
    """Its place does not change, so no slot of the last day has it."""
    run = old.create_run("run")
    save_small(run, 1, 2)
    run.retention.prune(Retention(last=1))
    aged.grow_older(10 * DAY_S)
    if how == "undo":
        run.retention.undo()
    else:
        run.save(small_state(1), step=7)
        save_small(run, 8)
    run.retention.prune(Retention(last=1))
    assert old.gc().deleted.objects == 0
    run.retention.undo()
    step = 1 if how == "undo" else 7
    assert same(old.checkpoint(f"run/main/step{step}").load(), small_state(1))


def test_a_slot_that_a_listing_left_out_counts_as_young(old, aged, backend, open_registry):
    run = old.create_run("run")
    save_small(run, 1, 2)
    aged.grow_older(10 * DAY_S)
    run.retention.prune(Retention(last=1))
    head = slot_key("run", run.manifest.next_slot - 1)
    save_small(run, 3)
    aged.ages[slot_key("run", run.manifest.next_slot - 1)] = 0

    class Overtaken(Wrapper):
        def list(self, prefix="", **more):
            yield from (info for info in super().list(prefix, **more) if info.key != head)

    assert open_registry(Overtaken(aged)).gc().deleted.objects == 0


def test_a_slot_that_looks_young_among_old_ones_is_old(old, aged):
    """A clock that went back: what was put before an old slot is older, whatever its time says."""
    run = old.create_run("run")
    save_small(run, 1, 2)
    run.retention.prune(Retention(last=1))
    aged.grow_older(10 * DAY_S)
    aged.ages[slot_key("run", 1)] = -DAY_S
    assert old.gc().deleted.objects == 4


def test_orphans_younger_than_the_grace_stay(old, aged, backend):
    old.create_run("run")
    stray = ObjectKey("packs", Digest.of(b"x"), 0)
    backend.put(str(stray), b"stray")
    assert old.gc(grace_s=3600).recent.objects == 1
    aged.grow_older(3601)
    assert old.gc(grace_s=3600).deleted.objects == 1
    assert objects(backend) == set()


def test_the_clock_is_the_stores_own(thinned, reg, backend, monkeypatch):
    """This machine's clock is years ahead: what the store says is young stays."""
    now = time.time()
    key = str(ObjectKey("packs", Digest.of(b"x"), 0))
    backend.put(key, b"stray")

    class StoreTime(Wrapper):
        def stat(self, key):
            info = super().stat(key)
            return type(info)(info.key, info.size_bytes, now)

    monkeypatch.setattr("holdfast.registry.upkeep.planning.time.time", lambda: now + 1e9)
    with open_on(StoreTime(backend)) as opened:
        assert opened.gc().deleted.objects == 0
    assert key in objects(backend)
    assert contents(backend, ".probe/") == {}


@pytest.mark.parametrize("grace_s", [-1, float("nan"), float("inf"), "1d", None, True, [1]])
def test_a_grace_that_is_no_time_is_refused(thinned, reg, backend, grace_s):
    with pytest.raises(InvalidInput, match="grace"):
        reg.gc(grace_s=grace_s)


def test_a_dry_run_writes_nothing_and_says_what_would_go(thinned, reg, backend):
    before = contents(backend)
    with open_on(ReadOnly(backend)) as opened:
        planned = opened.gc(grace_s=0, dry_run=True)
        assert opened.gc(dry_run=True).recent == planned.condemned
    assert contents(backend) == before
    done = reg.gc(grace_s=0)
    assert planned.condemned == done.deleted
    assert (planned.dry_run, planned.deleted.objects, planned.epoch) == (True, 0, None)


# Doubt stops it


def _put(key: str, data: bytes = b"?") -> Callable:
    return lambda backend, reg: backend.put(key, data)


def _damage(prefix: str) -> Callable:
    def act(backend, reg):
        keys = [key for key in needed(reg) | set(contents(backend)) if key.startswith(prefix)]
        live = [key for key in keys if key in needed(reg) or "/log/" in key or "epochs" in key]
        flip(backend, sorted(live)[-1])

    return act


def _lose(prefix: str) -> Callable:
    def act(backend, reg):
        backend.delete(sorted(key for key in needed(reg) if key.startswith(prefix))[0])

    return act


def _lose_slot(number: int, snapshot: bool = False) -> Callable:
    def act(backend, reg):
        if snapshot:
            last = max(int(key.rpartition("/")[2]) for key in contents(backend, "runs/run/log/"))
            backend.put(snapshot_key("run", last), b"any")
            backend.delete(slot_key("run", last))
        else:
            backend.delete(slot_key("run", number))

    return act


def _line(line: bytes) -> Callable:
    def act(backend, reg):
        head = reg.run("run").manifest.next_slot
        backend.put(slot_key("run", head), join_lines([line]))

    return act


def _other_place(backend, reg) -> None:
    """A live checkpoint whose place names the placement of another."""
    log = RunLog(reg.handle.store, "run")
    state = log.open()
    live = state.latest().manifest
    other = next(place for place in log.history().places if place.manifest != live)
    wrong = Place(
        manifest=live,
        manifest_generation=0,
        placement=other.placement,
        placement_generation=other.placement_generation,
    )
    log.append(lambda _: [wrong])


STRAY = f"packs/00/{'0' * 64}.7"
DOUBTS = {
    "a foreign file among the packs": (_put("packs/.DS_Store"), Malformed),
    "a foreign file among the manifests": (_put("manifests/aa/notes.txt"), Malformed),
    "a foreign file among the placements": (_put("placements/x"), Malformed),
    "a foreign file among the runs": (_put("runs/notes.txt"), Malformed),
    "a foreign file in a run": (_put("runs/run/notes.txt"), Malformed),
    "a foreign file in a log": (_put("runs/run/log/notes"), Malformed),
    "a foreign file among snapshots": (_put("runs/run/snapshots/notes"), Malformed),
    "a run of an unheard-of name": (_put("runs/.hidden/log/" + "0" * 20), Malformed),
    "a foreign file among the epochs": (_put("epochs/notes"), Malformed),
    "a gap in the epochs": (_put(epoch_key(3), encode_sweep(3, [])), Malformed),
    "a damaged epoch": (_put(epoch_key(1), b"noise"), IntegrityError),
    "a newer writer is demanded": (_put(epoch_key(1), encode_upgrade(1, 99)), UnsupportedFormat),
    "an object beyond the newest epoch": (_put(STRAY), Malformed),
    "a damaged slot": (_damage("runs/run/log/"), IntegrityError),
    "a lost slot": (_lose_slot(2), Malformed),
    "a lost first slot": (_lose_slot(0), Malformed),
    "a lost last slot": (_lose_slot(0, snapshot=True), Malformed),
    "an unknown line": (_line(b'{"kind":"lease"}'), UnsupportedFormat),
    "an unknown action": (
        _line(
            b'{"actions":[{"action":"hold.fast"}],"author":"a","kind":"commit","n":6,"prev":null,'
            b'"run":"run","time_ms":0,"write":"0"}'
        ),
        UnsupportedFormat,
    ),
    "a damaged placement": (_damage("placements/"), IntegrityError),
    "a lost placement": (_lose("placements/"), MissingObject),
    "another checkpoint's placement": (_other_place, Malformed),
}


@pytest.mark.parametrize(("doubt", "error"), DOUBTS.values(), ids=DOUBTS.keys())
def test_doubt_stops_the_collection_before_anything_is_deleted(
    thinned, reg, backend, open_registry, doubt, error
):
    doubt(backend, reg)
    before = contents(backend)
    with pytest.raises(error) as stopped:
        open_registry(backend).gc(grace_s=0)
    assert "Nothing was deleted." in str(stopped.value)
    if doubt is DOUBTS["an object beyond the newest epoch"][0]:
        assert f"Restore {epoch_key(1)} and all later epochs" in str(stopped.value)
    assert contents(backend) == before


@pytest.mark.parametrize("kind", ["a damaged slot", "an unknown line", "a lost placement"])
def test_doubt_that_comes_after_condemning_stops_it_too(thinned, reg, backend, open_registry, kind):
    save_small(reg.create_run("other"), 50)
    collector = Collector(reg.handle.store, grace_s=0)
    collector.choose()
    assert collector.condemn() == 1
    before = objects(backend)
    # In a run that is new to the collector, so that it has to be read now.
    save_small(open_registry(backend).create_run("new"), 60, 61)
    if kind == "a damaged slot":
        flip(backend, slot_key("new", 2))
    elif kind == "an unknown line":
        backend.put(slot_key("new", 3), join_lines([b'{"kind":"lease"}']))
    else:
        place = reg.run("new").latest().handle.reader.place
        backend.delete(str(place.placement_key))
    with pytest.raises(RegistryError, match="Nothing was deleted"):
        collector.mark()
    with pytest.raises(InvalidInput, match="marked"):
        collector.delete()
    assert objects(backend) >= before


# Beside others


def test_a_state_that_was_condemned_between_choosing_and_marking_is_spared(
    thinned, reg, backend, open_registry
):
    """W1 at an older epoch: the save names what is about to be condemned, before the mark."""
    early = open_registry(backend)
    condemned = small_state(2)
    collector = Collector(reg.handle.store, grace_s=0)
    plan = collector.choose()
    other = early.create_run("other")
    again = other.save(condemned, step=1)
    assert collector.condemn() == 1
    collector.mark()
    report = collector.delete()
    assert report.spared.objects == 4
    assert report.deleted.objects == len(plan.to_condemn) - 4
    assert same(open_registry(backend).checkpoint("other").load(), condemned)
    assert all(str(pack.key).endswith(".0") for pack in again.handle.reader.placement.packs)
    assert objects(backend) == needed(open_registry(backend))


def test_a_save_that_meets_the_mark_stores_anew(thinned, reg, backend, open_registry):
    trainer = open_registry(backend).run("run")
    trainer.save(small_state(6), step=6)
    hooked = Hooked(backend)
    late = open_registry(hooked).create_run("late")
    collector = Collector(reg.handle.store, grace_s=0)
    collector.choose()
    steps = []

    def sweep(method: str, key: str) -> None:
        if "/late/log/" in key and method == "put_if_absent" and not steps:
            steps.append(collector.condemn())
            collector.mark()
            steps.append(collector.delete())

    hooked.before = sweep
    late.save(small_state(2), step=1)
    assert steps[0] == 1
    assert same(open_registry(backend).checkpoint("late").load(), small_state(2))
    assert open_registry(backend).verify(deep=True).findings == ()


def test_a_run_that_is_born_during_a_sweep_refuses_what_was_condemned(
    thinned, reg, backend, open_registry
):
    collector = Collector(reg.handle.store, grace_s=0)
    collector.choose()
    collector.condemn()
    collector.mark()
    born = open_registry(backend).create_run("born")
    born.save(small_state(2), step=1)
    collector.delete()
    assert same(open_registry(backend).checkpoint("born").load(), small_state(2))
    assert objects(backend) == needed(open_registry(backend))
    assert marks(reg, "born") == []


def test_deletions_may_land_late_and_twice(thinned, reg, backend, open_registry):
    held: list[str] = []

    class Late(Wrapper):
        def delete(self, key: str) -> None:
            held.append(key)

    with open_on(Late(backend)) as opened:
        opened.gc(grace_s=0)
    assert held
    run = open_registry(backend).run("run")
    for step in (2, 3):
        run.save(small_state(step), step=10 + step)
    for key in [*held, *held]:
        backend.delete(key)
    fresh = open_registry(backend)
    assert same(fresh.checkpoint("run/main/step12").load(), small_state(2))
    assert fresh.verify(deep=True).findings == ()
    fresh.gc(grace_s=0)
    assert objects(backend) == needed(fresh)


def test_no_pack_goes_while_an_object_that_names_packs_stays(thinned, reg, backend):
    """A store may refuse single keys: the others go, the error says how many stay."""
    collector = Collector(reg.handle.store, grace_s=0)
    gone = sorted(map(str, collector.choose().to_condemn))
    packs = [key for key in gone if key.startswith("packs/")]
    held = next(key for key in gone if key.startswith("manifests/"))

    class Holds(Wrapper):
        def delete(self, key):
            if key == held:
                raise AccessDenied("it is locked", where=key)
            super().delete(key)

    with (
        open_on(Holds(backend)) as opened,
        pytest.raises(AccessDenied, match="it is locked") as caught,
    ):
        opened.gc(grace_s=0)
    assert caught.value.__notes__ == [f"1 of {len(gone) - len(packs)} objects is not deleted"]
    assert [key for key in gone if key in objects(backend)] == [held, *packs]
    reg.gc(grace_s=0)
    assert not objects(backend) & set(gone)


@pytest.mark.parametrize("died_after", ["condemn", "mark"])
def test_anyone_finishes_what_a_dead_collector_left(thinned, reg, backend, died_after):
    killed = Collector(reg.handle.store, grace_s=0)
    killed.choose()
    killed.condemn()
    if died_after == "mark":
        killed.mark()
    before = contents(backend, "epochs/")
    report = reg.gc(grace_s=0)
    assert report.epoch == 1
    assert contents(backend, "epochs/") == before
    assert objects(backend) == needed(reg)
    assert marks(reg, "run") == [1]
    # And the stopped one goes on.
    killed.mark()
    killed.delete()
    assert objects(backend) == needed(reg)
    assert reg.verify(deep=True).findings == ()


@pytest.mark.parametrize("full", [False, True])
def test_no_step_of_a_collection_holds_the_runs(reg, backend, open_registry, full):
    for name in "abc":
        run = reg.create_run(name)
        save_small(run, 1, 2)
        run.retention.prune(Retention(last=1))
    del run
    collector = Collector(open_registry(backend).handle.store, grace_s=0, full=full)

    def held() -> int:
        gc.collect()  # what other tests left
        return sum(type(one) in (RunLog, RunManifest) for one in gc.get_objects())

    steps = []
    before = held()
    for step in ("choose", "condemn", "mark", "delete", "note"):
        getattr(collector, step)()
        steps.append(held() - before)
    assert steps == [0] * 5
    assert objects(backend) == needed(reg)
    assert [marks(reg, name) for name in "abc"] == [[1]] * 3


def test_who_joins_a_sweep_marks_with_its_epoch(run, reg, backend, open_registry):
    """A writer that observed the sweep before names objects that the dead collector condemned."""
    save_small(run, 1, 2, 3)
    run.retention.prune(Retention(last=2))
    assert reg.gc(grace_s=0).epoch == 1
    run.retention.prune(Retention(last=1))
    hooked = Hooked(backend)
    late = open_registry(hooked).create_run("late")
    late.save({"other": small_state(50)}, step=0)  # so that it looks for the packs of the next save
    killed = Collector(open_registry(backend).handle.store, grace_s=0)
    killed.choose()
    assert killed.condemn() == 2
    epochs = []
    turn = Lock()  # manifest and placement are put side by side

    def before(method: str, key: str) -> None:
        if method == "put_if_absent" and key.startswith(("manifests/", "placements/")):
            with turn:
                if not epochs:
                    epochs.append(open_registry(backend).gc(grace_s=0).epoch)

    hooked.before = before
    late.save(small_state(2), step=1)
    assert epochs == [2]
    fresh = open_registry(backend)
    assert same(fresh.checkpoint("late").load(), small_state(2))
    assert fresh.verify(deep=True).findings == ()


def test_a_sweep_that_condemned_less_is_not_enough(thinned, reg, backend):
    killed = Collector(reg.handle.store, grace_s=0)
    killed.choose()
    killed.condemn()
    thinned.save(small_state(6), step=6)
    thinned.retention.prune(Retention(last=1))
    report = reg.gc(grace_s=0)
    assert report.epoch == 2
    assert objects(backend) == needed(reg)


def test_two_collectors_at_every_step(thinned, reg, backend, open_registry):
    one, two = (
        Collector(reg.handle.store, grace_s=0),
        Collector(open_registry(backend).handle.store, grace_s=0),
    )
    for step in ("choose", "condemn", "mark", "delete"):
        getattr(one, step)()
        getattr(two, step)()
    assert len(contents(backend, "epochs/")) == 1
    assert objects(backend) == needed(reg)


@pytest.mark.parametrize("step", ["choose", "mark"])
@pytest.mark.sometimes("a placement is gone when a collection asks for it")
def test_what_another_collector_deleted_meanwhile_is_no_damage(
    run, reg, backend, open_registry, step
):
    """A run lets go of what was just seen to be needed, and another collector takes it away."""
    going, _ = save_small(run, 1, 2)

    def act() -> None:
        pruned = open_registry(backend).run("run")
        pruned.retention.prune(Retention(last=1))
        open_registry(backend).gc(grace_s=0)

    hooked = Hooked(backend)
    collector = Collector(open_registry(hooked).handle.store, grace_s=0)
    if step == "mark":
        save_small(reg.create_run("other"), 70)
        reg.run("other").retention.drop(reason="gone", now=True)
        collector.choose()
        collector.condemn()
        # Unknown to the collector, so that its placements are read while it marks.
        collector._planner.logs = Shelf()
        collector._planner._needs = Needs(Workers(None, collector._store))
    hooked.before = Once(str(going.handle.reader.place.placement_key), act, "get")
    for name in ("choose", "condemn", "mark", "delete")[0 if step == "choose" else 2 :]:
        getattr(collector, name)()
    assert hooked.before.done
    assert objects(backend) == needed(open_registry(backend))


def test_every_run_is_marked_once_and_no_more(thinned, reg, backend):
    for name in ("a", "b"):
        reg.create_run(name)
    reg.gc(grace_s=0)
    reg.gc(grace_s=0)
    assert {name: marks(reg, name) for name in reg.run_names()} == {"a": [1], "b": [1], "run": [1]}


def test_a_listing_that_writers_overtake_is_no_gap(thinned, reg, backend):
    class Overtaken(Wrapper):
        def list(self, prefix="", **more):
            for info in super().list(prefix, **more):
                if info.key != slot_key("run", 3):
                    yield info

    with open_on(Overtaken(backend)) as opened:
        assert opened.gc(grace_s=0).deleted.objects == 16
    assert objects(backend) == needed(reg)


def test_a_run_that_was_dropped_for_good_is_not_marked(thinned, reg, backend):
    gone = reg.create_run("gone")
    save_small(gone, 50)
    gone.handle.committer.commit(lambda _: [DropRun(reason="a mistake")])
    assert reg.gc(grace_s=0).deleted.objects == 20
    assert marks(reg, "gone") == []
    assert objects(backend) == needed(reg)


def test_the_least_writer_version_never_falls(thinned, reg, backend, monkeypatch):
    monkeypatch.setattr("holdfast.registry.store.store.WRITER_VERSION", 2)
    backend.put(epoch_key(1), encode_upgrade(1, 2))
    collector = Collector(reg.handle.store, grace_s=0)
    collector.choose()
    assert collector.condemn() == 2
    assert b'"min_writer":2' in backend.get(epoch_key(2))


def test_nothing_is_deleted_before_every_run_is_marked(thinned, reg, backend):
    collector = Collector(reg.handle.store, grace_s=0)
    collector.choose()
    collector.condemn()
    before = objects(backend)
    with pytest.raises(InvalidInput, match="marked"):
        collector.delete()
    assert objects(backend) == before


def test_a_folder_without_a_log_is_no_run(tmp_path):
    with holdfast.init(tmp_path / "r", skip_race_probe=True) as opened:
        save_small(opened.create_run("run"), 1, 2)
        opened.run("run").retention.prune(Retention(last=1))
        (tmp_path / "r/runs/half/log").mkdir(parents=True)
        assert opened.gc(grace_s=0).deleted.objects > 0
        assert objects(LocalBackend(tmp_path / "r")) == needed(opened)
        assert list((tmp_path / "r/runs/half/log").iterdir()) == []


def test_a_mirror_is_collected_by_itself(thinned, reg, backend, open_registry):
    mirror = open_registry(new_backend(f"mirror-{uuid4()}"))
    sync(reg, mirror)
    reg.gc(grace_s=0)
    thinned.save(small_state(6), step=6)
    thinned.retention.prune(Retention(last=1))
    sync(reg, mirror)
    assert mirror.gc(grace_s=0).deleted.objects > 0
    assert same(mirror.checkpoint("run").load(), small_state(6))
    assert mirror.verify(deep=True).findings == ()


# What it costs


def test_what_a_collection_knows_of_placements_is_bounded(monkeypatch):
    monkeypatch.setattr(live, "_KNOWN_BYTES", 4 * (live._PLACEMENT_BYTES + 100))
    needs = Needs(None)
    for number in range(20):
        key = ObjectKey("placements", Digest.of(bytes([number])), 0)
        needs._know(key, (Digest.of(b""), bytes(100)))
    assert len(needs._packs) == 4


@pytest.mark.parametrize("is_large", [True, False])
def test_one_large_placement_is_unpacked_at_a_time(is_large, backend, run, monkeypatch):
    """A thread that is within waits for others: they come unless the placements are large."""
    for step in range(4):
        run.save(small_state(step), step=step)
    within, others = [], Event()
    decode = live.Placement.decode

    def slowly(*args, **more):
        within.append(1)
        (others.set if len(within) > 1 else partial(others.wait, 0.05 if is_large else 60))()
        within.pop()
        return decode(*args, **more)

    monkeypatch.setattr(live.Placement, "decode", slowly)
    monkeypatch.setattr(live, "_LARGE_BYTES", 0 if is_large else 2**20)
    with open_on(backend) as opened:
        collect(opened.handle.store, grace_s=0)
    assert others.is_set() != is_large


def test_a_second_collection_reads_each_slot_and_placement_once(thinned, reg, backend):
    reg.gc(grace_s=0)
    calls = []
    with open_on(Metered(backend, calls)) as opened:
        collect(opened.handle.store, grace_s=0)
    got = [call.key for call in calls if call.method == "get"]
    assert len(got) == len(set(got))
    assert not [key for key in got if key.startswith(("packs/", "manifests/", "runs/run/snap"))]
    listed = [call for call in calls if call.method == "list"]
    assert len(listed) == 7  # three kinds, epochs, probes, notes, runs
    # The slot that the note proves and the mark after it; of placements none.
    assert sorted(key for key in got if not key.startswith(("epochs/", "reg"))) == [
        note_key(1),
        slot_key("run", 6),
        slot_key("run", 7),
    ]
    assert {call.method for call in calls} <= {"get", "list", "clear_unfinished", "keeps_versions"}


@pytest.mark.parametrize("is_full", [False, True])
def test_marking_an_idle_run_costs_two_requests(thinned, backend, reg, is_full):
    calls = []
    with open_on(Metered(backend, calls)) as opened:
        collector = Collector(opened.handle.store, grace_s=0)
        collector.choose()
        if is_full:
            collector.spend_reserve()
        collector.condemn()
        calls.clear()
        collector.mark()
    marked = reg.run("run").manifest.next_slot - 1
    assert [(call.method, call.key) for call in calls] == [
        ("list", "runs/"),
        ("get", slot_key("run", marked - 1)),
        ("put_if_absent", slot_key("run", marked)),
        # At the eighth slot; a mark before it has none, and on a full store no mark has one.
        *([] if is_full else [("put", snapshot_key("run", marked))]),
    ]


def test_a_store_that_has_no_room_for_an_epoch_loses_nothing(thinned, backend):
    class Full(Wrapper):
        def put_if_absent(self, key, body):
            raise StoreFull("no space", where=key)

    before = contents(backend)
    with open_on(Full(backend)) as opened, pytest.raises(StoreFull):
        collect(opened.handle.store, grace_s=0.0)
    assert contents(backend) == before


def test_what_a_collector_read_after_its_mark_is_durable_before_it_deletes(
    thinned, backend, reg, monkeypatch
):
    noted = []

    class Noting(Wrapper):
        def make_durable(self, keys):
            noted.extend(keys)

        def delete(self, key):
            noted.append(f"delete {key}")
            super().delete(key)

    with open_on(Noting(backend)) as opened:
        collector = Collector(opened.handle.store, grace_s=0)
        collector.choose()
        collector.condemn()
        of = Needs.of

        def overtaken(self, run, but=()):
            """Find an object gone, as another collector would have it that is ahead."""
            monkeypatch.setattr(Needs, "of", of)
            thinned.refresh().status = "completed"
            raise MissingObject("gone", where="packs")

        monkeypatch.setattr(Needs, "of", overtaken)
        collector.mark()
        newest = slot_key("run", reg.run("run").manifest.next_slot - 1)
        assert noted[-2:] == [newest, epoch_key(1)]
        assert collector.delete().deleted.objects > 0
    assert noted.index(newest) < min(noted.index(one) for one in noted if one.startswith("delete"))


# What others see of it


def test_a_restore_finds_what_took_the_place_of_what_was_collected(
    run, reg, backend, open_registry
):
    """The newest checkpoint is evicted and collected while it is being loaded."""
    save_small(run, 1)
    hooked = Hooked(backend)
    late = open_registry(hooked).run("run")

    def act() -> None:
        other = open_registry(backend).run("run")
        save_small(other, 2)
        other.retention.prune(Retention(last=1))
        open_registry(backend).gc(grace_s=0)

    hooked.before = Once("packs/", act, "get")
    restored = late.restore()
    assert restored.checkpoint.step == 2
    assert same(restored.state, small_state(2))
    assert restored.report == ()


def test_a_load_of_what_was_collected_says_so(thinned, reg, backend, open_registry):
    gone = thinned.retention.evicted()[0]
    reg.gc(grace_s=0)
    with pytest.raises(MissingObject, match="was evicted, and its data was collected"):
        open_registry(backend).run("run").history.checkpoint(gone.handle.n).load()


@pytest.mark.parametrize(
    "act",
    [
        lambda run, checkpoint: run.pool.promote(checkpoint),
        lambda run, checkpoint: run.releases.publish("1.0.0", checkpoint, only="model"),
    ],
    ids=["promote", "publish"],
)
def test_what_is_collected_while_it_is_named_is_a_conflict(backend, open_registry, act):
    league = Pool(phase="main", size=2, seed_child=1, draws=(Draw(kind="roster", weight=1),))
    spec = RunSpec(phases=(Phase(name="main"),), inference=("model",), pool=league)
    save_small(open_registry(backend).create_run("run", preset=spec), 1)
    hooked = Hooked(backend)
    mine = open_registry(hooked).run("run")
    going = mine.latest()

    def let_go() -> None:
        other = open_registry(backend).run("run")
        save_small(other, 2)
        other.retention.prune(Retention(last=1))
        open_registry(backend).gc(grace_s=0)

    hooked.before = Once("placements/", let_go, "get")
    with pytest.raises(Conflict, match=r"evicted|not kept|let go"):
        act(mine, going)
    assert hooked.before.done


def test_a_collection_that_stalls_until_its_clock_is_deleted_asks_again(backend, open_registry):
    aged = Aged(backend)
    save_small(open_registry(aged).create_run("run"), 1)

    def stall() -> None:
        aged.grow_older(DAY_S)
        assert open_registry(aged).gc().stale.objects == 1

    hooked = Hooked(aged)
    hooked.after = Once(".probe/", stall, "put")
    assert open_registry(hooked).gc().runs == 1
    assert hooked.after.done


def test_a_registry_that_keeps_has_the_places_of_all_logs_in_no_memory(reg, backend):
    """A mirror holds on to all that its logs ever named: that grows with the history."""
    reg.drop_rules(keep=True)
    for name in ("a", "b"):
        run = reg.create_run(name)
        for step in range(30):
            save_small(run, step)
        run.retention.prune(Retention(last=1))
    held = objects(backend)
    backend.put(str(ObjectKey("packs", Digest.of(b"x"), 0)), b"stray")
    collector = Collector(open_on(backend).handle.store, grace_s=0)

    def places() -> int:
        gc.collect()
        return sum(type(one) is Place for one in gc.get_objects())

    before = places()
    collector.choose()
    assert places() - before < 10
    collector.condemn()
    collector.mark()
    assert places() - before < 10
    assert collector.delete().deleted.objects == 1
    assert objects(backend) == held
