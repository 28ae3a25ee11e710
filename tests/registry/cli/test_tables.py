"""Tables: which columns are shown, in which order, how they fit a terminal, and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import pty
import re
import subprocess
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len

import holdfast
from holdfast.registry.cli import output
from holdfast.registry.cli.columns import Column, Table, View, numbers, plain
from holdfast.registry.cli.listing import sparkline
from holdfast.registry.errors import NotFound
from holdfast.registry.spec import RunSpec
from tests.registry.cli.calling import HOLDFAST, Call, CallJson, walk
from tests.registry.cli.conftest import make_registry

#: Every command that prints a table of the registry `full`, with its arguments.
TABLES = (
    "ls",
    "ls full",
    "run ls",
    "show full",
    "show full --tensors",
    "log full",
    "diff full/main/step1 full",
    "diff --runs full fork",
    "diff --runs * full",
    "show full --stats",
    "ls full/pins",
    "ls full/streams",
    "ls full/pool",
    "preset",
    "prune full --last 1 --dry-run",
    "du",
    "du full",
    "bisect full --good full/main/step1 --bad full/main/step4 --metric loss<0.3",
)
AGE = re.compile(r"\(?(\d{1,2}|s|min|now)\)?")
METRICS = {f"metric_{i}_of_eight": 10.0**-i for i in range(7)}
TENSOR = "encoder.layers.11.attention.self.query.weight"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run `full` of four checkpoints with eight metrics, long and wide names, and a fork."""
    made = make_registry(tmp_path_factory.mktemp("tables"))
    with holdfast.open(made) as opened:
        run = opened.create_run(
            "full",
            monitor=holdfast.Monitor(metric="loss", mode="min"),
            preset=RunSpec(finite=("model/*",)),
        )
        for step in (1, 2, 3, 4):
            state = {"model": {TENSOR: np.full(50, step / 7, np.float32)}, "名前" * 8: step}
            last = run.save(state, step=step, metrics={**METRICS, "loss": 1 / step})
        run.pins.gates.set("a_gate_with_a_long_name", last)
        run.releases.publish("1.0.0", last)
        run.pins.artifacts.set("grp", {"n": 1})
        run.streams["rows"].append([{"step": 1}])
        run.pool.promote(last)
        opened.fork(last, "fork")
    return made


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is printed goes to a terminal."""
    monkeypatch.setattr(output, "is_terminal", lambda: True)


def shown(text: str) -> list[str]:
    """Return the columns of a table by its heading."""
    return text.splitlines()[0].split()


@pytest.mark.parametrize("command", TABLES)
def test_a_table_fits_and_breaks_no_name_or_number(
    command: str, call: Call, screen: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = {}
    for width in (1000, 80, 50):
        monkeypatch.setenv("COLUMNS", str(width))
        printed[width] = call(*command.split()).stdout
    # Narrower ones have no room for an id, or for a name.
    table = printed[80].partition("\nget it,")[0]  # what follows is to be copied, so never broken
    assert all(cell_len(line.rstrip()) <= 80 for line in table.splitlines())
    for width in (80, 50):
        new = set(printed[width].split()) - set(printed[1000].split())
        assert not {word for word in new if not AGE.fullmatch(word)}, width


def test_columns_are_left_out_by_their_rank_and_named(
    call: Call, screen: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = call("ls", "full")
    assert shown(printed.stdout)[:3] == ["phase", "step", "id"]
    assert "loss" in shown(printed.stdout)  # it decides best
    assert "metric_0_of_eight" not in shown(printed.stdout)
    assert "metric_0_of_eight" in printed.stderr.partition("not shown: ")[2]
    monkeypatch.setenv("COLUMNS", "31")
    assert shown(call("ls", "demo").stdout) == ["phase", "step", "loss", "marks"]
    monkeypatch.setenv("COLUMNS", "250")
    printed = call("ls", "full")
    assert set(METRICS) < set(shown(printed.stdout))
    assert "not shown" not in printed.stderr


def test_a_pipe_gets_all_columns_and_no_picture(call: Call) -> None:
    header = shown(call("ls", "full").stdout)
    assert header == ["phase", "step", "id", "size", "loss", *METRICS, "age", "marks"]
    assert "trend" not in call("run", "ls").stdout
    assert "█" in call("run", "ls", "--columns", "run,trend").stdout


def test_trends_are_shown_on_a_terminal(call: Call, screen: None) -> None:
    listed = call("ls", "full").stdout
    assert ["loss", "█▃▁▁", "1", "0.25"] in [line.split() for line in listed.splitlines()]
    (full,) = [line for line in call("run", "ls").stdout.splitlines() if line.startswith("full")]
    assert "█▃▁▁" in full.split()


@pytest.mark.parametrize("command", ["ls full", "ls", "run ls", "ls full/pool", "ls full/gates"])
def test_csv_has_the_values_of_the_document(command: str, call: Call, call_json: CallJson) -> None:
    rows = list(csv.DictReader(io.StringIO(call(*command.split(), "--csv").stdout)))
    document = call_json(*command.split())
    assert len(rows) == len(document) > 0
    for row, shape in zip(rows, document, strict=True):
        for name in set(row) - {"status", "marks", "phase"}:
            assert row[name] == flat(shape, name), name
        assert row.get("metrics.loss", "") == flat(shape, "metrics.loss")


def flat(shape: dict[str, Any], name: str) -> str:
    """Return a field of a document, as CSV has it."""
    value: Any = shape
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


@pytest.mark.parametrize("command", TABLES)
def test_csv_is_the_only_thing_on_stdout(command: str, call: Call) -> None:
    lines = list(csv.reader(io.StringIO(call(*command.split(), "--csv").stdout)))
    assert len(lines) > 1
    assert len({len(line) for line in lines}) == 1


def test_columns_are_chosen_by_heading_or_field(call: Call, screen: None) -> None:
    chosen = call("ls", "demo", "--columns", "step, size_bytes,meta.note,metrics,created").stdout
    header, first, _ = (line.split() for line in chosen.splitlines()[:3])
    assert header == ["step", "size", "meta.note", "loss", "nan", "age"]
    assert first[:6] == ["10", "2.3", "KiB", "hi", "0.5", "nan"]
    wide = ",".join(["id", *METRICS])  # the user wants them, however wide they are
    assert set(METRICS) < set(shown(call("ls", "full", "--columns", wide).stdout))
    empty = call("run", "ls", "--columns", "run,dropped").stdout.splitlines()
    assert empty[0].split() == ["run", "dropped"]  # a field that no run has a value of
    refused = call("ls", "demo", "--columns", "lss", status=4).stderr
    assert "--columns lss: no such column; expected phase, step, id" in refused
    assert "'loss'" in refused


def test_rows_are_sorted_by_values(call: Call) -> None:
    def steps(*arguments: str) -> list[str]:
        return [line.split()[0] for line in call(*arguments).stdout.splitlines()[1:]]

    by_loss = ("ls", "full", "--columns", "step", "--sort")
    assert steps(*by_loss, "loss") == ["4", "3", "2", "1"]
    assert steps(*by_loss, "-metrics.loss") == ["1", "2", "3", "4"]
    both = ("ls", "demo", "--columns", "step", "--sort")
    assert steps(*both, "nan") == steps(*both, "-nan") == ["10", "20"]


def test_nothing_comes_last_in_any_order() -> None:
    rows = [{"n": one} for one in (None, 2, math.nan, 10, "x", -1.5)]
    for sort, expected in (("n", [-1.5, 2, 10, "x"]), ("-n", ["x", 10, 2, -1.5])):
        found = [row["n"] for row in View(sort=sort).of(Table([Column("n")], rows)).rows]
        assert found[:4] == expected
    with pytest.raises(NotFound, match="--sort m"):
        View(sort="m").of(Table([Column("n")], rows))


def test_a_table_without_rows(call: Call, url: str) -> None:
    assert call("ls", "demo/gates", "--sort", "age").stdout == ""
    empty = call("ls", "demo/gates", "--csv")
    assert (empty.stdout, empty.stderr) == ("ref,source,id,set,marks\n", "no gates yet\n")


def test_options_of_tables_are_not_for_json(call: Call) -> None:
    for option in (["--csv"], ["--sort", "step"], ["--columns", "step"]):
        assert "not --json" in call("ls", "demo", *option, "--json", status=2).stderr


def test_every_listing_has_them() -> None:
    options = {
        " ".join(path): {flag for one in command.params for flag in one.opts}
        for path, command in walk()
    }
    asked = {"--columns", "--sort", "--csv"}
    have = {path for path, flags in options.items() if asked <= flags}
    assert have >= {path for path in options if path.split()[-1] == "ls"}
    assert have >= {
        path for path in options for command in TABLES if f"{command} ".startswith(path)
    }
    assert not {path for path, flags in options.items() if asked & flags and path not in have}


def test_metrics_with_dots_and_of_the_name_of_a_column() -> None:
    metrics = Column("metrics", is_number=True, spreads=True)
    table = Table(
        [*numbers("step"), metrics], [{"step": 1, "metrics": {"a.b": 2, "step": 3}}, {"step": 4}]
    )
    assert plain(table) == ["step  a.b  metrics.step", "   1    2             3", "   4"]
    assert [one.key for one in View(["step", "metrics.step"]).of(table).columns] == [
        *("step", "metrics.step")
    ]


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3, None, math.nan, -1e308, 1e308]) == "▅ ×▁█"
    assert sparkline([5.0, 5.0]) == "▅▅"
    assert (sparkline([math.inf]), sparkline([None]), sparkline([])) == ("×", "", "")
    assert sparkline(range(1000)) == "▁▁▂▂▃▃▄▄▅▅▆▆▇▇██"


def test_a_terminal_gets_bold_headings_and_with_no_color_no_escapes(url: str) -> None:
    def printed(**more: str) -> str:
        parent, child = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", **more}
        with subprocess.Popen(
            [*HOLDFAST, "ls", "full", "-r", url], stdout=child, stderr=child, env=environment
        ):
            os.close(child)
            return b"".join(iter(lambda: _read(parent), b"")).decode()

    def _read(parent: int) -> bytes:
        try:
            return os.read(parent, 65536)
        except OSError:  # so Linux ends a terminal
            return b""

    assert "\x1b[1m" in printed(NO_COLOR="")
    assert "\x1b" not in printed(NO_COLOR="1")
