"""Compute the ratings of players after a game.

This is OpenSkill's PlackettLuce model with its numbers pinned, and the rule by which a promoted
model inherits a rating. The log of a run keeps the ratings.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from holdfast.backends.errors import install_extra
from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput

# Pinned, although openskill 6 has the same defaults: the ratings of a league must stay comparable
# after an upgrade of the library.
_MU = 25.0
_SIGMA = _MU / 3
_BETA = _SIGMA / 2
_KAPPA = 0.0001
_TAU = _MU / 300


def finite(value: object, where: str) -> float:
    """Return a finite number as a float; a text or a truth value is none."""
    if not isinstance(value, bool | str | bytes):
        try:
            number = float(value)  # type: ignore[arg-type]  # this call checks the type
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise InvalidInput(
        "not a finite number", where=where, expected="a finite number", found=quoted(value)
    )


@dataclass(frozen=True, slots=True)
class Rating:
    """An estimate of a player's skill: a normal distribution."""

    mu: float  # its mean, in points of skill; finite
    sigma: float  # its standard deviation, in the same points; finite and above 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "mu", finite(self.mu, "mu"))
        object.__setattr__(self, "sigma", finite(self.sigma, "sigma"))
        if self.sigma <= 0:
            raise InvalidInput(
                "not an uncertainty", where="sigma", expected="above 0", found=self.sigma
            )

    @property
    def conservative(self) -> float:
        """A low estimate of the skill: mu - 3 sigma, OpenSkill's ordinal."""
        return self.mu - 3 * self.sigma


#: The rating of an unknown player.
DEFAULT = Rating(_MU, _SIGMA)


def inherited(rating: Rating) -> Rating:
    """Return the rating with which a copy of a player enters a pool.

    The mean is kept; the uncertainty becomes at least a third of an unknown player's
    (the document of Hydra, Opponent Pool Versioning).
    """
    return Rating(rating.mu, max(rating.sigma, DEFAULT.sigma / 3))


def rate(
    ratings: Sequence[Rating], ranks: Sequence[float], frozen: Collection[int] = ()
) -> tuple[Rating, ...]:
    """Return the ratings after one game of all players against each other."""
    played = _play(ratings, ranks)
    return tuple(
        before if index in frozen else after
        for index, (before, after) in enumerate(zip(ratings, played, strict=True))
    )


def _play(ratings: Sequence[Rating], ranks: Sequence[float]) -> list[Rating]:
    try:
        from openskill.models import PlackettLuce
    except ImportError as error:
        raise InvalidInput(
            "openskill, which rates players, cannot be imported",
            found=error,
            hint=install_extra("pool"),
        ) from error
    model = PlackettLuce(mu=_MU, sigma=_SIGMA, beta=_BETA, kappa=_KAPPA, tau=_TAU)
    teams = [[model.rating(mu=rating.mu, sigma=rating.sigma)] for rating in ratings]
    # The library drops the fraction of a rank: 1.2 and 1.7 would be a tie.
    order = sorted(set(ranks))
    dense = [float(order.index(rank) + 1) for rank in ranks]
    try:
        return [Rating(one.mu, one.sigma) for (one,) in model.rate(teams, ranks=dense)]
    except (ArithmeticError, InvalidInput) as error:
        raise InvalidInput(
            "these ratings are too far apart to compute with",
            where="ratings",
            expected="means within a thousand points of 0",
            found=", ".join(f"{rating.mu:g} ± {rating.sigma:g}" for rating in ratings),
        ) from error
