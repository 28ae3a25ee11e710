"""Which library moves 16 MiB objects to and from an S3 server fastest, ours among them.

    python bench/s3_transport.py [--endpoint URL] [--objects N] [--rounds N] [--threads N]

Without `--endpoint` it starts a moto of its own; with it credentials come from the AWS environment.
All take the same bytes to the same bucket in one run, in turn within each round, so that a slow
moment of the machine hits all of them; medians over the rounds, ratios to the fastest. What it
showed is in docs/design/s3-transport.md.
"""

# The contenders share a signature of which each uses what it needs.
# ruff: noqa: ARG002
from __future__ import annotations

import argparse
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import boto3
import obstore
import s3fs
from botocore.config import Config
from obstore.store import S3Store

from holdfast.backends import ByteRange, open_backend

SIZE = 16 * 2**20


class Ours:
    """Our backend, reading into buffers that it is given, as a load does."""

    def __init__(self, endpoint: str, bucket: str, threads: int) -> None:
        self._backend = open_backend(f"s3://{bucket}/ours?endpoint_url={endpoint}")
        self._pool = ThreadPoolExecutor(threads)

    def put(self, items: dict[str, bytes]) -> None:
        list(self._pool.map(lambda item: self._backend.put(*item), items.items()))

    def get(self, items: dict[str, bytes], targets: list[bytearray]) -> list[bytes | bytearray]:
        whole = ByteRange(0, SIZE)

        def fetch(key: str, target: bytearray) -> bytearray:
            self._backend.get(key, whole, into=[memoryview(target)])
            return target

        return list(self._pool.map(fetch, items, targets))


class OursAllocating(Ours):
    def get(self, items: dict[str, bytes], targets: list[bytearray]) -> list[bytes | bytearray]:
        return list(self._pool.map(self._backend.get, items))


class Boto3:
    def __init__(self, endpoint: str, bucket: str, threads: int) -> None:
        config = Config(max_pool_connections=threads, s3={"addressing_style": "path"})
        self._client = boto3.client("s3", endpoint_url=endpoint, config=config)
        self._bucket = bucket
        self._pool = ThreadPoolExecutor(threads)

    def put(self, items: dict[str, bytes]) -> None:
        def send(item: tuple[str, bytes]) -> None:
            self._client.put_object(Bucket=self._bucket, Key=f"boto3/{item[0]}", Body=item[1])

        list(self._pool.map(send, items.items()))

    def get(self, items: dict[str, bytes], targets: list[bytearray]) -> list[bytes | bytearray]:
        def fetch(key: str) -> bytes:
            found = self._client.get_object(Bucket=self._bucket, Key=f"boto3/{key}")
            return found["Body"].read()

        return list(self._pool.map(fetch, items))


class S3fsBulk:
    def __init__(self, endpoint: str, bucket: str, threads: int) -> None:
        self._fs = s3fs.S3FileSystem(endpoint_url=endpoint, skip_instance_cache=True)
        self._base = f"{bucket}/s3fs/"

    def put(self, items: dict[str, bytes]) -> None:
        self._fs.pipe({self._base + key: data for key, data in items.items()})

    def get(self, items: dict[str, bytes], targets: list[bytearray]) -> list[bytes | bytearray]:
        found = self._fs.cat([self._base + key for key in items])
        return [found[self._base + key] for key in items]


class Obstore:
    def __init__(self, endpoint: str, bucket: str, threads: int) -> None:
        self._store = S3Store(
            bucket,
            endpoint=endpoint,
            prefix="obstore",
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
            retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=20)},
        )
        self._pool = ThreadPoolExecutor(threads)

    def put(self, items: dict[str, bytes]) -> None:
        def send(item: tuple[str, bytes]) -> None:
            obstore.put(self._store, item[0], item[1], use_multipart=False)

        list(self._pool.map(send, items.items()))

    def get(self, items: dict[str, bytes], targets: list[bytearray]) -> list[bytes | bytearray]:
        def fetch(key: str) -> memoryview:
            return memoryview(obstore.get(self._store, key).bytes())

        return list(self._pool.map(fetch, items))  # type: ignore[arg-type]


CONTENDERS = {
    "ours, into buffers": Ours,
    "ours, allocating": OursAllocating,
    "boto3 threads": Boto3,
    "s3fs bulk": S3fsBulk,
    "obstore threads": Obstore,
}


@contextmanager
def moto() -> Iterator[str]:
    """Serve moto, threaded, on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.environ.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test")
    try:
        wait_for(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def wait_for(url: str) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit(f"{url} does not answer")


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    answer = call()
    return time.perf_counter() - began, answer


def turn(one: Any, items: dict[str, bytes], targets: list[bytearray]) -> dict[str, float]:
    put_s, _ = seconds(lambda: one.put(items))
    get_s, found = seconds(lambda: one.get(items, targets))
    assert all(bytes(a) == b for a, b in zip(found, items.values(), strict=True))
    return {"put": put_s, "get": get_s}


def run(endpoint: str, objects: int, rounds: int, threads: int) -> None:
    bucket = f"bench-{secrets.token_hex(4)}"
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=bucket)
    items = {f"{number:04d}": secrets.token_bytes(SIZE) for number in range(objects)}
    targets = [bytearray(SIZE) for _ in items]
    contenders = {name: make(endpoint, bucket, threads) for name, make in CONTENDERS.items()}
    times: dict[str, dict[str, list[float]]] = {n: {"put": [], "get": []} for n in contenders}
    for number in range(rounds + 1):
        order = list(contenders)
        # Another one goes first in each round.
        for name in order[number % len(order) :] + order[: number % len(order)]:
            try:
                taken = turn(contenders[name], items, targets)
            except (OSError, obstore.exceptions.BaseError) as error:
                print(f"{name} gave up: {str(error).splitlines()[0]}", flush=True)
                del contenders[name], times[name]
                continue
            if number:  # the first one warms up
                for act, taken_s in taken.items():
                    times[name][act].append(taken_s)
    show(times, objects)


def show(times: dict[str, dict[str, list[float]]], objects: int) -> None:
    megabytes = objects * SIZE / 1e6
    rates = {
        name: {act: megabytes / statistics.median(found) for act, found in acts.items()}
        for name, acts in times.items()
    }
    best = {act: max(rate[act] for rate in rates.values()) for act in ("put", "get")}
    print(f"{'':20} {'put MB/s':>9} {'x':>5} {'get MB/s':>9} {'x':>5}")
    for name, rate in rates.items():
        cells = " ".join(f"{rate[a]:9.0f} {rate[a] / best[a]:5.2f}" for a in ("put", "get"))
        print(f"{name:20} {cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--endpoint")
    parser.add_argument("--objects", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=4)
    options = parser.parse_args()
    wanted = (options.objects, options.rounds, options.threads)
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    if options.endpoint:
        run(options.endpoint, *wanted)
    else:
        with moto() as endpoint:
            run(endpoint, *wanted)


if __name__ == "__main__":
    main()
