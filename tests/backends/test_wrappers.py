from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from holdfast.backends import (
    AccessDenied,
    Backend,
    ByteRange,
    ObjectNotFound,
    ReadOnlyStore,
    StorageError,
)
from holdfast.backends.local.backend import LocalBackend
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.testing import keys_of, together
from holdfast.backends.wrappers import (
    Call,
    Fault,
    Faulty,
    InjectedCrash,
    Metered,
    ReadOnly,
    Wrapper,
)


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


@pytest.mark.parametrize("wrap", [Wrapper, Metered, Faulty])
def test_what_a_collector_asks_comes_from_the_store(wrap: Callable[[Backend], Backend]) -> None:
    store = Versioned()
    backend = wrap(store)
    assert backend.keeps_versions() is None
    assert backend.clear_unfinished(60.5) == 7
    assert store.cleared_s == [60.5]
    assert ReadOnly(store).keeps_versions() is None


@pytest.mark.parametrize("wrap", [Wrapper, Metered, Faulty])
def test_links_and_space_are_those_of_the_store(wrap: Callable[[Backend], Backend]) -> None:
    store = Versioned()
    backend = wrap(store)
    assert [*backend.links("a/", delimiter=True)] == ["a/True"]
    assert backend.free_bytes() == 5
    backend.keep_reserve("a/")
    assert store.kept == ["a/"]
    assert (backend.give_up_reserve(3), backend.give_up_reserve()) == (3, 9)


@pytest.mark.parametrize("wrap", [Wrapper, Metered, Faulty])
def test_what_is_begun_is_begun_in_the_store(
    wrap: Callable[[Backend], Backend], tmp_path: Path
) -> None:
    backend = wrap(LocalBackend(tmp_path))
    begun = backend.begin(3)
    assert begun is not None
    begun.write([b"a", memoryview(b"bc")])
    assert backend.put_if_absent("k", begun)
    begun.close()
    assert (backend.get("k"), begun.size_bytes) == (b"abc", 3)
    assert wrap(MemoryBackend()).begin(3) is None
    with pytest.raises(ReadOnlyStore):
        ReadOnly(backend).begin(3)
    if isinstance(backend, Metered):
        assert backend.snapshot().written_bytes == 3
    with pytest.raises(TypeError, match="of another backend"):
        MemoryBackend().put("k", begun)


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


@pytest.mark.parametrize("wrap", [Wrapper, Metered, Faulty, ReadOnly])
def test_what_is_made_durable_is_so_in_the_store(wrap: Callable[[Backend], Backend]) -> None:
    store = Versioned()
    wrap(store).make_durable(iter(["a", "b/c"]))
    assert store.made_durable == ["a", "b/c"]


@pytest.mark.parametrize("wrap", [Wrapper, Metered, Faulty, ReadOnly])
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


class Refuses(Wrapper):
    """Refuses one key, and by its own `delete` alone."""

    def delete(self, key: str) -> None:
        if key == "b":
            raise AccessDenied("no", where=key)
        super().delete(key)


def test_own_deletion_of_a_wrapper_also_holds_for_many(memory: MemoryBackend) -> None:
    log: list[Call] = []
    for key in "abc":
        memory.put(key, b"x")
    failed = Wrapper(Metered(Refuses(memory), log)).delete_many("abc")
    assert {key: type(error) for key, error in failed.items()} == {"b": AccessDenied}
    assert keys_of(memory) == ["b"]
    assert log == [Call("delete_many", "")], "others pass the call on as it is"


@pytest.mark.parametrize("after", [False, True])
def test_crash_within_many_deletions(memory: MemoryBackend, after: bool) -> None:
    for key in "abc":
        memory.put(key, b"x")
    with pytest.raises(InjectedCrash):
        Faulty(memory, [Fault(2, after=after)]).delete_many("abc")
    assert keys_of(memory) == (["c"] if after else ["b", "c"])
    assert Faulty(memory, [Fault(1, error=AccessDenied("once"))]).delete_many("bc").keys() == {"b"}


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
        lambda: backend.delete_many(["a"]),
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
