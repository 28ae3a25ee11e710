"""The cache of loaded models: who stays, who goes, and who loads when many ask at once."""

from __future__ import annotations

import random
import sys
import threading
import time

import pytest

from holdfast.registry.curation.pool.league import ModelCache

_SECONDS = 300


class _Asking(threading.Thread):
    """A thread that asks a cache for a version and keeps what came of it."""

    def __init__(self, cache, version, load):
        super().__init__(daemon=True)
        self._ask = lambda: cache.get(version, load)
        self.answer = self.error = None
        self.start()

    def run(self):
        try:
            self.answer = self._ask()
        except BaseException as error:
            self.error = error

    def until_it_waits(self):
        """Return when the thread waits for another one's load."""
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            frame = sys._current_frames().get(self.ident)
            while frame is not None:
                if frame.f_code.co_name == "result":
                    return
                frame = frame.f_back
            time.sleep(0.001)
        raise AssertionError("it does not wait")

    def finish(self):
        self.join(_SECONDS)
        assert not self.is_alive()
        return self


def _never():
    raise AssertionError("loaded again")


def _filled(capacity, *versions):
    cache = ModelCache(capacity)
    for version in versions:
        assert cache.get(version, lambda version=version: f"m{version}") == f"m{version}"
    return cache


def test_a_model_is_loaded_once():
    cache = _filled(2, 1)
    first = cache.get(1, _never)
    assert cache.get(1, _never) is first
    assert cache.versions() == (1,)


def test_none_is_a_model_too():
    cache = ModelCache(2)
    assert cache.get(1, lambda: None) is None
    assert cache.get(1, _never) is None


def test_the_least_recently_used_one_goes():
    cache = _filled(3, 1, 2, 3)
    assert cache.versions() == (1, 2, 3)
    cache.get(1, _never)
    assert cache.versions() == (2, 3, 1)
    cache.get(4, lambda: "m4")
    assert cache.versions() == (3, 1, 4)


def test_a_capacity_of_one():
    cache = _filled(1, 1, 2)
    assert cache.versions() == (2,)


def test_drop():
    cache = _filled(3, 1, 2, 3)
    cache.drop(2)
    cache.drop(9)
    assert cache.versions() == (1, 3)
    assert cache.get(2, lambda: "anew") == "anew"


def test_what_is_dropped_while_it_is_loaded_is_not_kept():
    cache = _filled(2, 1, 2)

    def load():
        cache.drop(7)
        return "old"

    assert cache.get(7, load) == "old"
    assert 7 not in cache.versions()
    assert cache.get(7, lambda: "new") == "new"
    assert cache.get(7, _never) == "new"


def test_a_load_after_a_drop_is_not_undone_by_the_load_before_it():
    cache = ModelCache(2)

    def load():
        cache.drop(7)
        assert cache.get(7, lambda: "new") == "new"
        return "old"

    assert cache.get(7, load) == "old"
    assert cache.get(7, _never) == "new"


def test_a_failing_load_changes_nothing():
    cache = _filled(2, 1, 2)
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            cache.get(3, _fail)
    assert cache.versions() == (1, 2)
    assert cache.get(3, lambda: "m3") == "m3"


def _fail():
    raise OSError("gone")


def test_who_asks_while_another_loads_waits_for_that_one():
    cache = ModelCache(2)
    waiting = []

    def load():
        waiting.extend(_Asking(cache, 7, _never) for _ in range(3))
        for thread in waiting:
            thread.until_it_waits()
        return ["model"]

    model = cache.get(7, load)
    for thread in waiting:
        assert thread.finish().answer is model


def test_who_waits_gets_the_model_even_if_it_is_gone_again():
    cache = ModelCache(1)
    waiting = []

    def load():
        waiting.append(_Asking(cache, 7, _never))
        waiting[0].until_it_waits()
        cache.drop(7)
        return "model"

    cache.get(7, load)
    assert waiting[0].finish().answer == "model"
    assert cache.versions() == ()


def test_who_waits_gets_the_error():
    cache = ModelCache(2)
    waiting = []

    def load():
        waiting.append(_Asking(cache, 7, _never))
        waiting[0].until_it_waits()
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        cache.get(7, load)
    assert str(waiting[0].finish().error) == "gone"
    assert cache.get(7, lambda: "anew") == "anew"


def test_who_waits_loads_anew_after_an_interrupt():
    cache = ModelCache(2)
    waiting = []

    def load():
        waiting.append(_Asking(cache, 7, lambda: "anew"))
        waiting[0].until_it_waits()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.get(7, load)
    assert waiting[0].finish().answer == "anew"
    assert cache.get(7, _never) == "anew"


def test_versions_are_loaded_side_by_side():
    cache = ModelCache(2)
    both = threading.Barrier(2, timeout=_SECONDS)
    threads = [_Asking(cache, version, both.wait) for version in (1, 2)]
    assert {thread.finish().answer for thread in threads} == {0, 1}
    assert sorted(cache.versions()) == [1, 2]


@pytest.mark.parametrize(
    "let_go",
    [lambda cache: cache.get(2, str), lambda cache: cache.drop(1)],
    ids=["get", "drop"],
)
def test_a_model_that_goes_may_use_the_cache(let_go):
    cache = ModelCache(1)
    seen = []

    class Model:
        def __del__(self):
            seen.append(cache.versions())

    cache.get(1, Model)
    thread = threading.Thread(target=let_go, args=[cache], daemon=True)
    thread.start()
    thread.join(_SECONDS)
    assert not thread.is_alive()
    assert len(seen) == 1


def test_many_threads():
    cache = ModelCache(3)
    loads, wrong = [], []
    # A version is loaded by one thread at a time.
    loading = {version: threading.Lock() for version in range(6)}

    def load(version):
        with_it = loading[version].acquire(blocking=False)
        loads.append(version)
        time.sleep(0.0002)
        if not with_it:
            wrong.append(f"{version} is loaded twice at once")
        else:
            loading[version].release()
        return version

    def use(seed):
        chosen = random.Random(seed)
        for _ in range(200):
            version = chosen.randrange(6)
            if cache.get(version, lambda version=version: load(version)) != version:
                wrong.append("another version's model")
            if len(cache.versions()) > 3:
                wrong.append("more than it may hold")

    threads = [threading.Thread(target=use, args=[seed]) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(cache.versions()) == 3
    assert len(loads) < 8 * 200
