"""Thinning: a checkpoint keeps some components, and collection frees the others."""

from __future__ import annotations

import itertools
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from holdfast import Monitor, repair, sync
from holdfast.backends.wrappers import Fault, Faulty, InjectedCrash
from holdfast.registry.errors import Conflict, InvalidInput, MissingObject, Thinned
from holdfast.registry.face.factory import open_on
from holdfast.registry.spec import Retention, RunSpec
from tests.support.faults import Hooked, Once
from tests.support.inline import without_threads
from tests.support.states import same
from tests.support.stores import contents, new_backend, objects, opened, packs_of

LOSS = Monitor(metric="loss", mode="min")
MODEL = 10_000  # values of a model; the optimizer has twice as many


def state(step: int) -> dict:
    """A state of two components that change with each step."""
    noise = np.random.default_rng(step)
    return {
        "model": {"w": noise.random(MODEL), "b": np.arange(4)},
        "optimizer": {"m": noise.random(MODEL), "v": noise.random(MODEL), "count": step},
        "progress": step,
    }


def several(reg, count: int = 4, run_id: str = "run", **options):
    run = reg.create_run(run_id, seed=1, **options)
    for step in range(1, count + 1):
        run.save(state(step), step=step, metrics={"loss": float(step)})
    return run


def stored_bytes(backend) -> int:
    return sum(info.size_bytes for info in backend.list("packs/"))


def thinned_steps(run) -> list[int]:
    return [one.step for one in run.checkpoints() if one.parts]


def check_model_alone(checkpoint) -> None:
    """The model is there, byte for byte; the rest raises an error that names the action."""
    whole = state(checkpoint.step)
    assert same(checkpoint.load(only="model"), {"model": whole["model"]})
    for ask in (
        checkpoint.load,
        lambda: checkpoint.load(only="optimizer"),
        lambda: checkpoint["optimizer/m"][:],
        lambda: checkpoint.lazily()["optimizer"],
    ):
        with pytest.raises(Thinned, match="kept only model"):
            ask()


def test_a_thinned_checkpoint_keeps_its_id_and_a_part_and_frees_the_rest(reg, backend):
    run = several(reg)
    second = run.checkpoints()[1]
    before = stored_bytes(backend)
    run.retention.thin(second, keep="model", reason="small disk")
    assert run.checkpoints()[1].digest == second.digest
    assert run.checkpoints()[1].parts == ("model",)
    reg.gc(grace_s=0)
    freed = before - stored_bytes(backend)
    assert freed > 2 * MODEL * 8 * 0.99
    again = reg.checkpoint(f"run/{second.digest.short}")
    check_model_alone(again)
    with pytest.raises(Thinned, match="small disk"):
        again.load()
    assert reg.verify(deep=True).ok
    for step in (1, 3, 4):
        assert same(run.checkpoints()[step - 1].load(), state(step))
    with pytest.raises(MissingObject, match="thinned, and collected since"):
        run.retention.undo(again)


def test_undo_brings_the_rest_back_until_it_is_collected(reg, backend):
    run = several(reg, 5, monitor=LOSS)
    plan = run.retention.prune(Retention(last=2, best=1, then=["model"]))
    assert [one.checkpoint.step for one in plan.thinned] == [2, 3]
    assert not plan.evicted
    assert thinned_steps(run) == [2, 3]
    # A sweep condemns what was given up, and spares nothing of it; a grace keeps it.
    reg.gc(grace_s=3600)
    back = run.retention.undo()
    assert [one.step for one in back] == [2, 3]
    assert [one.parts for one in run.checkpoints()] == [None] * 5
    reg.gc(grace_s=0)
    for checkpoint in reg.run("run").checkpoints():
        assert same(checkpoint.load(), state(checkpoint.step))
    # The policy of the run thins them no more, another one does.
    assert not run.retention.prune(Retention(last=2, then=["model"]), dry_run=True).kept[0].only
    assert reg.verify(deep=True).ok


def test_each_save_thins_by_the_policy_of_its_run(reg, backend):
    spec = RunSpec(monitors=[LOSS], retention=Retention(last=2, best=1, then=["model", "progress"]))
    run = several(reg, 6, preset=spec)
    assert thinned_steps(run) == [2, 3, 4]
    assert run.checkpoints()[1].parts == ("model", "progress")
    reg.gc(grace_s=0)
    whole = 3 * MODEL * 8
    assert stored_bytes(backend) < 3 * whole * 1.02 + 3 * MODEL * 8 * 1.02
    restored = reg.run("run").restore()
    assert same(restored.state, state(6))
    assert reg.verify(deep=True).ok


def test_a_save_that_another_machine_was_faster_with_thins_nothing(reg, backend):
    spec = RunSpec(monitors=[LOSS], retention=Retention(last=2, best=1, then=["model", "progress"]))
    run = several(reg, 4, preset=spec)
    hooked = Hooked(backend)
    with opened(hooked) as other:
        slower = other.run("run")
        save = partial(run.exchange.push, state(5), step=5, metrics={"loss": 5.0})
        hooked.before = Once("runs/run/log/", save, "put_if_absent")
        again = slower.exchange.push(state(5), step=5, metrics={"loss": 5.0})
    assert hooked.before.done
    assert again.digest == run.latest().digest
    assert thinned_steps(reg.run("run")) == [2, 3]


def test_a_save_that_cannot_thin_keeps_the_checkpoint_whole_and_says_so_once(reg, caplog):
    run = several(reg, 4, preset=RunSpec(retention=Retention(last=1, then=["modle"])))
    assert thinned_steps(run) == []
    assert len(run.checkpoints()) == 4
    assert sum("none of the components modle" in one.message for one in caplog.records) == 3


def test_what_something_else_holds_stays_whole(reg, backend):
    run = several(reg, 5)
    first, second, third, *_ = run.checkpoints()
    run.pins.gates.set("end", first)
    run.pins.tags.set("shown", second)
    for protected in (first, second):
        with pytest.raises(Conflict, match="it stays whole"):
            run.retention.thin(protected, keep="model")
    # The same state at another step: the union of both is held.
    run.save(state(3), step=30)
    run.retention.thin(third, keep="model")
    reg.gc(grace_s=0)
    assert same(third.load(), state(3))
    other = next(one for one in run.checkpoints() if one.step == 30)
    run.save(state(31), step=31)
    run.retention.thin(other, keep=["optimizer", "model"])
    run.retention.evict(third, "not needed")
    reg.gc(grace_s=0)
    assert same(other.load(only="optimizer"), {"optimizer": state(3)["optimizer"]})
    with pytest.raises(Thinned):
        other.load(only="progress")
    # It held more than it says until the other one went, and its place may still cover that.
    with pytest.raises(Thinned, match="given up when its checkpoint was thinned"):
        run.retention.thin(other, keep="progress")
    # A name is for a whole checkpoint, unless told.
    for pins in (run.pins.gates, run.pins.tags):
        with pytest.raises(Thinned, match="a name is for a whole one"):
            pins.set("part", other)
        pins.set("part", other, thinned=True)
    with pytest.raises(Conflict, match="gates/part"):
        run.retention.thin(other, keep="model")
    with pytest.raises(Thinned):
        run.releases.publish("1.0.0", other)
    assert reg.verify(deep=True).ok


@pytest.mark.sometimes("a thinned state has got another holder")
def test_what_somebody_saves_again_while_it_is_thinned_stays_whole(reg, backend):
    several(reg, 3)
    hooked = Hooked(backend)
    with opened(hooked) as other:
        first = other.run("run").checkpoints()[0]
        save = partial(reg.run("run").exchange.push, state(1), step=50)
        hooked.before = Once("runs/run/log/", save, "put_if_absent")
        other.run("run").retention.thin(first, keep="model")
    assert thinned_steps(reg.run("run")) == [1]
    assert reg.gc(grace_s=0).deleted.objects  # the placement of the first attempt
    newest = reg.run("run").latest()
    assert (newest.step, newest.digest) == (50, first.digest)
    assert same(newest.load(), state(1))
    assert reg.verify(deep=True).ok


def test_wrong_requests_write_nothing(reg, backend):
    run = several(reg, 3)
    first, _, last = run.checkpoints()
    slots = len(objects(backend))
    for keep, error in (("modle", InvalidInput), ((), InvalidInput)):
        with pytest.raises(error):
            run.retention.thin(first, keep=keep)
    with pytest.raises(Conflict, match="latest"):
        run.retention.thin(last, keep="model")
    run.retention.evict(first, "old")
    with pytest.raises(Conflict, match="evicted"):
        run.retention.thin(first, keep="model")
    assert len(objects(backend)) == slots
    with pytest.raises(InvalidInput, match="then"):
        Retention(last=1, then=[""])
    with pytest.raises(InvalidInput, match="contradictory"):
        Retention(all=True, then=["model"])


def test_no_save_relies_on_what_a_thinning_gave_up(reg, backend, open_registry):
    """W2a by parts: the base is listed still, and the run does not hold its optimizer."""
    run = several(reg, 2)
    trainer = reg.run("run")
    first = trainer.checkpoints()[0]
    trainer.restore(at=first)  # it is a base now, and whole
    run.retention.thin(run.checkpoints()[0], keep="model")
    open_registry(backend).gc(grace_s=0)
    again = state(3) | {"optimizer": state(1)["optimizer"]}
    trainer.save(again, step=3)
    # A tag makes it a base as it is now: the model is shared, the optimizer stored again.
    trainer.pins.tags.set("old", run.checkpoints()[0], thinned=True)
    before = stored_bytes(backend)
    trainer.save(state(5) | {"model": state(1)["model"]}, step=4)
    assert 2 * MODEL * 8 < stored_bytes(backend) - before < 2.1 * MODEL * 8
    reg.gc(grace_s=0)
    assert same(reg.run("run").checkpoints()[-2].load(), again)
    assert reg.verify(deep=True).ok


def test_restore_passes_over_a_thinned_checkpoint_and_says_so(reg, backend):
    run = several(reg, 3)
    _, second, third = run.checkpoints()
    run.retention.thin(second, keep="model")
    with pytest.raises(Thinned, match="kept only model"):
        reg.run("run").restore(at=second)
    backend.delete(packs_of(third)[0])
    restored = reg.run("run").restore()
    assert restored.checkpoint.step == 1
    assert "given up when its checkpoint was thinned" in restored.report[1].reason
    run.retention.undo()
    assert reg.run("run").restore().checkpoint.step == 2  # nothing of it was suspected


def test_a_mirror_gives_up_and_gets_back_what_its_source_does(reg, backend, open_registry):
    run = several(reg, 4)
    far = new_backend()
    mirror = open_registry(far)
    sync(reg, mirror)
    run.retention.thin(run.checkpoints()[0], keep="model")
    run.retention.thin(run.checkpoints()[1], keep=["model", "optimizer"])
    sync(reg, mirror)
    packs = stored_bytes(far)
    mirror.gc(grace_s=0)
    assert stored_bytes(far) < packs - 2 * MODEL * 8 * 0.99
    check_model_alone(mirror.run("run").checkpoints()[0])
    run.retention.undo(run.checkpoints()[0])
    sync(reg, mirror)
    mirror.gc(grace_s=0)
    assert same(mirror.run("run").checkpoints()[0].load(), state(1))
    fresh = open_registry(new_backend())
    sync(mirror, fresh)
    assert fresh.run("run").checkpoints()[1].parts == ("model", "optimizer")
    for registry in (reg, mirror, fresh):
        assert registry.verify(deep=True).ok


def test_a_fork_demands_a_whole_checkpoint_and_inherits_thinned_gates(reg):
    run = several(reg, 4)
    first, second, *_ = run.checkpoints()
    run.retention.thin(first, keep="model")
    run.retention.thin(second, keep="model")
    run.pins.gates.set("part", first, thinned=True)
    with pytest.raises(Thinned):
        reg.fork(second, "fork")
    run.save(state(5), step=5)
    fork = reg.fork(run.latest(), "fork")
    gate = fork.pins.gates.get("part")
    assert gate.parts == ("model",)
    reg.gc(grace_s=0)
    check_model_alone(gate)
    assert reg.verify(deep=True).ok


def test_a_fork_of_what_was_thinned_since_it_was_read_is_refused(reg, open_registry, backend):
    first = several(reg, 2).checkpoints()[0]
    open_registry(backend).run("run").retention.thin(first, keep="model")
    with pytest.raises(Thinned, match="only model"):
        reg.fork(first, "fork")


def test_a_fork_of_a_thinned_checkpoint_is_whole_where_another_holds_its_state(reg):
    run = several(reg, 2)
    run.exchange.push(state(1), step=9)
    run.retention.thin(run.checkpoints()[0], keep="model")
    fork = reg.fork(run.checkpoints()[0], "fork")
    assert fork.latest().parts is None
    run.retention.evict(run.checkpoints()[1], "its state is that of step 2")
    assert same(fork.restore().state, state(1))


def test_a_prune_beside_another_thinning_thins_what_is_left(reg, backend):
    several(reg, 3)
    hooked, keep = Hooked(backend), ["model", "optimizer"]
    with without_threads(open_on(hooked)) as late:
        other = reg.run("run")
        first = other.checkpoints()[0]
        hooked.after = Once(
            "placements/", lambda: other.retention.thin(first, keep=["model", "progress"])
        )
        late.run("run").retention.prune(Retention(last=1, then=keep))
        assert hooked.after.done
    found = reg.run("run").checkpoints()
    assert [one.parts for one in found] == [("model",), tuple(keep), None]


def test_an_undo_takes_nothing_from_who_saves_the_same_state_meanwhile(reg, backend):
    """What comes back is a part; the other writer's slot has a place that covers the whole."""
    first = several(reg, 3).checkpoints()[0]
    hooked = Hooked(backend)
    with without_threads(open_on(hooked)) as late:
        run = late.run("run")
        run.retention.thin(first, keep="model")
        run.retention.evict(run.checkpoints()[0], "by hand")
        other = reg.run("run")
        hooked.after = Once("placements/", lambda: other.exchange.push(state(1), step=9))
        (back,) = run.retention.undo(*run.retention.evicted())
        assert hooked.after.done
    assert back.parts == ("model",)
    reg.gc(grace_s=0)
    assert same(reg.checkpoint("run/main/step9").load(), state(1))
    assert reg.verify(deep=True).ok


def test_a_repack_keeps_a_thinned_state_and_frees_mixed_packs(reg, backend):
    run = several(reg, 4)
    reg.repack()  # small packs become one: it mixes components and saves
    reg.gc(grace_s=0)
    before = stored_bytes(backend)
    for one in run.checkpoints()[:3]:
        run.retention.thin(one, keep="model")
    reg.gc(grace_s=0)
    assert stored_bytes(backend) == before  # each pack is needed in part
    reg.repack()
    reg.gc(grace_s=0)
    assert stored_bytes(backend) < before - 3 * 2 * MODEL * 8 * 0.99
    for one in run.checkpoints()[:3]:
        check_model_alone(one)
    assert reg.verify(deep=True).ok


def test_repair_takes_a_thinned_state_from_a_mirror(reg, backend, open_registry):
    run = several(reg, 3)
    first = run.checkpoints()[0]
    mirror = open_registry(new_backend())
    run.retention.thin(first, keep="model")
    reg.gc(grace_s=0)
    sync(reg, mirror)
    (lost,) = packs_of(run.checkpoints()[0])
    backend.delete(lost)
    report = repair(reg, mirror)
    assert report.ok
    check_model_alone(reg.run("run").checkpoints()[0])


def _thin(run) -> None:
    run.retention.thin(run.checkpoints()[0], keep="model")


def _prune(run) -> None:
    run.retention.prune(Retention(last=1, then=["model"]))


def _save(run) -> None:
    run.restore()
    run.save(state(3), step=3)


def _undo(run) -> None:
    if thinned_steps(run):
        run.retention.undo()


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("act", [_thin, _prune, _save, _undo])
def test_a_death_at_any_call_leaves_what_was_held_or_what_will_be(act, every: int) -> None:
    template = new_backend()
    with opened(template) as reg:
        policy = Retention(last=1, then=["model"]) if act is _save else None
        run = several(reg, 2, **({} if policy is None else {"retention": policy}))
        if act is _undo:
            _thin(run)
    counting = Faulty(template.copy(), [], count_reads=True)
    act(without_threads(open_on(counting)).run("run"))
    left = set()
    for at, after in itertools.product(range(0, counting.calls, every), (False, True)):
        store = template.copy()
        dying = Faulty(store, [Fault(at, after=after)], count_reads=True)
        with suppress(InjectedCrash):
            act(without_threads(open_on(dying)).run("run"))
        if (found := frozenset(contents(store))) in left:
            continue  # most deaths are at a read
        left.add(found)
        for _ in range(2):
            with opened(store) as reg:
                assert reg.verify(deep=True).ok
                for one in reg.run("run").checkpoints():
                    whole = state(one.step)
                    held = list(one.parts or whole)
                    assert same(one.load(only=held), {name: whole[name] for name in held})
                act(reg.run("run"))
                reg.gc(grace_s=0)
        with opened(store) as reg:
            assert thinned_steps(reg.run("run")) == {_save: [1, 2], _undo: []}.get(act, [1])
    assert len(left) > 1
