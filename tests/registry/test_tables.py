"""Runs, checkpoints and entries as Arrow tables, and as pandas and Polars read them."""

from __future__ import annotations

import getpass
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import Monitor, Registry, Retention
from holdfast.backends import Backend
from holdfast.registry.errors import InvalidInput, NotFound
from holdfast.registry.face.factory import open_on
from holdfast.registry.history import RunLog
from holdfast.registry.tables import CHECKPOINT_COLUMNS, RUN_COLUMNS, checkpoint_table
from tests.support.states import small_state
from tests.support.stores import slots

pa = pytest.importorskip("pyarrow")

TYPES = {
    "bool": pa.bool_(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "string": pa.string(),
    "timestamp[us, UTC]": pa.timestamp("us", tz="UTC"),
}
DOC = (Path(__file__).parents[2] / "docs" / "notebooks.md").read_text()


def documented(heading: str) -> dict[str, object]:
    """Return the types of the columns that the document lists below a heading."""
    part = DOC.split(f"## {heading}\n")[1].split("\n## ")[0]
    return {name: TYPES[kind] for name, kind in re.findall(r"^\| `(\w+)` \| (.*?) \|", part, re.M)}


def schema(table: pa.Table) -> dict[str, object]:
    return dict(zip(table.schema.names, table.schema.types, strict=True))


def test_a_run_has_a_row_for_each_checkpoint(reg: Registry) -> None:
    run = reg.create_run("run")
    first = run.save(small_state(1), step=1, metrics={"loss": 0.5})
    second = run.save(small_state(2), step=2, phase="tune", metrics={"loss": math.nan, "é": 2})
    table = run.history.table()
    assert schema(table) == {
        **documented("Checkpoints of a run"),
        "loss": pa.float64(),
        "é": pa.float64(),
    }
    rows = table.to_pylist()
    assert [row["step"] for row in rows] == [1, 2]
    assert [row["id"] for row in rows] == [str(first.digest), str(second.digest)]
    assert [reg.checkpoint(row["ref"]) for row in rows] == [first, second]
    assert [row["time"] for row in rows] == [first.created, second.created]
    assert rows[0]["time"].tzname() == "UTC"
    assert rows[0]["loss"] == 0.5
    assert math.isnan(rows[1]["loss"])
    assert [row["é"] for row in rows] == [None, 2.0]
    assert [row["size_bytes"] for row in rows] == [first.size_bytes, second.size_bytes]
    assert run.history.table("tune")["step"].to_pylist() == [2]
    assert b"counted within the phase" in table.schema.field("step").metadata[b"description"]


def test_history_has_evicted_and_superseded_checkpoints(reg: Registry) -> None:
    run = reg.create_run("run", retention=Retention(last=1))
    for step in (1, 2, 3):
        run.save(small_state(step), step=step, metrics={"loss": step})
    run.save(small_state(9), step=9)
    assert run.history.table()["step"].to_pylist() == [9]
    rows = run.history.table(evicted=True).to_pylist()
    assert [(row["step"], row["loss"], row["evicted"] is None) for row in rows] == [
        (1, 1.0, False),
        (2, 2.0, False),
        (3, 3.0, False),
        (9, None, True),
    ]
    assert all(row["ref"] is None for row in rows[:3])


def test_superseded_checkpoints_are_found_by_their_ref(reg: Registry) -> None:
    run = reg.create_run("run")
    first = run.save(small_state(1), step=1)
    late = run.save(small_state(2), step=2)
    run.restore(at=first)
    run.save(small_state(3), step=2)
    assert run.history.table()["superseded"].to_pylist() == [False, False]
    (row,) = (one for one in run.history.table(evicted=True).to_pylist() if one["superseded"])
    assert reg.checkpoint(row["ref"]) == late


def test_a_metric_never_takes_the_column_of_another(reg: Registry) -> None:
    run = reg.create_run("run")
    run.save(small_state(), step=7, metrics={"step": 0.5, "metrics.step": 1.5, "metrics.x": 2.5})
    (row,) = run.history.table().to_pylist()
    assert row["step"] == 7
    assert row["metrics.step"] == 0.5
    assert row["metrics.metrics.step"] == 1.5
    assert row["metrics.metrics.x"] == 2.5


def test_an_empty_run_and_an_empty_registry_have_all_columns(reg: Registry) -> None:
    assert schema(reg.runs_table()) == documented("Runs of a registry")
    assert reg.runs_table().num_rows == 0
    assert schema(reg.create_run("run").history.table()) == documented("Checkpoints of a run")


def test_a_registry_has_a_row_for_each_run_also_for_a_damaged_one(
    reg: Registry, backend: Backend
) -> None:
    run = reg.create_run("a", monitor=Monitor(metric="loss", mode="min"), config={"lr": math.inf})
    for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75)):
        run.save(small_state(step), step=step, metrics={"loss": loss})
    reg.fork("a/best", "b")
    reg.create_run("c").retention.drop("a mistake")
    reg.create_run("d")
    for key in slots(backend, "d"):
        backend.put(key, b"not a slot")
    with open_on(backend) as other:
        a, b, c, d = other.runs_table().to_pylist()
    assert a["run"] == "a"
    assert (a["checkpoints"], a["latest_step"], a["best"], a["best_step"]) == (3, 3, 0.25, 2)
    assert (a["monitor"], a["status"], a["error"]) == ("loss", "running", None)
    assert json.loads(a["config"]) == {"lr": "inf"}
    assert b["parent"] == "a/main/step00000002"
    assert (c["status"], c["error"]) == ("dropped", "a mistake")
    assert (d["status"], d["checkpoints"]) == ("damaged", None)
    assert "runs/d/log" in d["error"]


def test_runs_are_chosen_by_owner_project_and_labels(reg: Registry) -> None:
    reg.create_run("a", owner="ana", project="vision", labels=["prod", "sweep:3"])
    reg.create_run("b", owner="ana", labels=["product"])
    reg.create_run("c", project="vision")

    def chosen(where: str) -> list[str]:
        return reg.runs_table(where=where).column("run").to_pylist()

    assert chosen("owner=ana and project=vision") == ["a"]
    assert [chosen(f"labels{sign}prod") for sign in ("=", "~", "!=", "!~")] == [
        ["a"],
        ["a", "b"],
        ["b"],
        [],
    ]
    assert chosen("labels=none") == ["c"]
    assert chosen(f"owner={getpass.getuser()}") == ["c"]
    assert reg.runs_table().column("labels").to_pylist() == ["prod, sweep:3", "product", None]


def test_runs_are_chosen_by_their_fields_and_their_age(reg: Registry, backend: Backend) -> None:
    monitor = Monitor(metric="loss", mode="min")
    for name, rate, loss in (("a", 0.1, 2.0), ("b", 0.01, 0.5), ("c", 0.01, 1.0)):
        run = reg.create_run(name, monitor=monitor, config={"opt": {"lr": rate}, "status": "x"})
        for step, factor in ((1, 1), (2, 2)):
            run.save(small_state(step), step=step, metrics={"loss": loss * factor, "opt.lr": 9.0})
    for key in slots(backend, "d" if reg.create_run("d") else ""):
        backend.put(key, b"not a slot")

    def chosen(**choice: Any) -> list[str]:
        with open_on(backend) as other:
            return other.runs_table(**choice).column("run").to_pylist()

    assert chosen(where="opt.lr < 0.1") == ["b", "c"]  # the configuration's, not the metric's
    assert chosen(where="metrics.opt.lr = 9 and loss <= 1") == ["b", "c"]  # of the best checkpoint
    assert chosen(where="config.status=x and status=running and best=0.5") == ["b"]
    assert chosen(where="last.loss=1 and max.loss=1 and min.loss=0.5") == ["b"]
    assert chosen(where="status=damaged") == ["d"]
    assert chosen(where="latest_step=2", limit=1) == ["c"]  # saved to last
    assert chosen(since_s=3600) == ["a", "b", "c", "d"]
    assert chosen(since_s=-1) == []
    with pytest.raises(InvalidInput, match="no run has"):
        chosen(where="rate=1")


def test_a_second_table_opens_no_run_and_is_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = Monitor(metric="loss", mode="min")
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        run = reg.create_run("a", monitor=loss, labels=["x"], config={"lr": math.nan})
        run.releases.publish("1.0.0", run.save(small_state(), step=1, metrics={"nan": math.nan}))
        run.pins.tags.set("paper", run.checkpoints()[0])
    where = "created > 2020-01-01 and labels=x and tags=paper and releases=1.0.0"
    choice: dict[str, Any] = {"where": where, "since_s": 3600}
    with holdfast.open(tmp_path / "reg") as reg:
        first, chosen = reg.runs_table(), reg.runs_table(**choice)
        assert chosen.num_rows == 1
    monkeypatch.setattr(RunLog, "open", None)
    with holdfast.open(tmp_path / "reg") as reg:
        assert reg.runs_table().equals(first)
        assert reg.runs_table(**choice, max_age_s=60).equals(chosen)


def test_values_of_the_configurations_are_columns(reg: Registry, backend: Backend) -> None:
    config: dict[str, Any] = {
        "lr": 1,
        "opt": {"name": "adam", "lr": 0.5},
        "sizes": [1],
        "big": True,
    }
    first = reg.create_run("a", config=config, monitor=Monitor(metric="loss", mode="min"))
    first.save(small_state(), step=1, metrics={"loss": 1.0, "config.warm": 9.0})
    reg.create_run("b", config={"lr": 0.1, "big": "yes", "seed": 2**70})
    reg.create_run("c")
    for key in slots(backend, "d" if reg.create_run("d", config={"lr": 7}) else ""):
        backend.put(key, b"not a slot")
    with open_on(backend) as other:
        table = other.runs_table()
    own = [field for field in table.schema if field.name not in documented("Runs of a registry")]
    assert {field.name: field.type for field in own} == {
        "config.lr": pa.float64(),
        "config.opt.name": pa.string(),
        "config.opt.lr": pa.float64(),
        "config.big": pa.string(),
        "config.seed": pa.string(),
    }
    assert own[0].metadata == {b"description": b"lr of the configuration"}
    found = {field.name: table.column(field.name).to_pylist() for field in own}
    assert found["config.lr"] == [1.0, 0.1, None, None]
    assert found["config.opt.name"] == ["adam", None, None, None]
    assert found["config.big"] == ["true", '"yes"', None, None]
    assert found["config.seed"] == [None, str(2**70), None, None]
    assert reg.runs_table(where="lr=0.1").column("config.lr").to_pylist() == [0.1]


def test_entries_have_a_column_for_each_key(reg: Registry) -> None:
    stream = reg.create_run("run").streams["s"]
    stream.append(
        [
            {"step": 1, "int": 2**62, "float": 0.5, "flag": True, "text": "a", "mixed": 1},
            {"step": 1, "int": 3, "float": 1, "flag": None, "text": "é", "mixed": "x", "more": [1]},
            {"step": 2, "huge": 2**70, "float": math.inf, "odd": 2**53 + 1},
            {"step": 3, "odd": 0.5},
        ]
    )
    table = stream.to_arrow()
    assert schema(table) == {
        "step": pa.int64(),
        "int": pa.int64(),
        "float": pa.float64(),
        "flag": pa.bool_(),
        "text": pa.string(),
        "mixed": pa.string(),
        "more": pa.string(),
        "huge": pa.string(),
        "odd": pa.string(),
    }
    found = table.to_pydict()
    assert found["step"] == [1, 1, 2, 3]
    assert found["int"] == [2**62, 3, None, None]
    assert found["float"] == [0.5, 1.0, math.inf, None]
    assert found["mixed"] == ["1", '"x"', None, None]
    assert found["more"] == [None, "[1]", None, None]
    assert found["huge"] == [None, None, str(2**70), None]
    assert found["odd"] == [None, None, str(2**53 + 1), "0.5"]
    assert stream.to_arrow(2).num_rows == 2
    with pytest.raises(NotFound):
        reg.run("run").streams["none"].to_arrow()


def test_pandas_reads_them(reg: Registry) -> None:
    pd = pytest.importorskip("pandas")
    run = reg.create_run("run")
    run.save(small_state(1), step=1, metrics={"loss": 0.5})
    run.save(small_state(2), step=2)
    frame = run.history.table().to_pandas()
    assert isinstance(frame["time"].dtype, pd.DatetimeTZDtype)
    assert str(frame["time"].dt.tz) == "UTC"
    assert frame["loss"].dtype == np.float64
    assert frame.set_index("step")["loss"].dropna().to_dict() == {1: 0.5}
    assert reg.runs_table().to_pandas()["checkpoints"].tolist() == [2]


def test_polars_reads_them(reg: Registry) -> None:
    pl = pytest.importorskip("polars")
    run = reg.create_run("run")
    run.save(small_state(1), step=1, metrics={"loss": 0.5})
    run.save(small_state(2), step=2)
    frame = pl.from_arrow(run.history.table())
    assert frame.schema["time"] == pl.Datetime("us", "UTC")
    assert frame["loss"].to_list() == [0.5, None]


def test_times_outside_the_calendar_are_its_ends(reg: Registry) -> None:
    run = reg.create_run("run")
    run.save(small_state(1), step=1)
    record = run.manifest.checkpoints[0]
    late = record.changed(time_ms=2**62)
    (row,) = checkpoint_table("run", [late]).to_pylist()
    assert row["time"].year == 9999


def test_without_pyarrow_the_error_says_how_to_get_it(reg: Registry, monkeypatch) -> None:
    run = reg.create_run("run")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for call in (run.history.table, reg.runs_table):
        with pytest.raises(InvalidInput, match=r"pip install .*\[pyarrow\]'"):
            call()


def test_every_column_is_described() -> None:
    for column in (*CHECKPOINT_COLUMNS, *RUN_COLUMNS):
        assert column.about
