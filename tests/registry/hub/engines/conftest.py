"""A run that trains, fake engines in this process, and followers that are closed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.backends import Backend
from holdfast.backends.wrappers import ReadOnly
from holdfast.engines import EngineFollower
from holdfast.registry.face import Run, open_on
from holdfast.registry.hub.engines import following
from tests.registry.hub.engines.fakes import KINDS, Engine, tensors_hash
from tests.support.stores import new_backend

SHARD_BYTES = 3000  # two tensors in each of two files

Start = Callable[..., Engine]
Follow = Callable[..., EngineFollower]


def weights(step: int) -> dict[str, Any]:
    """Return the weights of a step; one of the tensors never changes."""
    rng = np.random.default_rng(step)
    found = {f"l{i}.weight": rng.random((10, 30), np.float32) for i in range(3)}
    return {**found, "fixed.weight": np.arange(300, dtype=np.float32).reshape(10, 30)}


def hash_at(step: int) -> str:
    return tensors_hash({name: one.tobytes() for name, one in weights(step).items()})


def train(run: Run, *steps: int, **given: Any) -> None:
    for step in steps:
        run.save({"model": weights(step), "step": step}, step=step, **given)


def until(condition: Callable[[], object]) -> None:
    """Wait for other threads and processes."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it does not come")


@pytest.fixture
def backend() -> Backend:
    return new_backend()


@pytest.fixture
def run(backend: Backend) -> Iterator[Run]:
    """The run, as its trainer has it."""
    with open_on(backend) as reg:
        yield reg.create_run("llm", monitor=holdfast.Monitor(metric="loss", mode="min"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a fake engine."""
    with ExitStack() as stack:

        def made(kind: str | type[Engine], port: int = 0) -> Engine:
            name = kind if isinstance(kind, str) else kind.__name__
            engine: Engine = (KINDS[kind] if isinstance(kind, str) else kind)(port, tmp_path / name)
            engine.log.touch()
            thread = threading.Thread(target=engine.serve_forever, args=(0.01,), daemon=True)
            thread.start()
            stack.callback(stop, engine)
            return engine

        yield made


def stop(engine: Engine) -> None:
    """End an engine: nobody listens at its port any more."""
    engine.shutdown()
    engine.server_close()


@pytest.fixture
def follow(backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Follow]:
    """Makes a follower that may only read, and closes it."""
    monkeypatch.setattr(following, "_BACKOFF_S", 0.01)
    monkeypatch.setattr(following, "_ASK_S", 0.02)
    with ExitStack() as stack:

        def made(engines: list[Engine], *, on: Backend | None = None, **given: Any) -> Any:
            reg = stack.enter_context(open_on(on or ReadOnly(backend)))
            urls = [one.url for one in engines]
            usual = {"notify": "sglang", "shard_bytes": SHARD_BYTES, "poll_s": 0.01, "urls": urls}
            given = {**usual, **given}
            into = given.pop("into", tmp_path / "models")
            return stack.enter_context(EngineFollower(reg.run("llm"), into, **given))

        yield made
