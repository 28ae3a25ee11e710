from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.backends import (
    Backend,
    Body,
    ObjectInfo,
    ObjectNotFound,
    StoreUnsuitable,
    open_backend,
)
from holdfast.backends.local.backend import LocalBackend
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.probe import ProbeReport, probe_put_if_absent
from holdfast.backends.testing import keys_of
from holdfast.backends.wrappers import Wrapper
from tests.support.faults import Forgetful, Unconditional


class ChecksThenWrites(Wrapper):
    """Two steps where one is needed, as fsspec's create and moto's condition."""

    def put_if_absent(self, key: str, body: Body) -> bool:
        try:
            self.stat(key)
        except ObjectNotFound:
            time.sleep(0.001)
            self.put(key, body)
            return True
        return False


class RefusesButOverwrites(Wrapper):
    def put_if_absent(self, key: str, body: Body) -> bool:
        created = super().put_if_absent(key, body)
        if not created:
            self.put(key, body)
        return created


class ListsLate(Wrapper):
    def list(self, prefix: str = "", **options: object) -> Iterator[ObjectInfo]:
        return iter(list(super().list(prefix, **options))[:-1])  # type: ignore[arg-type]


def probe(backend: Backend) -> ProbeReport:
    return probe_put_if_absent(backend, ".probe/x", writers=6, rounds=8)


@pytest.mark.parametrize(
    ("racy", "said"),
    [
        (ChecksThenWrites, r"\d writers created one key"),
        (Unconditional, "6 writers created one key"),
        (RefusesButOverwrites, "bytes of its creator|changed the object"),
        (Forgetful, r"0 writers created one key \(8 times\)"),
        (ListsLate, "8 objects were written, 7 are listed"),
    ],
)
def test_store_that_breaks_a_promise_is_refused(racy: type[Wrapper], said: str) -> None:
    memory = MemoryBackend()
    with pytest.raises(StoreUnsuitable, match=said) as caught:
        probe(racy(memory))
    assert caught.value.exit_code == 8
    assert keys_of(memory) == []


def test_good_stores_pass_and_are_left_clean(tmp_path: Path) -> None:
    for backend in (MemoryBackend(), LocalBackend(tmp_path)):
        assert probe(backend) == ProbeReport(rounds=8, writers=6)
        assert keys_of(backend) == []


@pytest.mark.radosgw
def test_radosgw_passes(radosgw_url: Callable[[], str]) -> None:
    probe(open_backend(radosgw_url()))
