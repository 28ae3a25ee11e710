"""A save in the background when the program ends: finished, or told of, and never lost unheard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.registry.errors import InvalidInput
from holdfast.registry.saving.pending import EXIT_WAIT
from tests.support.faults import Silent
from tests.support.loads import steps_at
from tests.support.states import small_state

#: What every program below begins with. `Late` holds packs back until the main thread has ended.
_BEGIN = """
import atexit, os, sys, threading, time
import numpy as np
from holdfast.backends import StoreUnavailable, open_backend
from holdfast.backends.wrappers import Wrapper
from holdfast.registry.face.factory import open_on
# Else imported with the first run, and what is registered last is called first.
import holdfast.registry.saving.pending

ending = threading.Event()
threading._register_atexit(ending.set)
STATE = {"model": {"w": np.arange(3000.0)}}

class Late(Wrapper):
    def put_if_absent(self, key, body):
        if key.startswith("packs/"):
            assert ending.wait(300)
            time.sleep(0.1)  # for whoever closes pools meanwhile
        return super().put_if_absent(key, body)

class Deaf(Wrapper):
    def put_if_absent(self, key, body):
        if key.startswith("packs/"):
            assert ending.wait(300)
            raise StoreUnavailable("no answer", where=key)
        return super().put_if_absent(key, body)

class Stuck(Wrapper):
    def put_if_absent(self, key, body):
        if key.startswith("packs/"):
            threading.Event().wait()
        return super().put_if_absent(key, body)

def begin(kind):
    return open_on(kind(open_backend(sys.argv[1]))).run("night", create=True)
"""


def start(place: Path, program: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _BEGIN + program, str(place)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    with process:
        out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("run = begin(Late); run.save_async(STATE, step=1)", 0),
        ("begin(Late).save_async(STATE, step=1)", 0),
        ("run = begin(Late); run.save_async(STATE, step=1); sys.exit(0)", 0),
        ("run = begin(Late); run.save_async(STATE, step=1); sys.exit(7)", 7),
        ('run = begin(Late); run.save_async(STATE, step=1); raise ValueError("mine")', 1),
        (
            "run = begin(Late)\n"
            "def train(): run.save_async(STATE, step=1); time.sleep(1e6)\n"
            "threading.Thread(target=train, daemon=True).start()\n"
            "while not run.handle.saver.pipeline._background.is_busy: time.sleep(0.01)",
            0,
        ),
    ],
    ids=["end", "handle dropped", "exit 0", "exit 7", "exception", "daemon"],
)
def test_it_is_finished_however_the_program_ends(place, program, status):
    found, _, err = end(start(place, program))
    assert found == status
    assert ("mine" in err) if status == 1 else err == ""
    assert steps_at(place, "night") == [1]


def test_a_save_that_waits_for_another_one_is_finished_too(place):
    program = (
        "run = begin(Late); run.save_async(STATE, step=1)\n"
        "run.save_async({'m': np.arange(400.0)}, step=2, busy='supersede')\n"
        "run.save_async({'m': np.arange(500.0)}, step=3, busy='supersede')"
    )
    assert end(start(place, program)) == (0, "", "")
    assert steps_at(place, "night") == [1, 3]


def test_a_block_that_is_left_by_sys_exit_finishes_it_and_sets_the_status(place):
    program = "with begin(Wrapper) as run: run.save_async(STATE, step=1); sys.exit(0)"
    assert end(start(place, program)) == (0, "", "")
    assert steps_at(place, "night") == [1]
    with holdfast.open(place) as opened:
        assert opened.run("night").status == "interrupted"


def test_threads_that_outlive_the_main_thread_save_on(place):
    program = (
        "run = begin(Wrapper); run.save_async(STATE, step=1).wait()\n"
        "def train():\n"
        "    assert ending.wait(300); time.sleep(0.1)\n"
        "    run.save({'m': np.arange(400.0)}, step=2)\n"
        "    run.save_async({'m': np.arange(500.0)}, step=3)\n"
        "threading.Thread(target=train).start()"
    )
    assert end(start(place, program)) == (0, "", "")
    assert steps_at(place, "night") == [1, 2, 3]


def test_callbacks_at_the_end_of_the_program_can_save(place):
    program = (
        "run = begin(Wrapper); run.save(STATE, step=1)\n"
        "atexit.register(run.save_async, {'m': np.arange(500.0)}, step=3)\n"
        "atexit.register(run.save, {'m': np.arange(400.0)}, step=2)"
    )
    assert end(start(place, program)) == (0, "", "")
    assert steps_at(place, "night") == [1, 2, 3]


def test_a_failure_that_nobody_waited_for_is_told_and_the_cleanup_still_runs(place):
    program = (
        "atexit.register(print, 'cleaned up')\n"
        "notes = open(sys.argv[1] + '.notes', 'w'); notes.write('kept')\n"
        "begin(Deaf).save_async(STATE, step=5)"
    )
    status, out, err = end(start(place, program))
    assert (status, out) == (120, "cleaned up\n")
    assert "night: step 5: the save failed: StoreUnavailable: packs/" in err
    assert "no answer" in err
    assert "Traceback" not in err
    assert Path(f"{place}.notes").read_text() == "kept"
    assert steps_at(place, "night") == []


def test_a_failure_that_was_told_is_not_told_again(place):
    program = (
        "ending.set()\n"
        "try: begin(Deaf).save_async(STATE, step=5).wait()\n"
        "except StoreUnavailable: print('told')"
    )
    assert end(start(place, program)) == (0, "told\n", "")


def test_a_store_that_hangs_is_waited_for_so_long_and_no_longer(place):
    program = "begin(Stuck).save_async(STATE, step=5)"
    status, _, err = end(start(place, program, **{EXIT_WAIT: "1.5"}))
    assert status == 120
    waiting, lost = err.splitlines()
    assert waiting.startswith("night: step 5: still being saved; ")
    assert lost.startswith("night: step 5: the save was not finished: ")
    assert steps_at(place, "night") == []


def test_the_wait_can_be_interrupted(place):
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "begin(Stuck).save_async(STATE, step=5)"
    )
    process = start(place, program)
    assert process.stderr is not None
    assert "still being saved" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    status, _, err = end(process)
    assert status == 130
    assert "night: step 5: the save was not finished: " in err
    assert "the wait was interrupted" in err
    assert "Traceback" not in err


def test_a_forked_child_leaves_its_parents_save_alone(place):
    program = (
        "run = begin(Late); run.save_async(STATE, step=1)\n"
        "import warnings; warnings.simplefilter('ignore')  # of fork, in later Pythons\n"
        "child = os.fork()\n"
        "if not child: sys.exit(0)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    # The parent's save is held until the parent ends, so a child that waited would wait for ever.
    assert end(start(place, program, **{EXIT_WAIT: "50"})) == (0, "0\n", "")
    assert steps_at(place, "night") == [1]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_worker_of_multiprocessing_finishes_its_own(place, method):
    worker = (
        "def work(): begin(Late).save_async(STATE, step=1)\n"
        "if __name__ == '__main__':\n"
        "    import multiprocessing\n"
        f"    child = multiprocessing.get_context('{method}').Process(target=work)\n"
        "    child.start(); child.join(); print(child.exitcode)"
    )
    program = place.with_suffix(".py")
    program.write_text(_BEGIN + worker)
    done = subprocess.run(
        [sys.executable, program, place], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
    assert steps_at(place, "night") == [1]


@pytest.mark.parametrize("said", ["soon", "-1", "nan", "inf"])
def test_a_time_to_wait_that_is_none_is_refused_before_anything_is_copied(run, monkeypatch, said):
    monkeypatch.setenv(EXIT_WAIT, said)
    with pytest.raises(InvalidInput, match=EXIT_WAIT):
        run.save_async(small_state(), step=1)
    assert run.checkpoints() == []


def test_a_save_that_fails_while_another_error_leaves_the_block_is_told(
    backend, open_registry, caplog
):
    run = open_registry(Silent(backend, "packs/")).create_run("run")
    with pytest.raises(ValueError, match="mine"), run:
        run.save_async({"m": np.arange(3000.0)}, step=1)
        raise ValueError("mine")
    assert [one.getMessage() for one in caplog.records if "no answer" in one.getMessage()]
    assert run.refresh().status == "failed"
