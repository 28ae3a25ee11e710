"""Races for the next slot of a log: how long a loser waits, and when it gives up."""

from __future__ import annotations

import random
import time

#: Seconds for which a writer tries.
PATIENCE_S = 60.0
#: A pause is at most this many times as long as the last attempt was.
_MOST_ATTEMPTS = 64
_LONGEST_PAUSE_S = 10.0


class Races:
    """The races that one commit has lost.

    A pause is measured in attempts, so it fits a folder and a bucket. It doubles with each race, as
    long as there seem to be more writers, and shrinks with the time left: who has waited for long
    tries most often. So nobody is left behind while others win again and again.

    Attributes:
        lost: How many races it has lost.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._began_s = self._tried_s = time.monotonic()
        self.lost = 0

    def lose(self) -> bool:
        """Wait before the next attempt; return whether there is time for one."""
        self.lost += 1
        now_s = time.monotonic()
        left = 1 - (now_s - self._began_s) / self._patience_s
        if left <= 0:
            return False
        if self.lost > 2:
            attempts = min(2 ** min(self.lost - 2, 32), _MOST_ATTEMPTS)
            most_s = min((now_s - self._tried_s) * attempts * left, _LONGEST_PAUSE_S)
            time.sleep(random.uniform(0, most_s))
        self._tried_s = time.monotonic()
        return True
