"""`pool`: promoting, rating, sampling and listing from a shell."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from tests.registry.cli.calling import Call, CallJson
from tests.registry.curation.pool.league import LEAGUE, player

ENTRY = {
    *("ref", "id", "run", "version", "phase", "step", "promoted", "mu", "sigma", "conservative"),
    *("games", "wins", "win_rate", "frozen", "gate", "evicted"),
}


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A registry with a run `league`: a gate of phase 2, and five checkpoints of phase 3."""
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as opened:
        run = opened.create_run("league", seed=42, preset=LEAGUE)
        run.pins.gates.set("second", run.save(player(1), step=1, phase=2))
        for step in range(2, 7):
            metrics = {"mu": 27.5, "sigma": 1.0}
            run.save(player(step), step=step, phase=3, metrics=metrics)
    return str(tmp_path / "reg")


@pytest.fixture
def full(call: Call) -> None:
    """The gate, and four checkpoints one after another: the first of them has left again."""
    call("pool", "promote", "league/gates/second", "--frozen")
    for step in (2, 3, 4, 5):
        call("pool", "promote", f"league/phase3/step{step}")


def test_promote_says_what_entered(call: Call, url: str) -> None:
    said = call("pool", "promote", "league/gates/second", "--frozen").stdout
    assert said == "league/pool/v0001: mu=25 sigma=8.33333 frozen\n"
    said = call("pool", "promote", "league/latest").stdout
    assert said == "league/pool/v0002: mu=27.5 sigma=2.77778\n"
    assert call("pool", "promote", "league/latest").stdout == said
    said = call("pool", "promote", "league/phase3/step2", "--mu", 30, "--sigma", 4.5).stdout
    assert said == "league/pool/v0003: mu=30 sigma=4.5\n"
    with holdfast.open(url) as opened:
        assert [entry.gate for entry in opened.run("league").pool.roster()] == [
            *("second", None, None)
        ]


def test_promote_refuses_what_is_no_rating(call: Call) -> None:
    call("pool", "promote", "league", "--sigma", 0, status=3)
    call("pool", "promote", "league", "--mu", "nan", status=3)
    call("pool", "promote", "league/phase3/step99", status=4)


@pytest.mark.usefixtures("full")
def test_rate_records_a_match_once(call: Call, call_json: CallJson) -> None:
    for _ in range(2):
        lines = call("pool", "rate", "league", "3:1", "self:2", "v1:3", "--match", "m")
        first, second = lines.stdout.splitlines()
        assert first.startswith("league/pool/v0003: mu=27.")
        assert first.endswith(" 1 game")
        assert second == "league/pool/v0001: mu=25 sigma=8.33333 1 game"
    rated = call_json("pool", "rate", "league", "3:2.5", "4:1")
    assert [set(entry) for entry in rated] == [ENTRY, ENTRY]
    assert [entry["version"] for entry in rated] == [3, 4]
    assert [(entry["games"], entry["win_rate"]) for entry in rated] == [(2, 0.5), (1, 1.0)]


@pytest.mark.usefixtures("full")
def test_rate_refuses_what_is_no_seat(call: Call) -> None:
    for wrong in ("3", "x:1", "3:", ":1", "3:first", "vv3:1"):
        assert "VERSION:RANK" in call("pool", "rate", "league", wrong, "4:1", status=2).stderr
    call("pool", "rate", "league", "3:nan", "4:1", status=3)
    call("pool", "rate", "league", "3:1", status=3)
    call("pool", "rate", "league", "3:1", "99:2", status=4)
    call("pool", "rate", "league", status=2)


@pytest.mark.usefixtures("full")
def test_sample_is_what_the_run_draws(call: Call, call_json: CallJson, url: str) -> None:
    with holdfast.open(url) as opened:
        drawn = opened.run("league").pool.draws(2, 10)
    assert call_json("pool", "sample", "league", "--start", 2) == [
        {"game": one.game, "kind": one.kind, "version": one.version} for one in drawn
    ]
    assert call("pool", "sample", "league", "--start", 2, "-n", 3).stdout.splitlines() == [
        "game  opponent  version",
        "   2  self",
        "   3  frozen    1",
        "   4  self",
    ]


def test_sample_of_a_run_without_opponents(call: Call, url: str) -> None:
    with holdfast.open(url) as opened:
        opened.create_run("plain")
    assert "declares no opponents" in call("pool", "sample", "plain", status=3).stderr


def test_ls_of_an_empty_pool(call: Call, call_json: CallJson) -> None:
    result = call("ls", "league/pool")
    assert (result.stdout, result.stderr) == ("", "no entries yet\n")
    assert call_json("ls", "league/pool") == []


@pytest.mark.usefixtures("full")
def test_ls_lists_who_plays_and_on_request_who_left(
    call: Call, call_json: CallJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    call("pool", "rate", "league", "3:1", "4:2")
    monkeypatch.setenv("HOLDFAST_RUN", "league")
    head, *lines = call("ls", "league/pool").stdout.splitlines()
    assert head.split() == [
        *("version", "phase", "step", "mu", "sigma", "games", "won", "age", "marks")
    ]
    assert [line.split()[0] for line in lines] == ["v0001", "v0003", "v0004", "v0005"]
    assert lines[0].endswith("frozen, gates/second")
    assert " 100% " in lines[1]
    listed = call_json("ls", "league/pool")
    assert [entry["version"] for entry in listed] == [1, 3, 4, 5]
    assert set(listed[0]) == ENTRY
    assert (listed[0]["gate"], listed[0]["frozen"]) == ("second", True)
    assert (listed[0]["win_rate"], listed[1]["win_rate"]) == (None, 1.0)
    assert listed[0]["conservative"] == pytest.approx(0)
    every = call_json("ls", "league/pool", "--evicted")
    assert [entry["version"] for entry in every] == [1, 2, 3, 4, 5]
    assert every[1]["evicted"] == "oldest of more than 3"
    assert "left: oldest of more than 3" in call("ls", "league/pool", "--evicted").stdout
