"""The life of ANDREA: 120 saves in one run, deaths, two pivots, an audit fork, one loss history.

`docs/systems.md` says row by row which test proves what of its document.
"""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from holdfast import Registry, Run, rng
from holdfast.registry.errors import IncompatibleState, InvalidInput, NotFound, Thinned
from tests.support.sameness import assert_same
from tests.systems import andrea as acts
from tests.systems.andrea import CHAPTERS, PARAMETERS, PIVOTS, RUN, SOURCES, STEPS, Story, Training
from tests.systems.life import Lives
from tests.systems.paced import Paced
from tests.systems.places import Place, in_a_folder

pytestmark = pytest.mark.xdist_group("andrea")

LIVES = Lives(Story, CHAPTERS)


@pytest.fixture
def young(place: Place) -> Iterator[Run]:
    """A run of 300 steps, to write to."""
    with place.open() as reg:
        acts.train(reg, 300)
        yield reg.run(RUN)


# Recovery


def test_every_100_steps_are_a_recovery_point(trained: Registry) -> None:
    steps = [one.step for one in trained.run(RUN).checkpoints()]
    assert steps == list(range(100, STEPS + 1, 100))
    assert len(steps) == 120
    for step in (100, 4_000, 7_700):
        assert trained.checkpoint(f"{RUN}/main/step{step}").load(only="step") == {"step": step}


def test_old_checkpoints_keep_their_weights_and_one_of_ten_all(
    trained: Registry, tmp_path: Path
) -> None:
    run = trained.run(RUN)
    rated = [one for one in run.checkpoints() if one.metrics]
    starts = [0, *PIVOTS, STEPS]
    best = {  # the best of each policy stays whole
        min(
            (one for one in rated if low < one.step <= high), key=lambda one: one.metrics["loss"]
        ).step
        for low, high in pairwise(starts)
    }
    whole = {*range(1_000, STEPS + 1, 1_000), *range(STEPS - 9_900, STEPS + 1, 100), *best}
    assert {one.step for one in run.checkpoints() if one.parts is None} == whole
    thinned = next(one for one in run.checkpoints() if one.step == 700)
    assert thinned.parts == ("step", "weights")
    assert thinned.load(only="weights")["weights"].shape == (PARAMETERS,)
    with pytest.raises(Thinned):
        thinned.load()
    run.exchange.checkout(tmp_path)
    files = {int(one.stem[5:]) for one in tmp_path.glob("step_*.bin")}
    assert files == whole  # a step file needs m and v


def test_interrupted_training_ends_like_one_that_was_not(story: Story, trained: Registry) -> None:
    assert story.deaths >= 4
    expected, found = acts.straight(), trained.run(RUN).latest().load()
    for name in ("weights", "m", "v"):
        assert_same(found[name], getattr(expected, name))
    assert found["step"] == STEPS
    drawn = np.random.default_rng(0)
    rng.restore(found["rng"], {"data": drawn})
    assert drawn.random() == expected.data.random()
    (*_, last) = trained.run(RUN).streams["state"].read()
    assert last["arms"] == expected.bandit.arms


def test_five_regions_come_back_as_they_are(young: Run) -> None:
    training = Training()
    for _ in range(300):
        training.train()
    state = young.latest().load()
    assert state["step"] == 300
    for name in ("weights", "m", "v"):
        assert (state[name].dtype, state[name].shape) == (np.float32, (PARAMETERS,))
        assert_same(state[name], getattr(training, name))
    tensors = young.latest().tensors()
    assert sum(tensors[name].nbytes for name in ("weights", "m", "v")) == 12 * PARAMETERS


@pytest.mark.parametrize("missing", ["weights", "m", "v", "step"])
def test_a_state_without_a_region_is_refused(young: Run, missing: str) -> None:
    state = Training().state()
    del state[missing]
    with pytest.raises(IncompatibleState, match=f"missing: {missing}"):
        young.save(state, step=400)


def test_regions_are_float32(young: Run) -> None:
    state = Training().state()
    state["v"] = state["v"].astype(np.float16)
    with pytest.raises(IncompatibleState, match="v is float16, must be float32"):
        young.save(state, step=400)


def test_a_process_that_dies_in_a_save_loses_only_its_steps(place: Place) -> None:
    with place.open() as reg:
        acts.train(reg, 200)
    write = 1
    while place.dies(lambda reg: acts.train(reg, 300), write, after=False):
        with place.open() as reg:
            run = reg.run(RUN)
            assert run.latest().step == 200
            assert run.streams["loss"].count == 200
            assert reg.verify().ok
        write += 1
    assert write > 3


# Signals


@in_a_folder
def test_sigusr1_saves_at_the_next_boundary_and_continues(place: Place) -> None:
    with Paced("andrea", place.url) as training, place.open() as reg:
        assert training.steps(112) == 112
        training.send(signal.SIGUSR1)
        assert training.steps(87) == 199
        assert [one.step for one in reg.run(RUN).checkpoints()] == [100]
        assert training.steps(3) == 202
        assert [one.step for one in reg.run(RUN).checkpoints()] == [100, 200]
        assert reg.run(RUN).status == "running"


@in_a_folder
def test_sigterm_finishes_the_step_saves_and_exits_cleanly(place: Place) -> None:
    with Paced("andrea", place.url) as training:
        training.steps(100 + 37)
        training.send(signal.SIGTERM)
        training.send(signal.SIGTERM)  # a second one is harmless
        assert training.last() == 0
    with place.open() as reg:
        run = reg.run(RUN)
        assert (run.latest().step, run.status) == (138, "interrupted")
        assert run.streams["loss"].count == 138
    with Paced("andrea", place.url) as training:  # nothing is lost: it continues at step 139
        assert training.steps(62) == 200
    with place.open() as reg:
        run = reg.run(RUN)
        straight = Training()
        losses = [straight.train() for _ in range(200)]
        assert_same(run.latest().load()["weights"], straight.weights)
        assert [one["loss"] for one in run.streams["loss"].read()] == losses


# Streams


def test_loss_history_is_unbroken(trained: Registry) -> None:
    entries = trained.run(RUN).streams["loss"].read()
    assert [entry["step"] for entry in entries] == list(range(1, STEPS + 1))
    straight = Training()
    expected = [straight.train() for _ in range(min(PIVOTS))]
    assert [entry["loss"] for entry in entries[: min(PIVOTS)]] == expected
    assert trained.run(RUN).streams["loss"].archives == {}


def test_loss_history_can_never_be_archived(young: Run) -> None:
    with pytest.raises(InvalidInput, match="kept for ever"):
        young.streams["loss"].archive("phase")
    assert young.streams["loss"].count == 300


def test_samples_and_bandit_are_archived_at_each_pivot(trained: Registry) -> None:
    run = trained.run(RUN)
    for name in ("samples", "state"):
        stream = run.streams[name]
        assert stream.archives == {"polish-1": 40, "polish-2": 40}
        assert stream.count == 40
        assert [one["step"] for one in stream.read(archive="polish-1")] == (
            list(range(100, 4_001, 100))
        )
    assert run.streams["samples"].read()[0] == {"step": 8_100, "text": "sample 8100"}


def test_every_checkpoint_has_a_sample_of_its_own(trained: Registry) -> None:
    stream = trained.run(RUN).streams["samples"]
    kept = [*(one for label in stream.archives for one in stream.read(archive=label))]
    steps = [one["step"] for one in [*kept, *stream.read()]]
    assert steps == [one.step for one in trained.run(RUN).checkpoints()]


# Pivots


def test_weights_and_moments_continue_over_a_pivot(place: Place) -> None:
    with place.open() as reg:
        acts.train(reg, 200)
        before = reg.run(RUN).latest().load()
        pivoted = reg.run(RUN).phases.pivot("polish")
        assert_same(pivoted.state, before)
        assert (pivoted.report[0].part, pivoted.report[0].change) == ("bandit", "reset")
        acts.train(reg, 300)
        straight = Training()
        for step in range(300):
            if step == 200:
                straight.bandit = acts.Bandit(acts.FLOORS[1])
            straight.train()
        assert_same(reg.run(RUN).latest().load()["weights"], straight.weights)


def test_pivots_need_no_phases_and_are_in_the_history(trained: Registry) -> None:
    run = trained.run(RUN)
    assert [(one.name, one.from_phase, one.to_phase) for one in run.manifest.pivots] == [
        ("polish-1", "main", "main"),
        ("polish-2", "main", "main"),
    ]
    sources = [run.manifest.pivots[0].manifest, run.manifest.pivots[1].manifest]
    assert sources == [trained.checkpoint(f"{RUN}/main/step{step}").digest for step in PIVOTS]


def test_best_begins_again_at_a_pivot(trained: Registry) -> None:
    run = trained.run(RUN)
    rated = {one.step: one.metrics["loss"] for one in run.checkpoints() if one.step > 8_000}
    assert run.best().step == min(rated, key=rated.__getitem__)


def test_the_same_pivot_again_does_nothing(young: Run, place: Place) -> None:
    young.phases.pivot("polish")
    before = len(list(young.history.commits()))
    with place.open() as reg:
        again = reg.run(RUN).phases.pivot("polish")
        assert again.checkpoint.step == 300
        assert len(list(reg.run(RUN).history.commits())) == before


def test_a_pivot_records_the_new_caps_and_floors(
    young: Run, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    policy = {"floors": {"wiki": 0.2}, "caps": {"wiki": 0.6}}
    young.phases.pivot("polish", config=policy, meta={"why": "samples repeat"})
    with place.open() as reg, caplog.at_level(logging.WARNING, logger="holdfast"):
        run = reg.run(RUN, create=True, preset="andrea", config=policy)
        assert caplog.messages == []  # it is the configuration of the run now
        assert run.config == policy
        (noted,) = run.phases.pivots
        assert (noted.name, noted.source) == ("polish", young.latest().digest)
        assert (noted.config, noted.meta) == (policy, {"why": "samples repeat"})
        acts.train(reg, 400)
        forks = [reg.fork(f"{RUN}/main/step{step}", f"fork-{step}") for step in (300, 400)]
        assert [one.config for one in forks] == [None, policy]  # that of the checkpoint
        caplog.clear()
        run.phases.pivot("polish", config={"floors": {}})
        assert "with another configuration, which stays" in caplog.text
        assert run.config == policy
        run.restore(at=reg.checkpoint(f"{RUN}/main/step200"))  # before the pivot
        run.save(run.latest().load() | {"step": 201}, step=201)
        assert (run.config, run.phases.pivots) == (None, [])
        assert reg.verify().ok


def test_archives_are_in_the_tree_of_a_checkout(trained: Registry, tmp_path: Path) -> None:
    run = trained.run(RUN)
    run.exchange.checkout(tmp_path)
    for label in PIVOTS.values():
        samples, state = (run.streams[name].read(archive=label) for name in ("samples", "state"))
        folder = tmp_path / "archive" / label
        assert json.loads((folder / "run.samples.json").read_text()) == samples
        assert json.loads((folder / "run.state.json").read_text())["arms"] == state[-1]["arms"]
        assert sorted(one.name for one in folder.iterdir()) == [
            "run.samples.json",
            "run.state.json",
        ]
    assert len(json.loads((tmp_path / "run.loss.json").read_text())) == STEPS
    assert len(json.loads((tmp_path / "run.samples.json").read_text())) == 40


def test_a_process_that_dies_in_a_pivot_leaves_all_or_nothing(place: Place) -> None:
    with place.open() as reg:
        acts.train(reg, 200)
    for after in (False, True):  # it is a single write
        assert place.dies(lambda reg: reg.run(RUN).phases.pivot("polish"), 1, after)
        with place.open() as reg:
            run = reg.run(RUN)
            assert bool(run.manifest.pivots) == after
            assert run.streams["samples"].count == (0 if after else 2)
            assert run.streams["loss"].count == 200
    with place.open() as reg:
        acts.train(reg, 300)
        assert reg.run(RUN).streams["samples"].archives == {"polish": 2}
        assert reg.verify(deep=True).ok


def test_a_zombie_arm_is_reported(
    young: Run, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    zombie = {"weight": 1.546, "pulls": 9}
    training = acts.resume(young)
    losses = [{"step": training.step + 1, "loss": training.train()}]
    training.bandit.arms["repo-docstrings"] = zombie  # its data source exists now, and not later
    training.save(young, losses)
    sources = {"streams/state/arms": SOURCES, "bandit/arms": SOURCES}
    with place.open() as reg, caplog.at_level(logging.WARNING, logger="holdfast"):
        restored = reg.run(RUN).restore(sources=sources)
        assert restored.stale == ("streams/state/arms/repo-docstrings",)
        assert "whose source is gone: streams/state/arms/repo-docstrings" in caplog.text
        with pytest.raises(InvalidInput, match="sources"):
            reg.run(RUN).phases.start("resume")
        reg.run(RUN).phases.pivot("without-it")
        assert reg.run(RUN).restore(sources=sources).stale == ()


# The audit


def test_two_branches_from_one_checkpoint_are_compared(story: Story) -> None:
    with story.place.open() as reg:
        size = story.place.size_bytes()
        ids = []
        for rate in (1e-4, 1e-2):
            run = reg.fork(f"{RUN}/main/step4000", config={"rate": rate})
            ids.append(run.id)
            assert story.place.size_bytes() - size < 20_000  # no data is copied
            size = story.place.size_bytes()
            restored = run.restore(sources={"streams/state/arms": SOURCES, "bandit/arms": SOURCES})
            training = Training(rate=rate)
            training.load(restored.state)
            losses = []
            while training.step < 4_300:
                losses.append({"step": training.step + 1, "loss": training.train()})
                if run.phases.is_due(training.step):
                    training.save(run, losses)
                    losses = []
            size = story.place.size_bytes()
        found = reg.diff_runs(*ids)
        assert (found.fork.run, found.fork.step) == (RUN, 4_000)
        assert [str(one) for one in found.config] == ["~ rate: 0.0001 -> 0.01"]
        assert [(one.step, one.is_same) for one in found.steps] == [
            (4_000, True),
            (4_100, False),
            (4_200, False),
            (4_300, False),
        ]
        changed = [one.path for one in found.difference.tensors if one.kind == "changed"]
        assert changed[:3] == ["weights", "m", "v"]
        slow, fast = ([getattr(one, side) for one in found.steps] for side in ("first", "second"))
        assert slow[-1].metrics != fast[-1].metrics
        assert reg.run(ids[1]).streams["loss"].count == 4_300
        with pytest.raises(NotFound):
            reg.diff_runs(ids[0], "slower")


def test_nothing_is_damaged(trained: Registry) -> None:
    assert trained.verify(deep=True).ok
