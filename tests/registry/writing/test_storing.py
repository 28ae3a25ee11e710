"""`Storing`: checked when it is made, and refused where nothing can follow it."""

from __future__ import annotations

from operator import attrgetter

import pytest

from holdfast import Storing
from holdfast.registry.errors import InvalidInput
from tests.support.stores import contents


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"compression": "zip"}, "no such compression"),
        ({"keyframe_every": 0}, "not a whole number in range"),
        ({"compression": "none", "keyframe_every": 2}, "without compression"),
        ({"precision": {"model/*": "fp15"}}, "fp16"),
        ({"precision": 16}, "not a precision"),
    ],
)
def test_it_is_checked_when_it_is_made(wrong, said):
    with pytest.raises(InvalidInput, match=said):
        Storing(**wrong)


def test_it_keeps_the_policies_that_it_was_given():
    policies = {"model/*": "bf16"}
    storing = Storing(precision=policies)
    policies["model/*"] = "nonsense"
    assert storing == Storing(precision={"model/*": "bf16"})
    with pytest.raises(AttributeError):
        storing.precision = None
    assert Storing(precision={}) == Storing()


@pytest.mark.parametrize("call", ["save", "save_async", "exchange.push", "checkpointer"])
def test_options_in_another_form_are_refused_and_nothing_written(call, run, backend):
    before = contents(backend)
    options = {} if call == "checkpointer" else {"state": {}, "step": 1}
    with pytest.raises(InvalidInput, match=r"storing.*holdfast\.Storing"):
        attrgetter(call)(run)(**options, storing={"compression": "zstd"})
    assert contents(backend) == before
