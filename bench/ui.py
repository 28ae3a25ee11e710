"""Requests and milliseconds of each view of `holdfast ui`, with 20 ms of latency.

    python bench/ui.py [--server radosgw|moto|folder] [--total N] [--runs N] [--checkpoints N]

It fills a registry of `--total` runs, the newest `--runs` of them with `--checkpoints` checkpoints
each, every second one ended, a run with a pool, and one of 60 checkpoints of 2 MiB. The other runs
have their first commit alone: no view reads more of them, which tests/registry/ui/test_requests.py
proves. `--runs 1000` has 100,000 checkpoints; `--server folder` makes them in minutes, in the
temporary folder, and lets each request take 20 ms more. Otherwise the registry is on S3, and a
proxy delays every byte by 10 ms each way. It is written in memory by the library, and its files are
copied to the server, without those snapshots that a collection deletes. Then a collection seals its
runs, as each night; the newest `--active` runs that did not end commit once more.

`first` is the time to the first answer, `whole` to the one that has everything that was asked for:
a table of runs shows what it has after 0.4 s, and the browser asks again. Each view is asked by a
new process's worth of state: nothing is open. `again` is a second look. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import secrets
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from html import unescape
from itertools import groupby, islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import numpy as np
from transports import SERVERS, way

from holdfast import Monitor, Registry, Run
from holdfast.backends import Backend, open_backend
from holdfast.backends.local.backend import LocalBackend
from holdfast.backends.memory import MemoryBackend
from holdfast.registry.face.factory import open_on
from holdfast.registry.history.snapshots import stale_snapshots
from holdfast.registry.objects.keys import RUNS
from holdfast.registry.spec import Phase, Pool, RunSpec
from holdfast.registry.store.address import Address
from holdfast.registry.store.store import create_config
from holdfast.registry.store.threads import results
from holdfast.registry.ui import Server, Source

LEAGUE = RunSpec(
    name="league",
    phases=(Phase(name="3"),),
    inference=("model",),
    pool=Pool(phase="3", size=20),
)
LOSS = Monitor(metric="loss", mode="min")
#: Runs that are made in memory at once, and files that are copied at once.
_TOGETHER, _COPIES = 25, 16
_FOLLOWING = re.compile(r'data-following="([^"]*)"')


def name_of(number: int) -> str:
    return f"20260101_{number // 3600:02d}{number // 60 % 60:02d}{number % 60:02d}_0000000a"


def paths(total: int) -> dict[str, str]:
    """The views, by what the table calls them."""
    newest, older, oldest = (name_of(total - 1 - number) for number in range(3))
    return {
        "runs": "/",
        "run": f"/runs/{newest}",
        "side by side, 3 runs": f"/compare-runs?run={newest}&run={older}&run={oldest}",
        "side by side, 100 runs": "/compare-runs?"
        + "&".join(f"run={name_of(total - 1 - number)}" for number in range(min(total, 100))),
        "lineage": "/lineage",
        "lineage of a run": f"/runs/{newest}/lineage",
        "pool": "/runs/league/pool",
        "checkpoint": "/checkpoints/long/latest",
        "... statistics, 2 MiB": "/checkpoints/long/latest?stats=1",
        "... shared": "/checkpoints/long/latest?shared=1",
        "compare": "/compare?before=long/main/step30&after=long/latest",
        "... chunks that differ": "/compare?before=long/main/step30&after=long/latest&values=1",
        "names": "/names",
        "storage": "/storage",
        "health": "/health",
    }


def fill(registry: Registry, numbers: Iterable[int], options: argparse.Namespace) -> None:
    """Make these runs of a registry."""
    for number in numbers:
        run = registry.create_run(
            name_of(number),
            seed=1,
            config={"lr": number},
            monitor=LOSS,
        )
        is_new = number >= options.total - options.runs
        for step in range(1, options.checkpoints + 1 if is_new else 1):
            save(run, step)
        if number % 2:
            with run:  # it ends
                pass


def save(run: Run, step: int) -> None:
    state = {"model": {"w": np.full(1000, step, np.float32)}}
    run.save(state, step=step, metrics={"loss": 1 / step, "accuracy": 1 - 1 / step})


def collect(url: str, options: argparse.Namespace) -> None:
    """Seal the runs by a collection; then some of them go on."""
    with open_on(open_backend(url)) as registry:
        registry.upgrade()
        registry.gc(grace_s=0)
        newest = (number for number in range(options.total - 1, -1, -1) if number % 2 == 0)
        for number in islice(newest, options.active):
            registry.run(name_of(number)).streams["hours"].append([{"step": 1}])


def copy_to(url: str, options: argparse.Namespace) -> None:
    """Make the registry in memory, some runs at a time, and copy their files meanwhile."""
    made, target = MemoryBackend(), open_backend(url)
    create_config(made, "skipped")
    copied: set[str] = set()
    copies: list[Future[None]] = []

    def copy(key: str) -> None:
        target.put(key, made.get(key))
        if key.startswith(RUNS):
            made.delete(key)

    with ThreadPoolExecutor(_COPIES) as threads:
        for first in range(0, options.total, _TOGETHER):
            numbers = range(first, min(first + _TOGETHER, options.total))
            with open_on(made) as registry:
                if not first:
                    fill_with_states(registry)
                fill(registry, numbers, options)
            results(copies)
            drop_stale_snapshots(made)
            keys = [info.key for info in made.list() if info.key not in copied]
            copies = [threads.submit(copy, key) for key in keys]
            copied.update(key for key in keys if not key.startswith(RUNS))
        results(copies)
    target.close()


def drop_stale_snapshots(made: Backend) -> None:
    """Delete the snapshots that a collection deletes."""
    for _, listed in groupby(made.list(RUNS), key=lambda info: info.key.rpartition("/")[0]):
        files = list(listed)
        if "/snapshots/" in files[0].key:
            for info in stale_snapshots(files):
                made.delete(info.key)


def fill_with_states(registry: Registry) -> None:
    """Save a pool, and a run whose states are worth looking into."""
    rng = np.random.default_rng(1)
    league = registry.create_run("league", preset=LEAGUE)
    for step in range(1, 9):
        state = {"model": {"w": rng.normal(size=1000)}, "optimizer": {"m": np.zeros(9)}}
        league.pool.promote(league.save(state, step=step, phase=3))
    long = registry.create_run("long", monitor=LOSS)
    layers = {f"layers.{n}.w": rng.normal(size=16384).astype("f4") for n in range(32)}
    for step in range(1, 61):
        layers[f"layers.{step % 32}.w"] = rng.normal(size=16384).astype("f4")
        long.save({"model": dict(layers)}, step=step, metrics={"loss": 1 / step})


@dataclass
class Look:
    """One look at a view."""

    first_ms: float
    whole_ms: float
    requests: int
    read_bytes: int


class Browser:
    """Asks a server as a browser does."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._connection = http.client.HTTPConnection(place.hostname or "", place.port or 0)
        self._connection.request("GET", f"/?{place.query}")
        answer = self._connection.getresponse()
        answer.read()
        self._cookie = answer.headers["set-cookie"].partition(";")[0]

    def text(self, path: str) -> str:
        self._connection.request("GET", path, headers={"Cookie": self._cookie})
        answer = self._connection.getresponse()
        body = answer.read().decode()
        assert answer.status == 200, (path, body[:2000])
        return body


@contextmanager
def served(url: str) -> Iterator[tuple[Source, Browser]]:
    source = Source.open(Address(url))
    server = Server(source)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield source, Browser(server.url)
    finally:
        server.stop()
        thread.join()
        source.close()


def look(source: Source, browser: Browser, path: str) -> Look:
    before, began = source.meter.snapshot(), time.perf_counter()
    body = browser.text(path)
    first = time.perf_counter() - began
    while _is_partial(body):
        time.sleep(0.2)
        body = browser.text(path)
    whole = time.perf_counter() - began
    spent = source.meter.snapshot().since(before)
    return Look(1000 * first, 1000 * whole, spent.requests, spent.read_bytes)


def _is_partial(body: str) -> bool:
    found = _FOLLOWING.search(body)
    assert found is not None
    partial: bool = json.loads(unescape(found[1]))["partial"]
    return partial


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    real = "radosgw" if shutil.which("radosgw") else "moto"
    parser.add_argument("--server", default=real, choices=[*SERVERS, "folder"])
    parser.add_argument("--total", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--checkpoints", type=int, default=100)
    parser.add_argument("--active", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--views", default="", help="only these, with commas between them")
    options = parser.parse_args()
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    os.environ["HOLDFAST_HEADS"] = "0"
    if options.server == "folder":
        with tempfile.TemporaryDirectory() as folder:
            fill_folder(f"{folder}/reg", options)
            delay_folders()
            measure_views(f"{folder}/reg", options)
        return
    with tempfile.TemporaryDirectory() as folder, SERVERS[options.server]() as behind:
        bucket = f"bench-{secrets.token_hex(4)}"
        boto3.session.Session().client("s3", endpoint_url=behind).create_bucket(Bucket=bucket)
        began = time.perf_counter()
        copy_to(f"s3://{bucket}/reg?endpoint_url={behind}", options)
        collect(f"s3://{bucket}/reg?endpoint_url={behind}", options)
        print(
            f"{options.server}: filled and collected in {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        with way("latency", behind, Path(folder)) as endpoint:
            measure_views(f"s3://{bucket}/reg?endpoint_url={endpoint}", options)


def fill_folder(url: str, options: argparse.Namespace) -> None:
    """Make the registry in a folder, and collect."""
    create_config(open_backend(url), "skipped")
    with open_on(open_backend(url)) as registry:
        fill_with_states(registry)
        fill(registry, range(options.total), options)
    collect(url, options)


def delay_folders() -> None:
    """Let each request to a folder take 20 ms more."""

    def later(call: Any) -> Any:
        def asked(*given: Any, **more: Any) -> Any:
            time.sleep(0.02)
            return call(*given, **more)

        return asked

    for name in ("get", "stat", "list", "put", "put_if_absent"):
        setattr(LocalBackend, name, later(getattr(LocalBackend, name)))


def measure_views(url: str, options: argparse.Namespace) -> None:
    heads = ("requests", "KiB", "first ms", "whole ms", "again: requests", "ms")
    print(f"| {'':24} | {' | '.join(heads)} |")
    for label, path in paths(options.total).items():
        if not options.views or label in options.views.split(","):
            measure(label, path, url, options.rounds)


def measure(label: str, path: str, url: str, rounds: int) -> None:
    looks, again = [], []
    for _ in range(rounds):
        with served(url) as (source, browser):
            if path != "/":
                browser.text("/changes.json")  # connections are made before anything is timed
            looks.append(look(source, browser, path))
            again.append(look(source, browser, path))
    middle = statistics.median
    print(
        f"| {label:24} | {looks[0].requests:8,} | {looks[0].read_bytes / 1024:8,.0f} "
        f"| {middle(one.first_ms for one in looks):9,.0f} "
        f"| {middle(one.whole_ms for one in looks):9,.0f} "
        f"| {again[0].requests:16,} | {middle(one.whole_ms for one in again):3,.0f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
