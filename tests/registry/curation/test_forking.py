"""Forks: what they inherit, that they cost nothing, and that they stand by themselves."""

from __future__ import annotations

import uuid

import numpy as np
import pytest

from holdfast import Monitor, sync
from holdfast.backends.wrappers import Fault, Faulty, InjectedCrash, Wrapper
from holdfast.registry.curation.forking import inherit, inheritance
from holdfast.registry.errors import Conflict, InvalidInput, MissingObject, NotFound
from holdfast.registry.history.actions import AddCheckpoint, AppendStream, Promote, SetPin
from holdfast.registry.spec import Gate, Phase, Pool, Retention, RunSpec, Stream
from tests.support.collectors import collect, mark, sweep
from tests.support.states import entries, same, save_small, small_state
from tests.support.stores import contents, needed, new_backend, objects, packs_of

LOSS = Monitor(metric="loss", mode="min")
ARENA = RunSpec(
    name="arena",
    phases=(
        Phase(name="1", monitors=(LOSS,)),
        Phase(name="2", monitors=(LOSS,), companions=("reference",), retention=Retention(last=2)),
    ),
    gates=(Gate(name="bc_best", phase="1"),),
    inference=("model",),
    pool=Pool(phase="2", size=2, promote_on_save=True),
    streams=(Stream(name="losses", lifetime="forever"),),
)
REFERENCE = {"w": np.arange(3000, dtype=np.float32)}


def lived(reg, run_id: str = "parent"):
    """Return a run with everything that a fork may inherit, and some that it may not."""
    run = reg.create_run(run_id, preset=ARENA, seed=7, config={"lr": 0.1}, input_hash="data")
    run.save(small_state(1), step=1, phase=1, metrics={"loss": 1.0}, meta={"epoch": 1})
    run.pins.gates.set("bc_best")
    run.pins.artifacts.set("seeds", {"s": np.arange(500)})
    run.save(
        small_state(2),
        step=2,
        phase=2,
        companions={"reference": REFERENCE},
        metrics={"loss": 0.5, "mu": 30.0, "sigma": 3.0},
        streams={"losses": entries(0, 5)},
    )
    run.save(small_state(3), step=3, streams={"losses": entries(5, 8)})
    run.pins.tags.set("mine", run.latest())
    return run


@pytest.fixture
def parent(reg):
    return lived(reg)


# What it costs


class Counting(Wrapper):
    """Counts the bytes that are put."""

    put_bytes = 0

    def put(self, key, body):
        self.put_bytes += _size(body)
        super().put(key, body)

    def put_if_absent(self, key, body):
        self.put_bytes += _size(body)
        return super().put_if_absent(key, body)


def _size(body) -> int:
    parts = [body] if isinstance(body, bytes | bytearray | memoryview) else body
    return sum(memoryview(part).nbytes for part in parts)


@pytest.mark.parametrize("megabytes", [1, 24])
def test_a_fork_costs_no_data_whatever_its_size(backend, open_registry, megabytes):
    counting = Counting(backend)
    reg = open_registry(counting)
    big = {"w": np.random.default_rng(1).standard_normal(megabytes * 2**17)}
    reg.create_run("parent").save(big, step=1, companions={"ema": {"w": big["w"] * 2}})
    before, packs = counting.put_bytes, {k for k in objects(backend) if k.startswith("packs")}
    fork = open_registry(counting).fork("parent/latest", "fork")
    assert counting.put_bytes - before < 64 * 1024
    assert {k for k in objects(backend) if k.startswith("packs")} == packs
    assert same(fork.latest().load(), big)


# What it inherits


def test_restore_works_in_the_fork_and_training_goes_on(parent, reg, open_registry, backend):
    reg.fork("parent/phase2/step3", "fork")
    fork = open_registry(backend).run("fork")
    restored = fork.restore()
    assert same(restored.state, small_state(3))
    assert (restored.checkpoint.step, restored.checkpoint.phase) == (3, 2)
    saved = fork.save(small_state(4), step=4)
    assert same(saved.companion("reference").load(), REFERENCE)
    assert [ck.step for ck in fork.checkpoints()] == [1, 3, 4]
    assert [ck.step for ck in parent.refresh().checkpoints()] == [1, 2, 3]
    assert open_registry(backend).verify(deep=True).ok


def test_it_says_where_it_is_from_and_inherits_what_it_was_begun_with(parent, reg):
    source = parent.latest()
    created = reg.fork(source, "fork").manifest.created
    theirs = parent.manifest.created
    assert (created.spec, created.seed, created.config) == (ARENA, theirs.seed, theirs.config)
    assert created.input_hash == "data"
    origin = created.parent
    assert (origin.run, origin.commit, origin.checkpoint) == (
        "parent",
        source.handle.n,
        source.digest,
    )
    assert (origin.phase, origin.step) == ("2", 3)


def test_what_is_given_goes_before_what_is_inherited(parent, reg):
    fork = reg.fork("parent/latest", "fork", seed=9, config={"lr": 5}, preset=RunSpec(name="x"))
    assert (fork.config, fork.manifest.spec.name) == ({"lr": 5}, "x")
    assert fork.manifest.created.seed == f"{9:016x}"


def test_gates_artifacts_streams_and_pool_come_with_it(parent, reg, open_registry, backend):
    reg.fork("parent/phase2/step2", "fork")
    fork = open_registry(backend).run("fork")
    gate = fork.pins.gates.get("bc_best")
    assert (gate.digest, gate.step, gate.phase, gate.meta) == (
        parent.pins.gates.get("bc_best").digest,
        1,
        1,
        {"epoch": 1},
    )
    assert same(gate.load(), small_state(1))
    assert same(fork.pins.artifacts.get("seeds").load(), {"s": np.arange(500)})
    state = fork.manifest
    assert state.stream("losses").count == 5  # what came after the checkpoint is the parent's
    assert [entry.version for entry in state.roster()] == [1]
    mine, theirs = state.pool[0], parent.manifest.pool[0]
    assert (mine.manifest, mine.mu, mine.sigma) == (theirs.manifest, theirs.mu, theirs.sigma)
    assert state.tags == {}
    assert fork.latest().metrics == {"loss": 0.5, "mu": 30.0, "sigma": 3.0}


def test_versions_of_the_pool_go_on_where_the_parents_stood(parent, reg):
    fork = reg.fork("parent/latest", "fork")
    assert [entry.version for entry in fork.manifest.roster()] == [1, 2]
    fork.save(small_state(4), step=4)
    assert [entry.version for entry in fork.manifest.roster()] == [2, 3]


def test_it_is_one_slot_after_commit_0(parent, reg):
    fork = reg.fork("parent/latest", "fork")
    assert fork.manifest.next_slot == 2
    kinds = [[type(action) for action in commit.actions] for commit in fork.history.commits()][1:]
    assert kinds[0] == [AddCheckpoint, SetPin]
    assert {AppendStream, AddCheckpoint, SetPin, Promote} == set(kinds[1])


def test_a_fork_of_a_gate_is_that_gate(parent, reg):
    fork = reg.fork("parent/gates/bc_best", "fork")
    assert fork.pins.gates.get("bc_best").handle.n == fork.latest().handle.n
    assert fork.latest().step == 1


def gone_back(reg):
    """Return a run that set gates and went back behind two of them, with a gate that it kept."""
    run = reg.create_run("run", monitor=LOSS)
    for step, loss in ((1, 0.9), (30, 0.1), (40, 0.2)):
        run.save(small_state(step), step=step, metrics={"loss": loss})
        run.pins.gates.set(f"at{step}", run.latest())
    run.restore(at=run.pins.gates.get("at1"))
    for step in (10, 20):
        run.save(small_state(step), step=step, metrics={"loss": 5.0 / step})
    return run


def test_gates_that_training_went_back_behind_are_not_alive_in_the_fork(reg, open_registry):
    run = gone_back(reg)
    fork = reg.fork(run.latest(), "fork")
    assert run.best().step == fork.best().step == 20
    assert [ck.step for ck in fork.checkpoints()] == [1, 20]
    for name, step in (("at1", 1), ("at30", 30), ("at40", 40)):
        gate = fork.pins.gates.get(name)
        assert (gate.step, gate.superseded, same(gate.load(), small_state(step))) == (
            step,
            step > 20,
            True,
        )
    fork.save(small_state(31), step=30, metrics={"loss": 0.1})
    assert fork.best().step == 30
    assert reg.verify(deep=True).ok
    elsewhere = open_registry(new_backend(uuid.uuid4().hex))
    sync(reg, elsewhere)
    assert elsewhere.run("fork").manifest.checkpoints == fork.refresh().manifest.checkpoints


def test_on_the_line_that_was_left_its_own_gates_are_alive(reg):
    run = gone_back(reg)
    left = run.pins.gates.get("at40")
    assert left.superseded
    fork = reg.fork(left, "fork")
    assert [ck.step for ck in fork.checkpoints()] == [1, 30, 40]
    assert fork.best().step == 30


def test_gates_that_are_one_checkpoint_are_one_in_the_fork(reg):
    run = reg.create_run("run")
    first = run.save(small_state(1), step=1)
    second = run.save(small_state(2), step=2)
    for name, gated in (("a", second), ("b", first), ("c", first), ("d", second)):
        run.pins.gates.set(name, gated)
    run.save(small_state(3), step=3)
    fork = reg.fork("run/latest", "fork")
    assert [ck.step for ck in fork.checkpoints()] == [1, 2, 3]
    assert {pin.name: fork.pins.gates.get(pin.name).step for pin in fork.manifest.pins} == {
        "a": 2,
        "b": 1,
        "c": 1,
        "d": 2,
    }


# It does not depend on its parent


def test_the_parents_evictions_and_end_do_it_no_harm(parent, reg, open_registry, backend):
    reg.fork("parent/phase2/step3", "fork")
    save_small(parent, *range(4, 8))
    parent.retention.drop("done with")
    # A sweep that condemns whatever no run holds.
    fresh = open_registry(backend)
    live = needed(fresh)
    unneeded = sorted(objects(backend) - live)
    assert unneeded
    sweep(backend, 1, unneeded)
    for name in fresh.run_names():
        mark(fresh.handle.store, name, 1)
    collect(backend, unneeded)
    after = open_registry(backend)
    fork = after.run("fork")
    assert same(fork.restore().state, small_state(3))
    assert same(fork.pins.gates.get("bc_best").load(), small_state(1))
    assert same(fork.pins.artifacts.get("seeds").load(), {"s": np.arange(500)})
    assert same(fork.latest().companion("reference").load(), REFERENCE)
    assert after.verify(deep=True).ok


def test_a_fork_while_a_sweep_condemned_what_it_takes_puts_it_anew(
    parent, reg, open_registry, backend
):
    source = parent.latest()
    condemned = packs_of(source)
    sweep(backend, 1, condemned)
    fork = open_registry(backend).fork("parent/phase2/step3", "fork")
    assert not set(packs_of(fork.latest())) & set(condemned)
    assert same(fork.latest().load(), small_state(3))


# Forks of what is over


def test_a_fork_of_a_superseded_checkpoint(parent, reg):
    abandoned = parent.latest()
    parent.restore(at=parent.history.checkpoint(reg.checkpoint("parent/phase2/step2").handle.n))
    parent.save(small_state(9), step=3)
    assert abandoned.superseded
    fork = reg.fork(abandoned, "fork")
    assert same(fork.restore().state, small_state(3))
    assert fork.manifest.streams == ()  # its entries are not on any line any more


def test_a_fork_of_an_evicted_checkpoint_is_refused_until_it_is_back(parent, reg):
    save_small(parent, 4, 5, 6, 7)
    gone = parent.retention.evicted()[0]
    before = reg.run_names()
    with pytest.raises(Conflict, match=r"a fork cannot continue from an evicted checkpoint.*undo"):
        reg.fork(gone, "fork")
    assert reg.run_names() == before
    parent.retention.undo(gone)
    assert same(reg.fork(gone, "fork").latest().load(), small_state(gone.step))


def test_a_fork_of_what_is_gone_says_so_and_can_be_begun_again(parent, reg, backend, open_registry):
    source = parent.latest()
    (pack,) = [key for key in packs_of(source) if key not in _packs_of_others(parent, source)][:1]
    data = backend.get(pack)
    backend.delete(pack)
    with pytest.raises(MissingObject):
        open_registry(backend).fork("parent/phase2/step3", "fork")
    backend.put(pack, data)
    fork = open_registry(backend).fork("parent/phase2/step3", "fork")
    assert same(fork.restore().state, small_state(3))


def _packs_of_others(run, source) -> set[str]:
    others = [ck for ck in run.checkpoints() if ck.digest != source.digest]
    return {key for ck in others for key in packs_of(ck)}


def _break_off(backend, open_registry):
    """Leave a fork behind that has only its commit 0."""
    calls = Faulty(backend, [])
    open_registry(calls).fork("parent/phase2/step3", "whole")
    before = {key for key in contents(backend) if key.startswith("runs/")}
    for at in range(1, calls.calls + 1):
        faulty = Faulty(backend, [Fault(at, after=True)])
        with pytest.raises(InjectedCrash):
            open_registry(faulty).fork("parent/phase2/step3", "fork")
        if {key for key in contents(backend) if key.startswith("runs/")} - before:
            break


def test_a_fork_that_broke_off_is_finished_by_the_next_and_by_no_other_source(
    parent, backend, open_registry
):
    """Between its two slots it is a run without a checkpoint: nobody may train that by mistake."""
    _break_off(backend, open_registry)
    half = open_registry(backend).run("fork")
    assert half.restore() is None
    with pytest.raises(
        Conflict, match="the fork was interrupted before it got its parent's checkpoint"
    ):
        half.save(small_state(4), step=4)
    with pytest.raises(Conflict, match="a run of this name exists"):
        open_registry(backend).fork("parent/gates/bc_best", "fork")
    fork = open_registry(backend).fork("parent/phase2/step3", "fork")
    assert same(fork.restore().state, small_state(3))
    with pytest.raises(Conflict, match="a run of this name exists"):
        open_registry(backend).fork("parent/phase2/step3", "fork")


def test_whatever_is_said_of_a_fork_that_broke_off_it_is_finished(parent, backend, open_registry):
    _break_off(backend, open_registry)
    with open_registry(backend).run("fork"):
        pass
    half = open_registry(backend).run("fork")
    assert half.status == "completed"
    half.pins.artifacts.set("seeds", {"s": "its own"})
    half.pins.artifacts.set("more", {"s": 1})
    half.streams["losses"].append(entries(0, 9))
    with pytest.raises(Conflict, match="a run of this name exists"):
        open_registry(backend).fork("parent/gates/bc_best", "fork")
    fork = open_registry(backend).fork("parent/phase2/step3", "fork")
    assert fork.status == "running"
    assert same(fork.restore().state, small_state(3))
    assert same(fork.pins.gates.get("bc_best").load(), small_state(1))
    assert same(fork.pins.artifacts.get("seeds").load(), {"s": "its own"})
    assert same(fork.pins.artifacts.get("more").load(), {"s": 1})
    assert list(fork.streams["losses"].read()) == entries(0, 8)
    fork.save(small_state(4), step=4)
    assert [ck.step for ck in fork.checkpoints()] == [1, 3, 4]
    with pytest.raises(Conflict, match="a run of this name exists"):
        open_registry(backend).fork("parent/phase2/step3", "fork")
    assert open_registry(backend).verify(deep=True).ok


def test_a_fork_that_broke_off_and_was_dropped_stays_dropped(parent, backend, open_registry):
    _break_off(backend, open_registry)
    open_registry(backend).run("fork").retention.drop("no use")
    with pytest.raises(Conflict, match=r"the run was dropped.*no use"):
        open_registry(backend).fork("parent/phase2/step3", "fork")


def test_a_fork_of_nothing(parent, reg):
    with pytest.raises(NotFound):
        reg.fork("parent/phase2/step77", "fork")
    with pytest.raises(Conflict, match="a run of this name exists"):
        reg.fork("parent/latest", "parent")


def test_a_checkpoint_that_this_registry_does_not_have(parent, reg, open_registry):
    elsewhere = new_backend(uuid.uuid4().hex)
    mirror = open_registry(elsewhere)
    with pytest.raises(NotFound, match=r"not in the registry.*no such run.*holdfast sync"):
        mirror.fork(parent.latest(), "fork")
    sync(reg, mirror)
    known, new = parent.latest(), parent.save(small_state(4), step=4)
    with pytest.raises(NotFound, match=rf"{new.digest.short}; found a run of \d commits\. .*sync"):
        mirror.fork(new, "fork")
    other = new_backend(uuid.uuid4().hex)
    namesake = lived(open_registry(other)).save(small_state(5), step=5)
    assert namesake.handle.n == new.handle.n
    with pytest.raises(NotFound, match=f"{new.digest.short} in its place"):
        reg.fork(namesake, "fork")
    assert (mirror.run_names(), reg.run_names()) == (["parent"], ["parent"])
    assert same(mirror.fork(known, "fork").latest().load(), small_state(3))


def test_what_is_no_checkpoint_is_not_forked(parent, reg):
    for source in (parent.pins.artifacts.get("seeds"), parent, None):
        with pytest.raises(InvalidInput, match="a fork continues from a checkpoint"):
            reg.fork(source, "fork")
    assert reg.run_names() == ["parent"]


# Forks of forks, and their way to another registry


def test_two_forks_and_a_fork_of_a_fork_are_synced(parent, reg, open_registry):
    left, right = reg.fork("parent/latest", "left"), reg.fork("parent/latest", "right")
    left.save(small_state(10), step=10)
    right.save(small_state(20), step=10)
    reg.fork("left/latest", "leftmost").save(small_state(11), step=11)
    elsewhere = new_backend(uuid.uuid4().hex)
    mirror = open_registry(elsewhere)
    sync(reg, mirror)
    fresh = open_registry(elsewhere)
    assert fresh.verify(deep=True).ok
    for name, step, i in (("left", 10, 10), ("right", 10, 20), ("leftmost", 11, 11)):
        restored = fresh.run(name).restore()
        assert (restored.checkpoint.step, same(restored.state, small_state(i))) == (step, True)
        assert same(fresh.run(name).pins.gates.get("bc_best").load(), small_state(1))
    assert fresh.run("leftmost").manifest.created.parent.run == "left"


def test_a_fork_alone_is_synced_whole(parent, reg, open_registry):
    reg.fork("parent/latest", "fork")
    elsewhere = new_backend(uuid.uuid4().hex)
    sync(reg, open_registry(elsewhere), ["fork"])
    fresh = open_registry(elsewhere)
    assert fresh.run_names() == ["fork"]
    assert fresh.verify(deep=True).ok
    assert same(fresh.run("fork").restore().state, small_state(3))


def test_forks_of_equal_checkpoints_share_every_byte(parent, reg, backend):
    reg.fork("parent/latest", "left")
    before = objects(backend)
    reg.fork("parent/latest", "right")
    assert objects(backend) == before


def test_what_was_inherited_once_is_not_inherited_again(parent, reg):
    inherited = inheritance(reg.handle.store, parent.latest())
    fork = reg.fork("parent/latest", "fork")
    commits = fork.manifest.commits
    inherit(fork.handle.committer, inherited)
    assert fork.refresh().manifest.commits == commits
