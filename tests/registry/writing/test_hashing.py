"""Copies on the way to a pack: of what can change alone, in few blocks that always come back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from holdfast import Storing
from holdfast.backends.errors import StoreUnavailable
from holdfast.registry.store import blocks
from holdfast.registry.store.blocks import BLOCK_BYTES, Blocks, Lease
from holdfast.registry.values.digest import Digest
from holdfast.registry.writing import hashing, packing
from tests.support.faults import Hooked
from tests.support.states import same
from tests.support.stores import new_backend, packs_of, small_grid

MOST = 6


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[memoryview]:
    """Return the blocks that are taken."""
    found: list[memoryview] = []
    take = Lease.take
    monkeypatch.setattr(Lease, "take", lambda lease: found.append(take(lease)) or found[-1])
    return found


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make chunks, blocks and packs small, and blocks few."""
    monkeypatch.setattr(blocks, "MOST_BLOCKS", MOST)
    monkeypatch.setattr(Blocks.__init__, "__defaults__", (MOST,))
    monkeypatch.setattr(hashing, "BLOCK_BYTES", 512)
    with small_grid(256, pack_bytes=1024):
        yield


def state(i: int = 0) -> dict:
    rng = np.random.default_rng(i)
    return {
        "m": {str(n): rng.integers(0, 99, 100) for n in range(60)},
        "o": rng.random((64, 30)),
        "s": {str(n): rng.integers(0, 99, 10) for n in range(40)},
    }


# What is copied


def test_only_what_can_change_is_copied(run, taken):
    ours = {"b": bytes(range(250)) * 40, "t": "x" * 70_000, "strided": np.eye(40)[:, 1:3]}
    run.save({"m": ours}, step=1)
    assert taken == []
    assert same(run.latest().load()["m"], {**ours, "strided": ours["strided"].copy()})
    run.save({"m": {**ours, "w": bytearray(5000)}}, step=2)
    assert len(taken) == 1


def test_a_state_that_is_staged_is_not_copied_again(run, taken):
    for step in (1, 2):
        run.save_async(state(step), step=step).wait()
    assert same(run.latest().load(), state(2))
    assert taken == []


def test_what_the_program_writes_while_a_pack_is_sent_is_not_stored(open_registry):
    store = Hooked(new_backend())
    run = open_registry(store).create_run("run")
    changing = {
        "small": torch.arange(256.0),  # copied without a view of it
        "tail": torch.arange(300.0)[40:],
        "array": np.arange(100),
        "larger": torch.arange(3000.0),
    }
    before = {
        name: one.clone() if hasattr(one, "clone") else one.copy() for name, one in changing.items()
    }

    def write(method: str, key: str) -> None:
        if key.startswith("packs/"):
            for one in changing.values():
                one[:] = 7

    store.before = write
    assert same(run.save({"m": changing}, step=1).load()["m"], before)
    assert all((one == 7).all() for one in changing.values())


@pytest.mark.parametrize("size", [0, 1, 2**18 - 1, 2**18, 2**18 + 1, 3 * 2**20 + 77, BLOCK_BYTES])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_copy_has_every_byte(size, is_frozen):
    source = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    source.flags.writeable = not is_frozen
    target = memoryview(bytearray(size))
    assert hashing.copy_and_hash(memoryview(source), target) == Digest.of(source.tobytes())
    assert target == source.tobytes()


# Blocks


def test_a_save_waits_for_blocks_and_never_has_more(few, open_registry):
    store = Hooked(new_backend())
    reg = open_registry(store)
    left: list[int] = []
    store.before = lambda method, key: left.append(reg.handle.store.blocks._left)
    saved = reg.create_run("run").save(state(), step=1)
    assert len(packs_of(saved)) > 10 * MOST
    assert min(left) == 0
    assert same(saved.load(), state())
    assert reg.handle.store.blocks._left == MOST


@pytest.mark.parametrize("how", [{}, {"storing": Storing(compression="zstd")}])
def test_blocks_come_back_whatever_fails(few, open_registry, how):
    store = Hooked(new_backend())
    reg = open_registry(store)
    run = reg.create_run("run")
    for fails_at in (1, 2, 5, 40):
        puts = iter(range(1, 10_000))

        def fail(method: str, key: str, puts=puts, fails_at=fails_at) -> None:
            if key.startswith("packs/") and method == "put_if_absent" and next(puts) == fails_at:
                raise StoreUnavailable("gone")

        store.before = fail
        with pytest.raises(StoreUnavailable):
            run.save(state(fails_at), step=fails_at, **how)
        assert reg.handle.store.blocks._left == MOST
    store.before = lambda method, key: None
    assert same(run.save(state(), step=99, **how).load(), state())


def test_blocks_are_lost_where_the_wait_for_their_threads_is_interrupted(
    few, open_registry, monkeypatch
):
    reg = open_registry(new_backend())
    run = reg.create_run("run", seed=1)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packing, "abandon", interrupted)
        patch.setattr(packing._Writing, "_pack_group", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.save(state(), step=1)
    # A save that waited for the missing ones would never end.
    assert reg.handle.store.blocks._left == MOST
    assert same(run.save(state(1), step=1).load(), state(1))
    assert reg.handle.store.blocks._left == MOST


def test_a_block_that_may_be_in_use_is_not_used_again():
    lease = Blocks().lease()
    lease.reserve(3)
    block = lease.take()
    lease.lose()
    lease.give([block])
    assert not any(block is idle for idle in blocks._idle)
    assert lease._blocks._left == blocks.MOST_BLOCKS


def test_saves_that_share_a_handle_end(few, open_registry):
    reg = open_registry(new_backend())
    runs = [reg.create_run(f"run{n}") for n in range(4)]
    with ThreadPoolExecutor(len(runs)) as threads:
        saves = [threads.submit(run.save, state(n), step=1) for n, run in enumerate(runs)]
        found = [save.result() for save in saves]
    assert all(same(saved.load(), state(n)) for n, saved in enumerate(found))
    assert reg.handle.store.blocks._left == MOST


def test_a_block_that_waits_is_used_again():
    lease = Blocks().lease()
    assert lease.reserve(2)
    first = lease.take()
    lease.give([first])
    assert lease.take() is first
    lease.close()
    lease.give([first])  # told late: it may be another save's by now
    assert lease._blocks._left == blocks.MOST_BLOCKS


def test_who_waits_goes_on_when_blocks_come_back():
    pool = Blocks(2)
    one, other = pool.lease(), pool.lease()
    assert one.reserve(2)
    assert not other.reserve(1)
    waiting = threading.Thread(target=other.reserve, args=(1,), kwargs={"wait": True})
    waiting.start()
    one.give([one.take()])
    waiting.join()
    assert pool._left == 0


def test_a_forked_child_has_all_blocks(monkeypatch):
    pool = Blocks(2)
    assert pool.lease().reserve(2)
    pool._pid -= 1
    assert pool.lease().reserve(2)
