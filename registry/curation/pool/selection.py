"""Draw the opponent of a game from the number of the game, without stored state.

The opponent of game g depends on the master seed, the phase, g, the weights and the current pool,
but not on the games before. So a resumed run gets the same opponents, and a game can be drawn again
at any time.

The rule never changes:

1. Two 64-bit words: `SeedSequence(seed, spawn_key=(phase, component, game))`, then
   `generate_state(2, uint64)`. This is the sequence that the phase's component would spawn as its
   child number `game`. No Generator is used, because NumPy promises stable results only of
   SeedSequence.
2. Kind of opponent: the first k such that `word0 * (sum of the weights) >> 64`, in whole numbers,
   is below the sum of the first k weights in the declared order.
3. Entry of the roster: index `word1 * (length) >> 64`, the oldest entry first.
4. Evaluation games have the third word of the same sequence: the first entry of the roster such
   that `word2 * (sum of the weights) >> 64` is below the sum of the weights up to it. The weight of
   an entry is its sigma times 2^32, rounded, and at least 1.

The requirement comes from Hydra's document, Opponent Pool Versioning: the same seed and the same
models in the same order give the same opponents.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np

from holdfast.registry.curation.pool.ratings import DEFAULT
from holdfast.registry.errors import InvalidInput
from holdfast.registry.spec import Draw
from holdfast.registry.values import whole

_WORD_BITS = 64


@dataclass(frozen=True, slots=True)
class Matchup:
    """The opponent of one game.

    Attributes:
        game: The number of the game.
        kind: The source of the opponent; also `self` where a kind has no entry.
        version: Version of the entry; None for `self`.
    """

    game: int
    kind: Literal["self", "roster", "frozen"]
    version: int | None


class Draws:
    """Draws opponents; all games of a phase share it while the pool does not change.

    A kind without an entry (the roster is empty, or no frozen entry has the name) gives its games
    to `self`.
    """

    def __init__(
        self,
        seed: int,
        phase: int,
        component: int,
        kinds: Sequence[Draw] = (),
        roster: Sequence[int] = (),
        frozen: Mapping[str, int] | None = None,
    ) -> None:
        self._seed = whole(seed, "seed")
        # NumPy cuts the numbers of a spawn key into words of 32 bits. Only the last number may have
        # two words, so that no two keys give the same words.
        self._key = whole(phase, "phase", bits=32), whole(component, "component", bits=32)
        self._kinds, self._roster, self._frozen = kinds, roster, frozen or {}
        self._ends = list(accumulate(one.weight for one in kinds))

    def matchups(self, start: int, count: int) -> list[Matchup]:
        """Return the opponents of some games, from number `start` on."""
        first = whole(start, "start")
        return [self.matchup(first + at) for at in range(whole(count, "count", bits=32))]

    def matchup(self, game: int) -> Matchup:
        """Return the opponent of a game."""
        if not self._ends or self._ends[-1] == 0:
            raise InvalidInput(
                "no kind of opponents has a weight", where="draws", expected="a sum above 0"
            )
        game = whole(game, "game")
        first, second, _ = self._words(game)
        one = self._kinds[bisect_right(self._ends, first * self._ends[-1] >> _WORD_BITS)]
        version: int | None = None
        if one.kind == "roster" and self._roster:
            version = self._roster[second * len(self._roster) >> _WORD_BITS]
        elif one.name is not None:
            version = self._frozen.get(one.name)
        return Matchup(game, "self" if version is None else one.kind, version)

    def evaluation(self, game: int, sigmas: Mapping[int, float]) -> Matchup:
        """Return the entry that an evaluation game is for, by the sigma of each entry's rating.

        A sigma that is no uncertainty counts like that of an unknown player.
        """
        sound = (one if 0 < one < math.inf else DEFAULT.sigma for one in sigmas.values())
        ends = list(accumulate(max(1, round(one * 2**32)) for one in sound))
        game = whole(game, "game")
        point = self._words(game)[2] * ends[-1] >> _WORD_BITS
        return Matchup(game, "roster", list(sigmas)[bisect_right(ends, point)])

    def _words(self, game: int) -> list[int]:
        """Return three words of 64 bits."""
        sequence = np.random.SeedSequence(self._seed, spawn_key=(*self._key, game))
        words: list[int] = sequence.generate_state(3, np.uint64).tolist()
        return words
