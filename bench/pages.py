"""How long the pages of a registry take on S3 with 20 ms of latency, and how much they ask for.

    python bench/pages.py [--runs N]

It fills a radosgw with runs, a pool and a run of 60 checkpoints of 2 MiB, and opens each view
through a proxy that delays every byte by 10 ms each way: first with a source that knows nothing, as
after `holdfast ui`, then again. Times are those of the whole answer, as a browser waits for it.
"""

from __future__ import annotations

import argparse
import os
import secrets
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.cookiejar import CookieJar
from pathlib import Path

import boto3
import numpy as np
from rich.console import Console
from rich.table import Table
from transports import radosgw, way

import holdfast
from holdfast import Monitor
from holdfast.registry.spec import Phase, Pool, RunSpec
from holdfast.registry.storage.connecting import Address
from holdfast.registry.ui.server import Server
from holdfast.registry.ui.source import Source

LOSS = Monitor(metric="loss", mode="min")
LEAGUE = RunSpec(
    phases=(Phase(name="play"),),
    inference=("model",),
    pool=Pool(phase="play", size=8, seed_child=0, cache=1),
)
#: What is opened: the view, and its address.
PAGES = {
    "Runs": "/",
    "Run": "/runs/long",
    "Lineage": "/lineage",
    "Pool": "/runs/league/pool",
    "Checkpoint": "/checkpoints/long/latest",
    "... statistics, 2 MiB": "/checkpoints/long/latest?stats=1",
    "... shared": "/checkpoints/long/latest?shared=1",
    "Compare": "/compare?before=long/main/step30&after=long/latest",
    "... chunks that differ": "/compare?before=long/main/step30&after=long/latest&values=1",
    "Storage": "/storage",
    "... bytes by run": "/storage?bytes=1",
    "... dry run of gc": "/storage?gc=1",
    "Health": "/health",
    "... verify": "/health?verify=1",
}


def fill(url: str, runs: int) -> None:
    """Save runs, a pool, and a long run."""
    rng = np.random.default_rng(1)
    with holdfast.init(url, skip_race_probe=True) as reg:
        for number in range(runs):
            run = reg.create_run(f"20260101_{number:06d}_0000000a", monitor=LOSS)
            for step in (1, 2):
                run.save({"w": np.full(100, step)}, step=step, metrics={"loss": 1 / step})
        league = reg.create_run("league", preset=LEAGUE)
        for step in range(1, 9):
            state = {"model": {"w": rng.normal(size=1000)}, "optimizer": {"m": np.zeros(9)}}
            league.pool.promote(league.save(state, step=step, phase="play"))
            if step > 1:
                league.pool.record_match([step - 1, step], [2, 1])
        long = reg.create_run("long", monitor=LOSS)
        layers = {f"layers.{n}.w": rng.normal(size=16384).astype("f4") for n in range(32)}
        for step in range(1, 61):
            layers[f"layers.{step % 32}.w"] = rng.normal(size=16384).astype("f4")
            long.save({"model": dict(layers)}, step=step, metrics={"loss": 1 / step})


@contextmanager
def served(url: str) -> Iterator[tuple[str, urllib.request.OpenerDirector, Source]]:
    """Serve a registry with a source that knows nothing yet."""
    with closing(Source.open(Address(url))) as source:
        server = Server(source)
        thread = threading.Thread(target=server.serve)
        thread.start()
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        base, _, token = server.url.partition("/?")
        browser.open(f"{base}/static/app.js?{token}").close()
        try:
            yield base, browser, source
        finally:
            server.stop()
            thread.join()


def measure(url: str) -> Table:
    """Open every page twice, each with a source of its own."""
    table = Table("view", "requests", "ms", "requests again", "ms again", title="20 ms of latency")
    for name, path in PAGES.items():
        with served(url) as (base, browser, source):
            cells = [name]
            for _ in range(2):
                with source.measured() as used:
                    began = time.perf_counter()
                    browser.open(base + path).read()
                    took = time.perf_counter() - began
                cells += [str(used.requests), f"{1000 * took:.0f}"]
            table.add_row(*cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=60)
    options = parser.parse_args()
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    os.environ["HOLDFAST_HEADS"] = "0"
    with radosgw() as endpoint:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        bucket = f"pages-{secrets.token_hex(4)}"
        boto3.client("s3").create_bucket(Bucket=bucket)
        fill(f"s3://{bucket}/reg", options.runs)
        with way("latency", endpoint, Path()) as slow:
            os.environ["AWS_ENDPOINT_URL"] = slow
            Console().print(measure(f"s3://{bucket}/reg"))


if __name__ == "__main__":
    main()
