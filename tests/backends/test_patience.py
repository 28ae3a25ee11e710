"""How long a store is waited for: attempts, time and pauses are bounded."""

from __future__ import annotations

from holdfast.backends import StoreUnavailable
from holdfast.backends.patience import Attempts, Patience


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []

    def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.now_s += pause_s

    def __call__(self) -> float:
        return self.now_s


def given_up(patience: Patience) -> tuple[StoreUnavailable, Clock]:
    """Fail until there is no more attempt; return the error and the clock."""
    clock = Clock()
    attempts = Attempts(patience, clock.sleep, clock)
    for _ in range(10_000):
        try:
            attempts.failed(StoreUnavailable("down"))
        except StoreUnavailable as error:
            return error, clock
    raise AssertionError("it never gives up")


def test_attempts_are_bounded() -> None:
    error, clock = given_up(Patience(attempts=4))
    assert len(clock.pauses) == 3
    assert "tried 4 times" in error.__notes__[0]


def test_time_is_bounded() -> None:
    error, clock = given_up(Patience(attempts=10_000, deadline_s=30))
    assert 1 < len(clock.pauses) < 9_999
    assert clock.now_s <= 30
    assert f"in {clock.now_s:.1f} s" in error.__notes__[0]


def test_pauses_grow_up_to_a_bound_and_differ() -> None:
    patience = Patience(first_s=1, longest_s=8)
    pauses = [[patience.pause_s(n) for _ in range(200)] for n in (1, 2, 3, 4, 9, 5000)]
    for found, most in zip(pauses, (1, 2, 4, 8, 8, 8), strict=True):
        assert most / 2 < max(found) <= most
        assert min(found) < most / 4
