"""`verify --deep` and `sync` of 20,000 objects: by one process, by two Dask workers, by one less.

    python bench/bulk.py [--objects 20000] [--kib 16] [--work WORK] [--folder FOLDER]

Builds a registry of small checkpoints in a folder, then prints the seconds of each and whether the
reports, and the copies, are the same as those of one process. The workers are processes of this
machine, with one thread each, so on few cores they share these with the caller, which has the
scheduler too. Needs `holdfast-registry[dask]`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import holdfast

#: Components of a state: each has a pack of its own, beside one manifest and one placement.
_COMPONENTS = 18
_RUNS = 20
WORKS = VERIFY, SYNC = "verify --deep", "sync"


def build(folder: Path, objects: int, pack_bytes: int) -> None:
    """Make a registry with about this number of objects, in packs of this size."""
    saves = objects // (_COMPONENTS + 2) // _RUNS
    random = np.random.default_rng(0)
    with holdfast.init(folder, skip_race_probe=True) as registry:
        for number in range(_RUNS):
            run = registry.create_run(f"run{number:02}", seed=number)
            for step in range(saves):
                parts = random.integers(0, 256, (_COMPONENTS, pack_bytes), np.uint8)
                run.save({f"part{n}": {"w": part} for n, part in enumerate(parts)}, step=step)


class Killer:
    """Kills a worker when a quarter of the work is done."""

    def __init__(self, pid: int, after_bytes: float) -> None:
        self._pid = pid
        self._after_bytes = after_bytes
        self.is_done = False

    def __call__(self, done: int) -> None:
        if not self.is_done and done >= self._after_bytes:
            os.kill(self._pid, signal.SIGKILL)
            self.is_done = True


def report_of(report: Any) -> str:
    return json.dumps(asdict(report), default=str, sort_keys=True)


def objects_of(folder: Path) -> set[str]:
    kinds = ("packs", "manifests", "placements")
    return {str(one.relative_to(folder)) for kind in kinds for one in (folder / kind).rglob("*.*")}


@contextmanager
def cluster() -> Iterator[tuple[Executor, int]]:
    """Yield an executor on two workers, and the process of one of them."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            2,
            threads_per_worker=1,
            processes=True,
            dashboard_address="127.0.0.1:0",
            silence_logs=logging.CRITICAL,
        ) as workers,
        Client(workers) as client,
    ):
        yield client.get_executor(), next(iter(client.run(os.getpid).values()))


def timed(act: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return act(), time.perf_counter() - start


def verify(folder: Path, executor: Executor | None, killer: Killer | None) -> tuple[Any, float]:
    with holdfast.open(folder, remember=False, read_only=True) as registry:
        return timed(lambda: registry.verify(deep=True, executor=executor, progress=killer))


def sync(
    folder: Path, mirror: Path, executor: Executor | None, killer: Killer | None
) -> tuple[Any, float]:
    shutil.rmtree(mirror, ignore_errors=True)
    with (
        holdfast.open(folder, remember=False, read_only=True) as source,
        holdfast.init(mirror, skip_race_probe=True) as target,
    ):
        return timed(lambda: holdfast.sync(source, target, executor=executor, progress=killer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--objects", type=int, default=20_000)
    parser.add_argument("--kib", type=int, default=16, help="size of a pack")
    parser.add_argument("--work", choices=WORKS, action="append", help="default: both")
    parser.add_argument("--folder", type=Path, help="where the registries are made")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        source, mirror = Path(place, "source"), Path(place, "mirror")
        _, seconds = timed(lambda: build(source, options.objects, options.kib * 1024))
        objects = objects_of(source)
        print(f"{len(objects):,} objects, built in {seconds:.0f} s; {os.cpu_count()} cores\n")
        print("| work | one process, s | two workers, s | one of them killed, s | same report |")
        print("|---|---:|---:|---:|---|")
        total = sum((source / one).stat().st_size for one in objects)
        works: dict[str, Callable[..., tuple[Any, float]]] = {
            VERIFY: lambda *by: verify(source, *by),
            SYNC: lambda *by: sync(source, mirror, *by),
        }
        for name in options.work or WORKS:
            found, took, copies = [], [], []
            for way in ("here", "there", "killed"):
                if way == "here":
                    report, seconds = works[name](None, None)
                else:
                    with cluster() as (executor, pid):
                        killer = Killer(pid, total / 4) if way == "killed" else None
                        report, seconds = works[name](executor, killer)
                    assert killer is None or killer.is_done
                found.append(report_of(report))
                took.append(seconds)
                copies.append(objects_of(mirror) if mirror.exists() else objects)
            same = len(set(found)) == 1 and all(one == objects for one in copies)
            times = " | ".join(f"{seconds:.1f}" for seconds in took)
            print(f"| `{name}` | {times} | {'yes' if same else 'NO'} |", flush=True)


if __name__ == "__main__":
    main()
