"""Run specifications: what contradicts itself or names what there is not is refused, and why."""

from __future__ import annotations

import pytest

from holdfast import Monitor
from holdfast.registry.errors import InvalidInput, Malformed
from holdfast.registry.spec import (
    Draw,
    DtypeRule,
    Gate,
    Phase,
    Pool,
    Readiness,
    Retention,
    Row,
    RunSpec,
    Stream,
    Tier,
    Transition,
)
from holdfast.registry.values import InvalidRecord

LOSS = Monitor(metric="loss", mode="min")
ONE, TWO = Phase(name="1", monitors=(LOSS,)), Phase(name="2")


# Retention


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "empty: it would keep nothing; use all=True to keep everything"),
        ({"wait": 3}, "empty: it would keep nothing"),
        ({"all": True, "last": 3}, "contradictory: `all` keeps everything"),
        ({"all": True, "for_days": 3}, "contradictory: `all` keeps everything"),
        ({"best": 1, "counts_protected": True}, "counts_protected is about `last`"),
    ],
)
def test_an_empty_or_contradictory_policy_is_refused(fields, why):
    with pytest.raises(InvalidInput, match="not a retention policy") as caught:
        Retention(**fields)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"last": 0}, "last"),
        ({"best": -1}, "best"),
        ({"every": 0}, "every"),
        ({"for_days": 1.5}, "for_days"),
        ({"last": True}, "last"),
        ({"last": 1, "wait": -1}, "wait"),
    ],
)
def test_a_wrong_number_is_named(fields, place):
    with pytest.raises(
        InvalidInput, match=f"{place}: not a retention policy; expected last, best"
    ) as caught:
        Retention(**fields)
    assert f"found {fields[place]!r}: must be" in str(caught.value)


def test_a_field_that_a_policy_does_not_have_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'newest'"):
        Retention(newest=3)
    with pytest.raises(Malformed, match=r"retention\.newest: is unknown"):
        RunSpec.parse(b'{"retention":{"newest":3}}', where="a preset")
    with pytest.raises(Malformed, match=r"monitors\.0\.mode: is missing"):
        RunSpec.parse(b'{"monitors":[{"metric":"loss"}]}', where="a preset")


def test_policies_compose():
    assert Retention(last=3, best=1, every=10, for_days=2, wait=5, counts_protected=True)
    assert Retention(all=True).last is None


# Phases and tiers


def tier(name: str, **fields) -> Tier:
    return Tier(name=name, retention=Retention(last=1), **fields)


BROKEN_PHASES = {
    "two tiers of a name": (
        lambda: Phase(name="1", tiers=(tier("a"), tier("a"))),
        "tier a is declared twice",
    ),
    "two monitors of a name": (
        lambda: Phase(name="1", monitors=(LOSS, Monitor(metric="x", mode="max", name="loss"))),
        "monitor loss is declared twice",
    ),
    "tiers beside a retention": (
        lambda: Phase(name="1", tiers=(tier("a"),), retention=Retention(last=1)),
        "phase 1: with tiers, retention belongs in each tier",
    ),
    "a tier of an unknown monitor": (
        lambda: Phase(name="1", monitors=(LOSS,), tiers=(tier("a", improves=("los",)),)),
        r"tier a: monitor los: not declared; declared are loss",
    ),
    "best without a monitor": (
        lambda: Phase(name="1", retention=Retention(best=1)),
        "phase 1 keeps its best, but has no monitor",
    ),
    "best of a tier without a monitor": (
        lambda: Phase(name="1", tiers=(Tier(name="a", retention=Retention(best=1)),)),
        "phase 1 keeps its best, but has no monitor",
    ),
    "no cadence": (lambda: Phase(name="1", save_every=0), "greater than or equal to 1"),
    "a name with a slash": (lambda: Phase(name="a/b"), "pattern"),
}


@pytest.mark.parametrize(("make", "why"), BROKEN_PHASES.values(), ids=BROKEN_PHASES.keys())
def test_each_rule_of_a_phase(make, why):
    with pytest.raises(InvalidRecord, match=why):
        make()


# The run as a whole


def change(**fields) -> RunSpec:
    base = {
        "phases": (ONE, TWO),
        "gates": (Gate(name="done", phase="1"),),
        "streams": (
            Stream(name="loss", lifetime="forever"),
            Stream(name="bandit", lifetime="resettable"),
        ),
    }
    return RunSpec(**(base | fields))


def way(**fields) -> Transition:
    base = {
        "from_phase": "1",
        "to_phase": "2",
        "source": "gates/done",
        "rows": (Row(part="model", change="carry"),),
    }
    return Transition(**(base | fields))


BROKEN = {
    "two phases": (lambda: change(phases=(ONE, TWO, ONE)), "phase 1 is declared twice"),
    "two gates": (
        lambda: change(gates=(Gate(name="g", phase="1"), Gate(name="g", phase="2"))),
        "gate g is declared twice",
    ),
    "two streams": (
        lambda: change(streams=(Stream(name="s", lifetime="forever"),) * 2),
        "stream s is declared twice",
    ),
    "monitors beside phases": (
        lambda: change(monitors=(LOSS,)),
        "with declared phases, monitors and retention belong in each phase",
    ),
    "retention beside phases": (
        lambda: change(retention=Retention(last=1)),
        "with declared phases, monitors and retention belong in each phase",
    ),
    "best without a monitor": (
        lambda: RunSpec(retention=Retention(best=1)),
        "retention keeps the best, but there is no monitor",
    ),
    "version without its key": (lambda: change(version=3), "version_key and version belong"),
    "version key alone": (lambda: change(version_key="v"), "version_key and version belong"),
    "gate of no phase": (
        lambda: change(gates=(Gate(name="g", phase="3"),)),
        r"gate of phase 3: not declared; declared are 1, 2",
    ),
    "pool of no phase": (
        lambda: change(pool=Pool(phase="three", size=5)),
        "pool of phase three: not declared",
    ),
    "draw of no gate": (
        lambda: change(
            pool=Pool(phase="2", size=5, draws=(Draw(kind="frozen", weight=1, name="dune"),))
        ),
        "draw of gate dune: not declared",
    ),
    "transition from nowhere": (
        lambda: change(transitions=(way(from_phase="0"),)),
        "transition of phase 0: not declared",
    ),
    "transition to nowhere": (
        lambda: change(transitions=(way(to_phase="3"),)),
        "transition of phase 3: not declared",
    ),
    "anchor of no gate": (
        lambda: change(transitions=(way(anchors=("dune",)),)),
        "anchor dune: not declared",
    ),
    "archive of what is kept for ever": (
        lambda: change(transitions=(way(archives=("loss",)),)),
        r"archived stream loss: not declared; declared are bandit",
    ),
    "unknown dtype": (lambda: DtypeRule(path="*", dtype="float31"), "unknown dtype 'float31'"),
    "a named draw that is not frozen": (
        lambda: Draw(kind="roster", weight=1, name="done"),
        "`frozen` needs a `name`, and no other kind has one",
    ),
    "a frozen draw of nothing": (lambda: Draw(kind="frozen", weight=1), "`frozen` needs a `name`"),
    "a frozen copy without a place": (
        lambda: Row(part="model", change="freeze"),
        "a frozen copy needs either `to` or `companion`",
    ),
    "a frozen copy with two places": (
        lambda: Row(part="model", change="freeze", to="a", companion="b"),
        "a frozen copy needs either `to` or `companion`",
    ),
    "a reset to somewhere": (
        lambda: Row(part="model", change="reset", to="a"),
        "`to` belongs to `carry` and `freeze`",
    ),
    "a cast that is not frozen": (
        lambda: Row(part="model", change="carry", dtype="bfloat16"),
        "`companion` and `dtype` belong to `freeze`",
    ),
    "readiness of anything": (lambda: Readiness(metric="m"), "needs at_least or at_most"),
    "a transition of nothing": (lambda: way(rows=()), "at least 1 item"),
    "a field nobody knows": (lambda: RunSpec(phase=()), "is unknown"),
}


@pytest.mark.parametrize(("make", "why"), BROKEN.values(), ids=BROKEN.keys())
def test_each_rule_of_a_specification(make, why):
    with pytest.raises(InvalidRecord, match=why):
        make()


def test_what_breaks_no_rule_is_taken():
    spec = change(
        transitions=(way(anchors=("done",), archives=("bandit",)),),
        pool=Pool(phase="2", size=3, draws=(Draw(kind="frozen", weight=1, name="done"),)),
    )
    assert spec.transition("1", "2") == spec.transitions[0]
    assert spec.transition("2", "1") is None
    assert RunSpec.parse(spec.encode(), where="x") == spec


def test_a_phase_is_the_declared_one_or_that_of_a_run_that_declares_none():
    assert change().phase("1") == ONE
    free = RunSpec(monitors=(LOSS,), retention=Retention(last=2))
    assert (free.phase("any").name, free.phase("any").monitors) == ("any", (LOSS,))
    assert free.phase("any").retention == Retention(last=2)
    assert free.phase("any").tiers == ()
