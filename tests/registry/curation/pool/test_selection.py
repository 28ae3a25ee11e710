"""The draw of opponents, against answers worked out by hand from the words of the seed sequence.

The words below come from an implementation of SeedSequence that is not NumPy's; it gives all of the
recorded vectors.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from holdfast.registry.curation.pool.selection import Draws, Matchup
from holdfast.registry.errors import InvalidInput
from holdfast.registry.spec import Draw


def _kind(kind, weight, name=None):
    return Draw(kind=kind, weight=weight, name=name)


_HYDRA = [_kind("self", 50), _kind("roster", 30), _kind("frozen", 20, "distill_best")]
_FROZEN = {"distill_best": 1, "bc_best": 2}
_ROSTER = [3, 5, 6, 7, 9]
_VECTORS = Path(
    os.environ.get("HOLDFAST_VECTORS", "vectors-not-given"), "seedsequence_vectors.json"
)

# Master seed 42, phase 3, component 4: game, both words, word0 * 100 >> 64, word1 * 5 >> 64.
_WORDS = [
    (0, 0x33A9A5F6DC21DCCE, 0x45426007DBCE1213, 20, 1),
    (1, 0x49841ABECA6A2B7B, 0x53CD32EC11042C97, 28, 1),
    (2, 0x703D2FDB7044D784, 0xDE6282EB5651CEED, 43, 4),
    (3, 0xD3FEF0B0E709B00B, 0xA12F2865BAB0F51B, 82, 3),
    (4, 0x6C62CC6FDCACF34C, 0xCDD0A9550C2FAA28, 42, 4),
    (5, 0x57DD3E28793FA70B, 0x7E34CC27BD57E9C9, 34, 2),
    (6, 0x1C488F5B2796B78D, 0x3EAC2866E790659B, 11, 1),
    (7, 0xA9D1BF3FD35E10F2, 0x5E4299485424D757, 66, 1),
    (8, 0x2269F93576B41069, 0x024DE68797CC909C, 13, 0),
    (9, 0xBDA82D94E04D031C, 0x6E4CCED8FAF0BC75, 74, 2),
    (2**32, 0xB692B55DBF3B2806, 0x00B7CCA5494CBF8A, 71, 0),
]


def _draw(game, categories=_HYDRA, roster=_ROSTER, frozen=_FROZEN, *, seed=42, phase=3, part=4):
    return Draws(seed, phase, part, categories, roster, frozen).matchup(game)


def _draws(count, categories=_HYDRA, roster=_ROSTER, frozen=_FROZEN, *, start=0, seed=42):
    return Draws(seed, 3, 4, categories, roster, frozen).matchups(start, count)


# Known answers


@pytest.mark.parametrize(
    ("game", "kind", "version"),
    [
        (0, "self", None),
        (1, "self", None),
        (2, "self", None),
        (3, "frozen", 1),
        (4, "self", None),
        (5, "self", None),
        (6, "self", None),
        (7, "roster", 5),
        (8, "self", None),
        (9, "roster", 6),
        (2**32, "roster", 3),
    ],
)
def test_known_answers(game, kind, version):
    assert _draw(game) == Matchup(game, kind, version)


def test_the_last_game_of_the_last_seed():
    # Words 10084968223603114164 and 13677543088067993000: 54 of 100, and 3 of 5.
    game = 2**64 - 1
    assert _draw(game, seed=2**64 - 1) == Matchup(game, "roster", 7)


@pytest.mark.parametrize(("game", "first", "second", "point", "place"), _WORDS)
def test_the_words(game, first, second, point, place):
    sequence = np.random.SeedSequence(42, spawn_key=(3, 4, game))
    assert sequence.generate_state(2, np.uint64).tolist() == [first, second]
    assert (first * 100 >> 64, second * 5 >> 64) == (point, place)


@pytest.mark.parametrize(("game", "point"), [(row[0], row[3]) for row in _WORDS])
def test_the_end_of_a_category(game, point):
    below = [_kind("roster", point + 1), _kind("self", 99 - point)]
    beyond = [_kind("roster", point), _kind("self", 100 - point)]
    assert _draw(game, below).kind == "roster"
    assert _draw(game, beyond).kind == "self"


@pytest.mark.parametrize(("game", "second"), [(row[0], row[2]) for row in _WORDS])
@pytest.mark.parametrize("length", [1, 2, 3, 20, 1000])
def test_the_place_in_the_roster(game, second, length):
    roster = [10 + 3 * i for i in range(length)]
    place = second * length // 2**64
    assert _draw(game, [_kind("roster", 1)], roster) == Matchup(game, "roster", roster[place])


def test_a_game_has_the_words_of_a_child_of_its_component():
    children = np.random.SeedSequence(42, spawn_key=(3, 4)).spawn(10)
    for game, first, second, *_ in _WORDS[:10]:
        assert children[game].generate_state(2, np.uint64).tolist() == [first, second]


@pytest.mark.skipif(
    not _VECTORS.is_file(), reason="HOLDFAST_VECTORS names no folder with seedsequence_vectors.json"
)
def test_recorded_vectors():
    for case in json.loads(_VECTORS.read_text())["cases"]:
        child = np.random.SeedSequence(case["master_seed"], spawn_key=tuple(case["spawn_key"]))
        assert child.generate_state(8).tolist() == case["generate_state_8_uint32"]
        assert child.generate_state(4, np.uint64).tolist() == case["generate_state_4_uint64"]


@pytest.mark.parametrize(
    ("seed", "words"),
    [
        (0, [11881732071669168544, 8275903241921097466]),
        (42, [11013303292677194616, 17208274257972668290]),
        (2712847316, [396960534474927485, 12410633884671435716]),
        (2**64 - 1, [8419419116624203986, 4560683908649598754]),
    ],
)
def test_the_component_of_opponent_selection(seed, words):
    child = np.random.SeedSequence(seed, spawn_key=(3, 4))
    assert child.generate_state(2, np.uint64).tolist() == words


# Shares


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (0, {None: 4974, 1: 2017, 3: 592, 5: 625, 6: 623, 7: 593, 9: 576}),
        (42, {None: 4999, 1: 1990, 3: 637, 5: 583, 6: 591, 7: 612, 9: 588}),
    ],
)
def test_shares(seed, expected):
    matchups = _draws(10_000, seed=seed)
    assert Counter(matchup.version for matchup in matchups) == expected
    # Five standard deviations of 10,000 games, for numbers that are to be looked at by people.
    assert abs(expected[None] - 5000) < 250
    assert abs(expected[1] - 2000) < 200
    assert all(abs(expected[version] - 600) < 120 for version in _ROSTER)


def test_only_the_ratio_of_weights_counts():
    thirds = [_kind("self", 5), _kind("roster", 3), _kind("frozen", 2, "distill_best")]
    assert _draws(300, thirds) == _draws(300)


def test_the_order_of_the_categories_counts():
    assert _draws(300, _HYDRA[::-1]) != _draws(300)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_weight_of_zero_draws_nothing(place):
    categories = [*_HYDRA[:place], _kind("frozen", 0, "bc_best"), *_HYDRA[place:]]
    assert _draws(300, categories) == _draws(300)


# Independence


def test_a_game_depends_on_no_other():
    together = _draws(200)
    assert [matchup.game for matchup in together] == list(range(200))
    assert [_draw(game) for game in reversed(range(200))] == together[::-1]
    assert _draws(50, start=150) == together[150:]
    assert _draws(0) == []


@pytest.mark.parametrize("other", [{"seed": 43}, {"phase": 2}, {"part": 3}])
def test_seed_phase_and_component_each_count(other):
    assert [_draw(game, **other) for game in range(50)] != _draws(50)


def test_another_entry_at_one_place_changes_its_games_alone():
    changed = 0
    for old, new in zip(_draws(2000), _draws(2000, roster=[3, 5, 6, 8, 9]), strict=True):
        if old.version == 7:
            changed += 1
            assert new == Matchup(old.game, "roster", 8)
        else:
            assert new == old
    assert changed == 132


def test_eviction_and_promotion_change_games_of_the_roster_alone():
    pairs = list(zip(_draws(2000), _draws(2000, roster=[5, 6, 7, 9, 10, 11]), strict=True))
    assert any(old != new for old, new in pairs)
    assert all(old == new for old, new in pairs if old.kind != "roster")
    assert all(new.kind == "roster" for old, new in pairs if old.kind == "roster")


# Nobody to give


def test_an_empty_roster_gives_its_games_to_self():
    for old, new in zip(_draws(300), _draws(300, roster=[]), strict=True):
        assert new == (Matchup(old.game, "self", None) if old.kind == "roster" else old)


def test_a_frozen_entry_that_is_not_there_gives_its_games_to_self():
    for old, new in zip(_draws(300), _draws(300, frozen={"bc_best": 2}), strict=True):
        assert new == (Matchup(old.game, "self", None) if old.kind == "frozen" else old)


def test_nobody_at_all():
    assert {m.kind for m in _draws(50, [_kind("roster", 1)], [], {})} == {"self"}


# What is refused


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"seed": True}, "seed"),
        ({"phase": -1}, "phase"),
        ({"phase": 2**32}, "phase"),
        ({"phase": "3"}, "phase"),
        ({"component": -1}, "component"),
        ({"component": 2**32}, "component"),
        ({"game": -1}, "game"),
        ({"game": 2**64}, "game"),
        ({"game": None}, "game"),
        ({"kinds": []}, "draws"),
        ({"kinds": [_kind("self", 0), _kind("roster", 0)]}, "draws"),
    ],
)
def test_what_cannot_be_drawn(changed, where):
    arguments = {
        "seed": 42,
        "phase": 3,
        "component": 4,
        "kinds": _HYDRA,
        "roster": _ROSTER,
        "frozen": _FROZEN,
    }
    game, changed = changed.get("game", 0), {**changed}
    changed.pop("game", None)
    assert Draws(**arguments).matchup(0).kind == "self"
    _refused(lambda: Draws(**arguments | changed).matchup(game), where)


@pytest.mark.parametrize(
    ("start", "count", "where"),
    [(-1, 1, "start"), (0, -1, "count"), (0, 1.5, "count"), (2**64 - 1, 2, "game")],
)
def test_games_that_there_are_not(start, count, where):
    _refused(lambda: _draws(count, start=start), where)


def _refused(act, where):
    with pytest.raises(InvalidInput) as caught:
        act()
    assert caught.value.where == where
    assert caught.value.expected


def test_numbers_of_numpy_are_taken():
    # Their products would overflow: they have to become Python's first.
    drawn = Draws(np.uint64(42), np.int8(3), np.int8(4), _HYDRA, _ROSTER, _FROZEN)
    for game in range(50):
        assert drawn.matchup(np.int64(game)) == _draw(game)
        assert type(drawn.matchup(np.int64(game)).game) is int


def test_the_arguments_are_left_alone():
    roster, frozen = list(_ROSTER), dict(_FROZEN)
    _draws(20, roster=roster, frozen=frozen)
    assert (roster, frozen) == (_ROSTER, _FROZEN)
