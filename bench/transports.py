"""Which library moves the objects of a registry to and from S3 fastest, ours among them.

    python bench/transports.py [--servers moto,radosgw] [--ways plain,tls,latency] [--seconds N]
                               [--packs N] [--pack-bytes N] [--threads N]

It starts each server by itself. A proxy, in a process of its own, ends TLS (`tls`) or delays every
byte by 10 ms each way (`latency`): that is what users have. All contenders move the same bytes at
the same concurrency, in turn within each round, so that a slow moment of the machine hits all of
them. Rounds go on for about `--seconds` in each way. The tables show medians over the rounds,
and ratios to the fastest (`x`). What it showed is in docs/design/s3-transport.md.
"""

# The contenders share signatures of which each uses what it needs.
# ruff: noqa: ARG002
from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, ClassVar

import boto3
import s3fs
from botocore.config import Config
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from presence import is_here

from holdfast.backends import ByteRange, open_backend

ROOT = Path(__file__).parents[1]
DELAY_S = 0.01
RANGE, SMALL_RANGE = 4 * 2**20, 64 * 2**10
SMALL, SMALLS = 4096, 64
# Columns: name, and whether it is counted in MB/s instead of objects.
ACTS = {
    "put packs MB/s": True,
    "get ranges MB/s": True,
    "put small /s": False,
    "get small /s": False,
    "small ranges /s": False,
}
GOAL = 0.9
# Otherwise the SDK sends bodies over TLS without their length, and radosgw refuses them.
UNCHECKED: Any = {"request_checksum_calculation": "when_required"}

Items = dict[str, bytes]
#: Key, start and end.
Ranges = list[tuple[str, int, int]]


class Ours:
    """Our store, reading ranges into buffers that it is given, as a load does."""

    transport: Any = "boto3"
    options: ClassVar[Any] = None

    def __init__(self, endpoint: str, bucket: str, threads: int) -> None:
        url = f"s3://{bucket}/{self.transport}?endpoint_url={endpoint}"
        self._backend = open_backend(url, self.options, transport=self.transport)
        self._pool = ThreadPoolExecutor(threads)

    def put(self, items: Items) -> None:
        list(self._pool.map(lambda item: self._backend.put(*item), items.items()))

    def get(self, keys: Sequence[str]) -> list[Any]:
        return list(self._pool.map(self._backend.get, keys))

    def ranges(self, wanted: Ranges, targets: list[bytearray]) -> list[Any]:
        def fetch(one: tuple[str, int, int], target: bytearray) -> bytearray:
            self._backend.get(one[0], ByteRange(one[1], one[2]), into=[memoryview(target)])
            return target

        return list(self._pool.map(fetch, wanted, targets))


class OursByS3fs(Ours):
    transport = "s3fs"


class OursByObstore(Ours):
    transport = "obstore"
    # It takes no file of certificates.
    options: ClassVar[Any] = {"client_kwargs": {"verify": False}}


class Boto3:
    """Plain boto3 in threads."""

    def __init__(self, endpoint: str, bucket: str, threads: int) -> None:
        config = Config(max_pool_connections=threads, s3={"addressing_style": "path"}, **UNCHECKED)
        self._client = boto3.session.Session().client("s3", endpoint_url=endpoint, config=config)
        self._bucket = bucket
        self._pool = ThreadPoolExecutor(threads)

    def put(self, items: Items) -> None:
        def send(item: tuple[str, bytes]) -> None:
            self._client.put_object(Bucket=self._bucket, Key=f"plain/{item[0]}", Body=item[1])

        list(self._pool.map(send, items.items()))

    def get(self, keys: Sequence[str]) -> list[Any]:
        return list(self._pool.map(self._fetch, keys))

    def ranges(self, wanted: Ranges, targets: list[bytearray]) -> list[Any]:
        def fetch(one: tuple[str, int, int]) -> bytes:
            return self._fetch(one[0], Range=f"bytes={one[1]}-{one[2] - 1}")

        return list(self._pool.map(fetch, wanted))

    def _fetch(self, key: str, **how: str) -> bytes:
        found = self._client.get_object(Bucket=self._bucket, Key=f"plain/{key}", **how)
        return found["Body"].read()


class S3fs:
    """s3fs, many objects in one call."""

    def __init__(self, endpoint: str, bucket: str, threads: int) -> None:
        self._fs = s3fs.S3FileSystem(
            endpoint_url=endpoint,
            skip_instance_cache=True,
            use_listings_cache=False,
            config_kwargs=UNCHECKED,
        )
        self._base = f"{bucket}/s3fs/"
        self._many = {"batch_size": threads}

    def put(self, items: Items) -> None:
        self._fs.pipe({self._base + key: data for key, data in items.items()}, **self._many)

    def get(self, keys: Sequence[str]) -> list[Any]:
        found = self._fs.cat([self._base + key for key in keys], **self._many)
        return [found[self._base + key] for key in keys]

    def ranges(self, wanted: Ranges, targets: list[bytearray]) -> list[Any]:
        keys = [self._base + key for key, _, _ in wanted]
        starts, ends = [start for _, start, _ in wanted], [end for _, _, end in wanted]
        found: list[Any] = self._fs.cat_ranges(keys, starts, ends, on_error="raise", **self._many)
        return found


class Obstore:
    """obstore in threads."""

    def __init__(self, endpoint: str, bucket: str, threads: int) -> None:
        import obstore

        self._obstore = obstore
        self._store = obstore.store.S3Store(
            bucket,
            endpoint=endpoint,
            prefix="obstore",
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "allow_invalid_certificates": True},
            retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=20)},
        )
        self._pool = ThreadPoolExecutor(threads)

    def put(self, items: Items) -> None:
        def send(item: tuple[str, bytes]) -> None:
            self._obstore.put(self._store, item[0], item[1], use_multipart=False)

        list(self._pool.map(send, items.items()))

    def get(self, keys: Sequence[str]) -> list[Any]:
        get = self._obstore.get
        return list(self._pool.map(lambda key: get(self._store, key).bytes(), keys))

    def ranges(self, wanted: Ranges, targets: list[bytearray]) -> list[Any]:
        def fetch(one: tuple[str, int, int]) -> Any:
            return self._obstore.get_range(self._store, one[0], start=one[1], end=one[2])

        return list(self._pool.map(fetch, wanted))


CONTENDERS: dict[str, Callable[[str, str, int], Any]] = {
    "ours by boto3": Ours,
    "ours by s3fs": OursByS3fs,
    "ours by obstore": OursByObstore,
    "boto3 threads": Boto3,
    "s3fs bulk": S3fs,
    "obstore threads": Obstore,
}
#: The packages of those that the library itself does not need.
PACKAGES = {"ours by obstore": "obstore", "obstore threads": "obstore"}


class Work:
    """The objects that all contenders move."""

    def __init__(self, packs: int, pack_bytes: int) -> None:
        # Multiplied: random bytes for all of it take longer than to move them.
        self.packs = {
            f"packs/{n}": secrets.token_bytes(2**20) * (pack_bytes // 2**20) for n in range(packs)
        }
        self.smalls = {f"manifests/{n:04d}": secrets.token_bytes(SMALL) for n in range(SMALLS)}
        self.ranges: Ranges = [
            (key, start, start + RANGE)
            for key in self.packs
            for start in range(0, pack_bytes - RANGE + 1, RANGE)
        ]
        self.targets = [bytearray(RANGE) for _ in self.ranges]
        self.small_ranges: Ranges = [
            ("packs/0", n * SMALL_RANGE, (n + 1) * SMALL_RANGE) for n in range(SMALLS)
        ]
        self.small_targets = [bytearray(SMALL_RANGE) for _ in self.small_ranges]
        self.sizes = {
            "put packs MB/s": packs * pack_bytes / 1e6,
            "get ranges MB/s": len(self.ranges) * RANGE / 1e6,
            "put small /s": SMALLS,
            "get small /s": SMALLS,
            "small ranges /s": SMALLS,
        }

    def turn(self, one: Any) -> dict[str, float]:
        """Let a contender move everything once; return its rates.

        Raises:
            AssertionError: Other bytes came back.
        """
        put_s, _ = seconds(partial(one.put, self.packs))
        ranges_s, parts = seconds(partial(one.ranges, self.ranges, self.targets))
        small_s, _ = seconds(partial(one.put, self.smalls))
        get_s, found = seconds(partial(one.get, list(self.smalls)))
        bits_s, bits = seconds(partial(one.ranges, self.small_ranges, self.small_targets))
        wanted, read = [*self.ranges, *self.small_ranges], [*parts, *bits]
        for (key, start, end), part in zip(wanted, read, strict=True):
            assert memoryview(part) == memoryview(self.packs[key])[start:end]
        assert [bytes(data) for data in found] == list(self.smalls.values())
        taken = (put_s, ranges_s, small_s, get_s, bits_s)
        return {act: self.sizes[act] / s for act, s in zip(ACTS, taken, strict=True)}


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    answer = call()
    return time.perf_counter() - began, answer


def measure(endpoint: str, work: Work, threads: int, limit_s: float) -> dict[str, Any]:
    """Return the rates of each round, by contender."""
    bucket = f"bench-{secrets.token_hex(4)}"
    boto3.session.Session().client("s3", endpoint_url=endpoint).create_bucket(Bucket=bucket)
    contenders = {
        name: make(endpoint, bucket, threads)
        for name, make in CONTENDERS.items()
        if name not in PACKAGES or is_here(name, PACKAGES[name])
    }
    first = dict(list(work.smalls.items())[:threads])
    for name, one in list(contenders.items()):  # connections are made before anything is timed
        try:
            one.put(first)
        except Exception as error:
            print(f"{name} gave up: {str(error).splitlines()[0]}", flush=True)
            del contenders[name]
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    began = time.monotonic()
    number, round_s = 0, 0.0
    while number == 0 or time.monotonic() - began + round_s < limit_s:
        order = list(contenders)
        started = time.monotonic()
        # Another one goes first in each round.
        for name in order[number % len(order) :] + order[: number % len(order)]:
            rates[name].append(work.turn(contenders[name]))
        round_s = time.monotonic() - started
        number += 1
    return rates


def show(title: str, rates: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Print a table; return the ratios of s3fs to the fastest."""
    middle = {
        name: {act: statistics.median(one[act] for one in rounds) for act in ACTS}
        for name, rounds in rates.items()
    }
    best = {act: max(one[act] for one in middle.values()) for act in ACTS}
    count = len(next(iter(rates.values())))
    print(f"\n{title}: medians of {count} rounds")
    print(f"{'':16}" + "".join(f" {act:>16} {'x':>4}" for act in ACTS))
    for name, one in middle.items():
        cells = "".join(f" {one[act]:16.0f} {one[act] / best[act]:4.2f}" for act in ACTS)
        print(f"{name:16}{cells}", flush=True)
    fastest = ("ours by s3fs", "s3fs bulk")
    return {
        act: max((middle[name][act] for name in fastest if name in middle), default=0) / best[act]
        for act in ACTS
    }


# Servers


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


@contextmanager
def radosgw() -> Iterator[str]:
    """Serve a radosgw, by the module that also serves the tests."""
    command = [sys.executable, "-m", "tests.servers.radosgw"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            said = [process.stdout.readline() for _ in range(4)]
            told = dict(line.removeprefix("export ").strip().split("=", 1) for line in said[1:])
            endpoint = told.pop("AWS_ENDPOINT_URL")
            os.environ.update(told)
            yield endpoint
        finally:
            process.send_signal(signal.SIGINT)


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


SERVERS = {"moto": moto, "radosgw": radosgw}


# The proxy


@contextmanager
def way(name: str, endpoint: str, certificate: Path) -> Iterator[str]:
    """Return the address of a server, or of a proxy before it."""
    if name == "plain":
        yield endpoint
        return
    command = [sys.executable, __file__, "--proxy", endpoint.removeprefix("http://")]
    command += ["--certificate", str(certificate)] if name == "tls" else ["--delay", str(DELAY_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            yield f"{'https' if name == 'tls' else 'http'}://127.0.0.1:{port}"
        finally:
            process.kill()


WAYS = ("plain", "tls", "latency")


async def proxy(behind: str, certificate: str | None, delay_s: float) -> None:
    """Pass bytes on between clients and a server, each after a delay; print the port."""
    host, _, port = behind.partition(":")
    tls = None
    if certificate:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port), limit=2**20)
        with suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(pump(reader, back, delay_s), pump(there, writer, delay_s))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls, limit=2**20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Pass bytes on; a delay does not limit how many are on the way."""
    loop = asyncio.get_running_loop()
    coming: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1024)

    async def send() -> None:
        while True:
            due_s, data = await coming.get()
            if (wait_s := due_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            if not data:
                break
            writer.write(data)
            await writer.drain()
        writer.close()

    sending = asyncio.create_task(send())
    try:
        while data := await reader.read(2**18):
            await coming.put((loop.time() + delay_s, data))
    finally:
        await coming.put((loop.time() + delay_s, b""))
        await sending


def make_certificate(path: Path) -> None:
    """Write a certificate for this machine, signed by itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "bench")])
    now = datetime.now(UTC)
    address = x509.IPAddress(ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, *form)
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM) + private)


def compare(servers: Sequence[str], ways: Sequence[str], work: Work, options: Any) -> None:
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        certificate = Path(folder, "pem")
        make_certificate(certificate)
        os.environ["AWS_CA_BUNDLE"] = str(certificate)
        for server in servers:
            with SERVERS[server]() as behind:
                for name in ways:
                    with way(name, behind, certificate) as endpoint:
                        rates = measure(endpoint, work, options.threads, options.seconds)
                    found = show(f"{server}, {name}", rates)
                    ratios.append((f"{server}, {name}", found))
    print(f"\ns3fs, the better of both, to the fastest ({GOAL} would do):")
    for title, found in ratios:
        cells = ", ".join(f"{act.rpartition(' ')[0]} {ratio:.2f}" for act, ratio in found.items())
        print(f"{title:18} {cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", default=",".join(SERVERS))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--packs", type=int, default=4)
    parser.add_argument("--pack-bytes", type=int, default=64 * 2**20)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=45, help="for each way of each server")
    parser.add_argument("--proxy", help=argparse.SUPPRESS)
    parser.add_argument("--certificate", help=argparse.SUPPRESS)
    parser.add_argument("--delay", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.proxy:
        asyncio.run(proxy(options.proxy, options.certificate, options.delay))
        return
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    work = Work(options.packs, options.pack_bytes)
    compare(options.servers.split(","), options.ways.split(","), work, options)


if __name__ == "__main__":
    main()
