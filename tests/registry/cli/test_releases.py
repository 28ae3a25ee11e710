"""`release publish` and `rollback`, `ls RUN/releases`, and the release as a stored state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.registry.cli.calling import Call

CARD = """\
intended_use: tests
description: "a \\x1b[31m classifier"
performance: {accuracy: 0.5, calibration: .nan}
"""


@pytest.fixture
def card(tmp_path: Path) -> Path:
    (tmp_path / "card.yaml").write_text(CARD)
    return tmp_path / "card.yaml"


def test_publish(call: Call, card: Path) -> None:
    options = ["--card", card, "--metric", "accuracy=0.5", "--only", "model"]
    told = call("release", "publish", "demo/main/step10", "1.0.0", *options).stdout
    assert told.startswith("published: demo/releases/1.0.0  ")
    assert told.endswith("  2.3 KiB\n")
    call("release", "publish", "demo/main/step10", "1.0.0", *options)
    assert "another version" in call("release", "publish", "demo", "1.0.0", status=5).stderr
    assert "Leave out" in call("release", "publish", "demo", "v1.0.1", status=3).stderr
    absent = ["--card", card.with_name("absent")]
    assert "card" in call("release", "publish", "demo", "1.0.1", *absent, status=3).stderr
    call("release", "publish", "demo", "1.0.1", "--metric", "high", status=2)
    assert len(call("ls", "demo/releases").stdout.splitlines()) == 2


def test_ls(call: Call, card: Path, call_json: Callable[..., Any]) -> None:
    assert call("ls", "demo/releases").stderr == "no releases yet\n"
    assert call_json("ls", "demo/releases") == []
    call("release", "publish", "demo", "1.1.0")
    call("release", "publish", "demo/main/step10", "1.0.1", "--card", card, "--metric", "a=1")
    found = call_json("diff", "demo/releases/1.1.0", "demo/main/step10")
    assert (found["before"]["ref"], found["same"]) == ("demo/releases/1.1.0", False)
    assert found["metrics"][0]["before"] == 0.25
    header, first, second = call("ls", "demo/releases").stdout.splitlines()
    assert header.split() == ["pin", "checkpoint", "id", "loss", "a", "age", "marks"]
    assert first.split()[:2] == ["releases/1.1.0", "demo/phase2/step00000020"]
    assert first.split()[3] == "0.25"
    assert second.split()[0] == "releases/1.0.1"
    assert (first.endswith("latest"), second.endswith("latest")) == (False, True)
    one, other = call_json("ls", "demo/releases")
    assert set(one) == {"ref", "id", "kind", "name", "set", "source", "metrics", "marks"}
    assert (one["marks"], other["marks"]) == ([], ["latest"])
    assert other["metrics"] == {"a": 1.0}


def test_show(call: Call, card: Path, call_json: Callable[..., Any]) -> None:
    call("release", "publish", "demo", "1.0.0", "--card", card)
    shown = call("show", "demo/releases/1.0.0").stdout
    assert "source   demo/phase2/step00000020\n" in shown
    assert "marks    latest\n" in shown
    text = shown.partition("\n\n")[2]
    assert text.startswith("description: ")
    assert "\x1b" not in shown
    assert "intended_use: tests\nperformance:\n  accuracy: 0.5\n  calibration: .nan\n\n" in text
    found = call_json("show", "demo/releases/latest")
    assert found["card"]["performance"] == {"accuracy": 0.5, "calibration": "nan"}
    assert "'1.0.0'" in call("show", "demo/releases/1.0.1", status=4).stderr


def test_rollback(call: Call, call_json: Callable[..., Any]) -> None:
    call("release", "publish", "demo/main/step10", "1.0.0")
    call("release", "publish", "demo", "1.1.0")
    told = call("release", "rollback", "demo", "1.0.0", "--reason", "1.1.0 is slow").stdout
    assert told == "demo/releases/latest -> demo/releases/1.0.0\n"
    action = call_json("log", "demo")[0]["actions"][0]
    assert action == {"action": "release.point", "version": "1.0.0", "reason": "1.1.0 is slow"}
    call("release", "rollback", "demo", "1.2.0", status=4)
    # One command says what is in production, and who put it there, over all kinds of names.
    call("run", "set", "demo", "--label", "prod")
    names = call_json("ls", "--names")
    assert names == call_json("ls", "demo", "--names")
    assert [(one["kind"], one["name"], one["source"]) for one in names] == [
        ("release", "1.0.0", "demo/main/step00000010"),
        ("tag", "keeper", "demo/phase2/step00000020"),
        ("label", "prod", "demo"),
    ]
    commits = {one["time"]: one["author"] for one in call_json("log", "demo")}
    assert [commits[one["since"]] for one in names] == [one["by"] for one in names]
    assert names[0]["since"] == call_json("log", "demo")[1]["time"]
    latest = call("ls", "--names").stdout.splitlines()[1]
    assert latest.startswith("latest release  1.0.0   demo/main/step00000010")
    for where in ("labels=prod", "tags=keeper", "releases=1.1.0"):
        assert [one["run"] for one in call_json("run", "ls", "--where", where)] == ["demo"]
    assert call_json("release", "rollback", "demo", "1.1.0")["latest"] is True


def test_a_release_is_pulled_and_shown(
    call: Call, tmp_path: Path, call_json: Callable[..., Any]
) -> None:
    call("release", "publish", "demo/main/step10", "1.0.0", "--only", "model")
    pulled = call("pull", "demo/releases/1.0.0", "--to", tmp_path / "x.safetensors").stdout
    assert pulled.startswith("pulled: demo/releases/1.0.0  ")
    assert load_file(tmp_path / "x.safetensors")["w"].tolist() == [float(i) for i in range(600)]
    call("pull", "demo/releases/latest", "--to", tmp_path / "y.safetensors")
    shown = call("show", "demo/releases/latest", "--tensors").stdout
    assert "ref      demo/releases/1.0.0" in shown
    assert "source   demo/main/step00000010" in shown
    assert "model/w" in shown
    found = call_json("show", "demo/releases/1.0.0")
    assert set(found) == {
        *("ref", "id", "run", "kind", "created", "metrics", "source", "size_bytes"),
        *("components", "lossy", "file", "card", "marks", "pull", "load"),
    }
    assert (found["kind"], found["source"]) == ("release", "demo/main/step00000010")
    assert call_json("run", "show", "demo")["releases"] == ["1.0.0"]
