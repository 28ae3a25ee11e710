"""Threads: none waits for its own pool, or for one that may be waiting for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor
from typing import Any

import pytest

from holdfast.registry.errors import InvalidInput
from holdfast.registry.saving.journal.background import _Daemons
from holdfast.registry.store.threads import Pools, Threads, results


@pytest.fixture
def pools():
    made = Pools(1)
    made._sizes = dict.fromkeys(made._sizes, 1)
    yield made
    made.close()


@pytest.mark.parametrize("outer", ["bulk", "small", "hashing"])
@pytest.mark.parametrize("inner", ["bulk", "small", "hashing"])
def test_work_within_work_is_done_however_few_threads_there_are(pools, outer, inner):
    def work(depth: int) -> int:
        if not depth:
            return 1
        futures = [getattr(pools, inner).submit(work, depth - 1) for _ in range(3)]
        return sum(results(futures)) + sum(getattr(pools, inner).map(work, [0, 0]))

    futures = [getattr(pools, outer).submit(work, 2) for _ in range(4)]
    assert [future.result(timeout=300) for future in futures] == [17] * 4


def test_on_a_single_core_the_caller_copies(pools):
    assert pools.copying.submit(threading.current_thread).result() is threading.current_thread()
    pools._sizes["hash"] = 2
    assert pools.copying is pools.hashing


def test_from_outside_work_is_done_by_threads_of_the_pool(pools):
    names = {
        pool: getattr(pools, pool).submit(threading.current_thread).result().name
        for pool in ("bulk", "small")
    }
    assert {pool: name.startswith(f"holdfast-{pool}") for pool, name in names.items()} == {
        "bulk": True,
        "small": True,
    }


def test_bulk_threads_have_help_for_small_work(pools):
    def inside() -> str:
        return pools.small.submit(threading.current_thread).result().name

    assert pools.bulk.submit(inside).result().startswith("holdfast-small")


def test_an_error_in_work_that_is_done_here_is_the_futures(pools):
    def outer() -> object:
        return pools.small.submit(lambda: 1 / 0).exception()

    assert isinstance(pools.small.submit(outer).result(), ZeroDivisionError)


def test_a_pool_that_another_thread_closes_says_so() -> None:
    pool, gate = Threads(1), threading.Event()
    waiting = [pool.submit(gate.wait), pool.submit(gate.wait)]
    closer = threading.Thread(target=pool.shutdown, kwargs={"cancel_futures": True})
    closer.start()
    with pytest.raises(CancelledError):
        waiting[1].result(timeout=300)
    gate.set()
    closer.join()
    with pytest.raises(InvalidInput, match="closed while another thread used it"):
        results(waiting)
    with pytest.raises(InvalidInput, match="closed while another thread used it"):
        pool.submit(gate.wait)


def test_the_end_of_a_program_does_not_wait_for_threads_that_carry():
    pool = _Daemons(1)
    assert pool.submit(threading.current_thread).result(timeout=300).daemon
    pool.shutdown()


@pytest.mark.parametrize("make", [Threads, _Daemons])
def test_work_is_done_once_where_the_system_gives_no_threads(
    make: Callable[[int], Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    given = [0]
    start = threading.Thread.start

    def start_some(thread: threading.Thread) -> None:
        if not given[0]:
            raise RuntimeError("can't start new thread")
        given[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    pool = make(3)
    pool.submit(done.append, "here").result(timeout=300)
    assert isinstance(pool.submit(lambda: 1 / 0).exception(timeout=300), ZeroDivisionError)
    given[0] = 1
    gate = threading.Event()
    held = pool.submit(gate.wait)
    gate.set()
    futures = [held, *(pool.submit(done.append, number) for number in range(20))]
    results(futures)
    pool.submit(done.append, "last").result(timeout=300)  # behind everything that was queued
    pool.shutdown()
    assert sorted(map(str, done)) == sorted(map(str, ["here", *range(20), "last"]))


def test_a_close_may_meet_a_thread_that_starts_a_pool(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Threads.shutdown

    def shutdown(pool: Threads, *how: bool, **named: bool) -> None:
        _ = pools.small  # as a load in another thread does
        real(pool, *how, **named)

    assert pools.bulk.submit(int).result() == 0
    monkeypatch.setattr(Threads, "shutdown", shutdown)
    pools.close()
    monkeypatch.undo()
    pools.close()


def test_a_forked_child_closes_pools_whose_locks_were_held(pools: Pools) -> None:
    pool: Any = pools.bulk
    with pool._shutdown_lock:  # as by a thread of the parent that gives it work
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(5)
            pools.close()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_folder_gets_no_thread_for_a_core_that_the_process_may_not_use() -> None:
    code = """if True:
        import os
        os.cpu_count, os.sched_getaffinity = lambda: 64, lambda _: range(2)
        from holdfast.backends.local.backend import LocalBackend
        from holdfast.registry.store.threads import Pools
        print(Pools(LocalBackend.concurrency)._sizes["bulk"])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "4\n"
