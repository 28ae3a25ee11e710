"""What a match says of those who took part."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.registry.curation.pool.matches import (
    check_match,
    check_ranks,
    check_version,
    rating_match,
)
from holdfast.registry.curation.pool.ratings import DEFAULT, Rating, rate
from holdfast.registry.errors import InvalidInput, NotFound
from holdfast.registry.history.actions import RateMatch
from holdfast.registry.history.replay.apply import MATCHES_KEPT
from tests.registry.curation.pool.league import checkpoint, entry, rated, state


def made(places, *entries, checkpoints=()) -> RateMatch:
    run = state(pool=entries, next_version=len(entries) + 1, checkpoints=checkpoints)
    return rating_match(run, places, "m")


def wins(places) -> dict[int, int]:
    entries = [entry(version) for version in range(1, 5)]
    return {one.version: one.wins for one in made(places, *entries).ratings}


def test_four_players_are_rated_as_openskill_does():
    match = made({3: 1, 1: 2, 4: 3, 2: 4}, *(entry(v, mu=20.0 + v, sigma=6.0) for v in range(1, 5)))
    ratings = rate([Rating(20.0 + v, 6.0) for v in (3, 1, 4, 2)], [1, 2, 3, 4])
    assert [(one.version, one.mu, one.sigma) for one in match.ratings] == [
        (v, r.mu, r.sigma) for v, r in zip((3, 1, 4, 2), ratings, strict=True)
    ]
    assert match.match == "m"


def test_who_comes_first_alone_has_won():
    assert wins({1: 1, 2: 2, 3: 3}) == {1: 1, 2: 0, 3: 0}
    assert wins({1: 5, 2: -2.5}) == {1: 0, 2: 1}
    assert wins({1: 2, 2: 2, 3: 1}) == {1: 0, 2: 0, 3: 1}


def test_nobody_wins_a_tie_for_the_first_place():
    assert wins({1: 1, 2: 1, 3: 2}) == {1: 0, 2: 0, 3: 0}


def test_everybody_has_played_one_game():
    assert [one.games for one in made({1: 1, 2: 1}, entry(1), entry(2)).ratings] == [1, 1]


def test_the_model_in_training_counts_as_a_player_and_is_not_rated():
    newest = checkpoint(1, metrics=rated(35.0, 2.0))
    (only,) = made({None: 1, 1: 2}, entry(1), checkpoints=(newest,)).ratings
    _, expected = rate([Rating(35.0, 2.0), Rating(25.0, 8.0)], [1, 2])
    assert (only.version, only.mu, only.sigma) == (1, expected.mu, expected.sigma)
    assert only.wins == 0
    (only,) = made({None: 1, 1: 2}, entry(1)).ratings
    assert only.mu == rate([DEFAULT, Rating(25.0, 8.0)], [1, 2])[1].mu


def test_a_frozen_entry_weighs_in_and_does_not_move():
    frozen, other = made({1: 1, 2: 2}, entry(1, frozen=True, mu=40.0), entry(2)).ratings
    assert (frozen.mu, frozen.sigma, frozen.games, frozen.wins) == (40.0, 8.0, 1, 1)
    assert other.mu == rate([Rating(40.0, 8.0), Rating(25.0, 8.0)], [1, 2])[1].mu


def test_an_unknown_version_is_named():
    with pytest.raises(NotFound, match="v0003"):
        made({1: 1, 3: 2}, entry(1), entry(2))


# What is given


def test_who_holds_several_seats_plays_once_by_the_mean_of_the_ranks():
    assert check_ranks([None, 7, 7, 7], [2, 1, 3, 4]) == {None: 2.0, 7: 8 / 3}
    assert check_ranks([7, None, 7], [1, 2, 3]) == {7: 2.0, None: 2.0}
    assert list(check_ranks([3, 1, 3, 2], [1, 2, 3, 4])) == [3, 1, 2]


def test_numbers_of_any_library_are_taken():
    assert check_ranks(np.array([1, 2]), np.array([1.0, 2.0])) == {1: 1.0, 2: 2.0}


@pytest.mark.parametrize(
    ("versions", "ranks", "where"),
    [
        ([1, 2], [1], "ranks"),
        ([1], [1, 2], "ranks"),
        ([], [], "versions"),
        ([1], [1], "versions"),
        ([1, 1], [1, 2], "versions"),
        ([None, None], [1, 2], "versions"),
        ([1, 0], [1, 2], "versions[1]"),
        ([1, -3], [1, 2], "versions[1]"),
        ([1.0, 2], [1, 2], "versions[0]"),
        ([True, 2], [1, 2], "versions[0]"),
        (["1", 2], [1, 2], "versions[0]"),
        ([1, 2], [1, float("nan")], "ranks[1]"),
        ([1, 2], [float("inf"), 1], "ranks[0]"),
        ([1, 2], ["1", 2], "ranks[0]"),
        ([1, 2], [True, False], "ranks[0]"),
        ([1, 2], [None, 1], "ranks[0]"),
        ([1, 2], [10**400, 1], "ranks[0]"),
    ],
)
def test_what_is_no_match_is_refused(versions, ranks, where):
    with pytest.raises(InvalidInput) as caught:
        check_ranks(versions, ranks)
    assert caught.value.where == where


def test_a_match_without_a_name_gets_one_of_its_own():
    assert check_match("m") == "m"
    assert check_match("ü" * 128) == "ü" * 128
    assert check_match(None) != check_match(None)


@pytest.mark.parametrize("wrong", ["", "x" * 129, 7, b"m", "\ud800"])
def test_what_is_no_name_of_a_match_is_refused(wrong):
    with pytest.raises(InvalidInput, match="match"):
        check_match(wrong)


def test_versions_are_whole_numbers_from_one():
    assert check_version(np.int64(3)) == 3
    for wrong in (0, -1, 1.5, "1", None, True):
        with pytest.raises(InvalidInput):
            check_version(wrong)


def test_a_match_is_known_again_while_it_is_among_the_newest(run, save):
    for step in (1, 2):
        run.pool.promote(save(step))
    run.pool.record_match([1, 2], [1, 2], match="m")

    def others(count: int) -> None:
        rest = [rating_match(run.manifest, {1: 1, 2: 2}, f"m{count}-{i}") for i in range(count)]
        run.handle.committer.commit(lambda state: rest)

    others(MATCHES_KEPT - 1)
    games = run.manifest.pool[0].games
    assert run.pool.record_match([1, 2], [1, 2], match="m")[0].games == games
    others(1)
    assert run.pool.record_match([1, 2], [1, 2], match="m")[0].games == games + 2
