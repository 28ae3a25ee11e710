"""The life of Cobre's training: stages of cuts and bases, the last 3, three modes, hard errors.

`docs/systems.md` says row by row which test proves what of its document.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from holdfast import Registry, Run
from holdfast.registry.errors import Conflict, IncompatibleState, InvalidInput
from holdfast.registry.history.actions import AddCheckpoint, Evict
from holdfast.registry.spec.presets import load_preset
from tests.support.sameness import assert_same
from tests.systems import cobre as acts
from tests.systems.cobre import (
    CHAPTERS,
    CONFIG,
    EXPECTED,
    FORWARD_PASSES,
    ITERATIONS,
    RUN,
    STAGES,
    SYSTEM,
    Story,
    Training,
)
from tests.systems.life import Lives
from tests.systems.paced import Paced
from tests.systems.places import Place, in_a_folder

pytestmark = pytest.mark.xdist_group("cobre")

LIVES = Lives(Story, CHAPTERS)


@pytest.fixture
def young(place: Place) -> Iterator[Registry]:
    """A registry with a run of six iterations."""
    with place.open() as reg:
        acts.train(reg, 6)
        yield reg


# Checkpoints


def test_interrupted_training_ends_like_one_that_was_not(story: Story, trained: Registry) -> None:
    assert story.deaths >= 3
    assert_same(trained.run(RUN).latest().load(), acts.straight().state())


def test_the_last_3_are_kept_and_the_rest_goes_in_the_same_commit(trained: Registry) -> None:
    run = trained.run(RUN)
    assert [one.step for one in run.checkpoints()] == [8, 10, 12]
    gone = []
    for commit in run.history.commits():
        evicted = [action for action in commit.actions if isinstance(action, Evict)]
        if evicted:
            assert any(isinstance(action, AddCheckpoint) for action in commit.actions)
            gone += [
                run.history.checkpoint(one.checkpoint).step
                for action in evicted
                for one in action.evictions
            ]
    assert gone == [2, 4, 6]
    assert trained.checkpoint(f"{RUN}/latest").step == ITERATIONS


def test_no_checkpoint_is_periodic_unless_the_configuration_asks(place: Place) -> None:
    assert load_preset("cobre").phase("training").save_every is None
    with place.open() as reg:
        run = acts.open_policy(reg)
        assert not any(run.phases.is_due(step) for step in range(1, 1_000))


def test_what_must_be_serialized_comes_back_type_by_type(young: Registry) -> None:
    state = young.run(RUN).latest().load()
    expected = acts.straight(6).state()
    assert_same(state, expected)
    assert state["completed_iterations"] == 6
    assert len(state["convergence"]["lower"]) == len(state["convergence"]["upper"]) == 6
    assert state["rng_state"]["bit_generator"] == "PCG64"
    assert len(state["cuts"]) == len(state["basis"]) == STAGES
    for stage, basis in zip(state["cuts"].values(), state["basis"].values(), strict=True):
        cuts = stage["cuts"]
        assert cuts["coefficients"].dtype == np.float64
        assert cuts["is_active"].dtype == bool
        assert not cuts["is_active"].all()  # inactive cuts keep their slots
        assert cuts["slot_index"].tolist() == list(range(6 * FORWARD_PASSES))
        assert basis["row_status"].dtype == np.uint8


def test_populated_slots_alone_take_space(young: Registry) -> None:
    path = "cuts/stage_000/cuts/coefficients"
    sizes = [one.tensors()[path].nbytes for one in young.run(RUN).checkpoints()]
    assert sizes == [8 * 3 * FORWARD_PASSES * step for step in (2, 4, 6)]


@pytest.mark.parametrize("missing", load_preset("cobre").required_keys)
def test_a_state_without_a_part_is_refused(young: Registry, missing: str) -> None:
    state = acts.straight(7).state()
    del state[missing]
    run = acts.open_policy(young)
    run.phases.start("resume", expected=EXPECTED)
    with pytest.raises(IncompatibleState, match=f"missing: {missing}"):
        run.save(state, step=7)


def test_only_the_first_rank_saves(young: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    run = acts.open_policy(young)
    with pytest.raises(Conflict, match="rank"):
        run.save(acts.straight(7).state(), step=7)
    monkeypatch.setenv("RANK", "0")
    run.phases.start("resume", expected=EXPECTED)
    run.save(acts.straight(7).state(), step=7)


def test_a_process_that_dies_in_a_save_leaves_the_one_before(place: Place) -> None:
    with place.open() as reg:
        acts.train(reg, 4)
    write = 1
    while place.dies(lambda reg: acts.train(reg, 6), write, after=False):
        with place.open() as reg:
            assert acts.started(acts.open_policy(reg)).completed == 4
            assert reg.verify().ok
        write += 1
    assert write > 3


# Signals


@in_a_folder
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_two_ranks_saves_the_last_iteration_and_exits_with_0(
    place: Place, number: signal.Signals
) -> None:
    with Paced("cobre", place.url) as training:
        assert training.steps(5) == 5
        with place.open() as reg:
            assert reg.run(RUN).latest() is None  # nothing is periodic
        training.send(number, to_all=True)
        assert training.last() == 0
    with place.open() as reg:
        run = acts.open_policy(reg)
        assert run.status == "interrupted"
        assert [one.step for one in run.checkpoints()] == [6]
        assert_same(run.latest().load(), acts.straight(6).state())
    with Paced("cobre", place.url) as training:
        assert training.steps(2) == 8
        training.send(number)  # to one of them: both leave after the same iteration
        assert training.last() == 0
    with place.open() as reg:
        assert_same(reg.run(RUN).latest().load(), acts.straight(9).state())


# Modes


def test_fresh_is_determined_by_the_seed(place: Place) -> None:
    with place.open() as reg:
        ids = []
        for name in ("one", "two"):
            run = acts.open_policy(reg, name)
            found = run.phases.start("fresh")
            assert found.state == {}
            training = Training(found.seeds["scenarios"])
            acts.iterate(run, training, 4)
            assert training.stages[0].capacity == ITERATIONS * FORWARD_PASSES
            ids.append(run.latest().digest)
        assert ids[0] == ids[1]


def warm(reg: Registry, name: str = "warm", seed: int = 43) -> tuple[Run, Training]:
    run = reg.create_run(name, preset="cobre", seed=seed, config=CONFIG, input_hash=SYSTEM)
    found = run.phases.start("warm_start", reg.checkpoint(f"{RUN}/latest"), expected=EXPECTED)
    assert list(found.state) == ["cuts"]
    return run, Training(found.seeds["scenarios"], found.state["cuts"])


def test_a_warm_start_has_the_cuts_and_begins_at_iteration_0(young: Registry) -> None:
    old = young.run(RUN).latest().load()
    run, training = warm(young)
    assert training.completed == 0
    assert training.lower == []
    for stage, table in zip(training.stages, old["cuts"].values(), strict=True):
        cuts = table["cuts"]
        assert stage.warm_start_count == len(cuts["intercept"]) == 12
        assert stage.capacity == 12 + ITERATIONS * FORWARD_PASSES  # loaded + new training
        assert_same(stage.coefficients[:12], cuts["coefficients"])
        assert_same(stage.is_active[:12], cuts["is_active"])
    acts.iterate(run, training, 2)
    state = run.latest().load()
    assert state["completed_iterations"] == run.latest().step == 2
    first = state["cuts"]["stage_000"]
    assert first["warm_start_count"] == 12
    assert len(first["cuts"]["intercept"]) == 12 + 2 * FORWARD_PASSES
    (record,) = run.manifest.phases
    assert record.source == f"{RUN}/training/step00000006"


def test_a_warm_start_draws_other_scenarios(young: Registry) -> None:
    _, training = warm(young)
    _, again = warm(young, "again")
    _, other = warm(young, "other", seed=44)
    for one in (training, again, other):
        one.iterate()
    original = acts.straight(7).state()["cuts"]["stage_000"]["cuts"]["coefficients"]
    for first in (0, 12):  # of the original's beginning, and of its next iteration
        drawn = training.stages[0].coefficients[12:14]
        assert not np.array_equal(drawn, original[first : first + 2])
    assert_same(training.stages[0].coefficients, again.stages[0].coefficients)
    assert not np.array_equal(training.stages[0].coefficients, other.stages[0].coefficients)


def test_resume_is_bit_for_bit(young: Registry) -> None:
    run = acts.open_policy(young)
    training = acts.resumed(run.phases.start("resume", expected=EXPECTED))
    assert training.completed == 6
    assert training.stages[0].capacity == ITERATIONS * FORWARD_PASSES  # as in the checkpoint
    acts.iterate(run, training, 8)  # from completed_iterations + 1
    assert_same(run.latest().load(), acts.straight(8).state())
    assert run.latest().load()["convergence"]["lower"][:6].tolist() == acts.straight(6).lower


def test_a_preempted_job_is_found_and_continued(young: Registry) -> None:
    with pytest.raises(SystemExit), acts.open_policy(young) as run:
        training = acts.started(run)
        acts.iterate(run, training, 8)
        training.iterate()  # in progress, and never saved
        raise SystemExit(0)
    run = acts.open_policy(young)
    assert run.status == "interrupted"
    assert acts.started(run).completed == 8
    acts.iterate(run, acts.started(run), 10)
    assert run.status == "running"
    assert_same(run.latest().load(), acts.straight(10).state())


# Validation


@pytest.mark.parametrize("mode", ["resume", "warm_start"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"state_dimension": 4}, "state_dimension is 3, expected 4"),
        ({"num_stages": 60}, "num_stages is 4, expected 60"),
    ],
)
def test_another_dimension_or_stage_count_is_a_hard_error(
    young: Registry, mode: str, wrong: dict[str, int], message: str
) -> None:
    expected = {**EXPECTED, **wrong}
    if mode == "resume":
        run, source = acts.open_policy(young), None
    else:
        run, source = acts.open_policy(young, "other"), young.checkpoint(f"{RUN}/latest")
    commits = len(list(run.history.commits()))
    with pytest.raises(IncompatibleState, match=message):
        run.phases.start(mode, source, expected=expected)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="missing: state_dimension, num_stages"):
        run.phases.start(mode, source)  # type: ignore[arg-type]
    assert len(list(run.refresh().history.commits())) == commits


def test_another_configuration_is_a_hard_error_with_both(young: Registry) -> None:
    other = {**CONFIG, "max_iterations": 50, "solver": {"name": "clp", "tolerance": 1e-7}}
    with pytest.raises(Conflict) as caught:
        acts.open_policy(young, config=other)
    assert "\n  ~ max_iterations: 12 -> 50\n  ~ solver/name: 'highs' -> 'clp'" in str(caught.value)
    assert "tolerance" not in str(caught.value)


def test_another_system_is_a_hard_error(young: Registry) -> None:
    with pytest.raises(Conflict, match="other input data"):
        acts.open_policy(young, input_hash="another")


def test_the_four_hard_errors_come_in_one_call(young: Registry) -> None:
    run = young.run(RUN)
    fits = {"expected": EXPECTED, "config": CONFIG, "input_hash": SYSTEM}
    wrong: dict[str, Any] = {
        "expected": {"state_dimension": 4, "num_stages": 60},
        "config": CONFIG | {"max_iterations": 50},
        "input_hash": "another",
    }
    told = (
        "state_dimension is 3, expected 4; num_stages is 4, expected 60; "
        f"config ~ max_iterations: 12 -> 50; input_hash '{SYSTEM}' -> 'another'"
    )
    with pytest.raises(IncompatibleState) as caught:
        run.phases.start("resume", **wrong)
    assert told in str(caught.value)
    for name, part in zip(("config", "input_hash"), told.split("; ")[2:], strict=True):
        with pytest.raises(IncompatibleState, match=re.escape(part)) as caught:
            run.phases.start("resume", **fits | {name: wrong[name]})
        assert "expected" not in str(caught.value)
    with pytest.raises(InvalidInput, match="belong to mode resume"):
        acts.open_policy(young, "other").phases.start("fresh", config=CONFIG)
    training = acts.resumed(run.phases.start("resume", **fits))  # type: ignore[arg-type]
    acts.iterate(run, training, 8)
    assert_same(run.latest().load(), acts.straight(8).state())


def test_a_resume_cannot_leave_the_hashes_out(young: Registry) -> None:
    run = young.run(RUN)
    for resume in (lambda: run.phases.start("resume", expected=EXPECTED), run.restore):
        with pytest.raises(InvalidInput, match=r"config=\.\.\., input_hash=\.\.\."):
            resume()


def test_a_warm_start_may_have_another_configuration(young: Registry) -> None:
    run = young.create_run("more", preset="cobre", config={"max_iterations": 99}, input_hash="new")
    source = young.checkpoint(f"{RUN}/latest")
    assert "cuts" in run.phases.start("warm_start", source, expected=EXPECTED).state


def test_nothing_is_damaged(trained: Registry) -> None:
    assert trained.verify(deep=True).ok
    assert trained.run(RUN).status == "completed"
