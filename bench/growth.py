"""What history costs: a save, a report and a tag after 100, 1,000, 10,000 and 50,000 commits.

The store is a dict in memory and a state takes a few bytes, so that what is timed is Holdfast's own
work: replay, retention, the slot and the snapshots. One run for each size lives at the same time,
and batches of 64 commits go to them in turn, in a new random order: each batch has its share of the
snapshots. A run keeps its newest `--live` checkpoints, so all but the smallest have that many.

`--tensors` times a save and a load of a state of that many tensors, per tensor. `--runs` makes that
many runs in a folder, lists, opens, verifies and collects them, and reports the peak of memory.

`--chunks` saves states of 20,000 chunks, 64 in a pack, until there are that many, and reports the
peak of memory of `du`.

    python growth.py [--commits N ...] [--live N] [--rounds N] [--tensors N ...] [--runs N ...]
        [--chunks N ...] [--dir FOLDER]
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from holdfast import Checkpoint, Monitor, Retention, init
from holdfast.backends.memory import MemoryBackend
from holdfast.registry.face.factory import open_on
from holdfast.registry.face.registry import Registry
from holdfast.registry.objects import chunking
from holdfast.registry.store.store import create_config
from holdfast.registry.writing import packing

BATCH = 64
#: Bytes of a chunk of `--chunks`.
CHUNK = 64
ACTS = ("save", "report", "tag")
#: A run of fewer commits is made again for each round, or it would soon not be of its size.
_SMALL = 1000
_GOAL = 2.0


def empty_registry() -> Registry:
    """Return a registry in memory."""
    backend = MemoryBackend()
    create_config(backend, "skipped")
    return open_on(backend)


class Life:
    """A run with a given number of commits.

    Args:
        commits: How many.
        live: Checkpoints that it keeps.
    """

    def __init__(self, commits: int, live: int) -> None:
        self.registry = empty_registry()
        retention, monitor = Retention(last=live), Monitor(metric="loss", mode="min")
        self.run = self.registry.create_run("r", seed=0, retention=retention, monitor=monitor)
        self.live = live
        self.step = 0
        self.kept: list[Checkpoint] = []
        while self.run.manifest.commits < commits:
            self.save()

    def save(self) -> None:
        """Save a state of a few bytes."""
        self.step += 1
        state = {"model": {"w": np.array([self.step, 0.5])}, "lr": 0.1}
        metrics = {"loss": 1 / self.step, "accuracy": self.step / (self.step + 1)}
        meta = {"note": "as usual", "step": self.step}
        self.kept.append(self.run.save(state, step=self.step, metrics=metrics, meta=meta))
        del self.kept[: -self.live]

    def report(self) -> None:
        """Report metrics of a checkpoint that is kept."""
        random.choice(self.kept).report({"eval": random.random()})

    def tag(self) -> None:
        """Move one of a few tags."""
        # Among the newest, so that what retention evicts is what it would evict without them.
        newest = self.kept[-16:]
        self.run.pins.tags.set(f"t{random.randrange(8)}", random.choice(newest))

    def snapshot_bytes(self) -> int:
        """Return the size of the newest snapshot."""
        found = list(self.registry.handle.store.backend.list("runs/r/snapshots/", limit=1))
        return found[0].size_bytes if found else 0

    def open_ms(self) -> float:
        """Return how long it takes to open the run."""
        start = time.perf_counter()
        self.registry.handle.open_log("r")  # unlike `run` it is not kept open
        return 1000 * (time.perf_counter() - start)


def by_commits(sizes: list[int], live: int, rounds: int, console: Console) -> None:
    """Time saves, reports and tags by the number of commits before them."""
    lives = {size: Life(size, live) for size in sizes if size > _SMALL}
    clock: dict[tuple[int, str], list[float]] = defaultdict(list)
    cpu: dict[tuple[int, str], list[float]] = defaultdict(list)
    for _ in range(rounds):
        lives |= {size: Life(size, live) for size in sizes if size <= _SMALL}
        for act in ACTS:
            for size in random.sample(sizes, len(sizes)):
                do: Callable[[], None] = getattr(lives[size], act)
                gc.collect()
                on_cpu, start = time.process_time(), time.perf_counter()
                for _ in range(BATCH):
                    do()
                clock[size, act].append(1000 * (time.perf_counter() - start) / BATCH)
                cpu[size, act].append(1000 * (time.process_time() - on_cpu) / BATCH)
    table = Table(title=f"{live} live checkpoints at most: mean ms, snapshots included")
    table.add_column("commits", justify="right")
    for act in ACTS:
        for column in (act, "CPU", "ratio", "of CPU"):
            table.add_column(column, justify="right")
    for column in ("snapshot, kB", "open, ms"):
        table.add_column(column, justify="right")
    first = sizes[0]
    for size in sizes:
        row = [f"{size:,}"]
        for act in ACTS:
            pairs = zip(clock[size, act], clock[first, act], strict=True)
            cpus = zip(cpu[size, act], cpu[first, act], strict=True)
            row += [
                f"{mean(clock[size, act]):.2f}",
                f"{mean(cpu[size, act]):.2f}",
                f"{median(own / other for own, other in pairs):.2f}",
                f"{median(own / other for own, other in cpus):.2f}",
            ]
        opened = median(lives[size].open_ms() for _ in range(5))
        table.add_row(*row, f"{lives[size].snapshot_bytes() / 1000:.0f}", f"{opened:.0f}")
    console.print(table)
    console.print(f"Ratios are to {first:,} commits, round by round, median; at most {_GOAL}.")


def by_tensors(sizes: list[int], console: Console) -> None:
    """Time a save and a load by the number of tensors in a state: the least CPU of five rounds."""
    table = Table(title="microseconds of CPU for each tensor, least of five rounds")
    for column in ("tensors", "save", "save again", "load"):
        table.add_column(column, justify="right")
    for size in sizes:
        state = {"model": {f"layer{n}": np.full(32, n, np.float32) for n in range(size)}}
        rounds = [_by_tensors_once(state) for _ in range(5)]
        least = (1e6 * min(seconds) / size for seconds in zip(*rounds, strict=True))
        table.add_row(f"{size:,}", *(f"{one:.1f}" for one in least))
    console.print(table)


def _by_tensors_once(state: dict[str, Any]) -> list[float]:
    run = empty_registry().create_run("r", seed=0)
    times = []
    for step in (1, 2):
        start = time.process_time()
        run.save(state, step=step)
        times.append(time.process_time() - start)
        state["model"]["layer0"] = np.full(32, -step, np.float32)
    newest = run.latest()
    assert newest is not None
    start = time.process_time()
    newest.load()
    return [*times, time.process_time() - start]


def by_runs(sizes: list[int], folder: Path | None, console: Console) -> None:
    """Time the operations on every run, and report the peak of memory of a verification."""
    table = Table(title="milliseconds for each run, and the peak of memory")
    for column in ("runs", "list", "open", "verify", "collect", "peak of verify, MB"):
        table.add_column(column, justify="right")
    for size in sizes:
        with TemporaryDirectory(dir=folder) as place:
            times, peak = _over_runs(size, Path(place) / "registry")
        shown = (f"{1000 * seconds / size:.2f}" for seconds in times)
        table.add_row(f"{size:,}", *shown, f"{peak / 1e6:.1f}")
    console.print(table)


def _over_runs(size: int, folder: Path) -> tuple[list[float], int]:
    times: list[float] = []

    def timed(act: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        found = act()
        times.append(time.perf_counter() - start)
        return found

    with init(folder, skip_race_probe=True) as registry:
        for number in range(size):
            run = registry.create_run(f"r{number}", seed=0, retention=Retention(last=2))
            for step in range(4):
                run.save({"w": np.array([number, step])}, step=step)
            run.close()
        names = timed(registry.run_names)
        timed(lambda: [registry.handle.open_log(name) for name in names])
        timed(registry.verify)
        timed(lambda: registry.gc(grace_s=0))
        tracemalloc.start()
        registry.verify()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return times, peak


def by_chunks(sizes: list[int], folder: Path | None, console: Console) -> None:
    """Report the seconds and the peak of memory of counting what all states use."""
    table = Table(title="peak of du, all states")
    for column in ("chunks", "seconds", "peak, MB"):
        table.add_column(column, justify="right")
    chunking.CHUNK_BYTES, packing.PACK_BYTES = CHUNK, 64 * CHUNK
    rng = np.random.default_rng(0)
    for size in sizes:
        with (
            TemporaryDirectory(dir=folder) as place,
            init(Path(place) / "registry", skip_race_probe=True) as registry,
        ):
            run = registry.create_run("run", retention=Retention(last=size))
            for step in range(0, size, 20_000):
                count = min(20_000, size - step)
                run.save({"w": rng.integers(0, 255, (count, CHUNK), np.uint8)}, step=step)
            run.close()
            tracemalloc.start()
            start = time.perf_counter()
            registry.usage()
            seconds = time.perf_counter() - start
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        table.add_row(f"{size:,}", f"{seconds:.1f}", f"{peak / 1e6:.1f}")
    console.print(table)


def main() -> None:
    """Measure what was asked for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, nargs="*", default=[100, 1000, 10_000, 50_000])
    parser.add_argument("--live", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tensors", type=int, nargs="*", default=[1000, 10_000, 100_000])
    parser.add_argument("--runs", type=int, nargs="*", default=[100, 1000, 5000])
    parser.add_argument("--chunks", type=int, nargs="*", default=[100_000, 1_000_000])
    parser.add_argument("--dir", type=Path, help="where the registries of --runs and --chunks go")
    chosen = parser.parse_args()
    console = Console(width=180)
    if chosen.commits:
        by_commits(sorted(chosen.commits), chosen.live, chosen.rounds, console)
    if chosen.tensors:
        by_tensors(chosen.tensors, console)
    if chosen.runs:
        by_runs(chosen.runs, chosen.dir, console)
    if chosen.chunks:
        by_chunks(chosen.chunks, chosen.dir, console)


if __name__ == "__main__":
    main()
