"""`stream append`, `read`, `archive` and `ls`: lines of JSON in and out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.registry.cli.calling import Call
from tests.support.commands import invoke


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    text = '{"step": 1, "loss": 0.5}\n\n{"loss": NaN, "step": 2, "arm": "\\u202e\\u001b"}\n'
    (tmp_path / "entries.jsonl").write_text(text)
    return tmp_path / "entries.jsonl"


def test_append_and_read(call: Call, url: str, lines: Path) -> None:
    told = call("stream", "append", "demo", "loss", lines).stdout
    assert told == "demo: stream loss: 2 lines appended, 2 in all\n"
    first, second = call("stream", "read", "demo", "loss").stdout.splitlines()
    assert first == '{"step": 1, "loss": 0.5}'
    assert second == '{"loss": "nan", "step": 2, "arm": "\\u202e\\u001b"}'
    with holdfast.open(url) as opened:
        assert math.isnan(opened.run("demo").streams["loss"].read()[1]["loss"])


def test_a_push_brings_entries_and_knows_what_it_continues(
    call: Call, lines: Path, tmp_path: Path
) -> None:
    (tmp_path / "raw").write_bytes(b"1")
    given = ["push", tmp_path / "raw", "raw", "--create", "--stream", f"loss={lines}"]
    call(*given, "--step", 2, "--after", "none")
    assert "there already" in call(*given, "--step", 2, "--after", "none").stdout
    assert len(call("stream", "read", "raw", "loss").stdout.splitlines()) == 2
    told = call(*given, "--step", 4, "--after", 3, status=5).stderr
    assert "expected step 3 as the newest; found step 2" in told
    call(*given, "--step", 4, "--after", "-1", status=2)
    call("run", "set", "raw", "--status", "done", status=3)
    assert call("run", "set", "raw", "--status", "completed").stdout == "raw: completed\n"
    told = call(*given, "--step", 4, "--after", 2, status=5).stderr
    assert "holdfast run set raw --status running" in told
    for stopped in ("interrupted", "failed"):
        assert "is completed" in call("run", "set", "raw", "--status", stopped, status=5).stderr
    call("run", "set", "raw", "--status", "running")
    call(*given, "--step", 4, "--after", 2)
    assert len(call("stream", "read", "raw", "loss").stdout.splitlines()) == 4


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_append_from_stdin(arguments: list[str], call: Call) -> None:
    line = '{"step": 7, "ü": "é"}'
    result = invoke("stream", "append", "demo", "loss", *arguments, input=line)
    assert result.stdout == "demo: stream loss: 1 line appended, 1 in all\n"
    found = call("stream", "read", "demo", "loss").stdout
    assert json.loads(found) == {"step": 7, "ü": "é"}


def test_read_a_part(call: Call, call_json: Callable[..., Any], tmp_path: Path) -> None:
    entries = [{"step": step} for step in range(10)]
    (tmp_path / "e").write_text("\n".join(map(json.dumps, entries)))
    assert call_json("stream", "append", "demo", "loss", tmp_path / "e") == {
        "run": "demo",
        "stream": "loss",
        "appended": 10,
        "entries": 10,
    }
    assert call("stream", "read", "demo", "loss", "--from", 9).stdout == '{"step": 9}\n'
    assert call_json("stream", "read", "demo", "loss", "--from", 3, "--to", 4) == entries[3:5]
    assert call("stream", "read", "demo", "loss", "--from", 30).stdout == ""
    call("stream", "read", "demo", "loss", "--from", 4, "--to", 3, status=3)
    assert "'loss'" in call("stream", "read", "demo", "lss", status=4).stderr


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ("{", "not JSON"),
        ("[1]", "not an entry"),
        ('{"loss": 1}', 'not an entry; expected {"step": 0, ...}; found {"loss": 1}'),
        ('{"step": 1, "step": 2}', "twice"),
        ('{"step": 1, "x": ' + "[" * 5000, "not JSON"),
        ('{"step": -1}', "not a step"),
        ('{"step": ' + "9" * 5000 + "}", "not JSON"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_appended(
    bad: str, told: str, call: Call, tmp_path: Path
) -> None:
    (tmp_path / "e").write_text(f'{{"step": 1}}\n{bad}\n')
    result = call("stream", "append", "demo", "loss", tmp_path / "e", status=3)
    assert told in result.stderr
    assert "line 2" in result.stderr or "entries[1]" in result.stderr
    assert call("ls", "demo/streams").stderr == "no streams yet\n"


def test_bytes_that_are_no_text_and_no_file(call: Call, tmp_path: Path) -> None:
    (tmp_path / "e").write_bytes(b"\xff\n")
    assert "line 1" in call("stream", "append", "demo", "loss", tmp_path / "e", status=3).stderr
    absent = call("stream", "append", "demo", "loss", tmp_path / "absent", status=3)
    assert "No such file" in absent.stderr


def test_archive(call: Call, call_json: Callable[..., Any], lines: Path) -> None:
    call("stream", "append", "demo", "samples", lines, "--lifetime", "resettable")
    told = call("stream", "archive", "demo", "samples", "pivot").stdout
    assert told == "demo: stream samples: 2 entries archived as pivot\n"
    assert call("stream", "read", "demo", "samples").stdout == ""
    archived = call_json("stream", "read", "demo", "samples", "--archive", "pivot")
    assert [entry["step"] for entry in archived] == [1, 2]
    repeated = call_json("stream", "archive", "demo", "samples", "pivot")
    assert repeated == {"run": "demo", "stream": "samples", "archive": "pivot", "entries": 2}
    call("stream", "append", "demo", "loss", lines)
    assert "kept for ever" in call("stream", "archive", "demo", "loss", "x", status=3).stderr
    wrong = ["--lifetime", "sometimes"]
    assert "forever" in call("stream", "append", "demo", "x", lines, *wrong, status=3).stderr


def test_the_log_says_how_many_there_are(call: Call, lines: Path, tmp_path: Path) -> None:
    call("stream", "append", "demo", "loss", lines)
    (tmp_path / "more").write_text('{"step": 7}\n{"step": 9}\n')
    call("stream", "append", "demo", "loss", tmp_path / "more")
    _, newest, older, *_ = call("log", "demo").stdout.splitlines()
    assert "append to stream loss: 4 entries in all, steps " in newest
    assert " to 9 in the newest segment" in newest
    assert "append to stream loss: 2 entries in all, steps 1 to 2 in the newest segment" in older


def test_ls(call: Call, url: str, call_json: Callable[..., Any], lines: Path) -> None:
    call("stream", "append", "demo", "samples", lines, "--lifetime", "resettable")
    call("stream", "archive", "demo", "samples", "pivot")
    call("stream", "append", "demo", "loss", lines)
    header, samples, loss = call("ls", "demo/streams").stdout.splitlines()
    assert header.split() == ["stream", "lifetime", "entries", "segments", "archives"]
    assert samples.split() == ["samples", "resettable", "0", "0", "pivot", "(2)"]
    assert loss.split() == ["loss", "forever", "2", "1"]
    assert call_json("ls", "demo/streams")[0] == {
        "name": "samples",
        "lifetime": "resettable",
        "entries": 0,
        "segments": 0,
        "archives": {"pivot": 2},
    }
    assert call_json("run", "show", "demo")["streams"] == {"samples": 0, "loss": 2}


def test_ls_of_declared_streams(call: Call, url: str, lines: Path, tmp_path: Path) -> None:
    (tmp_path / "night.toml").write_text('streams = [{ name = "loss", lifetime = "forever" }]')
    with holdfast.open(url) as opened:
        opened.create_run("night", preset=tmp_path / "night.toml")
    assert call("ls", "night/streams").stdout.splitlines()[1].split() == [
        *("loss", "forever", "0", "0")
    ]
    assert "'loss'" in call("stream", "append", "night", "los", lines, status=3).stderr
