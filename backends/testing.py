"""The contract of a backend as a test suite, for our backends and those of third parties.

    class TestMyBackend(BackendContract):
        @pytest.fixture
        def backend(self):
            return MyBackend(...)          # empty, and a new one for each test

Each test tries to break one promise of `holdfast.backends.base`.
"""

# The names of tests say what they test.
# ruff: noqa: D102
from __future__ import annotations

import copy
import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

import pytest

from holdfast.backends.base import Backend, ByteRange
from holdfast.backends.errors import (
    InvalidLocation,
    ObjectNotFound,
    ObjectTruncated,
    StorageError,
    StoreUnavailable,
)

_T = TypeVar("_T")

ILLEGAL_KEYS = (
    *("", "/", "/a", "a/", "a//b", ".", "..", "a/..", "../a", "a/./b", "a\\b", "a b", "a\0b"),
    *("a\n", "é", "a?b", "a#b", "a%2fb", "C:", "a\u202eb"),
)


class BackendContract:
    """Tests that every backend must pass."""

    #: For emulators: the reason why concurrent exclusive creates fail, if they are known to.
    racy_create: ClassVar[str] = ""
    #: The largest difference between the store's clock and ours, and the resolution of its times.
    clock_slack_s: ClassVar[float] = 5.0
    #: Keys and threads of the race for exclusive create.
    race_keys: ClassVar[int] = 40
    race_threads: ClassVar[int] = 16
    #: A number of objects that needs more than one page of a listing.
    many: ClassVar[int] = 1010

    # Keys

    def test_illegal_key_is_refused_by_every_method(self, backend: Backend) -> None:
        calls: Sequence[Callable[[str], object]] = (
            backend.get,
            lambda key: backend.put(key, b""),
            lambda key: backend.put_if_absent(key, b""),
            backend.stat,
            backend.delete,
            lambda key: backend.delete_many([key]),
        )
        for key in ILLEGAL_KEYS:
            for call in calls:
                with pytest.raises(InvalidLocation):
                    call(key)
        assert keys_of(backend) == []

    @pytest.mark.parametrize("key", ["a", "...", ".a", "a-b_c.D9", "a/b/c/d/e/f/g", ".probe/x/1"])
    def test_legal_key_is_kept_as_it_is(self, backend: Backend, key: str) -> None:
        backend.put(key, b"x")
        assert [info.key for info in backend.list()] == [key]
        assert backend.get(key) == b"x"

    # Reading and writing

    @pytest.mark.parametrize("size", [0, 1, 4095, 65536, 65537, 1_000_003])
    def test_object_comes_back_whole(self, backend: Backend, size: int) -> None:
        data = random.Random(size).randbytes(size)
        backend.put("a", data)
        assert backend.get("a") == data
        assert backend.stat("a").size_bytes == size

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_body_may_be_any_buffer(self, backend: Backend, kind: Callable[[bytes], bytes]) -> None:
        backend.put("a", kind(b"bytes"))
        assert backend.put_if_absent("b", [kind(b"by"), kind(b""), kind(b"tes")])
        assert backend.get("a") == backend.get("b") == b"bytes"

    def test_body_may_be_more_buffers_than_the_system_takes_at_once(self, backend: Backend) -> None:
        data = random.Random(1).randbytes(300_000)
        cuts = [0, 1, 1, 70_000, *range(70_001, 120_000, 17), len(data)]
        parts = [memoryview(data)[a:b] for a, b in itertools.pairwise(cuts)]
        assert len(parts) > 2048
        backend.put("a", parts)
        assert backend.get("a") == data

    def test_body_of_no_buffers_is_an_empty_object(self, backend: Backend) -> None:
        backend.put("a", [])
        assert backend.put_if_absent("b", [b""])
        assert backend.get("a") == backend.get("b") == b""

    def test_body_may_be_items_wider_than_a_byte(self, backend: Backend) -> None:
        backend.put("a", memoryview(b"\1\0\2\0").cast("H"))
        assert backend.get("a") == b"\1\0\2\0"

    def test_put_replaces(self, backend: Backend) -> None:
        for data in (b"first", b"", b"third and longer"):
            backend.put("a", data)
            assert backend.get("a") == data
        assert [info.size_bytes for info in backend.list()] == [16]

    @pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 10), (3, 7), (9, 10)])
    def test_range(self, backend: Backend, start: int, stop: int) -> None:
        backend.put("a", b"0123456789")
        assert backend.get("a", ByteRange(start, stop)) == b"0123456789"[start:stop]

    @pytest.mark.parametrize(("start", "stop"), [(0, 11), (9, 11), (10, 11), (100, 200)])
    def test_range_beyond_the_end_is_truncated(
        self, backend: Backend, start: int, stop: int
    ) -> None:
        backend.put("a", b"0123456789")
        with pytest.raises(ObjectTruncated):
            backend.get("a", ByteRange(start, stop))
        view = memoryview(bytearray(stop - start))
        with pytest.raises(ObjectTruncated):
            backend.get("a", ByteRange(start, stop), into=[view])

    def test_range_of_an_empty_object_is_truncated(self, backend: Backend) -> None:
        backend.put("a", b"")
        with pytest.raises(ObjectTruncated):
            backend.get("a", ByteRange(0, 1))

    @pytest.mark.parametrize("pieces", [1, 2, 3000])
    def test_get_fills_the_buffers_it_is_given(self, backend: Backend, pieces: int) -> None:
        data = random.Random(2).randbytes(700_000)
        backend.put("a", data)
        start, stop = 11, 690_011
        target = bytearray(stop - start)
        cuts = sorted({0, len(target), *random.Random(3).sample(range(len(target)), pieces - 1)})
        views = [memoryview(target)[a:b] for a, b in itertools.pairwise(cuts)]
        assert backend.get("a", ByteRange(start, stop), into=views) == b""
        assert target == data[start:stop]

    def test_buffers_that_do_not_fit_the_range_are_refused(self, backend: Backend) -> None:
        backend.put("a", b"0123456789")
        target = bytearray(4)
        for byte_range in (None, ByteRange(0, 3), ByteRange(0, 5)):
            with pytest.raises(ValueError, match="writable bytes"):
                backend.get("a", byte_range, into=[memoryview(target)])
        with pytest.raises(ValueError, match="writable bytes"):
            backend.get("a", ByteRange(0, 4), into=[memoryview(bytes(4))])
        assert target == bytes(4)

    # Absence

    def test_absent_object_is_not_found(self, backend: Backend) -> None:
        backend.put("a/b", b"x")
        for key in ("b", "a/c", "a/b/c", "aa/b"):
            for call in (backend.get, backend.stat, lambda k: backend.get(k, ByteRange(0, 1))):
                with pytest.raises(ObjectNotFound) as caught:
                    call(key)
                assert key in str(caught.value)

    def test_folder_of_a_key_is_no_object(self, backend: Backend) -> None:
        backend.put("a/b/c", b"x")
        for key in ("a", "a/b"):
            with pytest.raises(ObjectNotFound):
                backend.get(key)
            with pytest.raises(ObjectNotFound):
                backend.stat(key)
            backend.delete(key)
        assert backend.get("a/b/c") == b"x"

    def test_error_survives_copying(self, backend: Backend) -> None:
        with pytest.raises(ObjectNotFound) as caught:
            backend.get("a")
        again = copy.deepcopy(caught.value)
        assert (type(again), str(again)) == (ObjectNotFound, str(caught.value))

    def test_delete_is_idempotent(self, backend: Backend) -> None:
        backend.put("a/b", b"x")
        backend.delete("a/b")
        backend.delete("a/b")
        with pytest.raises(ObjectNotFound):
            backend.get("a/b")
        assert list(backend.list()) == []
        assert list(backend.list(delimiter=True)) == []
        assert backend.put_if_absent("a/b", b"y")
        assert backend.get("a/b") == b"y"

    def test_threads_delete_at_once(self, backend: Backend) -> None:
        keys = [f"packs/{n % 5:02x}/{n}" for n in range(40)]
        for key in [*keys, "packs/00/kept"]:
            backend.put(key, b"x")
        # Each key twice, and some that never existed.
        asked = [*keys, *reversed(keys), *(f"packs/ff/{n}" for n in range(8))]
        together(16, lambda i: [backend.delete(key) for key in asked[i::16]])
        assert keys_of(backend) == ["packs/00/kept"]

    def test_many_are_deleted_and_nothing_else(self, backend: Backend) -> None:
        keys = [f"packs/{n % 3:02x}/{n:05d}" for n in range(self.many)]
        kept = ["packs/00/0000", "packs/00/00000.1"]
        with ThreadPoolExecutor(backend.concurrency) as pool:
            list(pool.map(lambda key: backend.put(key, b"x"), [*keys, *kept]))
        backend.delete(keys[7])
        asked = [*keys, "packs/ff/1", "packs/00", "never/was", keys[0]]
        assert dict(backend.delete_many(iter(asked))) == {}
        assert keys_of(backend) == kept
        assert dict(backend.delete_many(asked)) == dict(backend.delete_many([])) == {}
        assert keys_of(backend) == kept
        assert backend.put_if_absent(keys[0], b"y")

    def test_what_was_seen_is_made_durable(self, backend: Backend) -> None:
        """Test that the objects are still there; no test can see a loss of power."""
        keys = ["a", "b/c", "b/d", "b/e/f"]
        for key in keys:
            backend.put(key, key.encode())
        backend.make_durable(iter(keys))
        backend.make_durable([])
        assert {info.key: backend.get(info.key) for info in backend.list()} == {
            key: key.encode() for key in keys
        }

    # Collection

    def test_whether_versions_are_kept_is_told(self, backend: Backend) -> None:
        backend.put("a", b"x")
        assert backend.keeps_versions() in (True, False, None)

    def test_clearing_leaves_every_object(self, backend: Backend) -> None:
        assert backend.clear_unfinished(0.0) == 0
        for key in ("a", "b/c", ".probe/d"):
            backend.put(key, key.encode())
            assert backend.put_if_absent(f"{key}.new", b"x")
        before = list(backend.list())
        assert backend.clear_unfinished(0.0) == 0
        assert list(backend.list()) == before
        assert backend.put_if_absent("e", b"y")
        assert backend.get("e") == b"y"

    def test_clearing_beside_writers_breaks_no_promise(self, backend: Backend) -> None:
        """With an age of 0 it removes files of live writers; their puts fail, and nothing else."""
        writers, done = 4, threading.Event()
        kept: list[list[str]] = [[] for _ in range(writers)]
        body = bytes(range(256)) * 20

        def write(number: int) -> None:
            for n in range(12):
                key = f"{number}/{n}"
                with suppress(StoreUnavailable):
                    if n % 2:
                        backend.put(key, body)
                    else:
                        assert backend.put_if_absent(key, body)
                    kept[number].append(key)

        def clear(_: int) -> None:
            while not done.wait(0.0005):
                backend.clear_unfinished(0.0)

        with ThreadPoolExecutor(1) as pool:
            clearing = pool.submit(clear, 0)
            try:
                together(writers, write)
            finally:
                done.set()
            clearing.result()
        # Every object is whole, acknowledged or not.
        assert all(backend.get(key) == body for key in keys_of(backend))
        assert {key for keys in kept for key in keys} <= set(keys_of(backend))

    # Exclusive create

    def test_create_of_an_existing_object_changes_nothing(self, backend: Backend) -> None:
        assert backend.put_if_absent("a/b", b"first") is True
        before = backend.stat("a/b")
        assert backend.put_if_absent("a/b", b"second, longer") is False
        assert backend.put_if_absent("a/b", b"first") is False
        assert backend.put_if_absent("a/b", bytes(200_000)) is False
        assert backend.get("a/b") == b"first"
        assert backend.stat("a/b") == before

    def test_one_of_many_writers_creates(self, backend: Backend) -> None:
        if self.racy_create:
            pytest.skip(self.racy_create)
        keys = [f"race/{number}" for number in range(self.race_keys)]
        meeting = threading.Barrier(self.race_threads)

        def create(number: int) -> list[bool]:
            answers = []
            try:
                for key in keys:
                    meeting.wait(60)
                    answers.append(backend.put_if_absent(key, b"%4d" % number))
            except BaseException:
                meeting.abort()
                raise
            return answers

        told = together(self.race_threads, create)
        for key, answers in zip(keys, zip(*told, strict=True), strict=True):
            assert sum(answers) == 1, f"{sum(answers)} winners of {key}"
            assert backend.get(key) == b"%4d" % answers.index(True)

    # Visibility

    def test_reader_sees_the_old_or_the_new_object(self, backend: Backend) -> None:
        bodies = [bytes([n]) * (50_000 + 1000 * n) for n in range(8)]
        backend.put("a", bodies[0])
        done = threading.Event()

        def read(_: int) -> None:
            while not done.is_set():
                assert backend.get("a") in bodies

        def write(_: int) -> None:
            try:
                for body in bodies * 3:
                    backend.put("a", body)
            finally:
                done.set()

        together(4, lambda i: write(i) if i == 0 else read(i))

    def test_acknowledged_write_is_seen_by_all(self, backend: Backend) -> None:
        def write(i: int) -> None:
            for n in range(8):
                key = f"{i}/{n}"
                backend.put(key, key.encode())
                assert backend.get(key) == key.encode()
                assert backend.stat(key).size_bytes == len(key)
                assert key in [info.key for info in backend.list(f"{i}/")]
                if n % 2:
                    backend.delete(key)
                    assert key not in [info.key for info in backend.list(f"{i}/")]

        together(4, write)
        assert len(list(backend.list())) == 16

    def test_time_is_that_of_the_last_write(self, backend: Backend) -> None:
        before = time.time() - self.clock_slack_s
        backend.put("a", b"x")
        info = backend.stat("a")
        assert before <= info.modified_s <= time.time() + self.clock_slack_s
        (listed,) = backend.list()
        # S3 gives times to the millisecond in a listing, and to the second for one object.
        assert 0 <= listed.modified_s - info.modified_s < 1

    def test_times_are_of_one_clock_and_go_on(self, backend: Backend) -> None:
        keys = [f"k/{number}" for number in range(6)]
        for number, key in enumerate(keys):
            backend.put(key, b"x") if number % 2 else backend.put_if_absent(key, b"x")
        for infos in (list(backend.list("k/")), [backend.stat(key) for key in keys]):
            times_s = [info.modified_s for info in infos]
            assert times_s == sorted(times_s)
            assert times_s[-1] - times_s[0] < 2 * self.clock_slack_s
        before = backend.stat(keys[0]).modified_s
        assert not backend.put_if_absent(keys[0], b"other")
        assert backend.stat(keys[0]).modified_s == before
        backend.put(keys[0], b"y")
        assert backend.stat(keys[0]).modified_s >= times_s[-1]

    # Listing

    def test_order_is_that_of_whole_keys(self, backend: Backend) -> None:
        # `.` and `-` sort before `/`, though the folder `a` sorts before the file `a.b`.
        keys = ["a-b", "a-b.c/d", "a.b", "a/c.d/e", "a/c/d", "a0", "aB/x", "a_", "aa/x"]
        for key in reversed(keys):
            backend.put(key, b"")
        assert keys_of(backend) == sorted(keys, key=str.encode)

    @pytest.mark.parametrize("delimiter", [False, True])
    def test_prefix_start_and_limit(self, backend: Backend, delimiter: bool) -> None:
        keys = ["a.b", "a/b.c", "a/b/c", "a/b/d/e", "a/b/d/f", "a/b0", "a0/x", "b/y/z", "ba"]
        for key in keys:
            backend.put(key, key.encode())
        prefixes = ("", "a", "a/", "a/b", "a/b/", "a/b/c", "b", "zz", "a/x/", "/", "../", "./")
        starts = ("", "a", "a/", "a/b", "a/b/", "a/b/d", "a/b/d/e", "a/c", "b", "c")
        for prefix, start in itertools.product(prefixes, starts):
            matching = [key for key in keys if key.startswith(prefix)]
            expected = folded(matching, prefix) if delimiter else matching
            left = [key for key in expected if key > start]
            for limit in (None, 0, 1, 2) if prefix in ("", "a/b/") else (None,):
                options = {"start_after": start, "limit": limit, "delimiter": delimiter}
                assert keys_of(backend, prefix, **options) == left[:limit], (prefix, options)

    def test_listing_tells_size_and_folders_have_none(self, backend: Backend) -> None:
        backend.put("a/b", b"12345")
        backend.put("c", b"123")
        assert [(i.key, i.size_bytes) for i in backend.list()] == [("a/b", 5), ("c", 3)]
        folder, file = backend.list(delimiter=True)
        assert (folder.key, folder.size_bytes, folder.modified_s) == ("a/", 0, 0.0)
        assert (file.key, file.size_bytes) == ("c", 3)

    def test_many_objects_take_several_pages(self, backend: Backend) -> None:
        keys = [f"n/{number:05d}" for number in range(self.many)]
        with ThreadPoolExecutor(backend.concurrency) as pool:
            list(pool.map(lambda key: backend.put(key, b""), keys))
        backend.put("o/x", b"")
        assert keys_of(backend, "n/") == keys
        limit = self.many - 7
        assert keys_of(backend, "n/", start_after=keys[3], limit=limit) == keys[4 : 4 + limit]
        assert keys_of(backend, delimiter=True) == ["n/", "o/"]

    # The rest

    def test_close_may_be_called_twice(self, backend: Backend) -> None:
        backend.put("a", b"x")
        backend.close()
        backend.close()

    def test_url_and_concurrency_are_told(self, backend: Backend) -> None:
        assert "://" in backend.url
        assert backend.concurrency >= 1
        assert backend.least_read_bytes >= 1

    def test_errors_are_storage_errors(self, backend: Backend) -> None:
        with pytest.raises(StorageError):
            backend.get("absent")
        with pytest.raises(FileNotFoundError):
            backend.get("absent")


def keys_of(backend: Backend, prefix: str = "", **options: Any) -> list[str]:
    """Return the keys of a listing."""
    return [info.key for info in backend.list(prefix, **options)]


def folded(keys: Sequence[str], prefix: str) -> list[str]:
    """Return the entries of a delimited listing of keys with a prefix."""
    found = []
    for key in keys:
        cut = key.find("/", len(prefix)) + 1
        found.append(key[:cut] if cut else key)
    return sorted(set(found), key=str.encode)


def together(threads: int, call: Callable[[int], _T]) -> list[_T]:
    """Call from several threads at the same moment; return the answers in order."""
    barrier = threading.Barrier(threads)

    def wait_and_call(number: int) -> _T:
        barrier.wait(60)
        return call(number)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(wait_and_call, range(threads)))
