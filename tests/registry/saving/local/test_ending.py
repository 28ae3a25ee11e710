"""The status of a run whose process ends without `with run:`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from tests.support.states import small_state
from tests.support.stores import packs_of

_BEGIN = """
import os, sys, threading
import holdfast
reg = holdfast.open(sys.argv[1])
run = reg.run("night", create=True)
STATE = {"model": {"w": list(range(100))}}
"""


def end(place: Path, program: str) -> tuple[int, str]:
    """Run a program to its end; return its exit status, and the status of the run."""
    path = place.with_suffix(".py")
    path.write_text(_BEGIN + program)
    done = subprocess.run(
        [sys.executable, path, place], capture_output=True, text=True, timeout=300
    )
    with holdfast.open(place) as opened:
        return done.returncode, opened.run("night").status


@pytest.mark.parametrize(
    ("program", "code", "status"),
    [
        ("run.save(STATE, step=1)", 0, "interrupted"),
        ("run.save_async(STATE, step=1)", 0, "interrupted"),
        ("run.save(STATE, step=1); reg.close()", 0, "interrupted"),
        ("run.save(STATE, step=1); sys.exit(3)", 3, "interrupted"),
        ("run.save(STATE, step=1); raise KeyboardInterrupt", -2, "interrupted"),
        ("run.save(STATE, step=1); raise ValueError", 1, "failed"),
        ("run.save(STATE, step=1); os._exit(4)", 4, "running"),  # as if it was killed
        ("run.latest(); raise ValueError", 1, "running"),  # it does not train
        ("with run: run.save(STATE, step=1)", 0, "completed"),
        ("run.save(STATE, step=1); run.status = 'completed'", 0, "completed"),
        (
            "run.save(STATE, step=1)\n"
            "if not os.fork():\n"
            "    other = holdfast.open(sys.argv[1]).run('night')\n"
            "    other.restore(); other.save(STATE, step=2); os._exit(0)\n"
            "os.wait()",
            0,
            "running",  # the one that ends here was fenced
        ),
    ],
    ids=lambda value: value.partition("\n")[0][-40:] if isinstance(value, str) else None,
)
def test_the_end_of_a_process_sets_the_status(place, program, code, status):
    assert end(place, program) == (code, status)


def test_a_worker_of_multiprocessing_sets_it_too(place):
    program = (
        "def work(): holdfast.open(sys.argv[1]).run('night').save_async(STATE, step=1)\n"
        "if __name__ == '__main__':\n"
        "    import multiprocessing\n"
        "    child = multiprocessing.get_context('fork').Process(target=work)\n"
        "    child.start(); child.join()"
    )
    assert end(place, program) == (0, "interrupted")


def test_a_takeover_without_restore_warns_once(run, backend, open_registry, caplog):
    run.save(small_state(1), step=1)
    other = open_registry(backend).run("run")
    other.save(small_state(2), step=2)
    other.save(small_state(3), step=3)
    (said,) = [one.getMessage() for one in caplog.records]
    assert said.startswith("run: another trainer owns this run")
    assert "never called run.restore()" in said


@pytest.mark.parametrize("case", ["restored", "nobody trains", "left", "pushed"])
def test_a_takeover_that_is_meant_is_not_warned_of(run, backend, open_registry, caplog, case):
    other = open_registry(backend).run("run")
    if case == "restored":
        other.restore()  # there is nothing yet, as at the first start of a job
    if case != "nobody trains":
        run.save(small_state(1), step=1)
    if case == "left":
        run.status = "interrupted"
    (other.exchange.push if case == "pushed" else other.save)(small_state(2), step=2)
    assert caplog.records == []


def test_a_checkpoint_that_restore_passes_over_is_told(run, backend, caplog):
    run.save({"w": small_state(1)}, step=1)
    damaged = run.save({"w": small_state(2)}, step=2)
    backend.delete(packs_of(damaged)[0])
    restored = run.restore()
    assert [one.digest for one in restored.report] == [damaged.digest]
    (said,) = [one.getMessage() for one in caplog.records]
    assert said.startswith(f"restored {restored.checkpoint.ref} and passed over the newer")
    assert damaged.ref in said
    assert restored.report[0].reason in said
