"""How long imports, the first read and a command take in a new process.

    python bench/import_time.py [--rounds N]

prints the CPU of `holdfast.open`, `checkpoint` and one slice of a small tensor, in a process that
has imported numpy, beside that of `import pydantic.main`; and the time of `holdfast run ls`
beside `python -c pass`. The rounds are interleaved; compiled files are kept.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

#: The first read may cost this many times the CPU of `import pydantic.main`.
GOAL = 1.3
#: `holdfast run ls` may take this long beyond `python -c pass`, in milliseconds.
COMMAND_GOAL_MS = 250
_CLOCK = "import time, numpy; begun = time.process_time()"
_READ = """
import holdfast
with holdfast.open({path!r}) as reg:
    reg.checkpoint("run/latest")["model/w"][:10]
"""
_TOLD = "print(time.process_time() - begun)"
_ENV = {key: one for key, one in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}

REPOSITORY = Path(__file__).resolve().parent.parent


def import_seconds(module: str, rounds: int) -> list[float]:
    """Import a module in new interpreters, interleaved with empty ones; return the differences."""
    _seconds(f"import {module}")
    return [_seconds(f"import {module}") - _seconds("pass") for _ in range(rounds)]


def slowest_parts(module: str, count: int = 12) -> list[tuple[str, float]]:
    """Return the modules whose import takes longest, each with what it imports, in seconds."""
    command = [sys.executable, "-X", "importtime", "-c", f"import {module}"]
    done = subprocess.run(command, check=True, cwd=REPOSITORY, capture_output=True, text=True)
    rows = [line.removeprefix("import time:").split("|") for line in done.stderr.splitlines()[1:]]
    parts = [(name.strip(), int(cumulative) / 1e6) for _, cumulative, name in rows]
    return sorted(parts, key=lambda part: -part[1])[:count]


def first_read(rounds: int) -> None:
    """Print the CPU of a first read and the time of a command, beside their peers."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/registry"
        _make(path)
        command = [sys.executable, "-m", "holdfast.registry.cli", "run", "ls", "-r", path]
        reads, peers, commands, empty = [], [], [], []
        for _ in range(rounds + 1):
            reads.append(_cpu_ms(_READ.format(path=path)))
            peers.append(_cpu_ms("import pydantic.main"))
            commands.append(_wall_ms(command))
            empty.append(_wall_ms([sys.executable, "-c", "pass"]))
    read, peer = median(reads[1:]), median(peers[1:])  # the first round compiles
    print(f"first read, CPU: {read:.1f} ms (least {min(reads):.1f})")
    print(f"import pydantic.main, CPU: {peer:.1f} ms (least {min(peers):.1f})")
    print(f"ratio {read / peer:.2f}, of the least {min(reads) / min(peers):.2f}; goal {GOAL}")
    beyond = median(commands[1:]) - median(empty[1:])
    print(f"holdfast run ls: {beyond:.0f} ms beyond python -c pass; goal {COMMAND_GOAL_MS}")


def _make(path: str) -> None:
    import numpy as np

    import holdfast

    with holdfast.init(path) as registry:
        run = registry.create_run("run", seed=0)
        for step in range(5):
            run.save({"model": {"w": np.arange(1000.0) + step}}, step=step)


def _cpu_ms(code: str) -> float:
    command = [sys.executable, "-c", "\n".join((_CLOCK, code, _TOLD))]
    done = subprocess.run(command, check=True, env=_ENV, capture_output=True, text=True)
    return 1e3 * float(done.stdout)


def _wall_ms(command: list[str]) -> float:
    begun = time.perf_counter()
    subprocess.run(command, check=True, env=_ENV, capture_output=True)
    return 1e3 * (time.perf_counter() - begun)


def _seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)
    return time.perf_counter() - start


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    first_read(parser.parse_args().rounds)
