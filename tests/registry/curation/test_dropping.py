"""Dropping: a run is hidden at once, freed after a delay, and comes back if asked for in time."""

from __future__ import annotations

import itertools
import time
from contextlib import suppress

import pytest

import holdfast
from holdfast import Retention, sync
from holdfast.backends.wrappers import Fault, Faulty, InjectedCrash
from holdfast.registry.curation.dropping import undrop
from holdfast.registry.errors import (
    AccessDenied,
    Conflict,
    Frozen,
    InvalidInput,
    MissingObject,
    NotFound,
)
from holdfast.registry.face.factory import open_on
from holdfast.registry.history.log import RunLog
from holdfast.registry.upkeep.gc import Collector
from tests.support.clocked import Clocked
from tests.support.faults import Hooked, Once
from tests.support.inline import without_threads
from tests.support.states import same, save_small, small_state
from tests.support.stores import contents, needed, new_backend, objects, opened

DAY_S = 86_400.0


@pytest.fixture
def clocked():
    return Clocked(new_backend())


@pytest.fixture
def reg(clocked):
    with open_on(clocked) as registry:
        yield registry


def several(reg, run_id: str = "run", count: int = 3):
    run = reg.create_run(run_id, seed=1)
    for step in range(1, count + 1):
        run.save(small_state(step), step=step)
    run.pins.artifacts.set("table", {"x": run_id})
    return run


def check_back(reg, run_id: str = "run", count: int = 3) -> None:
    """Everything that the run held is there, and it goes on."""
    assert reg.verify(deep=True).ok
    run = reg.run(run_id)
    for one in run.checkpoints():
        assert same(one.load(), small_state(one.step))
    assert [one.step for one in run.checkpoints()] == list(range(1, count + 1))
    assert run.pins.artifacts.get("table").load() == {"x": run_id}
    run.restore()
    run.save(small_state(count + 1), step=count + 1)


def test_a_hidden_run_is_not_found_holds_everything_and_comes_back(reg, clocked):
    run = several(reg)
    run.retention.drop("a mistake")
    before = objects(clocked)
    with pytest.raises(NotFound, match=r"run/latest: the run was dropped.*retention\.undrop"):
        reg.checkpoint("run/latest")
    with pytest.raises(Conflict, match=r"the run was dropped; .*'a mistake'.*retention\.undrop"):
        reg.run("run").save(small_state(9), step=9)
    with pytest.raises(Conflict, match="dropped"):
        run.retention.drop("again")
    with pytest.raises(InvalidInput, match="only a run that cannot be read is forgotten"):
        reg.gc(forget=["run"])
    report = reg.gc(grace_s=0)
    assert (report.hidden_runs, report.freed_runs) == (("run",), ())
    assert objects(clocked) == before
    assert not reg.run("run").checkpoints()
    run.retention.undrop()
    check_back(reg)
    with pytest.raises(NotFound, match="the run is not dropped"):
        reg.run("run").retention.undrop()


@pytest.mark.parametrize("local_s", [-30 * 365 * DAY_S, 30 * 365 * DAY_S])
def test_the_delay_is_judged_by_the_clock_of_the_store(reg, clocked, monkeypatch, local_s):
    several(reg).retention.drop("a mistake")
    several(reg, "other")
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + local_s)
    clocked.ahead_s = 7 * DAY_S - 60
    assert reg.gc(grace_s=0).hidden_runs == ("run",)
    reg.run("run").retention.undrop()
    reg.run("run").retention.drop("once more")  # its own delay begins
    clocked.ahead_s = 7 * DAY_S + 60
    assert reg.gc(grace_s=0).hidden_runs == ("run",)
    clocked.ahead_s = 15 * DAY_S
    first = reg.gc()
    assert (first.freed_runs, first.deleted.objects) == (("run",), 0)  # needed until now: the grace
    assert first.recent.objects
    with pytest.raises(Conflict, match="the run was dropped, and freed since"):
        reg.run("run").retention.undrop()
    clocked.ahead_s = 17 * DAY_S
    second = reg.gc()
    assert (second.hidden_runs, second.freed_runs) == ((), ())
    assert second.deleted.objects == first.recent.objects
    assert RunLog(reg.handle.store, "run").open().epoch  # marked, since an undrop may follow
    check_back(reg, "other")


def test_the_delay_is_the_registrys(reg, clocked):
    assert reg.drop_rules().delay_s == 7 * DAY_S
    for wrong in (-1, "7d", True, float("nan")):
        with pytest.raises(InvalidInput, match="a delay is a number of seconds"):
            reg.drop_rules(delay_s=wrong)
    rules = reg.drop_rules(delay_s=DAY_S)
    assert (rules.delay_s, rules.epoch) == (DAY_S, 1)
    assert reg.drop_rules(delay_s=DAY_S).epoch == 1  # nothing new
    several(reg).retention.drop("a mistake")
    clocked.ahead_s = DAY_S + 60
    plan = reg.gc(grace_s=0, dry_run=True)  # by this machine's clock
    assert (plan.freed_runs, plan.condemned.objects) == (("run",), len(objects(clocked)))
    assert reg.gc(grace_s=0).freed_runs == ("run",)
    assert not objects(clocked)
    assert reg.drop_rules().delay_s == DAY_S  # later epochs repeat it
    reg.freeze()
    with pytest.raises(Frozen):
        reg.drop_rules(delay_s=0)


def test_to_free_at_once_takes_the_rights_of_a_collector(reg, clocked):
    run = several(reg)
    clocked.denies = True
    before = contents(clocked)
    with pytest.raises(AccessDenied, match=r"Nothing was dropped.*rights of a collector"):
        run.retention.drop("a mistake", now=True)
    assert contents(clocked) == before
    run.retention.drop("a mistake")
    clocked.denies = False
    run.retention.drop("at once", now=True)
    assert run.manifest.dropped == "a mistake"
    assert not reg.run("run").manifest.held
    with pytest.raises(Conflict, match="dropped"):
        run.retention.drop("again", now=True)
    assert reg.gc(grace_s=0).freed_runs == ()
    assert not objects(clocked)


@pytest.mark.sometimes("an undrop is faster than the end of the delay")
def test_of_an_undrop_and_a_collector_the_first_one_wins():
    backend = new_backend()
    hooked = Hooked(backend)
    with open_on(backend) as reg, open_on(hooked) as mine:
        reg.drop_rules(delay_s=0)
        several(reg).retention.drop("a mistake")
        run = mine.run("run")
        hooked.before = Once("runs/run/log/", lambda: reg.gc(grace_s=0), "put_if_absent")
        with pytest.raises(Conflict, match="freed since"):
            run.retention.undrop()
        assert hooked.before.done

        several(reg, "other").retention.drop("a mistake")
        hooked.before = Once("runs/other/log/", reg.run("other").retention.undrop, "put_if_absent")
        report = mine.gc(grace_s=0)
        assert hooked.before.done
        assert report.freed_runs == ()
        check_back(reg, "other")


def test_what_a_run_holds_since_it_was_taken_back_is_spared():
    """A run is taken back while a collector frees it, and names what the collector condemns."""
    backend = new_backend()
    hooked = Hooked(backend)
    with open_on(backend) as reg, open_on(hooked) as mine:
        reg.drop_rules(delay_s=0)
        run = reg.create_run("run")
        save_small(run, 1, 2)
        run.retention.prune(Retention(last=1))
        run.retention.drop("a mistake")

        def again():
            run.retention.undrop()
            reg.run("run").save(small_state(1), step=3)

        hooked.before = Once("runs/run/log/", again, "put_if_absent")
        report = mine.gc(grace_s=0)
        assert hooked.before.done
        assert report.spared.objects
        assert objects(backend) == needed(reg)


def test_a_collector_does_not_free_a_later_drop():
    backend = new_backend()
    hooked = Hooked(backend)
    with open_on(backend) as reg, open_on(hooked) as mine:
        reg.drop_rules(delay_s=0)
        run = several(reg)
        run.retention.drop("a mistake")

        def again():
            run.retention.undrop()
            run.retention.drop("for another reason")

        hooked.before = Once("runs/run/log/", again, "put_if_absent")
        assert mine.gc(grace_s=0).freed_runs == ()
        assert hooked.before.done
        run.retention.undrop()
        check_back(reg)


def test_each_registry_frees_by_its_own_delay(reg, clocked):
    with open_on(new_backend()) as mirror:
        run = several(reg)
        sync(reg, mirror)
        run.retention.drop("a mistake")
        sync(reg, mirror)
        run.retention.drop("at once", now=True)
        reg.gc(grace_s=0)
        sync(reg, mirror)
        assert mirror.run("run").manifest.is_hidden
        assert mirror.gc(grace_s=0).hidden_runs == ("run",)
        for one in (reg, mirror):
            assert one.verify(deep=True).ok

        # What the source has freed before it was copied, the mirror never held.
        several(reg, "other").retention.drop("at once", now=True)
        reg.gc(grace_s=0)
        sync(reg, mirror)
        assert mirror.run("other").manifest.holds_nothing
        assert mirror.verify(deep=True).ok

        # An undrop is a commit: the mirror that freed the run gets everything again.
        third = several(reg, "third")
        third.retention.drop("a mistake")
        sync(reg, mirror)
        mirror.run("third").retention.drop("at once", now=True)
        mirror.gc(grace_s=0)
        third.retention.undrop()
        sync(reg, mirror)
        check_back(mirror, "third")


# Mirrors that keep


def bring_back(reg, mirror, run_id: str = "run") -> None:
    undrop(reg.run(run_id).handle.committer, mirror.handle.store)


def test_a_mirror_that_keeps_brings_back_what_was_freed(reg, clocked):
    with open_on(new_backend()) as mirror:
        assert mirror.drop_rules(keep=True).keep
        assert mirror.drop_rules(delay_s=0).keep  # later epochs repeat it
        run = reg.create_run("run", retention=Retention(last=2, then=["kept"]))
        several_parts = [{"kept": small_state(n), "gone": small_state(n + 9)} for n in range(1, 6)]
        for step, state in enumerate(several_parts, 1):
            run.save(state, step=step)
            sync(reg, mirror)
        run.retention.evict(run.checkpoints()[0], "by hand")
        run.retention.drop("a mistake")
        sync(reg, mirror)
        before = objects(mirror.handle.store.backend)
        report = mirror.gc(grace_s=0)
        assert (report.keeps, report.hidden_runs, report.condemned.objects) == (True, ("run",), 0)
        assert objects(mirror.handle.store.backend) == before

        run.retention.drop("at once", now=True)
        reg.gc(grace_s=0)
        several(reg, "other")  # another sweep, by whom the old names are condemned
        reg.run("other").retention.evict(reg.run("other").checkpoints()[0], "by hand")
        reg.gc(grace_s=0)
        with pytest.raises(Conflict, match=r"freed since.*undrop\(URL\)"):
            reg.run("run").retention.undrop()
        with pytest.raises(MissingObject, match="Nothing was brought back"):
            bring_back(reg, reg)  # it has them no more itself
        bring_back(reg, mirror)
        for _ in range(2):
            assert reg.verify(deep=True).ok
            back = reg.run("run")
            assert [(one.step, one.parts) for one in back.checkpoints()] == [
                *((step, ("kept",)) for step in (2, 3)),
                *((step, None) for step in (4, 5)),
            ]
            for one in back.checkpoints():
                whole = several_parts[one.step - 1]
                names = list(one.parts or whole)
                assert same(one.load(only=names), {name: whole[name] for name in names})
            reg.gc(grace_s=0)
        # Histories have not diverged, and the mirror still has what was evicted and thinned.
        sync(reg, mirror)
        assert not mirror.run("run").manifest.dropped
        there = mirror.run("run")
        there.retention.undo(*there.retention.evicted())
        there.retention.undo(there.checkpoints()[0])  # it was thinned before
        assert same(there.checkpoints()[0].load(), several_parts[0])

        mirror.drop_rules(keep=False)
        assert mirror.gc(grace_s=0).deleted.objects


def test_a_mirror_that_keeps_has_the_whole_state_of_which_an_eviction_leaves_a_part(reg):
    """A sync gives a narrower place then, in a slot that thins nothing."""
    with open_on(new_backend()) as mirror:
        mirror.drop_rules(keep=True)
        run, whole = reg.create_run("run"), {"kept": small_state(1), "gone": small_state(2)}
        run.save(whole, step=1)
        for step, state in ((2, whole), (3, {"kept": small_state(3)})):
            run.exchange.push(state, step=step)
        run.retention.thin(run.checkpoints()[0], "kept")
        sync(reg, mirror)
        run.retention.evict(run.checkpoints()[1], "by hand")
        sync(reg, mirror)
        mirror.gc(grace_s=0)
        there = mirror.run("run")
        there.retention.undo(*there.retention.evicted())
        assert same(there.checkpoints()[1].load(), whole)


@pytest.mark.sometimes("a registry is told to keep during a collection")
def test_a_collection_stops_if_the_registry_is_told_to_keep(reg, clocked):
    run = several(reg)
    run.retention.evict(run.checkpoints()[0], "by hand")
    collector = Collector(reg.handle.store, grace_s=0)
    collector.choose()
    reg.drop_rules(keep=True)
    with pytest.raises(Conflict, match=r"told to keep everything meanwhile.*Nothing was deleted"):
        collector.condemn()
    assert not reg.gc(grace_s=0).condemned.objects


def test_a_run_comes_back_from_a_folder_and_from_itself_before_a_collection(tmp_path):
    with holdfast.init(tmp_path / "r") as reg, holdfast.init(tmp_path / "m") as mirror:
        run = several(reg)
        run.retention.drop("at once", now=True)
        run.retention.undrop(tmp_path / "r")
        check_back(reg)
        sync(reg, mirror)
        run.retention.drop("at once", now=True)
        reg.gc(grace_s=0)
        run.retention.undrop(tmp_path / "m")
        check_back(reg, count=4)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_a_death_at_any_call_of_an_undrop_from_a_mirror_leaves_a_freed_or_a_whole_run(every):
    template, other = new_backend(), new_backend()
    with open_on(template) as reg, open_on(other) as mirror:
        run = several(reg)
        sync(reg, mirror)
        run.retention.drop("at once", now=True)
        reg.gc(grace_s=0)

    def act(store) -> None:
        with opened(other) as mirror:
            bring_back(without_threads(open_on(store)), mirror)

    counting = Faulty(template.copy(), [], count_reads=True)
    act(counting)
    left = set()
    for at, after in itertools.product(range(0, counting.calls, every), (False, True)):
        store = template.copy()
        with suppress(InjectedCrash):
            act(Faulty(store, [Fault(at, after=after)], count_reads=True))
        if (found := frozenset(contents(store))) in left:
            continue  # most deaths are at a read
        left.add(found)
        with opened(store) as reg:
            assert reg.verify(deep=True).ok
            reg.gc(grace_s=0)
            if reg.run("run").manifest.dropped is not None:
                act(store)
        with opened(store) as reg:
            reg.gc(grace_s=0)
            check_back(reg)
    assert len(left) > 3
