"""The three modes of a start: what is carried, reset and reseeded, and what is refused."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from holdfast import Registry, Run
from holdfast.registry.errors import Conflict, Fenced, IncompatibleState, InvalidInput, NotFound
from holdfast.registry.spec import RunSpec
from tests.support.loads import actions_of
from tests.support.states import same

CONFIG = {"iterations": 50, "solver": {"name": "highs", "tolerance": 1e-9}, "paths": [1, 2]}


def spec(**more: Any) -> RunSpec:
    declared = {
        "phases": [{"name": "training"}],
        "warm_start": [
            {"part": "cuts", "change": "carry", "why": "the policy"},
            {"part": "cuts/*/basis", "change": "discard"},
            {"part": "rng", "change": "reseed", "seeds": {"scenarios": 2}},
            {"part": "iteration", "change": "reset"},
        ],
        "compatible_keys": ["meta/dimension", "meta/stages"],
        "must_match": ["config", "input_hash"],
        "sources": ["bandit/arms", "streams/state/arms"],
    }
    return RunSpec.of({**declared, **more})


def state(i: int = 3) -> dict[str, Any]:
    return {
        "cuts": [{"slope": np.arange(8.0) + i, "basis": np.ones(3, np.uint8)} for _ in range(2)],
        "rng": 2**90 + i,
        "iteration": i,
        "history": [0.5] * i,
        "meta": {"dimension": 8, "stages": 2},
    }


FITS = {"meta/dimension": 8, "meta/stages": 2}
ALL: dict[str, Any] = {"sources": {"bandit/arms": [], "streams/state/arms": []}}
GIVEN: dict[str, Any] = {"config": CONFIG, "input_hash": "abc"}


@pytest.fixture
def run(reg: Registry) -> Run:
    made = reg.create_run("old", preset=spec(), seed=7, **GIVEN)
    for i in (1, 2, 3):
        made.save(state(i), step=i)
    return made


def again(reg: Registry, **given: Any) -> Run:
    return reg.run("old", create=True, preset=spec(), **{**GIVEN, **given})


# Fresh


def test_fresh_is_the_seed_and_nothing_else(reg: Registry) -> None:
    run = reg.create_run("new", preset=spec(), seed=7)
    found = run.phases.start("fresh")
    assert (found.state, found.source, found.report) == ({}, None, ())
    assert found.seeds["scenarios"].spawn_key == (1, 2)
    assert actions_of(run) == [["run.create"]]
    run.save(state(1), step=1)
    with pytest.raises(Conflict, match=r"cannot start in mode fresh.*step 1"):
        run.phases.start("fresh")


# Warm start


def test_a_warm_start_carries_what_the_rows_say(run: Run, reg: Registry) -> None:
    new = reg.create_run("new", preset=spec(), seed=8)
    found = new.phases.start("warm_start", run.latest(), expected=FITS)
    assert same(found.state, {"cuts": [{"slope": np.arange(8.0) + 3} for _ in range(2)]})
    assert found.seeds["scenarios"].entropy == 8
    assert {(one.part, one.change) for one in found.report} == {
        ("cuts", "carry"),
        ("cuts/*/basis", "discard"),
        ("rng", "reseed"),
        ("iteration", "reset"),
        ("history", "reset"),
        ("meta", "reset"),
    }
    assert actions_of(new)[-1] == ["run.take_over", "phase.enter"]
    (record,) = new.manifest.phases
    assert (record.source, record.manifest) == ("old/training/step00000003", run.latest().digest)
    assert record.name is None
    new.save(state(0), step=0)  # steps begin again
    with pytest.raises(Conflict, match="cannot start in mode warm_start"):
        new.phases.start("warm_start", run.latest(), expected=FITS)


def test_a_warm_start_that_died_is_repeated(run: Run, reg: Registry) -> None:
    new = reg.create_run("new", preset=spec(), seed=8)
    first = new.phases.start("warm_start", run.latest(), expected=FITS)
    before = actions_of(new)
    other = reg.run("new")
    second = other.phases.start("warm_start", run.latest(), expected=FITS)
    assert same(first.state, second.state)
    assert actions_of(other) == before
    other.save(state(1), step=1)
    other.phases.pivot("one")  # its seeds are those of a first pivot
    assert [one.name for one in other.manifest.pivots] == ["one"]


def test_a_run_without_a_table_says_what_it_carries(run: Run, reg: Registry) -> None:
    new = reg.create_run("new")
    with pytest.raises(InvalidInput, match="no rows for a warm start are given"):
        new.phases.start("warm_start", run.latest())
    found = new.phases.start("warm_start", run.latest(), carry=["cuts", "meta"])
    assert list(found.state) == ["cuts", "meta"]
    one = reg.create_run("inferring", preset=RunSpec(inference=("cuts | policy",)))
    assert list(one.phases.start("warm_start", run.latest()).state) == ["cuts"]
    with pytest.raises(IncompatibleState, match="nothing to carry: policy"):
        reg.create_run("third").phases.start("warm_start", run.latest(), carry="policy")


# Resume


def test_resume_is_everything(run: Run, reg: Registry) -> None:
    other = again(reg)
    found = other.phases.start("resume", expected=FITS, **ALL)
    assert same(found.state, state(3))
    assert (found.source, found.seeds, found.skipped) == (run.latest(), {}, ())
    other.save(state(4), step=4)
    assert other.latest().step == 4
    found = other.phases.start("resume", other.checkpoints()[1], expected=FITS, **ALL)
    assert same(found.state, state(2))
    other.save(state(3), step=3)


def test_there_must_be_something_to_resume(reg: Registry) -> None:
    run = reg.create_run("new")
    with pytest.raises(NotFound, match="no checkpoint to resume from"):
        run.phases.start("resume")
    assert run.restore() is None


@pytest.mark.parametrize("mode", ["resume", "warm_start"])
def test_what_does_not_fit_is_refused_before_anything_is_read(
    run: Run, reg: Registry, mode: Any
) -> None:
    other = again(reg) if mode == "resume" else reg.create_run("new", preset=spec())
    given = ALL if mode == "resume" else {"source": run.latest()}
    before = actions_of(other)
    for wrong, message in [
        ({"meta/dimension": 9, "meta/stages": 3}, "dimension is 8, expected 9.*stages is 2, exp"),
        ({**FITS, "meta/hydros": 4}, "meta/hydros is absent, expected 4"),
    ]:
        with pytest.raises(IncompatibleState, match=message):
            other.phases.start(mode, expected=wrong, **given)
    with pytest.raises(InvalidInput, match="missing: meta/stages"):
        other.phases.start(mode, expected={"meta/dimension": 8}, **given)
    assert actions_of(other) == before
    # The handle did not resume: it may not begin before another one's newest step.
    if mode == "resume":
        with pytest.raises(Fenced, match="another trainer"):
            other.save(state(1), step=0)


def test_another_configuration_is_refused_with_a_readable_diff(run: Run, reg: Registry) -> None:
    other = {"iterations": 60, "solver": {"name": "highs", "threads": 4}, "paths": [1, 2, 3]}
    with pytest.raises(Conflict) as caught:
        again(reg, config=other)
    text = str(caught.value)
    for line in (
        "\n  ~ iterations: 50 -> 60",
        "\n  + solver/threads: 4",
        "\n  + paths/2: 3",
        "\n  - solver/tolerance: 1e-09",
    ):
        assert line in text
    assert "name" not in text.split("given:")[1].split("\n", 1)[1].split("(")[0]
    many = {f"k{n}": n for n in range(40)}
    with pytest.raises(Conflict, match=r"\.\.\. and 2\d more"):
        again(reg, config=many)
    with pytest.raises(Conflict, match="other input data"):
        again(reg, input_hash="abd")


def test_a_resume_without_what_must_match_is_refused(run: Run, reg: Registry) -> None:
    for given, missing in [({}, "config=..., input_hash=..."), ({"config": CONFIG}, "input_hash")]:
        opened = reg.run("old", **given)
        for resume in (
            opened.restore,
            lambda one=opened: one.phases.start("resume", expected=FITS, **ALL),
        ):
            with pytest.raises(InvalidInput, match=missing):
                resume()
    assert reg.run("old", **GIVEN).restore().checkpoint == run.latest()


def test_by_default_another_configuration_is_only_warned_of(
    reg: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    reg.create_run("free", config=CONFIG).save(state(), step=1)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        opened = reg.run("free", config={**CONFIG, "iterations": 51})
    assert "first at iterations;" in caplog.text
    assert opened.restore().checkpoint.step == 1


def test_arguments_belong_to_their_mode(run: Run, reg: Registry) -> None:
    other = again(reg)
    for mode, given, message in [
        ("cold", {}, "not a mode"),
        ("resume", {"carry": "cuts"}, "belong to mode warm_start"),
        ("fresh", {"initialise": {"x": int}}, "belong to mode warm_start"),
        ("fresh", {"source": run.latest()}, "starts from nothing"),
        ("warm_start", {}, "needs a checkpoint to start from"),
        ("resume", {"expected": FITS}, "a list of names for bandit/arms, streams/state/arms"),
    ]:
        with pytest.raises(InvalidInput, match=message):
            other.phases.start(mode, **given)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"warm_start": [{"part": "a", "change": "freeze", "companion": "b"}]}, "companions"),
        ({"warm_start": [{"part": "a", "change": "carry", "when": "b"}]}, "conditions"),
        ({"commit_keys": ["meta"]}, "meta is one of the commit_keys"),
        ({"must_match": ["seed"]}, "must_match"),
    ],
)
def test_rules_that_cannot_be(more: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        spec(**more)


# Stale state


def bandit(reg: Registry) -> Run:
    run = reg.create_run("bandit")
    arms = {"wiki": 1.0, "repo-docstrings": 1.546, "books": 0.5}
    run.save(
        {"bandit": {"arms": arms, "steps": 3}, "w": np.ones(3)},
        step=1,
        streams={"state": [{"step": 1, "arms": {"wiki": 1}}, {"step": 1, "arms": arms}]},
    )
    run.streams["other"].append({"step": 1, "arms": {"gone": 1}}, lifetime="resettable")
    return run


def test_names_without_a_source_are_told(reg: Registry, caplog: pytest.LogCaptureFixture) -> None:
    bandit(reg)
    sources = {
        "bandit/arms": ["books", "wiki", "new"],
        "streams/state/arms": ["wiki", "books"],
        "streams/none/arms": [],
        "bandit/none": [],
        "none": [],
    }
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        restored = reg.run("bandit").restore(sources=sources)
    wanted = ("bandit/arms/repo-docstrings", "streams/state/arms/repo-docstrings")
    assert restored.stale == wanted
    assert f"whose source is gone: {', '.join(wanted)}" in caplog.text
    assert restored.state["bandit"]["arms"]["repo-docstrings"] == 1.546  # told, not removed
    assert reg.run("bandit").phases.start("resume", sources=sources).stale == wanted
    assert (
        reg.run("bandit").restore(sources={"bandit/arms": restored.state["bandit"]["arms"]}).stale
        == ()
    )
    with pytest.raises(InvalidInput, match=r"bandit/steps.*has no keys"):
        reg.run("bandit").restore(sources={"bandit/steps": []})


def test_a_stream_counts_as_it_was_at_the_checkpoint(reg: Registry) -> None:
    run = bandit(reg)
    run.save({"bandit": {}}, step=2, streams={"state": [{"step": 2, "arms": {"later": 1}}]})
    sources = {"streams/state/arms": ["wiki", "books"]}
    first, _ = run.checkpoints()
    assert run.restore(sources=sources).stale == ("streams/state/arms/later",)
    assert run.restore(first, sources=sources).stale == ("streams/state/arms/repo-docstrings",)


def test_a_pivot_leaves_nothing_stale(reg: Registry) -> None:
    run = reg.create_run(
        "run",
        preset=RunSpec.of(
            {
                "streams": [{"name": "state", "lifetime": "resettable"}],
                "pivot": {"rows": [{"part": "bandit", "change": "reset"}]},
            }
        ),
    )
    run.save(
        {"bandit": {"a": 1}, "w": 2}, step=1, streams={"state": [{"step": 1, "arms": {"a": 1}}]}
    )
    sources = {"bandit": [], "streams/state/arms": []}
    assert len(reg.run("run").restore(sources=sources).stale) == 2
    run.phases.pivot("new-policy")
    assert reg.run("run").restore(sources=sources).stale == ()


def test_a_place_of_the_preset_that_is_not_compared_is_told(
    reg: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    run = reg.create_run("run", preset=spec(must_match=None))
    run.save(state(), step=1)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        assert run.restore().stale == ()
    assert "none were given: bandit/arms, streams/state/arms" in caplog.text
