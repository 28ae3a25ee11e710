"""Commands that print while something goes on: a run that is trained, a folder that fills."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.registry.cli import output
from holdfast.registry.cli import output as progress
from holdfast.registry.loading.following import watching
from tests.registry.cli.calling import Call

Train = Callable[..., None]


@pytest.fixture
def train(url: str, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Makes a run `live`; with each wait of a follower it saves, then it is completed."""
    opened = holdfast.open(url)
    run = opened.create_run("live", monitor=holdfast.Monitor(metric="loss", mode="min"))

    def step(number: int) -> None:
        run.save({"w": number}, step=number, metrics={"loss": 1 / number})

    acts = iter(
        [
            lambda: step(1),
            lambda: None,
            lambda: step(2),
            lambda: setattr(run, "status", "completed"),
        ]
    )
    monkeypatch.setattr(watching, "_sleep", lambda _: next(acts)())
    return step


def test_a_run_is_followed_in_a_pipe(call: Call, train: Train) -> None:
    lines = call("run", "show", "live", "--follow").stdout.splitlines()
    assert lines[0].split() == ["run", "live"]
    added = [line.partition("Z  ")[2] for line in lines if "Z  " in line]
    assert [text.partition("save ")[2].split()[::2] for text in added[:2]] == [
        ["main/step00000001", "loss=1"],
        ["main/step00000002", "loss=0.5"],
    ]
    assert added[2:] == ["status completed"]


def test_a_run_is_followed_as_lines_of_json(call: Call, train: Train) -> None:
    printed = call("run", "show", "live", "--follow", "--json").stdout
    shapes = [json.loads(line) for line in printed.splitlines()]
    assert [shape["checkpoints"] for shape in shapes] == [0, 1, 2, 2]
    assert shapes[-1] == json.loads(call("run", "show", "live", "--json").stdout)


def test_a_run_is_followed_on_a_terminal(
    call: Call, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    monkeypatch.setenv("LINES", "24")
    printed = call("run", "show", "live", "--follow").stdout
    lines = [line.rstrip() for line in printed.splitlines()]
    assert [line.split() for line in lines[:2]] == [["run", "live"], ["status", "completed"]]
    assert "loss  █▁  0.5" in lines
    assert lines[-1].endswith("status completed")
    assert len(lines) < 24


def test_a_finished_run_is_shown_once(call: Call, url: str) -> None:
    with holdfast.open(url) as opened:
        opened.run("demo").status = "completed"
    once = call("run", "show", "demo").stdout
    assert call("run", "show", "demo", "--follow").stdout == once


def test_a_folder_is_watched_as_lines_of_json(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "series"
    folder.mkdir()

    def arrive() -> None:
        step_file = struct.pack("<ii6f", 100, 2, *range(6))
        (folder / "step_000100.bin").write_bytes(step_file)

    def interrupt() -> None:
        raise KeyboardInterrupt

    now = iter(range(0, 100_000, 100))
    acts = iter([arrive, *[lambda: None] * 6, interrupt])
    monkeypatch.setattr(watching, "_monotonic", lambda: next(now))
    monkeypatch.setattr(watching, "_sleep", lambda _: next(acts)())
    watched = ("push", folder, "series", "--layout", "andrea", "--watch", "--quiet", "1s")
    printed = call(*watched, "--json", status=130).stdout.splitlines()
    (taken,) = map(json.loads, printed)
    assert set(taken) == {"path", "outcome", "kind", "ref", "why", "warnings"}
    assert (taken["path"], taken["outcome"]) == ("step_000100.bin", "imported")


@pytest.mark.parametrize("only", [["--only", "rest"], ["--only", "model"]])
def test_a_pull_tells_its_total(
    only: list[str], call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.init(tmp_path / "packed", keyframe_every=8, skip_race_probe=True) as opened:
        run = opened.create_run("x")
        weights, drawn = np.arange(100_000.0), np.random.default_rng(0)
        for step in range(3):
            weights = weights + drawn.normal(size=len(weights)) * 1e-9  # stored as deltas
            run.save({"model": {"w": weights}, "rest": weights[:50_000] + step}, step=step)
    moved: list[tuple[int, int | None]] = []
    shown = progress.Bar(lambda done, total, _: moved.append((done, total)))
    monkeypatch.setattr(progress, "bar", lambda label: nullcontext(shown))
    call("pull", "x", "--to", tmp_path / "out.npz", *only, "-r", tmp_path / "packed")
    before = [done for done, total in moved if total is None]
    totals = [total for _, total in moved if total is not None]
    done, _ = moved[-1]
    assert before
    assert done == totals[-1] > before[-1]
    assert totals[0] > 0.99 * done  # without the tables of packs
