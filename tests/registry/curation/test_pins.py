"""Gates, artifacts and tags: names that keep stored states."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast import Monitor
from holdfast.registry.errors import (
    Conflict,
    IntegrityError,
    InvalidInput,
    NotFound,
    UnsupportedValue,
)
from holdfast.registry.spec import Gate, Phase, Retention, RunSpec
from tests.support.faults import Hooked, Once, flip
from tests.support.states import same, small_state
from tests.support.stores import contents, packs_of

LOSS = Monitor(metric="loss", mode="min")
GATED = RunSpec(
    phases=(Phase(name="1", monitors=(LOSS,), retention=Retention(last=1)), Phase(name="2")),
    gates=(Gate(name="bc_best", phase="1"),),
)


@pytest.fixture
def gated(reg):
    run = reg.create_run("gated", preset=GATED)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        run.save(small_state(step), step=step, phase=1, metrics={"loss": loss})
    return run


# Gates


def test_a_gate_without_a_checkpoint_is_the_best_of_its_phase(gated, reg):
    gate = gated.pins.gates.set("bc_best")
    assert gate.step == 2
    assert gated.pins.gates.get("bc_best").digest == gate.digest
    assert reg.checkpoint("gated/gates/bc_best").digest == gate.digest
    assert gated.manifest.pin("gate", "bc_best").metrics == {"loss": 1.0}


def test_a_gate_is_never_evicted(gated):
    gate = gated.pins.gates.set("bc_best", gated.latest())
    for step in (4, 5, 6):
        gated.save(small_state(step), step=step, metrics={"loss": 0.1 / step})
    assert gate.digest in {ck.digest for ck in gated.checkpoints()}
    assert same(gated.pins.gates.get("bc_best").load(), small_state(3))


def test_a_gate_is_set_once_and_again_to_the_same_is_nothing(gated, backend):
    gated.pins.gates.set("bc_best")
    before = contents(backend)
    gated.pins.gates.set("bc_best")
    assert contents(backend) == before
    with pytest.raises(Conflict, match=r"gated/gates/bc_best: a gate is set once.*is sound"):
        gated.pins.gates.set("bc_best", gated.latest())
    assert contents(backend) == before


def test_a_damaged_gate_is_an_error_and_may_be_replaced(gated, backend, open_registry):
    gate = gated.pins.gates.set("bc_best")
    for key in packs_of(gate):
        flip(backend, key)
    run = open_registry(backend).run("gated")
    with pytest.raises(IntegrityError):
        run.pins.gates.get("bc_best").load()
    other = run.latest()
    run.pins.gates.set("bc_best", other)
    pin = run.manifest.pin("gate", "bc_best")
    assert (pin.manifest, pin.replaced) == (other.digest, (gate.digest,))
    assert same(run.pins.gates.get("bc_best").load(), small_state(3))


def test_two_that_set_a_gate_at_once_do_not_both_win(gated, backend, open_registry):
    hooked = Hooked(backend)
    mine = open_registry(hooked).run("gated")

    def rival():
        other = open_registry(backend).run("gated")
        other.pins.gates.set("bc_best", other.latest())

    hooked.before = Once("runs/gated/log/", rival, "put_if_absent")
    with pytest.raises(Conflict, match="a gate is set once"):
        mine.pins.gates.set("bc_best")
    assert hooked.before.done


def test_a_gate_is_one_of_those_declared_and_of_its_phase(gated, backend):
    gated.save(small_state(9), step=9, phase=2)
    before = contents(backend)
    with pytest.raises(InvalidInput, match=r"no such gate; expected bc_best.*'bc_best'"):
        gated.pins.gates.set("bc_bset")
    with pytest.raises(InvalidInput, match=r"belongs to phase 1; found a checkpoint of phase 2"):
        gated.pins.gates.set("bc_best", gated.latest(2))
    with pytest.raises(InvalidInput, match="not a legal name for a gate"):
        gated.pins.gates.set("a/b")
    assert contents(backend) == before


def test_where_none_is_declared_any_name_will_do(run):
    with pytest.raises(NotFound, match="no checkpoint was given for the gate"):
        run.pins.gates.set("done")
    saved = run.save(small_state(), step=1)
    with pytest.raises(NotFound, match="expected a monitor"):
        run.pins.gates.set("done")
    assert run.pins.gates.set("done", saved).digest == saved.digest


def test_a_checkpoint_of_another_run_is_no_gate(reg, run, gated):
    run.save(small_state(), step=1)
    with pytest.raises(InvalidInput, match=r"a gate \(bc_best\) takes checkpoints of its own run"):
        gated.pins.gates.set("bc_best", reg.checkpoint("run/main/step1"))
    with pytest.raises(InvalidInput, match=r"such as reg\.checkpoint\(REF\)"):
        gated.pins.tags.set("mine", "run/main/step1")


def test_what_was_evicted_is_no_gate_and_no_tag(gated):
    (first,) = gated.retention.evicted()
    for name in (
        lambda: gated.pins.gates.set("bc_best", first),
        lambda: gated.pins.tags.set("t", first),
    ):
        with pytest.raises(Conflict, match="this checkpoint was evicted; found not among"):
            name()


def test_a_gate_that_there_is_not(gated):
    with pytest.raises(NotFound, match="no such gate"):
        gated.pins.gates.get("bc_best")
    gated.pins.gates.set("bc_best")
    with pytest.raises(NotFound, match=r"no such gate.*'bc_best'"):
        gated.pins.gates.get("bc_bset")


# Artifacts


SEEDS = {"seeds": np.arange(4000, dtype=np.int64), "about": ("bank", 7)}


def test_an_artifact_is_kept_and_found(run, reg, open_registry, backend):
    added = run.pins.artifacts.set("seed_bank", SEEDS)
    fresh = open_registry(backend)
    assert same(fresh.stored("run/artifacts/seed_bank").load(), SEEDS)
    assert fresh.run("run").pins.artifacts.get("seed_bank").digest == added.digest
    assert fresh.verify(deep=True).ok
    with pytest.raises(InvalidInput, match="this is a stored state and no checkpoint"):
        reg.checkpoint("run/artifacts/seed_bank")


def test_the_same_again_changes_nothing_and_another_is_a_conflict(run, backend):
    run.pins.artifacts.set("seed_bank", SEEDS)
    slots = [key for key in contents(backend) if "/log/" in key]
    run.pins.artifacts.set("seed_bank", SEEDS)
    assert [key for key in contents(backend) if "/log/" in key] == slots
    with pytest.raises(Conflict, match=r"run/artifacts/seed_bank: an artifact of this name exists"):
        run.pins.artifacts.set("seed_bank", {"other": 1})


def test_an_artifact_needs_no_token_and_fences_nobody(run, reg):
    run.save(small_state(1), step=1)
    reg.run("run").pins.artifacts.set("seed_bank", SEEDS)
    assert run.save(small_state(2), step=2).step == 2


def test_wrong_artifacts_are_refused_before_anything_is_written(run, backend):
    before = contents(backend)
    with pytest.raises(InvalidInput, match="not a legal name for an artifact"):
        run.pins.artifacts.set("a/b", SEEDS)
    with pytest.raises(UnsupportedValue):
        run.pins.artifacts.set("f", {"f": print})
    assert contents(backend) == before
    with pytest.raises(NotFound, match="no such artifact"):
        run.pins.artifacts.get("seed_bank")


# Tags


def test_a_tag_moves_and_what_it_left_may_go(reg):
    run = reg.create_run("tagged", preset=RunSpec(retention=Retention(last=1)))
    first = run.save(small_state(1), step=1)
    run.pins.tags.set("keeper", first)
    second = run.save(small_state(2), step=2)
    assert [ck.step for ck in run.checkpoints()] == [1, 2]
    run.pins.tags.set("keeper", second)
    run.save(small_state(3), step=3)
    assert [ck.step for ck in run.checkpoints()] == [2, 3]
    assert reg.checkpoint("tagged/tags/keeper").step == 2


def test_each_kind_lists_its_names_and_tells_when_each_was_set(reg):
    run = reg.create_run("run")
    first, second = (run.save(small_state(n), step=n) for n in (1, 2))
    run.pins.tags.set("shown", first)
    run.pins.tags.set("shown", second)
    run.pins.gates.set("done", first)
    added = run.pins.artifacts.set("seeds", {"s": 1})
    pins = reg.run("run").pins
    assert pins.tags.list() == {"shown": second}
    assert pins.tags.get("shown") == second
    assert pins.gates.list() == {"done": first}
    assert {name: one.digest for name, one in pins.artifacts.list().items()} == {
        "seeds": added.digest
    }
    assert [(one.n, one.name, one.digest, one.checkpoint) for one in pins.tags.history()] == [
        (3, "shown", first.digest, 1),
        (4, "shown", second.digest, 2),
    ]
    assert [(one.name, one.checkpoint) for one in pins.gates.history()] == [("done", 1)]
    assert [(one.name, one.checkpoint) for one in pins.artifacts.history()] == [("seeds", None)]
    with pytest.raises(NotFound, match=r"no such tag.*'shown'"):
        pins.tags.get("shwon")
