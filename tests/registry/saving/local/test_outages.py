"""A store that is out of reach: requests are repeated, and a training may go on past a failure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.backends import Backend, StoreUnavailable
from holdfast.backends.wrappers import Wrapper
from holdfast.registry.errors import Conflict, InvalidInput
from holdfast.registry.face.run import Run
from holdfast.registry.saving.pending import Forgiven
from holdfast.registry.saving.save_request import SaveRequest
from tests.servers.tcp_proxy import TcpProxy
from tests.support.commands import invoke
from tests.support.loads import steps
from tests.support.stores import Open


class Clock:
    """A clock that a pause moves; something happens at a time of it."""

    def __init__(self) -> None:
        self.now_s, self.at_s = 0.0, float("inf")
        self.then: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s
        if self.now_s >= self.at_s:
            self.at_s = float("inf")
            self.then()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("holdfast.backends.patience.time", found)
    return found


@pytest.fixture
def proxied(
    s3_url: Callable[[], str], moto_server: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, TcpProxy]]:
    url = s3_url()
    holdfast.init(url, skip_race_probe=True).close()
    with TcpProxy(moto_server.endpoint_url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield url, proxy


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": np.full(100, step, np.float32)}}


@pytest.mark.parametrize("transport", ["boto3", "obstore", "s3fs"])
def test_a_save_survives_an_outage_of_almost_two_minutes(
    proxied: tuple[str, TcpProxy], clock: Clock, transport: Any
) -> None:
    url, proxy = proxied
    pytest.importorskip(transport)
    with holdfast.open(url, transport=transport) as registry:
        run = registry.run("run", create=True)
        run.save(state(1), step=1)
        proxy.go_away()
        began_s = clock.now_s
        clock.at_s, clock.then = began_s + 90, proxy.come_back
        run.save(state(2), step=2)
        assert clock.now_s - began_s >= 90
        assert run.latest().step == 2


def test_an_address_that_refuses_at_open_is_named_after_20_seconds(
    proxied: tuple[str, TcpProxy], clock: Clock
) -> None:
    url, proxy = proxied
    proxy.go_away()
    with pytest.raises(StoreUnavailable, match=r"endpoint.*network") as caught:
        holdfast.open(url)
    assert proxy.url in str(caught.value)
    assert 19 <= clock.now_s <= 20


# Going on past failed saves


class Breakable(Wrapper):
    """A store that fails writes of slots: before they land, or after."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.fails = ""

    def put_if_absent(self, key: str, body: Any) -> bool:
        if self.fails and "/log/" in key:
            if self.fails == "after":
                super().put_if_absent(key, body)
            raise StoreUnavailable("out of reach", where=key)
        return super().put_if_absent(key, body)


@pytest.fixture
def store(backend: Backend) -> Breakable:
    return Breakable(backend)


@pytest.fixture
def run(store: Breakable, open_registry: Open) -> Run:
    return open_registry(store).create_run("run")


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("fails", ["before", "after"])
def test_a_training_goes_on_past_an_outage(
    run: Run, store: Breakable, background: bool, fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Every entry of a stream comes once, also if the slot of a failed save has landed."""
    with (
        caplog.at_level(logging.WARNING, "holdfast"),
        run.checkpointer(every_steps=1, may_fail=2, background=background) as checkpointer,
    ):
        for step in range(1, 7):
            store.fails = fails if step in (2, 3, 5) else ""
            saved = checkpointer.step(step, state(step), streams={"loss": [{"step": step}]})
            if step in (2, 3, 5):
                with pytest.raises(StoreUnavailable):
                    saved.wait()
                assert saved.outcome == "failed"
            run.wait() if step not in (2, 3, 5) else None
        assert checkpointer.failed_saves == 3
    assert [entry["step"] for entry in run.streams["loss"].read()] == [1, 2, 3, 4, 5, 6]
    assert run.latest().meta["checkpointer"]["failed_saves"] == 3
    assert sum("training continues" in record.getMessage() for record in caplog.records) == 3
    landed = {1, 2, 4, 5, 6} if fails == "after" else {1, 4, 6}
    assert {one.step for one in run.checkpoints()} == landed


@pytest.mark.parametrize("may_fail", [0, 2])
def test_entries_that_a_later_failed_save_took_along_come_once(
    run: Run, store: Breakable, may_fail: int
) -> None:
    def train(step: int, fails: str = "") -> None:
        store.fails = fails
        run.log({"loss": float(step)}, step=step)
        request = SaveRequest.of(
            step, takes_over=True, streams={"seen": [{"step": step}]}, may_fail=may_fail
        )
        with pytest.raises((StoreUnavailable, Forgiven)) if fails else nullcontext():
            run.handle.saver.pipeline.save(state(step), request)

    train(1)
    train(2, "before")
    train(3, "after")
    store.fails = ""
    if not may_fail:
        run.handle.ownership.logged.flush()  # without a save
    train(4)
    assert steps(run) == [1, 3, 4]
    assert [one["step"] for one in run.streams["log"].read()] == [1, 2, 3, 4]
    seen = [1, 2, 3, 4] if may_fail else [1, 3, 4]
    assert [one["step"] for one in run.streams["seen"].read()] == seen


def test_the_last_failure_in_a_row_and_final_saves_are_raised(run: Run, store: Breakable) -> None:
    checkpointer = run.checkpointer(every_steps=1, may_fail=1)
    with pytest.raises(StoreUnavailable), checkpointer:
        for step in range(1, 4):
            store.fails = "before"
            checkpointer.step(step, state(step))
    assert checkpointer.failed_saves == 1
    store.fails = ""
    with run.checkpointer(every_steps=1, may_fail=2) as again:
        store.fails = "before"
        again.step(4, state(4)).settle()
        store.fails = ""
    assert run.latest().step == 4, "the end of the block saves what had failed"
    store.fails = "before"
    with pytest.raises(StoreUnavailable), run.checkpointer(may_fail=2) as last:
        last.step(5, state(5), converged=True)


def test_a_save_in_the_background_goes_on_too_and_other_errors_do_not(
    run: Run, store: Breakable, open_registry: Open
) -> None:
    store.fails = "before"
    failed = run.save_async(state(1), step=1, may_fail=2)
    run.wait()
    store.fails = ""
    run.save_async(state(2), step=2, may_fail=2).wait()
    assert failed.outcome == "failed"
    open_registry(store).run("run").restore()
    other = open_registry(store).run("run")
    other.restore()
    other.save(state(3), step=3)
    run.save_async(state(4), step=4, may_fail=2)
    with pytest.raises(Conflict):
        run.wait()
    for wrong in (-1, True, "warn"):
        with pytest.raises(InvalidInput, match="may_fail"):
            run.save_async(state(5), step=5, may_fail=wrong)
        with pytest.raises(InvalidInput, match="may_fail"):
            run.checkpointer(may_fail=wrong)


def test_failed_saves_are_shown(tmp_path: Any) -> None:
    url = str(tmp_path / "r")
    with holdfast.init(url, skip_race_probe=True) as registry:
        run = registry.run("run", create=True)
        store = registry.handle.store.backend = Breakable(registry.handle.store.backend)
        with run.checkpointer(every_steps=1, may_fail=2) as checkpointer:
            store.fails = "before"
            checkpointer.step(1, state(1)).settle()
            store.fails = ""
            checkpointer.step(2, state(2))
    assert "failed_saves  1" in invoke("run", "show", "run", "-r", url).output
