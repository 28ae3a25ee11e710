"""The patience with a store: attempts, pauses and deadlines of one call, and its errors."""

from __future__ import annotations

import math
import os
import random
import time
from dataclasses import dataclass, replace

from holdfast.backends.errors import InvalidLocation, StoreUnavailable

TIMEOUT = "HOLDFAST_S3_TIMEOUT"
LEAST_RATE = "HOLDFAST_S3_LEAST_RATE"
#: The first advice if nobody answers.
UNREACHED = "Check the endpoint (its name and port) and the network (DNS, routes, proxies). "


def doubt(writes: bool) -> str:
    """Return the end of a hint: the outcome of a write that has no answer is not known."""
    return "; it is not known whether the write was done" if writes else ""


def unanswered(
    said: str, where: str, *, writes: bool = False, advice: str = UNREACHED
) -> StoreUnavailable:
    """Return the error for an answer that did not come, or cannot be used."""
    return StoreUnavailable(
        "the store gave no usable answer, even after retries",
        where=where,
        found=said,
        hint=f"{advice}Try again later{doubt(writes)}.",
    )


def not_proven(said: str, where: str, *, writes: bool = False) -> StoreUnavailable:
    """Return the error for an answer that a proxy or a login page may have given."""
    return StoreUnavailable(
        "something between here and the store answered the request, even after retries",
        where=where,
        expected="an answer that only the store can give",
        found=said,
        hint="Look for a proxy, a login page of the network or a wrong endpoint, and try again"
        f"{doubt(writes)}.",
    )


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to keep trying.

    Attributes:
        deadline_s: No attempt begins later than this after the first, however it failed: a store
            that restarts refuses connections for as long as another one is silent. A store that
            watches its requests also stops the last one then, after the additional time for its
            bytes.
        attempts: The most attempts, including the first; by default as many as there is time for.
        first_s: Upper bound of the first pause; it doubles from pause to pause.
        longest_s: Upper bound of every pause.
        least_bytes_per_s: A request that is slower than this for a third of the deadline is stopped
            and repeated; above 0.
    """

    deadline_s: float = 120.0
    attempts: float = math.inf
    first_s: float = 0.1
    longest_s: float = 20.0
    least_bytes_per_s: float = 4096.0

    @property
    def try_s(self) -> float:
        """The longest time that one attempt may be too slow."""
        return self.deadline_s / 3

    @property
    def connect_s(self) -> float:
        """The longest time to wait for a connection."""
        return min(10.0, self.try_s)

    def pause_s(self, failures: int) -> float:
        """Return a random pause after some failures; full jitter separates writers."""
        # The exponent is bounded because a float overflows beyond 2 ** 1023.
        return random.uniform(0, min(self.longest_s, self.first_s * 2 ** min(failures - 1, 32)))

    def opening(self) -> Patience:
        """Return the patience for a store that has never answered: a sixth of the time."""
        return replace(self, deadline_s=self.deadline_s / 6)

    def allowing(self, size_bytes: int) -> Patience:
        """Return the same patience plus the time for some bytes at the lowest rate."""
        return replace(self, deadline_s=self.deadline_s + size_bytes / self.least_bytes_per_s)


def patience_of_environment() -> Patience:
    """Return how long to wait for a store, from the environment.

    Raises:
        InvalidLocation: A variable is not a positive number.
    """
    usual = Patience()
    return Patience(
        deadline_s=_positive(TIMEOUT, usual.deadline_s),
        least_bytes_per_s=_positive(LEAST_RATE, usual.least_bytes_per_s),
    )


def _positive(name: str, usual: float) -> float:
    text = os.environ.get(name)
    if not text:
        return usual
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    # NaN is refused, too.
    if not 0 < found <= 2**40:
        raise InvalidLocation("not a positive number", where=name, found=repr(text))
    return found


class Attempts:
    """The failures of one call."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._began_s = time.monotonic()
        self._failures = 0

    def left_s(self) -> float:
        """Return the seconds until the deadline; 0 after it."""
        return max(0.0, self._began_s + self._patience.deadline_s - time.monotonic())

    def failed(self, error: StoreUnavailable) -> None:
        """Wait before the next attempt, or raise the error if there is no more attempt.

        A pause takes at most half of the time that is left, so that the last attempts have time.
        """
        self._failures += 1
        left_s = self.left_s()
        if self._failures >= self._patience.attempts or left_s <= self._patience.first_s:
            passed_s = time.monotonic() - self._began_s
            error.add_note(f"tried {self._failures} times in {passed_s:.1f} s")
            raise error
        time.sleep(min(self._patience.pause_s(self._failures), left_s / 2))
