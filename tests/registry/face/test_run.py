"""The trainer: who may save, what a step holds, coming back, and saving in the background."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pytest

from holdfast import Monitor
from holdfast.backends.errors import StoreUnavailable
from holdfast.backends.wrappers import Metered, Wrapper
from holdfast.registry.errors import (
    Conflict,
    Fenced,
    IntegrityError,
    InvalidInput,
    RestoreFailed,
    UnsupportedValue,
)
from holdfast.registry.history import slots
from tests.support.faults import flip
from tests.support.loads import actions_of, steps
from tests.support.states import same, save_small, small_state
from tests.support.stores import contents, new_backend, objects, packs_of

# Who is in charge


def test_the_first_save_takes_the_run_over_in_its_own_commit(run):
    save_small(run, 1, 2, 3)
    assert actions_of(run) == [
        ["run.create"],
        ["run.take_over", "checkpoint.add"],
        ["checkpoint.add"],
        ["checkpoint.add"],
    ]


def test_reading_and_annotating_take_nothing(run, backend, open_registry):
    first = run.save(small_state(1), step=1)
    other = open_registry(backend).run("run")
    other.latest().load()
    other.latest().report({"a": 1})
    other.pins.tags.set("t", other.latest())
    other.restore()
    run.save(small_state(2), step=2)
    assert run.manifest.tags == {"t": first.handle.n}


def test_a_trainer_that_was_taken_over_is_fenced_with_host_and_time(run, backend, open_registry):
    run.save(small_state(1), step=1)
    other = open_registry(backend).run("run")
    other.save(small_state(2), step=2)
    writer = other.manifest.writer
    before = contents(backend, "runs/")
    with pytest.raises(Fenced) as caught:
        run.save(small_state(3), step=3)
    assert caught.value.found.startswith(f"{writer.host} at 20")
    assert caught.value.found.endswith("Z")
    assert contents(backend, "runs/") == before
    with pytest.raises(Fenced):
        run.save(small_state(4), step=4)
    other.save(small_state(3), step=3)
    assert steps(other) == [1, 2, 3]


def test_a_take_over_in_the_middle_of_a_save_fences_it(backend, open_registry):
    from tests.support.faults import Hooked, Once

    hooked = Hooked(backend)
    run = open_registry(hooked).create_run("run")
    run.save(small_state(1), step=1)
    other = open_registry(backend).run("run")
    hooked.before = Once(
        "runs/run/log/", lambda: other.save(small_state(9), step=9), "put_if_absent"
    )
    with pytest.raises(Fenced):
        run.save(small_state(2), step=2)
    assert steps(open_registry(backend).run("run")) == [1, 9]


def test_a_handle_that_comes_back_without_restoring_takes_over_and_goes_on(
    run, backend, open_registry
):
    run.save(small_state(1), step=1)
    other = open_registry(backend).run("run")
    other.save(small_state(2), step=2)
    assert steps(other) == [1, 2]


@pytest.mark.parametrize("rank", ["1", "7"])
def test_only_rank_0_may_save(run, backend, monkeypatch, rank):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", rank)
    before = contents(backend)
    for save in (run.save, run.save_async):
        with pytest.raises(Conflict, match=f"RANK={rank}: only rank 0 may save"):
            save(small_state(), step=1)
    assert contents(backend) == before
    monkeypatch.setenv("RANK", "0")
    run.save(small_state(), step=1)


# Steps


def test_the_same_step_with_the_same_content_is_a_no_op(run, backend):
    first = run.save(small_state(), step=1)
    before = contents(backend)
    again = run.save(small_state(), step=1)
    assert (again.handle.newest_record(), again.digest) == (
        first.handle.newest_record(),
        first.digest,
    )
    assert contents(backend) == before


def test_the_same_step_with_the_same_content_from_a_new_trainer_only_takes_over(
    run, backend, open_registry
):
    first = run.save(small_state(), step=1)
    other = open_registry(backend).run("run")
    assert other.save(small_state(), step=1).handle.n == first.handle.n
    assert actions_of(other)[2:] == [["run.take_over"]]
    with pytest.raises(Fenced):
        run.save(small_state(2), step=2)


def test_a_repeated_save_adds_the_metrics_that_are_new(run, backend):
    first = run.save(small_state(), step=1, metrics={"loss": 1.0, "bad": float("nan")})
    again = run.save(small_state(), step=1, metrics={"acc": 0.5, "bad": float("nan")})
    assert again.handle.n == first.handle.n
    assert (again.metrics["loss"], again.metrics["acc"]) == (1.0, 0.5)
    assert actions_of(run)[2:] == [["checkpoint.report"]]
    before = contents(backend)
    run.save(small_state(), step=1, metrics={"loss": 1.0, "bad": float("nan")})
    assert contents(backend) == before


# Pushing


def test_a_push_takes_nothing_over(run, backend, open_registry):
    run.save(small_state(1), step=1)
    other = open_registry(backend).run("run")
    assert other.exchange.push(small_state(2), step=2).step == 2
    assert actions_of(other)[2:] == [["checkpoint.add"]]
    run.save(small_state(3), step=3)
    assert steps(run) == [1, 2, 3]


def test_a_push_of_other_content_at_a_taken_step_is_a_conflict(run, backend, open_registry):
    run.save(small_state(1), step=1)
    other = open_registry(backend).run("run")
    assert other.exchange.push(small_state(1), step=1).handle.n == 1
    with pytest.raises(Conflict, match="phase main, step 1"):
        other.exchange.push(small_state(2), step=1)
    assert steps(run) == [1]


def test_a_push_rewinds_nothing(run):
    first, *_ = save_small(run, 1, 2, 3)
    run.restore(at=first)
    with pytest.raises(Conflict):
        run.exchange.push(small_state(22), step=2)
    run.exchange.push(small_state(9), step=9)
    assert steps(run) == [1, 2, 3, 9]


def test_a_completed_run_takes_no_push(run):
    with run:
        run.save(small_state(1), step=1)
    with pytest.raises(Conflict, match="the run is completed"):
        run.exchange.push(small_state(2), step=2)


def test_the_same_step_with_other_content_is_a_conflict(run, backend):
    first = run.save(small_state(1), step=5)
    before = contents(backend, "runs/")
    with pytest.raises(Conflict) as caught:
        run.save(small_state(2), step=5)
    assert caught.value.where == "run: phase main, step 5"
    assert first.digest.short in caught.value.expected
    assert "restore()" in caught.value.hint
    assert contents(backend, "runs/") == before
    assert run.save(small_state(2), step=6).step == 6


def test_phases_have_steps_of_their_own(run):
    run.save(small_state(1), step=1, phase=1)
    run.save(small_state(2), step=1, phase=2)
    assert [(c.phase, c.step) for c in run.checkpoints()] == [(1, 1), (2, 1)]
    assert run.latest(phase=1).step == 1
    assert run.checkpoints(phase="1")[0].phase == 1
    assert run.latest(phase=3) is None


def test_steps_may_go_down_and_latest_is_the_last_in_the_log(run):
    run.save(small_state(1), step=10)
    run.save(small_state(2), step=5)
    assert run.latest().step == 5


# Coming back


def test_restore_of_an_empty_run_is_none(run):
    assert run.restore() is None


def test_restore_returns_the_newest_state_and_where_it_is_from(run, backend, open_registry):
    save_small(run, 1, 2, 3)
    restored = open_registry(backend).run("run").restore()
    assert same(restored.state, small_state(3))
    assert restored.checkpoint.step == 3
    assert restored.report == ()


def test_restoring_an_older_one_rewinds_at_the_next_save(run, backend, open_registry):
    first, second, third = save_small(run, 1, 2, 3)
    run.pins.tags.set("kept", third)
    restored = run.restore(at=first)
    assert same(restored.state, small_state(1))
    assert steps(run) == [1, 2, 3]
    redone = run.save(small_state(22), step=2)
    assert steps(run) == [1, 2]
    assert run.latest().digest == redone.digest
    assert actions_of(run)[-1] == ["run.rewind", "checkpoint.add"]
    reader = open_registry(backend)
    assert reader.checkpoint(f"run/{second.digest.hex()[:12]}").superseded
    assert same(reader.checkpoint("run/tags/kept").load(), small_state(3))
    assert reader.checkpoint("run/main/step00000002").digest == redone.digest


def test_a_fenced_trainer_that_restores_takes_the_run_over_again(run, backend, open_registry):
    run.save(small_state(), step=1)
    other = open_registry(backend).run("run")
    other.restore()
    other.save(small_state(2), step=2)
    with pytest.raises(Fenced):
        run.save(small_state(3), step=3)
    assert run.restore().checkpoint.step == 2
    run.save(small_state(3), step=3)
    with pytest.raises(Fenced):
        other.save(small_state(4), step=4)


def test_restoring_the_newest_rewinds_nothing(run):
    save_small(run, 1, 2, 3)
    run.restore()
    run.save(small_state(4), step=4)
    assert actions_of(run)[-1] == ["checkpoint.add"]
    assert steps(run) == [1, 2, 3, 4]


def test_a_rewind_happens_once(run):
    first, *_ = save_small(run, 1, 2, 3)
    run.restore(at=first)
    run.save(small_state(12), step=2)
    run.save(small_state(13), step=3)
    assert steps(run) == [1, 2, 3]
    assert [("run.rewind" in actions) for actions in actions_of(run)] == [False] * 4 + [True, False]


def test_a_rewind_supersedes_what_others_added_meanwhile(run, backend, open_registry):
    save_small(run, 1, 2, 3)
    other = open_registry(backend).run("run")
    other.restore(at=other.checkpoints()[0])
    run.save(small_state(4), step=4)
    other.save(small_state(22), step=2)
    assert steps(other) == [1, 2]


def test_the_superseded_state_may_be_saved_again_at_its_step(run):
    first, second, _ = save_small(run, 1, 2, 3)
    run.restore(at=first)
    again = run.save(small_state(2), step=2)
    assert again.digest == second.digest
    assert again.handle.n != second.handle.n
    assert steps(run) == [1, 2]


def test_best_and_latest_forget_what_was_rewound(backend, open_registry):
    run = open_registry(backend).create_run("m", monitor=Monitor(metric="loss", mode="min"))
    for i, loss in enumerate([3.0, 1.0, 2.0]):
        run.save(small_state(i), step=i, metrics={"loss": loss})
    assert run.best().step == 1
    run.restore(at=run.checkpoints()[0])
    run.save(small_state(9), step=9, metrics={"loss": 5.0})
    assert run.best().step == 0


def test_restore_falls_back_past_a_damaged_newest_and_says_so(run, backend, open_registry):
    *_, newest = save_small(run, 1, 2, 3)
    flip(backend, packs_of(newest)[0])
    again = open_registry(backend).run("run")
    restored = again.restore()
    assert restored.checkpoint.step == 2
    assert same(restored.state, small_state(2))
    (passed,) = restored.report
    assert (passed.ref, passed.digest) == (newest.ref, newest.digest)
    assert packs_of(newest)[0] in passed.reason


@pytest.mark.parametrize("kind", ["manifests", "placements"])
@pytest.mark.parametrize("gone", [True, False])
def test_restore_falls_back_past_a_missing_or_damaged_description(
    run, backend, open_registry, kind, gone
):
    run.save(small_state(1), step=1)
    before = objects(backend)
    run.save(small_state(2), step=2)
    (key,) = [key for key in objects(backend) - before if key.startswith(kind)]
    if gone:
        backend.delete(key)
    else:
        flip(backend, key)
    restored = open_registry(backend).run("run").restore()
    assert restored.checkpoint.step == 1
    assert key in restored.report[0].reason


def test_restore_failed_lists_every_checkpoint_and_why(run, backend, open_registry):
    made = save_small(run, 1, 2, 3)
    for checkpoint in made:
        for key in packs_of(checkpoint):
            backend.delete(key)
    with pytest.raises(RestoreFailed) as caught:
        open_registry(backend).run("run").restore()
    message = str(caught.value)
    assert "none of 3 checkpoints" in message
    for checkpoint in made:
        assert checkpoint.ref in message
        assert checkpoint.digest.short in message
        assert any(key in message for key in packs_of(checkpoint))
    assert message.index(made[2].ref) < message.index(made[0].ref)


def test_restoring_exactly_one_never_falls_back(run, backend, open_registry):
    *_, newest = save_small(run, 1, 2, 3)
    flip(backend, packs_of(newest)[0])
    again = open_registry(backend).run("run")
    with pytest.raises(IntegrityError):
        again.restore(at=again.latest())


def test_restore_does_not_fall_back_when_the_store_is_down(run, backend, open_registry):
    save_small(run, 1, 2, 3)

    class Down(Wrapper):
        def get(self, key, byte_range=None, *, into=None):
            if key.startswith("packs/"):
                raise StoreUnavailable("down", where=key)
            return super().get(key, byte_range, into=into)

    with pytest.raises(StoreUnavailable):
        open_registry(Down(backend)).run("run").restore()


def damage(backend, checkpoint, kind: str, how: str) -> None:
    placement = checkpoint.handle.reader.placement.digest
    keys = {
        "packs": packs_of(checkpoint)[:1],
        "manifests": [k for k in objects(backend) if checkpoint.digest.hex() in k],
        "placements": [k for k in objects(backend) if placement.hex() in k],
    }[kind]
    for key in keys:
        if how == "gone":
            backend.delete(key)
        elif how == "cut":
            backend.put(key, backend.get(key)[: 100 if kind == "packs" else -9])
        else:
            flip(backend, key, 40)


HARMS = [
    (kind, how) for kind in ("packs", "manifests", "placements") for how in ("flip", "cut", "gone")
]


@pytest.mark.parametrize(("kind", "how"), HARMS)
def test_a_restored_run_heals_what_was_damaged_by_saving_it_again(
    run, backend, open_registry, kind, how
):
    run.save(small_state(1), step=1)
    newest = run.save(small_state(2), step=2)
    damage(backend, newest, kind, how)
    registry = open_registry(backend)
    assert not registry.verify(deep=True).ok
    again = registry.run("run")
    assert again.restore().checkpoint.step == 1
    assert again.save(small_state(2), step=2).digest == newest.digest
    assert open_registry(backend).verify(deep=True).ok
    assert same(open_registry(backend).run("run").latest().load(), small_state(2))


def test_what_a_damaged_checkpoint_shares_is_not_built_upon(run, backend, open_registry):
    shared = {"frozen": {"w": np.arange(2000)}}
    run.save(shared | small_state(1), step=1)
    newest = run.save(shared | small_state(2), step=2)
    flip(backend, next(k for k in packs_of(newest) if k not in packs_of(run.checkpoints()[0])))
    again = open_registry(backend).run("run")
    again.restore()
    again.save(shared | small_state(3), step=3)
    again.save(shared | small_state(4), step=4)
    fresh = open_registry(backend).run("run")
    assert same(fresh.latest().load(), shared | small_state(4))


def test_only_a_checkpoint_of_the_run_can_be_restored(reg, run):
    save_small(run, 1, 2, 3)
    other = reg.create_run("other")
    foreign = other.save(small_state(50), step=1)
    with pytest.raises(InvalidInput):
        run.restore(at=foreign)
    run.save(small_state(4), step=4)
    assert steps(run) == [1, 2, 3, 4]


# Status


def test_leaving_the_block_completes_the_run(run):
    with run as entered:
        assert entered is run
        run.save(small_state(), step=1)
        assert run.status == "running"
    assert run.status == "completed"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("bug"), "failed"),
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(128 + signal.SIGTERM), "interrupted"),
    ],
)
def test_leaving_by_an_exception_sets_the_status_and_lets_it_through(run, error, status):
    def leave():
        with run:
            raise error

    with pytest.raises(type(error)):
        leave()
    assert run.status == status


def test_the_callers_error_comes_through_though_the_store_is_down(
    backend, open_registry, monkeypatch
):
    monkeypatch.setattr(slots.time, "sleep", lambda seconds: None)

    class Down(Wrapper):
        down = False

        def put_if_absent(self, key, body):
            if self.down:
                raise StoreUnavailable("down", where=key)
            return super().put_if_absent(key, body)

    down = Down(backend)
    run = open_registry(down).create_run("run")
    down.down = True

    def leave():
        with run:
            raise ValueError("bug")

    with pytest.raises(ValueError, match="bug"):
        leave()


def test_a_completed_run_takes_no_save_from_a_new_trainer(run, backend, open_registry):
    with run:
        run.save(small_state(1), step=1)
    other = open_registry(backend).run("run")
    before = contents(backend, "runs/")
    with pytest.raises(Conflict, match=r"run: the run is completed.*run.status"):
        other.save(small_state(2), step=2)
    assert contents(backend, "runs/") == before
    other.status = "running"
    other.save(small_state(2), step=2)


def test_a_completed_run_takes_no_save_from_the_trainer_that_completed_it(run):
    with run:
        run.save(small_state(1), step=1)
    with pytest.raises(Conflict, match="the run is completed"):
        run.save(small_state(2), step=2)


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_a_run_that_stopped_runs_again_at_the_next_save(run, backend, open_registry, status):
    run.save(small_state(1), step=1)
    run.status = status
    other = open_registry(backend).run("run")
    other.save(small_state(2), step=2)
    assert other.status == "running"
    assert actions_of(other)[-1] == ["run.take_over", "run.status", "checkpoint.add"]


# In the background


@pytest.fixture
def gated(gate, open_registry):
    run = open_registry(gate).create_run("run")
    yield run
    gate.open.set()


def test_save_async_returns_before_the_bytes_are_stored(gate, gated):
    pending = gated.save_async(small_state(), step=1)
    assert gate.reached.wait(300)
    assert not pending.done()
    with pytest.raises(TimeoutError):
        pending.wait(0.001)
    gate.open.set()
    checkpoint = pending.wait()
    assert pending.done()
    assert same(checkpoint.load(), small_state())
    assert gated.latest().digest == checkpoint.digest


def test_changing_the_state_after_save_async_changes_nothing(gate, gated):
    state = small_state()
    state["model"]["tiny"] = np.arange(4)
    expected = {name: dict(part) for name, part in state.items()}
    expected["model"] = {key: value.copy() for key, value in state["model"].items()}
    expected["optimizer"]["m"] = state["optimizer"]["m"].copy()
    pending = gated.save_async(state, step=1)
    for array in (*state["model"].values(), state["optimizer"]["m"]):
        array[...] = 0
    state["optimizer"]["lr"] = 99.0
    state["more"] = 1
    gate.open.set()
    assert same(pending.wait().load(), expected)


def test_one_save_is_under_way_at_a_time(gate, gated, backend):
    first = gated.save_async(small_state(1), step=1)
    assert gate.reached.wait(300)
    threading.Timer(0.01, gate.open.set).start()
    second = gated.save_async(small_state(2), step=2)
    assert first.done()
    second.wait()
    assert steps(gated) == [1, 2]


def test_memory_of_one_save_is_not_overwritten_by_the_next(run, backend, open_registry):
    made = [run.save_async(small_state(i), step=i) for i in range(1, 9)]
    for i, pending in enumerate(made, 1):
        assert pending.wait().step == i
    fresh = open_registry(backend)
    assert fresh.verify(deep=True).ok
    for i, checkpoint in enumerate(fresh.run("run").checkpoints(), 1):
        assert same(checkpoint.load(), small_state(i))


@pytest.mark.parametrize("following", ["save", "save_async", "close", "restore"])
def test_an_error_surfaces_at_the_next_call(gate, gated, following):
    gate.error = StoreUnavailable("down")
    gate.open.set()
    gated.save_async(small_state(), step=1)
    calls = {
        "save": lambda: gated.save(small_state(), step=2),
        "save_async": lambda: gated.save_async(small_state(), step=2),
        "close": gated.close,
        "restore": gated.restore,
    }
    with pytest.raises(StoreUnavailable, match="down"):
        calls[following]()
    gate.error = None
    assert gated.save(small_state(3), step=3).step == 3


def test_an_error_surfaces_at_wait(gate, gated):
    gate.error = StoreUnavailable("down")
    gate.open.set()
    pending = gated.save_async(small_state(), step=1)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="down"):
            pending.wait()
    # Told once, it does not stand in the way of trying again.
    gate.error = None
    assert gated.save(small_state(), step=1).step == 1


def test_leaving_the_block_waits_for_the_save(gate, gated, backend, open_registry):
    gate.open.set()
    with gated:
        gated.save_async(small_state(), step=1)
    fresh = open_registry(backend).run("run")
    assert (fresh.status, steps(fresh)) == ("completed", [1])


def test_what_cannot_be_stored_is_refused_before_the_return(run, backend):
    before = contents(backend)
    with pytest.raises(UnsupportedValue, match=r"state\['f'\]"):
        run.save_async({"f": lambda: 0}, step=1)
    assert contents(backend) == before
    run.save(small_state(), step=1)


def test_closing_finishes_the_save_and_the_handle_can_be_used_again(gate, gated):
    pending = gated.save_async(small_state(1), step=1)
    threading.Timer(0.01, gate.open.set).start()
    gated.close()
    assert pending.done()
    gated.save_async(small_state(2), step=2).wait()
    assert steps(gated) == [1, 2]


def test_closing_the_registry_finishes_the_save():
    from holdfast.registry.face.factory import open_on

    backend = new_backend()
    with open_on(backend) as registry:
        registry.create_run("run").save_async(small_state(), step=1)
    with open_on(backend) as registry:
        assert registry.checkpoint("run").step == 1


def test_a_failure_after_save_async_leaves_the_status_failed(backend, open_registry):
    class Slow(Wrapper):
        def put_if_absent(self, key, body):
            if key.startswith("packs/"):
                threading.Event().wait(0.05)
            return super().put_if_absent(key, body)

    run = open_registry(Slow(backend)).create_run("run")

    def leave():
        with run:
            run.save_async(small_state(), step=1)
            raise ValueError("bug")

    with pytest.raises(ValueError, match="bug"):
        leave()
    run.close()
    assert open_registry(backend).run("run").status == "failed"


# Annotating and reading


def test_a_tag_moves(reg, run):
    first, second, _ = save_small(run, 1, 2, 3)
    run.pins.tags.set("keeper", first)
    assert reg.checkpoint("run/tags/keeper").step == 1
    run.pins.tags.set("keeper", second)
    assert reg.checkpoint("run/tags/keeper").step == 2


def test_a_tag_names_a_checkpoint_of_its_own_run(reg, run, backend):
    foreign = reg.create_run("other").save(small_state(), step=1)
    before = contents(backend)
    with pytest.raises(InvalidInput, match=r"its own run.*found other/"):
        run.pins.tags.set("t", foreign)
    assert contents(backend) == before


def test_best_needs_a_monitor(run):
    save_small(run, 1, 2, 3)
    with pytest.raises(
        InvalidInput,
        match=r"run: the run has no monitor.*which checkpoint is best.*monitor=",
    ):
        run.best()
    assert run.best(monitor=Monitor(metric="none", mode="min")) is None


def test_best_by_the_first_monitor_or_the_one_given(reg):
    run = reg.create_run(
        "m", monitor=[Monitor(metric="loss", mode="min"), Monitor(metric="acc", mode="max")]
    )
    for i, (loss, acc) in enumerate([(1.0, 0.1), (2.0, 0.9), (float("nan"), 0.5)]):
        run.save(small_state(i), step=i, metrics={"loss": loss, "acc": acc})
    assert run.best().step == 0
    assert run.best(monitor=Monitor(metric="acc", mode="max")).step == 1


def test_a_reader_sees_what_was_saved_meanwhile(run, backend, open_registry):
    reader = open_registry(backend).run("run")
    assert reader.latest() is None
    run.save(small_state(), step=1)
    assert reader.latest().step == 1
    assert steps(reader) == [1]


def test_the_config_comes_back_with_its_types(reg):
    config = {"lr": 1e-3, "betas": (0.9, 0.999), "name": None, 5: [1, {"x": b"y"}]}
    assert reg.create_run("c", config=config).config == config
    assert type(reg.run("c").config["betas"]) is tuple
    assert reg.create_run("d").config is None


def test_history_is_every_commit_in_order(run):
    save_small(run, 1, 2, 3)
    commits = list(run.history.commits())
    assert [commit.n for commit in commits] == [0, 1, 2, 3]
    assert all("@" in commit.author for commit in commits)


def test_a_save_reads_the_log_once_when_nobody_else_writes(backend, open_registry):
    calls = []
    run = open_registry(Metered(backend, calls)).create_run("run")
    run.save(small_state(1), step=1)
    calls.clear()
    run.save(small_state(2), step=2)
    # The slot before, which nobody may have replaced, and its own.
    assert [c.method for c in calls if c.key.startswith("runs/")] == ["get", "put_if_absent"]
    assert [c.key for c in calls if c.method == "get"] == ["runs/run/log/" + "1".zfill(20)]
