"""Peak memory of the streaming tools: `stats`, `diff --values` and `merge`, above the imports.

For each way of storing and each size two checkpoints are saved, every element of the second other
than in the first. Then each tool runs in a process of its own, on a machine that claims to have so
many cores: it imports everything, opens the registry, resets the kernel's high-water mark of its
resident memory, works, and reads the mark. Prints MiB. Scratch files go to a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memory import begin_peak, peak

MIB = 2**20
#: Size -> bytes of each tensor. The largest state has one tensor of 1 GiB.
SIZES = {
    "40 MB": [4_000_000] * 10,
    "320 MB": [4_000_000] * 80,
    "1.3 GB": [1024 * MIB, *[4_000_000] * 56],
}
#: Default sizes: large enough for the peaks to differ.
MEASURED = ("320 MB", "1.3 GB")
#: Way of storing -> options of the registry.
STORED: dict[str, dict[str, Any]] = {
    "raw": {},
    "zstd": {"compression": "zstd"},
    "deltas": {"compression": "zstd", "keyframe_every": 8},
}
LIMIT_MIB = 256


def _make(at: Path, size: str, stored: str) -> None:
    """Save two checkpoints that differ in every element, and compress to about three quarters."""
    import numpy as np

    import holdfast

    rng = np.random.default_rng(1)

    def tensor(nbytes: int) -> Any:
        found = rng.standard_normal(nbytes // 4, dtype=np.float32).reshape(-1, 1000 // 4 * 4)
        return (found.view(np.uint32) & np.uint32(0xFFFFFF00)).view(np.float32)

    # One large block is made of the same numbers again: making them would take longer than reading.
    def large(nbytes: int) -> Any:
        part = tensor(32 * 1000 * 1024)
        made = np.resize(part, (nbytes // 4096, 1024))
        made += np.arange(len(made), dtype=np.float32)[:, None] * np.float32(2**-8)
        return made

    state = {
        "model": {
            f"w{i}": (large if n > MIB * 64 else tensor)(n) for i, n in enumerate(SIZES[size])
        }
    }
    with holdfast.init(at, skip_race_probe=True, **STORED[stored]) as opened:
        run = opened.create_run("run", seed=1)
        run.save(state, step=1)
        for values in state["model"].values():
            values += np.float32(2**-8)
        run.save(state, step=2)


def _measure(at: Path, tool: str, threads: int) -> dict[str, float]:
    os.cpu_count = lambda: threads  # what the tools ask
    os.sched_getaffinity = lambda _: range(threads)
    import holdfast
    from holdfast.registry.comparing import elements  # noqa: F401 - counted as imports
    from holdfast.registry.comparing.state_diff import diff
    from holdfast.registry.comparing.tensor_stats import stats

    with holdfast.open(at) as opened:
        run = opened.run("run")
        one, two = run.checkpoints()[:2]
        tools: dict[str, Callable[[], object]] = {
            "stats": lambda: stats(two.handle),
            "diff": lambda: diff(one.handle, two.handle, values=True),
            # Other weights each time, or the result would be there already.
            "merge": lambda: run.exchange.merge(
                [one, two], step=threads + 10, weights=[1 / threads, 1 - 1 / threads]
            ),
        }
        before, begun = begin_peak(trim=True), time.perf_counter()
        tools[tool]()
        seconds = time.perf_counter() - begun
        return {"mib": (peak() - before) / 2**20, "seconds": seconds}


def _child(*words: object) -> dict[str, float]:
    command = [sys.executable, __file__, *map(str, words)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(printed or "{}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, action="append")
    parser.add_argument("--stored", choices=STORED, action="append")
    parser.add_argument("--tool", choices=["stats", "diff", "merge"], action="append")
    parser.add_argument("--threads", type=int, action="append")
    parser.add_argument("--at", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        _make(options.at, options.size[0], options.stored[0])
        return
    if options.at:
        print(json.dumps(_measure(options.at, options.tool[0], options.threads[0])))
        return
    worst = 0.0
    print(f"| {'size':8} | {'stored':8} | {'tool':8} | {'threads':>7} | {'MiB':>7} | {'s':>7} |")
    for size in options.size or MEASURED:
        for stored in options.stored or STORED:
            with tempfile.TemporaryDirectory(prefix="holdfast-tools-") as folder:
                at = Path(folder) / "registry"
                _child("--make", "--at", at, "--size", size, "--stored", stored)
                for tool in options.tool or ("stats", "diff", "merge"):
                    for threads in options.threads or (2, 6):
                        words = ("--at", at, "--tool", tool, "--threads", threads)
                        found = _child(*words)
                        worst = max(worst, found["mib"])
                        print(
                            f"| {size:8} | {stored:8} | {tool:8} | {threads:7} "
                            f"| {found['mib']:7.0f} | {found['seconds']:7.1f} |",
                            flush=True,
                        )
    print(f"worst: {worst:.0f} MiB of {LIMIT_MIB}")


if __name__ == "__main__":
    main()
