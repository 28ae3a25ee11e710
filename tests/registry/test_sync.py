"""Sync: fast-forward, resumable, and nothing damaged is passed on."""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from pathlib import Path
from typing import ClassVar

import pytest

import holdfast
from holdfast import sync
from holdfast.backends import parse
from holdfast.backends.errors import StoreUnavailable
from holdfast.backends.wrappers import Metered, Wrapper
from holdfast.registry.errors import (
    Damaged,
    Diverged,
    Frozen,
    InvalidInput,
    MissingObject,
    NotFound,
    RolledBack,
    UnsupportedFormat,
)
from holdfast.registry.face import open_on
from holdfast.registry.history.actions import Mark, Seal, SetStatus
from holdfast.registry.history.authorship import commit_line
from holdfast.registry.history.epochs import encode_sweep
from holdfast.registry.history.log import SNAPSHOT_EVERY, RunLog
from holdfast.registry.history.snapshots import REPLAY_VERSION, snapshot_header
from holdfast.registry.objects.framing import join_lines
from holdfast.registry.objects.keys import (
    ObjectKey,
    epoch_key,
    slot_key,
    snapshot_key,
    snapshot_prefix,
)
from holdfast.registry.spec import Retention
from holdfast.registry.store import Address
from holdfast.registry.store.heads import folder, open_heads
from holdfast.registry.writing.object_writer import placed_keys
from tests.support.faults import Hooked, Once, flip
from tests.support.keys import write_key
from tests.support.states import same, save_small, small_state
from tests.support.stores import commit_lines, contents, new_backend, objects, packs_of


@pytest.fixture
def src():
    return new_backend(uuid.uuid4().hex)


@pytest.fixture
def dst():
    return new_backend(uuid.uuid4().hex)


@pytest.fixture
def source(src, open_registry):
    return open_registry(src)


@pytest.fixture
def target(dst, open_registry):
    return open_registry(dst)


@pytest.fixture
def filled(source):
    run = source.create_run("run")
    save_small(run, 1, 2, 3)
    return run


def test_a_run_is_copied_whole_with_its_history_byte_for_byte(
    source, target, src, dst, filled, open_registry
):
    report = sync(source, target)
    assert [run.run_id for run in report.runs] == ["run"]
    assert report.runs[0].checkpoints == 3
    assert report.bytes_copied == report.runs[0].bytes_copied > 0
    assert commit_lines(dst, "run") == commit_lines(src, "run")
    fresh = open_registry(dst)
    assert fresh.verify(deep=True).ok
    for checkpoint, i in zip(fresh.run("run").checkpoints(), (1, 2, 3), strict=True):
        assert same(checkpoint.load(), small_state(i))
        assert checkpoint.ref == f"run/main/step0000000{i}"


def test_the_report_counts_every_commit_that_was_lacking(source, target, filled):
    assert sync(source, target).runs[0].commits == 4


def test_the_report_counts_checkpoints_that_were_evicted_since(source, target, filled):
    filled.retention.prune(Retention(last=1))
    assert sync(source, target).runs[0].checkpoints == 3


def test_ids_are_the_same_on_both_sides(source, target, filled):
    sync(source, target)
    assert [c.digest for c in target.run("run").checkpoints()] == [
        c.digest for c in filled.checkpoints()
    ]


def test_everything_lacking_becomes_visible_in_one_slot(source, target, dst, filled):
    sync(source, target)
    assert len(contents(dst, "runs/run/log/")) == 2
    filled.save(small_state(4), step=4)
    filled.save(small_state(5), step=5)
    sync(source, target)
    assert len(contents(dst, "runs/run/log/")) == 3


def test_a_second_sync_copies_nothing(source, target, dst, filled):
    sync(source, target)
    before = contents(dst)
    report = sync(source, target)
    assert contents(dst) == before
    assert (report.bytes_copied, report.runs[0].commits, report.runs[0].packs_copied) == (0, 0, 0)


def test_only_what_is_new_is_sent(source, target, filled):
    sync(source, target)
    filled.save(small_state(3) | {"more": small_state(9)["model"]}, step=4)
    report = sync(source, target)
    assert (report.runs[0].commits, report.runs[0].checkpoints) == (1, 1)
    assert (report.runs[0].packs_copied, report.runs[0].packs_present) == (1, 2)


def test_a_sync_that_broke_off_is_resumed_without_sending_again(
    src, dst, source, filled, open_registry
):
    class Breaks(Wrapper):
        left = 3

        def put_if_absent(self, key, body):
            if key.startswith("packs/"):
                self.left -= 1
                if self.left < 0:
                    raise StoreUnavailable("down", where=key)
            return super().put_if_absent(key, body)

    with pytest.raises(StoreUnavailable):
        sync(source, open_registry(Breaks(dst)))
    fresh = open_registry(dst)
    assert fresh.run("run").latest() is None
    report = sync(source, fresh)
    assert report.runs[0].packs_present >= 1
    assert report.runs[0].packs_copied + report.runs[0].packs_present == 6
    assert open_registry(dst).verify(deep=True).ok
    assert commit_lines(dst, "run") == commit_lines(src, "run")


def test_progress_is_told_of_every_pack(source, target, filled):
    seen = []
    report = sync(source, target, progress=seen.append)
    assert seen == sorted(set(seen))
    assert seen[-1] == report.bytes_copied
    assert len(seen) == report.runs[0].packs_copied


def test_only_chosen_runs(source, target, filled):
    source.create_run("other").save(small_state(7), step=1)
    sync(source, target, ["other"])
    assert target.run_names() == ["other"]
    sync(source, target, [])
    assert target.run_names() == ["other"]
    sync(source, target)
    assert target.run_names() == ["other", "run"]


def test_packs_that_another_run_brought_are_not_sent_again(source, target, filled):
    source.create_run("twin").save(small_state(1), step=1)
    sync(source, target, ["run"])
    report = sync(source, target, ["twin"])
    assert (report.runs[0].packs_copied, report.runs[0].packs_present) == (0, 2)


def test_an_unknown_run_suggests_near_names_and_copies_nothing(source, target, dst, filled):
    before = contents(dst)
    with pytest.raises(NotFound, match=r"rum.*Did you mean 'run'"):
        sync(source, target, ["run", "rum"])
    assert contents(dst) == before


def test_a_run_of_a_newer_version_does_not_hold_up_the_others(source, target, src, filled):
    state = source.create_run("newer").manifest
    line = commit_line(state, [SetStatus(status="failed")]).encode()
    newer = line.replace(b'"action":"run.status"', b'"action":"run.dance"')
    src.put(slot_key("newer", 1), join_lines([newer]))
    with pytest.raises(UnsupportedFormat, match=r"Not copied: newer\. Copied .*: run"):
        sync(source, target)
    assert target.run_names() == ["run"]


def test_a_registry_is_not_synced_to_itself(source, src, filled, open_registry):
    before = contents(src)
    with pytest.raises(InvalidInput, match="cannot be synced to itself"):
        sync(source, open_registry(src))
    assert contents(src) == before


def test_urls_are_opened_and_closed(src, dst, source, filled):
    assert sync(src.url, dst.url).runs[0].checkpoints == 3


def test_a_place_that_is_no_registry_is_not_found(source, filled):
    with pytest.raises(NotFound, match="not a registry"):
        sync(source, f"memory://{uuid.uuid4().hex}")


# Fast-forward only


def diverge(source, target, at: int) -> None:
    """Give both sides the same commits up to `at`, and others after it."""
    run = source.create_run("run")
    save_small(run, *range(1, at))
    if at:
        sync(source, target)
        target.run("run").save(small_state(90), step=90)
    else:
        target.create_run("run")
    run.save(small_state(50), step=50)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_divergence_names_the_commit_and_writes_nothing(source, target, dst, at):
    diverge(source, target, at)
    before = contents(dst)
    with pytest.raises(Diverged) as caught:
        sync(source, target)
    assert caught.value.where == f"run: commit {at}"
    assert "@" in caught.value.expected
    assert contents(dst) == before


@pytest.mark.parametrize("more", [1, 3])
def test_divergence_is_seen_where_the_destination_is_ahead_too(source, target, dst, more):
    diverge(source, target, 2)
    other = target.run("run")
    for i in range(more):
        other.save(small_state(60 + i), step=160 + i)
    before = contents(dst)
    with pytest.raises(Diverged, match="run: commit 2"):
        sync(source, target)
    assert contents(dst) == before


def test_a_destination_that_is_ahead_is_fine(source, target, src, dst, filled):
    sync(source, target)
    target.run("run").save(small_state(4), step=4)
    before = contents(dst)
    report = sync(source, target)
    assert contents(dst) == before
    assert report.runs[0].commits == 0
    sync(target, source)
    assert commit_lines(src, "run") == commit_lines(dst, "run")


def test_back_and_forth_over_three_registries(source, target, filled, open_registry):
    third = open_registry(new_backend(uuid.uuid4().hex))
    sync(source, target)
    target.run("run").save(small_state(4), step=4)
    sync(target, third)
    third.run("run").save(small_state(5), step=5)
    sync(third, source)
    assert [c.step for c in source.run("run").checkpoints()] == [1, 2, 3, 4, 5]
    assert source.verify(deep=True).ok


# What is damaged at the source


@pytest.mark.parametrize("bit", [9, -9])
def test_a_damaged_pack_is_not_passed_on(source, target, src, dst, filled, bit, open_registry):
    key = packs_of(filled.latest())[0]
    flip(src, key, bit)
    with pytest.raises(Damaged, match=key):
        sync(source, target)
    assert key not in contents(dst)
    assert open_registry(dst).run("run").latest() is None
    assert open_registry(dst).verify(deep=True).ok


@pytest.mark.parametrize("kind", ["packs", "manifests", "placements"])
def test_an_object_that_is_gone_at_the_source_is_told(
    src, target, dst, filled, kind, open_registry
):
    key = next(key for key in sorted(objects(src)) if key.startswith(kind))
    src.delete(key)
    with pytest.raises(MissingObject, match=key):
        sync(open_registry(src), target)
    assert open_registry(dst).run("run").latest() is None


@pytest.mark.parametrize("kind", ["manifests", "placements"])
def test_a_damaged_description_is_told(src, target, dst, filled, kind, open_registry):
    key = next(key for key in sorted(objects(src)) if key.startswith(kind))
    flip(src, key)
    with pytest.raises(Damaged, match=key):
        sync(open_registry(src), target)
    assert open_registry(dst).run("run").latest() is None


# A writer at its destination


def test_the_destination_has_places_of_its_own(source, target, dst, filled, open_registry):
    for epoch in (1, 2):
        dst.put(epoch_key(epoch), encode_sweep(epoch, []))
    sync(source, target)
    assert {key.rpartition(".")[2] for key in objects(dst)} == {"2"}
    assert open_registry(dst).verify(deep=True).ok


def test_a_sweep_at_the_destination_between_copy_and_commit_asks_for_new_choices(
    source, dst, filled, open_registry
):
    sync(source, open_registry(dst), ["run"])
    source.create_run("twin").save(small_state(1), step=1)
    hooked = Hooked(dst)
    rival = open_registry(dst)

    def collector():
        keys = [ObjectKey.parse(key) for key in objects(dst)]
        dst.put(epoch_key(1), encode_sweep(1, keys))
        log = RunLog(rival.handle.store, "twin")
        log.open()
        log.append(lambda state: [Mark(epoch=1)])

    hooked.before = Once("runs/twin/log/" + "1".zfill(20), collector, "put_if_absent")
    sync(source, open_registry(hooked), ["twin"])
    assert hooked.before.done
    checkpoint = open_registry(dst).run("twin").latest()
    assert all(key.endswith(".1") for key in packs_of(checkpoint))
    assert same(checkpoint.load(), small_state(1))


def test_commit_0_stands_before_the_epoch_is_observed(source, dst, filled, open_registry):
    calls = []
    sync(source, open_registry(Metered(dst, calls)))
    keys = [c.key for c in calls if c.method == "put_if_absent" or c.key == "epochs/"]
    # The first listing only asks whether the registry is frozen.
    assert keys[:3] == ["epochs/", "runs/run/log/" + "0" * 20, "epochs/"]


def test_a_run_without_a_beginning_stops_nothing(source, target, src, filled):
    src.put("runs/empty/notes", b"x")
    sync(source, target)
    assert target.run("run").latest().step == 3


@pytest.mark.sometimes("the destination has lost a state that a sync relied on")
def test_what_was_let_go_at_the_destination_meanwhile_is_copied_anew(
    filled, source, src, dst, target, open_registry
):
    sync(source, target)
    filled.retention.prune(Retention(last=1))
    evicted = filled.retention.evicted()
    before_the_undo = new_backend(uuid.uuid4().hex)
    for key, data in contents(src).items():
        before_the_undo.put(key, data)
    filled.retention.undo(*evicted)

    def another_sync_and_a_collection():
        sync(open_registry(before_the_undo), open_registry(dst))
        keys = objects(dst)
        assert dst.put_if_absent(
            epoch_key(1), encode_sweep(1, [ObjectKey.parse(key) for key in keys])
        )
        log = RunLog(open_registry(dst).handle.store, "run")
        log.open()
        state = log.append(lambda state: [Mark(epoch=1)])
        store = open_registry(dst).handle.store
        places = [state.by_manifest[manifest] for manifest in state.held]
        live = {str(k) for p in places for k in placed_keys(p, store.placement(p.placement_key))}
        assert keys - live
        for key in keys - live:
            dst.delete(key)

    hooked = Hooked(dst)
    hooked.before = Once("runs/run/log/", another_sync_and_a_collection, "put_if_absent")
    sync(source, open_registry(hooked))
    mirror = open_registry(dst)
    assert mirror.verify(deep=True).ok
    assert [ck.step for ck in mirror.run("run").checkpoints()] == [1, 2, 3]
    for ck in mirror.run("run").checkpoints():
        assert same(ck.load(), small_state(ck.step))


@pytest.mark.sometimes("the source has moved an object during a sync")
def test_what_was_let_go_at_the_source_meanwhile_is_read_again(
    filled, source, src, target, dst, open_registry
):
    doomed = packs_of(source.run("run").checkpoints()[0])

    def eviction_and_collection():
        filled.retention.prune(Retention(last=1))
        open_registry(src).gc(grace_s=0)
        assert not objects(src) & set(doomed)

    hooked = Hooked(src)
    hooked.before = Once("placements/", eviction_and_collection, "get")
    sync(open_registry(hooked), target)
    assert hooked.before.done
    mirror = open_registry(dst)
    assert mirror.verify(deep=True).ok
    assert [ck.step for ck in mirror.run("run").checkpoints()] == [3]


def test_a_run_that_was_dropped_is_copied_and_then_complete(
    filled, source, target, dst, open_registry
):
    sync(source, target)
    filled.retention.drop("no use")
    assert sync(source, target).runs[0].commits == 1
    assert open_registry(dst).run("run").manifest.dropped == "no use"
    assert sync(source, open_registry(dst)).runs[0].commits == 0


# What was compared is remembered


RUNS = ("a", "b", "c", "d")


class Mirrored:
    """Two registries in folders; each sync is one of a new process, with its requests counted."""

    def __init__(self, place: Path) -> None:
        self.src, self.dst = place / "src", place / "dst"
        holdfast.init(self.dst, skip_race_probe=True).close()
        with holdfast.init(self.src, skip_race_probe=True) as reg:
            for i, name in enumerate(RUNS):
                save_small(reg.create_run(name), i, 7)

    def sync(self, **wrapped):
        meters = [
            Metered(wrapped.get(side, lambda backend: backend)(Address(place).open()))
            for side, place in (("src", self.src), ("dst", self.dst))
        ]
        with (
            open_on(meters[0], heads=open_heads(parse(self.src))) as source,
            open_on(meters[1], heads=open_heads(parse(self.dst))) as target,
            meters[0].measure() as read,
            meters[1].measure() as written,
        ):
            report = sync(source, target)
        self.calls = [dict(read.calls), dict(written.calls)]
        return {run.run_id: run.commits for run in report.runs}

    def memory(self) -> Path:
        name = folder.beside(folder.place_name(parse(self.dst)), ".synced")
        return Path(folder.state_folder()) / name

    def mark_all(self, place: Path) -> None:
        with holdfast.open(place) as reg:
            reg.handle.store.backend.put(epoch_key(1), encode_sweep(1, []))
            for name in RUNS:
                log = RunLog(reg.handle.store, name)
                log.open()
                log.append(lambda _: [Mark(epoch=1), Seal()])


@pytest.fixture
def mirrored(tmp_path):
    return Mirrored(tmp_path)


#: Each log is listed once, and beside them the names of the runs, the notes of collectors and, at
#: the source, the signatures.
IDLE = [{"list": 7}, {"list": 5}]
#: Where all runs are sealed: names of the runs, markers and notes; at the source also signatures.
SEALED = [{"list": 4}, {"list": 3}]


def test_an_idle_sync_lists_each_log_once_and_reads_nothing(mirrored):
    mirrored.sync()
    assert mirrored.sync() == dict.fromkeys(RUNS, 0)
    assert mirrored.calls == IDLE
    # A collection marks and seals each log: its slot is read once, and the next sync knows it.
    mirrored.mark_all(mirrored.src)
    mirrored.mark_all(mirrored.dst)
    assert mirrored.sync() == dict.fromkeys(RUNS, 0)
    assert mirrored.calls == [{"list": 7, "get": 4}, {"list": 5, "get": 4}]
    assert mirrored.sync() == dict.fromkeys(RUNS, 0)
    assert mirrored.calls == SEALED
    with holdfast.open(mirrored.src) as reg:
        reg.run("b").save(small_state(9), step=9)
    assert mirrored.sync() == dict.fromkeys(RUNS, 0) | {"b": 1}
    with holdfast.open(mirrored.dst) as reg:
        assert reg.verify(deep=True).ok
        assert same(reg.run("b").latest().load(), small_state(9))


def test_a_frozen_mirror_gets_no_signature_of_a_run_that_is_equal(mirrored, tmp_path):
    mirrored.sync()
    with holdfast.open(mirrored.dst) as reg:
        reg.freeze()
    mirrored.sync()
    with holdfast.open(mirrored.src) as reg:
        reg.sign(write_key(tmp_path, "ana"), ["a"])
    with pytest.raises(Frozen):
        mirrored.sync()
    assert not (mirrored.dst / "signatures").exists()


@pytest.mark.sometimes("a run is compared whole again")
def test_a_commit_at_the_destination_is_seen_as_well(mirrored):
    mirrored.sync()
    with holdfast.open(mirrored.dst) as reg:
        reg.run("c").save(small_state(5), step=9)
    assert mirrored.sync() == dict.fromkeys(RUNS, 0)
    with holdfast.open(mirrored.src) as reg:
        reg.run("c").save(small_state(6), step=9)
    with pytest.raises(Diverged, match="c: commit"):
        mirrored.sync()


def test_of_a_run_that_changed_only_the_new_slots_are_read(mirrored):
    with holdfast.open(mirrored.src) as reg:
        for step in range(10, 50):
            reg.run("a").save(small_state(step), step=step)
    mirrored.sync()
    with holdfast.open(mirrored.src) as reg:
        before = reg.run("a").manifest.next_slot
        for step in (50, 51):
            reg.run("a").save(small_state(step), step=step)
        reg.run("a").retention.prune(Retention(last=1))
    calls = []
    assert mirrored.sync(src=lambda backend: Metered(backend, calls))["a"] == 3
    read = {one.key for one in calls if one.method == "get" and one.key.startswith("runs/a/log/")}
    assert {slot_key("a", before + i) for i in range(3)} <= read
    assert len(read) < 3 + SNAPSHOT_EVERY  # those behind the newest snapshot
    with holdfast.open(mirrored.dst) as reg:
        assert same(reg.run("a").latest().load(), small_state(51))
        assert reg.verify(deep=True).ok


def test_a_wrong_snapshot_of_the_source_costs_time_and_no_checkpoint(mirrored):
    mirrored.sync()
    with holdfast.open(mirrored.src) as reg:
        log = reg.run("a").handle.log
        reg.run("a").save(small_state(8), step=8)
        reg.run("a").save(small_state(9), step=9)
        lacking = log.run.changed(checkpoints=log.run.checkpoints[:-1], places=log.run.places[:-1])
        for one in reg.handle.store.backend.list(snapshot_prefix("a")):
            reg.handle.store.backend.delete(one.key)
        data = join_lines([snapshot_header(log.tail.slot, REPLAY_VERSION), lacking.encode()])
        reg.handle.store.backend.put(snapshot_key("a", log.tail.slot.number), data)
    assert mirrored.sync()["a"] == 2
    with holdfast.open(mirrored.dst) as reg:
        assert same(reg.run("a").latest().load(), small_state(9))
        assert reg.verify(deep=True).ok


def test_a_run_that_is_gone_at_the_destination_is_not_up_to_date(mirrored):
    mirrored.mark_all(mirrored.src)
    mirrored.sync()
    mirrored.mark_all(mirrored.dst)
    for _ in range(2):
        mirrored.sync()
    assert mirrored.calls == SEALED
    shutil.rmtree(mirrored.dst / "runs" / "b")
    with pytest.raises(RolledBack):
        mirrored.sync()


@pytest.mark.parametrize("side", ["src", "dst"])
def test_a_log_that_went_back_is_refused_though_it_ends_as_it_was_compared(mirrored, side):
    mirrored.sync()
    place = getattr(mirrored, side)
    with holdfast.open(place) as reg:
        reg.run("a").save(small_state(5), step=9)
    max((place / "runs" / "a" / "log").iterdir()).unlink()
    with pytest.raises(RolledBack):
        mirrored.sync()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path, _: path.write_bytes(path.read_bytes()[:-9]),
        lambda path, _: path.unlink(),
        lambda _, mirrored: (mirrored.src / "runs/a/log" / f"{0:020d}").touch(),
    ],
    ids=["damaged", "gone", "another time"],
)
def test_what_cannot_be_trusted_costs_time(mirrored, spoil):
    mirrored.sync()
    spoil(mirrored.memory(), mirrored)
    assert mirrored.sync() == dict.fromkeys(RUNS, 0)
    mirrored.sync()
    assert mirrored.calls == IDLE


def test_another_registry_at_the_place_is_compared_anew(mirrored, tmp_path):
    mirrored.sync()
    other = Mirrored(tmp_path / "other")
    other.sync()
    for file in mirrored.dst.glob("runs/*/log/*"):
        os.utime(other.dst / file.relative_to(mirrored.dst), ns=(0, file.stat().st_mtime_ns))
    mirrored.dst.rename(tmp_path / "old")
    other.dst.rename(mirrored.dst)
    mirrored.memory().with_suffix(".heads").unlink()
    with pytest.raises(Diverged):
        mirrored.sync()


def test_runs_are_copied_at_once_and_a_pack_that_they_share_is_sent_once(mirrored):
    class Together(Wrapper):
        """Answers only when two runs are asked for at once."""

        both = threading.Barrier(2, timeout=300)
        sent: ClassVar[list[str]] = []

        def get(self, key, byte_range=None, **options):
            if key.startswith(("runs/a/log", "runs/b/log")) and key.endswith("0"):
                self.both.wait()
            return self.inner.get(key, byte_range, **options)

        def put_if_absent(self, key, body):
            self.sent.append(key)
            return self.inner.put_if_absent(key, body)

    assert mirrored.sync(src=Together, dst=Together) == dict.fromkeys(RUNS, 3)
    packs = [key for key in Together.sent if key.startswith("packs/")]
    assert len(packs) == len(set(packs)) > len(RUNS)
