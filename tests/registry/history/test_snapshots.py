"""What was evicted leaves the newest snapshot, and everything that asks for it still finds it."""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise

import pytest

from holdfast import Monitor
from holdfast.backends.wrappers import Metered
from holdfast.backends.wrappers.metered import Call
from holdfast.registry.errors import Conflict, NotFound, RolledBack
from holdfast.registry.face.factory import open_on
from holdfast.registry.history.actions import AddCheckpoint, Evict, SetPin, SetStatus
from holdfast.registry.history.authorship import commit_line
from holdfast.registry.history.log import SNAPSHOT_EVERY, RunLog
from holdfast.registry.history.replay import CheckpointRecord, RunManifest, Slot, advance
from holdfast.registry.history.snapshots import REPLAY_VERSION, Snapshots
from holdfast.registry.objects.framing import join_lines, split_lines
from holdfast.registry.objects.keys import slot_key, snapshot_key, snapshot_slot
from holdfast.registry.spec import Retention
from holdfast.registry.upkeep.histories import Asked, read_run
from holdfast.registry.values import canonical
from tests.support.states import same, save_small, small_state
from tests.support.stores import contents, new_backend

LOSS = Monitor(metric="loss", mode="min")


@pytest.fixture
def trained(reg, monkeypatch):
    """A run that has saved, reported, tagged, gone back and promoted, and kept little of it."""
    monkeypatch.setattr("holdfast.registry.history.log.SNAPSHOT_EVERY", 5)
    run = reg.create_run("run", seed=1, retention=Retention(last=3), monitor=LOSS)
    for step in range(1, 13):
        metrics = {"loss": 1 / step, "mu": 20.0 + step, "sigma": 2.0}
        checkpoint = run.save(small_state(step), step=step, metrics=metrics)
        if step % 4 == 0:
            run.pins.tags.set("fourth", checkpoint)
            run.releases.publish(f"1.{step}.0", checkpoint)
            run.pool.promote(checkpoint)
    run.restore(at=run.checkpoints()[-2])
    for step in range(12, 16):
        run.save(small_state(step + 100), step=step, metrics={"loss": 1 / step})
    return run


@pytest.fixture
def reopened(trained, backend, open_registry):
    """The same run by a handle that was opened by way of a snapshot."""
    newest = next(backend.list("runs/run/snapshots/"))
    assert snapshot_slot(newest.key) > 15
    return open_registry(backend).run("run")


def replayed(backend) -> RunManifest:
    with open_on(backend) as reg:
        return advance(RunManifest(run_id="run"), RunLog(reg.handle.store, "run").slots())


def test_what_was_evicted_is_not_in_the_snapshot(trained, backend):
    newest = next(backend.list("runs/run/snapshots/")).key
    header, body = split_lines(backend.get(newest), where=newest)
    assert canonical.decode(header, where=newest)["replay"] == REPLAY_VERSION == 4
    said = RunManifest.decode(body, where=newest)
    assert said.gone.count > 8
    assert len(said.checkpoints) <= 6
    assert {place.manifest for place in said.places} == set(said.held)
    evicted = [one for one in replayed(backend).evicted if one.n < said.commits]
    assert all(one.manifest.hex().encode() not in body for one in evicted[:2])


def test_a_handle_that_reads_a_snapshot_is_one_that_replays_the_log(reopened, trained, backend):
    whole = replayed(backend)
    assert reopened.manifest.encode() == trained.manifest.encode() == whole.compact().encode()
    assert reopened.history.manifest() == trained.history.manifest() == whole
    assert [one.handle.newest_record() for one in reopened.retention.evicted()] == whole.evicted
    for n, record in whole.by_n.items():
        found = reopened.history.checkpoint(n)
        assert (found.handle.newest_record(), found.is_evicted) == (
            record,
            record.evicted is not None,
        )
        assert (found.superseded, found.metrics) == (record.superseded, record.metrics)
        assert found.handle.reader.place == whole.by_manifest[record.manifest]
        assert same(found.load(), trained.history.checkpoint(n).load())


@pytest.mark.parametrize("n", [-1, 0, 10**30, "1", None])
def test_numbers_that_added_no_checkpoint_are_not_found(reopened, n):
    with pytest.raises(NotFound, match="this commit added no checkpoint"):
        reopened.history.checkpoint(n)


def test_names_of_what_was_evicted_say_so(reopened, reg, backend):
    gone = replayed(backend).evicted[0]
    for name in (gone.manifest.hex(), f"main/step{gone.step:08d}"):
        with pytest.raises(NotFound, match="evicted"):
            reg.checkpoint(f"run/{name}")
    with pytest.raises(Conflict, match="this checkpoint was evicted"):
        reopened.pins.tags.set("late", reopened.history.checkpoint(gone.n))
    with pytest.raises(Conflict, match="this checkpoint was evicted") as refused:
        reopened.restore(at=reopened.history.checkpoint(gone.n))
    assert gone.evicted in str(refused.value)
    sources = {one.version: one.source for one in reopened.releases.list()}
    assert sources["1.4.0"] == "run/main/step00000004"


def test_reports_on_what_was_evicted_are_kept_in_the_log(reopened, trained, backend):
    gone = replayed(backend).evicted[0]
    reopened.history.checkpoint(gone.n).report({"eval": 7.0})
    assert reopened.history.checkpoint(gone.n).metrics["eval"] == 7.0
    trained.refresh()
    assert trained.manifest.encode() == reopened.manifest.encode()
    assert trained.history.checkpoint(gone.n).metrics == {**gone.metrics, "eval": 7.0}


def test_what_was_evicted_comes_back_through_a_snapshot(reopened, trained, reg, backend):
    commits = [action for commit in reopened.history.commits() for action in commit.actions]
    last = [action for action in commits if isinstance(action, Evict)][-1]
    back = reopened.retention.undo()
    assert {one.handle.n for one in back} == {one.checkpoint for one in last.evictions}
    (named,) = reopened.retention.undo(reopened.retention.evicted()[0])
    assert named.handle.newest_record().recovered
    assert same(named.load(), small_state(named.step))
    assert trained.refresh().manifest.encode() == reopened.manifest.encode()
    assert reopened.manifest.encode() == replayed(backend).compact().encode()
    assert reg.verify(deep=True).findings == ()
    # Nothing of it is remembered: the run is compact again.
    trained.save(small_state(500), step=500, metrics={"loss": 9.0})
    assert trained.manifest.gone is not None


def test_an_undo_is_followed_by_a_snapshot(reg, backend, open_registry):
    """Or each opening after it would read the whole log, for up to 64 slots."""
    run = reg.create_run("run", seed=1, retention=Retention(last=1))
    save_small(run, *range(1, 6))
    assert not list(backend.list("runs/run/snapshots/"))
    run.retention.undo()
    (only,) = backend.list("runs/run/snapshots/")
    assert snapshot_slot(only.key) == run.manifest.next_slot - 1
    run.save(small_state(6), step=6)
    calls: list[Call] = []
    fresh = open_registry(Metered(backend, calls)).run("run")
    assert [call.key for call in calls if "/log/" in call.key and call.method == "get"] == [
        slot_key("run", snapshot_slot(only.key) + more) for more in (0, 1)
    ]
    assert fresh.manifest.encode() == run.manifest.encode()


def test_a_save_goes_on_from_what_another_one_evicted(reg, backend, open_registry):
    """The way back leads to a checkpoint whose record only the log has."""
    run = reg.create_run("run", seed=1)
    save_small(run, *range(1, 5))
    run.restore(at=run.checkpoints()[1])
    open_registry(backend).run("run").retention.prune(Retention(last=1))
    run.save(small_state(3), step=3)
    assert [one.step for one in run.checkpoints()] == [3]
    assert run.manifest.encode() == replayed(backend).compact().encode()
    assert reg.verify().ok


def test_a_gate_on_what_was_evicted_is_read_through_a_snapshot(reg, backend, open_registry):
    run = reg.create_run("gated", seed=1)
    first = run.save(small_state(1), step=1)
    run.save(small_state(2), step=2)
    run.retention.prune(Retention(last=1))
    log = run.handle.log
    # Not by `run.pins.gates.set`, which refuses it; a log in which it stands is legal.
    gate = SetPin(kind="gate", name="g", manifest=first.digest, checkpoint=first.handle.n)
    log.append(lambda run: [commit_line(run, [gate])])
    snapshots = Snapshots(reg.handle.store, "gated")
    (newest, *_) = snapshots.listed()
    (slot, *_) = log.slots(newest)
    assert snapshots.parse(snapshots.read(newest), slot) == log.run
    reopened = open_registry(backend).run("gated")
    assert reopened.pins.gates.get("g").digest == first.digest
    with pytest.raises(Conflict, match="checkpoint was evicted"):
        reopened.pool.promote_gate("g")


def test_the_pool_rates_by_what_was_evicted(reg, backend, open_registry):
    run = reg.create_run("run", seed=1, retention=Retention(last=1))
    first = run.save(small_state(1), step=1, metrics={"mu": 31.0, "sigma": 1.5})
    run.pool.promote(first)
    save_small(run, *range(2, 6))
    assert run.manifest.gone.rating.n == first.handle.n
    fresh = open_registry(backend).run("run")
    entry = fresh.pool.promote(fresh.latest())
    assert entry.mu == 31.0
    assert fresh.pool.record_match([None, 1], [1, 2])[0].games == 1


def test_entries_that_left_the_pool_are_told_of(reg, backend, open_registry):
    run = reg.create_run("run", seed=1)
    for step in range(1, 24):
        run.pool.promote(run.save(small_state(step), step=step))
    fresh = open_registry(backend).run("run")
    assert [one.version for one in fresh.pool.roster()] == list(range(4, 24))
    assert [one.version for one in fresh.pool.entries()] == list(range(1, 24))
    with pytest.raises(NotFound, match="this version left the pool"):
        fresh.pool.entry(2)
    assert [event.event for event in fresh.pool.history(2)] == ["promoted", "evicted"]
    ((left, _),) = [fresh.pool.record_match([2, 23], [1, 2])]
    assert (left.version, left.games) == (2, 1)
    assert left.evicted
    assert fresh.manifest.encode() == replayed(backend).compact().encode()


def test_the_same_state_saved_again_by_a_version_that_knew_its_place(reg, backend):
    """Its commit gives no place, for the old one stands: only the log knows it."""
    run = reg.create_run("run", seed=1, retention=Retention(last=1))
    checkpoint = run.save(small_state(1), step=1)
    place, digest = checkpoint.handle.reader.place, checkpoint.digest
    run.save(small_state(2), step=2)
    assert digest not in run.manifest.by_manifest
    log = RunLog(reg.handle.store, "run")
    log.open()
    again = AddCheckpoint(manifest=digest, phase="main", step=3, size_bytes=1)
    log.append(lambda run: [commit_line(run, [again])])
    assert run.refresh().latest().handle.reader.place == place
    assert run.manifest.encode() == replayed(backend).compact().encode()


# The file


def _complete(backend, key: str) -> bytes:
    """Return a snapshot as the version before wrote it."""
    slot = snapshot_slot(key)
    with open_on(backend) as reg:
        slots = list(RunLog(reg.handle.store, "run").slots())
    run = advance(RunManifest(run_id="run"), slots[: slot + 1])
    header, _ = split_lines(backend.get(key), where=key)
    older = canonical.encode({**canonical.decode(header, where=key), "replay": 3})
    return join_lines([older, run.encode()])


def test_a_complete_snapshot_of_the_version_before_is_read(
    trained, backend, open_registry, monkeypatch
):
    newest, *others = [info.key for info in backend.list("runs/run/snapshots/")]
    for key in others:
        backend.delete(key)
    backend.put(newest, _complete(backend, newest))
    got = []
    monkeypatch.setattr(
        Snapshots, "parse", lambda *args, of=Snapshots.parse: got.append(of(*args)) or got[-1]
    )
    fresh = open_registry(backend).run("run")
    assert [one is not None for one in got] == [True]
    assert fresh.manifest.encode() == trained.manifest.encode()
    assert open_registry(backend).verify().findings == ()


def test_a_log_that_does_not_lead_to_what_was_read_is_told_of(reopened, backend):
    """A snapshot is believed; what the log says of evicted checkpoints is not mixed with it."""
    other = new_backend()
    with open_on(other) as elsewhere:
        run = elsewhere.create_run("run", seed=2, retention=Retention(last=1))
        save_small(run, *range(1, 60))
    for number in range(reopened.manifest.next_slot):
        key = slot_key("run", number)
        backend.put(key, other.get(key))
    with pytest.raises(RolledBack, match="the log is not the one that this handle has read"):
        reopened.retention.evicted()


def test_verify_holds_both_kinds_against_the_log(trained, backend, reg):
    for make in (lambda key: backend.get(key), lambda key: _complete(backend, key)):
        for key in [info.key for info in backend.list("runs/run/snapshots/")]:
            before = backend.get(key)
            header, body = split_lines(make(key), where=key)
            body = body.replace(b'"status":"running"', b'"status":"failed"')
            backend.put(key, join_lines([header, body]))
            (finding,) = reg.verify().findings
            assert "differs from the log" in finding.message
            backend.put(key, before)
    assert reg.verify().findings == ()


def test_verification_holds_no_records_of_what_was_evicted(reg, backend):
    """Many runs are replayed at once: each takes what it keeps, unless an undo needs more."""
    run = reg.create_run("run", seed=1, retention=Retention(last=2))
    save_small(run, *range(1, 20))
    read = read_run(reg.handle.store, Asked("run"))[1]
    assert (len(read.checkpoints), len(read.places), read.evicted_count) == (2, 2, 17)
    run.retention.undo()
    read = read_run(reg.handle.store, Asked("run"))[1]
    assert read.compact().encode() == run.manifest.encode()
    assert reg.verify().ok


def test_records_are_encoded_once_and_the_bytes_are_those_of_the_whole(reg):
    run = reg.create_run("run", seed=1, retention=Retention(last=8), monitor=LOSS)
    draw, snapshots = random.Random(0), Snapshots(reg.handle.store, "run")
    encoded: list[int] = []
    for step in range(1, 60):
        checkpoint = run.save(small_state(step), step=step, metrics={"loss": draw.random()})
        if step % 3 == 0:
            draw.choice(run.checkpoints()).report({"late": draw.random()})
        if step % 7 == 0:
            run.pins.tags.set(f"t{step % 2}", checkpoint)
        if step % 5 == 0:
            known = {id(one) for one, _ in snapshots._lines.values()}
            assert snapshots.body(run.manifest) == run.manifest.encode()
            encoded.append(sum(id(one) not in known for one in run.manifest.checkpoints))
    assert max(encoded) <= 8
    assert sum(encoded) < 11 * 8


@pytest.mark.parametrize(
    ("kept", "megabytes", "status", "apart"),
    [
        (0, 0, "running", 8),
        (128, 0, "running", 8),
        (1024, 0, "running", 64),
        (4096, 0, "running", 256),
        (10**5, 0, "running", 1024),
        # Large states pay for snapshots, and so does the end of a training.
        (1024, 100, "running", 8),
        (1024, 0, "interrupted", 16),
        (256, 0, "completed", 4),
    ],
)
def test_a_snapshot_is_due_when_it_is_cheap(reg, kept, megabytes, status, apart):
    """Or the bytes written for each slot would grow with the number of checkpoints."""
    one = CheckpointRecord.unchecked(n=1, size_bytes=megabytes * 10**6)
    run = RunManifest.unchecked(run_id="r", checkpoints=(one,) * kept, gone=None)
    snapshots = Snapshots(reg.handle.store, "r", newest=99)

    def is_due(number: int) -> bool:
        line = commit_line(RunManifest.empty("r"), [SetStatus(status=status)])
        return snapshots.is_due(run, Slot.build(number, [line]), SNAPSHOT_EVERY)

    assert [number for number in range(99, 1200) if is_due(number)] == list(range(99 + apart, 1200))


@pytest.mark.parametrize("kept", [0, 1000])
def test_names_count_for_a_snapshot_as_checkpoints_do(reg, kept):
    """Also in a snapshot with parts: an artifact of each evaluation is in every snapshot."""
    run, log = reg.create_run("r"), reg.run("r").handle.log
    written = []
    log.snapshots.write = partial(_noting, log.snapshots, written)
    manifest = run.save(small_state(0), step=0).digest
    log.refresh()
    for at in range(1, kept + 1):
        added = AddCheckpoint(manifest=manifest, phase="main", step=at, size_bytes=1)
        log.append(lambda run, one=added: [commit_line(run, [one])])
    written.clear()
    for at in range(1000):
        pin = SetPin(kind="artifact", name=f"a{at}", manifest=manifest)
        log.append(lambda run, one=pin: [commit_line(run, [one])])
    assert 20 < len(written) < 60
    assert max(second - first for first, second in pairwise(written)) < 1000 / 16 + 9


def _noting(snapshots, written, run, slot, every, *, at_once):
    Snapshots.write(snapshots, run, slot, every, at_once=at_once)
    written += [slot.number] * (snapshots.newest == slot.number)


def test_a_handle_keeps_only_the_newest_snapshot_in_mind(trained, backend):
    keys = [key for key in contents(backend) if "/snapshots/" in key]
    assert snapshot_key("run", trained.handle.log.snapshots.newest) in keys
