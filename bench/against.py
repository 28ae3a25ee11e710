"""Holdfast against another checkout of itself, in one interleaved run on a local disk.

Each checkout saves and loads in a process of its own, which waits while the other one works; every
round asks both for everything, in a new random order. Ratios are this checkout's to the other's,
round by round.

    python bench/against.py --other ../before --workload hydra --rounds 9 --dir /var/tmp
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from workloads import WORKLOADS

HERE = Path(__file__).resolve().parent


class Host:
    """A process in which one checkout works."""

    def __init__(self, checkout: Path, folder: Path, options: argparse.Namespace) -> None:
        folder.mkdir()
        command = [sys.executable, __file__, "--host", str(folder)]
        command += ["--workload", options.workload, "--scale", str(options.scale)]
        paths = os.pathsep.join([str(checkout.resolve() / "src"), str(HERE)])
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        told = self._answer()
        self.names: list[str] = told["names"]
        if not Path(told["code"]).is_relative_to(checkout.resolve()):
            raise SystemExit(f"{checkout}: the code of {told['code']} would be measured")

    def measure(self, name: str) -> tuple[float, float]:
        """Return seconds on the clock and of the processor."""
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        seconds, cpu = self._answer()
        return seconds, cpu

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def host(options: argparse.Namespace) -> None:
    """Do what the parent asks for, line by line."""
    from holdfast_contender import Holdfast
    from scene import Scene

    import holdfast

    ours = Holdfast(Scene.of(options.workload, options.scale, options.host))
    contenders = {one.name: one for one in ours.contenders()}
    gc.freeze()  # to look through all that was imported takes .1 s each time
    print(json.dumps({"names": list(contenders), "code": holdfast.__file__}), flush=True)
    for line in sys.stdin:
        contender = contenders[line.strip()]
        contender.before()
        gc.collect()
        cpu, start = time.process_time(), time.perf_counter()
        contender.act()
        taken = time.perf_counter() - start, time.process_time() - cpu
        contender.after()
        print(json.dumps(taken), flush=True)
    ours.close()


def compare(options: argparse.Namespace, console: Console) -> None:
    """Measure both checkouts and print their ratios."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=options.dir))
    try:
        hosts = {
            "this": Host(HERE.parent, folder / "this", options),
            "other": Host(options.other, folder / "other", options),
        }
        names = hosts["this"].names
        times: dict[tuple[str, str], list[tuple[float, float]]] = {
            (name, which): [] for name in names for which in hosts
        }
        order = random.Random(0)
        for number in range(options.rounds + 1):
            for name in order.sample(names, len(names)):
                for which in order.sample(list(hosts), len(hosts)):
                    taken = hosts[which].measure(name)
                    if number:  # the first round warms up
                        times[name, which].append(taken)
        for one in hosts.values():
            one.close()
    finally:
        shutil.rmtree(folder)
    table = Table(title=f"{options.workload}, {options.rounds} rounds: this / other")
    table.add_column("", no_wrap=True)
    for column in ("this, s", "other, s", "ratio", "of minima", "of CPU", "round by round"):
        table.add_column(column, justify="right")
    for name in names:
        this, other = times[name, "this"], times[name, "other"]
        ratios = [a / b for (a, _), (b, _) in zip(this, other, strict=True)]
        table.add_row(
            name,
            f"{median(a for a, _ in this):.3f}",
            f"{median(b for b, _ in other):.3f}",
            f"{median(ratios):.2f}",
            f"{min(a for a, _ in this) / min(b for b, _ in other):.2f}",
            f"{median(a for _, a in this) / median(b for _, b in other):.2f}",
            " ".join(f"{ratio:.2f}" for ratio in ratios),
        )
    console.print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--other", type=Path, help="the other checkout")
    parser.add_argument("--workload", choices=[*WORKLOADS], default="hydra")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scale", type=float, default=1.0, help="part of the full size")
    parser.add_argument("--dir", type=Path, help="on a real disk; default: the temp folder")
    parser.add_argument("--host", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.host is None and options.other is None:
        parser.error("--other is needed")
    return options


def main() -> None:
    options = _options()
    if options.host is not None:
        host(options)
    else:
        compare(options, Console(width=150))


if __name__ == "__main__":
    main()
