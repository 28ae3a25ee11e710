"""Count the requests of the jobs that read a whole registry, the first time and again.

A registry of many small checkpoints, half of them evicted, in a folder and in a bucket. Each job is
a process of its own. Requests are those that a bucket would get, for each thousand objects that are
there before; a listing counts once for each thousand keys. The bucket is a server on this machine.

    python upkeep.py [--objects N ...] [--listed RUNS ...] [--places folder,radosgw] [--dir FOLDER]

`--listed` makes registries of many runs with one checkpoint each, and lists these. Runs are sealed
by the second collection that finds nothing new in them.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import numpy as np
from memory import peak
from nights import Paged
from rich.console import Console
from rich.table import Table
from transports import SERVERS

import holdfast
from holdfast.backends import open_backend, parse
from holdfast.backends.wrappers import Call
from holdfast.registry.face.factory import open_on
from holdfast.registry.store.heads import open_heads

#: A checkpoint of a small state is a pack, a manifest and a placement.
_OBJECTS_EACH = 3
_CHECKPOINTS_A_RUN = 100
_COLUMNS = {
    "GET": ("get", "stat"),
    "LIST": ("list",),
    "PUT": ("put", "put_if_absent"),
    "DELETE": ("delete", "delete_many"),
}
_Job = Callable[[holdfast.Registry, Callable[[], holdfast.Registry]], object]
#: In this order; `again` is the job before once more.
_JOBS: dict[str, _Job] = {
    "verify": lambda reg, _: reg.verify(since_last=True),
    "verify, again": lambda reg, _: reg.verify(since_last=True),
    "verify, each byte": lambda reg, _: reg.verify(deep=True),
    "du": lambda reg, _: reg.usage(),
    "repack, dry run": lambda reg, _: reg.repack(dry_run=True),
    "gc, dry run": lambda reg, _: reg.gc(grace_s=0, dry_run=True),
    "gc": lambda reg, _: reg.gc(grace_s=0),
    "gc, again": lambda reg, _: reg.gc(grace_s=0),
    "sync to a new mirror": lambda reg, mirror: holdfast.sync(reg, mirror()),
    "sync, again": lambda reg, mirror: holdfast.sync(reg, mirror()),
}
_LISTING: dict[str, _Job] = {
    "run ls": lambda reg, _: reg.runs_table(),
    "run ls, again": lambda reg, _: reg.runs_table(),
    **{f"gc, night {night}": lambda reg, _: reg.gc(grace_s=0) for night in (1, 2, 3)},
    "run ls, after gc": lambda reg, _: reg.runs_table(),
    "run ls, runs sealed": lambda reg, _: reg.runs_table(),
}


def build(folder: Path, runs: int, checkpoints: int) -> None:
    """Save, and evict half; without syncs, which no job here needs."""
    os.fsync = lambda _: None
    with holdfast.init(folder, skip_race_probe=True) as reg:
        for number in range(runs):
            run = reg.create_run(f"run{number:05d}", seed=number)
            for step in range(checkpoints):
                weights = np.full(64, number * checkpoints + step, np.int64)
                run.save({"model": {"w": weights}}, step=step)
            if checkpoints > 1:
                run.retention.prune(holdfast.Retention(last=checkpoints // 2))
        reg.upgrade()


def copy(folder: Path, url: str) -> None:
    """Put the files of a folder into a bucket."""
    backend = open_backend(url)
    files = [path for path in folder.rglob("*") if path.is_file() and ".tmp" not in path.parts]
    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(
            lambda path: backend.put(path.relative_to(folder).as_posix(), path.read_bytes()), files
        ):
            pass


def work(job: str, url: str, mirror_url: str) -> dict[str, Any]:
    """Do a job, and return what it took."""
    calls: list[Call] = []

    def opened(place: str) -> holdfast.Registry:
        return open_on(Paged(open_backend(place), calls), heads=open_heads(parse(place)))

    def mirror() -> holdfast.Registry:
        if job.endswith("again"):
            return opened(mirror_url)
        holdfast.init(mirror_url, skip_race_probe=True).close()
        return opened(mirror_url)

    with opened(url) as reg:
        begun = time.process_time()
        (_JOBS | _LISTING)[job](reg, mirror)
    return {
        "cpu_s": time.process_time() - begun,
        "calls": Counter(call.method for call in calls),
        "peak_mib": peak() / 2**20,
    }


def _apart(*words: object) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", *map(str, words)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout) if done.stdout else {}


@contextmanager
def _urls(place: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the addresses of a registry, which is that of the folder, and of a mirror."""
    if place == "folder":
        yield str(folder), f"{folder}-mirror"
        return
    with SERVERS[place]() as endpoint:
        bucket = f"bench-{secrets.token_hex(4)}"
        boto3.session.Session().client("s3", endpoint_url=endpoint).create_bucket(Bucket=bucket)
        home, mirror = (f"s3://{bucket}/{name}?endpoint_url={endpoint}" for name in ("home", "too"))
        copy(folder, home)
        yield home, mirror


def report(title: str, place: str, folder: Path, jobs: dict[str, _Job], each: int) -> Table:
    """Do the jobs, and return a table of what each took for a thousand of `each` things."""
    table = Table("", *_COLUMNS, "CPU s", "peak MiB", title=f"{title}, in {place}")
    with _urls(place, folder) as (url, mirror):
        for job in jobs:
            told = _apart(job, url, mirror)
            counts = [sum(told["calls"].get(one, 0) for one in of) for of in _COLUMNS.values()]
            cells = (f"{1000 * count / each:,.1f}" for count in counts)
            table.add_row(job, *cells, f"{told['cpu_s']:.1f}", f"{told['peak_mib']:.0f}")
    return table


def main() -> None:
    """Build, work, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--objects", type=int, nargs="*", default=[9_900])
    parser.add_argument("--listed", type=int, nargs="*", default=[1_000])
    parser.add_argument("--places", default="folder")
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        job, *given = options.child
        if job == "build":
            build(Path(given[0]), *map(int, given[1:]))
        else:
            print(json.dumps(work(job, *given)))
        return
    sizes = [(objects, 0) for objects in options.objects] + [(0, runs) for runs in options.listed]
    console = Console(width=120)
    for objects, listed in sizes:
        checkpoints = _CHECKPOINTS_A_RUN if objects else 1
        runs = listed or max(1, objects // _OBJECTS_EACH // checkpoints)
        jobs, each = (_JOBS, objects) if objects else (_LISTING, runs)
        title = f"requests for 1,000 of {each:,} {'objects' if objects else 'runs'}"
        os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
        for place in options.places.split(","):
            with tempfile.TemporaryDirectory(dir=options.dir) as temporary:
                os.environ["XDG_STATE_HOME"] = f"{temporary}/state"
                folder = Path(temporary) / "home"
                _apart("build", folder, runs, checkpoints)
                console.print(report(title, place, folder, jobs, each))


if __name__ == "__main__":
    main()
