"""`gate set` and `ls RUN/gates`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.registry.cli.calling import Call

PRESET = """
name = "two"
phases = [
    { name = "1", monitors = [{ metric = "loss", mode = "min" }] },
    { name = "2" },
]
gates = [{ name = "first_best", phase = "1" }, { name = "second_best", phase = "2" }]
"""


@pytest.fixture
def two(url: str, tmp_path: Path) -> str:
    """A run of two phases with a gate each."""
    (tmp_path / "two.toml").write_text(PRESET)
    with holdfast.open(url) as opened:
        run = opened.create_run("two", preset=tmp_path / "two.toml")
        run.save({"w": 1}, step=1, phase=1, metrics={"loss": 0.5})
        run.save({"w": 2}, step=2, phase=1, metrics={"loss": 0.25})
        run.save({"w": 3}, step=3, phase=2)
    return "two"


def test_set_a_checkpoint(call: Call) -> None:
    told = call("gate", "set", "demo", "bc_best", "demo/main/step10").stdout
    assert told == "demo/gates/bc_best -> demo/main/step00000010\n"
    call("gate", "set", "demo", "bc_best", "demo/main/step10")
    shown = call("show", "demo/gates/bc_best").stdout
    assert shown.split()[:2] == ["ref", "demo/main/step00000010"]
    assert "gates/bc_best" in call("ls", "demo").stdout.splitlines()[1]
    refused = call("gate", "set", "demo", "bc_best", "demo/latest", status=5)
    assert "fails verification" in refused.stderr


def test_set_the_best_of_its_phase(call: Call, two: str) -> None:
    told = call("gate", "set", two, "first_best").stdout
    assert told == "two/gates/first_best -> two/phase1/step00000002\n"
    assert (
        "belongs to phase 1"
        in call("gate", "set", two, "first_best", "two/latest", status=3).stderr
    )
    assert "'first_best'" in call("gate", "set", two, "first_bset", status=3).stderr
    assert "no best" in call("gate", "set", two, "second_best", status=4).stderr


def test_ls(call: Call, two: str, call_json: Callable[..., Any]) -> None:
    assert call("ls", "demo/gates").stderr == "no gates yet\n"
    call("gate", "set", two, "first_best")
    header, first, second = call("ls", f"{two}/gates").stdout.splitlines()
    names = re.split("  +", header)
    assert names == ["pin", "checkpoint", "id", "loss", "age", "marks"]
    assert first.split()[:2] == ["gates/first_best", "two/phase1/step00000002"]
    assert first.split()[3] == "0.25"
    assert second.split() == ["gates/second_best", "-", "-", "-", "not", "set,", "of", "phase", "2"]
    standing, waiting = call_json("ls", f"{two}/gates")
    fields = {"ref", "id", "kind", "name", "set", "source", "metrics", "marks"}
    assert set(standing) == set(waiting) == fields
    assert standing["source"] == "two/phase1/step00000002"
    assert standing["ref"] == "two/gates/first_best"
    assert standing["metrics"] == {"loss": 0.25}
    assert waiting["id"] is None
    assert waiting["source"] is None
    assert call_json("gate", "set", two, "first_best") == standing
