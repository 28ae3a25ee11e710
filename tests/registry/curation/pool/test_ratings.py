"""Ratings after a game, against numbers of openskill 6.2 and against the formulas of its source."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from openskill.models import PlackettLuce

from holdfast.registry.curation.pool.ratings import DEFAULT, Rating, inherited, rate
from holdfast.registry.errors import InvalidInput

# Four games of the same four players, one after the other, from the default rating on:
# ranks, then mu and sigma of each player afterwards, as openskill 6.2.0 gives them.
_GAMES = [
    (
        [1, 2, 3, 4],
        [
            (27.795252672501135, 8.263571791259416),
            (26.55291815138952, 8.17961798837266),
            (24.689416369722096, 8.084127880168786),
            (20.962412806387245, 8.084127880168786),
        ],
    ),
    (
        [4, 3, 2, 1],
        [
            (23.449590667128696, 7.999541170827328),
            (26.22819136997411, 7.932142372628432),
            (26.305429822707154, 7.945758825571942),
            (23.822586936337466, 8.029011873257781),
        ],
    ),
    (
        [1, 1, 3, 4],
        [
            (24.41185524052305, 7.937657089036449),
            (27.040461612373516, 7.865750769716604),
            (26.995672730034848, 7.7924658748577995),
            (21.316210137523104, 7.875377581322302),
        ],
    ),
    (
        [2, 1, 4, 3],
        [
            (25.918089679385155, 7.794365288417941),
            (29.546128375628488, 7.7977064255060755),
            (22.756180426361297, 7.567067195243281),
            (21.651891445444097, 7.666262921901629),
        ],
    ),
]
_VECTORS = Path(os.environ.get("HOLDFAST_VECTORS", "unset"), "openskill_vectors.json")


def _pairs(ratings):
    return [pytest.approx((rating.mu, rating.sigma), rel=1e-12) for rating in ratings]


def test_a_league_of_four_games():
    ratings = (DEFAULT,) * 4
    for ranks, after in _GAMES:
        ratings = rate(ratings, ranks)
        assert after == _pairs(ratings)


@pytest.mark.skipif(
    not _VECTORS.is_file(), reason="HOLDFAST_VECTORS names no folder with openskill_vectors.json"
)
def test_recorded_vectors():
    vectors = json.loads(_VECTORS.read_text())
    assert (DEFAULT.mu, DEFAULT.sigma) == (vectors["defaults"]["mu"], vectors["defaults"]["sigma"])
    for match in vectors["matches"]:
        after = rate([Rating(*pair) for pair in match["before"]], match["ranks"])
        assert [tuple(pair) for pair in match["after"]] == _pairs(after)
        assert match["ordinal"] == pytest.approx([one.conservative for one in after], rel=1e-12)


def _by_the_formulas(ratings, ranks):
    """Weng and Lin 2011, algorithm 4, for teams of one, after tau was added to each sigma."""
    players = [(one.mu, math.hypot(one.sigma, 25 / 300)) for one in ratings]
    c = math.sqrt(sum(sigma**2 + (25 / 6) ** 2 for _, sigma in players))
    sums = [
        sum(math.exp(mu / c) for (mu, _), rank in zip(players, ranks, strict=True) if rank >= at)
        for at in ranks
    ]
    after = []
    for i, (mu, sigma) in enumerate(players):
        omega = delta = 0.0
        for q, at in enumerate(ranks):
            if at <= ranks[i]:
                p = math.exp(mu / c) / sums[q]
                omega += ((q == i) - p) / ranks.count(at)
                delta += p * (1 - p) / ranks.count(at)
        shrunk = max(1 - delta * sigma**3 / c**3, 1e-4)
        after.append((mu + omega * sigma**2 / c, sigma * math.sqrt(shrunk)))
    return after


@pytest.mark.parametrize("ranks", [[1, 2, 3], [3, 1, 2], [2, 1, 2], [1, 1, 1], [1, 1, 2]])
def test_the_formulas(ranks):
    before = [Rating(25, 8), Rating(30, 2), Rating(10, 1.5)]
    assert _by_the_formulas(before, ranks) == _pairs(rate(before, ranks))


def test_two_players_by_hand():
    # Of equals one wins: p = 1/2, so that mu moves by sigma^2 / 2c.
    winner, loser = rate([DEFAULT, DEFAULT], [1, 2])
    sigma2 = (25 / 3) ** 2 + (25 / 300) ** 2
    moved = sigma2 / 2 / math.sqrt(2 * sigma2 + 2 * (25 / 6) ** 2)
    assert winner.mu == pytest.approx(25 + moved, rel=1e-12)
    assert loser.mu == pytest.approx(25 - moved, rel=1e-12)
    assert winner.sigma == loser.sigma < DEFAULT.sigma


def test_an_uncertainty_never_shrinks_to_less_than_a_hundredth():
    # Of seven the last, of whom little is known: 1/4 + 2/9 + ... + 6/49 of its variance is above 1.
    *_, last = rate([Rating(25, 1)] * 6 + [Rating(25, 1000)], range(7))
    assert last.sigma == pytest.approx(math.hypot(1000, 25 / 300) / 100, rel=1e-12)


def test_a_draw_of_equals_moves_nobody():
    first, second = rate([DEFAULT, DEFAULT], [1, 1])
    assert first.mu == second.mu == 25
    assert first.sigma == second.sigma < DEFAULT.sigma


@pytest.mark.parametrize("ranks", [[10, 20, 20, 30], [-1, 0.25, 0.25, 0.75], [0, 1, 1, 1e300]])
def test_only_the_order_of_ranks_counts(ranks):
    # openskill alone would take 0.25 and 0.75 for a tie.
    before = [Rating(20 + i, 5) for i in range(4)]
    assert rate(before, ranks) == rate(before, [1, 2, 2, 3])


def test_frozen_players_count_and_do_not_move():
    before = [Rating(31, 1.5), DEFAULT, Rating(28, 2.5), Rating(20, 6)]
    free = rate(before, [2, 1, 4, 3])
    held = rate(before, [2, 1, 4, 3], frozen={0, 2})
    assert held == (before[0], free[1], before[2], free[3])
    assert free[0] != before[0]
    assert free[2] != before[2]


def test_the_default_is_that_of_the_library():
    theirs = PlackettLuce()
    assert (DEFAULT.mu, DEFAULT.sigma) == (theirs.mu, theirs.sigma) == (25.0, 25 / 3)
    assert DEFAULT.conservative == 0


def test_conservative():
    assert Rating(31.5, 2.25).conservative == 31.5 - 6.75


@pytest.mark.parametrize(
    ("sigma", "expected"), [(1.0, 25 / 3 / 3), (25 / 9, 25 / 3 / 3), (2.8, 2.8), (8.0, 8.0)]
)
def test_a_promoted_model_inherits(sigma, expected):
    assert inherited(Rating(33.0, sigma)) == Rating(33.0, expected)


def test_numbers_become_floats():
    rating = Rating(25, 8)
    assert (type(rating.mu), type(rating.sigma)) == (float, float)


@pytest.mark.parametrize(
    ("mu", "sigma", "where"),
    [
        (math.nan, 1, "mu"),
        (math.inf, 1, "mu"),
        ("25", 1, "mu"),
        (True, 1, "mu"),
        (10**400, 1, "mu"),
        (None, 1, "mu"),
        (25, math.nan, "sigma"),
        (25, math.inf, "sigma"),
        (25, 0, "sigma"),
        (25, -1, "sigma"),
    ],
)
def test_what_is_no_rating(mu, sigma, where):
    with pytest.raises(InvalidInput) as caught:
        Rating(mu, sigma)
    assert caught.value.where == where
    assert caught.value.expected
    assert caught.value.found


@pytest.mark.parametrize(
    "ratings",
    [
        [Rating(1e4, 1), DEFAULT],
        [DEFAULT, Rating(-1e5, 1)],
        [Rating(1e300, 1), Rating(-1e300, 1)],
        [Rating(25, 1e200), DEFAULT],
    ],
)
def test_ratings_beyond_doubles(ratings):
    with pytest.raises(InvalidInput, match="too far apart") as caught:
        rate(ratings, [1, 2])
    assert caught.value.where == "ratings"


def test_the_library_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "openskill.models", None)
    with pytest.raises(InvalidInput, match="openskill") as caught:
        rate([DEFAULT, DEFAULT], [1, 2])
    assert "[pool]" in caught.value.hint


def test_the_library_is_imported_at_first_use():
    code = (
        "import sys; from holdfast.registry.curation.pool.ratings import DEFAULT, rate;"
        "assert 'openskill' not in sys.modules;"
        "rate([DEFAULT, DEFAULT], [1, 2]); assert 'openskill' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
