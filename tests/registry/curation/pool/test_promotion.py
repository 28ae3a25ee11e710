"""What a promotion says: who goes for it, which rating is inherited, what is a mere repetition."""

from __future__ import annotations

import math

import pytest

from holdfast.registry.curation.pool.promoting import (
    Candidate,
    candidate_of,
    find_entry,
    own_rating,
    pool_rules,
    promotion,
    rating_of,
)
from holdfast.registry.curation.pool.ratings import DEFAULT, Rating
from holdfast.registry.errors import IncompatibleState
from holdfast.registry.history.actions import EvictEntries, Promote
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.spec import RunSpec
from holdfast.registry.spec.requirements import inference_parts
from holdfast.registry.values.digest import Digest
from tests.registry.curation.pool.league import (
    _MODEL,
    LEAGUE,
    LEAST,
    checkpoint,
    entry,
    league,
    rated,
    state,
)

_CANDIDATE = Candidate(_MODEL, "3", 9, 9)


def test_a_run_that_declares_no_pool_has_one_of_twenty():
    assert pool_rules(state(RunSpec())) is pool_rules(RunManifest(run_id="r"))
    assert pool_rules(RunManifest(run_id="r")).size == 20
    assert pool_rules(state()) is LEAGUE.pool


@pytest.mark.parametrize(
    ("size", "leaving"), [(6, ()), (5, ()), (4, (2,)), (3, (2, 4)), (1, (2, 4, 5, 6))]
)
def test_the_oldest_leave_as_many_as_are_too_many(size, leaving):
    pool = (
        *(entry(1, frozen=True), entry(2), entry(3, evicted="x"), entry(4), entry(5), entry(6)),
    )
    first, *rest = promotion(
        state(league(size=size), pool=pool, next_version=8), _CANDIDATE, DEFAULT
    )
    assert isinstance(first, Promote)
    assert first.version == 8
    assert [action.versions for action in rest if isinstance(action, EvictEntries)] == (
        [leaving] if leaving else []
    )
    frozen = Candidate(_MODEL, "3", 9, 9, frozen=True)
    assert len(promotion(state(league(size=size), pool=pool), frozen, DEFAULT)) == 1


def test_the_uncertainty_is_raised_unless_the_entry_is_frozen():
    (promote,) = promotion(state(), _CANDIDATE, Rating(30.0, 1.0))
    assert (promote.mu, promote.sigma) == (30.0, LEAST)
    (promote,) = promotion(state(), _CANDIDATE, Rating(30.0, 5.0))
    assert promote.sigma == 5.0
    frozen = Candidate(_MODEL, "3", 9, 9, gate="first", frozen=True)
    (promote,) = promotion(state(), frozen, Rating(30.0, 1.0))
    assert (promote.sigma, promote.gate) == (1.0, "first")


def test_the_rating_is_that_of_the_metrics_then_that_of_the_newest_which_has_one():
    run = state(
        checkpoints=(
            checkpoint(1, metrics=rated(1.0, 1.0)),
            checkpoint(2, metrics=rated(2.0, 1.0)),
            checkpoint(3, metrics={"mu": 3.0}),
        )
    )
    assert rating_of(run, rated(9.0, 2.0)) == Rating(9.0, 2.0)
    assert rating_of(run, {}) == Rating(2.0, 1.0)
    assert rating_of(run, {"sigma": 1.0}) == Rating(2.0, 1.0)
    assert rating_of(state(), {}) == DEFAULT


def test_a_rating_outlives_the_eviction_of_its_checkpoint_but_no_going_back():
    before = checkpoint(1, metrics=rated(1.0, 1.0))
    evicted = checkpoint(2, metrics=rated(2.0, 1.0), evicted="retention")
    superseded = checkpoint(3, metrics=rated(3.0, 1.0), superseded=True)
    assert rating_of(state(checkpoints=(before, evicted, superseded)), {}).mu == 2.0
    assert rating_of(state(checkpoints=(before, superseded)), {}).mu == 1.0


@pytest.mark.parametrize(
    "wrong", [rated(math.nan, 1.0), rated(1.0, math.inf), rated(1.0, 0.0), rated(1.0, -1.0)]
)
def test_metrics_that_are_no_rating_are_passed_over(wrong):
    run = state(checkpoints=(checkpoint(1, metrics=rated(4.0, 1.0)), checkpoint(2, metrics=wrong)))
    assert rating_of(run, wrong) == Rating(4.0, 1.0)
    assert own_rating(run, wrong) is None


def test_the_metrics_that_are_the_rating_are_named_by_the_preset():
    run = state(league(mu="skill", sigma="doubt"))
    assert rating_of(run, {"skill": 3.0, "doubt": 2.0, **rated(9.0, 9.0)}) == Rating(3.0, 2.0)


def test_a_repetition_is_the_same_model_phase_step_and_role():
    playing = entry(4, step=9, gate=None, checkpoint=9)
    run = state(pool=(entry(1, step=9, evicted="x"), playing))
    assert find_entry(run, _CANDIDATE) == playing
    assert find_entry(run, Candidate(_MODEL, "3", 9, 77)) == playing
    for other in (
        Candidate(Digest.of(b"another"), "3", 9, 9),
        Candidate(_MODEL, "2", 9, 9),
        Candidate(_MODEL, "3", 8, 9),
        Candidate(_MODEL, "3", 9, 9, gate="first"),
        Candidate(_MODEL, "3", 9, 9, frozen=True),
    ):
        assert find_entry(run, other) is None
    assert find_entry(state(pool=(entry(1, step=9, evicted="x"),)), _CANDIDATE) is None


def test_a_checkpoint_is_a_candidate_under_its_number():
    assert candidate_of(checkpoint(5, step=50), _MODEL) == Candidate(_MODEL, "3", 50, 5)


def test_inference_needs_what_the_preset_says_in_its_order():
    spec = RunSpec(inference=("net | model", "head", "absent"))
    assert inference_parts(spec, ["optimizer", "head", "model"], where="x") == ["model", "head"]
    assert inference_parts(RunSpec(), ["b", "a"], where="x") == ["b", "a"]
    with pytest.raises(IncompatibleState, match=r"net \| model, head, absent") as caught:
        inference_parts(spec, ["optimizer"], where="run/abc")
    assert (caught.value.where, caught.value.found) == ("run/abc", "optimizer")
