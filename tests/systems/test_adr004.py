"""The life of a training by ADR-004: recent epochs, milestones, releases with cards.

`docs/systems.md` says row by row which test proves what of its document.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

import holdfast
from holdfast import Run
from holdfast.registry.curation.cards import read_card
from holdfast.registry.errors import Conflict, IncompatibleState, InvalidInput, NotFound
from holdfast.registry.face.registry import Registry
from holdfast.registry.history.actions import AddCheckpoint, Evict
from tests.support.sameness import assert_same
from tests.systems import adr004 as acts
from tests.systems.adr004 import ACCURACY, CARD, CHAPTERS, LOSS, MILESTONES, RUN, Story, Training
from tests.systems.life import Lives
from tests.systems.places import Place

pytestmark = pytest.mark.xdist_group("adr004")

LIVES = Lives(Story, CHAPTERS)


@pytest.fixture
def young(place: Place) -> Iterator[Run]:
    """A run of two epochs, to publish from."""
    with place.open() as reg:
        acts.next_epoch(reg, 2)
        yield reg.run(RUN)


# Training checkpoints and milestones


def test_last_3_and_every_milestone_are_kept(trained: Registry) -> None:
    kept = {one.step: one.tier for one in trained.run(RUN).checkpoints()}
    assert [step for step, tier in kept.items() if tier == "milestone"] == MILESTONES
    assert [step for step, tier in kept.items() if tier == "training"] == [11, 12, 13]
    assert trained.run(RUN).latest().step == 13


def test_cleanup_is_part_of_the_save_and_by_log_not_by_clock(trained: Registry) -> None:
    run = trained.run(RUN)
    gone = []
    for commit in run.history.commits():
        evicted = [a for a in commit.actions if isinstance(a, Evict)]
        if evicted:
            assert any(isinstance(a, AddCheckpoint) for a in commit.actions)
            gone += [
                run.history.checkpoint(one.checkpoint).step for a in evicted for one in a.evictions
            ]
    assert gone == [3, 6, 8]  # the epochs that are no milestones, oldest first


def test_best_milestones_by_accuracy_and_by_loss(trained: Registry) -> None:
    by_accuracy = trained.checkpoint(f"{RUN}/best/accuracy")
    by_loss = trained.checkpoint(f"{RUN}/best/loss")
    assert (by_accuracy.step, by_accuracy.metrics["accuracy"]) == (7, max(ACCURACY))
    assert (by_loss.step, by_loss.metrics["loss"]) == (9, min(LOSS))
    assert trained.run(RUN).best().digest == by_accuracy.digest


def test_structure_comes_back_key_by_key(trained: Registry) -> None:
    state = trained.run(RUN).latest().load()
    assert list(state) == list(Training().state_dict())
    assert state["metadata"] == {"device": "CPU", "hostname": "node-1", "cuda_version": None}
    assert state["metrics"] == {"accuracy": ACCURACY[-1], "loss": LOSS[-1]}
    assert len(state["metrics_history"]) == acts.EPOCHS
    assert state["best_metric"] == max(ACCURACY)


@pytest.mark.parametrize("key", ["version", "model_state_dict", "config"])
def test_missing_keys_are_refused(trained: Registry, key: str) -> None:
    state = Training().state_dict()
    del state[key]
    with pytest.raises(IncompatibleState, match=f"missing: {key}"):
        trained.run(RUN).save(state, step=99)


def test_interrupted_training_ends_like_one_that_was_not(story: Story, trained: Registry) -> None:
    assert story.deaths >= 5
    straight = Training()
    for _ in range(acts.EPOCHS):
        straight.train()
    ours, theirs = trained.run(RUN).latest().load(), straight.state_dict()
    for state in (ours, theirs):
        del state["timestamp"]
    assert_same(ours, theirs)


def test_equal_trainings_have_equal_ids_whenever_and_wherever(place: Place) -> None:
    with place.open() as reg:
        ids = []
        for host in ("node-1", "node-2"):
            run = reg.create_run(host, preset="adr004", seed=acts.SEED)
            training = Training(host)
            metrics = training.train()
            saved = run.save(training, step=1, metrics=metrics)
            ids.append(saved.digest)
            assert saved.load()["metadata"]["hostname"] == host
        assert ids[0] == ids[1]


def test_training_history_has_every_epoch(trained: Registry) -> None:
    entries = list(trained.run(RUN).streams["training_history"].read())
    assert [entry["accuracy"] for entry in entries] == list(ACCURACY)


def test_nothing_is_damaged(trained: Registry) -> None:
    assert trained.verify(deep=True).ok


# Releases


def test_release_is_what_inference_needs_and_a_card(young: Run, tmp_path: Path) -> None:
    file = tmp_path / "card.yaml"
    file.write_text(yaml.safe_dump(CARD))
    best = young.best()
    release = young.releases.publish("1.0.0", best, card=file)
    assert list(release.components) == ["model_state_dict", "config"]
    assert_same(release.load()["model_state_dict"], best.load()["model_state_dict"])
    assert release.metrics == best.metrics
    assert release.card == CARD
    out = tmp_path / "v1.0.0.yaml"
    out.write_text(release.card_yaml())
    assert out.read_text() == yaml.safe_dump(CARD, default_flow_style=False, sort_keys=True)
    assert read_card(out) == CARD


@pytest.mark.parametrize("field", list(CARD))
@pytest.mark.parametrize("fresh", ["folder"], indirect=True)
def test_every_field_of_the_card_is_required(trained: Registry, field: str) -> None:
    run = trained.run(RUN)
    card = {name: value for name, value in CARD.items() if name != field}
    with pytest.raises(InvalidInput, match=f"missing: {field}"):
        run.releases.publish("1.0.0", run.best(), card=card)


def test_release_can_have_a_smaller_config(young: Run) -> None:
    state = young.best().load(only=["model_state_dict", "config"])
    del state["config"]["dropout"]
    state["model_state_dict"] = {n: t.half() for n, t in state["model_state_dict"].items()}
    metrics = {"accuracy": 0.6, "loss": 0.8, "uncertainty_calibration": 0.04}
    release = young.releases.publish("1.0.0", young.best(), card=CARD, state=state, metrics=metrics)
    loaded = release.load()
    assert {t.dtype for t in loaded["model_state_dict"].values()} == {torch.float16}
    assert "dropout" not in loaded["config"]
    assert release.metrics == metrics


def test_releases_are_versioned_and_rolled_back(young: Run, place: Place) -> None:
    first, second = young.checkpoints()
    releases = young.releases
    releases.publish("1.0.0", first, card=CARD)
    releases.publish("1.0.1", second, card={**CARD, "description": "A better one"})
    assert releases.latest().version == "1.0.1"
    with pytest.raises(Conflict, match="published already"):
        releases.publish("1.0.0", second, card=CARD)
    for wrong in ("1.0", "v1.0.0", "01.0.0"):
        with pytest.raises(InvalidInput):
            releases.publish(wrong, first, card=CARD)
    releases.rollback("1.0.0", "uncertain on long reviews")
    with place.open() as reg:
        latest = reg.stored(f"{RUN}/releases/latest")
        assert latest.digest == releases.get("1.0.0").digest
        told = [(e.event, e.version, e.reason) for e in reg.run(RUN).releases.history()]
        assert told == [
            ("published", "1.0.0", ""),
            ("published", "1.0.1", ""),
            ("pointed", "1.0.0", "uncertain on long reviews"),
        ]
        assert reg.run(RUN).releases.get("1.0.1").card["description"] == "A better one"


def test_a_publisher_that_dies_leaves_all_or_nothing(place: Place) -> None:
    with place.open() as reg:
        acts.next_epoch(reg, 2)

    def publish(reg: Registry) -> None:
        run = reg.run(RUN)
        run.releases.publish("1.0.0", run.best(), card=CARD)

    deaths = 0
    for after in (False, True):
        write = 1
        while place.dies(publish, write, after):
            deaths += 1
            write += 1
            with place.open() as reg:
                assert reg.verify().ok
                try:
                    found = reg.stored(f"{RUN}/releases/latest")
                except NotFound:
                    continue
                assert found.load()
                assert reg.run(RUN).releases.latest().card == CARD
    assert deaths >= 4
    with place.open() as reg:
        publish(reg)  # again, as after a lost answer: nothing changes
        assert len(list(reg.run(RUN).releases.history())) == 1
        assert reg.verify(deep=True).ok


def test_second_registry_has_all_of_it(young: Run, place: Place, tmp_path: Path) -> None:
    release = young.releases.publish("1.0.0", young.checkpoints()[0], card=CARD)
    young.retention.evict(young.checkpoints()[0], "its release stays")
    mirror = Place.new(lambda: str(tmp_path / "mirror"))
    with place.open() as source, mirror.open() as target:
        holdfast.sync(source, target)
    with mirror.open() as reg:
        there = reg.run(RUN).releases.latest()
        assert (there.digest, there.card) == (release.digest, CARD)
        assert [one.digest for one in reg.run(RUN).checkpoints()] == [
            one.digest for one in young.checkpoints()
        ]
        assert_same(there.load(), release.load())
        assert reg.verify(deep=True).ok
