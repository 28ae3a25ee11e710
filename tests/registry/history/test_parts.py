"""A long run is opened by its newest records; whoever asks for older ones gets them from parts."""

from __future__ import annotations

import random
from collections import Counter
from unittest.mock import patch

import pytest

from holdfast.backends.memory import MemoryBackend
from holdfast.backends.wrappers import Metered
from holdfast.registry.errors import StoreUnavailable
from holdfast.registry.face.factory import open_on
from holdfast.registry.history import snapshots as snapshots_of
from holdfast.registry.history.actions import (
    Action,
    AddCheckpoint,
    Evict,
    Eviction,
    Mark,
    Place,
    ReportMetrics,
    Rewind,
)
from holdfast.registry.history.authorship import commit_line
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.replay import PART_NAMES, PartedRun, RunManifest, Slot, advance
from holdfast.registry.history.replay.parted_run import RecentRun
from holdfast.registry.history.snapshots import PARTED_VERSION, Snapshots, stale_snapshots
from holdfast.registry.objects.framing import join_lines, split_lines
from holdfast.registry.objects.keys import snapshot_key, snapshot_slot
from holdfast.registry.store.store import create_config
from holdfast.registry.upkeep.histories import Asked, read_run
from holdfast.registry.values import canonical
from tests.registry.history.test_compact import ACTS, _begun, refusal, slot_of
from tests.support.lives import digest, place

#: Parts after a few checkpoints, so that a short history has many.
SMALL = {
    "_RECENT_AT_MOST": 8,
    "_RECENT_LEFT": 4,
    "_CHANGED_AT_MOST": 3,
    "_PART_AT_MOST": 24,
}


@pytest.fixture
def store():
    backend = MemoryBackend()
    create_config(backend, "skipped")
    with open_on(backend) as reg:
        yield reg.handle.store


def replayed(store) -> RunManifest:
    return advance(RunManifest(run_id="r"), RunLog(store, "r").slots())


def opened(store) -> RunLog:
    log = RunLog(store, "r")
    log.open()
    return log


def put(log: RunLog, slot: Slot) -> None:
    log.append(lambda _: [raw for raw, _ in slot.lines], announces=False)


def keep(log: RunLog, *steps: int) -> None:
    """Save many checkpoints, each in a slot of its own, without any object."""
    for step in steps:
        added = AddCheckpoint(
            manifest=digest(step), phase="a", step=step, size_bytes=1, metrics={"loss": 1 / step}
        )
        log.append(lambda run, one=added: [place(one.manifest), commit_line(run, [one])])


def begun(store) -> RunLog:
    log = opened(store)
    put(log, Slot.build(0, [_begun()]))
    while log.run.next_slot < PART_NAMES:  # parts have the names of snapshots of these slots
        put(log, Slot.build(log.run.next_slot, [Mark(epoch=1)]))
    return log


@pytest.fixture
def rare():
    """How often each thing happened in the histories of a test."""
    found: Counter[str] = Counter()

    def counting(name, method):
        def called(*args, **kwargs):
            made = method(*args, **kwargs)
            found[name] += made is not None
            return made

        return called

    with (
        patch.multiple(snapshots_of, **SMALL),
        patch("holdfast.registry.history.log.SNAPSHOT_EVERY", 2),
        patch.object(PartedRun, "advanced", counting("folded", PartedRun.advanced)),
        patch.object(RecentRun, "joined", counting("joined", RecentRun.joined)),
        patch.object(Snapshots, "_with_part", counting("parts", Snapshots._with_part)),
    ):
        yield found


def check(log: RunLog, complete: RunManifest) -> None:
    """Compare a run that may be in parts with the replay of the whole log."""
    run, compact = log.run, complete.compact()
    assert run.count == len(complete.checkpoints)
    latest = run.latest()
    assert (latest and latest.encode()) == ((expected := complete.latest()) and expected.encode())
    for one in compact.checkpoints[::3]:
        assert run.by_n[one.n].encode() == one.encode()
        assert run.record(one.n).encode() == one.encode()
        assert run.by_manifest.get(one.manifest) == compact.by_manifest.get(one.manifest)
    assert [one.n for one in run.live()] == [one.n for one in complete.live()]
    assert run.held == complete.held
    assert run.encode() == compact.encode()


def live(store, draw: random.Random, slots: int, asked: float) -> int:
    """Lead a run through a history; return how often a handle went on without older records."""
    writer, went_on = begun(store), 0
    acts = [*ACTS, *["save"] * 40, *["tag", "untag"] * 4]
    for _ in range(slots):
        complete = writer.history()
        kinds = draw.choices(acts, k=draw.randint(1, 2))
        tried = [(act, draw.randrange(41), draw.randrange(41)) for act in kinds]
        slot = slot_of(complete, tried, placed=draw.random() < 0.9)
        if refusal(complete, slot):
            continue
        behind = opened(store) if draw.random() < asked else None
        if draw.random() < asked:
            writer = opened(store)
        put(writer, slot)
        if behind is not None:
            behind.refresh()
            went_on += isinstance(behind.run, PartedRun)
            check(behind, replayed(store))
            check(opened(store), replayed(store))
    return went_on


@pytest.mark.parametrize(
    ("seed", "slots", "asked"),
    [
        (10, 70, 0.15),
        *(pytest.param(seed, 150, 0.4, marks=pytest.mark.soak) for seed in range(40)),
    ],
)
def test_whatever_happens_a_run_in_parts_is_the_replay_of_its_log(store, rare, seed, slots, asked):
    went_on = live(store, random.Random(seed), slots, asked)
    assert min(rare[name] for name in ("folded", "joined", "parts")) > 5, rare
    assert went_on


def test_slots_that_concern_older_records_are_folded_into_the_whole_run(store):
    """A rewind to one of which the snapshot has a newer record, one to nothing, and a new place."""
    log = many(store, 140)
    first, last = log.run.checkpoints[2].n, log.run.checkpoints[-1].n
    report = ReportMetrics(checkpoint=first, metrics={"late": 1.0})
    again = AddCheckpoint(manifest=digest(5), phase="a", step=5, size_bytes=1)
    gone = Evict(evictions=(Eviction(checkpoint=log.run.checkpoints[4].n, reason="r"),))
    for actions in ([report], [gone], [again], [Rewind(to=first)], [Rewind(to=None)]):
        placed = [place(digest(5), 9)] if actions == [again] else []
        behind = opened(store)
        assert isinstance(behind.run, PartedRun)
        put_one(log, actions, placed)
        behind.refresh()
        check(behind, replayed(store))
        check(opened(store), replayed(store))
        keep(log, *range(1000 + last, 1009 + last))  # a snapshot comes after it
        check(opened(store), replayed(store))
        last += 9


def put_one(log: RunLog, actions: list[Action], placed: list[Place]) -> None:
    log.append(lambda run: [*placed, commit_line(run, actions)])


def many(store, count: int) -> RunLog:
    log = begun(store)
    keep(log, *range(1, count + 1))
    return log


def cost_of_opening(store, count: int):
    """Return the requests and bytes of opening a run, and of asking for its latest checkpoint."""
    many(store, count)
    metered = Metered(store.backend)
    with open_on(metered) as reg:
        before = metered.snapshot()
        log = opened(reg.handle.store)
        assert log.run.count == count
        assert log.run.latest().step == count
        assert log.run.by_manifest[digest(count)] == place(digest(count))
        return metered.snapshot().since(before)


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.soak)])
def test_a_long_run_opens_like_a_short_one(store, count):
    backend = MemoryBackend()
    create_config(backend, "skipped")
    with open_on(backend) as reg:
        short = cost_of_opening(reg.handle.store, 100)
    long = cost_of_opening(store, count)
    assert long.requests <= 2 * short.requests
    assert long.read_bytes <= 2 * short.read_bytes


@pytest.mark.parametrize("loss", ["deleted", "another", "garbage"])
def test_without_its_parts_a_run_is_replayed(store, loss):
    many(store, 150)
    part = list(store.backend.list("runs/r/snapshots/"))[-1].key
    assert snapshot_slot(part) < PART_NAMES
    before = store.backend.get(part)
    if loss == "deleted":
        store.backend.delete(part)
    else:
        header, body = split_lines(before, where=part)
        other = join_lines([header, body.replace(b'"phase":"a"', b'"phase":"b"')])
        store.backend.put(part, other if loss == "another" else b"garbage")
    log = opened(store)
    assert isinstance(log.run, PartedRun)
    assert log.run.latest().step == 150
    check(log, replayed(store))
    # The next snapshots have parts that are there.
    keep(log, *range(151, 170))
    for info in list(store.backend.list("runs/r/log/")):
        if int(info.key[-20:]) < 150:
            store.backend.delete(info.key)
    assert len(opened(store).run.live()) == 169


def test_a_collection_leaves_the_parts_of_the_newest_snapshots(store):
    many(store, 400)
    listed = list(store.backend.list("runs/r/snapshots/"))
    stale = [snapshot_slot(one.key) for one in stale_snapshots(listed)]
    assert len(stale) == len(listed) - 2 - sum(snapshot_slot(i.key) < PART_NAMES for i in listed)
    for one in stale_snapshots(listed):
        store.backend.delete(one.key)
    for info in list(store.backend.list("runs/r/log/")):
        if int(info.key[-20:]) < 400:
            store.backend.delete(info.key)
    assert len(opened(store).run.live()) == 400
    short = [one for one in listed if snapshot_slot(one.key) < 128]
    assert stale_snapshots(short) == short[2:]


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.soak) for n in range(9))])
def test_two_writers_leave_each_other_the_parts_that_the_newest_snapshot_names(store, rare, seed):
    """A training, and an evaluation that names its checkpoints: their parts have the same names."""
    draw, first = random.Random(seed), many(store, 20)
    second = opened(store)
    assert second.run.count == 20
    for step in range(21, 200):
        keep(draw.choice([first] * 3 + [second]), step)
        first.refresh(), second.refresh()
        with patch.object(RunLog, "_replayed", side_effect=AssertionError):
            assert [one.step for one in opened(store).run.live()] == [*range(1, step + 1)]
        newest = max(Snapshots(store, "r").listed())
        assert first.run.next_slot - newest < 16
    assert rare["parts"] > 5


def test_verification_reads_a_snapshot_with_its_parts(store):
    many(store, 140)
    listed = [one.key for one in store.backend.list("runs/r/snapshots/")]
    asked = Asked("r", snapshots=tuple(map(snapshot_slot, (listed[0], listed[-1]))))
    assert read_run(store, asked)[0].findings == ()
    header, body = split_lines(store.backend.get(listed[0]), where=listed[0])
    assert canonical.decode(header, where=listed[0])["replay"] == PARTED_VERSION
    wrong = body.replace(b'"phase":"a"', b'"phase":"b"')
    for part in (None, listed[-1]):  # with its parts, and without them
        if part:
            store.backend.delete(part)
        assert read_run(store, asked)[0].findings == ()
        store.backend.put(listed[0], join_lines([header, wrong]))
        (finding,) = read_run(store, asked)[0].findings
        assert (finding.where, finding.severity) == (listed[0], "error")
        store.backend.put(listed[0], join_lines([header, body]))


def test_a_program_that_does_not_know_parts_ignores_such_a_snapshot(store):
    """As the version before read it: it compares the whole header."""
    log = many(store, 150)
    (newest, *_) = Snapshots(store, "r").listed()
    (slot,) = log.fetch([newest])
    key = snapshot_key("r", newest)
    header, body = split_lines(store.backend.get(key), where=key)
    with patch.object(snapshots_of, "PARTED_VERSION", -1):
        assert Snapshots(store, "r").parse((header, body), slot) is None
        assert opened(store).run.encode() == replayed(store).compact().encode()


def test_parts_that_do_not_fit_are_made_anew_only_when_a_whole_snapshot_is_due(store, rare):
    """To encode them takes as long as all checkpoints, and each save would wait for it."""
    log = many(store, 600)
    for one in log.run.checkpoints[:9]:
        put_one(log, [ReportMetrics(checkpoint=one.n, metrics={"late": 1.0})], [])
    log.snapshots.newest = log.run.next_slot  # as a handle that has just met another writer
    before = rare["parts"]
    keep(log, *range(601, 630))
    assert rare["parts"] == before
    keep(log, *range(630, 645))
    assert rare["parts"] > before
    check(opened(store), replayed(store))


def test_a_snapshot_that_cannot_be_written_is_no_loss(store):
    """The parts that it would have named are not named later."""
    log = many(store, 140)
    with patch.object(MemoryBackend, "put", side_effect=StoreUnavailable("away", where="here")):
        keep(log, *range(141, 210))
    keep(log, *range(210, 230))
    run = opened(store)
    assert isinstance(run.run, PartedRun)
    with patch.object(RunLog, "_replayed", side_effect=AssertionError):
        assert len(run.run.live()) == 229
