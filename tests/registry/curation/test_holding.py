"""Holds: until a date nobody evicts, thins, drops or supersedes; a collector ends one early."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import Monitor, Retention, sync
from holdfast.registry.curation import checkpoint_marks
from holdfast.registry.errors import AccessDenied, Conflict, InvalidInput, NotFound, Thinned
from holdfast.registry.face.factory import open_on
from holdfast.registry.history import holds
from holdfast.registry.history.actions import RemoveHold
from tests.registry.curation.pool.league import league, player, playing
from tests.support.clocked import Clocked
from tests.support.inline import without_threads
from tests.support.states import same, save_small, small_state
from tests.support.stores import contents, new_backend, opened
from tests.support.strategies import examples

DAY_S = 86_400.0
NOW = datetime(2100, 1, 1, tzinfo=UTC)  # the store's time, which no test waits for
UNTIL = NOW + timedelta(days=30)
HELD = r"held until 2100-01-31 00:00:00Z: an audit"
LOSS = Monitor(metric="loss", mode="min")


def at(days: float) -> float:
    """How far the clock of `Clocked` is ahead of its beginning, some days after `NOW`."""
    return NOW.timestamp() - 1e9 + days * DAY_S


@pytest.fixture
def clocked():
    store = Clocked(new_backend())
    store.ahead_s = at(0)
    return store


@pytest.fixture
def reg(clocked):
    with open_on(clocked) as registry:
        yield registry


def several(reg, count: int = 4, **options):
    run = reg.create_run("run", seed=1, **options)
    save_small(run, *range(1, count + 1))
    return run


def steps(run) -> list[int]:
    return [one.step for one in run.checkpoints()]


def test_until_its_date_by_the_stores_clock_nothing_takes_a_held_checkpoint(reg, clocked):
    run = several(reg)
    held = reg.checkpoint("run/main/step2")
    run.retention.hold(held, until=UNTIL, reason="an audit")
    before = contents(clocked)
    acts = (
        lambda: run.retention.evict(held, "no use"),
        lambda: run.retention.thin(held, "model"),
        lambda: run.retention.drop("no use"),
        lambda: run.retention.drop("no use", now=True),
    )
    clocked.ahead_s = at(29.9)
    for act in acts:
        with pytest.raises(Conflict, match=HELD):
            act()
    assert contents(clocked) == before
    plan = run.retention.prune(Retention(last=1))
    assert [one.reasons for one in plan.kept if one.checkpoint.step == 2] == [
        ("held until 2100-01-31 00:00:00Z: an audit",)
    ]
    reg.gc(grace_s=0)
    assert steps(run) == [2, 4]
    assert same(held.load(), small_state(2))
    clocked.ahead_s = at(30)
    run.retention.evict(held, "no use")
    assert steps(run) == [4]
    assert run.retention.holds() == []
    (said,) = [commit.actions for commit in run.history.commits()][-1:]
    assert said[0] == RemoveHold(checkpoint=held.handle.n)


@pytest.mark.parametrize("act", ["thin", "prune", "drop"])
def test_each_act_ends_the_holds_whose_time_is_over(reg, clocked, act):
    run = several(reg)
    run.retention.hold(reg.checkpoint("run/main/step2"), until=UNTIL, reason="an audit")
    run.retention.hold(until=UNTIL, reason="an audit")
    clocked.ahead_s = at(31)
    if act == "thin":
        run.retention.thin(reg.checkpoint("run/main/step2"), "model")
        assert reg.checkpoint("run/main/step2").parts == ("model",)
    elif act == "prune":
        assert len(run.retention.prune(Retention(last=1), dry_run=True).evicted) == 3
        assert len(run.retention.holds()) == 2
        run.retention.prune(Retention(last=1))
        assert steps(run) == [4]
    else:
        run.retention.drop("no use")
        assert run.manifest.dropped == "no use"
    assert run.retention.holds() == []


def test_a_held_run_goes_on_keeps_everything_and_is_not_dropped(reg, clocked):
    run = several(reg, 1, retention=Retention(last=1))
    run.retention.hold(until=UNTIL, reason="an audit")
    save_small(run, 2, 3)
    assert steps(run) == [1, 2, 3]
    with pytest.raises(Conflict, match=HELD):
        run.retention.drop("no use")
    with pytest.raises(Conflict, match=HELD):
        run.retention.evict(reg.checkpoint("run/main/step2"), "no use")
    clocked.ahead_s = at(31)
    save_small(run, 4)  # by the clock of this machine nothing is over
    assert steps(run) == [1, 2, 3, 4]
    run.retention.prune()
    assert steps(run) == [4]


def test_the_pool_of_a_held_run_grows(reg, clocked):
    run = reg.create_run("run", seed=1, preset=league(size=1))
    run.retention.hold(until=UNTIL, reason="an audit")
    for step in (1, 2):
        run.pool.promote(run.save(player(step), step=step, phase=3))
    assert playing(run) == [1, 2]
    run.retention.unhold(reason="no audit")
    run.pool.promote(run.save(player(3), step=3, phase=3))
    assert playing(run) == [3]


def test_a_save_ends_a_hold_by_the_stores_clock_not_by_its_own(reg, clocked, monkeypatch):
    run = several(reg, 1, retention=Retention(last=1))
    run.retention.hold(reg.checkpoint("run/latest"), until=UNTIL, reason="an audit")
    ahead = SimpleNamespace(time=lambda: UNTIL.timestamp() + 1)
    monkeypatch.setattr(holds, "time", ahead)
    run.save(small_state(2), step=2)
    assert steps(run) == [1, 2]
    clocked.ahead_s = at(30)
    run.save(small_state(3), step=3)
    assert steps(run) == [3]


def test_training_does_not_go_back_behind_a_held_checkpoint(reg, clocked):
    run = several(reg)
    run.retention.hold(reg.checkpoint("run/main/step3"), until=UNTIL, reason="an audit")
    run.restore(at=reg.checkpoint("run/main/step3"))
    run.save(small_state(9), step=9)  # it supersedes step 4 alone
    run.restore(at=reg.checkpoint("run/main/step2"))
    before = run.manifest.commits
    with pytest.raises(Conflict, match=rf"{HELD}.*Continue in a fork"):
        run.save(small_state(8), step=8)
    assert run.manifest.commits == before
    clocked.ahead_s = at(30)
    run.save(small_state(8), step=8)
    assert steps(run) == [1, 2, 8]


def test_a_held_run_takes_no_rewind_but_goes_on_from_its_newest_checkpoint(reg):
    run = several(reg)
    run.retention.hold(until=UNTIL, reason="an audit")
    run = reg.run("run")
    run.restore()
    run.save(small_state(5), step=5)
    run.restore(at=reg.checkpoint("run/main/step4"))
    with pytest.raises(Conflict, match=HELD):
        run.save(small_state(6), step=6)
    fork = reg.fork("run/main/step4", "fork")
    assert fork.retention.holds() == []
    fork.retention.drop("no use")


def test_to_end_a_hold_early_takes_the_rights_of_a_collector(reg, clocked):
    run = several(reg)
    held = reg.checkpoint("run/main/step2")
    run.retention.hold(held, until=UNTIL, reason="an audit")
    clocked.denies = True
    before = contents(clocked)
    with pytest.raises(AccessDenied, match=r"The hold stays.*rights of a collector"):
        run.retention.unhold(held, reason="no audit")
    assert contents(clocked) == before
    clocked.denies = False
    run.retention.unhold(held, reason="no audit")
    assert run.retention.holds() == []
    commit = list(run.history.commits())[-1]
    assert commit.actions == (RemoveHold(checkpoint=held.handle.n, reason="no audit"),)
    assert "@" in commit.author
    with pytest.raises(NotFound, match="there is no such hold"):
        run.retention.unhold(held, reason="no audit")
    run.retention.evict(held, "no use")


def test_without_those_rights_the_newest_slot_tells_the_time(reg, clocked):
    run = several(reg)
    held = reg.checkpoint("run/main/step2")
    run.retention.hold(held, until=UNTIL, reason="an audit")
    clocked.denies, clocked.ahead_s = True, at(31)
    with pytest.raises(Conflict, match=HELD):
        run.retention.evict(held, "no use")
    run.save(small_state(5), step=5)
    run.retention.evict(held, "no use")
    assert steps(run) == [1, 3, 4, 5]


def test_a_hold_is_made_longer_and_never_shorter(reg):
    run = several(reg)
    held = reg.checkpoint("run/main/step2")
    run.retention.hold(held, until=UNTIL, reason="an audit")
    commits = run.manifest.commits
    run.retention.hold(held, until=UNTIL, reason="an audit")
    assert run.manifest.commits == commits
    with pytest.raises(Conflict, match="it is held for longer already"):
        run.retention.hold(held, until=UNTIL - timedelta(days=1), reason="an audit")
    run.retention.hold(held, until=UNTIL + timedelta(days=1), reason="a trial")
    (one,) = run.retention.holds()
    assert (one.checkpoint, one.reason) == (held.handle.n, "a trial")
    assert one.until_ms == (UNTIL + timedelta(days=1)).timestamp() * 1000
    marks = checkpoint_marks(run.manifest)[held.handle.n]
    assert marks == ["held until 2100-02-01 00:00:00Z"]


def test_what_cannot_be_held_is_refused_and_nothing_is_written(reg, clocked):
    run = several(reg)
    other = save_small(reg.create_run("other"), 1)[0]
    gone = reg.checkpoint("run/main/step1")
    run.retention.evict(gone, "no use")
    before = contents(clocked)
    for checkpoint, until, reason, error, text in (
        (gone, UNTIL, "an audit", Conflict, "evicted"),
        (other, UNTIL, "an audit", InvalidInput, "its own run"),
        (None, datetime(2100, 1, 31), "an audit", InvalidInput, "time zone"),
        (None, "2100-01-31", "an audit", InvalidInput, "time zone"),
        (None, datetime(2020, 1, 1, tzinfo=UTC), "an audit", InvalidInput, "in the future"),
        (None, UNTIL, " ", InvalidInput, "needs a reason"),
    ):
        with pytest.raises(error, match=text):
            run.retention.hold(checkpoint, until=until, reason=reason)
    assert contents(clocked) == before
    run.retention.drop("no use")
    with pytest.raises(Conflict, match="dropped"):
        run.retention.hold(until=UNTIL, reason="an audit")


def test_a_hold_goes_along_to_a_mirror(reg):
    run = several(reg)
    run.retention.hold(reg.checkpoint("run/main/step2"), until=UNTIL, reason="an audit")
    with opened(new_backend()) as mirror:
        sync(reg, mirror)
        there = mirror.run("run")
        with pytest.raises(Conflict, match=HELD):
            there.retention.evict(mirror.checkpoint("run/main/step2"), "no use")
        reg.repack(min_dead=0.01)
        there.retention.prune(Retention(last=1))
        mirror.gc(grace_s=0)
        assert steps(there) == [2, 4]
        assert mirror.verify(deep=True).ok


ACTS = ["save", "save", "hold", "hold run", "unhold", "prune", "evict", "thin", "drop", "undrop"]
acts = st.tuples(st.sampled_from([*ACTS, "rewind", "day", "gc", "open"]), st.integers(0, 40))


@examples(40)
@given(st.lists(acts, min_size=8, max_size=40))
def test_whatever_happens_what_is_held_is_there(life):
    """Held states load, byte for byte, on the line of training where they were held."""
    clocked = Clocked(new_backend())
    clocked.ahead_s = at(0)
    with without_threads(open_on(clocked)) as reg:
        run = reg.create_run("run", seed=1, monitor=LOSS, retention=Retention(last=2, best=1))
        step, days = 1, 0.0
        run.save(small_state(0), step=1, metrics={"loss": 0.0})
        kept: dict[int | None, tuple[float, set[int]]] = {}  # until when, and which checkpoints
        for act, x in life:
            known = run.checkpoints()
            one = known[x % len(known)] if known else None
            until = NOW + timedelta(days=days + 1 + x % 5)
            with suppress(Conflict, NotFound, AccessDenied, Thinned):
                if act == "save":
                    run.save(small_state(x), step=step + 1, metrics={"loss": float(x)})
                    step += 1
                elif act == "hold" and one is not None:
                    run.retention.hold(one, until=until, reason="an audit")
                    kept[one.handle.n] = (until.timestamp(), {one.handle.n})
                elif act == "hold run":
                    run.retention.hold(until=until, reason="an audit")
                    kept[None] = (until.timestamp(), set())
                elif act == "unhold":
                    run.retention.unhold(one if x % 2 else None, reason="over")
                    kept.pop(one.handle.n if x % 2 and one is not None else None, None)
                elif act == "prune":
                    run.retention.prune(Retention(last=1))
                elif act == "evict" and one is not None:
                    run.retention.evict(one, "no use")
                elif act == "thin" and one is not None:
                    run.retention.thin(one, "model")
                elif act == "drop":
                    run.retention.drop("no use", now=x % 2 == 0)
                elif act == "undrop":
                    run.retention.undrop()
                elif act == "rewind" and one is not None:
                    run.restore(at=one)
                elif act == "day":
                    days += 1
                    clocked.ahead_s = at(days)
                elif act == "gc":
                    reg.gc(grace_s=0)
                elif act == "open":
                    run = reg.run("run")
                    run.restore()
            now = NOW.timestamp() + days * DAY_S
            kept = {n: one for n, one in kept.items() if one[0] > now}
            _check_kept(run, kept)


def _check_kept(run, kept) -> None:
    manifest = run.handle.log.refresh()
    if None in kept:
        seen = kept[None][1]
        seen |= {one.n for one in manifest.live() if one.parts is None}
    for _, numbers in kept.values():
        for n in numbers:
            record = manifest.by_n[n]
            assert record.evicted is None
            assert not record.superseded
            assert manifest.dropped is None
            assert same(
                run.history.checkpoint(n).load(only=record.parts), run_state(run, n, record)
            )


def run_state(run, n, record):
    """What was saved as a checkpoint, by its metric."""
    whole = small_state(int(record.metrics["loss"]))
    return whole if record.parts is None else {name: whole[name] for name in record.parts}
