"""The history of the entries of a pool, read from a run's log, which is never rewritten.

This is the eviction log of Hydra's document, Opponent Pool Versioning: all ratings of every entry
for ever, evicted entries included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from holdfast.registry.errors import Malformed
from holdfast.registry.history.actions import Action, Commit, EvictEntries, Promote, RateMatch
from holdfast.registry.history.log_values import moment


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """A change of an entry, and its rating afterwards.

    Attributes:
        version: The entry.
        event: `promoted`, `rated` (a match was recorded) or `evicted`.
        n: Number of the commit.
        time: The time by the committer's clock; limited to the years 1 to 9999; UTC.
        mu: Its rating.
        sigma: The uncertainty of its rating.
        games: Games that it had played.
        wins: Games that it had won.
        match: The match; only of `rated`.
        reason: The reason; only of `evicted`.
    """

    version: int
    event: Literal["promoted", "rated", "evicted"]
    n: int
    time: datetime
    mu: float
    sigma: float
    games: int = 0
    wins: int = 0
    match: str | None = None
    reason: str | None = None


def pool_events(commits: Iterable[Commit]) -> Iterator[PoolEvent]:
    """Yield the changes of all entries, oldest first.

    Args:
        commits: All commits of a run, in order.
    """
    last: dict[int, PoolEvent] = {}
    for commit in commits:
        time = moment(commit.time_ms)
        for action in commit.actions:
            for event in _events(action, commit.n, time, last):
                last[event.version] = event
                yield event


def _events(
    action: Action, n: int, time: datetime, last: dict[int, PoolEvent]
) -> Iterator[PoolEvent]:
    match action:
        case Promote():
            yield PoolEvent(action.version, "promoted", n, time, action.mu, action.sigma)
        case RateMatch():
            for rated in action.ratings:
                before = _known(last, rated.version, n)
                yield PoolEvent(
                    version=rated.version,
                    event="rated",
                    n=n,
                    time=time,
                    mu=rated.mu,
                    sigma=rated.sigma,
                    games=before.games + rated.games,
                    wins=before.wins + rated.wins,
                    match=action.match,
                )
        case EvictEntries():
            for version in action.versions:
                before = _known(last, version, n)
                yield replace(
                    before, event="evicted", n=n, time=time, match=None, reason=action.reason
                )


def _known(last: dict[int, PoolEvent], version: int, n: int) -> PoolEvent:
    if version not in last:
        raise Malformed(
            "the history is not legal",
            where=f"commit {n}",
            found=f"pool version {version}, which does not exist",
            hint="Run `holdfast verify`; do not write to this run until it is repaired.",
        )
    return last[version]
