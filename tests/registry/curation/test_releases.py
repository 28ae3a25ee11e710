"""Releases: published once, cut without new bytes, found, rolled back, described."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.backends.wrappers import Metered
from holdfast.registry.curation.cards import read_card
from holdfast.registry.errors import (
    Conflict,
    Damaged,
    IncompatibleState,
    InvalidInput,
    NotFound,
    UnsupportedValue,
)
from holdfast.registry.history.actions import PointRelease, SetPin
from holdfast.registry.spec import Retention
from tests.support.faults import Hooked, Once, flip
from tests.support.states import run_by, same, small_state
from tests.support.stores import contents, slots

CARD = {
    "description": "a classifier",
    "intended_use": "tests",
    "performance": {"accuracy": 0.5, "nan": float("nan")},
    "tags": ["a", "b"],
}
PRESET = """
name = "serving"
inference = ["model | model_state_dict", "config"]
card_fields = ["description", "intended_use"]
commit_keys = ["timestamp"]
"""


@pytest.fixture
def serving(reg, tmp_path):
    """A run whose preset names what inference needs, and what a card must say."""
    return run_by(reg, tmp_path, PRESET)


@pytest.fixture
def ck(run):
    return run.save(small_state(), step=10, metrics={"loss": 0.5, "nan": float("nan")})


def big_state(i=0):
    return {
        "model": {"w": np.random.default_rng(i).integers(0, 255, (2000, 1000), np.uint8)},
        "optimizer": {"m": np.random.default_rng(i + 1).integers(0, 255, (2000, 1000), np.uint8)},
    }


# Publishing


def test_a_release_of_everything_is_the_checkpoint(run, ck):
    release = run.releases.publish("1.0.0", ck)
    assert release.digest == ck.digest
    assert same(release.load(), small_state())
    assert release.ref == "run/releases/1.0.0"
    assert (release.version, release.checkpoint, release.source) == ("1.0.0", ck.handle.n, ck.ref)
    assert release.metrics["loss"] == 0.5
    assert np.isnan(release.metrics["nan"])
    assert release.is_latest
    assert release.published >= ck.created
    assert release.card == {}
    assert release.card_yaml() == "{}\n"


def test_only_cuts_components_out(run, ck):
    release = run.releases.publish("1.0.0", ck, only="model", metrics={"accuracy": 1})
    assert same(release.load(), {"model": small_state()["model"]})
    assert release.components == {"model": ck.components["model"]}
    assert release.metrics == {"accuracy": 1.0}
    several = run.releases.publish("1.0.1", ck, only=["optimizer", "model", "optimizer"])
    assert list(several.load()) == ["optimizer", "model"]


def test_the_preset_names_what_inference_needs(serving):
    state = {"model_state_dict": {"w": np.arange(100.0)}, "config": {"d": 3}, "optimizer": [1]}
    release = serving.releases.publish("1.0.0", serving.save(state, step=1), card=CARD)
    assert list(release.load()) == ["model_state_dict", "config"]
    other = serving.save({"optimizer": [1]}, step=2)
    with pytest.raises(IncompatibleState, match="inference needs"):
        serving.releases.publish("1.0.1", other, card=CARD)
    chosen = serving.releases.publish("1.0.1", other, card=CARD, only="optimizer")
    assert chosen.load() == {"optimizer": [1]}


def test_a_whole_checkpoint_comes_back_with_what_its_commit_keeps(reg, tmp_path):
    run = run_by(reg, tmp_path, 'commit_keys = ["timestamp"]')
    state = {"timestamp": "noon", **small_state()}
    ck = run.save(state, step=1)
    assert same(run.releases.publish("1.0.0", ck).load(), state)
    assert list(run.releases.publish("1.0.1", ck, only="model").load()) == ["model"]


def test_a_state_may_stand_in_for_the_components(run, ck, backend):
    converted = {"model": {**small_state()["model"], "scale": np.ones(50)}, "config": {"d": 3}}
    release = run.releases.publish("1.0.0", ck, state=converted)
    assert same(release.load(), converted)
    assert release.source == ck.ref
    run.releases.publish("1.0.0", ck, state=converted)
    with pytest.raises(Conflict, match="other content"):
        run.releases.publish("1.0.0", ck, state={"model": 1})
    with pytest.raises(InvalidInput, match="exclude each other"):
        run.releases.publish("1.0.1", ck, state=converted, only="model")
    with pytest.raises(UnsupportedValue, match=r"state\['f'\]"):
        run.releases.publish("1.0.1", ck, state={"f": print})


def test_a_release_stores_no_chunk_again(backend, open_registry):
    run = open_registry(backend).create_run("big")
    ck = run.save(big_state(), step=1)
    metered = Metered(backend)
    other = open_registry(metered).run("big")  # which has read nothing of the checkpoint yet
    with metered.measure() as usage:
        cut = other.releases.publish("1.0.0", other.latest(), only="model", card=CARD)
        whole = other.releases.publish("1.1.0", other.latest(), card=CARD)
    assert usage.written_bytes < 64 * 1024
    shared = big_state()["model"]["w"].copy()
    converted = {"weights": {"w": shared, "scale": np.ones(100)}}
    with metered.measure() as usage:
        made = other.releases.publish("2.0.0", other.latest(), state=converted)
    assert usage.written_bytes < 64 * 1024
    assert same(cut.load(), {"model": big_state()["model"]})
    assert whole.digest == ck.digest
    assert same(made.load(), converted)


def test_a_release_outlives_its_checkpoint(reg, backend, open_registry):
    run = reg.create_run("short", retention=Retention(last=1))
    first = run.save(small_state(1), step=1)
    run.releases.publish("1.0.0", first, only="model")
    run.save(small_state(2), step=2)
    assert run.retention.evicted()[0].digest == first.digest
    release = open_registry(backend).run("short").releases.get("1.0.0")
    assert same(release.load(), {"model": small_state(1)["model"]})
    assert release.digest in run.manifest.held
    with pytest.raises(Conflict, match="checkpoint was evicted"):
        run.releases.publish("1.0.1", first)
    # A release that exists does not need the checkpoint any more.
    assert run.releases.publish("1.0.0", first, only="model").digest == release.digest


def test_publishing_needs_no_token(run, ck, backend, open_registry):
    other = open_registry(backend).run("run")
    other.releases.publish("1.0.0", other.latest())
    run.save(small_state(1), step=11)
    assert run.releases.latest().version == "1.0.0"


# Immutable


def test_publishing_the_same_again_changes_nothing(run, ck, backend):
    first = run.releases.publish("1.0.0", ck, card=CARD)
    run.releases.publish("1.1.0", ck)
    ck.report({"late": 1.0})
    before = slots(backend)
    reordered = dict(reversed(CARD.items()))
    again = run.releases.publish("1.0.0", ck, card=reordered)
    assert again.published == first.published
    assert "late" not in again.metrics
    assert slots(backend) == before
    assert run.releases.latest().version == "1.1.0"  # which a retry must not move
    run.releases.publish("1.0.0", ck, card=CARD, metrics=first.metrics)
    assert slots(backend) == before


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"only": "model"}, "other content"),
        ({"card": {**CARD, "description": "another"}}, "another card"),
        ({"card": {**CARD, "performance": {"accuracy": 1, "nan": float("nan")}}}, "another card"),
        ({"card": None}, "another card"),
        ({"metrics": {"loss": 0.25}}, "other metrics"),
    ],
)
def test_a_version_never_changes(change, found, run, ck, backend):
    run.releases.publish("1.0.0", ck, card=CARD)
    before = slots(backend)
    with pytest.raises(Conflict, match=found) as caught:
        run.releases.publish("1.0.0", ck, **{"card": CARD, **change})
    assert "another version" in str(caught.value)
    assert slots(backend) == before


def test_two_publishers_of_one_version(run, ck, backend, open_registry):
    other = open_registry(backend).run("run")
    mine, theirs = other.latest(), run.save(small_state(1), step=20)
    run.releases.publish("1.0.0", theirs)
    with pytest.raises(Conflict, match="published already"):
        other.releases.publish("1.0.0", mine)
    assert other.releases.get("1.0.0").digest == theirs.digest


@pytest.mark.parametrize("only", ["optimizer", "model"])
def test_a_publisher_that_loses_the_race(only, run, ck, backend, open_registry):
    """Another one publishes that version after everything was checked, before the slot is put."""
    hooked = Hooked(backend)
    other = open_registry(hooked).run("run")
    mine = other.latest()
    hooked.before = Once("runs/", lambda: run.releases.publish("1.0.0", ck, only=only), "put_if")
    if only == "optimizer":
        with pytest.raises(Conflict, match="other content"):
            other.releases.publish("1.0.0", mine, only="model")
    else:
        other.releases.publish("1.0.0", mine, only="model")
    assert hooked.before.done
    (pin,) = run.refresh().manifest.pins_of("release")
    assert same(run.releases.get(pin.name).load(), {only: small_state()[only]})


# What is refused


@pytest.mark.parametrize("version", ["1.0", "v1.0.0", "1.0.0+build", "latest", "", None, 1])
def test_a_version_is_a_semantic_one(version, run, ck, backend):
    before = contents(backend)
    with pytest.raises(InvalidInput):
        run.releases.publish(version, ck)
    assert contents(backend) == before


def test_what_cannot_be_published_is_refused_before_anything_is_written(
    run, ck, reg, serving, backend
):
    foreign = reg.create_run("other").save(small_state(), step=1)
    bare = serving.save({"model": 1}, step=1)
    before = contents(backend)
    publish = run.releases.publish
    with pytest.raises(InvalidInput, match="of its own run"):
        publish("1.0.0", foreign)
    with pytest.raises(InvalidInput, match="of its own run"):
        publish("1.0.0", "run/latest")
    with pytest.raises(NotFound, match="'model'"):
        publish("1.0.0", ck, only="modle")
    with pytest.raises(InvalidInput, match="needs components"):
        publish("1.0.0", ck, only=[])
    with pytest.raises(InvalidInput, match="not a number"):
        publish("1.0.0", ck, metrics={"loss": "low"})
    with pytest.raises(UnsupportedValue):
        publish("1.0.0", ck, card={"x": object()})
    with pytest.raises(InvalidInput, match="intended_use"):
        serving.releases.publish("1.0.0", bare, card={"description": "x", "intended_use": " "})
    with pytest.raises(InvalidInput, match="missing: description, intended_use"):
        serving.releases.publish("1.0.0", bare)
    assert contents(backend) == before


def test_a_dropped_run_publishes_nothing(run, ck):
    run.releases.publish("1.0.0", ck)
    run.releases.publish("1.1.0", ck)
    run.retention.drop("gone")
    with pytest.raises(Conflict, match="gone"):
        run.releases.publish("1.2.0", ck)
    with pytest.raises(Conflict, match="gone"):
        run.releases.rollback("1.0.0")


# Cards


def test_a_card_comes_back(run, ck, backend, open_registry):
    run.releases.publish("1.0.0", ck, card=CARD)
    release = open_registry(backend).run("run").releases.get("1.0.0")
    assert set(release.card) == set(CARD)
    assert release.card["performance"]["accuracy"] == 0.5
    assert np.isnan(release.card["performance"]["nan"])
    assert release.card_yaml().startswith("description: a classifier\nintended_use: tests\n")


def test_a_card_may_be_a_file(run, ck, tmp_path):
    (tmp_path / "card.yaml").write_text("description: from a file\ndate: 2025-10-25\n")
    release = run.releases.publish("1.0.0", ck, card=tmp_path / "card.yaml")
    assert release.card == {"date": "2025-10-25", "description": "from a file"}
    (tmp_path / "again.yaml").write_text(release.card_yaml())
    assert read_card(tmp_path / "again.yaml") == release.card
    run.releases.publish("1.0.0", ck, card=str(tmp_path / "again.yaml"))
    (tmp_path / "evil.yaml").write_text("description: !!python/object/apply:os.system [ls]\n")
    with pytest.raises(InvalidInput, match="tag"):
        run.releases.publish("1.0.1", ck, card=tmp_path / "evil.yaml")


def test_a_card_is_a_stored_state_that_the_run_holds(run, ck):
    run.releases.publish("1.0.0", ck, card=CARD)
    pin = run.manifest.pin("release", "1.0.0")
    assert pin.card in run.manifest.held
    assert pin.card in run.manifest.by_manifest


def test_a_damaged_card_is_never_returned(run, ck, backend, open_registry):
    run.releases.publish("1.0.0", ck, card=CARD)
    place = run.manifest.by_manifest[run.manifest.pin("release", "1.0.0").card]
    flip(backend, str(place.manifest_key))
    release = open_registry(backend).run("run").releases.get("1.0.0")
    with pytest.raises(Damaged):
        _ = release.card
    assert same(release.load(), small_state())


# Finding and rolling back


def test_nothing_released_yet(run, ck, reg):
    assert run.releases.list() == []
    with pytest.raises(NotFound, match="nothing has been released yet"):
        run.releases.latest()
    with pytest.raises(NotFound, match="releases/latest"):
        reg.stored("run/releases/latest")


def test_the_last_published_is_the_latest_whatever_its_version(run, ck, reg):
    for version in ("1.0.0", "2.0.0-rc.1", "2.0.0", "1.0.1"):
        run.releases.publish(version, ck)
    assert [one.version for one in run.releases.list()] == [
        *("1.0.0", "2.0.0-rc.1", "2.0.0", "1.0.1")
    ]
    assert run.releases.latest().version == "1.0.1"
    assert [one.is_latest for one in run.releases.list()] == [False, False, False, True]
    assert reg.stored("run/releases/latest").ref == "run/releases/1.0.1"
    assert reg.stored("run/releases/2.0.0-rc.1").version == "2.0.0-rc.1"


def test_near_versions_are_suggested(run, ck):
    run.releases.publish("1.0.0", ck)
    with pytest.raises(NotFound, match=r"'1\.0\.0'"):
        run.releases.get("1.0.1")
    with pytest.raises(NotFound):
        run.releases.rollback("1.0.1")


def test_rollback(run, ck, backend, open_registry):
    other = open_registry(backend).run("run")
    run.releases.publish("1.0.0", ck)
    run.releases.publish("1.1.0", run.save(small_state(1), step=11))
    back = other.releases.rollback("1.0.0", "1.1.0 is slow")
    assert back.is_latest
    assert same(run.releases.latest().load(), small_state())
    assert [one.version for one in run.releases.list()] == ["1.0.0", "1.1.0"]
    before = slots(backend)
    other.releases.rollback("1.0.0", "once more")
    assert slots(backend) == before
    run.releases.publish("1.1.1", ck, only="model")
    assert run.releases.latest().version == "1.1.1"
    for reason in (None, b"x", "\ud800"):
        with pytest.raises(InvalidInput, match="reason"):
            run.releases.rollback("1.0.0", reason)


def test_history_tells_who_did_what(run, ck):
    run.releases.publish("1.0.0", ck)
    run.releases.publish("1.1.0", ck)
    run.pins.tags.set("keeper", ck)
    run.releases.rollback("1.0.0", "slow")
    run.pins.artifacts.set("seeds", {"x": 1})
    history = list(run.releases.history())
    assert [(one.event, one.version, one.reason) for one in history] == [
        ("published", "1.0.0", ""),
        ("published", "1.1.0", ""),
        ("pointed", "1.0.0", "slow"),
    ]
    commits = {commit.n: commit for commit in run.history.commits()}
    for event in history:
        commit = commits[event.n]
        assert isinstance(commit.actions[0], SetPin | PointRelease)
        assert event.author == commit.author
        assert event.time.timestamp() == pytest.approx(commit.time_ms / 1000)


def test_a_production_checkpoint_of_adr_004(reg):
    """document of ADR-004, Production Checkpoints: weights, configuration, metrics and a card."""
    run = reg.create_run("adr", preset="adr004")
    state = {
        "version": "1.0.0",
        "timestamp": "2025-10-25T00:00:00",
        "git_commit": None,
        "model_state_dict": {"w": np.arange(300, dtype=np.float32)},
        "optimizer_state_dict": {"m": np.ones(300, dtype=np.float32)},
        "scheduler_state_dict": None,
        "epoch": 5,
        "global_step": 50,
        "metrics": {"accuracy": 0.9},
        "config": {"d_model": 8},
        "metadata": {"device": "cpu"},
    }
    ck = run.save(state, step=5, metrics={"accuracy": 0.9, "loss": 0.1})
    card = {
        "description": "a transformer",
        "dataset": "IMDB",
        "training_date": "2025-10-25",
        "intended_use": "sentiment",
        "performance": {"accuracy": 0.9},
    }
    for absent in card:
        with pytest.raises(InvalidInput, match=f"missing: {absent}"):
            run.releases.publish("1.0.0", ck, card={k: v for k, v in card.items() if k != absent})
    release = run.releases.publish("1.0.0", ck, card=card)
    assert same(release.load(), {key: state[key] for key in ("model_state_dict", "config")})
    assert release.metrics == {"accuracy": 0.9, "loss": 0.1}
    run.releases.publish("1.0.1", ck, card=card, only=["model_state_dict"])
    assert run.releases.rollback("1.0.0").is_latest
