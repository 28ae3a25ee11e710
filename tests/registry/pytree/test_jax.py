"""Arrays of jax, on 8 devices of the CPU: the ids of numpy arrays, and what is refused."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="jax is not installed"
)


def run(devices: int, *arguments: list[str]) -> None:
    flags = f"--xla_force_host_platform_device_count={devices}"
    program = [sys.executable, "-W", "error", "-m", "tests.registry.pytree.jax_state"]
    begun = [
        subprocess.Popen(
            [*program, *some],
            env={**os.environ, "XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for some in arguments
    ]
    said = [one.communicate(timeout=300)[0] for one in begun]
    assert [one.returncode for one in begun] == [0] * len(begun), "\n".join(said)


def test_a_state_of_jax_has_the_id_of_the_numpy_state() -> None:
    run(8, [])


@pytest.mark.soak
def test_arrays_in_several_processes_are_refused() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    run(2, ["0", port], ["1", port])
