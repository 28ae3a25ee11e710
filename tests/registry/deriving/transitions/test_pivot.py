"""A pivot: archived streams, reset parts, best from here on, twice, restored, undone, refused."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from holdfast import Registry, Run
from holdfast.registry.errors import Conflict, Fenced, IncompatibleState, InvalidInput, NotFound
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.history.replay.advance import advance
from holdfast.registry.spec import RunSpec
from tests.support.loads import actions_of
from tests.support.states import same

ROWS = [
    {"part": "bandit", "change": "reset", "why": "a new policy"},
    {"part": "model/head.*", "change": "reset"},
    {"part": "rng", "change": "reseed", "seeds": {"data": 1}},
]


def spec(**more: Any) -> RunSpec:
    declared = {
        "phases": [
            {
                "name": "main",
                "monitors": [{"metric": "loss", "mode": "min"}],
                "retention": {"last": 2},
            },
            {"name": "late"},
        ],
        "streams": [
            {"name": "loss", "lifetime": "forever"},
            {"name": "samples", "lifetime": "resettable"},
            {"name": "state", "lifetime": "resettable"},
        ],
        "pivot": {"rows": ROWS},
    }
    return RunSpec.of({**declared, **more})


def state(i: int) -> dict[str, Any]:
    return {
        "step": i,
        "model": {"trunk": np.arange(300.0) + i, "head.w": np.ones(3) * i},
        "bandit": {"wiki": 0.5 + i},
        "rng": 2**70 + i,
    }


def save(run: Run, i: int, loss: float = 1.0) -> None:
    streams = {name: [{"step": i, "x": i}] for name in ("loss", "samples", "state")}
    run.save(state(i), step=i, metrics={"loss": loss}, streams=streams)


@pytest.fixture
def run(reg: Registry) -> Run:
    made = reg.create_run("run", preset=spec(), seed=7)
    for i, loss in enumerate([0.5, 0.2, 0.7], 1):
        save(made, i, loss)
    return made


def counts(run: Run) -> dict[str, int]:
    return {one.name: one.count for one in run.refresh().manifest.streams}


def test_a_pivot_is_one_commit_that_resets_and_archives(run: Run) -> None:
    found = run.phases.pivot("polish", initialise={"bandit": lambda: {"wiki": 0.0}})
    assert actions_of(run)[-1] == ["phase.enter", "stream.archive", "stream.archive"]
    assert list(found.state) == ["step", "model", "bandit"]  # in the order of the source
    assert same(found.state["model"], {"trunk": state(3)["model"]["trunk"]})
    assert found.state["bandit"] == {"wiki": 0.0}
    assert found.checkpoint.step == 3
    assert [(row.part, row.change) for row in found.report] == [
        ("bandit", "reset"),
        ("model/head.*", "reset"),
        ("rng", "reseed"),
        ("step", "carry"),
        ("model", "carry"),
    ]
    assert counts(run) == {"loss": 3, "samples": 0, "state": 0}
    assert run.streams["samples"].archives == {"polish": 3}
    assert [one["x"] for one in run.streams["loss"].read()] == [1, 2, 3]
    assert run.phases.current == "main"
    save(run, 4)
    assert counts(run) == {"loss": 4, "samples": 1, "state": 1}


def test_a_pivot_is_these_bytes_in_the_log(reg: Registry) -> None:
    run = reg.create_run("run", preset=RunSpec())
    digest = run.save({"w": 1}, step=1).digest
    run.phases.pivot("polish")
    *_, commit = run.history.commits()
    (enter,) = commit.actions
    assert enter.encode().decode() == (
        '{"action":"phase.enter","companions":{},"enabled":[],"from_phase":"main","manifest":"'
        f'{digest.hex()}","name":"polish","ready":{{}},"rows":[{{"change":"carry","part":"w"}}],'
        '"source":"latest","to_phase":"main"}'
    )


def test_best_begins_again_and_the_old_best_is_kept(run: Run) -> None:
    assert run.best().step == 2
    run.phases.pivot("polish")
    assert run.best() is None
    for i in range(4, 9):
        save(run, i, loss=0.9 - i / 100)
    assert run.best().step == 8
    # Step 2 was the best until the pivot; without that it would have been evicted long ago.
    assert [one.step for one in run.checkpoints()] == [2, 7, 8]
    reasons = {v.checkpoint.step: v.reasons for v in run.retention.prune(dry_run=True).kept}
    assert reasons[2] == ("best/loss before polish",)
    run.checkpoints()[0].report({"loss": 0.01})
    assert run.best().step == 8
    run.checkpoints()[1].report({"loss": 0.02})
    assert run.best().step == 7


def test_replay_step_by_step_is_replay_at_once(run: Run) -> None:
    save(run, 4, 0.3)
    _ = run.best()
    run.phases.pivot("one")
    _ = run.best()
    save(run, 5, 0.4)
    run.phases.pivot("two")
    save(run, 6, 0.6)
    monitor = run.phases.monitor("main")
    slots = list(run.handle.log.slots())
    whole = advance(RunManifest(run_id="run"), slots)
    assert whole.best(monitor).step == run.manifest.best(monitor).step == 6
    assert [one.name for one in whole.pivots] == ["one", "two"]
    run.restore(at=run.checkpoints()[-2])  # step 5, between the pivots
    save(run, 7, 0.9)
    assert run.best().step == 5
    assert advance(RunManifest(run_id="run"), list(run.handle.log.slots())).best(monitor).step == 5


def test_the_same_name_again_does_nothing(run: Run, reg: Registry) -> None:
    first = run.phases.pivot("polish")
    before = actions_of(run)
    again = reg.run("run").phases.pivot("polish")  # a process that died before its first save
    assert actions_of(run) == before
    assert same(again.state, first.state)
    assert again.seeds["data"].generate_state(2).tolist() == (
        first.seeds["data"].generate_state(2).tolist()
    )
    save(run, 4)
    before = actions_of(run)
    later = reg.run("run").phases.pivot("polish")
    assert actions_of(run) == before
    assert (later.checkpoint.step, later.report) == (4, ())
    assert same(later.state, state(4))


def test_pivots_as_often_as_wanted_each_with_its_own_seeds(run: Run) -> None:
    seeds = [run.phases.seed_sequence(1).generate_state(2).tolist()]
    for number, name in enumerate(["one", "two", "three"]):
        seeds.append(run.phases.pivot(name).seeds["data"].generate_state(2).tolist())
        save(run, 4 + number)
    assert len({tuple(one) for one in seeds}) == 4
    assert run.streams["samples"].archives == {"one": 3, "two": 1, "three": 1}
    assert [one["x"] for one in run.streams["loss"].read()] == [1, 2, 3, 4, 5, 6]


def test_a_restore_after_a_pivot_keeps_it(run: Run, reg: Registry) -> None:
    run.phases.pivot("polish")  # by an operator, say
    other = reg.run("run")
    restored = other.restore()
    assert restored.pivot == "polish"
    assert list(restored.state) == ["step", "model"]
    save(other, 4)
    assert [one.name for one in other.manifest.pivots] == ["polish"]
    assert counts(other) == {"loss": 4, "samples": 1, "state": 1}
    assert reg.run("run").restore().pivot is None


def test_going_back_before_a_pivot_undoes_it(run: Run, reg: Registry) -> None:
    run.phases.pivot("polish")
    save(run, 4)
    other = reg.run("run")
    restored = other.restore(at=run.checkpoints()[-2])
    assert restored.pivot is None
    assert same(restored.state, state(3))
    save(other, 4, 0.6)
    assert other.manifest.pivots == []
    assert counts(other) == {"loss": 4, "samples": 4, "state": 4}
    assert other.best().step == 2
    assert other.phases.pivot("polish").checkpoint.step == 4  # the name is free again
    assert other.streams["samples"].archives == {"polish": 3, "polish_2": 4}


def test_passing_over_a_damaged_checkpoint_behind_a_pivot_is_told(
    run: Run, reg: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    run.phases.pivot("polish")
    run.save(state(4) | {"model": {"trunk": np.full(300, np.nan), "head.w": np.ones(3)}}, step=4)
    other = reg.run("run")
    found = other.checkpoints()[-1]
    key = str(found.handle.reader.placement.packs[0].key)
    backend = reg.handle.store.backend
    backend.put(key, b"x" + backend.get(key)[1:])
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        restored = other.restore()
    assert restored.checkpoint.step == 3
    assert restored.pivot is None
    assert (
        "the next save undoes the pivot polish, which came after run/main/step00000003"
        in caplog.text
    )


def test_a_trainer_that_saved_behind_the_pivot_wins(run: Run, reg: Registry) -> None:
    run.phases.pivot("polish")
    other = reg.run("run")
    other.restore()
    save(run, 4)
    with pytest.raises(Conflict, match="continued after the pivot"):
        save(other, 5)
    assert [one.step for one in run.checkpoints()][-1] == 4


def test_a_pivot_fences_the_trainer_under_the_old_policy(run: Run, reg: Registry) -> None:
    reg.run("run").phases.pivot("polish")
    with pytest.raises(Fenced):
        save(run, 4)


def test_without_a_table_everything_is_carried(reg: Registry) -> None:
    run = reg.create_run("plain")
    with pytest.raises(NotFound, match="no checkpoint to pivot from"):
        run.phases.pivot("one")
    odd = {"a/b": 1, "c | d": 2, "*": [3]}
    run.save(odd, step=1, streams={"loss": [{"step": 1}]})
    run.streams["samples"].append({"step": 1}, lifetime="resettable")
    assert run.phases.pivot("one").state == odd
    assert counts(run) == {"loss": 1, "samples": 0}


def test_a_table_may_archive_some_streams_only(reg: Registry) -> None:
    run = reg.create_run("run", preset=spec(pivot={"rows": [], "archives": ["samples"]}))
    save(run, 1)
    run.phases.pivot("one")
    assert counts(run) == {"loss": 1, "samples": 0, "state": 1}


def test_what_does_not_fit_changes_nothing(run: Run) -> None:
    run.save({"step": 4, "bandit": 1, "model": {}}, step=4)
    before = actions_of(run)
    with pytest.raises(IncompatibleState, match=r"nothing to reset: model/head\.\*"):
        run.phases.pivot("one")
    with pytest.raises(InvalidInput, match="not a legal name"):
        run.phases.pivot("no good")
    assert actions_of(run.refresh()) == before
    save(run, 5)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"part": "model", "change": "freeze", "companion": "x"}, "companions"),
        ({"part": "model", "change": "reset", "when": "x"}, "conditions"),
        ({"part": "rng", "change": "reseed"}, "needs `seeds`"),
    ],
)
def test_rows_that_no_pivot_can_have(row: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        spec(pivot={"rows": [row]})
    with pytest.raises(ValueError, match="archived stream loss"):
        spec(pivot={"archives": ["loss"]})
