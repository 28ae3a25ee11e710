"""The action of a match: new ratings and games of every entry that took part. Pure."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from operator import index

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput, Malformed
from holdfast.registry.history.actions import Rated, RateMatch
from holdfast.registry.history.replay import PoolRecord, RunManifest
from holdfast.registry.pool.entries import require_record
from holdfast.registry.pool.promotion import rating_of
from holdfast.registry.pool.ratings import Rating, rate

_LONGEST_ID = 128

#: The rank of each player, by version; `None` is the model in training. Lower is better.
Ranks = Mapping[int | None, float]


def check_ranks(versions: Sequence[int | None], ranks: Sequence[float]) -> Ranks:
    """Return the rank of each player: the mean of its ranks where it had several seats.

    Raises:
        InvalidInput: Versions and ranks do not fit each other, one of them is not valid, or fewer
            than two players took part.
    """
    if len(versions) != len(ranks):
        raise InvalidInput(
            "every seat needs one rank", where="ranks", expected=len(versions), found=len(ranks)
        )
    seats: dict[int | None, list[float]] = {}
    for seat, (version, rank) in enumerate(zip(versions, ranks, strict=True)):
        player = None if version is None else check_version(version, f"versions[{seat}]")
        seats.setdefault(player, []).append(_check_rank(rank, f"ranks[{seat}]"))
    if len(seats) < 2:
        raise InvalidInput(
            "a match needs different players",
            where="versions",
            expected="at least 2 of them",
            found=", ".join(map(str, versions)) or "none",
        )
    return {player: math.fsum(held) / len(held) for player, held in seats.items()}


def check_match(match: object) -> str:
    """Return the identity of a match; a random one where none is given.

    Raises:
        InvalidInput: It is not a string of 1 to 128 characters.
    """
    if match is None:
        return secrets.token_hex(16)
    if isinstance(match, str) and 0 < len(match) <= _LONGEST_ID and _is_text(match):
        return match
    raise InvalidInput(
        "not the identity of a match",
        where="match",
        expected=f"a string of 1 to {_LONGEST_ID} characters",
        found=quoted(match),
    )


def check_version(version: object, where: str = "version") -> int:
    """Return a version as an int.

    Raises:
        InvalidInput: It is not a whole number from 1.
    """
    try:
        if isinstance(version, bool):
            raise TypeError
        number = index(version)  # type: ignore[arg-type]  # this call checks the type
    except TypeError:
        number = 0
    if number < 1:
        raise InvalidInput(
            "not a version of the pool",
            where=where,
            expected="a whole number from 1",
            found=quoted(version),
        )
    return number


def rating_match(run: RunManifest, ranks: Ranks, match: str) -> RateMatch:
    """Return the action that rates the entries of a match.

    The model in training plays with its newest rating and is not rated: checkpoints have ratings in
    their metrics. A win means to come first alone; if several players tie for it, none has won.

    Raises:
        NotFound: The pool never had one of the versions.
        InvalidInput: The ratings are too far apart to compute with; openskill is missing.
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


def _check_rank(rank: object, where: str) -> float:
    if not isinstance(rank, bool | str | bytes):
        try:
            number = float(rank)  # type: ignore[arg-type]  # this call checks the type
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise InvalidInput("not a rank", where=where, expected="a finite number", found=quoted(rank))


def _is_text(match: str) -> bool:
    try:
        match.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


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
