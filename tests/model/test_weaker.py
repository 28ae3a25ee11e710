"""Every protocol that was weighed and rejected loses a checkpoint; the search finds how."""

from __future__ import annotations

import pytest

from tests.model import weaker
from tests.model.explorer import explore, tell
from tests.model.weaker import Scheme, Weaker

#: Each with the length of its shortest counterexample.
REJECTED = {
    "no protection": (weaker.NO_PROTECTION, 5),
    "a hit puts the object again": (weaker.PUT_AGAIN, 6),
    "leases that expire": (weaker.LEASES_THAT_EXPIRE, 10),
    "leases, and a DELETE that lands late": (weaker.LEASES_AND_LATE_DELETES, 11),
    "commit, then check": (weaker.COMMIT_THEN_CHECK, 6),
}


@pytest.mark.parametrize("name", REJECTED)
def test_a_weaker_protocol_is_unsafe(name: str) -> None:
    scheme, steps = REJECTED[name]
    outcome = explore(Weaker(scheme))
    assert not outcome.safe, f"{name} was found safe in {outcome.states} states"
    assert len(outcome.trace) == steps, tell(outcome)
    print(f"{name}: {steps} steps\n{tell(outcome)}")


def test_leases_are_safe_only_where_nothing_fails() -> None:
    """So it is the expiry, and the late DELETE, that break them, and not the model."""
    outcome = explore(Weaker(weaker.LEASES_IN_A_PERFECT_WORLD))
    assert outcome.safe, tell(outcome)
    assert ("the sweeper", "deletes") in outcome.kinds
    assert ("writer 0", "commits") in outcome.kinds


@pytest.mark.parametrize("left_out", ["sees no sweep", "sees no lease"])
def test_leases_need_both_sides_to_look(left_out: str) -> None:
    perfect = weaker.LEASES_IN_A_PERFECT_WORLD
    writer = tuple(step for step in perfect.writer if step != left_out)
    sweeper = tuple(step for step in perfect.sweeper if step != left_out)
    assert not explore(Weaker(Scheme(writer, sweeper))).safe
