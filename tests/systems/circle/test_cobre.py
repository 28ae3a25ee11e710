"""Cobre's circle: preempted here, gone on with by a program that knows its files alone, ended here.

The native jobs are real processes of two ranks that end by signals, as SLURM sends them, and are
started again, as it requeues them. Everything is compared with a training that nothing interrupted.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast import formats
from tests.support.commands import invoke
from tests.support.sameness import assert_same
from tests.systems import cobre as acts
from tests.systems.paced import Paced

pytest.importorskip("flatbuffers")

PROGRAM = Path(__file__).with_name("cobre_program.py")


def job(url: str, number: signal.Signals, before: int, until: int) -> None:
    """Train in a new job, which ends by a signal after some iterations, and exits with 0."""
    with Paced("cobre", url) as training:
        if until - before > 1:
            assert training.steps(until - before - 1) == until - 1
        training.send(number, to_all=True)
        assert training.last() == 0


def program(folder: Path, count: int) -> None:
    """Let the other program go on, in a place from which it cannot import Holdfast."""
    command = [sys.executable, "-I", PROGRAM, folder, str(count)]
    subprocess.run(command, cwd=folder, check=True)


def test_a_preempted_training_goes_through_another_program_and_back(tmp_path: Path) -> None:
    url, tree = str(tmp_path / "registry"), tmp_path / "tree"
    holdfast.init(url).close()
    job(url, signal.SIGTERM, 0, 3)
    job(url, signal.SIGTERM, 3, 5)
    invoke("pull", acts.RUN, "--to", str(tree), "--layout", "preset", "-r", url)
    assert (tree / "latest").readlink() == Path("policy_000005")
    program(tree, 4)
    taken = invoke("push", str(tree), acts.RUN, "--layout", "cobre", "-r", url).output
    assert f"imported: policy_000009 as {acts.RUN}/training/step00000009" in taken
    assert taken.count("there already") == 2
    with holdfast.open(url) as reg:
        run = acts.open_policy(reg)
        assert (run.status, run.latest().step) == ("interrupted", 9)
        assert_same(run.latest().load(), acts.straight(9).state())
    job(url, signal.SIGINT, 9, 11)
    with holdfast.open(url) as reg:
        acts.train(reg, acts.ITERATIONS)
        run = acts.open_policy(reg)
        assert [one.step for one in run.checkpoints()] == [9, 11, 12]
        assert_same(run.latest().load(), acts.straight().state())
        assert reg.verify(deep=True).ok
    again = tmp_path / "again"  # the program has moved the link of the tree
    invoke("pull", acts.RUN, "--to", str(again), "--layout", "preset", "-r", url)
    assert sorted(path.name for path in again.iterdir() if path.name[0] != ".") == [
        "latest",
        "policy_000009",
        "policy_000011",
        "policy_000012",
    ]
    assert (again / "latest").readlink() == Path("policy_000012")
    for path in again.glob("policy_*"):
        assert formats.validate(path) == []
    ours, theirs = (
        json.loads((one / "policy_000009/metadata.json").read_text()) for one in (again, tree)
    )
    assert ours == theirs  # its time, too
