"""What is printed cannot harm a terminal, and is plain in a pipe."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import holdfast
from holdfast.backends.escape import printable
from holdfast.registry.cli import columns as tables
from holdfast.registry.cli import output
from holdfast.registry.cli.columns import Column, Table
from tests.registry.cli.calling import Call, Terminal
from tests.support.commands import invoke

EVIL = "\x1b]0;owned\x07\x1b[2J\u202eevil\u2066\r\n[red]markup[/red]\x9b31m"
TAMED = r"\x1b]0;owned\x07\x1b[2J\u202eevil\u2066\r\n[red]markup[/red]\x9b31m"


def test_golden() -> None:
    assert printable(EVIL) == TAMED
    assert printable("ordinary text, Ünïcode, 日本語") == "ordinary text, Ünïcode, 日本語"
    assert printable("\ud800") == r"\ud800"
    assert printable("a\u200bb") == r"a\u200bb"


def test_names_from_the_store_are_tamed(
    call: Call, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.open(url) as opened:
        run = opened.create_run("evil", config={EVIL: EVIL})
        state: dict[str, Any] = {EVIL: {EVIL: 1}, "x": EVIL}
        run.save(state, step=1, metrics={EVIL: 1.0}, meta={EVIL: EVIL})
        run.save({"y": 1}, step=2)
    for command in (
        ["ls", "evil"],
        ["ls"],
        ["ls", "evil", "--json"],
        ["show", "evil/main/step1", "--tensors"],
        ["show", "evil/main/step1", "--json"],
        ["run", "show", "evil"],
        ["log", "evil"],
        ["log", "evil", "--json"],
        ["diff", "evil/main/step1", "evil/main/step2"],
        ["verify", "--deep"],
    ):
        printed = call(*command).output
        assert all(char.isprintable() or char == "\n" for char in printed), command
        assert "\u202e" not in printed


def test_a_pipe_gets_plain_text(call: Call) -> None:
    for command in (["ls"], ["show", "demo"], ["run", "ls"], ["doctor"], ["--help"]):
        assert "\x1b" not in call(*command).output


def test_a_terminal_gets_no_markup_of_the_store_and_no_cut_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    columns = [
        Column("run"),
        Column("id"),
        Column("metrics", folds=True),
        Column("n", is_number=True),
    ]
    name, digest = "20261121_043705_a1b2c3d4_2", "0123456789ab"
    metrics = "[bold]loss[/bold]=0.5 " * 8
    output.table(Table(columns, [{"run": name, "id": digest, "metrics": metrics, "n": 7}]))
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert f"{name}  {digest}  [bold]loss" in lines[1]
    assert "…" not in screen.getvalue()


def test_a_long_value_hangs_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", "40")
    output.fields({"a": "x", "name": "word " * 20, "empty": ""})
    lines = screen.getvalue().splitlines()
    assert lines[0] == "a     x"
    assert lines[2].startswith("      word")
    output.show(output.Sentence("1.23456 of 7.891 " * 5))
    lines = screen.getvalue().splitlines()
    assert {word for line in lines[-3:] for word in line.split()} == {"1.23456", "of", "7.891"}
    assert max(map(len, lines)) <= 40
    output.fields({"name": "f" * 64})  # a digest is left whole
    assert "f" * 64 in screen.getvalue()


def test_sizes_ages_numbers() -> None:
    assert [output.size(n) for n in (0, 1023, 1024, 168 * 2**20, 2**60)] == [
        *("0 B", "1023 B", "1.0 KiB", "168.0 MiB", "1024.0 PiB")
    ]
    assert output.counted(1, "run") == "1 run"
    assert output.counted(1200, "run") == "1,200 runs"
    assert output.metrics({"a": 0.1 + 0.2, "b": float("inf")}) == "a=0.3 b=inf"


def test_the_bar_is_on_stderr_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.registry.cli import output as progress

    with progress.bar("x") as advance:
        advance(5)  # no terminal: nothing at all
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with progress.bar("[b]x[/b]") as advance:
        advance.expect(lambda: 2048)
        advance(1024)
    assert "[b]x[/b]" in screen.getvalue()
    assert "1.0 KiB of 2.0 KiB" in screen.getvalue()


def test_without_a_terminal_a_long_command_says_how_far_it_is_each_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 0.0
    # Not the module's own: loops of servers in this process would sleep for hours.
    monkeypatch.setattr(output, "clock", SimpleNamespace(monotonic=lambda: now_s))
    with output.bar("verifying") as advance:
        advance.expect(lambda: pytest.fail("looking for the total costs requests"))
        for now_s in (1.0, 59.0, 60.0, 90.0, 119.0, 125.0):
            advance(int(now_s) * 1024**2)
    lines = ["verifying: 60.0 MiB so far, 1 min", "verifying: 125.0 MiB so far, 2.08 min"]
    assert capsys.readouterr().err.splitlines() == lines


def test_before_its_work_a_command_says_what_it_has_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 0.0
    monkeypatch.setattr(output, "clock", SimpleNamespace(monotonic=lambda: now_s))
    with output.bar("deleting") as advance:
        for at_s, act, done in (
            (59.0, advance.lists, 1000),
            (60.0, advance.lists, 2000),
            (119.0, advance.reads, 5),
            (120.0, advance.reads, 3 * 1024),
            (180.0, advance, 7 * 1024),
            (240.0, advance.reads, 9 * 1024),
        ):
            now_s = at_s
            act(done)
    assert capsys.readouterr().err.splitlines() == [
        "reading: 2,000 names, 0 B so far, 1 min",
        "reading: 2,000 names, 3.0 KiB so far, 2 min",
        "deleting: 7.0 KiB so far, 3 min",
        "deleting: 7.0 KiB so far, 4 min",
    ]
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with output.bar("deleting") as advance:
        advance.lists(1200)
    assert "reading: 1,200 names, 0 B" in screen.getvalue()


@pytest.mark.parametrize(
    "words", [["gc"], ["gc", "--dry-run"], ["verify"], ["repack", "--dry-run"], ["du"]]
)
def test_who_plans_for_long_says_so(tmp_path: Path, monkeypatch, words: list[str]) -> None:
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as registry:
        registry.create_run("a").save({"w": 1.0}, step=1)
    ticks = count(step=61)
    monkeypatch.setattr(output, "clock", SimpleNamespace(monotonic=lambda: next(ticks)))
    told = invoke(*words, "-r", tmp_path / "reg").stderr
    assert re.search(r"^reading: [1-9][0-9]* names?, .* so far, .*min$", told, re.MULTILINE)


def test_plain_table_is_aligned() -> None:
    columns = [Column("a"), Column("n", is_number=True)]
    rows = [{"a": "long name", "n": 1}, {"a": "長い", "n": 100}]
    assert tables.plain(Table(columns, rows)) == [
        *("a            n", "long name    1", "長い       100")
    ]
