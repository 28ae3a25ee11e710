"""Workers: bounded units and bytes, results in order, and what may leave the process."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from concurrent.futures._base import DoneAndNotDoneFutures
from threading import Event
from typing import Any

import fsspec
import pytest

import holdfast
from holdfast.registry import errors
from holdfast.registry.errors import InvalidInput, NotFound, WorkersFailed
from holdfast.registry.store import workers as module
from holdfast.registry.store.address import Address
from holdfast.registry.store.store import Store
from holdfast.registry.store.workers import WorkerAddress, Workers
from tests.support.executors import Crossing
from tests.support.stores import new_backend


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def completed(pool: Executor, work: Callable[[Any], Any], units: Any, **options: Any) -> list[Any]:
    """Return units with their results, in the order in which they are taken."""
    done: list[Any] = []
    Workers(pool).each(
        work, units, lambda unit, outcome: done.append((unit, outcome.result())), **options
    )
    return done


class ByHand(ThreadPoolExecutor):
    """Does nothing before it is waited for; notes how much was given to it at once."""

    def __init__(self) -> None:
        self.given: dict[Future, tuple] = {}
        self.most = self.done = 0

    def submit(self, fn, /, *args, **kwargs) -> Future:
        future: Future = Future()
        self.given[future] = (fn, args)
        sizes = (batch[0][1] for _, (_, _, batch) in self.given.values())
        self.most = max(self.most, sum(sizes))
        return future

    def wait(self, futures, return_when: str):
        future = next(iter(self.given))
        fn, args = self.given.pop(future)
        future.set_result(fn(*args))
        self.done += 1
        return DoneAndNotDoneFutures({future}, {*futures} - {future})


def test_everything_is_done_once_and_taken_in_order(pool: ThreadPoolExecutor) -> None:
    assert completed(pool, str, range(100)) == [(n, str(n)) for n in range(100)]


def test_bytes_in_flight_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BYTES_IN_FLIGHT", 100)
    for sizes, most in (
        ([40, 40, 40, 90, 5, 5, 60, 60] * 5, 100),
        ([5, 300, 5], 300),  # what is larger than the bound goes alone
    ):
        by_hand = ByHand()
        monkeypatch.setattr(module, "wait", by_hand.wait)
        completed(by_hand, abs, sizes, size_of=lambda size: size)
        assert by_hand.done == len(sizes)
        assert by_hand.most == most


@pytest.mark.parametrize("held", [module._HELD, 40])
def test_units_are_asked_for_no_further_ahead_than_the_window(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    """Not even if the first unit holds the results of all others back."""
    monkeypatch.setattr(module, "_HELD", held)
    asked: list[int] = []
    full = Event()

    def units() -> Iterator[int]:
        for number in range(3000):
            asked.append(number)
            if number == held:
                full.set()
            yield number

    def work(number: int) -> int:
        if number == 0:
            assert full.wait(300)
        return number

    ahead: list[int] = []
    Workers(pool).each(work, units(), lambda unit, _: ahead.append(len(asked) - unit))
    assert len(asked) == 3000
    assert max(ahead) <= held + 2


def test_nobody_waits_for_the_slowest(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first unit ends when the last has begun: batches would hang."""
    monkeypatch.setattr(module, "_AT_ONCE", 2)
    last = Event()

    def work(number: int) -> int:
        if number == 0:
            assert last.wait(300)
        if number == 9:
            last.set()
        return number

    assert completed(pool, work, range(10)) == [(n, n) for n in range(10)]


@pytest.fixture
def store(tmp_path) -> Store:
    return holdfast.init(tmp_path / "any").handle.store


def refuse_two(_: Store, number: int) -> int:
    if number == 2:
        raise NotFound("no such number", where=number)
    return number


def invert(_: Store, number: int) -> float:
    return 1 / number


@pytest.mark.parametrize("pool", [ThreadPoolExecutor(2), Crossing()], ids=["threads", "elsewhere"])
def test_an_error_of_ours_is_that_units_alone(pool: Executor, store: Store) -> None:
    errors_of: list[Any] = []
    workers = Workers(pool, store)
    workers.each(refuse_two, range(5), lambda _, outcome: errors_of.append(outcome.error))
    assert [type(error) for error in errors_of] == [*[type(None)] * 2, NotFound, *[type(None)] * 2]
    with pytest.raises(NotFound, match="2: no such number"):
        workers.all(refuse_two, range(5))
    with pytest.raises(ZeroDivisionError):
        workers.all(invert, [1, 0])


def test_after_an_error_what_is_under_way_is_waited_for_and_no_more_begins(
    pool: ThreadPoolExecutor,
) -> None:
    under_way, ended = Event(), []

    def work(number: int) -> None:
        if number == 1:
            under_way.set()
        ended.append(number)

    def take(number: int, _: object) -> None:
        assert under_way.wait(300)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Workers(pool).each(work, range(1000), take)
    assert len(ended) < 100
    seen = len(ended)
    pool.submit(int).result()
    assert len(ended) == seen


class Queued(Crossing):
    """Does the first call at once, and leaves the others in the queue."""

    def __init__(self) -> None:
        super().__init__()
        self.queued: list[Future] = []

    def submit(self, fn, /, *args, **kwargs) -> Future:
        if not self.calls:
            return super().submit(fn, *args, **kwargs)
        self.queued.append(Future())
        return self.queued[-1]


def test_ctrl_c_cancels_what_the_executor_has_not_begun(store: Store) -> None:
    queued = Queued()

    def take(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Workers(queued, store).each(invert, range(1, 5000), take)
    assert len(queued.queued) > 10
    assert all(future.cancelled() for future in queued.queued)


class Lost(Exception):
    """An error as those of Dask are."""

    __module__ = "distributed.scheduler"


@pytest.mark.parametrize("error", [Lost("killed"), CancelledError(), ImportError("no holdfast")])
def test_what_an_executor_loses_is_an_error_of_ours(error: Exception) -> None:
    class Losing(Executor):
        def submit(self, fn, /, *args, **kwargs) -> Future:
            future: Future = Future()
            future.set_exception(error)
            return future

    with pytest.raises(WorkersFailed, match=type(error).__name__):
        Workers(Losing()).all(str, range(3))


def leaves(root: type[errors.RegistryError]) -> Iterator[type[errors.RegistryError]]:
    yield root
    for kind in root.__subclasses__():
        yield from leaves(kind)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_crosses_processes_whole(name: str) -> None:
    kind = getattr(errors, name)
    error = kind("what is wrong", where="x", expected=1, found=2, hint="Do this.")
    if name == "RankFailed":
        error.rank = 3
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert vars(again) == vars(error)
    assert (str(again), again.summary, again.args) == (str(error), error.summary, error.args)
    assert {one.__name__ for one in leaves(errors.RegistryError)} >= {name}


# What may leave the process


def test_a_store_of_this_process_is_refused_before_anything_begins(tmp_path, open_registry) -> None:
    executor = Crossing()
    folder = holdfast.init(tmp_path / "folder")
    memory = holdfast.init("memory://workers-refuse")
    kind = fsspec.filesystem("file")
    on_fs = holdfast.init(str(tmp_path / "fs"), fs=kind)
    for registry in (memory, on_fs, open_registry(new_backend())):
        for call in (
            lambda one=registry: one.verify(deep=True, executor=executor),
            lambda one=registry: one.repack(executor=executor),
            lambda one=registry: one.usage(executor=executor),
            lambda one=registry: holdfast.sync(one, folder, executor=executor),
            lambda one=registry: holdfast.sync(folder, one, executor=executor),
        ):
            with pytest.raises(InvalidInput, match="workers in other processes"):
                call()
    with pytest.raises(InvalidInput, match=r"not an executor.*get_executor"):
        folder.verify(executor="tcp://127.0.0.1:8786")  # type: ignore[arg-type]
    assert not executor.calls
    with ThreadPoolExecutor(2) as threads:  # these are in this process
        assert memory.verify(deep=True, executor=threads).ok


def addressed(
    store: Store, options: dict[str, Any], url: str = "s3://bucket/team"
) -> WorkerAddress:
    """Return the address for workers of a registry with these options."""
    store.address = Address(url, options)
    return WorkerAddress.of(store, read_only=True)


def test_secrets_do_not_travel(store, monkeypatch) -> None:
    """A worker takes them from the variable in which its caller has them."""
    options = {
        "endpoint_url": "http://127.0.0.1:1",
        "secret": "hush-hush",
        "token": None,
        "client_kwargs": {"region_name": "eu", "aws_session_token": "shh-token"},
    }
    with pytest.raises(InvalidInput, match=r"secret: a storage option may be a secret"):
        addressed(store, options)
    monkeypatch.setenv("HOLDFAST_DST_STORAGE_OPTIONS", json.dumps(options))
    address = addressed(store, options)
    sent = pickle.dumps(address)
    assert b"127.0.0.1" in sent
    assert b"hush" not in sent
    assert b"shh" not in sent
    again = pickle.loads(sent)
    assert again._all_options() == options
    monkeypatch.delenv("HOLDFAST_DST_STORAGE_OPTIONS")
    with pytest.raises(InvalidInput, match=r"a worker lacks a secret option.*expected secret"):
        again.opened()


@pytest.mark.parametrize(
    ("url", "options", "match"),
    [
        ("s3://bucket/team", {"session": object()}, "session: a storage option cannot be sent"),
        ("webhdfs://host/x?token=abcdefgh", {}, "the URL may hold a secret"),
    ],
)
def test_what_cannot_travel_is_named(store, url, options, match) -> None:
    with pytest.raises(InvalidInput, match=match):
        addressed(store, options, url)


def test_a_worker_refuses_another_registry(tmp_path) -> None:
    """As on a machine that has a folder of the same name."""
    first = holdfast.init(tmp_path / "one")
    first.create_run("run")
    first.handle.store.config = first.handle.store.config.changed(id="0" * 32)
    with pytest.raises(errors.Conflict, match="another registry"):
        first.verify(deep=True, executor=Crossing())
