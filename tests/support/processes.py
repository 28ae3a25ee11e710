"""Processes that start cheaply."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import _forkserver
from typing import Any

# Its attributes are not described.
_server: Any = _forkserver

#: The programs of processes. The server starts once, so that it must know all of them by then.
_PROGRAMS = [
    "torch._dynamo",
    "holdfast.backends.s3.backend",
    "holdfast.registry.saving.collective.torch_group",
    "holdfast.registry.saving.collective.saver",
    "tests.contention.processes",
    "tests.crash.looper",
    "tests.crash.pusher",
    "tests.registry.saving.collective.fleet",
    "tests.registry.adapters.dcp.acts",
    "tests.storm.storm",
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
    """Let this process, which the server started, start others there; else it would start one.

    It has the end of the pipe that keeps the server alive, as every process of the server.
    """
    _server._forkserver_address = address
    _server.ensure_running = lambda: None


def start_process(target: Callable[..., None], *args: Any) -> ForkServerProcess:
    """Start a process that has this test's environment; its server may be from another test."""
    call = (_environment_of_test(), target, args)
    process = servers().Process(target=_run, args=call, daemon=True)
    process.start()
    return process


def start_telling(target: Callable[..., None], *args: Any) -> tuple[ForkServerProcess, Connection]:
    """Start a process whose last argument is a pipe; return it, and the end that hears it."""
    hearing, telling = servers().Pipe(duplex=False)
    process = start_process(target, *args, telling)
    telling.close()
    return process, hearing


def _environment_of_test() -> dict[str, str]:
    """Return the variables in which one test differs from another."""
    shared = ("AWS_", "HOLDFAST_", "XDG_STATE_HOME")
    return {name: value for name, value in os.environ.items() if name.startswith(shared)}


def _run(
    environment: Mapping[str, str], target: Callable[..., None], args: tuple[Any, ...]
) -> None:
    for name in _environment_of_test().keys() - environment.keys():
        del os.environ[name]  # of the test that started the server
    os.environ.update(environment)
    target(*args)


def send(signum: int) -> None:
    """Send a signal to this process."""
    os.kill(os.getpid(), signum)
