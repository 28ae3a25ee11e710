"""What one save says: tier, companions, evictions, late metrics, phases; all of it in one slot."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from holdfast import Monitor
from holdfast.registry.errors import (
    Conflict,
    IncompatibleState,
    InvalidInput,
    NotFound,
    RestoreFailed,
)
from holdfast.registry.history.actions import AddCheckpoint, Evict, TakeOver
from holdfast.registry.history.authorship import commit_line
from holdfast.registry.history.log import RunLog
from holdfast.registry.spec import DtypeRule, Phase, Retention, Row, RunSpec, Tier, Transition
from tests.support.faults import Hooked, Once, flip
from tests.support.states import same, save_small, small_state
from tests.support.stores import contents, objects, packs_of, slots

LOSS = Monitor(metric="loss", mode="min")


def make(reg, spec: RunSpec, run_id: str = "run"):
    return reg.create_run(run_id, seed=1, preset=spec)


# Evictions


def test_evictions_ride_in_the_saves_own_commit(reg, backend):
    run = make(reg, RunSpec(retention=Retention(last=2)))
    save_small(run, 1, 2)
    before = slots(backend)
    run.save(small_state(3), step=3)
    assert len(slots(backend)) == len(before) + 1
    last = list(run.history.commits())[-1]
    assert [type(action) for action in last.actions] == [AddCheckpoint, Evict]
    assert [(one.checkpoint, one.reason) for one in last.actions[1].evictions] == [
        (1, "not among last 2 of phase main; no pin")
    ]
    assert [ck.step for ck in run.checkpoints()] == [2, 3]
    assert [ck.step for ck in run.retention.evicted()] == [1]


def test_a_push_that_trains_is_refused_once_another_one_has_gone_on(backend, open_registry):
    hooked = Hooked(backend)
    run = make(open_registry(hooked), RunSpec())
    run.exchange.push(small_state(1), step=10, after="none")
    other = open_registry(backend).run("run")
    hooked.before = Once(
        "runs/run/log/",
        lambda: other.exchange.push(small_state(2), step=15, after=10),
        "put_if_absent",
    )
    with pytest.raises(Conflict, match="another process has continued") as caught:
        run.exchange.push(small_state(3), step=20, after=10)
    assert (caught.value.expected, caught.value.found) == ("step 10 as the newest", "step 15")
    assert [ck.step for ck in run.refresh().checkpoints()] == [10, 15]
    with pytest.raises(Conflict, match="no checkpoint yet"):
        run.exchange.push(small_state(3), step=20, after="none")
    # A state that is there is no conflict, and the run of a program that trains is running.
    other.status = "interrupted"
    run.exchange.push(small_state(2), step=15, after=10)
    assert run.status == "running"
    other.status = "interrupted"
    run.exchange.push(small_state(3), step=16)
    assert run.status == "interrupted"
    with pytest.raises(InvalidInput):
        run.exchange.push(small_state(4), step=20, after=-1)


def test_evictions_are_planned_anew_after_a_lost_race(backend, open_registry):
    hooked = Hooked(backend)
    run = make(open_registry(hooked), RunSpec(retention=Retention(last=1)))
    first = run.save(small_state(1), step=1)

    def tagger():
        other = open_registry(backend).run("run")
        other.pins.tags.set("keeper", other.latest())

    hooked.before = Once("runs/run/log/", tagger, "put_if_absent")
    run.save(small_state(2), step=2)
    assert hooked.before.done
    assert run.checkpoints()[0].digest == first.digest
    assert run.retention.evicted() == []


def test_what_was_evicted_is_found_no_more_and_says_why(reg):
    run = make(reg, RunSpec(retention=Retention(last=1)))
    first = run.save(small_state(1), step=1)
    run.save(small_state(2), step=2)
    with pytest.raises(NotFound, match="this checkpoint was evicted; found not among last 1"):
        reg.checkpoint(f"run/{first.digest.hex()}")
    with pytest.raises(NotFound, match=r"evicted .*holdfast undo run main/step1"):
        reg.checkpoint("run/main/step1")
    with pytest.raises(Conflict, match="checkpoint was evicted"):
        run.restore(at=first)


def test_the_step_of_an_evicted_checkpoint_is_free(reg):
    run = make(reg, RunSpec(retention=Retention(last=1)))
    run.save(small_state(1), step=1)
    run.save(small_state(2), step=2)
    again = run.save(small_state(7), step=1)
    assert same(again.load(), small_state(7))


def test_dead_states_are_no_base_of_what_is_saved(reg, backend):
    """What was evicted may be collected at any time: its chunks are chosen as anybody else's."""
    run = make(reg, RunSpec(retention=Retention(last=1)))
    run.save(small_state(1), step=1)
    run.save(small_state(2), step=2)
    evicted = run.retention.evicted()[0]
    for key in packs_of(evicted):
        backend.delete(key)
    run.save(small_state(1), step=3)
    assert same(reg.run("run").latest().load(), small_state(1))
    assert reg.verify(deep=True).ok


# Required keys and dtypes


DEMANDING = RunSpec(
    required_keys=("model", "optimizer | optim"),
    dtypes=(DtypeRule(path="model/*", dtype="float32"),),
)


def fitting(i: int = 0) -> dict:
    return {"model": {"w": np.full(100, i, np.float32)}, "optim": {"m": np.ones(50)}}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda state: state.pop("optim"), r"phase main, step 1.*missing: optimizer \| optim"),
        (lambda state: state.pop("model"), "missing: model"),
        (
            lambda state: state["model"].update(w=np.zeros(3)),
            "phase main, step 1.*model/w is float64, must be float32",
        ),
        (
            lambda state: state["model"].update(w=torch.zeros(30, dtype=torch.bfloat16)),
            "model/w is bfloat16, must be float32",
        ),
    ],
)
def test_a_state_that_lacks_or_breaks_is_refused_before_anything_is_written(
    reg, backend, change, told
):
    run = make(reg, DEMANDING)
    state = fitting()
    change(state)
    before = contents(backend)
    with pytest.raises(IncompatibleState, match=told):
        run.save(state, step=1)
    with pytest.raises(IncompatibleState, match=told):
        run.save_async(state, step=1)
    assert contents(backend) == before


def test_what_fits_is_saved_and_comes_back(reg):
    assert same(make(reg, DEMANDING).save(fitting(), step=1).load(), fitting())


def test_a_state_that_does_not_fit_is_refused_at_load_too(reg, backend):
    """Whoever wrote it: here a log whose rules are stricter than its writer was."""
    loose = make(reg, RunSpec(), "loose")
    saved = loose.save(small_state(), step=1)
    strict = make(reg, DEMANDING, "strict")
    log = RunLog(reg.handle.store, "strict")
    log.open()
    record = saved.handle.newest_record()
    add = AddCheckpoint(
        manifest=record.manifest, phase="main", step=1, size_bytes=record.size_bytes
    )
    log.append(lambda run: [saved.handle.reader.place, commit_line(run, [add])])
    stranger = strict.latest()
    with pytest.raises(IncompatibleState, match=r"strict/main/step0+1.*model/b is float64"):
        stranger.load()
    assert same(stranger.load(only="optimizer")["optimizer"], small_state()["optimizer"])


# Weights that are not finite


WATCHED = RunSpec(monitors=(LOSS,), finite=("model/*",))


def poisoned(i: int = 0) -> dict:
    state = small_state(i)
    state["model"]["b"][3] = np.nan
    return state


def test_a_checkpoint_that_is_not_finite_is_recorded_and_held_back(reg):
    run = make(reg, WATCHED)
    sound = run.save(small_state(1), step=1, metrics={"loss": 2.0})
    bad = run.save(poisoned(2), step=2, metrics={"loss": 1.0})
    assert bad.nonfinite == ("model/b",)
    assert (run.latest().digest, run.best().digest) == (sound.digest, sound.digest)
    assert [ck.step for ck in run.checkpoints()] == [1, 2]
    assert same(bad.load()["optimizer"], small_state(2)["optimizer"])
    np.testing.assert_array_equal(bad.load()["model"]["b"], poisoned(2)["model"]["b"])


def test_restore_passes_over_it_and_says_so(reg):
    run = make(reg, WATCHED)
    run.save(small_state(1), step=1)
    bad = run.save(poisoned(2), step=2)
    restored = reg.run("run").restore()
    assert restored.checkpoint.step == 1
    (attempt,) = restored.report
    assert (attempt.digest, attempt.ref) == (bad.digest, bad.ref)
    assert attempt.reason == "weights that are not finite: model/b"


def test_where_nothing_else_is_there_restore_fails_and_lists_it(reg):
    make(reg, WATCHED).save(poisoned(), step=1)
    with pytest.raises(
        RestoreFailed, match=r"(?s)none of 1 checkpoints.*weights that are not finite"
    ):
        reg.run("run").restore()


def test_training_goes_on_from_before_it_and_supersedes_it(reg):
    run = make(reg, WATCHED)
    run.save(small_state(1), step=1)
    run.save(poisoned(2), step=2)
    run = reg.run("run")
    run.restore()
    run.save(small_state(2), step=2)
    assert [(r.step, r.superseded) for r in run.manifest.checkpoints] == [
        (1, False),
        (2, True),
        (2, False),
    ]


def test_whoever_allows_it_has_it_as_latest(reg):
    run = make(reg, WATCHED)
    run.save(small_state(1), step=1)
    bad = run.save(poisoned(2), step=2, allow_nonfinite=True, metrics={"loss": 1.0})
    assert bad.nonfinite == ("model/b",)
    assert (run.latest().digest, run.best().digest) == (bad.digest, bad.digest)
    assert reg.run("run").restore().checkpoint.digest == bad.digest


def test_what_is_not_watched_may_hold_anything(reg):
    run = make(reg, WATCHED)
    state = small_state()
    state["optimizer"]["loss"] = np.array([np.inf] * 20)
    assert run.save(state, step=1).nonfinite == ()
    assert run.save_async(poisoned(2), step=2).wait().nonfinite == ("model/b",)


# Tiers


TIERED = RunSpec(
    phases=(
        Phase(
            name="main",
            monitors=(LOSS,),
            tiers=(
                Tier(name="milestone", every=100, retention=Retention(all=True)),
                Tier(name="record", improves=("loss",), retention=Retention(last=1)),
                Tier(name="epoch", every=2, counter="epoch", retention=Retention(last=1)),
                Tier(name="rolling", retention=Retention(last=2)),
            ),
        ),
    )
)


def test_a_checkpoint_has_the_tier_of_its_rules_or_the_one_given(reg):
    run = make(reg, TIERED)
    meta = {"epoch": 1}
    assert run.save(small_state(1), step=100, meta=meta).tier == "milestone"
    assert run.save(small_state(2), step=101, meta=meta, metrics={"loss": 1.0}).tier == "record"
    assert run.save(small_state(3), step=102, meta={"epoch": 2}).tier == "epoch"
    assert run.save(small_state(4) | {"epoch": 4}, step=103).tier == "epoch"
    assert run.save(small_state(5), step=104, meta=meta).tier == "rolling"
    assert run.save(small_state(6), step=105, meta=meta, tier="milestone").tier == "milestone"
    assert [ck.step for ck in run.checkpoints()] == [100, 101, 103, 104, 105]


@pytest.mark.parametrize("options", [{}, {"meta": {"epoch": 1.5}}, {"meta": {"epoch": True}}])
def test_a_counter_that_is_nowhere_is_asked_for(reg, backend, options):
    run = make(reg, TIERED)
    before = contents(backend)
    with pytest.raises(
        InvalidInput, match=r"the counter epoch of tier epoch has no value.*meta\['epoch'\]"
    ):
        run.save(small_state(), step=1, **options)
    assert contents(backend) == before


def test_a_tier_that_there_is_not_is_refused(reg, run):
    with pytest.raises(InvalidInput, match=r"no such tier.*expected milestone.*'rolling'"):
        make(reg, TIERED, "tiered").save(small_state(), step=1, tier="roling", meta={"epoch": 1})
    with pytest.raises(InvalidInput, match=r"no such tier.*expected no tier"):
        run.save(small_state(), step=1, tier="rolling")
    with pytest.raises(InvalidInput, match=r"tier 5: .* no such tier; expected milestone"):
        make(reg, TIERED, "numbered").save(small_state(), step=1, tier=5, meta={"epoch": 1})


def test_late_metrics_raise_the_tier_and_move_best(reg):
    run = make(reg, TIERED)
    saved = [run.save(small_state(i), step=i, meta={"epoch": 1}) for i in (1, 2)]
    assert run.best() is None
    saved[0].report({"loss": 3.0})
    assert (run.best().step, run.history.checkpoint(saved[0].handle.n).tier) == (1, "record")
    reg.checkpoint("run/main/step2").report({"loss": 1.0})
    assert (run.best().step, run.latest().tier) == (2, "record")
    saved[1].report({"loss": 9.0})
    # Raised once, it stays, and the other one is best again.
    assert (run.best().step, run.latest().tier) == (1, "record")


# Companions


ACTOR = RunSpec(
    phases=(
        Phase(name="1", monitors=(LOSS,)),
        Phase(name="2", companions=("reference",), retention=Retention(last=2)),
    )
)
REFERENCE = {"policy": {"w": np.arange(5000, dtype=np.float32)}}


def test_a_companion_is_saved_beside_it_and_carried_on_with_no_new_bytes(reg, backend):
    run = make(reg, ACTOR)
    first = run.save(small_state(1), step=1, phase=2, companions={"reference": REFERENCE})
    assert same(first.companion("reference").load(), REFERENCE)
    before = objects(backend)
    second = run.save(small_state(1) | {"x": 1}, step=2)
    # A manifest and a placement; the weights of both are there already.
    assert {key.split("/")[0] for key in objects(backend) - before} == {"manifests", "placements"}
    assert second.companion("reference").digest == first.companion("reference").digest
    found = reg.stored("run/phase2/step2/companions/reference")
    assert same(found.load(), REFERENCE)


def test_another_one_takes_its_place_from_there_on(reg):
    run = make(reg, ACTOR)
    run.save(small_state(1), step=1, phase=2, companions={"reference": REFERENCE})
    run.save(small_state(2), step=2, companions={"reference": {"new": 1}})
    third = run.save(small_state(3), step=3)
    assert third.companion("reference").load() == {"new": 1}


def test_it_goes_and_comes_back_with_its_checkpoint(reg):
    run = make(reg, ACTOR)
    run.save(small_state(1), step=1, phase=2, companions={"reference": REFERENCE})
    digest = run.latest().companion("reference").digest
    run.save(small_state(2), step=2, companions={"reference": {"new": 1}})
    assert digest in run.manifest.held
    run.save(small_state(3), step=3)
    assert digest not in run.manifest.held
    (back,) = run.retention.undo()
    assert digest in run.manifest.held
    assert same(back.companion("reference").load(), REFERENCE)


def test_one_that_the_phase_declares_must_be_known(reg, backend):
    run = make(reg, ACTOR)
    run.save(small_state(1), step=1, phase=1)
    before = slots(backend)
    with pytest.raises(IncompatibleState, match=r"needs a companion, and none is known.*reference"):
        run.save(small_state(2), step=2, phase=2)
    assert slots(backend) == before


def test_one_that_nobody_declared_is_kept_with_its_checkpoint_alone(reg, run):
    saved = run.save(small_state(1), step=1, companions={"ema": REFERENCE})
    assert same(saved.companion("ema").load(), REFERENCE)
    later = run.save(small_state(2), step=2)
    assert later.companions == {}
    with pytest.raises(NotFound, match=r"no such companion.*expected ema.*'ema'"):
        saved.companion("emo")


def test_companions_are_copied_for_a_save_in_the_background(run):
    weights = np.zeros(5000, np.float32)
    pending = run.save_async(small_state(), step=1, companions={"ema": {"w": weights}})
    weights += 1
    assert same(pending.wait().companion("ema").load(), {"w": np.zeros(5000, np.float32)})


def test_companions_of_a_superseded_line_are_not_carried_on(reg):
    run = make(reg, ACTOR)
    first = run.save(small_state(1), step=1, phase=2, companions={"reference": REFERENCE})
    run.save(small_state(2), step=2, companions={"reference": {"new": 1}})
    run.restore(at=first)
    again = run.save(small_state(3), step=2)
    assert same(again.companion("reference").load(), REFERENCE)


# Phases


PHASED = RunSpec(
    phases=(Phase(name="1", save_every=10), Phase(name="2"), Phase(name="final", save_every=3)),
    transitions=(
        Transition(
            from_phase="1",
            to_phase="2",
            source="latest",
            rows=(Row(part="model", change="carry"),),
        ),
    ),
)


def test_a_phase_that_is_not_declared_is_refused_with_near_names(reg, backend):
    run = make(reg, PHASED)
    before = contents(backend)
    with pytest.raises(InvalidInput, match=r"no such phase.*one of 1, 2, final.*'final'"):
        run.save(small_state(), step=1, phase="fina")
    assert contents(backend) == before


def test_the_first_phase_is_that_of_a_run_that_was_never_saved_into(reg):
    run = make(reg, PHASED)
    assert run.save(small_state(), step=1).phase == 1
    assert run.phases.current == 1


def test_going_back_is_refused(reg):
    run = make(reg, PHASED)
    run.exchange.push(small_state(1), step=1, phase=2)
    with pytest.raises(Conflict, match=r"phase 1, step 2: this phase is over; expected phase 2"):
        run.save(small_state(2), step=2, phase=1)
    run.save(small_state(3), step=3, phase="final")  # on without a transition, as none is declared
    assert run.phases.current == "final"


def test_going_back_by_a_restore_is_not(reg):
    run = make(reg, PHASED)
    first = run.exchange.push(small_state(1), step=1, phase=2)
    run.save(small_state(2), step=2, phase="final")
    run.restore(at=first)
    assert run.save(small_state(3), step=3, phase=2).phase == 2
    assert run.phases.current == 2


def test_a_phase_with_a_transition_is_entered_by_it_alone(reg):
    run = make(reg, PHASED)
    run.save(small_state(1), step=1, phase=1)
    with pytest.raises(Conflict, match=r"a transition into this phase.*phases.transition\('2'\)"):
        run.save(small_state(2), step=2, phase=2)
    assert run.save(small_state(2), step=2).phase == 1


@pytest.mark.parametrize(
    ("step", "phase", "due"),
    [
        (0, None, False),
        (10, None, True),
        (15, None, False),
        (15, "final", True),
        (15, 2, False),
        (20, 1, True),
    ],
)
def test_a_checkpoint_is_due_by_the_cadence_of_its_phase(reg, step, phase, due):
    assert make(reg, PHASED).phases.is_due(step, phase) is due


def test_what_is_due_follows_the_phase_that_training_is_in(reg):
    run = make(reg, PHASED)
    run.save(small_state(), step=1, phase="final")
    assert (run.phases.is_due(9), run.phases.is_due(10)) == (True, False)


def test_a_damaged_companion_costs_its_checkpoint_nothing(reg, backend, open_registry):
    run = make(reg, ACTOR)
    saved = run.save(small_state(1), step=1, phase=2, companions={"reference": REFERENCE})
    (pack,) = [str(p.key) for p in saved.companion("reference").handle.reader.placement.packs]
    flip(backend, pack)
    fresh = open_registry(backend)
    assert not fresh.verify(deep=True).ok
    assert same(fresh.run("run").latest().load(), small_state(1))


def test_a_takeover_and_everything_else_stand_in_the_same_commit(reg):
    make(reg, ACTOR).save(small_state(1), step=1, phase=2, companions={"reference": REFERENCE})
    other = reg.run("run")
    other.save(small_state(2), step=2)
    kinds = [type(action) for action in list(other.history.commits())[-1].actions]
    assert kinds == [TakeOver, AddCheckpoint]


def test_a_repeated_save_says_nothing_of_what_was_said_with_it(reg, backend):
    """A job that is started again saves its last step again, streams and companions included."""
    run = reg.create_run("run")
    told = {"streams": {"loss": [{"step": 1}]}, "companions": {"ema": REFERENCE}}
    run.save(small_state(1), step=1, **told)
    before = contents(backend)
    run.save(small_state(1), step=1, **told)
    assert contents(backend) == before
    again = reg.run("run")
    again.save(small_state(1), step=1, **told)
    assert [type(action) for action in list(again.history.commits())[-1].actions] == [TakeOver]
    assert again.manifest.stream("loss").count == 1
    assert objects(backend) == {key for key in before if not key.startswith(("runs", "registry"))}


def test_a_repeated_save_of_what_goes_meanwhile_is_a_save(reg, backend, open_registry):
    run = reg.create_run("run")
    run.save(small_state(1), step=1, companions={"ema": REFERENCE})
    hooked = Hooked(backend)
    mine = open_registry(hooked).run("run")

    def rival():
        other = open_registry(backend).run("run")
        other.exchange.push(small_state(2), step=2)
        other.retention.prune(Retention(last=1))

    hooked.before = Once("runs/run/log/", rival, "put_if_absent")
    mine.exchange.push(small_state(1), step=1, companions={"ema": REFERENCE}, metrics={"loss": 1.0})
    assert hooked.before.done
    assert [ck.step for ck in mine.checkpoints()] == [2, 1]
    assert same(mine.latest().companion("ema").load(), REFERENCE)


def test_a_training_does_not_begin_behind_a_transition(reg):
    run = make(reg, PHASED)
    with pytest.raises(Conflict, match=r"phases.transition\('2'\) first"):
        run.save(small_state(), step=1, phase=2)
    assert run.manifest.commits == 1


def test_input_that_a_repeat_changes_is_refused_or_kept(run, reg):
    anchor = {"p": np.zeros(300, np.float32)}
    run.save(small_state(), step=1, companions={"anchor": anchor})
    again = run.save(small_state(), step=1, companions={"anchor": anchor}, metrics={"loss": 1.0})
    assert again.metrics == {"loss": 1.0}
    with pytest.raises(Conflict, match="another companion"):
        run.save(small_state(), step=1, companions={"anchor": {"p": np.ones(300, np.float32)}})


def test_a_repeat_on_a_stale_handle_does_not_find_what_is_gone(reg, backend, open_registry):
    run = reg.create_run("thin", retention=Retention(last=1), seed=1)
    other = open_registry(backend).run("thin")
    run.save(small_state(1), step=1)
    other.refresh()
    run.save(small_state(2), step=2)
    assert other.exchange.push(small_state(2), step=2).handle.newest_record().evicted is None
    again = other.exchange.push(small_state(1), step=1)
    assert again.handle.n == other.manifest.commits - 1


def test_a_handle_that_others_went_back_behind_may_not_go_on(run, reg, backend, open_registry):
    save_small(run, 1, 2, 3)
    first, second = (open_registry(backend).run("run") for _ in range(2))
    first.restore()
    second.restore(at=second.checkpoints()[0])
    second.save(small_state(9), step=2)
    with pytest.raises(Conflict, match="is superseded"):
        first.save(small_state(4), step=4)
    first.restore()
    assert first.save(small_state(5), step=5).step == 5


def test_a_step_that_is_taken_is_refused_after_an_eviction_that_decides(run):
    run.pins.tags.set("kept", run.save(small_state(1), step=1))
    run.save(small_state(2), step=2, metrics={"mu": 25.0, "sigma": 3.0})
    run.save(small_state(3), step=3)
    run.retention.prune(Retention(last=1))
    run.restore(at=run.checkpoints()[0])
    # Which rating counts after the rewind only the record of the evicted one can tell.
    with pytest.raises(Conflict, match="has another state"):
        run.save(small_state(9), step=1)
    assert run.save(small_state(9), step=2).step == 2


def test_naming_waits_for_no_upload(run, reg):
    first = run.save(small_state(), step=1)
    with run.handle.committer._lock.here():
        done = ThreadPoolExecutor(1).submit(run.pins.tags.set, "kept", first)
        done.result(timeout=300)
    assert run.manifest.tags == {"kept": first.handle.n}


def test_the_status_is_set_after_the_save_under_way(run):
    pending = run.save_async(small_state(), step=1)
    run.status = "completed"
    assert pending.wait().step == 1


def test_a_repeated_save_into_a_run_that_was_dropped_meanwhile(backend, open_registry):
    open_registry(backend).create_run("run", seed=1).save(small_state(1), step=1)
    late = open_registry(backend).run("run")
    open_registry(backend).run("run").retention.drop("a mistake")
    with pytest.raises(Conflict, match="the run was dropped"):
        late.save(small_state(1), step=1)
