"""The window: a bounded number of items and bytes, the next one as soon as there is room."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures._base import DoneAndNotDoneFutures
from threading import Event

import pytest

from holdfast.registry.maintenance import window
from holdfast.registry.maintenance.window import each


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def completed(pool, work, items, **options) -> list:
    """Return items with what came of them, in the order in which they are done."""
    done: list = []
    each(pool, work, items, lambda item, future: done.append((item, future)), **options)
    return done


class ByHand(Executor):
    """Does nothing before it is waited for; notes how much was given to it at once."""

    def __init__(self) -> None:
        self.given: dict[Future, tuple] = {}
        self.most = self.done = 0

    def submit(self, fn, /, *args, **kwargs) -> Future:
        future: Future = Future()
        self.given[future] = (fn, args)
        self.most = max(self.most, sum(size for _, (size,) in self.given.values()))
        return future

    def wait(self, futures, return_when: str):
        future = next(iter(self.given))
        fn, args = self.given.pop(future)
        future.set_result(fn(*args))
        self.done += 1
        return DoneAndNotDoneFutures({future}, {*futures} - {future})


def test_everything_is_done_once(pool: ThreadPoolExecutor) -> None:
    done = [(item, future.result()) for item, future in completed(pool, str, range(100))]
    assert sorted(done) == [(n, str(n)) for n in range(100)]


def test_bytes_in_flight_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "BYTES_IN_FLIGHT", 100)
    for sizes, most in (
        ([40, 40, 40, 90, 5, 5, 60, 60] * 5, 100),
        ([5, 300, 5], 300),  # what is larger than the bound goes alone
    ):
        by_hand = ByHand()
        monkeypatch.setattr(window, "wait", by_hand.wait)
        completed(by_hand, abs, sizes, size_of=lambda size: size)
        assert by_hand.done == len(sizes)
        assert by_hand.most == most


def test_items_are_asked_for_no_further_ahead_than_the_window(pool: ThreadPoolExecutor) -> None:
    asked: list[int] = []

    def items() -> Iterator[int]:
        for number in range(1000):
            asked.append(number)
            yield number

    most: list[int] = []
    each(pool, str, items(), lambda item, future: most.append(len(asked) - len(most)))
    assert len(asked) == 1000
    assert max(most) < 100


def test_nobody_waits_for_the_slowest(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first item ends when the last has begun: batches, or results in order, would hang."""
    monkeypatch.setattr(window, "_AT_ONCE", 2)
    last = Event()

    def work(number: int) -> int:
        if number == 0:
            assert last.wait(60)
        if number == 9:
            last.set()
        return number

    done = [item for item, future in completed(pool, work, range(10)) if future.result() >= 0]
    assert sorted(done) == list(range(10))
    assert done[0] != 0


def test_an_error_is_that_items_alone(pool: ThreadPoolExecutor) -> None:
    done = dict(completed(pool, lambda n: 1 // n, [2, 0, 1]))
    assert isinstance(done[0].exception(), ZeroDivisionError)
    assert [done[n].result() for n in (1, 2)] == [1, 0]


def test_after_an_error_what_is_under_way_is_waited_for_and_no_more_begins(
    pool: ThreadPoolExecutor,
) -> None:
    under_way, ended = Event(), []

    def work(number: int) -> None:
        if number == 1:
            under_way.set()
        ended.append(number)

    def take(number: int, _: object) -> None:
        assert under_way.wait(60)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        each(pool, work, range(1000), take)
    assert len(ended) < 100
    seen = len(ended)
    pool.submit(int).result()
    assert len(ended) == seen
