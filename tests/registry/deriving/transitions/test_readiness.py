"""What keeps a phase from beginning: each check, and that nothing is committed where one fails."""

from __future__ import annotations

import math

import numpy as np
import pytest

from holdfast.registry.errors import IncompatibleState, InvalidInput, NotFound
from tests.registry.deriving.transitions.world import (
    GOOD,
    ROWS,
    lived,
    over,
    refused,
    spec,
    state,
    target,
)
from tests.support.loads import actions_of

LONG = np.zeros(301, np.float32)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (target(trunk_w=LONG), r"model/trunk\.w is float32\[300\], target float32\[301\]"),
        (
            target(trunk_w=np.zeros(300)),
            r"model/trunk\.w is float32\[300\], target float64\[300\]",
        ),
        (target(head_b=None), r"model/head\.b is not in the target"),
        (target(head_c=LONG), r"model/head\.c is not in the source"),
    ],
    ids=["shape", "dtype", "missing", "unexpected"],
)
def test_a_target_that_differs(reg, given, told):
    refused(lived(reg), IncompatibleState, told, targets={"model": given})


def test_a_strict_part_needs_its_target(reg):
    run = lived(reg)
    refused(run, InvalidInput, r"targets\['model'\]: .*no target is given", targets={})
    refused(
        run,
        InvalidInput,
        r"targets\['modle'\].*not check a part.*model",
        targets={"modle": target()},
    )


def test_a_strict_part_may_have_alternatives(reg):
    run = lived(reg, spec(strict=["weights | model"]))
    refused(run, IncompatibleState, "is not in the target", targets={"model": target(mask=None)})


def test_a_strict_part_that_the_source_lacks(reg):
    run = lived(reg, spec(strict=["weights"]))
    refused(run, IncompatibleState, "weights is not in the source", targets={"weights": target()})


def test_a_strict_part_is_checked_before_rows_take_from_it(reg):
    # The head is reset; a source without it is still another architecture.
    run = lived(reg)
    assert "head.w" not in over(run).state["model"]


@pytest.mark.parametrize(
    ("zero", "told"),
    [
        (["model/trunk*"], r"model/trunk\.w is not zero"),
        (["step"], "step is not zero"),
        (["model/masks*"], r"no tensor that must be zero matches: model/masks\*"),
        (["model/mask*", "*oracle*"], r"no tensor that must be zero matches: \*oracle\*"),
        (["*oracle* | model/head.b"], r"model/head\.b is not zero"),
    ],
)
def test_something_that_must_be_zero_and_is_not(reg, zero, told):
    refused(lived(reg, spec(zero=zero)), IncompatibleState, told)


def test_a_mask_that_is_not_a_number_is_not_zero(reg):
    run = reg.create_run("life", preset=spec(), seed=42)
    run.pins.gates.set("done", run.save(state(1, mask=math.nan), step=1, metrics=GOOD))
    refused(run, IncompatibleState, "model/mask is not zero")


def test_alternatives_of_what_must_be_zero(reg):
    over(lived(reg, spec(zero=["*oracle* | model/mask"])))


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"accuracy": 0.49, "deal_in": 0.2}, r"accuracy is 0\.49, must be at least 0\.5"),
        ({"accuracy": 0.5, "deal_in": 0.21}, r"deal_in is 0\.21, must be at most 0\.2"),
        ({"accuracy": math.nan, "deal_in": math.nan}, "accuracy is nan, .*; deal_in is nan, "),
        ({"accuracy": 0.5}, "deal_in is not known"),
        ({}, "accuracy is not known; deal_in is not known"),
    ],
)
def test_a_metric_that_has_not_got_there(reg, metrics, told):
    refused(lived(reg, metrics=metrics), IncompatibleState, told)


def test_metrics_that_are_given_count_before_those_of_the_source(reg):
    run = lived(reg, metrics={"accuracy": 0.9})
    refused(run, IncompatibleState, "accuracy is 0.1", metrics={"accuracy": 0.1, "deal_in": 0.1})
    over(run, metrics={"deal_in": 0.1, "more": 3})
    (entered,) = run.manifest.phases
    assert entered.ready == {"accuracy": 0.9, "deal_in": 0.1}


def test_metrics_that_are_none_are_refused(reg):
    refused(lived(reg), InvalidInput, "deal_in: a metric is not a number", metrics={"deal_in": "x"})


def test_late_metrics_count(reg):
    run = lived(reg, metrics={})
    run.pins.gates.get("done").report(GOOD)
    over(run)


def test_one_message_tells_everything(reg):
    run = lived(reg, spec(ROWS[:-1], zero=["step"]), metrics={})
    told = (
        r"life/phase1/step00000002 \(gates/done\): phase 2 cannot begin from this checkpoint"
        r".*model/mask is not in the target; step is not zero; accuracy is not known; "
        r"deal_in is not known; no row of the table covers phase"
    )
    refused(run, IncompatibleState, told, targets={"model": target(mask=None)})


def test_a_long_message_is_cut(reg):
    run = lived(reg)
    many = {"model": {f"t{i}": LONG for i in range(20)}}
    refused(run, IncompatibleState, "and 12 more", targets=many)


def test_a_key_without_a_row(reg):
    run = lived(reg)
    run.pins.gates.set("first", run.save({**state(4), "ema": {}}, step=4, metrics=GOOD))
    assert "ema" in run.pins.gates.get("first").components
    other = lived_from(reg, spec(source="gates/first"))
    refused(other, IncompatibleState, "no row of the table covers ema")


def lived_from(reg, declared):
    run = reg.create_run("other", preset=declared, seed=42)
    run.pins.gates.set("first", run.save({**state(1), "ema": {}}, step=1, metrics=GOOD))
    return run


def test_an_unknown_condition(reg):
    rows = [*ROWS, {"part": "extra", "change": "discard", "when": "pgoi"}]
    run = lived(reg, spec(rows))
    refused(run, InvalidInput, "enable: pgo: .*expected pgoi.*pgoi", enable=["pgo"])
    refused(lived_as(reg, "plain"), InvalidInput, "expected none", enable="pgoi")


def lived_as(reg, name):
    run = reg.create_run(name, preset=spec(), seed=42)
    run.pins.gates.set("done", run.save(state(1), step=1, metrics=GOOD))
    return run


def test_a_gate_that_is_not_set(reg):
    run = reg.create_run("life", preset=spec(), seed=42)
    run.save(state(1), step=1)
    refused(run, NotFound, "life/gates/done: no such gate")


def test_an_anchor_that_is_not_set(reg):
    refused(lived(reg, spec(anchors=["first"])), NotFound, "life/gates/first: no such gate")


def test_what_is_made_anew_wrongly(reg):
    refused(
        lived(reg),
        IncompatibleState,
        "other paths than the reset took out",
        initialise={"model/head.*": dict},
    )


def test_what_cannot_be_made_anew(reg):
    run = lived(reg)
    before = actions_of(run)

    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        over(run, initialise={"phase": broken})
    assert actions_of(run.refresh()) == before
