"""Following a run: each checkpoint once for each group, whoever dies over it."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.backends.memory import MemoryBackend
from holdfast.backends.wrappers import Metered, ReadOnly
from holdfast.registry.errors import Conflict, InvalidInput, ReadOnlyStore
from holdfast.registry.face.run import Run
from holdfast.registry.history.actions import Acknowledge, Claim, Rewind
from holdfast.registry.loading.following import watching
from holdfast.registry.spec import Retention, RunSpec
from tests.registry.loading.following.clock import Clock
from tests.support.faults import Hooked
from tests.support.loads import steps_of
from tests.support.states import save_small, small_state
from tests.support.stores import Open


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watching, "_sleep", clock.sleep)
    monkeypatch.setattr(watching, "_monotonic", lambda: clock.now_s)
    monkeypatch.setattr(watching, "_now_ms", lambda: int(clock.now_s * 1000))
    return clock


@pytest.fixture
def unjittered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching.random, "uniform", lambda low, high: high)


@pytest.fixture
def other(backend: MemoryBackend, open_registry: Open, run: Run) -> Run:
    """Another handle of the run."""
    return open_registry(backend).run(run.id)


def said(run: Run, kind: type) -> list[tuple[str, int]]:
    """Return group and step of the claims or acknowledgements in the log."""
    found = run.refresh().history.manifest().by_n
    return [
        (action.group, found[action.checkpoint].step)
        for commit in run.history.commits()
        for action in commit.actions
        if isinstance(action, kind)
    ]


# What comes


def test_each_checkpoint_comes_once_in_the_order_of_the_log(run: Run) -> None:
    save_small(run, 1, 2, 3)
    assert steps_of(run.follow.checkpoints(follow=False)) == [1, 2, 3]
    assert said(run, Acknowledge) == [("default", 1), ("default", 2), ("default", 3)]
    save_small(run, 4)
    assert steps_of(run.follow.checkpoints(follow=False)) == [4]


def test_every_group_gets_all(run: Run) -> None:
    save_small(run, 1, 2)
    assert steps_of(run.follow.checkpoints(group="evaluation", follow=False)) == [1, 2]
    assert steps_of(run.follow.checkpoints(group="export", follow=False)) == [1, 2]


def test_only_of_a_phase(run: Run) -> None:
    save_small(run, 1, phase="1")
    save_small(run, 5, phase="2")
    assert steps_of(run.follow.checkpoints(2, follow=False)) == [5]
    assert steps_of(run.follow.checkpoints(follow=False)) == [1]


def test_superseded_and_evicted_ones_do_not_come(reg) -> None:
    run = reg.create_run("short", retention=Retention(last=3))
    save_small(run, 1, 2, 3, 4)  # 1 is evicted
    run.restore(run.checkpoints()[0])
    save_small(run, 5)  # 3 and 4 are superseded
    assert steps_of(run.follow.checkpoints(follow=False)) == [2, 5]


def test_what_is_held_back_does_not_come(reg) -> None:
    run = reg.create_run("sick", preset=RunSpec(finite=("model/*",)))
    save_small(run, 1)
    state = small_state(2)
    state["model"]["w"][0] = np.nan
    run.save(state, step=2)
    assert run.manifest.checkpoints[-1].held_back
    assert steps_of(run.follow.checkpoints(follow=False)) == [1]


def test_without_following_only_what_was_there_at_first(run: Run) -> None:
    save_small(run, 1, 2)
    seen = []
    for checkpoint in run.follow.checkpoints(follow=False):
        seen.append(checkpoint.step)
        save_small(run, checkpoint.step + 10)
    assert seen == [1, 2]


def test_a_checkpoint_that_comes_can_be_loaded(run: Run) -> None:
    save_small(run, 7)
    (checkpoint,) = run.follow.checkpoints(follow=False)
    assert checkpoint.ref == "run/main/step00000007"
    assert checkpoint.load()["optimizer"]["step"] == 7


# Sharing


def test_two_followers_share(run: Run, other: Run, open_registry: Open, backend) -> None:
    save_small(run, 1, 2, 3)
    here, there = run.follow.checkpoints(follow=False), other.follow.checkpoints(follow=False)
    assert next(here).step == 1
    assert next(there).step == 2
    assert next(here).step == 3
    for watch in (there, here):
        with pytest.raises(StopIteration):
            next(watch)
    assert said(run, Acknowledge) == [("default", 1), ("default", 2), ("default", 3)]


def test_a_lost_race_gives_the_next_one(run: Run, open_registry: Open) -> None:
    save_small(run, 1, 2)
    hooked = Hooked(run.handle.store.backend)
    slow = open_registry(hooked).run(run.id)
    taken = []

    def overtake(method: str, key: str) -> None:
        if method == "put_if_absent" and not taken:
            taken.append(None)
            taken[0] = next(run.follow.checkpoints(follow=False)).step

    hooked.before = overtake
    assert next(slow.follow.checkpoints(follow=False)).step == 2
    assert taken == [1]
    assert said(run, Claim) == [("default", 1), ("default", 2)]


def test_nothing_is_acknowledged_twice(run: Run, other: Run, clock: Clock) -> None:
    save_small(run, 1)
    slow, quick = run.follow.checkpoints(hold_s=10), other.follow.checkpoints(hold_s=10)
    next(slow)
    clock.now_s += 11
    assert next(quick).step == 1
    slow.acknowledge()  # late, but done is done
    quick.acknowledge()
    assert said(run, Acknowledge) == [("default", 1)]


def test_all_races_lost_is_no_end(run: Run, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    save_small(run, 1, 2)
    watch = run.follow.checkpoints(follow=False)
    assert next(watch).step == 1
    commit, refusals = run.handle.committer.commit, [Conflict("lost 20 races")] * 2

    def crowded(*arguments, **options):
        if refusals:
            raise refusals.pop()
        return commit(*arguments, **options)

    monkeypatch.setattr(run.handle.committer, "commit", crowded)
    assert next(watch).step == 2
    assert len(clock.slept) == 2
    refusals.append(Conflict("lost 20 races"))
    with pytest.raises(StopIteration):
        next(watch)
    assert said(run, Acknowledge) == [("default", 1), ("default", 2)]


# Dying


def test_what_a_body_fails_at_comes_again_after_the_hold(run, other, clock: Clock) -> None:
    save_small(run, 1, 2)
    with pytest.raises(ZeroDivisionError):
        for _ in run.follow.checkpoints(hold_s=100):
            raise ZeroDivisionError
    assert said(run, Acknowledge) == []
    assert steps_of(other.follow.checkpoints(follow=False)) == [2]
    clock.now_s += 99
    assert steps_of(other.follow.checkpoints(follow=False)) == []
    clock.now_s += 1
    assert steps_of(other.follow.checkpoints(follow=False)) == [1]


def test_a_break_leaves_the_last_one_unless_it_is_acknowledged(run, other, clock: Clock) -> None:
    save_small(run, 1, 2)
    watch = run.follow.checkpoints(hold_s=5)
    for checkpoint in watch:
        if checkpoint.step == 2:
            break
    assert said(run, Acknowledge) == [("default", 1)]
    clock.now_s += 6
    again = other.follow.checkpoints()
    for _ in again:
        again.acknowledge()
        break
    assert said(run, Acknowledge) == [("default", 1), ("default", 2)]


def test_a_second_loop_does_not_acknowledge_what_the_first_one_left(run: Run) -> None:
    save_small(run, 1)
    watch = run.follow.checkpoints(follow=False)
    with pytest.raises(ZeroDivisionError):
        for _ in watch:
            raise ZeroDivisionError
    assert steps_of(watch) == [1]


def test_a_follower_is_replaced_as_soon_as_its_hold_is_over(run, other, clock: Clock) -> None:
    save_small(run, 1)
    begun = clock.now_s
    next(run.follow.checkpoints(hold_s=100))
    assert next(other.follow.checkpoints(poll_s=60, longest_poll_s=3600)).step == 1
    assert clock.now_s - begun == pytest.approx(100, abs=0.1)


def test_a_named_follower_goes_on_with_what_it_held(run: Run, other: Run) -> None:
    save_small(run, 1, 2)
    next(run.follow.checkpoints(follower="job-7"))
    assert next(other.follow.checkpoints(follower="job-8")).step == 2
    assert next(other.follow.checkpoints(follower="job-7")).step == 1


def test_renewing_holds_longer(run: Run, other: Run, clock: Clock) -> None:
    save_small(run, 1)
    watch = run.follow.checkpoints(hold_s=10)
    next(watch)
    clock.now_s += 8
    watch.renew()
    clock.now_s += 8
    assert steps_of(other.follow.checkpoints(follow=False)) == []
    clock.now_s += 3
    taken = other.follow.checkpoints(follow=False)
    assert next(taken).step == 1
    with pytest.raises(Conflict, match=taken.follower):
        watch.renew()
    taken.acknowledge()
    with pytest.raises(Conflict, match="acknowledged"):
        watch.renew()


def test_nothing_can_be_renewed_before_the_first(run: Run) -> None:
    with pytest.raises(InvalidInput, match="holds no checkpoint"):
        run.follow.checkpoints().renew()


# Retention


def test_what_is_held_outlives_retention(reg) -> None:
    run = reg.create_run("short", retention=Retention(last=1))
    save_small(run, 1)
    watch = run.follow.checkpoints(hold_s=10**10)  # retention reads the real clock
    next(watch)
    save_small(run, 2, 3)
    assert [one.step for one in run.checkpoints()] == [1, 3]
    assert next(watch).step == 3
    save_small(run, 4)
    assert [one.step for one in run.checkpoints()] == [3, 4]


@pytest.mark.parametrize("fate", ["evicted", "superseded"])
def test_what_went_meanwhile_can_be_acknowledged(fate: str, reg, backend, open_registry) -> None:
    run = reg.create_run("short", retention=Retention(last=1))
    save_small(run, 1)
    follower = open_registry(backend).run("short")
    watch = follower.follow.checkpoints(
        hold_s=1, follow=False
    )  # expired long ago by retention's clock
    checkpoint = next(watch)
    if fate == "superseded":
        run.handle.committer.commit(lambda state: [Rewind(to=None)])
    else:
        save_small(run, 2)
    watch.acknowledge()
    record = run.refresh().history.manifest().by_n[checkpoint.handle.n]
    assert (record.evicted is not None, record.superseded) == (
        fate == "evicted",
        fate == "superseded",
    )
    assert said(run, Acknowledge) == [("default", 1)]


# Waiting


def test_what_is_saved_meanwhile_comes(run: Run, other: Run, clock: Clock) -> None:
    clock.then = lambda: len(clock.slept) == 3 and save_small(run, 1)
    assert next(other.follow.checkpoints()).step == 1
    assert len(clock.slept) == 3


def test_pauses_double_and_begin_anew(run: Run, other: Run, clock: Clock, unjittered) -> None:
    def meanwhile() -> None:
        if len(clock.slept) == 5:
            run.pins.tags.set("x", run.history.checkpoint(1))  # new in the log, and no checkpoint
        if len(clock.slept) == 7:
            save_small(run, 2)

    save_small(run, 1)
    watch = other.follow.checkpoints(poll_s=1, longest_poll_s=6)
    assert next(watch).step == 1
    clock.then = meanwhile
    assert next(watch).step == 2
    assert clock.slept == [1, 2, 4, 6, 6, 1, 2]


def test_pauses_are_jittered(run: Run, clock: Clock) -> None:
    assert list(run.follow.checkpoints(poll_s=10, longest_poll_s=10, timeout_s=200)) == []
    assert all(5 <= pause <= 10 for pause in clock.slept[:-1])
    assert len(set(clock.slept)) > 5


def test_an_idle_poll_is_one_request(run: Run, open_registry: Open, clock: Clock) -> None:
    save_small(run, 1)
    metered = Metered(run.handle.store.backend)
    watch = open_registry(metered).run(run.id).follow.checkpoints(timeout_s=10_000)
    next(watch)
    with pytest.raises(StopIteration):
        next(watch)  # acknowledges, and waits
    before = metered.snapshot().requests
    polls = len(clock.slept)
    with pytest.raises(StopIteration):
        next(watch)
    polls = len(clock.slept) - polls
    assert polls > 100
    assert metered.snapshot().requests - before == polls + 1


def test_a_claim_costs_two_requests_beside_the_poll(run: Run, open_registry: Open) -> None:
    save_small(run, 1, 2)
    metered = Metered(run.handle.store.backend)
    watch = open_registry(metered).run(run.id).follow.checkpoints()
    next(watch)
    before = metered.snapshot().requests
    assert next(watch).step == 2  # acknowledges the first as well
    assert metered.snapshot().requests - before == 3


def test_a_timeout_ends_the_loop(run: Run, clock: Clock) -> None:
    save_small(run, 1)
    begun = clock.now_s
    assert steps_of(run.follow.checkpoints(timeout_s=50)) == [1]
    assert clock.now_s - begun == pytest.approx(50)
    assert said(run, Acknowledge) == [("default", 1)]


# The end


@pytest.mark.parametrize("status", ["completed", "failed"])
def test_the_end_of_the_run_ends_the_loop(status, run: Run, other: Run, clock: Clock) -> None:
    save_small(run, 1, 2)
    clock.then = lambda: setattr(run, "status", status)
    assert steps_of(other.follow.checkpoints()) == [1, 2]
    assert len(clock.slept) == 1


def test_an_interrupted_run_may_go_on(run: Run, other: Run, clock: Clock) -> None:
    run.status = "interrupted"
    assert steps_of(other.follow.checkpoints(timeout_s=100)) == []
    assert sum(clock.slept) == pytest.approx(100)


def test_an_ended_run_is_not_over_while_another_follower_may_die(run, other, clock) -> None:
    save_small(run, 1)
    run.status = "completed"
    next(run.follow.checkpoints(hold_s=100))
    begun = clock.now_s
    assert steps_of(other.follow.checkpoints()) == [1]
    assert clock.now_s - begun == pytest.approx(100, abs=0.1)


def test_a_dropped_run_ends_the_loop(run: Run, other: Run, clock: Clock) -> None:
    save_small(run, 1, 2)
    watch = other.follow.checkpoints()
    next(watch)
    run.retention.drop("no use")
    with pytest.raises(StopIteration):
        next(watch)
    assert clock.slept == []
    watch.acknowledge()
    assert said(run, Acknowledge) == []
    assert list(other.follow.checkpoints(follow=False)) == []


def test_what_a_dropped_run_held_cannot_be_renewed(run: Run, other: Run) -> None:
    save_small(run, 1)
    watch = other.follow.checkpoints()
    next(watch)
    run.retention.drop("no use")
    with pytest.raises(Conflict, match="no use"):
        watch.renew()


# Bad input


@pytest.mark.parametrize(
    "options",
    [
        {"group": "a b"},
        {"follower": "a/b"},
        {"hold_s": 0},
        {"hold_s": float("nan")},
        {"hold_s": float("inf")},
        {"poll_s": -1},
        {"poll_s": True},
        {"longest_poll_s": "1"},
        {"timeout_s": 0},
        {"phase": 1.5},
    ],
)
def test_bad_arguments_are_refused_at_once(options: dict, run: Run) -> None:
    commits = run.manifest.commits
    with pytest.raises(InvalidInput):
        run.follow.checkpoints(**options)
    assert run.refresh().manifest.commits == commits


def test_a_phase_that_is_not_declared_is_refused(reg) -> None:
    run = reg.create_run("declared", preset=RunSpec.of({"phases": ({"name": "warm"},)}))
    with pytest.raises(InvalidInput, match="warm"):
        run.follow.checkpoints("wram")


def test_a_registry_that_is_only_read_cannot_be_followed(run: Run, open_registry: Open) -> None:
    save_small(run, 1)
    reader = open_registry(ReadOnly(run.handle.store.backend)).run(run.id)
    with pytest.raises(ReadOnlyStore):
        next(reader.follow.checkpoints())
