"""Processes that start cheaply."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import _forkserver
from pathlib import Path
from typing import Any

from tests.support import sometimes

# Its attributes are not described.
_server: Any = _forkserver

#: The programs of processes. The server starts once, so that it must know all of them by then.
_PROGRAMS = [
    "torch._dynamo",
    "sklearn.datasets",  # of the example
    "holdfast.backends.s3.backend",
    "holdfast.registry.saving.collective.torch_group",
    "holdfast.registry.saving.collective.saver",
    "tests.contention.processes",
    "tests.crash.looper",
    "tests.crash.pusher",
    "tests.registry.saving.collective.fleet",
    "tests.registry.adapters.dcp.acts",
    "tests.storm.storm",
    "tests.support.frozen",
    "tests.systems.hydra_life",
]


def servers() -> ForkServerContext:
    """Return what starts processes cheaply: a server that knows their programs, and forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PROGRAMS)
    return context


def address_of_server() -> str:
    """Return where the server answers."""
    servers()
    _server.ensure_running()
    return str(_server._forkserver_address)


def use_server(address: str) -> None:
    """Let this process start others at a server that another process keeps alive.

    A process of the server has the end of the pipe that keeps it alive, and hands it on.
    """
    _server._forkserver_address = address
    if _server._forkserver_alive_fd is None:
        _server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    _server.ensure_running = lambda: None


def start_process(target: Callable[..., None], *args: Any) -> ForkServerProcess:
    """Start a process that has this test's environment; its server may be from another test."""
    call = (_environment_of_test(), target, args)
    process = servers().Process(target=_run, args=call, daemon=True)
    process.start()
    return process


def run_apart(target: Callable[..., None], *args: Any) -> int | None:
    """Let a process of its own call a function; return how it ended."""
    process = start_process(target, *args)
    process.join()
    return process.exitcode


def run_script(path: Path, words: Sequence[str], log: Path) -> None:
    """Run a script as a user does from a shell; for a process of its own. It writes to a file."""
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    tempfile.tempdir = None  # it is found again
    sys.argv = [str(path), *words]
    sys.path.insert(0, str(path.parent))
    sys.modules["torch"].set_num_threads(1)
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.stdout.flush()


def without_holdfast(module: str, name: str, *args: Any) -> None:
    """Call a function of a program that finds no Holdfast; for a process of its own."""
    for known in [one for one in sys.modules if one.partition(".")[0] in ("holdfast", "tests")]:
        del sys.modules[known]
    sys.modules["holdfast"] = None  # type: ignore[assignment]
    getattr(importlib.import_module(module), name)(*args)


def start_telling(target: Callable[..., None], *args: Any) -> tuple[ForkServerProcess, Connection]:
    """Start a process whose last argument is a pipe; return it, and the end that hears it."""
    hearing, telling = servers().Pipe(duplex=False)
    process = start_process(target, *args, telling)
    telling.close()
    return process, hearing


def _environment_of_test() -> dict[str, str]:
    """Return the variables in which one test differs from another."""
    shared = ("AWS_", "AZURE_", "HOLDFAST_", "XDG_STATE_HOME")
    return {name: value for name, value in os.environ.items() if name.startswith(shared)}


def _run(
    environment: Mapping[str, str], target: Callable[..., None], args: tuple[Any, ...]
) -> None:
    for name in _environment_of_test().keys() - environment.keys():
        del os.environ[name]  # of the test that started the server
    os.environ.update(environment)
    if folder := environment.get(sometimes.VARIABLE):
        sometimes.watch_here(folder)
    target(*args)


def send(signum: int) -> None:
    """Send a signal to this process."""
    os.kill(os.getpid(), signum)
