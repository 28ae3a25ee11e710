from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

from holdfast.backends import (
    Backend,
    ByteRange,
    ObjectInfo,
    ObjectNotFound,
    ObjectTruncated,
    ReadOnlyStore,
    StorageError,
    StoreFull,
    StoreUnavailable,
)
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.testing import keys_of, together
from holdfast.backends.wrappers import (
    Cached,
    Call,
    Fault,
    Faulty,
    InjectedCrash,
    Metered,
    ReadOnly,
    Retrying,
    Wrapper,
)
from holdfast.backends.wrappers.retrying import Patience


@pytest.fixture
def memory() -> MemoryBackend:
    return MemoryBackend()


class Versioned(MemoryBackend):
    """A store whose answers to a collector are not the defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.cleared_s: list[float] = []
        self.kept: list[str] = []
        self.made_durable: list[str] = []

    def make_durable(self, keys: Iterable[str]) -> None:
        self.made_durable += keys

    def keeps_versions(self) -> bool | None:
        return None

    def clear_unfinished(self, older_than_s: float) -> int:
        self.cleared_s.append(older_than_s)
        return 7

    def links(self, prefix: str = "", *, delimiter: bool = False) -> Iterator[str]:
        yield f"{prefix}{delimiter}"

    def free_bytes(self) -> int | None:
        return 5

    def keep_reserve(self, below: str) -> None:
        self.kept.append(below)

    def give_up_reserve(self, most: int | None = None) -> int:
        return most or 9


@pytest.mark.parametrize(
    "wrap", [Wrapper, Retrying, Metered, Faulty, lambda inner: Cached(inner, ["a"])]
)
def test_what_a_collector_asks_comes_from_the_store(wrap: Callable[[Backend], Backend]) -> None:
    store = Versioned()
    backend = wrap(store)
    assert backend.keeps_versions() is None
    assert backend.clear_unfinished(60.5) == 7
    assert store.cleared_s == [60.5]
    assert ReadOnly(store).keeps_versions() is None


@pytest.mark.parametrize(
    "wrap", [Wrapper, Retrying, Metered, Faulty, lambda inner: Cached(inner, ["a"])]
)
def test_links_and_space_are_those_of_the_store(wrap: Callable[[Backend], Backend]) -> None:
    store = Versioned()
    backend = wrap(store)
    assert [*backend.links("a/", delimiter=True)] == ["a/True"]
    assert backend.free_bytes() == 5
    backend.keep_reserve("a/")
    assert store.kept == ["a/"]
    assert (backend.give_up_reserve(3), backend.give_up_reserve()) == (3, 9)


def test_read_only_handle_leaves_the_reserve_alone() -> None:
    store = Versioned()
    ReadOnly(store).keep_reserve("a/")
    assert store.kept == []
    with pytest.raises(ReadOnlyStore):
        ReadOnly(store).give_up_reserve()


def test_dead_process_touches_no_reserve() -> None:
    store = Versioned()
    dead = Faulty(store, [Fault(1)])
    with pytest.raises(InjectedCrash):
        dead.put("a", b"x")
    for act in (lambda: dead.keep_reserve("a/"), dead.give_up_reserve):
        with pytest.raises(InjectedCrash):
            act()
    assert store.kept == []


@pytest.mark.parametrize(
    "wrap", [Wrapper, Retrying, Metered, Faulty, ReadOnly, lambda inner: Cached(inner, ["a"])]
)
def test_what_is_made_durable_is_so_in_the_store(wrap: Callable[[Backend], Backend]) -> None:
    store = Versioned()
    wrap(store).make_durable(iter(["a", "b/c"]))
    assert store.made_durable == ["a", "b/c"]


def test_what_is_made_durable_is_so_at_the_next_attempt_too(memory: MemoryBackend) -> None:
    tried: list[list[str]] = []

    class Flaky(Wrapper):
        def make_durable(self, keys: Iterable[str]) -> None:
            tried.append(list(keys))
            if len(tried) == 1:
                raise StoreUnavailable("no answer")

    Retrying(Flaky(memory), sleep=lambda _s: None).make_durable(iter(["a", "b"]))
    assert tried == [["a", "b"], ["a", "b"]]


@pytest.mark.parametrize("wrap", [Wrapper, Retrying, Metered, Faulty, ReadOnly])
def test_how_the_store_is_best_read_is_passed_on(wrap: Callable[[Backend], Backend]) -> None:
    store = Versioned()
    store.concurrency, store.least_read_bytes = 3, 5
    backend = wrap(store)
    assert (backend.concurrency, backend.least_read_bytes) == (3, 5)


@pytest.mark.parametrize("after", [False, True])
def test_crash_while_clearing(after: bool) -> None:
    store = Versioned()
    with pytest.raises(InjectedCrash):
        Faulty(store, [Fault(1, after=after)]).clear_unfinished(1.0)
    assert store.cleared_s == ([1.0] if after else [])


# Retrying


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []

    def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.now_s += pause_s

    def __call__(self) -> float:
        return self.now_s


def flaky(memory: MemoryBackend, failures: int, *, after: bool = False) -> Faulty:
    down = StoreUnavailable("down")
    faults = [Fault(at, after=after, error=down) for at in range(1, failures + 1)]
    return Faulty(memory, faults, count_reads=True)


def retrying(inner: Wrapper, clock: Clock, **patience: float) -> Retrying:
    return Retrying(inner, Patience(**patience), sleep=clock.sleep, clock=clock)  # type: ignore[arg-type]


def test_every_call_is_tried_again(memory: MemoryBackend) -> None:
    memory.put("a", b"x")
    for call, answer in (
        (lambda b: b.get("a"), b"x"),
        (lambda b: b.get("a", ByteRange(0, 1), into=[memoryview(bytearray(1))]), b""),
        (lambda b: b.stat("a").size_bytes, 1),
        (keys_of, ["a"]),
        (lambda b: b.put("a", b"x"), None),
        (lambda b: b.put_if_absent("b", b"y"), True),
        (lambda b: b.delete("b"), None),
        (lambda b: b.keeps_versions(), False),
        (lambda b: b.clear_unfinished(0.0), 0),
    ):
        clock = Clock()
        assert call(retrying(flaky(memory, 3), clock)) == answer
        assert len(clock.pauses) == 3


def test_attempts_are_bounded(memory: MemoryBackend) -> None:
    clock, inner = Clock(), flaky(memory, 100)
    with pytest.raises(StoreUnavailable) as caught:
        retrying(inner, clock, attempts=4).put("a", b"")
    assert inner.calls == 4
    assert "tried 4 times" in caught.value.__notes__[0]


def test_time_is_bounded(memory: MemoryBackend) -> None:
    clock = Clock()
    with pytest.raises(StoreUnavailable):
        retrying(flaky(memory, 1000), clock, attempts=1000, deadline_s=30).get("a")
    assert clock.now_s <= 30


def test_pauses_grow_up_to_a_bound_and_differ() -> None:
    patience = Patience(first_s=1, longest_s=8)
    pauses = [[patience.pause_s(n) for _ in range(200)] for n in (1, 2, 3, 4, 9, 5000)]
    for found, most in zip(pauses, (1, 2, 4, 8, 8, 8), strict=True):
        assert most / 2 < max(found) <= most
        assert min(found) < most / 4


def test_lost_answer_of_a_create_reads_as_exists(memory: MemoryBackend) -> None:
    assert retrying(flaky(memory, 1, after=True), Clock()).put_if_absent("a", b"x") is False
    assert memory.get("a") == b"x"


def test_what_is_no_outage_is_not_tried_again(memory: MemoryBackend) -> None:
    inner = Faulty(memory, [Fault(1, error=StoreFull("full"))])
    with pytest.raises(StoreFull):
        retrying(inner, Clock()).put("a", b"")
    assert inner.calls == 1
    with pytest.raises(ObjectNotFound):
        retrying(flaky(memory, 0), Clock()).get("a")


class BreaksOff(Wrapper):
    """A store whose listings break off after two entries."""

    def list(self, prefix: str = "", **options: object) -> Iterator[ObjectInfo]:
        for number, info in enumerate(super().list(prefix, **options)):  # type: ignore[arg-type]
            if number == 2:
                raise StoreUnavailable("broken off")
            yield info


def test_listing_goes_on_where_it_broke_off(memory: MemoryBackend) -> None:
    keys = [f"k/{n}" for n in range(9)]
    for key in keys:
        memory.put(key, b"")
    backend = retrying(BreaksOff(memory), Clock(), attempts=2)
    assert keys_of(backend, "k/") == keys
    assert keys_of(backend, limit=5) == keys[:5]
    assert keys_of(backend, start_after="k/3") == keys[4:]


# Metered


def test_calls_and_bytes_are_counted(memory: MemoryBackend) -> None:
    log: list[Call] = []
    backend = Metered(memory, log)
    with backend.measure() as used:
        backend.put("a", [b"123", b"45"])
        backend.put_if_absent("a", b"1234")
        backend.get("a")
        backend.get("a", ByteRange(1, 3))
        backend.get("a", ByteRange(0, 3), into=[memoryview(bytearray(3))])
        keys_of(backend, "a")
        backend.stat("a")
        backend.delete("a")
        with pytest.raises(ObjectNotFound):
            backend.get("a")
        backend.keeps_versions()
        backend.clear_unfinished(0.0)
    assert used.calls == {
        "put": 1, "put_if_absent": 1, "get": 4, "list": 1, "stat": 1, "delete": 1,
        "keeps_versions": 1, "clear_unfinished": 1,
    }  # fmt: skip
    assert (used.read_bytes, used.written_bytes, used.requests) == (10, 9, 11)
    assert log[-2:] == [Call("keeps_versions", ""), Call("clear_unfinished", "")]
    assert log[3] == Call("get", "a", ByteRange(1, 3))
    with backend.measure() as used:
        pass
    assert used.requests == 0


def test_counts_of_threads_add_up(memory: MemoryBackend) -> None:
    backend = Metered(memory)
    together(8, lambda i: [backend.put(f"{i}", b"xx") for _ in range(200)])
    assert backend.snapshot().calls == {"put": 1600}
    assert backend.snapshot().written_bytes == 3200


# ReadOnly


def test_read_only_refuses_writes_and_reads_on(memory: MemoryBackend) -> None:
    memory.put("a", b"x")
    backend = ReadOnly(memory)
    for call in (
        lambda: backend.put("a", b"y"),
        lambda: backend.put_if_absent("b", b"y"),
        lambda: backend.delete("a"),
        lambda: backend.clear_unfinished(0.0),
    ):
        with pytest.raises(ReadOnlyStore):
            call()
    assert backend.keeps_versions() is False
    assert backend.get("a") == b"x"
    assert keys_of(backend) == ["a"]


# Faulty


@pytest.mark.parametrize("after", [False, True])
def test_crash_at_a_write(memory: MemoryBackend, after: bool) -> None:
    backend = Faulty(memory, [Fault(2, after=after)])
    backend.put("a", b"")
    backend.get("a")
    with pytest.raises(InjectedCrash):
        backend.put("b", b"")
    for call in (
        lambda: backend.put("c", b""),
        lambda: backend.get("a"),
        lambda: backend.stat("a"),
        lambda: backend.list(),
        lambda: backend.delete("a"),
        lambda: backend.keeps_versions(),
        lambda: backend.clear_unfinished(0.0),
    ):
        with pytest.raises(InjectedCrash):
            call()
    assert keys_of(memory) == (["a", "b"] if after else ["a"])


def test_crash_is_no_exception_that_code_may_handle() -> None:
    assert not issubclass(InjectedCrash, Exception)


def test_reads_count_when_asked(memory: MemoryBackend) -> None:
    memory.put("a", b"x")
    backend = Faulty(memory, [Fault(4)], count_reads=True)
    backend.get("a")
    backend.stat("a")
    backend.keeps_versions()
    with pytest.raises(InjectedCrash):
        backend.list()


@pytest.mark.parametrize("after", [False, True])
def test_error_at_a_call(memory: MemoryBackend, after: bool) -> None:
    backend = Faulty(memory, [Fault(1, after=after, error=StorageError("once"))])
    with pytest.raises(StorageError, match="once"):
        backend.put("a", b"")
    backend.put("b", b"")
    assert keys_of(memory) == (["a", "b"] if after else ["b"])


def test_flipped_bit(memory: MemoryBackend) -> None:
    memory.put("a", bytes(4))
    backend = Faulty(memory, flipped={"a": 8 * 2 + 3})
    assert backend.get("a") == b"\0\0\x08\0"
    assert backend.get("a", ByteRange(1, 3)) == b"\0\x08"
    assert backend.get("a", ByteRange(0, 2)) == b"\0\0"
    assert backend.get("a", ByteRange(3, 4)) == b"\0"
    target = bytearray(4)
    views = [memoryview(target)[:2], memoryview(target)[2:]]
    backend.get("a", ByteRange(0, 4), into=views)
    assert target == b"\0\0\x08\0"


# Cached


def test_cached_object_is_read_once(memory: MemoryBackend) -> None:
    memory.put("log/1", b"0123456789")
    memory.put("other/1", b"x")
    inner = Metered(memory)
    backend = Cached(inner, ["log/"])
    for _ in range(3):
        assert backend.get("log/1") == b"0123456789"
        assert backend.get("other/1") == b"x"
    assert backend.get("log/1", ByteRange(2, 4)) == b"23"
    target = bytearray(3)
    backend.get("log/1", ByteRange(7, 10), into=[memoryview(target)[:1], memoryview(target)[1:]])
    assert target == b"789"
    with pytest.raises(ObjectTruncated):
        backend.get("log/1", ByteRange(9, 11))
    assert inner.snapshot().calls["get"] == 4


def test_absence_and_ranges_are_not_remembered(memory: MemoryBackend) -> None:
    backend = Cached(memory, ["a"])
    with pytest.raises(ObjectNotFound):
        backend.get("a")
    memory.put("a", b"123")
    assert backend.get("a", ByteRange(0, 1)) == b"1"
    assert backend.get("a") == b"123"


def test_own_writes_are_noticed(memory: MemoryBackend) -> None:
    backend = Cached(memory, ["a"])
    backend.put("a", b"1")
    assert backend.get("a") == b"1"
    backend.put("a", b"2")
    assert backend.get("a") == b"2"
    backend.delete("a")
    with pytest.raises(ObjectNotFound):
        backend.get("a")


def test_cache_is_bounded_and_drops_the_least_used(memory: MemoryBackend) -> None:
    inner = Metered(memory)
    backend = Cached(inner, ["k"], capacity_bytes=30, largest_bytes=10)
    for n in range(4):
        memory.put(f"k{n}", bytes(10))
    memory.put("k-big", bytes(11))
    for key in ("k0", "k1", "k2", "k0", "k3", "k-big"):
        backend.get(key)
    for key, asked in (("k0", 0), ("k3", 0), ("k1", 1), ("k-big", 1)):
        with inner.measure() as used:
            backend.get(key)
        assert used.requests == asked, key
