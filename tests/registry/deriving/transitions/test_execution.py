"""A transition as a commit: what it says, doing it again, coming back, dying, races, damage."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast import Checkpoint
from holdfast.backends.wrappers import Wrapper
from holdfast.registry.curation.pool.ratings import DEFAULT
from holdfast.registry.errors import Conflict, Fenced, IntegrityError, InvalidInput, NotFound
from holdfast.registry.history.actions import Evict, Eviction, SetPin
from holdfast.registry.history.authorship import commit_line
from tests.registry.deriving.transitions.world import (
    GOOD,
    ROWS,
    RUN,
    lived,
    over,
    refused,
    spec,
    state,
)
from tests.support.faults import Died, Hooked, Once, flip
from tests.support.loads import actions_of
from tests.support.states import same
from tests.support.stores import contents, packs, packs_of


def phase_2(i: int) -> dict:
    return {**state(i), "phase": 2}


# The commit


def test_it_is_one_commit(reg):
    run = lived(reg)
    entered = over(run)
    assert actions_of(run)[-1] == ["phase.enter"]
    assert run.phases.current == 2
    assert entered.checkpoint.step == 2
    assert same(entered.state["model"]["trunk.w"], state(2)["model"]["trunk.w"])
    (record,) = run.manifest.phases
    assert (record.from_phase, record.to_phase) == ("1", "2")
    assert (record.source, record.manifest) == ("gates/done", run.pins.gates.get("done").digest)
    assert record.ready == GOOD
    assert [(row.part, row.change, row.to) for row in record.rows] == [
        ("model", "carry", None),
        ("model/head.*", "reset", None),
        ("model", "freeze", "teacher"),
        ("model/head.*", "freeze", "anchor"),
        ("optimizer", "discard", None),
        ("rng", "reseed", None),
        ("step", "carry", None),
        ("phase", "reset", None),
    ]


def test_a_gate_on_what_was_evicted_leads_over(reg):
    run = lived(reg, spec(source="gates/first"))
    first = run.checkpoints()[0]
    # Not by `run.pins.gates.set`, which refuses it; a log that has it is legal.
    for action in (
        Evict(evictions=(Eviction(checkpoint=first.handle.n, reason="old"),)),
        SetPin(kind="gate", name="first", manifest=first.digest, checkpoint=first.handle.n),
    ):
        run.handle.log.append(lambda now, said=action: [commit_line(now, [said])])
    assert first.handle.newest_record().evicted
    assert over(run).checkpoint.handle.n == first.handle.n


def test_the_conditions_are_recorded(reg):
    rows = [*ROWS, {"part": "model/head.b", "change": "carry", "to": "b", "when": "bias"}]
    run = lived(reg, spec(rows))
    assert "b" in over(run, enable="bias").state
    *_, commit = run.history.commits()
    assert commit.actions[0].enabled == ("bias",)


def test_a_new_process_takes_the_run_over(reg, backend, open_registry):
    old = lived(reg)
    run = open_registry(backend).run(RUN)
    over(run)
    assert actions_of(run)[-1] == ["run.take_over", "phase.enter"]
    with pytest.raises(Fenced):
        old.save(state(4), step=4)
    with pytest.raises(Fenced):
        over(old)
    run.save(phase_2(3), step=3)
    assert actions_of(run)[-1] == ["checkpoint.add"]


def test_companions_stay_beside_every_checkpoint(reg):
    run = lived(reg)
    frozen = over(run).companions["anchor"]
    for i in (3, 4):
        checkpoint = run.save(phase_2(i), step=i)
        assert checkpoint.phase == 2
        assert same(checkpoint.companion("anchor").load(), frozen)
    assert same(frozen["model"]["head.w"], state(2)["model"]["head.w"])


def test_a_frozen_copy_of_a_whole_part_stores_no_data_again(reg, backend):
    rows = [{"part": "model", "change": "freeze", "companion": "anchor"}]
    rows += [{"part": key, "change": "discard"} for key in state() if key != "model"]
    run = lived(reg, spec(rows))
    before = packs(backend)
    over(run)
    assert packs(backend) == before
    anchor = run.save(phase_2(3), step=3).companion("anchor")
    assert anchor.components["model"] == run.pins.gates.get("done").components["model"]


def test_the_best_begins_anew(reg):
    run = lived(reg)
    assert run.best().step == 1
    over(run)
    assert run.best() is None
    run.save(phase_2(3), step=3)
    assert run.best(phase=2) is None
    run.latest().report({"accuracy": 0.1})
    assert run.best().step == 3
    assert run.best(phase=1).step == 1


def test_seeds_are_those_of_the_new_phase(reg):
    seeds = over(lived(reg)).seeds
    assert {name: one.spawn_key for name, one in seeds.items()} == {
        "data": (2, 1),
        "engine": (2, 3),
    }
    assert all(one.entropy == 42 for one in seeds.values())


def test_a_part_that_names_no_children_is_seeded_by_the_phase(reg):
    rows = [{"part": "rng", "change": "reseed"} if row["part"] == "rng" else row for row in ROWS]
    seeds = over(lived(reg, spec(rows))).seeds
    assert {name: one.spawn_key for name, one in seeds.items()} == {"rng": (2,)}


def test_anchors_enter_the_pool_frozen(reg):
    run = reg.create_run(RUN, preset=spec(anchors=["done", "first"]), seed=42)
    for i, name in ((1, "first"), (2, "done")):
        run.pins.gates.set(name, run.save(state(i), step=i, metrics={**GOOD, "mu": 30, "sigma": 1}))
    over(run)
    assert actions_of(run)[-1] == ["phase.enter", "pool.promote", "pool.promote"]
    entries = run.manifest.roster()
    assert [(one.version, one.gate, one.phase, one.step) for one in entries] == [
        (1, "done", "1", 2),
        (2, "first", "1", 1),
    ]
    assert all((one.frozen, one.mu, one.sigma) == (True, 25.0, DEFAULT.sigma) for one in entries)
    assert same(run.pool.entry(2).load(), {"model": state(1)["model"]})


def test_streams_are_archived(reg):
    run = lived(reg, spec(archives=["samples"]))
    run.save(state(4), step=4, streams={"samples": [{"step": 4}], "loss": [{"step": 4, "l": 1.0}]})
    over(run)
    assert actions_of(run)[-1] == ["phase.enter", "stream.archive"]
    assert run.manifest.stream("samples").count == 0
    assert [one.label for one in run.manifest.stream("samples").archives] == ["phase1"]
    assert run.manifest.stream("loss").count == 1


def test_an_empty_stream_is_not_archived(reg):
    run = lived(reg, spec(archives=["samples"]))
    over(run)  # where it was never begun
    assert actions_of(run)[-1] == ["phase.enter"]
    run.restore(at=run.latest(phase=1))
    run.save(state(4), step=4, phase=1, streams={"samples": [{"step": 4}]})
    run.restore(at=run.checkpoints(phase=1)[-2])  # before its one entry
    over(run)
    assert actions_of(run)[-1] == ["run.rewind", "phase.enter"]


def test_an_anchor_of_a_run_that_names_no_keys_is_whole(reg):
    run = lived(reg, spec(anchors=["done"]).changed(inference=()))
    over(run)
    assert same(run.pool.entry(1).load(), run.pins.gates.get("done").load())


def test_tensors_come_where_they_are_wanted(reg, monkeypatch):
    asked, load = [], Checkpoint.load

    def watched(self, **options):
        asked.append(options)
        return load(self, **options)

    monkeypatch.setattr(Checkpoint, "load", watched)
    over(lived(reg), map_location="cpu:0")
    assert [options["map_location"] for options in asked] == ["cpu:0"]


def test_an_archive_gets_a_label_that_is_free(reg):
    run = lived(reg, spec(archives=["samples"]))
    over(run)  # with nothing to archive
    assert actions_of(run)[-1] == ["phase.enter"]
    for i in (4, 5):
        run.restore(at=run.checkpoints(phase=1)[-1])
        run.save(state(i), step=i, phase=1, streams={"samples": [{"step": i}]})
        over(run)
    assert [one.label for one in run.manifest.stream("samples").archives] == ["phase1", "phase1_2"]
    # Back behind the archive the stream is what it was, and is put aside once more.
    run.restore(at=run.latest(phase=1))
    over(run)
    assert actions_of(run)[-1] == ["run.rewind", "phase.enter", "stream.archive"]
    assert run.streams["samples"].archives == {"phase1": 1, "phase1_2": 2, "phase1_3": 2}


@pytest.mark.parametrize(("source", "step"), [("latest", 3), ("best", 1)])
def test_a_transition_may_begin_with_what_a_phase_ended_with(reg, source, step):
    run = lived(reg, spec(source=source))
    assert over(run).checkpoint.step == step
    assert run.manifest.phases[0].source == source


@pytest.mark.parametrize("source", ["latest", "best"])
def test_a_phase_that_saved_nothing_leaves_nothing_to_begin_with(reg, source):
    run = reg.create_run(RUN, preset=spec(source=source), seed=42)
    with pytest.raises(NotFound, match=f"{RUN}/phase1/{source}"):
        over(run)
    assert actions_of(run) == [["run.create"]]


def test_a_save_under_way_is_waited_for(reg):
    run = lived(reg, spec(source="latest"))
    run.save_async(state(4), step=4, metrics=GOOD)
    assert over(run).checkpoint.step == 4


# Doing it again


def test_again_before_anything_was_saved_commits_nothing(reg, backend, open_registry):
    run = lived(reg, spec(anchors=["done"]))
    first = over(run)
    stored, said = contents(backend), actions_of(run)
    for again in (over(run), over(open_registry(backend).run(RUN))):
        assert same(again.state, first.state)
        assert same(again.companions, first.companions)
        assert again.report == first.report
        assert again.checkpoint.digest == first.checkpoint.digest
        assert [one.spawn_key for one in again.seeds.values()] == [(2, 1), (2, 3)]
    assert contents(backend) == stored
    assert actions_of(run.refresh()) == said
    run.save(phase_2(3), step=3)  # nobody took the run over


def test_again_in_another_way_enters_anew(reg):
    rows = [*ROWS, {"part": "model/head.b", "change": "carry", "to": "b", "when": "bias"}]
    run = lived(reg, spec(rows, anchors=["done"]))
    over(run)
    assert "b" in over(run, enable=["bias"]).state
    assert actions_of(run)[-1] == ["phase.enter"]
    assert len(run.manifest.roster()) == 1
    assert len(run.manifest.entered("2").rows) == len(rows)


def test_a_phase_that_is_under_way_is_not_begun_again(reg):
    run = lived(reg)
    over(run)
    run.save(phase_2(3), step=3)
    said = actions_of(run)
    with pytest.raises(Conflict, match=r"phase 2: this phase is under way.*at step 3"):
        over(run)
    assert actions_of(run) == said


def test_coming_back_to_the_phase_before_rewinds(reg):
    run = lived(reg)
    first = over(run)
    run.save(phase_2(3), step=3)
    run.restore(at=run.latest(phase=1))
    again = over(run)
    assert actions_of(run)[-1] == ["run.rewind", "phase.enter"]
    assert same(again.state, first.state)
    assert run.checkpoints(phase=2) == []
    assert same(over(run).state, first.state)  # what was superseded does not count as begun
    run.save(phase_2(7), step=3)
    assert [one.step for one in run.checkpoints()] == [1, 2, 3, 3]


def test_a_script_that_restores_first_may_go_over_again(reg, backend, open_registry):
    over(lived(reg))
    run = open_registry(backend).run(RUN)
    assert run.restore().checkpoint.phase == 1
    over(run)
    assert run.phases.current == 2
    assert run.save(phase_2(3), step=3).companions


# Where there is no way


def test_there_is_only_the_declared_way(reg):
    run = lived(reg)
    refused(run, Conflict, "phase 1: this phase is under way", to=1)
    refused(run, InvalidInput, "phase 3: the run has no such phase", to=3)
    over(run)
    with pytest.raises(InvalidInput, match=r"from phase 2 to phase 1: .*expected none"):
        over(run, to=1)


def test_a_run_without_transitions_has_none(run):
    run.save({"m": {}}, step=1)
    with pytest.raises(InvalidInput, match="from phase main to phase two: no transition"):
        run.phases.transition("two")


def test_a_run_that_is_over_enters_no_phase(reg):
    run = lived(reg)
    run.status = "completed"
    with pytest.raises(Conflict, match="the run is completed"):
        over(run)
    run.status = "running"
    run.status = "interrupted"
    over(run)
    assert run.status == "running"


def test_only_the_first_rank_goes_over(reg, monkeypatch):
    run = lived(reg)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(Conflict, match="rank"):
        over(run)


# Damage


def test_a_damaged_source_is_an_error_and_nothing_changes(reg, backend, open_registry):
    run = lived(reg)
    flip(backend, packs_of(run.pins.gates.get("done"))[0])
    fresh = open_registry(backend).run(RUN)
    refused(fresh, IntegrityError, "packs/")


def test_a_damaged_anchor_is_an_error_and_nothing_changes(reg, backend, open_registry):
    run = lived(reg, spec(anchors=["done", "first"]))
    run.pins.gates.set("first", run.checkpoints()[0])
    for key in packs_of(run.pins.gates.get("first")):
        flip(backend, key)
    fresh = open_registry(backend).run(RUN)
    fresh.pins.gates.get("done").load()
    refused(fresh, IntegrityError, "packs/")


# Races


def test_metrics_that_come_meanwhile_do_no_harm(reg, backend, open_registry):
    lived(reg)
    hooked = Hooked(backend)
    run = open_registry(hooked).run(RUN)
    other = open_registry(backend).run(RUN)
    hooked.before = Once("runs/life/log", lambda: other.latest().report({"x": 1}), "put")
    over(run)
    assert hooked.before.done
    assert actions_of(run)[-2:] == [["checkpoint.report"], ["run.take_over", "phase.enter"]]


def test_a_source_that_changes_meanwhile_is_loaded_anew(reg, backend, open_registry):
    lived(reg, spec(source="latest"))
    hooked = Hooked(backend)
    run = open_registry(hooked).run(RUN)
    other = open_registry(backend).run(RUN)
    hooked.before = Once(
        "runs/life/log", lambda: other.exchange.push(state(4), step=4, metrics=GOOD), "put"
    )
    entered = over(run)
    assert hooked.before.done
    assert entered.checkpoint.step == 4
    assert run.manifest.phases[0].manifest == entered.checkpoint.digest
    assert entered.state["step"] == 4


def test_two_processes_enter_a_phase_once(reg, backend, open_registry):
    lived(reg)
    hooked = Hooked(backend)
    run = open_registry(hooked).run(RUN)
    other = open_registry(backend).run(RUN)
    hooked.before = Once("runs/life/log", lambda: over(other), "put")
    over(run)
    assert hooked.before.done
    assert [said for said in actions_of(run) if "phase.enter" in said] == [
        ["run.take_over", "phase.enter"]
    ]


# Dying


class Mortal(Wrapper):
    """A store whose process dies before or after its n-th write."""

    def __init__(self, inner, at: int, after: bool) -> None:
        super().__init__(inner)
        self.left, self.after = at, after

    def put(self, key, body):
        self._die(after=False)
        super().put(key, body)
        self._die(after=True)

    def put_if_absent(self, key, body):
        self._die(after=False)
        created = super().put_if_absent(key, body)
        self._die(after=True)
        return created

    def _die(self, after: bool) -> None:
        self.left -= after == self.after
        if self.left < 0 and after == self.after:
            raise Died


@pytest.mark.parametrize("after", [False, True])
def test_whoever_dies_may_go_over_again(reg, backend, open_registry, after):
    run = lived(reg, spec(anchors=["done", "first"], archives=["samples"]))
    run.pins.gates.set("first", run.checkpoints()[0])
    run.save(state(4), step=4, streams={"samples": [{"step": 4}]})
    expected = over(open_registry(backend.copy()).run(RUN))
    deaths, entered = 0, 0
    while True:
        store = backend.copy()
        try:
            over(open_registry(Mortal(store, deaths, after)).run(RUN))
        except Died:
            deaths += 1
        else:
            break
        fresh = open_registry(store)
        assert fresh.verify(deep=True).ok
        run = fresh.run(RUN)
        entered += run.phases.current == 2
        assert (run.phases.current == 2) == ("phase.enter" in actions_of(run)[-1])
        again = over(run)
        assert same(again.state, expected.state)
        assert same(again.companions, expected.companions)
        assert [said.count("phase.enter") for said in actions_of(run)][-1] == 1
        assert sum("phase.enter" in said for said in actions_of(run)) == 1
        assert len(run.manifest.roster()) == 2
        assert [one.label for one in run.manifest.stream("samples").archives] == ["phase1"]
        run.save(phase_2(5), step=5)
        assert fresh.verify(deep=True).ok
    assert deaths > 4
    assert entered == after + 1  # the last writes are the commit and a snapshot
    assert np.array_equal(expected.state["model"]["trunk.w"], state(2)["model"]["trunk.w"])
