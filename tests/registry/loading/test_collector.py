"""A short load or save has the cycle collector paused from its first tensor to its last."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from holdfast.backends.memory import MemoryBackend
from holdfast.registry import pytree
from holdfast.registry.values import first_use
from holdfast.registry.writing import packing
from tests.support.stores import new_backend, opened

STATE = {"model": {f"w{n}": np.full(32, n, np.float32) for n in range(3)}}


@pytest.fixture
def run():
    with opened(new_backend()) as reg:  # without threads, which pause it too
        yield reg.create_run("run")


@pytest.fixture
def seen(monkeypatch):
    """Return whether the collector was on at each read of chunks and at each check of a save."""
    seen = []
    get, check = MemoryBackend.get, packing.check_readable

    def noted_get(self, *args, into=None, **options):
        if into is not None:
            seen.append(gc.isenabled())
        return get(self, *args, into=into, **options)

    def noted_check(*args):
        seen.append(gc.isenabled())
        check(*args)

    monkeypatch.setattr(MemoryBackend, "get", noted_get)
    monkeypatch.setattr(packing, "check_readable", noted_check)
    return seen


@pytest.mark.parametrize("most_bytes", [2**24, 100], ids=["short", "long"])
def test_the_collector_is_paused_for_a_short_save_or_load_and_on_in_a_long_one(
    run, seen, monkeypatch, most_bytes
):
    monkeypatch.setattr(first_use, "_BRIEF_BYTES", most_bytes)
    saved = run.save(STATE, step=1)
    saved.load()
    saved.load_into({"model": {name: np.zeros(32, np.float32) for name in STATE["model"]}})
    assert seen == [most_bytes == 100] * 3
    assert gc.isenabled()


def test_the_collector_is_on_while_packs_wait_for_others(run, seen):
    run.save({f"part{n}": {"w": np.full(32, n, np.float32)} for n in range(9)}, step=1)
    assert seen == [True]


def test_the_collector_is_paused_while_the_tensors_of_a_state_are_listed(run, monkeypatch):
    saved = run.save(STATE, step=1)
    seen, listed = [], pytree.array_paths

    def noted(*args):
        seen.append(gc.isenabled())
        return listed(*args)

    monkeypatch.setattr(pytree, "array_paths", noted)
    assert saved["model/w2"][0:2].tolist() == [2, 2]
    assert (seen, gc.isenabled()) == ([False], True)


@pytest.mark.parametrize("most_bytes", [2**24, 4], ids=["short", "long"])
def test_the_collector_is_paused_for_a_small_slice_and_on_in_a_large_one(
    run, seen, monkeypatch, most_bytes
):
    tensor = run.save(STATE, step=1)["model/w2"]
    monkeypatch.setattr(first_use, "_BRIEF_BYTES", most_bytes)
    seen.clear()
    assert tensor[0:2].tolist() == [2, 2]
    assert seen == [most_bytes == 4]
