"""The history of entries, read from commits."""

from __future__ import annotations

from datetime import UTC, datetime

from holdfast.registry.curation.pool.matches import PoolEvent, pool_events
from holdfast.registry.history.actions import (
    Commit,
    EvictEntries,
    Promote,
    Rated,
    RateMatch,
    SetStatus,
)
from holdfast.registry.values.digest import Digest


def promote(version: int, mu: float, sigma: float) -> Promote:
    manifest = Digest.of(b"a model")
    return Promote(version=version, manifest=manifest, phase="3", step=1, mu=mu, sigma=sigma)


def rated(version: int, mu: float, wins: int, games: int = 1) -> Rated:
    return Rated(version=version, mu=mu, sigma=2.0, games=games, wins=wins)


def commits(*actions_of: list) -> list[Commit]:
    return [
        Commit(n=n, run="run", write="w", author="a", time_ms=n * 1000, actions=tuple(actions))
        for n, actions in enumerate(actions_of)
    ]


def at(n: int) -> datetime:
    return datetime(1970, 1, 1, 0, 0, n, tzinfo=UTC)


def test_every_event_says_how_the_entry_stood_after_it():
    events = pool_events(
        commits(
            [SetStatus(status="running")],
            [promote(1, 25.0, 8.0)],
            [SetStatus(status="running"), promote(2, 30.0, 3.0)],
            [RateMatch(match="m1", ratings=(rated(1, 26.0, 1), rated(2, 29.0, 0)))],
            [
                RateMatch(match="m2", ratings=(rated(1, 27.0, 3, games=4),)),
                promote(3, 20.0, 5.0),
                EvictEntries(versions=(1, 2), reason="too many"),
            ],
            [RateMatch(match="m3", ratings=(rated(2, 28.0, 1),))],
        )
    )
    assert list(events) == [
        PoolEvent(1, "promoted", 1, at(1), 25.0, 8.0),
        PoolEvent(2, "promoted", 2, at(2), 30.0, 3.0),
        PoolEvent(1, "rated", 3, at(3), 26.0, 2.0, games=1, wins=1, match="m1"),
        PoolEvent(2, "rated", 3, at(3), 29.0, 2.0, games=1, wins=0, match="m1"),
        PoolEvent(1, "rated", 4, at(4), 27.0, 2.0, games=5, wins=4, match="m2"),
        PoolEvent(3, "promoted", 4, at(4), 20.0, 5.0),
        PoolEvent(1, "evicted", 4, at(4), 27.0, 2.0, games=5, wins=4, reason="too many"),
        PoolEvent(2, "evicted", 4, at(4), 29.0, 2.0, games=1, wins=0, reason="too many"),
        # Of a match that was under way when it left.
        PoolEvent(2, "rated", 5, at(5), 28.0, 2.0, games=2, wins=1, match="m3"),
    ]


def test_a_run_without_a_pool_has_no_events():
    assert list(pool_events(commits([SetStatus(status="running")], []))) == []
