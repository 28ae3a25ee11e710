"""The answers of the queries, without a browser."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import holdfast
from holdfast.registry.curation.marks import Progress, progress_of
from holdfast.registry.history import format_time
from holdfast.registry.store.address import Address
from holdfast.registry.ui import page_of
from holdfast.registry.ui.charts import Curve, Mark, Point, curves, figure, table, thinned
from holdfast.registry.ui.pages.events import Event
from holdfast.registry.ui.pages.lineage import MOST_RUNS, Origin, read_lineage
from holdfast.registry.ui.pages.run import RunShown, show_run
from holdfast.registry.ui.pages.runs import list_runs
from holdfast.registry.ui.pages.side_by_side import compare_runs
from holdfast.registry.ui.pages.timeline import timeline
from holdfast.registry.ui.source import Source
from holdfast.registry.values.amounts import duration
from tests.registry.ui.kinds import LOSS, make, state


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("ordinary", tmp_path_factory.mktemp("queries") / "reg")


@pytest.fixture
def source(folder: Path) -> Iterator[Source]:
    found = Source.open(Address(folder))
    yield found
    found.close()


@pytest.fixture
def night(source: Source) -> RunShown:
    return show_run(source, "night")


def test_a_row_has_the_numbers_of_its_run(source: Source) -> None:
    rows = {row.name: row for row in list_runs(source).rows}
    assert list(rows) == ["soup", "night-wide", "night"]
    night = rows["night"]
    assert (night.step, night.checkpoints, night.metric) == (75, 3, "loss")
    assert night.latest == 0.2
    assert night.best == min(night.spark)
    assert rows["night-wide"].parent == "night"


def test_a_run_begins_with_what_went_wrong(tmp_path: Path) -> None:
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        run = reg.create_run("nan", monitor=LOSS)
        for step, loss in ((1, 1.0), (2, 0.5), (3, math.nan), (4, math.nan)):
            run.save(state(step), step=step, metrics={"loss": loss, "rate": 1 / step})
        reg.create_run("old").retention.drop("a typo")
        delay_s = reg.drop_rules().delay_s
    with closing(Source.open(Address(tmp_path / "reg"))) as source:
        found = show_run(source, "nan")
        assert found.losses == ("loss is nan since step 3; before that it was 0.5 at step 2",)
        loss, rate = found.charts
        assert loss.extremes == (("best", 0.5, 2, "nan/main/step00000002"),)
        assert [mark["label"] for mark in loss.payload["marks"]] == ["best"]
        assert rate.extremes == (("lowest", 0.25, 4, ""), ("highest", 1.0, 1, ""))
        assert rate.payload["marks"] == []  # the best of another metric is none of this one
        old = show_run(source, "old")
        drop = next(one for one in old.events if one.kind == "drop")
        until = format_time(drop.time_ms + int(1000 * delay_s))
        assert old.dropped.startswith(f"Until {until} no collection frees it")


def test_progress_is_shown_where_the_end_is_known(tmp_path: Path) -> None:
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        run = reg.create_run("night", total_steps=400)
        for step in (100, 200):
            run.save(state(step), step=step)
        with closing(Source.open(Address(tmp_path / "reg"))) as source:
            (row,) = list_runs(source).rows
            first, last = run.manifest.live()
            rate = 1000 * 100 / max(last.time_ms - first.time_ms, 1)
            assert row.progress is not None
            assert (row.progress.total_steps, row.progress.step) == (400, 200)
            assert "200 of 400 steps, 50%; 200 steps left" in str(row.progress)
            if row.progress.rate is not None:  # both saves in one millisecond tell no rate
                assert row.progress.rate == pytest.approx(rate)
                assert "before it stopped" not in str(row.progress)
                run.status = "interrupted"
                progress = list_runs(source).rows[0].progress
                assert f", about {duration(200 / rate)} at " in str(progress)
                assert str(progress).endswith(" steps a second, the rate before it stopped")
            page = page_of(source, ["night"]).decode()
        back = reg.create_run("back", total_steps=400)
        for step in (10, 5):
            back.save(state(step), step=step)
        assert (counted := progress_of(back.manifest)) is not None
        assert counted.rate is None  # steps that go back tell no rate
    assert str(Progress(150, 100, None, "running")) == "150 of 100 steps, 100%"
    assert '<progress max="400" value="200"' in page
    assert "200 of 400 steps, 50%" in page


def test_a_fork_has_a_best_of_its_own(tmp_path: Path) -> None:
    make("sweep", tmp_path / "reg")
    with closing(Source.open(Address(tmp_path / "reg"))) as source:
        (fork,) = list_runs(source, only=["longer"]).rows
        assert (fork.best, fork.best_step, fork.inherited) == (7.5, 400, pytest.approx(0.8))
        (loss,) = show_run(source, "longer").charts
        assert loss.extremes[0][:3] == ("own best", 7.5, 400)


def test_runs_are_found_by_what_they_hold(source: Source) -> None:
    found = list_runs(source, where="loss < 1 and not parent=none")
    assert [row.name for row in found.rows] == ["night-wide"]
    assert (found.matching, found.total) == (1, 3)
    assert found.rows[0].words == ("prod",)
    assert [row.name for row in list_runs(source, where="owner=ana and labels=prod").rows] == [
        "night-wide"
    ]
    assert ("owner", "ana") in show_run(source, "night-wide").facts
    assert [row.name for row in list_runs(source, where="name~n", matching="wide").rows] == [
        "night-wide"
    ]


def test_each_checkpoint_says_why_it_stays_or_went(night: RunShown) -> None:
    found = {row.saved.step: row for row in night.checkpoints}
    assert found[10].state == "evicted"
    assert "not among last 3, best 1" in found[10].reason
    assert found[75].state == "kept"
    assert "last 3" in found[75].reason
    assert found[80].state == "superseded" or "superseded" in found[80].reason
    assert {"gates/trained", "releases/1.0.0"} <= set(found[80].marks)


def test_the_events_tell_what_happened_to_a_run(night: RunShown) -> None:
    kinds = {(one.lane, one.kind) for one in night.events}
    assert {
        ("trainer", "begin"), ("trainer", "train"), ("trainer", "restore"), ("names", "gate"),
        ("names", "release"), ("retention", "evict"), ("checkpoints", "save"),
    } <= kinds  # fmt: skip
    restore = next(one for one in night.events if one.kind == "restore")
    assert restore.subject == "main/step00000070"


def test_forks_are_on_the_time_line_of_the_run_that_they_came_from(night: RunShown) -> None:
    (fork,) = [one for one in night.events if one.kind == "fork to"]
    assert (fork.subject, fork.reason) == ("night-wide", "from main/step00000080")
    assert [one.run for one in night.forks] == ["night-wide"]


def test_metrics_are_chosen_by_their_names(source: Source) -> None:
    shown = show_run(source, "night", metric="ACC")
    assert [chart.title for chart in shown.charts] == ["accuracy"]
    assert shown.metrics == 2


def test_curves_have_evicted_values_and_superseded_ones_apart(night: RunShown) -> None:
    loss = next(chart for chart in night.charts if chart.title == "loss")
    line, behind = loss.payload["curves"]
    assert line["steps"] == [10, 20, 30, 40, 50, 60, 70, 75]
    assert (behind["steps"], behind["faint"]) == ([80], True)
    assert night.charts[0].title == "loss"  # the monitored one is first


def test_a_key_says_what_the_marks_of_the_time_line_are(night: RunShown) -> None:
    assert night.timeline is not None
    assert ("★", "accent", "best") in night.timeline.key
    assert {"kept", "evicted", "superseded", "gate", "release", "restore"} <= {
        meaning for _, _, meaning in night.timeline.key
    }


def test_a_metric_with_one_value_is_a_fact_and_no_chart(source: Source) -> None:
    shown = show_run(source, "night-wide")
    assert shown.single == (("test", 0.97, "main/step00000090"),)
    assert shown.metrics == len(shown.charts) == 2
    both = compare_runs(source, ["night", "night-wide"])
    assert {chart.title for chart in both.charts} == {"accuracy", "loss"}
    assert [(row.name, row.values) for row in both.single] == [("test", (None, "0.97"))]


def test_streams_are_read_as_curves(night: RunShown) -> None:
    (stream,) = night.streams
    assert stream.is_read
    (chart,) = stream.charts
    assert chart.payload["curves"][0]["steps"][:3] == [1, 2, 3]


def test_streams_of_several_runs_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    names = ["a", "b", "none"]
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        for number, name in enumerate(names):
            run = reg.create_run(name, config={"lr": number})
            for step in range(1, 4 if name != "none" else 0):
                run.log({"loss": number + 1 / step, "text": "x"}, step=step)
            run.save(state(3), step=3)
    with closing(Source.open(Address(tmp_path / "reg"))) as source:
        found = compare_runs(source, names)
        assert (found.logged, found.streams) == ((), ("log",))
        found = compare_runs(source, names, streams=["log", "no such"])
        (chart,) = found.logged
        assert chart.title == "log: loss"
        lines = {one["group"]: (one["steps"], one["values"]) for one in chart.payload["curves"]}
        assert lines == {
            "a": ([1, 2, 3], [1, 1 / 2, 1 / 3]),
            "b": ([1, 2, 3], [2, 1 + 1 / 2, 1 + 1 / 3]),
        }
        (grouped,) = compare_runs(source, names, streams=["log"], group="config.lr").logged
        assert [one["name"] for one in grouped.payload["curves"]] == ["0 (1)", "1 (1)"]
        assert compare_runs(source, names, streams=["log"], metric="acc").logged == ()


def test_side_by_side_shows_what_differs(source: Source) -> None:
    found = compare_runs(source, ["night", "night-wide"])
    config = {row.name: row for row in found.config}
    assert config["lr"].values == ("0.1", "0.2")
    assert config["wide"].values == (None, "true")
    assert config["lr"].differs == (False, True)
    loss = next(chart for chart in found.charts if chart.title == "loss")
    names = [curve["name"] for curve in loss.payload["curves"]]
    assert names == ["night", "night, superseded", "night-wide"]
    assert "at least 6 runs with a value of it; found 2" in str(found.ranking)


def test_lineage_has_forks_and_merges(source: Source) -> None:
    found = read_lineage(source)
    rows = {(one.row.run, one.row.kind): one for one in found.rows}
    fork = rows["night-wide", "fork"].row
    assert fork.origins == (Origin("night", "main/step00000080"),)
    merge = rows["soup", "merge"].row
    assert {origin.run for origin in merge.origins} == {"night", "night-wide"}
    assert len(rows["soup", "merge"].edges) == 2


def test_lineage_leaves_out_runs_without_relations_and_follows_merges(tmp_path: Path) -> None:
    folder = make("sweep", tmp_path / "reg")
    with closing(Source.open(Address(folder))) as source:
        found = read_lineage(source)
        assert set(found.runs) == {one.row.run for one in found.rows} == {"sweep-1", "longer"}
        assert found.alone == 4
        alone = read_lineage(source, ["sweep-0"])
        assert {one.row.run for one in alone.rows} == {"sweep-0"}
    with closing(Source.open(Address(make("ordinary", tmp_path / "other")))) as source:
        assert set(read_lineage(source, ["soup"]).runs) == {"soup", "night", "night-wide"}


def test_the_lineage_of_a_run_has_the_merges_of_its_checkpoints(
    tmp_path: Path,
) -> None:
    with closing(Source.open(Address(make("ordinary", tmp_path / "reg")))) as source:
        found = read_lineage(source, ["night-wide"])
        (merge,) = (one.row for one in found.rows if one.row.kind == "merge")
        assert (merge.run, {one.run for one in merge.origins}) == ("soup", {"night", "night-wide"})
        assert found.others == 0
        with holdfast.open(tmp_path / "reg") as reg:
            for number in range(MOST_RUNS):
                reg.create_run(f"other-{number}")
        found = read_lineage(source, ["night-wide"])  # others are opened when somebody asks
        assert ("soup" in found.runs, found.others) == (False, 1 + MOST_RUNS)
        found = read_lineage(source, ["night-wide"], reads_all=True)
        assert set(found.runs) == {"night", "night-wide", "soup"}
        assert (found.others, found.alone) == (0, MOST_RUNS)


def test_a_crowd_of_events_lies_small_below_the_others() -> None:
    events = [Event(n, 1000 * n, "a@b", "pool", "match", f"m{n}") for n in range(171)]
    events.append(Event(200, 90_500, "a@b", "pool", "promote", "v0001"))
    (first, second) = timeline(events, ()).payload["data"]
    assert (first["name"], second["name"]) == ("match", "promote")
    assert len(first["x"]) == 171
    assert first["marker"]["size"] < second["marker"]["size"] == 10
    assert first["opacity"] < second["opacity"] == 1


def test_every_edge_of_the_graph_ends_on_the_lane_of_its_run(source: Source) -> None:
    found = read_lineage(source).rows
    for at, one in enumerate(found):
        for origin in one.row.origins:
            lane = next(later.lane for later in found[at + 1 :] if later.row.run == origin.run)
            end = next(i for i in range(at + 1, len(found)) if found[i].row.run == origin.run)
            assert lane in one.edges
            assert all(lane in found[i].above for i in range(at + 1, end + 1))


def test_damage_is_told_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder = make("damaged", tmp_path / "reg")
    source = Source.open(Address(folder))
    rows = {row.name: row for row in list_runs(source).rows}
    assert rows["torn"].status == "damaged"
    assert rows["night-wide"].status != "damaged"
    night = show_run(source, "night")
    assert any("00000004" in trouble.what for trouble in night.troubles)
    assert night.row is None
    assert len(night.checkpoints) >= 5
    assert read_lineage(source).troubles
    assert compare_runs(source, ["night", "night-wide"]).names == ("night-wide",)
    source.close()


def test_a_run_that_was_restored_from_a_backup_is_read_again(tmp_path: Path) -> None:
    folder = make("ordinary", tmp_path / "reg")
    source = Source.open(Address(folder))
    slot = sorted((folder / "runs" / "night" / "log").iterdir())[4]
    sound = slot.read_bytes()
    slot.write_bytes(b"not a slot\n")
    assert show_run(source, "night").troubles
    slot.write_bytes(sound)
    again = show_run(source, "night")
    assert again.troubles == ()
    assert again.row is not None
    source.close()


def test_a_long_curve_keeps_its_extremes() -> None:
    points = [Point(step, None, float(step == 7777)) for step in range(10_000)]
    kept = thinned(points, 200)
    assert len(kept) <= 200
    assert max(point.value for point in kept) == 1.0
    assert [point.step for point in kept] == sorted(point.step for point in kept)


def test_charts_escape_every_text_and_drop_numbers_that_are_no_json() -> None:
    evil = "<b>x</b>"
    chart = curves(
        evil, [Curve(evil, (Point(1, 2, float("nan")),))], [Mark("best", evil, Point(1, 2, 0.5))]
    )
    assert "<" not in str(chart.payload)
    assert chart.payload["curves"][0]["values"] == [None]
    drawn = figure("t", "a", [{"text": [evil], "z": [[float("inf")]], "hovertemplate": "%{x}<br>"}],
                   {"title": evil}, table(("x",), [(1,)]))  # fmt: skip
    assert drawn.payload["data"] == [
        {"text": ["&lt;b&gt;x&lt;/b&gt;"], "z": [[None]], "hovertemplate": "%{x}<br>"}
    ]
    assert drawn.payload["layout"] == {"title": "&lt;b&gt;x&lt;/b&gt;"}
