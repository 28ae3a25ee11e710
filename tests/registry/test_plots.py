"""Figures of runs: every point, and the marks of gates, bests and phases."""

from __future__ import annotations

import json
import math
import sys
from datetime import datetime

import pytest

from holdfast import Monitor, Registry, Retention
from holdfast.registry.errors import InvalidInput, NotFound
from holdfast.registry.spec import Phase, RunSpec
from tests.support.states import small_state

go = pytest.importorskip("plotly.graph_objects")

LOSS = Monitor(metric="loss", mode="min")


def lines(figure: go.Figure) -> dict[str, list[tuple[object, object]]]:
    return {one.name: list(zip(one.x, one.y, strict=True)) for one in figure.data}


def words(figure: go.Figure) -> dict[str, object]:
    return {one.text: one.x for one in figure.layout.annotations}


def test_the_monitored_metric_with_best_and_gate(reg: Registry) -> None:
    run = reg.create_run("run", monitor=LOSS)
    saved = [
        run.save(small_state(step), step=step, metrics={"loss": loss, "other": 1})
        for step, loss in ((1, 0.5), (2, 0.25), (3, math.nan), (4, 0.75))
    ]
    run.save(small_state(5), step=5)
    run.pins.gates.set("trained", saved[3])
    figure = run.history.plot()
    assert isinstance(figure, go.Figure)
    assert lines(figure) == {
        "loss": [(1, 0.5), (2, 0.25), (4, 0.75)],
        "best loss": [(2, 0.25)],
    }
    assert figure.data[0].customdata[1] == "run/main/step00000002"
    assert words(figure) == {"gate trained": 4}
    (line,) = figure.layout.shapes
    assert (line.x0, line.x1, line.yref) == (4, 4, "paper")
    assert figure.layout.yaxis.title.text == "loss"
    assert set(lines(run.history.plot(["loss", "other"]))) == {"loss", "other", "best loss"}
    json.loads(figure.to_json())


def test_several_runs_in_one_figure(reg: Registry) -> None:
    for name, factor in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        run = reg.create_run(name, monitor=LOSS)
        for step in (1, 2):
            metrics = {"loss": factor / step, **({"bleu": 1.0} if name == "a" else {})}
            run.save(small_state(step), step=step, metrics=metrics)
    figure = reg.plot(["a", "b"])
    assert lines(figure) == {"a loss": [(1, 1.0), (2, 0.5)], "b loss": [(1, 2.0), (2, 1.0)]}
    assert figure.data[0].customdata[0] == "a/main/step00000001"
    assert figure.data[0].line.color != figure.data[1].line.color
    assert set(lines(reg.plot(reg.run_names(), "bleu"))) == {"a bleu"}  # the others have none
    with pytest.raises(NotFound, match="no checkpoint has this metric"):
        reg.plot(["b", "c"], "bleu")


def test_values_that_are_not_finite_are_gaps(reg: Registry) -> None:
    run = reg.create_run("run")
    for step, value in enumerate((1.0, math.nan, -math.inf, 2.0)):
        run.save(small_state(step), step=step, metrics={"m": value})
    assert lines(run.history.plot("m")) == {"m": [(0, 1.0), (1, None), (2, None), (3, 2.0)]}


def test_a_sum_of_metrics_is_drawn_by_its_label(reg: Registry) -> None:
    rating = Monitor(metric="mu - 3*sigma", mode="max", name="rating")
    run = reg.create_run("run", monitor=rating)
    for step, mu in ((1, 20.0), (2, 30.0)):
        run.save(small_state(step), step=step, metrics={"mu": mu, "sigma": 2.0})
    assert lines(run.history.plot()) == {
        "rating": [(1, 14.0), (2, 24.0)],
        "best rating": [(2, 24.0)],
    }


def phased(reg: Registry) -> None:
    phases = [Phase(name=name, monitors=(LOSS,), counter="update") for name in ("1", "tune")]
    run = reg.create_run("phased", preset=RunSpec(phases=tuple(phases)))
    for phase in (1, "tune"):
        for step in (1, 2):
            run.save(small_state(step), step=step, phase=phase, metrics={"loss": 1 / step})


def test_each_phase_has_a_line_and_a_band_where_they_do_not_overlap(reg: Registry) -> None:
    phased(reg)
    run = reg.run("phased")
    by_step, by_commit = run.history.plot(), run.history.plot(x="commit")
    assert lines(by_step)["loss (phase1)"] == [(1, 1.0), (2, 0.5)]
    assert lines(by_step)["best loss (tune)"] == [(2, 0.5)]
    assert by_step.layout.shapes == ()
    titles = {one.layout.xaxis.title.text for one in (by_step, by_commit)}
    assert titles == {"update", "commit"}
    first, second = (run.checkpoints(phase) for phase in (1, "tune"))
    assert words(by_commit) == {"phase1": first[0].handle.n, "tune": second[0].handle.n}
    (band,) = by_commit.layout.shapes
    assert (band.x0, band.x1) == (first[0].handle.n, first[1].handle.n)
    assert set(lines(run.history.plot(phase="tune"))) == {"loss", "best loss"}


def test_time_is_an_axis(reg: Registry) -> None:
    run = reg.create_run("run")
    saved = run.save(small_state(1), step=1, metrics={"m": 1})
    run.pins.gates.set("g", saved)
    figure = run.history.plot(x="time")
    assert figure.data[0].x == (saved.created,)
    assert isinstance(words(figure)["gate g"], datetime)


def test_history_has_evicted_checkpoints_of_the_line(reg: Registry) -> None:
    run = reg.create_run("run", retention=Retention(last=1))
    for step in (1, 2, 3):
        run.save(small_state(step), step=step, metrics={"m": step})
    assert lines(run.history.plot("m"))["m"] == [(3, 3.0)]
    assert lines(run.history.plot("m", evicted=True))["m"] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    back = reg.create_run("back")
    first = back.save(small_state(1), step=1, metrics={"m": 1})
    back.save(small_state(2), step=2, metrics={"m": 2})
    back.restore(at=first)
    back.save(small_state(3), step=2, metrics={"m": 3})
    assert lines(back.history.plot("m", evicted=True))["m"] == [(1, 1.0), (2, 3.0)]


def test_streams_are_drawn_over_their_steps(reg: Registry) -> None:
    run = reg.create_run("run")
    run.save(small_state(), step=2, metrics={"m": 1})
    entries = [{"step": 1, "train": 0.5, "test": 1, "note": "x", "flag": True}, {"step": 2}]
    run.streams["losses"].append([*entries, {"step": 3, "train": math.inf}])
    assert lines(run.history.plot((), streams="losses")) == {
        "losses/train": [(1, 0.5), (3, None)],
        "losses/test": [(1, 1.0)],
    }
    assert set(lines(run.history.plot(streams={"losses": "train"}))) == {"m", "losses/train"}
    with pytest.raises(NotFound, match="note"):
        run.history.plot(streams={"losses": ["note"]})
    with pytest.raises(InvalidInput, match="entries of streams have a step"):
        run.history.plot(streams="losses", x="time")


def test_names_from_a_store_are_text(reg: Registry) -> None:
    evil = "<a href='https://example.org'>%{x}</a>\x1b"
    run = reg.create_run("run", monitor=Monitor(metric="m", mode="min", name=evil))
    run.save(small_state(), step=1, metrics={"m": 1, evil: 2})
    run.streams["s"].append({"step": 1, evil: 1.0})
    shown = "&lt;a href=&#x27;https://example.org&#x27;&gt;%{x}&lt;/a&gt;\\x1b"
    figure = run.history.plot(["m", evil], streams="s")
    assert {one.name for one in figure.data} == {
        "m",
        shown,
        f"best {shown}",
        "best m",
        f"s/{shown}",
    }
    assert {one.hovertemplate for one in figure.data} == {
        "%{customdata}<br>%{x}: %{y}<extra></extra>"
    }
    assert "<a" not in json.dumps(figure.to_plotly_json(), default=str)


def test_what_is_not_there_is_named(reg: Registry, monkeypatch) -> None:
    run = reg.create_run("run", monitor=LOSS)
    assert run.history.plot().data == ()
    run.save(small_state(), step=1, metrics={"loss": 1})
    with pytest.raises(NotFound, match="loss"):
        run.history.plot("los")
    with pytest.raises(InvalidInput, match="step or time or commit"):
        run.history.plot(x="epoch")
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(InvalidInput, match=r"pip install .*\[ui\]'"):
        run.history.plot()
