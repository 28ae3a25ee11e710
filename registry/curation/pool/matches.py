"""The action of a match: new ratings and games of every entry that took part. Pure."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from holdfast.backends.escape import quoted
from holdfast.registry.curation.pool.entries import require_record
from holdfast.registry.curation.pool.promoting import rating_of
from holdfast.registry.curation.pool.ratings import Rating, finite, rate
from holdfast.registry.errors import InvalidInput, Malformed
from holdfast.registry.history import is_text, moment
from holdfast.registry.history.actions import (
    Action,
    Commit,
    EvictEntries,
    Promote,
    Rated,
    RateMatch,
)
from holdfast.registry.history.replay import PoolRecord, RunManifest
from holdfast.registry.values import whole

_LONGEST_ID = 128

#: The rank of each player, by version; `None` is the model in training. Lower is better.
Ranks = Mapping[int | None, float]


def check_ranks(versions: Sequence[int | None], ranks: Sequence[float]) -> Ranks:
    """Return the rank of each player: the mean of its ranks where it had several seats."""
    if len(versions) != len(ranks):
        raise InvalidInput(
            "every seat needs one rank", where="ranks", expected=len(versions), found=len(ranks)
        )
    seats: dict[int | None, list[float]] = {}
    for seat, (version, rank) in enumerate(zip(versions, ranks, strict=True)):
        player = None if version is None else check_version(version, f"versions[{seat}]")
        seats.setdefault(player, []).append(finite(rank, f"ranks[{seat}]"))
    if len(seats) < 2:
        raise InvalidInput(
            "a match needs different players",
            where="versions",
            expected="at least 2 of them",
            found=", ".join(map(str, versions)) or "none",
        )
    return {player: math.fsum(held) / len(held) for player, held in seats.items()}


def check_match(match: object) -> str:
    """Return the identity of a match; a random one where none is given."""
    if match is None:
        return secrets.token_hex(16)
    if isinstance(match, str) and 0 < len(match) <= _LONGEST_ID and is_text(match):
        return match
    raise InvalidInput(
        "not the identity of a match",
        where="match",
        expected=f"a string of 1 to {_LONGEST_ID} characters",
        found=quoted(match),
    )


def check_version(version: object, where: str = "version") -> int:
    """Return a version as an int."""
    return whole(version, where, least=1, what="not a version of the pool")


def rating_match(run: RunManifest, ranks: Ranks, match: str) -> RateMatch:
    """Return the action that rates the entries of a match.

    The model in training plays with its newest rating and is not rated: checkpoints have ratings in
    their metrics. A win means to come first alone; if several players tie for it, none has won.
    """
    entries = {player: require_record(run, player) for player in ranks if player is not None}
    before = [
        rating_of(run, {}) if player is None else _stored(run, entries[player]) for player in ranks
    ]
    players = list(ranks)
    fixed = [
        seat for seat, player in enumerate(players) if player is None or entries[player].frozen
    ]
    after = rate(before, [ranks[player] for player in players], fixed)
    best = min(ranks.values())
    alone = list(ranks.values()).count(best) == 1
    return RateMatch(
        match=match,
        ratings=tuple(
            Rated(
                version=player,
                mu=rating.mu,
                sigma=rating.sigma,
                games=1,
                wins=int(alone and ranks[player] == best),
            )
            for player, rating in zip(players, after, strict=True)
            if player is not None
        ),
    )


def _stored(run: RunManifest, entry: PoolRecord) -> Rating:
    """Return the rating of an entry in the log."""
    try:
        return Rating(entry.mu, entry.sigma)
    except InvalidInput as error:
        raise Malformed(
            "the log has an invalid rating",
            where=f"{run.run_id}/pool/v{entry.version:04d}",
            expected="finite numbers, the uncertainty above 0",
            found=f"mu {entry.mu}, sigma {entry.sigma}",
            hint="Promote its checkpoint again, and play with that entry.",
        ) from error


# The history of the entries of a pool, read from a run's log, which is never rewritten.


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """A change of an entry, and its rating afterwards."""

    version: int  # the entry
    #: `promoted`, `rated` (a match was recorded) or `evicted`.
    event: Literal["promoted", "rated", "evicted"]
    n: int  # number of the commit
    #: The time by the committer's clock; limited to the years 1 to 9999; UTC.
    time: datetime
    mu: float  # its rating
    sigma: float  # the uncertainty of its rating
    games: int = 0  # games that it had played
    wins: int = 0  # games that it had won
    match: str | None = None  # the match; only of `rated`
    reason: str | None = None  # the reason; only of `evicted`


def pool_events(commits: Iterable[Commit]) -> Iterator[PoolEvent]:
    """Yield the changes of all entries, oldest first."""
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
