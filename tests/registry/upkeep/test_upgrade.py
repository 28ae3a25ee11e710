"""An upgrade lets newer rules begin: older programs stop, and sweeps have their names in tables."""

from __future__ import annotations

import os

import numpy as np
import pytest

from holdfast import Retention
from holdfast.backends.wrappers import Fault, Faulty, InjectedCrash, Metered, Usage
from holdfast.registry.errors import Damaged, UnsupportedFormat
from holdfast.registry.face.factory import open_on
from holdfast.registry.history.actions import DropRun
from holdfast.registry.history.epochs import Epochs
from holdfast.registry.history.log import RunLog
from holdfast.registry.objects.keys import ObjectKey, epoch_key
from holdfast.registry.values.digest import Digest
from tests.support.faults import flip
from tests.support.states import same, save_small, small_state
from tests.support.stores import objects, packs


@pytest.fixture
def old(reg):
    """A registry with a sweep from before: a run, one that was dropped, and an evicted save."""
    run = reg.create_run("run", seed=1)
    save_small(run, 1, 2)
    run.retention.prune(Retention(last=1))
    other = reg.create_run("other", seed=2)
    other.handle.committer.commit(lambda _: [DropRun(reason="done")])
    assert reg.gc(grace_s=0).epoch == 1
    return reg


def _marks(reg) -> dict[str, int]:
    logs = {name: RunLog(reg.handle.store, name) for name in reg.run_names()}
    return {name: log.open().epoch for name, log in logs.items()}


def _sweep(reg, step: int) -> int | None:
    """Save a step and evict the one before; return the epoch of the sweep."""
    run = reg.run("run")
    run.restore()
    save_small(run, step)
    run.retention.prune(Retention(last=1))
    return reg.gc(grace_s=0).epoch


def test_it_raises_the_least_writer_version_once_and_marks_every_run(old, backend):
    report = old.upgrade()
    assert (report.min_writer, report.raised, report.epoch) == (4, True, 2)
    assert (report.runs, report.marked) == (2, 1)  # a dropped run needs no mark
    assert _marks(old)["run"] == 2
    again = old.upgrade()
    assert (again.raised, again.epoch, again.marked) == (False, 2, 0)
    assert [info.key for info in backend.list("epochs/")] == [epoch_key(1), epoch_key(2)]


def test_a_trainer_of_an_older_version_stops_and_keeps_what_it_has(
    old, backend, open_registry, monkeypatch
):
    run = open_registry(backend).run("run")
    run.restore()
    save_small(run, 3)  # a trainer that runs
    old.upgrade()
    monkeypatch.setattr("holdfast.registry.store.store.WRITER_VERSION", 2)
    with pytest.raises(UnsupportedFormat, match="writer version 4"):
        save_small(run, 4)
    with pytest.raises(UnsupportedFormat):
        open_registry(backend).gc(grace_s=0)
    assert same(open_registry(backend).checkpoint("run/latest").load(), small_state(3))


def test_sweeps_after_it_have_tables_with_the_names_of_those_before(old, backend, open_registry):
    before = objects(backend)
    old.upgrade()
    assert _sweep(old, 3) == 3
    header = Epochs(old.handle.store).header(3)
    assert [table.sweeps for table in header.tables] == [1, 1]
    assert header.since == 1
    # The content of the first save was swept before the upgrade, that of the second after it.
    run = open_registry(backend).create_run("again", seed=3)
    kept = [save_small(run, step)[0] for step in (1, 2)]
    assert {int(key.rpartition(".")[2]) for key in packs(backend) - before} == {2, 3}
    assert all(same(one.load(), small_state(step)) for step, one in enumerate(kept, start=1))
    assert old.verify(deep=True).findings == ()
    assert old.gc(grace_s=0).deleted.objects == 0


def test_a_lost_part_stops_a_collection_and_is_found_and_a_save_goes_on(
    old, backend, open_registry
):
    old.upgrade()
    _sweep(old, 3)
    part = next(info.key for info in backend.list("sweeps/"))
    flip(backend, part)
    there = objects(backend)
    run = open_registry(backend).run("run")
    run.restore()
    saved = save_small(run, 1, 4)  # what was swept, and something new
    assert all(same(one.load(), small_state(step)) for one, step in zip(saved, (1, 4), strict=True))
    run.retention.prune(Retention(last=1))
    with pytest.raises(Damaged, match=r"sweeps/.*Nothing was deleted"):
        open_registry(backend).gc(grace_s=0)
    assert there <= objects(backend)
    found = open_registry(backend).verify(deep=True).findings
    assert {(one.kind, one.severity) for one in found} == {("epoch", "error")}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 2])
def test_an_upgrade_that_is_killed_is_finished_by_the_next(old, backend, open_registry, at, after):
    dying = open_on(Faulty(backend, [Fault(at=at, after=after)]))
    with pytest.raises(InjectedCrash):
        dying.upgrade()
    dying.close()
    report = open_registry(backend).upgrade()
    assert (report.min_writer, _marks(old)["run"]) == (4, report.epoch)
    assert old.verify().findings == ()


def _random_keys(count: int, generation: int) -> list[ObjectKey]:
    digests = sorted(os.urandom(32) for _ in range(count))
    return [ObjectKey("packs", Digest(one), generation) for one in digests]


def _measured(backend, act) -> Usage:
    """Return the use of the store by an act of a fresh handle."""
    metered = Metered(backend.copy())
    with open_on(metered) as fresh, metered.measure() as used:
        act(fresh)
    return used


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_a_first_save_reads_100_kb_more_after_a_large_sweep(old, backend, count):
    def saves(fresh) -> None:
        save_small(fresh.create_run("again", seed=3), 2)  # what another run has stored

    old.upgrade()
    before = _measured(backend, saves)
    assert Epochs(old.handle.store).put_sweep(3, _random_keys(count, 2), joins=True)
    after = _measured(backend, saves)
    print(f"{count} names: {before} before, {after} after")
    assert after.read_bytes - before.read_bytes < 100_000


@pytest.mark.parametrize("size", [20, pytest.param(5_000, marks=pytest.mark.soak)])
def test_a_fork_of_30_packs_of_200_sweeps_ago_takes_200_requests_more(old, backend, size):
    def forks(fresh) -> None:
        fresh.fork("base/latest", "fork")

    old.upgrade()
    base = old.create_run("base", seed=4)
    state = {f"part{i}": np.full(600, i, dtype=np.float32) for i in range(30)}
    for step, part in enumerate(state, start=1):
        base.save(state := {**state, part: state[part] + 0.5}, step=step)  # a pack each
    assert len(base.latest().handle.reader.placement.packs) == 30
    before = _measured(backend, forks)
    epochs = Epochs(old.handle.store)
    for epoch in range(3, 203):
        epochs.header(epoch - 1)
        assert epochs.put_sweep(epoch, _random_keys(size, epoch - 1), joins=True)
    after = _measured(backend, forks)
    print(f"200 sweeps of {size} names: {before} before, {after} after")
    assert after.requests - before.requests <= 200
    assert after.read_bytes - before.read_bytes <= 4_000_000
