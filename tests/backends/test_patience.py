"""How long a store is waited for: time and pauses are bounded, and attempts if that is asked."""

from __future__ import annotations

import pytest

from holdfast.backends import StoreUnavailable
from holdfast.backends.patience import Attempts, Patience


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []

    def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.now_s += pause_s

    def monotonic(self) -> float:
        return self.now_s


def given_up(patience: Patience) -> tuple[StoreUnavailable, Clock]:
    """Fail until there is no more attempt; return the error and the clock."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.backends.patience.time", clock)
        attempts = Attempts(patience)
        with pytest.raises(StoreUnavailable) as raised:
            for _ in range(10_000):
                attempts.failed(StoreUnavailable("down"))
    return raised.value, clock


def test_attempts_are_bounded() -> None:
    error, clock = given_up(Patience(attempts=4))
    assert len(clock.pauses) == 3
    assert "tried 4 times" in error.__notes__[0]


@pytest.mark.parametrize("patience", [Patience(), Patience().opening()])
def test_refused_connection_is_tried_again_until_the_deadline(patience: Patience) -> None:
    """Failures that come at once get the time of those that come by silence, not a count."""
    error, clock = given_up(patience)
    assert 0.98 * patience.deadline_s <= clock.now_s <= patience.deadline_s
    assert len(clock.pauses) < 60, "the pauses grow"
    assert max(clock.pauses) <= patience.longest_s
    assert f"in {clock.now_s:.1f} s" in error.__notes__[0]


def test_pauses_grow_up_to_a_bound_and_differ() -> None:
    patience = Patience(first_s=1, longest_s=8)
    pauses = [[patience.pause_s(n) for _ in range(200)] for n in (1, 2, 3, 4, 9, 5000)]
    for found, most in zip(pauses, (1, 2, 4, 8, 8, 8), strict=True):
        assert most / 2 < max(found) <= most
        assert min(found) < most / 4
