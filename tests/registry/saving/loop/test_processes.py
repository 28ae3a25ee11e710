"""Real processes that are stopped as SLURM, systemd and torchrun stop them."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import holdfast

#: A training. It notes each completed step in a file before the checkpointer hears of it.
_TRAIN = """
import hashlib, multiprocessing, os, sys, threading, time
import numpy as np
import holdfast

def idle(): time.sleep(1e6)

def foreign(): hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # no handler runs meanwhile

def pause(step): time.sleep(0.005)

def train(place, every=1, rank=0, gather=lambda: None, after=pause, deadline_s=None, **options):
    run = holdfast.open(place).run("night", create=True)
    restored = run.restore()
    first = restored.checkpoint.step if restored else 0
    stopping = holdfast.Stopping(deadline_s=deadline_s)
    with run.checkpointer(every_steps=every, stopping=stopping, **options) as checkpointer:
        note = os.open(f"{place}.steps{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for step in range(first + 1, 10**9):
            gather()
            os.write(note, b"%d\\n" % step)
            checkpointer.step(step, {"w": np.full(50, step), "step": step})
            after(step)
"""


class Training:
    """A training in a process of its own, the leader of its group."""

    def __init__(self, place: Path, call: str, *command: str) -> None:
        self.place = place
        program = place.with_suffix(".py")
        program.write_text(
            f"{_TRAIN}\nif __name__ == '__main__':\n    place = sys.argv[1]\n{call}\n"
        )
        self._process = subprocess.Popen(
            [*(command or (sys.executable,)), str(program), str(place)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def completed(self, rank: int = 0) -> int:
        """Return the last completed step."""
        path = Path(f"{self.place}.steps{rank}")
        lines = path.read_text().splitlines() if path.exists() else []
        return int(lines[-1]) if lines else 0

    def after(self, step: int) -> Training:
        """Wait until a step is complete."""
        ends_s = time.monotonic() + 300
        while self.completed() < step:
            assert self._process.poll() is None, self._process.communicate()[1]
            assert time.monotonic() < ends_s
            time.sleep(0.005)
        return self

    def ended(self, timeout_s: float = 300) -> tuple[int, str]:
        """Wait for the end; return the exit status and what it said."""
        err = self._process.communicate(timeout=timeout_s)[1]
        return self._process.returncode, err

    def kill(self) -> None:
        """End whatever is left of the group."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.communicate()


Begin = Callable[..., Training]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    place = tmp_path / "reg"
    holdfast.init(place, skip_race_probe=True).close()
    begun: list[Training] = []

    def begin(call: str, *command: str) -> Training:
        begun.append(Training(place, f"    {call}", *command))
        return begun[-1]

    yield begin
    for one in begun:
        one.kill()


def found(training: Training) -> tuple[int, str]:
    """Return the latest step, which loads, and the status."""
    with holdfast.open(training.place) as opened:
        run = opened.run("night")
        latest = run.latest()
        assert latest.load()["step"] == latest.step
        return latest.step, run.status


def assert_left_in_time(training: Training, status: int = 143) -> None:
    code, err = training.ended()
    assert code == status, err
    assert found(training) == (training.completed(), "interrupted")


def test_slurm_signals_the_whole_group_with_its_workers(begin):
    # The worker is no trainer: it has to die by the signal, and must not disturb its parent.
    fork = "multiprocessing.get_context('fork').Process(target=idle)"
    call = (
        "begun = []\n"
        "    def after(step):\n"
        f"        if step == 1: begun.append({fork}); begun[0].start()\n"
        "        time.sleep(0.005)\n"
        "    try: train(place, every=100, after=after)\n"
        "    finally: begun[0].join(300); assert begun[0].exitcode == -15"
    )
    training = begin(call).after(5)
    os.killpg(training.pid, signal.SIGTERM)
    assert_left_in_time(training)


def test_slurm_signals_the_batch_shell_which_passes_it_on(begin, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(
        'trap \'kill -TERM "$child"\' TERM\n"$0" "$@" &\nchild=$!\nwait "$child"\nwait "$child"\n'
    )
    shell = ("sh", "-c", script.read_text(), sys.executable)
    training = begin("train(place, every=100)", *shell).after(5)
    os.kill(training.pid, signal.SIGTERM)
    assert_left_in_time(training)


@pytest.mark.parametrize("step", ["threading.Event().wait()", "foreign()"])
def test_a_step_longer_than_killwait_leaves_with_what_is_durable(begin, step):
    call = f"train(place, deadline_s=0.5, after=lambda step: step == 3 and {step})"
    training = begin(call).after(3)
    time.sleep(0.1)  # into the long step; if it has not begun, the test is only easier
    os.kill(training.pid, signal.SIGTERM)
    code, err = training.ended(20)  # KillWait
    assert code == 143
    assert "the deadline of 0.5 s passed" in err
    step_found, status = found(training)
    assert step_found in (2, 3)  # the save of 3 may still have been running
    assert (f"exiting with step {step_found}" in err, status) == (True, "interrupted")


def test_the_deadline_ends_a_process_whose_report_fails(begin):
    call = (
        "from holdfast.registry.saving.saver import RunHandle\n"
        "    RunHandle.backlog = lambda self: os.stat('/nowhere')\n"
        "    train(place, deadline_s=0.5, after=lambda step: step == 3 and foreign())"
    )
    training = begin(call).after(3)
    os.kill(training.pid, signal.SIGTERM)
    assert training.ended(20)[0] == 143


def test_systemd_stops_a_suspended_group(begin):
    training = begin("train(place, every=100)").after(5)
    os.kill(training.pid, signal.SIGSTOP)
    os.killpg(training.pid, signal.SIGTERM)
    os.killpg(training.pid, signal.SIGCONT)
    assert_left_in_time(training)


def test_slurm_signals_the_step_alone_and_again_and_kills_what_is_left(begin):
    training = begin("train(place, every=100)").after(5)
    for _ in range(3):
        os.kill(training.pid, signal.SIGTERM)
    code, _ = training.ended()
    assert code == 143
    training.kill()  # KillWait has passed
    assert found(training) == (training.completed(), "interrupted")
    again = begin("train(place)").after(training.completed() + 4)
    again.kill()
    assert found(again)[1] == "running"  # a killed process says nothing


_JOURNAL = "os.environ['HOLDFAST_JOURNAL'] = place + '.journal'\n    "
_NOT_CARRIED = (
    "from holdfast.registry.saving.journal.background import BackgroundCarrier\n"
    "    BackgroundCarrier.wake = lambda self: None\n    "
)


def test_a_signal_waits_until_the_registry_has_what_a_journal_holds(begin):
    training = begin(f"{_JOURNAL}train(place, background=False)").after(20)
    os.kill(training.pid, signal.SIGTERM)
    assert_left_in_time(training)


def test_at_the_deadline_it_says_what_is_only_in_the_journal(begin):
    call = f"{_JOURNAL}{_NOT_CARRIED}train(place, background=False, deadline_s=1)"
    training = begin(call).after(20)
    os.kill(training.pid, signal.SIGTERM)
    code, err = training.ended()
    assert code == 143
    assert "are only in the journal of this machine" in err
    with holdfast.open(training.place, journal=f"{training.place}.journal") as opened:
        run = opened.run("night")
        restored = run.restore()
        assert restored.checkpoint.step == training.completed()
        run.wait(remote=True, timeout_s=300)
        assert found(training) == (training.completed(), "interrupted")


@pytest.mark.soak  # three processes import torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torchrun_stops_two_ranks_at_one_step(begin):
    call = (
        "import torch, torch.distributed as dist\n"
        "    dist.init_process_group('gloo')\n"
        "    gradient = torch.ones(1)\n"
        "    def gather(): dist.all_reduce(gradient)\n"
        "    train(place, every=100, rank=dist.get_rank(), gather=gather)"
    )
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    training = begin(call, sys.executable, *launch).after(5)
    os.kill(training.pid, signal.SIGTERM)  # to the agent, which passes it on
    code, err = training.ended()
    assert code != 0
    assert "SIGKILL" not in err
    assert training.completed(0) == training.completed(1)
    assert found(training) == (training.completed(), "interrupted")
