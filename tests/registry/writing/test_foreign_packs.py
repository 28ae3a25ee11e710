"""Packs that another writer has put: one that holds other bytes than its name says is no trap."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import Storing
from holdfast.backends import Backend
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.wrappers import Metered, Wrapper
from holdfast.registry.errors import Damaged
from holdfast.registry.face.registry import Registry
from holdfast.registry.face.run import Run
from holdfast.registry.store import verified_packs
from tests.support.sameness import assert_same
from tests.support.stores import Open, contents, new_backend, packs, packs_of, small_grid

STATE = {"model": {"w": np.arange(4000, dtype=np.float32), "b": np.ones(300, np.float64)}}


@pytest.fixture(autouse=True)
def chunks_are_small():
    with small_grid(256, list_threshold=64, pack_bytes=4096):
        yield


def packs_that_a_save_puts(state: object, **options: Any) -> dict[str, bytes]:
    """Return the packs of a state, as anybody can make them who knows its content."""
    elsewhere = new_backend()
    with holdfast.registry.face.factory.open_on(elsewhere) as registry:
        registry.create_run("run").save(state, step=1, **options)
    return {key: data for key, data in contents(elsewhere).items() if key.startswith("packs/")}


def other(data: bytes) -> bytes:
    """Return other bytes of the same length: one bit of the first chunk differs."""
    return bytes([data[0] ^ 1]) + data[1:]


def poison(backend: Backend, state: object = STATE, **options: Any) -> set[str]:
    made = packs_that_a_save_puts(state, **options)
    for key, data in made.items():
        backend.put(key, other(data))
    return set(made)


def save(run: Run, **options: Any) -> object:
    return run.save(STATE, step=1, **options)


def save_async(run: Run, **options: Any) -> object:
    return run.save_async(STATE, step=1, **options).wait()


@pytest.mark.parametrize(
    "options",
    [{}, {"storing": Storing(compression="zstd")}, {"storing": Storing(keyframe_every=4)}],
)
@pytest.mark.parametrize("act", [save, save_async])
def test_a_poisoned_pack_is_told_and_replaced(
    act: Callable[..., Any],
    options: dict[str, Any],
    run: Run,
    backend: MemoryBackend,
    open_registry: Open,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys = poison(backend, **options)
    with caplog.at_level(logging.WARNING, "holdfast"):
        checkpoint = act(run, **options)
    assert {*packs_of(checkpoint)} == keys, "the store's names are those that were poisoned"
    assert_same(open_registry(backend).checkpoint("run").load(), STATE)
    assert open_registry(backend).verify(deep=True).findings == ()
    for key in keys:
        assert any(key in record.getMessage() for record in caplog.records)


class Overtaken(Wrapper):
    """A store in which somebody else puts each pack just before this writer does."""

    def put_if_absent(self, key: str, body: Any) -> bool:
        if key.startswith("packs/"):
            data = b"".join(bytes(part) for part in ([body] if isinstance(body, bytes) else body))
            self.inner.put_if_absent(key, other(data))
        return super().put_if_absent(key, body)


def test_a_pack_that_is_poisoned_at_the_last_moment_is_replaced(
    backend: MemoryBackend, open_registry: Open
) -> None:
    open_registry(Overtaken(backend)).create_run("run").save(STATE, step=1)
    assert_same(open_registry(backend).checkpoint("run").load(), STATE)


def test_a_foreign_pack_is_read_once_by_all_runs_of_a_machine(tmp_path: Any) -> None:
    """Also by later handles, and not at all if this machine has put it."""
    url = str(tmp_path / "r")
    holdfast.init(url, skip_race_probe=True).close()
    made = packs_that_a_save_puts(STATE)
    with holdfast.open(url) as registry:
        for key, data in made.items():
            registry.handle.store.backend.put(key, data)
    read = []
    for name in ("one", "two", "three"):
        with holdfast.open(url) as registry:
            calls: list[Any] = []
            registry.handle.store.backend = Metered(registry.handle.store.backend, calls)
            registry.create_run(name).save(STATE, step=1)
            registry.create_run(f"{name}-more").save(STATE, step=1)
            read.append(len(packs_read(calls)))
    assert read[0] > 0
    assert read[1:] == [0, 0]


def packs_read(calls: list[Any]) -> list[str]:
    return [one.key for one in calls if one.method == "get" and one.key.startswith("packs/")]


def test_a_fork_relies_on_what_its_parent_has_only_after_reading(
    reg: Registry, backend: MemoryBackend, open_registry: Open
) -> None:
    """A run of an attacker looks like one of public weights; the fork's owner has them too."""
    reg.create_run("public").save(STATE, step=1)
    for key in packs(backend):
        backend.put(key, other(backend.get(key)))
    mine = open_registry(backend)
    fork = mine.fork("public/latest", "fork")
    changed = {**STATE, "head": np.zeros(100)}
    fork.save(changed, step=2)
    assert_same(open_registry(backend).checkpoint("fork").load(), changed)


def test_a_restored_fork_reads_no_pack_twice(
    reg: Registry, backend: MemoryBackend, open_registry: Open
) -> None:
    reg.create_run("public").save(STATE, step=1)
    calls: list[Any] = []
    fork = open_registry(Metered(backend, calls)).fork("public/latest", "fork")
    assert not packs_read(calls), "a fork reads no weights"
    fork.restore()
    calls.clear()
    fork.save({**STATE, "head": np.zeros(100)}, step=2)
    assert not packs_read(calls)
    # What the fork itself has saved was verified by its author.
    other_machine = open_registry(Metered(backend, calls)).run("fork")
    other_machine.exchange.push({**STATE, "head": np.ones(100)}, step=3)
    assert not packs_read(calls)


def test_a_poisoned_mirror_is_mended_by_sync(
    reg: Registry, backend: MemoryBackend, open_registry: Open
) -> None:
    reg.create_run("run").save(STATE, step=1)
    mirror = new_backend()
    keys = poison(mirror)
    holdfast.sync(reg, open_registry(mirror))
    assert keys == packs(mirror)
    assert open_registry(mirror).verify(deep=True).findings == ()


def test_the_memory_of_packs_is_bounded_private_and_may_be_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified_packs, "MAX_NAMES", 3)
    url = str(tmp_path / "r")
    with holdfast.init(url, skip_race_probe=True) as registry:
        registry.create_run("one").save(STATE, step=1)
    (kept,) = Path(os.environ["XDG_STATE_HOME"]).rglob("*.packs")
    assert (kept.stat().st_size, kept.stat().st_mode & 0o777) == (3 * 16, 0o600)
    kept.write_bytes(b"no names at all")
    with holdfast.open(url) as registry:
        registry.create_run("two").save(STATE, step=1)
    assert kept.stat().st_size == 3 * 16
    holdfast.trust(url)
    assert not kept.exists()


def merged(reg: Registry, fork: Run) -> object:
    return reg.run("soup", create=True).exchange.merge([reg.checkpoint("public")], step=1)


def released(reg: Registry, fork: Run) -> object:
    return fork.releases.publish("1.0.0", fork.latest())


def released_in_part(reg: Registry, fork: Run) -> object:
    return fork.releases.publish("1.0.0", fork.latest(), only=["model"])


def brought_back(reg: Registry, fork: Run) -> object:
    inherited = fork.latest()
    fork.save({"other": np.zeros(1000)}, step=2)
    fork.retention.evict(inherited, reason="no longer wanted")
    return fork.retention.undo(*fork.retention.evicted())


@pytest.mark.parametrize("act", [merged, released, released_in_part, brought_back])
def test_what_names_packs_of_others_without_writing_them_reads_them_once(
    act: Callable[[Registry, Run], object],
    reg: Registry,
    backend: MemoryBackend,
    open_registry: Open,
) -> None:
    reg.create_run("public").save(STATE, step=1)
    reg.fork("public/latest", "bad")
    reg.fork("public/latest", "good")
    sound = {key: backend.get(key) for key in packs(backend)}
    for key in sound:
        backend.put(key, other(sound[key]))
    mine = open_registry(backend)
    with pytest.raises(Damaged):
        act(mine, mine.run("bad"))
    for key, data in sound.items():
        backend.put(key, data)
    calls: list[Any] = []
    mine = open_registry(Metered(backend, calls))
    act(mine, mine.run("good"))
    assert {packs_read(calls).count(key) for key in sound} == {1}
