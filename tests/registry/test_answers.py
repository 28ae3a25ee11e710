"""What becomes of a registry when something between it and its bucket answers instead.

Each test lies to one kind of request of a registry that works, and then asks an honest store what
is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import Registry
from holdfast.backends.patience import Patience
from holdfast.registry.errors import StoreUnavailable
from holdfast.registry.history import slots
from tests.servers.gateway import PAGE, Answer, Gateway, Lie, Request

LIES: dict[str, Lie] = {
    "page": lambda request, ask: Answer(200, {"Content-Type": "text/html"}, PAGE),
    "nothing": lambda request, ask: Answer(404),
}


@pytest.fixture
def held(
    moto_url: Callable[[], str], gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Registry]:
    url = moto_url()
    monkeypatch.setenv("AWS_ENDPOINT_URL", gateway.url)
    impatient = Patience(attempts=2, first_s=0)
    monkeypatch.setattr("holdfast.backends.s3.backend.patience_of_environment", lambda: impatient)
    with holdfast.init(url, skip_race_probe=True) as held:
        yield held


def state(number: int) -> dict[str, object]:
    return {"w": np.full(2000, number, np.float32), "step": number}


def of(operation: str, part: str = "") -> Callable[[Request], bool]:
    return lambda request: request.operation == operation and part in request.path


def keys(held: Registry) -> list[str]:
    return [info.key for info in held.handle.store.backend.list()]


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("part", ["/packs/", "/manifests/", "/placements/", "/log/"])
def test_save_is_not_acknowledged(
    held: Registry, gateway: Gateway, lie: Lie, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "_LONGEST_PAUSE_S", 0.0)
    run = held.create_run("r", seed=1)
    first = run.save(state(1), step=1)
    gateway.lie(of("put", part), lie)
    with pytest.raises(StoreUnavailable, match="something between"):
        run.save(state(2), step=2)
    gateway.be_honest()
    with holdfast.open(held.url) as again:
        assert [c.digest for c in again.run("r").checkpoints()] == [first.digest]
        assert again.verify(deep=True).ok


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_listing_of_nothing_is_not_believed(
    held: Registry, gateway: Gateway, tmp_path: Path, lie: Lie
) -> None:
    saved = held.create_run("r", seed=1).save(state(1), step=1)
    with holdfast.init(tmp_path / "copy") as copy:
        gateway.lie(of("list"), lie)
        for call in (
            held.run_names,
            lambda: holdfast.sync(held, copy),
            lambda: held.run("r").restore(),
            held.gc,
            held.verify,
        ):
            with pytest.raises(StoreUnavailable, match="something between"):
                call()
        assert copy.run_names() == []
        gateway.be_honest()
        holdfast.sync(held, copy)
        assert [c.digest for c in copy.run("r").checkpoints()] == [saved.digest]


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("part", ["prefix=some%2Fprefix%2Fruns", "packs", "epochs", "placements"])
def test_collection_deletes_nothing(held: Registry, gateway: Gateway, lie: Lie, part: str) -> None:
    run = held.create_run("r", seed=1, retention=holdfast.Retention(last=1))
    for number in range(3):
        saved = run.save(state(number), step=number)
    before = keys(held)
    gateway.lie(of("list", part), lie)
    with pytest.raises(StoreUnavailable, match="something between"):
        held.gc(grace_s=0)
    gateway.be_honest()
    assert [key for key in keys(held) if not key.startswith(".probe/")] == before
    assert held.gc(grace_s=0).deleted
    np.testing.assert_array_equal(saved.load()["w"], state(2)["w"])


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("part", ["/packs/", "/manifests/", "/placements/", "/log/"])
def test_restore_does_not_fall_back(held: Registry, gateway: Gateway, lie: Lie, part: str) -> None:
    run = held.create_run("r", seed=1)
    for number in (1, 2):
        saved = run.save(state(number), step=number)
    gateway.lie(of("get", part), lie)
    with holdfast.open(held.url) as again:
        with pytest.raises(StoreUnavailable, match="something between"):
            again.run("r").restore()
        gateway.be_honest()
        restored = again.run("r").restore()
    assert restored is not None
    assert restored.checkpoint.digest == saved.digest


def test_absence_of_the_newest_pack_supersedes_nothing(held: Registry, gateway: Gateway) -> None:
    run = held.create_run("r", seed=1)
    digests = [run.save(state(number), step=number).digest for number in (1, 2)]
    with holdfast.open(held.url) as again:
        resumed = again.run("r")
        gateway.lie(of("get", "/packs/"), LIES["nothing"])
        with pytest.raises(StoreUnavailable):
            resumed.restore()
        gateway.be_honest()
        assert [c.digest for c in again.run("r").checkpoints()] == digests
