"""Endpoints for the clients of Hugging Face, in this process, and plain requests to them."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote

import numpy as np
import pytest

import holdfast
from holdfast.backends import Backend
from holdfast.backends.opening import open_backend
from holdfast.backends.wrappers import Metered
from holdfast.registry.face import open_on
from holdfast.registry.hub.access import Access
from holdfast.registry.hub.catalog import Catalog
from holdfast.registry.hub.requests import asked
from holdfast.registry.hub.views import ViewOptions
from holdfast.registry.store.address import Address
from holdfast.registry.ui import Source
from holdfast.registry.values.figures import Figures
from tests.servers.gateway import Weather
from tests.support.stores import contents

if TYPE_CHECKING:
    from holdfast.registry.ui.serving import Listener

_NEEDS_THEM = ["test_answers.py", "test_clients.py", "test_troubles.py", "test_views.py"]
collect_ignore = [] if all(map(find_spec, ("starlette", "uvicorn"))) else _NEEDS_THEM

OPTIONS = ViewOptions(5_000_000_000, ("config", "tokenizer"))


@dataclass(frozen=True)
class Answer:
    """An answer to a request."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def code(self) -> str | None:
        return self.headers["x-error-code"]


@dataclass
class Site:
    """A running endpoint, and its access log."""

    port: int
    source: Source
    lines: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)  # the shapes of the requests

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, method: str = "GET", **headers: str) -> Answer:
        """Ask on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read())
        finally:
            connection.close()


@contextmanager
def served(
    place: str | Path | Backend,
    *,
    access: Access | None = None,
    options: ViewOptions = OPTIONS,
    main: str | None = None,
    cache: str | None = None,
    listener: Listener | None = None,
) -> Iterator[Site]:
    """Serve a registry."""
    from holdfast.registry.hub.endpoint import Endpoint
    from holdfast.registry.ui import serving

    if isinstance(place, str | Path):
        source = Source.open(Address(place), cache=cache)
    else:
        meter = Metered(place)
        source = Source(open_on(meter), meter)
    listener = listener or serving.Listener("127.0.0.1", 0)
    site = Site(listener.port, source)
    endpoint = Endpoint(
        Catalog(source, options, main),
        access or Access(None),
        serving.loopback_hosts(listener.port),
        site.lines.append,
        Figures(),
    )

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        site.asked.add(shape_of(scope))
        await endpoint(scope, receive, send)

    thread = threading.Thread(
        target=lambda: listener.serve(noted, log_level="critical"), daemon=True
    )
    thread.start()
    try:
        yield site
    finally:
        listener.stop()
        thread.join(60)
        assert not thread.is_alive(), "the endpoint does not end"
        endpoint.close()
        source.close()


def shape_of(scope: Any) -> str:
    """Return a request without the names in it."""
    path = scope["raw_path"].decode()
    found = asked(scope["raw_path"])
    if found is not None:
        path = path.replace(f"/{found.repo}", "/REPO")
        path = path.replace(f"/{quote(found.revision, safe='')}", "/REVISION")
        if found.kind == "file":
            path = path.replace(f"/{quote(found.path)}", "/FILE")
    query = sorted(parse_qs(scope["query_string"].decode()))
    sent = {name.decode() for name, _ in scope["headers"]} & {"range", "if-none-match"}
    return " ".join([scope["method"], path, *query, *sorted(sent)])


def folder_of_model(folder: Path, seed: int = 0) -> Path:
    """Write a folder of Hugging Face that needs no library to be made, and no model."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    tensors = {f"layer.{i}.weight": rng.random((5, 7 + i), np.float32) for i in range(4)}
    holdfast.formats.write(folder / "model.safetensors", {"model": tensors}, {"format": "pt"})
    (folder / "config.json").write_text('{\n  "model_type": "none"\n}\n')
    (folder / "tokenizer.json").write_text('{"words": ["' + "a" * 3000 + '"]}')
    (folder / "run.py").write_text("raise SystemExit('code')")
    (folder / "old.bin").write_bytes(b"\x80\x04.")
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry with the kinds of states that the endpoint shows."""
    root = tmp_path_factory.mktemp("hub")
    folders = [folder_of_model(root / f"model{i}", i) for i in (1, 2)]
    read: Callable[..., Any] = holdfast.formats.read
    with holdfast.init(root / "reg", skip_race_probe=True) as reg:
        monitor = holdfast.Monitor(metric="loss", mode="min")
        with reg.create_run("llm", project="lab", monitor=monitor) as run:
            first, last = (
                run.save(read(one).state, step=step, metrics={"loss": loss})
                for one, step, loss in zip(folders, (1, 2), (0.1, 0.2), strict=True)
            )
            run.releases.publish("1.0.0", first, card={"license": "mit"}, only=["model"])
            run.pins.tags.set("mine", last)
        with reg.create_run("whole") as run:
            run.save(read(folders[0], format="tree").state, step=1)
        with reg.create_run("secret") as run:
            run.save({"model": {"w": np.zeros(3, np.float32)}}, step=1)
    return root / "reg"


def on_a_weary_s3(request: pytest.FixtureRequest, folder: Path) -> str:
    """Copy a registry into a bucket that is slow and often busy, or hangs up; return its URL."""
    url: str = request.getfixturevalue("moto_url")()
    to = open_backend(url)
    for key, data in contents(open_backend(folder)).items():
        to.put(key, data)
    to.close()
    gateway, weather = request.getfixturevalue("gateway"), Weather(("busy", "lost"), 0.1, 0.005)
    gateway.lie(lambda _: True, weather)
    request.addfinalizer(lambda: _check_met(weather))
    request.getfixturevalue("monkeypatch").setenv("AWS_ENDPOINT_URL", gateway.url)
    return url


def _check_met(weather: Weather) -> None:
    assert weather.met.total() > 0


@pytest.fixture(scope="session")
def site(models: Path) -> Iterator[Site]:
    """One endpoint for all tests that only read."""
    with served(models) as found:
        yield found
