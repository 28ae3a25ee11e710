"""Run trainings in processes that can be killed, without importing the libraries for each one.

This module is also a program: it imports the libraries once, reads calls as lines of JSON, forks a
process for each call of a line, and answers with their exit statuses and what they wrote.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.servers.process import free_port
from tests.systems.mutants import VARIABLE, make_named

KILLED = -signal.SIGKILL
_LIBRARIES = (
    *("torch", "holdfast.lightning", "holdfast.transformers", "holdfast.wandb", "transformers"),
    *("transformers.trainer", "peft", "torchdata.stateful_dataloader"),
)
#: Imported before the first call that names jax, so that the others are without it.
_LIBRARIES_OF_JAX = ("jax", "jax.numpy", "optax", "equinox", "flax")
_QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "HOLDFAST_HEADS": "0",  # folders of tests have the same names again
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "WANDB_MODE": "offline",
}


def needs(*names: str) -> list[Any]:
    """Return the marks of a module of tests: skipped without these libraries, in one worker."""
    lacking = ", ".join(name for name in names if find_spec(name) is None)
    return [
        pytest.mark.skipif(bool(lacking), reason=f"not installed: {lacking}"),
        pytest.mark.xdist_group("integrations"),
    ]


@dataclass
class Call:
    """A call of a function in a process of its own.

    Attributes:
        target: `module.function` below this package.
        args: Its arguments, as JSON has them.
        env: Variables for it.
    """

    target: str
    args: tuple[Any, ...]
    env: dict[str, str]


class Children:
    """The program, running."""

    def __init__(self) -> None:
        self._calls = 0
        self._program = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_QUIET},
            cwd=Path(__file__).parents[4],
        )

    def run(self, target: str, *args: Any) -> int:
        """Call a function in a process; return its exit status, negative for a signal."""
        (status,) = self.run_all(Call(target, args, {}))
        return status

    def run_all(self, *calls: Call) -> list[int]:
        """Call functions in a process each, at the same time; return their exit statuses."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        # The state folder of this test: the program has that of the test that started it.
        env = {"XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}
        env[VARIABLE] = os.environ.get(VARIABLE, "")
        lines = [
            [call.target, [_plain(arg) for arg in call.args], env | call.env] for call in calls
        ]
        self._calls += 1
        self._program.stdin.write(json.dumps([self._calls, lines]) + "\n")
        self._program.stdin.flush()
        number = 0
        while number != self._calls:  # a test that took too long has left its answer
            number, statuses, wrote = json.loads(self._program.stdout.readline())
        if any(status not in (0, KILLED) for status in statuses):
            print(wrote)  # pytest shows it if the test fails
        return [int(status) for status in statuses]

    def close(self) -> None:
        """End the program."""
        assert self._program.stdin is not None
        self._program.stdin.close()
        self._program.wait(300)
        if self._program.stdout is not None:
            self._program.stdout.close()


class Ranks:
    """Processes that train together.

    Args:
        url: The registry that each of them opens.
        children: What starts them.
    """

    def __init__(self, url: str, children: Children) -> None:
        self._url, self._children = url, children

    def run(self, size: int, target: str, *args: Any) -> list[int]:
        """Call a function in each of them; return their exit statuses."""
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        shared["MASTER_PORT"] = str(free_port())
        ranks = [{"RANK": str(n), "LOCAL_RANK": str(n), "NODE_RANK": "0"} for n in range(size)]
        calls = [Call(target, (self._url, *args), {**shared, **rank}) for rank in ranks]
        return self._children.run_all(*calls)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _serve() -> None:
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_all(_LIBRARIES)
    for line in sys.stdin:
        number, calls = json.loads(line)
        if "jax" in line:
            _import_all(_LIBRARIES_OF_JAX)
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            children = [_fork(target, args, env, log.fileno()) for target, args, env in calls]
            statuses = [_wait(child) for child in children]
            log.seek(0)
            answers.write(json.dumps([number, statuses, log.read()[-20000:]]) + "\n")
        answers.flush()


def _import_all(names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _fork(target: str, args: list[Any], env: dict[str, str], log: int) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(env)
        make_named()
        signal.alarm(300)  # a process that hangs is a failure, and goes away
        module, _, function = target.rpartition(".")
        getattr(importlib.import_module(f"{__package__}.{module}"), function)(*args)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def running() -> Iterator[Children]:
    """Start the program, and end it."""
    children = Children()
    yield children
    children.close()


if __name__ == "__main__":
    _serve()
