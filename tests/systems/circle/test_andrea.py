"""ANDREA's circle: trained here, gone on with by a program of its files, and trained here again."""

from __future__ import annotations

import ast
import copy
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import holdfast
from holdfast import Run
from holdfast.registry.formats.andrea import PARTS
from tests.support.sameness import assert_same
from tests.systems.circle import andrea_engine as program
from tests.systems.circle.andrea_engine import SOURCES, ZOMBIE, Engine
from tests.systems.paced import Paced

RUN, FLOOR, NEW_FLOOR, LAST_FLOOR = "andrea", 0.05, 0.2, 0.1
#: The steps at which the operator pivots, files are handed over, and their program went back to.
PIVOT, OVER, BACK, HOME, END = 300, 400, 500, 700, 900
FINAL = ("step_000100.bin", "step_000251.bin", "step_000700.bin", "step_000900.bin")


def never_interrupted() -> tuple[Engine, dict[int, bytes]]:
    """Train in one process with the same policies; return the end, and the arrays by step."""
    engine, arrays = Engine(FLOOR), {}
    while engine.step < END:
        if engine.step == PIVOT:
            engine.floor, engine.arms, engine.samples = NEW_FLOOR, program.fresh_arms(), []
        if engine.step == BACK:  # the bandit alone stays as it was when the program died
            engine.salt, engine.arms = 1, drifted(engine)
            engine.arms[ZOMBIE] = {"weight": 1.546, "pulls": 17}
        if engine.step == HOME:
            engine.salt, engine.floor = 0, LAST_FLOOR
            engine.arms, engine.samples = program.fresh_arms(), []
        engine.train()
        arrays[engine.step] = b"".join(
            one.tobytes() for one in (engine.weights, engine.m, engine.v)
        )
    return engine, arrays


def drifted(engine: Engine) -> dict[str, Any]:
    """Return the bandit 150 steps later, at the death of the program."""
    lost = copy.deepcopy(engine)
    for _ in range(150):
        lost.train()
    return lost.arms


@contextmanager
def engine_of_its_own(folder: Path, until: int, *more: str) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable,
        program.__file__,
        folder,
        str(until),
        "--floor",
        str(NEW_FLOOR),
        *more,
    ]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        yield process


def flush(process: subprocess.Popen[str], until: int) -> None:
    """Let the program train until it has written its files at a step."""
    assert process.stdin is not None
    assert process.stdout is not None
    step = 0
    while step != until:
        process.stdin.write("\n")
        process.stdin.flush()
        step = int(process.stdout.readline())


def until_imported(reports: Iterator[Any], name: str) -> tuple[str, ...]:
    """Follow a folder until a file is imported; return its warnings."""
    for one in reports:
        assert one.outcome != "refused", one
        if one.path == name:
            return tuple(one.warnings)
    raise AssertionError(f"{name} was never imported")


def train_natively(url: str) -> None:
    with Paced("circle", url) as training:
        assert training.steps(112) == 112
        training.send(signal.SIGUSR1)  # writes at the next boundary, and goes on
        assert training.steps(138) == 250
        training.send(signal.SIGTERM)
        assert training.last() == 0
    with Paced("circle", url) as training:
        assert training.steps(49) == PIVOT
    with holdfast.open(url) as reg:
        run = reg.run(RUN)
        assert [one.step for one in run.checkpoints()] == [100, 200, 251, 300]
        run.phases.pivot("polish", config={"floor": NEW_FLOOR}, meta={"why": "samples repeat"})
    with Paced("circle", url) as training:
        assert training.steps(100) == OVER


def go_on_in_files(run: Run, tree: Path) -> None:
    """Follow the folder while its program trains, dies, goes back, and ends."""
    reports = run.exchange.watch_folder(tree, quiet_s=1, poll_s=0.02, timeout_s=300)
    with engine_of_its_own(tree, HOME) as process:
        for step in (BACK, 600):
            flush(process, step)
            assert until_imported(reports, f"step_{step:06d}.bin") == ()
        flush(process, 650)  # losses of 50 steps that no step file has
        process.kill()
    with engine_of_its_own(tree, HOME, "--resume", str(BACK), "--salt", "1", "--zombie") as process:
        flush(process, 600)
        (warning,) = until_imported(reports, "step_000600.bin")
        assert warning == "the folder went back to step 500; superseded: 600"
        flush(process, HOME)
        assert until_imported(reports, f"step_{HOME:06d}.bin") == ()
    assert process.returncode == 0


def test_a_training_goes_through_the_files_of_andrea_and_back(tmp_path: Path) -> None:
    imported = {
        name.name
        for node in ast.walk(ast.parse(Path(program.__file__).read_text()))
        if isinstance(node, ast.Import)
        for name in node.names
    }
    assert imported == {"argparse", "json", "struct", "sys", "numpy"}
    url, tree, again = str(tmp_path / "registry"), tmp_path / "in", tmp_path / "out"
    holdfast.init(url).close()
    train_natively(url)
    with holdfast.open(url) as reg:
        run = reg.run(RUN)
        assert set(run.manifest.spec.required_keys) == {"step", *PARTS}  # preset and file agree
        run.exchange.checkout(tree)
        assert {one.outcome for one in run.exchange.import_tree(tree)} <= {
            "there already",
            "passed over",  # the archives
        }
        go_on_in_files(run, tree)
        sources = {"streams/state/arms": SOURCES, "bandit/arms": SOURCES}
        assert run.restore(sources=sources).stale == (f"streams/state/arms/{ZOMBIE}",)
        run.phases.pivot("without-it", config={"floor": LAST_FLOOR})  # from an imported checkpoint
        assert run.restore(sources=sources).stale == ()
    with Paced("circle", url) as training:
        assert training.steps(END - HOME) == END
    engine, arrays = never_interrupted()
    with holdfast.open(url) as reg:
        run = reg.run(RUN)
        checkpoints = {one.step: one for one in run.checkpoints()}
        assert list(checkpoints) == [100, 200, 251, *range(300, END + 1, 100)]
        for step, one in checkpoints.items():
            state = one.load()
            assert {type(state[name]) for name in ("weights", "m", "v")} == {np.ndarray}
            assert b"".join(state[name].tobytes() for name in ("weights", "m", "v")) == arrays[step]
            assert one.metrics == {"loss": engine.losses[step - 1]["loss"]}
            native = step <= OVER or step > HOME
            assert ("by" in one.meta, "import" in one.meta) == (native, not native)
        assert_same(run.streams["loss"].read(), engine.losses)
        assert_same(run.streams["samples"].read(), engine.samples)
        assert run.streams["state"].read()[-1]["arms"] == engine.arms
        assert run.streams["samples"].archives == {"polish": 3, "without-it": 4}
        assert [one.config["floor"] for one in run.phases.pivots] == [NEW_FLOOR, LAST_FLOOR]
        assert run.phases.pivots[0].meta == {"why": "samples repeat"}
        lost = [one for one in run.manifest.checkpoints if one.superseded]
        assert [one.step for one in lost] == [600]
        for fork_at in (OVER, HOME):
            fork = reg.fork(f"{RUN}/main/step{fork_at}", f"fork-{fork_at}")
            assert_same(fork.streams["loss"].read(), engine.losses[:fork_at])
        run.exchange.checkout(again)
        assert reg.verify(deep=True).ok
    for path in sorted(tree.glob("step_*.bin")):  # those that the other program wrote, too
        assert path.read_bytes() == (again / path.name).read_bytes()
    assert {one.name for one in again.iterdir()} >= set(FINAL)
    archived = json.loads((again / "archive/without-it/run.state.json").read_text())
    assert archived == json.loads((tree / "run.state.json").read_text())
    assert json.loads((again / "run.loss.json").read_text()) == engine.losses
    assert json.loads((again / "run.samples.json").read_text()) == engine.samples
    assert json.loads((again / "run.state.json").read_text()) == {"arms": engine.arms}
