"""How long an import takes a new interpreter, beyond one that imports nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

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


def _seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)
    return time.perf_counter() - start
