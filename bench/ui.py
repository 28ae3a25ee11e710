"""Requests and milliseconds of each view of `holdfast ui`, on S3 with 20 ms of latency.

    python bench/ui.py [--server radosgw|moto] [--total N] [--runs N] [--checkpoints N] [--rounds N]

It fills a registry of `--total` runs, the newest `--runs` of them with `--checkpoints` checkpoints
each, a run with a pool, and one of 60 checkpoints of 2 MiB. The other runs have their first commit
alone: no view reads more of them, which tests/registry/ui/test_requests.py proves. A proxy delays
every byte by 10 ms each way.

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from urllib.parse import urlsplit

import boto3
import numpy as np
from transports import SERVERS, way

from holdfast import Monitor, Registry
from holdfast.backends import open_backend
from holdfast.backends.memory import MemoryBackend
from holdfast.registry.registries.factory import open_on
from holdfast.registry.spec import Phase, Pool, RunSpec
from holdfast.registry.storage.connecting import Address
from holdfast.registry.storage.store import create_config
from holdfast.registry.ui import Server, Source

LEAGUE = RunSpec(
    name="league",
    phases=(Phase(name="3"),),
    inference=("model",),
    pool=Pool(phase="3", size=20),
)
LOSS = Monitor(metric="loss", mode="min")
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
        "lineage": "/lineage",
        "lineage of a run": f"/runs/{newest}/lineage",
        "pool": "/runs/league/pool",
        "checkpoint": "/checkpoints/long/latest",
        "... statistics, 2 MiB": "/checkpoints/long/latest?stats=1",
        "... shared": "/checkpoints/long/latest?shared=1",
        "compare": "/compare?before=long/main/step30&after=long/latest",
        "... chunks that differ": "/compare?before=long/main/step30&after=long/latest&values=1",
        "storage": "/storage",
        "health": "/health",
    }


def fill(url: str, total: int, runs: int, checkpoints: int) -> None:
    """Make the registry in memory, and copy its objects."""
    made = MemoryBackend()
    create_config(made, "skipped")
    state = {"model": {"w": np.zeros(1000, np.float32)}}
    with open_on(made) as registry:
        fill_with_states(registry)
        for number in range(total):
            run = registry.create_run(
                name_of(number),
                seed=1,
                config={"lr": number},
                monitor=LOSS,
            )
            for step in range(1, checkpoints + 1 if number >= total - runs else 1):
                run.save(state, step=step, metrics={"loss": 1 / step, "accuracy": 1 - 1 / step})
    target = open_backend(url)
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda info: target.put(info.key, made.get(info.key)), made.list()))
    target.close()


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
    parser.add_argument("--server", default=real, choices=list(SERVERS))
    parser.add_argument("--total", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--checkpoints", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    os.environ["HOLDFAST_HEADS"] = "0"
    with tempfile.TemporaryDirectory() as folder, SERVERS[options.server]() as behind:
        bucket = f"bench-{secrets.token_hex(4)}"
        boto3.session.Session().client("s3", endpoint_url=behind).create_bucket(Bucket=bucket)
        began = time.perf_counter()
        filled = f"s3://{bucket}/reg?endpoint_url={behind}"
        fill(filled, options.total, options.runs, options.checkpoints)
        print(f"{options.server}: filled in {time.perf_counter() - began:.0f} s", flush=True)
        with way("latency", behind, Path(folder)) as endpoint:
            url = f"s3://{bucket}/reg?endpoint_url={endpoint}"
            print(f"{'':24} requests      KiB  first ms  whole ms  again: requests  ms")
            for label, path in paths(options.total).items():
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
        f"{label:24} {looks[0].requests:8,} {looks[0].read_bytes / 1024:8,.0f} "
        f"{middle(one.first_ms for one in looks):9,.0f} "
        f"{middle(one.whole_ms for one in looks):9,.0f} "
        f"{again[0].requests:16,} {middle(one.whole_ms for one in again):3,.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
