"""Damage, silence and death: no client gets wrong or short bytes, or an older version unawares."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.backends import Backend
from holdfast.backends.errors import StoreUnavailable
from holdfast.backends.opening import open_backend
from holdfast.registry.hub import endpoint
from holdfast.registry.hub.access import Access
from holdfast.registry.loading import Chunks
from holdfast.registry.store.store import create_config
from holdfast.registry.ui import serving
from tests.registry.hub.conftest import Site, on_a_weary_s3, served
from tests.registry.hub.test_answers import sha_of
from tests.support.crowd import crowd
from tests.support.faults import Hooked, flip
from tests.support.stores import new_backend, opened, small_grid

hub = pytest.importorskip("huggingface_hub")
RevisionNotFound = pytest.importorskip("huggingface_hub.errors").RevisionNotFoundError
pytestmark = pytest.mark.xdist_group("hub")
#: Bytes of a part that the endpoint reads at once, and of each tensor: it is a pack of its own.
PART = 2**18
everywhere = pytest.mark.parametrize("backend", ["memory", "s3"], indirect=True)


def weights(seed: int, mib: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {f"{i}": rng.integers(0, 256, mib * 2**20, np.uint8) for i in range(4)}


def save(backend: Backend, step: int, mib: int = 1) -> None:
    with opened(backend) as reg:
        run = reg.run("r") if step > 1 else reg.create_run("r")
        run.save({"model": weights(step, mib)}, step=step)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Backend:
    made: Backend = new_backend()
    if getattr(request, "param", "memory") == "s3":
        made = open_backend(request.getfixturevalue("moto_url")())
        create_config(made, "skipped")
    save(made, 1)
    return made


def damage(backend: Backend, before: set[str], prefix: str) -> None:
    """Invert a bit in the second half of the one object that was not there before."""
    (key,) = {info.key for info in backend.list(prefix)} - before
    flip(backend, key, bit=5 * len(backend.get(key)))


def get(site: Site, cache: Path, revision: str = "latest") -> bytes:
    """Download the weights by the client, into its cache."""
    path = hub.hf_hub_download(
        "r", "model.safetensors", revision=revision, endpoint=site.url, cache_dir=cache, token=False
    )
    return Path(path).read_bytes()


@everywhere
def test_damage_in_mid_stream_breaks_the_connection(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_PART_BYTES", PART)
    # The client drops what is left of such a piece, 10 MB, and begins again there.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", PART)
    with served(backend) as site:
        path = f"/r/resolve/{sha_of(site, repo='r')}/model.safetensors"
        whole = site.ask(path).body
    damage(backend, set(), "packs/")
    with served(backend) as site:
        connection = http.client.HTTPConnection("127.0.0.1", site.port)
        connection.request("GET", path)
        answer = connection.getresponse()
        assert (answer.status, answer.headers["content-length"]) == (200, str(len(whole)))
        with pytest.raises(http.client.IncompleteRead) as caught:
            answer.read()
        connection.close()
        got = caught.value.partial
        assert 0 < len(got) < len(whole)
        assert got == whole[: len(got)]
        # The rest begins with the damage: there the client stops.
        rest = site.ask(path, Range=f"bytes={len(got)}-")
        assert (rest.status, rest.code) == (404, "RevisionNotFound")
        with pytest.raises(RevisionNotFound):
            get(site, tmp_path)
        assert not list(tmp_path.glob("**/snapshots/*/*"))
        assert any("broken off: " in line for line in site.lines)
        assert "broken_answers_total 2.0" in site.ask("/metrics").body.decode()


def test_a_file_of_many_parts_is_that_of_pull_and_no_chunk_is_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split, get_chunk = list[Any](), Chunks.get

    def noted(self: Chunks, *given: Any) -> memoryview:
        split.append(given)
        return get_chunk(self, *given)

    monkeypatch.setattr(Chunks, "get", noted)  # called for a part of a chunk
    monkeypatch.setattr(endpoint, "_PART_BYTES", 1000)
    rng = np.random.default_rng(3)
    state = {"model": {f"{i}": rng.random((7, 90 + i), np.float32) for i in range(4)}}
    holdfast.formats.write(tmp_path / "x.safetensors", state, {"format": "pt"})
    with small_grid():
        stored = new_backend()
        with opened(stored) as reg:
            reg.create_run("r").save(state, step=1)
        with served(stored) as site:
            path = f"/r/resolve/{sha_of(site, repo='r')}/model.safetensors"
            with site.source.meter.measure() as usage:
                got = site.ask(path).body
    assert got == (tmp_path / "x.safetensors").read_bytes()
    assert usage.read_bytes < 1.3 * len(got)
    assert not split


@everywhere
def test_an_older_version_in_the_cache_is_not_used_unawares(
    backend: Backend, tmp_path: Path
) -> None:
    hooked = Hooked(backend)
    away = threading.Event()

    keys: list[str] = []

    def fail(method: str, key: str) -> None:
        keys.append(key)
        if away.is_set():
            raise StoreUnavailable("no answer", where=key)

    hooked.before = fail
    with served(hooked) as site:
        assert site.ask("/r/resolve/latest/model.safetensors", "HEAD").status == 307
        assert not [key for key in keys if key.startswith("packs/")]  # no tensor data
        old = get(site, tmp_path)
        sha = sha_of(site, repo="r")
        before = {info.key for info in backend.list("manifests/")}
        save(backend, 2)
        kept = {key: backend.get(key) for key in {info.key for info in backend.list("manifests/")}}
        damage(backend, before, "manifests/")
        with pytest.raises(RevisionNotFound):
            get(site, tmp_path)
        for key, data in kept.items():
            backend.put(key, data)
        away.set()
        with pytest.raises(RevisionNotFound):
            get(site, tmp_path)
        # Digits mean the same bytes for ever: the client may use its cache, and else tries again.
        assert get(site, tmp_path, sha) == old
        answer = site.ask(f"/r/resolve/{'0' * 40}/model.safetensors", "HEAD")
        assert (answer.status, answer.headers["retry-after"]) == (503, "5")
        away.clear()
        assert get(site, tmp_path) != old
    # What the endpoint cannot prevent, and docs/hub.md says.
    assert get(site, tmp_path) != old


def test_a_store_that_does_not_answer_is_no_answer_either(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooked, answers = Hooked(backend), threading.Event()
    with served(hooked) as site:
        sha = sha_of(site, repo="r")
        monkeypatch.setattr(endpoint, "_PATIENCE_S", 0.2)  # now: a healthy answer may take longer
        hooked.before = lambda method, key: answers.wait(60)
        slow = site.ask("/r/resolve/latest/model.safetensors", "HEAD")
        assert (slow.status, slow.code) == (404, "RevisionNotFound")
        assert site.ask(f"/r/resolve/{'0' * 40}/README.md").status == 503
        assert site.ask(f"/r/resolve/{sha}/README.md").status == 200  # known a moment ago
        answers.set()


def test_a_client_that_stops_reading_is_cut_off(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_STALLED_S", 0.2)
    monkeypatch.setattr(endpoint, "_PART_BYTES", PART)
    monkeypatch.setattr(endpoint, "_OPEN_FILES", 1)
    save(backend, 2, mib=8)  # more than the buffers of the system hold
    with served(backend) as site:
        path = f"/r/resolve/{sha_of(site, repo='r')}/model.safetensors"
        asked = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{site.port}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", site.port)) as leaving:
            leaving.sendall(asked)
            assert leaving.recv(12) == b"HTTP/1.1 200"
        with socket.create_connection(("127.0.0.1", site.port)) as idle:
            idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            idle.sendall(asked)
            assert idle.recv(12) == b"HTTP/1.1 200"
            # The only file that may be sent at once is free again, although nobody hung up.
            assert site.ask(path).status == 200
        broken = [line.rpartition("broken off: ")[2] for line in site.lines if "broken" in line]
        assert broken == ["the client went away", "the client stopped reading"]


def test_bodies_that_never_come_lock_no_reader_out(
    monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    monkeypatch.setattr(serving, "_CONNECTIONS", 4)
    with served(backend) as site, ExitStack() as slow:
        path = f"POST /api/models/r/paths-info/latest HTTP/1.1\r\nHost: 127.0.0.1:{site.port}\r\n"
        for _ in range(8):
            there = slow.enter_context(socket.create_connection(("127.0.0.1", site.port), 300))
            there.sendall(f"{path}Content-Length: 9\r\n\r\nbody".encode())
        assert site.ask("/healthz").status == 200
        monkeypatch.setattr(serving, "_REQUEST_WITHIN_S", 0.2)
        last = slow.enter_context(socket.create_connection(("127.0.0.1", site.port), 300))
        last.sendall(f"{path}Content-Length: 9\r\n\r\nbody".encode())
        assert last.recv(1) == b""


@contextmanager
def command(place: Path | str) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """Serve by the command: yield its process, port and token."""
    program = [sys.executable, "-m", "holdfast.registry.cli", "hub", str(place)]
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        url, token = (process.stdout.readline().strip() for _ in range(2))
        try:
            yield process, int(url.rpartition(":")[2]), token.removeprefix("HF_TOKEN=")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


@pytest.mark.parametrize("where", ["folder", pytest.param("s3", marks=pytest.mark.soak)])
def test_a_killed_endpoint_gives_a_beginning_and_another_one_the_rest(
    tmp_path: Path, request: pytest.FixtureRequest, where: str
) -> None:
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg, reg.create_run("r") as run:
        run.save({"model": weights(1, mib=8)}, step=1)
    place = tmp_path / "reg" if where == "folder" else on_a_weary_s3(request, tmp_path / "reg")
    with served(place) as site:
        path = f"/r/resolve/{sha_of(site, repo='r')}/model.safetensors"
        whole = site.ask(path).body
    with command(place) as (process, port, token):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", path)
        answer = connection.getresponse()
        assert (answer.status, b"r" in answer.read()) == (401, True)
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        assert answer.status == 200
        got = answer.read(2**20)
        process.kill()
        process.wait()
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            while data := answer.read(2**20):
                got += data
            raise http.client.IncompleteRead(b"")
        connection.close()
    assert 0 < len(got) < len(whole)
    with command(place) as (process, port, token):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        about = {"Authorization": f"Bearer {token}", "Range": f"bytes={len(got)}-"}
        connection.request("GET", path, headers=about)
        got += connection.getresponse().read()
        connection.close()
    assert got == whole


def test_a_crowd_of_strangers_locks_no_reader_out(backend: Backend) -> None:
    """Each stranger gets one answer, to the first of its many requests."""
    access, token = Access.generated()
    with served(backend, access=access) as site:
        for path in ("/metrics", "/r/resolve/main/card.md"):
            assert site.ask(path).headers["connection"] == "close"
        with crowd(site.port, "GET /healthz"):
            answer = site.ask("/api/models/r", Authorization=f"Bearer {token}")
            assert (answer.status, answer.headers["connection"]) == (200, None)
