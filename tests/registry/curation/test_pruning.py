"""Letting go by hand, bringing back, and releasing a whole run."""

from __future__ import annotations

import uuid

import pytest

from holdfast import Monitor, sync
from holdfast.registry.errors import Conflict, InvalidInput, MissingObject, NotFound
from holdfast.registry.spec import Phase, Retention, RunSpec
from tests.support.collectors import collect, mark, sweep
from tests.support.faults import Hooked, Once
from tests.support.loads import steps
from tests.support.states import same, save_small, small_state
from tests.support.stores import contents, new_backend, objects, packs_of

LOSS = Monitor(metric="loss", mode="min")


def several(reg, count: int = 4, run_id: str = "run", **options):
    run = reg.create_run(run_id, seed=1, **options)
    for step in range(1, count + 1):
        run.save(small_state(step), step=step, metrics={"loss": float(step)})
    return run


# Pruning


def test_a_dry_run_plans_and_changes_nothing(reg, backend):
    run = several(reg)
    before = contents(backend)
    plan = run.retention.prune(Retention(last=1), dry_run=True)
    assert [verdict.checkpoint.step for verdict in plan.evicted] == [1, 2, 3]
    assert contents(backend) == before
    assert steps(run) == [1, 2, 3, 4]


def test_a_prune_does_what_its_dry_run_said(reg, backend):
    run = several(reg, monitor=LOSS)
    planned = run.retention.prune(Retention(last=1, best=1), dry_run=True)
    before = objects(backend)
    done = run.retention.prune(Retention(last=1, best=1))
    assert done == planned
    assert steps(run) == [1, 4]
    assert objects(backend) == before  # collecting is another matter
    slots = len(contents(backend))
    assert run.retention.prune(Retention(last=1, best=1)).evicted == ()
    assert len(contents(backend)) == slots  # nothing to say, nothing said


def test_without_a_policy_nothing_is_guessed(reg):
    with pytest.raises(InvalidInput, match="the run has no retention policy: it keeps everything"):
        several(reg).retention.prune()


# Evicting one


def test_one_checkpoint_is_evicted_and_brought_back(reg):
    run = several(reg, monitor=LOSS)
    run.retention.evict(run.checkpoints()[1], "not wanted")
    assert steps(run) == [1, 3, 4]
    (gone,) = run.retention.evicted()
    assert gone.step == 2
    assert gone.eviction().endswith(": not wanted")
    run.retention.undo()
    assert steps(run) == [1, 2, 3, 4]
    run.retention.evict(
        run.checkpoints()[1], "still not wanted"
    )  # by hand, though it was brought back
    assert steps(run) == [1, 3, 4]


def test_protected_checkpoints_are_not_evicted(reg, backend):
    run = several(reg, 6, monitor=LOSS)
    found = {one.step: one for one in run.checkpoints()}
    run.pins.gates.set("kept", found[2])
    run.pins.tags.set("shown", found[3])
    next(iter(run.follow.checkpoints(group="eval", follow=False)))  # holds the first
    for held in run.follow.checkpoints(group="other", follow=False):
        if held.step == 4:
            break
    before = contents(backend)
    reasons = {1: "best/loss", 2: "gates/kept", 3: "tags/shown", 4: "held by other", 6: "latest"}
    for step, reason in reasons.items():
        with pytest.raises(Conflict, match=reason):
            run.retention.evict(found[step], "try")
    assert contents(backend) == before
    run.retention.evict(found[5], "free")
    with pytest.raises(Conflict, match="this checkpoint was evicted"):
        run.retention.evict(found[5], "again")


def test_an_eviction_by_hand_is_checked_at_the_head(reg, backend):
    """Another handle tags the checkpoint between the look and the commit."""
    run = several(reg)
    wanted = run.checkpoints()[0]
    reg.run("run").pins.tags.set("shown", wanted)
    with pytest.raises(Conflict, match="tags/shown"):
        run.retention.evict(wanted, "try")


def test_what_evict_refuses(reg):
    run, other = several(reg), several(reg, run_id="other")
    with pytest.raises(InvalidInput, match="takes checkpoints of its own run"):
        run.retention.evict(other.checkpoints()[0], "theirs")
    for reason in ("", " ", None, "\udc80"):
        with pytest.raises(InvalidInput, match="reason"):
            run.retention.evict(run.checkpoints()[0], reason)
    assert steps(run) == [1, 2, 3, 4]


def test_what_is_superseded_can_be_evicted(reg):
    run = several(reg)
    old = run.checkpoints()[3]
    run.restore(at=run.checkpoints()[1])
    run.save(small_state(9), step=9)
    run.retention.evict(run.history.checkpoint(old.handle.n), "a dead end")
    assert [one.step for one in run.retention.evicted()] == [4]


def test_the_runs_own_policy_counts_what_was_brought_back(reg):
    run = several(reg, retention=Retention(last=2))
    run.retention.undo()
    assert run.retention.prune().evicted == ()
    assert [v.checkpoint.step for v in run.retention.prune(Retention(last=2)).evicted] == [2]


@pytest.mark.parametrize("given", [Retention(best=2), Retention(best=1, every=3)])
def test_best_of_nothing_is_no_policy(reg, given):
    """Without a monitor it would evict everything but the newest."""
    run = several(reg)
    with pytest.raises(
        InvalidInput,
        match=r"run: phase main: the best checkpoints cannot be kept without a monitor",
    ):
        run.retention.prune(given, dry_run=True)
    phases = (Phase(name="1", monitors=(LOSS,)), Phase(name="2"))
    phased = reg.create_run("phased", preset=RunSpec(phases=phases))
    phased.save(small_state(1), step=1)
    assert phased.retention.prune(given).evicted == ()
    phased.save(small_state(1), step=2, phase=2)
    with pytest.raises(InvalidInput, match=r"phased: phase 2: the best checkpoints cannot be kept"):
        phased.retention.prune(given)


# Undoing


def test_undo_brings_back_what_went_last_byte_for_byte(reg, backend, open_registry):
    run = several(reg, retention=Retention(last=2))
    assert [ck.step for ck in run.retention.evicted()] == [1, 2]
    (back,) = run.retention.undo()
    assert back.step == 2
    assert same(back.load(), small_state(2))
    assert [ck.step for ck in run.retention.undo()] == [1]
    fresh = open_registry(backend)
    assert [ck.step for ck in fresh.run("run").checkpoints()] == [1, 2, 3, 4]
    for ck in fresh.run("run").checkpoints():
        assert same(ck.load(), small_state(ck.step))
    assert fresh.verify(deep=True).ok


def test_a_checkpoint_can_be_named(reg):
    run = several(reg, retention=Retention(last=1))
    first, second, _ = run.retention.evicted()
    assert [ck.step for ck in run.retention.undo(first, second)] == [1, 2]
    assert steps(run) == [1, 2, 4]


def test_what_was_brought_back_is_kept_by_later_saves(reg):
    run = several(reg, retention=Retention(last=1))
    run.retention.undo()
    save_small(run, 5, 6, 7)
    assert steps(run) == [3, 7]


def test_what_is_not_evicted_cannot_be_brought_back(reg):
    run = several(reg, 2, retention=Retention(last=1))
    with pytest.raises(NotFound, match="this checkpoint is not evicted"):
        run.retention.undo(run.latest())
    run.retention.undo()
    with pytest.raises(NotFound, match="nothing was evicted"):
        run.retention.undo()
    other = several(reg, 1, "other")
    with pytest.raises(InvalidInput, match="undo takes checkpoints of its own run"):
        run.retention.undo(other.latest())


def test_what_is_gone_stays_gone_and_says_so(reg, backend, open_registry):
    run = several(reg, 2, retention=Retention(last=1))
    (first,) = run.retention.evicted()
    pack = next(iter(set(packs_of(first)) - set(packs_of(run.latest()))))
    backend.delete(pack)
    before = [key for key in contents(backend) if "/log/" in key]
    fresh = open_registry(backend).run("run")
    with pytest.raises(MissingObject, match="evicted, and collected since"):
        fresh.retention.undo()
    assert [key for key in contents(backend) if "/log/" in key] == before
    assert steps(fresh) == [2]


def test_a_checkpoint_that_is_named_twice_comes_back_once(reg):
    run = several(reg, retention=Retention(last=1))
    first, second, _ = run.retention.evicted()
    assert [ck.step for ck in run.retention.undo(second, first, second)] == [2, 1]
    assert steps(run) == [1, 2, 4]


def test_a_mirror_that_never_held_it_says_so(reg, open_registry):
    run = several(reg, 2, retention=Retention(last=1))
    elsewhere = new_backend(uuid.uuid4().hex)
    sync(reg, open_registry(elsewhere))
    before = contents(elsewhere)
    mirror = open_registry(elsewhere).run("run")
    with pytest.raises(
        MissingObject,
        match=r"run/[0-9a-f]{12}: .*this registry never held it.*where it was saved, then sync",
    ):
        mirror.retention.undo()
    assert contents(elsewhere) == before
    (back,) = run.retention.undo()  # as the hint has it
    sync(reg, open_registry(elsewhere))
    assert same(
        open_registry(elsewhere).run("run").history.checkpoint(back.handle.n).load(), small_state(1)
    )


def taken_again(reg):
    """Return a run whose step 1 was evicted and is held by another state, and both of those."""
    run = several(reg, 2)
    run.retention.prune(Retention(last=1))
    (first,) = run.retention.evicted()
    return run, first, run.save(small_state(7), step=1)


def test_one_step_is_not_given_to_two_checkpoints(reg, backend):
    run, first, second = taken_again(reg)
    before = contents(backend)
    told = rf"phase main, step 1: another .*{first.digest.short} .*{second.digest.short} of commit"
    with pytest.raises(Conflict, match=told):
        run.retention.undo(first)
    assert contents(backend) == before
    assert steps(run) == [2, 1]


def test_of_two_that_went_with_one_step_only_one_comes_back(reg):
    run, first, second = taken_again(reg)
    run.save(small_state(3), step=3)
    run.retention.prune(Retention(last=1))
    assert {first, second} <= set(run.retention.evicted())
    with pytest.raises(Conflict, match=rf"{second.digest.short}.*found {first.digest.short}"):
        run.retention.undo(first, second)
    assert [ck.digest for ck in run.retention.undo(second)] == [second.digest]


def test_what_training_went_back_behind_comes_back_beside_what_took_its_step(reg):
    run = several(reg, 4)
    first, third = run.history.checkpoint(1), run.history.checkpoint(3)
    run.pins.tags.set("kept", first)
    run.retention.prune(Retention(last=1))
    run.restore(at=first)
    run.save(small_state(30), step=3)
    assert third.superseded
    run.retention.undo(third)
    assert same(third.load(), small_state(3))


def test_undo_of_what_came_and_went_since_the_run_was_opened(reg, backend, open_registry):
    run = reg.create_run("r")
    run.save(small_state(1), step=1)
    opened_before = open_registry(backend).run("r")
    gone = run.save(small_state(2), step=2)
    run.save(small_state(3), step=3)
    run.retention.evict(gone, reason="test")
    assert [one.step for one in opened_before.retention.undo()] == [2]


def test_a_step_that_is_taken_while_undo_commits(reg, backend, open_registry):
    run = several(reg, 2)
    run.retention.prune(Retention(last=1))
    hooked = Hooked(backend)
    mine = open_registry(hooked).run("run")
    hooked.before = Once("runs/run/log/", lambda: run.save(small_state(7), step=1), "put_if_absent")
    with pytest.raises(Conflict, match="another checkpoint holds this step"):
        mine.retention.undo()
    assert hooked.before.done


def dead_keys(run) -> list[str]:
    """Return what only evicted checkpoints use."""
    live = {key for ck in run.checkpoints() for key in _keys(ck)}
    return sorted({key for ck in run.retention.evicted() for key in _keys(ck)} - live)


def _keys(ck) -> list[str]:
    return [
        *packs_of(ck),
        str(ck.handle.reader.place.manifest_key),
        str(ck.handle.reader.place.placement_key),
    ]


def test_undo_under_a_sweep_puts_everything_anew(reg, backend, open_registry):
    """A condemned name is never spoken again, though the bytes are still there."""
    run = several(reg, 2, retention=Retention(last=1))
    condemned = dead_keys(run)
    assert condemned
    sweep(backend, 1, condemned)
    mark(open_registry(backend).handle.store, "run", 1)
    fresh = open_registry(backend).run("run")
    (back,) = fresh.retention.undo()
    assert not set(_keys(back)) & set(condemned)
    collect(backend, condemned)
    after = open_registry(backend)
    assert same(after.run("run").checkpoints()[0].load(), small_state(1))
    assert after.verify(deep=True).ok


def test_undo_while_a_sweep_passes_puts_everything_anew(reg, backend, open_registry):
    run = several(reg, 2, retention=Retention(last=1))
    condemned = dead_keys(run)
    hooked = Hooked(backend)
    mine = open_registry(hooked).run("run")

    def collector():
        sweep(backend, 1, condemned)
        mark(open_registry(backend).handle.store, "run", 1)

    hooked.before = Once("runs/run/log/", collector, "put_if_absent")
    (back,) = mine.retention.undo()
    assert hooked.before.done
    assert not set(_keys(back)) & set(condemned)
    collect(backend, condemned)
    assert open_registry(backend).verify(deep=True).ok


def test_undo_of_what_another_checkpoint_held_until_a_moment_ago(reg, backend, open_registry):
    """A state that needed no copy at planning may be unneeded and condemned at the commit."""
    run = reg.create_run("run", preset=RunSpec(retention=Retention(last=2)))
    run.save(small_state(1), step=1)
    run.save(small_state(2), step=2)
    run.save(small_state(3), step=3)  # step 1 goes
    run.save(small_state(1), step=4)  # the same state again; step 2 goes
    hooked = Hooked(backend)
    mine = open_registry(hooked).run("run")
    first = mine.retention.evicted()[0]

    def others():
        rival = open_registry(backend).run("run")
        rival.restore()
        rival.save(small_state(5), step=5)
        rival.save(small_state(6), step=6)  # step 4 goes
        condemned = dead_keys(rival)
        sweep(backend, 1, condemned)
        mark(open_registry(backend).handle.store, "run", 1)
        collect(backend, condemned)

    hooked.before = Once("runs/run/log/", others, "put_if_absent")
    with pytest.raises(MissingObject, match="collected since"):
        mine.retention.undo(first)
    assert hooked.before.done
    assert open_registry(backend).verify(deep=True).ok


# Dropping


def test_drop_releases_everything(reg, backend, open_registry):
    run = several(reg, retention=Retention(last=3))
    run.pins.gates.set("done", run.latest())
    run.pins.artifacts.set("seeds", {"s": 1})
    run.retention.drop("a mistake", now=True)
    assert (run.manifest.dropped, run.manifest.held) == ("a mistake", frozenset())
    fresh = open_registry(backend)
    for key in objects(backend):
        backend.delete(key)
    assert fresh.verify(deep=True).ok


@pytest.mark.parametrize("reason", ["", "  ", None, 5])
def test_drop_needs_a_reason(reg, backend, reason):
    run = several(reg, 1)
    before = contents(backend)
    with pytest.raises(InvalidInput, match="dropping a run needs a reason"):
        run.retention.drop(reason)
    assert contents(backend) == before


def test_a_reason_that_is_no_text(reg, backend):
    run = several(reg, 1)
    before = contents(backend)
    with pytest.raises(
        InvalidInput, match=r"run: the reason is not valid Unicode.*found 'x\\ud800'"
    ):
        run.retention.drop("x\ud800")
    assert contents(backend) == before
    run.retention.drop("größer → besser")
    assert reg.run("run").manifest.dropped == "größer → besser"


AFTERWARDS = {
    "save": lambda run: run.save(small_state(9), step=9),
    "push": lambda run: run.exchange.push(small_state(9), step=9),
    "the same save again": lambda run: run.save(small_state(2), step=2),
    "report": lambda run: run.history.checkpoint(2).report({"loss": 0.0}),
    "tag": lambda run: run.pins.tags.set("t", run.history.checkpoint(2)),
    "gate": lambda run: run.pins.gates.set("g", run.history.checkpoint(2)),
    "artifact": lambda run: run.pins.artifacts.set("a", {"x": 1}),
    "status": lambda run: setattr(run, "status", "completed"),
    "prune": lambda run: run.retention.prune(Retention(last=1)),
    "drop": lambda run: run.retention.drop("again"),
}


@pytest.mark.parametrize("act", AFTERWARDS.values(), ids=AFTERWARDS.keys())
def test_nothing_is_said_of_a_dropped_run(reg, backend, open_registry, act):
    several(reg, 2).retention.drop("a mistake")
    before = [key for key in contents(backend) if "/log/" in key]
    with pytest.raises(Conflict, match=r"dropped|was evicted"):
        act(open_registry(backend).run("run"))
    assert [key for key in contents(backend) if "/log/" in key] == before


def test_undo_in_a_dropped_run(reg):
    run = several(reg, 2, retention=Retention(last=1))
    run.retention.drop("a mistake")
    with pytest.raises(NotFound, match="the run was dropped"):
        run.retention.undo()


def test_a_trainer_that_leaves_a_dropped_run_leaves_it_in_peace(reg):
    with reg.create_run("run") as run:
        run.save(small_state(1), step=1)
        reg.run("run").retention.drop("a mistake")
    assert run.refresh().status == "running"


def test_what_happened_before_a_drop_can_still_be_told(reg):
    run = several(reg, 2)
    saved = run.latest()
    run.retention.drop("a mistake")
    assert [commit.n for commit in reg.run("run").history.commits()] == [0, 1, 2, 3]
    with pytest.raises(NotFound, match="run/main/step2: the run was dropped; found a mistake"):
        reg.fork("run/main/step2", "fork")
    with pytest.raises(
        Conflict, match=r"run: the run was dropped; found dropped for the reason 'a mistake'"
    ):
        reg.fork(saved, "fork")
    assert reg.run_names() == ["run"]
