"""What becomes of each part of a state, and what a table cannot say."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.registry.deriving.transitions.rows import Table
from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.spec import Row, Transition
from holdfast.registry.values import InvalidRecord
from tests.registry.deriving.transitions.world import ROWS, WAY, spec, state
from tests.support.states import same

SOURCE = state(5)


def table(rows=None, enabled=(), source=None) -> Table:
    (rules,) = spec(rows).transitions
    return Table(rules.rows, enabled, SOURCE if source is None else source)


def rest(*but: str) -> list[dict]:
    """Return rows that drop everything but some keys."""
    return [{"part": key, "change": "discard"} for key in SOURCE if key not in but]


def carried(rows, enabled=(), initialise=None):
    found = table(rows, enabled)
    assert found.problems == []
    return found.carry_out(initialise or {})


def test_the_whole_table():
    found = table()
    assert found.problems == []
    begun = found.carry_out({})
    assert list(begun.state) == ["model", "teacher", "step"]
    model = SOURCE["model"]
    assert same(begun.state["model"], {key: model[key] for key in ("trunk.w", "mask")})
    halves = {key: value.astype(np.float16) for key, value in model.items()}
    assert same(begun.state["teacher"], halves)
    assert begun.state["step"] == 5
    assert same(
        begun.companions,
        {"anchor": {"model": {key: model[key] for key in ("head.w", "head.b")}}},
    )
    assert found.reseeded == {"data": 1, "engine": 3}


def test_the_report_says_what_became_of_everything_in_the_order_of_the_table():
    head = ("model/head.w", "model/head.b")
    assert [(one.part, one.change, one.to, one.paths, one.why) for one in table().applied] == [
        ("model", "carry", None, (), ""),
        ("model/head.*", "reset", None, head, "a new head"),
        ("model", "freeze", "teacher", (), ""),
        ("model/head.*", "freeze", "anchor", head, ""),
        ("optimizer", "discard", None, (), ""),
        ("rng", "reseed", None, (), ""),
        ("step", "carry", None, (), ""),
        ("phase", "reset", None, (), ""),
    ]


def test_the_order_of_rows_does_not_matter():
    backwards = table(ROWS[::-1]).carry_out({})
    begun = table().carry_out({})
    assert {key: same(backwards.state[key], begun.state[key]) for key in begun.state} == {
        "model": True,
        "teacher": True,
        "step": True,
    }
    assert same(backwards.companions, begun.companions)


def test_frozen_copies_share_nothing_with_what_is_carried():
    begun = carried(
        [
            {"part": "model", "change": "carry"},
            {"part": "model", "change": "freeze", "to": "teacher"},
            {"part": "model", "change": "freeze", "companion": "anchor"},
            *rest("model"),
        ]
    )
    weights = begun.state["model"]["trunk.w"]
    weights += 1
    for frozen in (begun.state["teacher"], begun.companions["anchor"]["model"]):
        assert not np.shares_memory(frozen["trunk.w"], weights)
        assert frozen["trunk.w"][0] + 1 == weights[0]


def test_carried_under_another_name_and_in_part():
    begun = carried(
        [
            {"part": "model", "change": "discard"},
            {"part": "model/head.*", "change": "carry", "to": "head"},
            *rest("model"),
        ]
    )
    assert same(begun.state, {"head": {key: SOURCE["model"][key] for key in ("head.w", "head.b")}})


def test_what_is_taken_out_is_of_the_copy_that_is_named():
    begun = carried(
        [
            {"part": "model", "change": "carry"},
            {"part": "model", "change": "freeze", "to": "teacher"},
            {"part": "teacher/trunk*", "change": "reset"},
            {"part": "teacher/mask", "change": "discard"},
            *rest("model"),
        ]
    )
    assert list(begun.state["teacher"]) == ["head.w", "head.b"]
    assert list(begun.state["model"]) == ["trunk.w", "head.w", "head.b", "mask"]


def test_a_part_of_which_nothing_is_left_is_gone():
    begun = carried(
        [
            {"part": "model", "change": "carry"},
            {"part": "model/*", "change": "reset"},
            *rest("model"),
        ]
    )
    assert begun.state == {}


def test_the_alternative_that_exists_counts():
    rows = [
        {"part": "weights | model", "change": "carry"},
        {"part": "weights/head.* | model/head.*", "change": "reset"},
        {"part": "optim | optimizer", "change": "discard"},
        *rest("model", "optimizer"),
    ]
    found = table(rows)
    assert found.problems == []
    assert [one.part for one in found.applied[:3]] == ["model", "model/head.*", "optimizer"]
    assert list(found.carry_out({}).state["model"]) == ["trunk.w", "mask"]


def test_rows_hold_under_conditions():
    rows = [
        {"part": "model", "change": "carry", "unless": "small"},
        {"part": "model", "change": "discard", "when": "small"},
        {"part": "model/head.*", "change": "carry", "to": "head", "when": "small"},
        *rest("model"),
    ]
    assert list(carried(rows).state) == ["model"]
    assert list(carried(rows, {"small"}).state) == ["head"]


def test_what_is_made_anew_takes_its_place():
    begun = carried(
        None,
        initialise={
            "phase": lambda: 2,
            "model/head.*": lambda: {
                "head.w": np.zeros(30, np.float32),
                "head.b": np.ones(2, np.float32),
            },
        },
    )
    assert begun.state["phase"] == 2
    assert list(begun.state["model"]) == ["trunk.w", "head.w", "head.b", "mask"]
    assert begun.state["model"]["head.w"].shape == (30,)
    assert begun.companions["anchor"]["model"]["head.w"][0] == 5.25  # as it was


def test_an_alternative_names_what_is_made_anew():
    rows = [{"part": "optim | optimizer", "change": "reset"}, *rest("optimizer")]
    for name in ("optim", "optimizer", "optim | optimizer"):
        assert carried(rows, initialise={name: lambda: "fresh"}).state == {"optimizer": "fresh"}


def test_a_part_that_is_new_can_be_made():
    rows = [{"part": "roster | pool", "change": "reset"}, *rest()]
    assert carried(rows, initialise={"pool": dict}).state == {"roster": {}}


HEAD = {"head.w": np.zeros(20, np.float32), "head.b": np.zeros(2, np.float32)}


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ({"head.w": HEAD["head.w"]}, "expected head.w, head.b; found head.w"),
        ({**HEAD, "trunk.w": 1}, "other paths than the reset took out"),
        ({**HEAD, "head.b": np.zeros(2)}, "model/head.b: .*expected float32; found float64"),
        ({**HEAD, "head.b": [0.0, 0.0]}, "model/head.b: .*expected float32; found list"),
    ],
)
def test_what_is_made_anew_must_be_what_was_taken_out(made, told):
    with pytest.raises(IncompatibleState, match=told):
        table().carry_out({"model/head.*": lambda: made})


def test_only_what_is_reset_can_be_made_anew():
    with pytest.raises(InvalidInput, match=r"initialise\['phas'\].*expected.*phase.*phase"):
        table().carry_out({"phas": dict})
    with pytest.raises(InvalidInput, match="only parts that the transition resets"):
        table().carry_out({"optimizer": dict})


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (rest("rng"), "no row of the table covers rng"),
        ([{"part": "rng/*", "change": "carry"}, *rest("rng")], "no row of the table covers rng"),
        ([{"part": "ema", "change": "carry"}, *rest()], "there is nothing to carry: ema"),
        ([{"part": "ema | ema2", "change": "freeze", "to": "x"}, *rest()], "there is nothing"),
        (
            [{"part": "model", "change": "carry"}, {"part": "model/tail*", "change": "reset"}],
            "there is nothing to reset: model/tail*",
        ),
        ([{"part": "model/head.*", "change": "reset"}, *rest()], "there is nothing to reset"),
        (
            [
                {"part": "model", "change": "carry"},
                {"part": "rng", "change": "carry", "to": "model"},
            ],
            "two rows make model",
        ),
        (
            [{"part": "model", "change": "freeze", "companion": "anchor"}] * 2,
            "two rows make model of companion anchor",
        ),
        (
            [{"part": "model", "change": "carry"}, *rest()],
            "two rows about model: one makes it, one does not",
        ),
    ],
)
def test_a_table_that_does_not_fit_the_source(rows, told):
    assert told in "; ".join(table(rows).problems)


def test_what_is_not_there_need_not_be_dropped():
    rows = [
        {"part": "scaler", "change": "discard"},
        {"part": "sampler", "change": "reseed"},
        {"part": "rng2", "change": "reset"},
        *rest(),
    ]
    found = table(rows)
    assert found.problems == []
    assert found.reseeded == {"sampler": None}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"part": "a", "change": "freeze"}, "either `to` or `companion`"),
        ({"part": "a", "change": "freeze", "to": "b", "companion": "c"}, "either `to` or"),
        ({"part": "a", "change": "freeze", "to": "b", "dtype": "half"}, "unknown dtype 'half'"),
        ({"part": "a", "change": "carry", "companion": "c"}, "belong to `freeze`"),
        ({"part": "a", "change": "carry", "dtype": "float16"}, "belong to `freeze`"),
        ({"part": "a", "change": "discard", "to": "b"}, "`to` belongs to"),
        ({"part": "a", "change": "reset", "seeds": {"x": 1}}, "`seeds` belongs to `reseed`"),
        ({"part": "a/*", "change": "reseed"}, "needs a whole key"),
        ({"part": "a | b/c", "change": "carry"}, "all keys, or all patterns"),
        ({"part": "a*/b", "change": "reset"}, "a key must be written out"),
        ({"part": "model*", "change": "discard"}, "a key must be written out"),
        ({"part": "", "change": "carry"}, "at least 1 character"),
        ({"part": "a", "change": "carry", "when": "x", "unless": "x"}, "never"),
        ({"part": "a", "change": "melt"}, "must be 'carry'"),
        ({"part": "a", "change": "reseed", "seeds": {"x": -1}}, "greater than or equal to 0"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(row, told):
    with pytest.raises(InvalidRecord, match=told):
        Row(**row)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"source": "tags/mine"}, "source"),
        ({"source": "gates/../x"}, "source"),
        ({"rows": []}, "at least 1 item"),
        ({"ready": [{"metric": "accuracy"}]}, "needs at_least or at_most"),
    ],
)
def test_a_transition_that_cannot_be_carried_out_is_refused(change, told):
    with pytest.raises(InvalidRecord, match=told):
        Transition.of({**WAY, **change})


def test_the_conditions_of_a_transition():
    rows = [
        {"part": "a", "change": "carry", "when": "x"},
        {"part": "b", "change": "carry", "unless": "y"},
        {"part": "c", "change": "carry"},
    ]
    assert spec(rows).transitions[0].conditions == {"x", "y"}
