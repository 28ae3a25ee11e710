"""Draw the opponent of a game from the number of the game, without stored state.

The opponent of game g depends on the master seed, the phase, g, the weights and the current pool,
but not on the games before. So a resumed run gets the same opponents, and a game can be drawn again
at any time.

The rule never changes:

1. Two 64-bit words: `SeedSequence(seed, spawn_key=(phase, component, game))`, then
   `generate_state(2, uint64)`. This is the sequence that the phase's component would spawn as its
   child number `game`. No Generator is used, because NumPy promises stable results only of
   SeedSequence.
2. Category: the first k such that `word0 * (sum of the weights) >> 64`, in whole numbers, is below
   the sum of the first k weights in the declared order.
3. Entry of the roster: index `word1 * (length) >> 64`, the oldest entry first.

The requirement comes from Hydra's document, Opponent Pool Versioning: the same seed and the same
models in the same order give the same opponents.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import index
from typing import Literal, get_args

import numpy as np

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput

#: The source of an opponent: the current weights in all seats; any entry of the roster with equal
#: probability; the frozen entry of a name.
Kind = Literal["self", "roster", "frozen"]

_WORD_BITS = 64


@dataclass(frozen=True, slots=True)
class Category:
    """A share of the games."""

    kind: Kind  # the source of its opponents
    weight: int  # its share, relative to the other categories; a whole number from 0, below 2^32
    name: str | None = None  # the name of the frozen entry; None for the other kinds

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InvalidInput(
                "unknown kind of opponents",
                where="kind",
                expected=", ".join(get_args(Kind)),
                found=quoted(self.kind),
            )
        object.__setattr__(self, "weight", _whole(self.weight, "weight", bits=32))
        named = isinstance(self.name, str) and self.name != ""
        if not (named if self.kind == "frozen" else self.name is None):
            raise InvalidInput(
                f"a wrong name for the kind {self.kind!r}",
                where="name",
                expected="the frozen entry's name" if self.kind == "frozen" else "None",
                found=quoted(self.name),
            )


@dataclass(frozen=True, slots=True)
class Matchup:
    """The opponent of one game.

    Attributes:
        game: The number of the game.
        kind: The source of the opponent; also `self` where a category has no entry.
        version: Version of the entry; None for `self`.
    """

    game: int
    kind: Kind
    version: int | None


def draw(
    seed: int,
    phase: int,
    component: int,
    game: int,
    categories: Sequence[Category],
    roster: Sequence[int],
    frozen: Mapping[str, int],
) -> Matchup:
    """Return the opponent of a game.

    A category without an entry (the roster is empty, or no frozen entry has the name) gives its
    games to `self`.
    """
    return _Draw(seed, phase, component, categories, roster, frozen).matchup(game)


def draws(
    seed: int,
    phase: int,
    component: int,
    categories: Sequence[Category],
    roster: Sequence[int],
    frozen: Mapping[str, int],
    *,
    start: int,
    count: int,
) -> list[Matchup]:
    """Return the opponents of `count` games from number `start` on, each one as `draw` does."""
    table = _Draw(seed, phase, component, categories, roster, frozen)
    first = _whole(start, "start", bits=64)
    return [table.matchup(first + i) for i in range(_whole(count, "count", bits=32))]


class _Draw:
    """The checked arguments that all games of a phase share while the pool does not change."""

    def __init__(
        self,
        seed: int,
        phase: int,
        component: int,
        categories: Sequence[Category],
        roster: Sequence[int],
        frozen: Mapping[str, int],
    ) -> None:
        self._seed = _whole(seed, "seed", bits=64)
        # NumPy cuts the numbers of a spawn key into words of 32 bits. Only the last number may have
        # two words, so that no two keys give the same words.
        self._key = (_whole(phase, "phase", bits=32), _whole(component, "component", bits=32))
        self._categories = tuple(categories)
        self._ends = list(accumulate(category.weight for category in self._categories))
        if not self._ends or self._ends[-1] == 0:
            raise InvalidInput(
                "no category has a weight", where="categories", expected="a sum above 0", found=0
            )
        self._roster = [_version(version, "roster") for version in roster]
        self._frozen = {name: _version(version, name) for name, version in frozen.items()}
        _check_roster(self._roster, set(self._frozen.values()))

    def matchup(self, game: int) -> Matchup:
        game = _whole(game, "game", bits=64)
        first, second = self._words(game)
        point = first * self._ends[-1] >> _WORD_BITS
        category = self._categories[bisect_right(self._ends, point)]
        version: int | None = None
        if category.kind == "roster" and self._roster:
            version = self._roster[second * len(self._roster) >> _WORD_BITS]
        elif category.kind == "frozen" and category.name is not None:
            version = self._frozen.get(category.name)
        return Matchup(game, "self" if version is None else category.kind, version)

    def _words(self, game: int) -> tuple[int, int]:
        sequence = np.random.SeedSequence(self._seed, spawn_key=(*self._key, game))
        first, second = sequence.generate_state(2, np.uint64).tolist()
        return first, second


def _check_roster(roster: Sequence[int], frozen: set[int]) -> None:
    if any(later <= earlier for earlier, later in pairwise(roster)):
        raise InvalidInput(
            "the roster is not in the order of promotion",
            where="roster",
            expected="versions that ascend",
            found=roster,
        )
    both = sorted(frozen & set(roster))
    if both:
        raise InvalidInput(
            "a frozen entry is in the roster",
            where="roster",
            expected="only entries that are not frozen",
            found=f"version {both[0]}, which is frozen",
        )


def _version(value: object, where: str) -> int:
    return _whole(value, where, bits=64, least=1)


def _whole(value: object, where: str, *, bits: int, least: int = 0) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = index(value)  # type: ignore[arg-type]  # this call checks the type
    except TypeError:
        number = -1
    if not least <= number < 2**bits:
        raise InvalidInput(
            "out of range",
            where=where,
            expected=f"a whole number from {least}, below 2^{bits}",
            found=quoted(value),
        )
    return number
