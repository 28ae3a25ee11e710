"""Starting servers as processes of ours on free ports, and ending them by their ids."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(command: Sequence[str], log: Path) -> int:
    """Start a server in a session of its own, so that a Ctrl-C of the tests leaves it to `stop`.

    Only its id is kept: under pytest-xdist another worker than the one that started it may end it.
    """
    null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    output = (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    errors = (os.POSIX_SPAWN_DUP2, 1, 2)
    actions = [null, output, errors]
    return os.posix_spawnp(command[0], command, os.environ, file_actions=actions, setsid=True)


def stop(pids: Sequence[int], grace_s: float = 1) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + grace_s
        while any(map(_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)


def _alive(pid: int) -> bool:
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # One that ended stays in the table until its parent, which may be another, looks.
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def wait_for_http(url: str, deadline_s: float = 300) -> None:
    """Return when a server answers anything at all."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.HTTPError as answer:
            answer.close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


@contextmanager
def serving(module: str) -> Iterator[str]:
    """Run a module that serves and prints its port; give its address."""
    pytest.importorskip("moto")
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"},
    )
    assert process.stdout is not None
    with process, process.stdout:
        try:
            endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
            wait_for_http(endpoint)
            yield endpoint
        finally:
            process.kill()
