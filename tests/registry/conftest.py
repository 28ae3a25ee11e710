"""Registries in memory for the tests of the core."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.backends import Backend
from holdfast.backends.memory import MemoryBackend
from holdfast.registry.face.factory import open_on
from holdfast.registry.face.registry import Registry
from tests.support.faults import Gate
from tests.support.stores import Open, new_backend, small_grid


@pytest.fixture
def open_registry() -> Iterator[Open]:
    """Opens the registry behind a backend with a handle that remembers nothing."""
    opened: list[Registry] = []

    def open_it(backend: Backend) -> Registry:
        opened.append(open_on(backend))
        return opened[-1]

    yield open_it
    for registry in opened:
        registry.close()


@pytest.fixture
def backend() -> MemoryBackend:
    return new_backend()


@pytest.fixture
def gate(backend: MemoryBackend) -> Gate:
    """The store, which holds packs back until told."""
    return Gate(backend)


@pytest.fixture
def reg(backend: MemoryBackend, open_registry: Open) -> Registry:
    return open_registry(backend)


@pytest.fixture
def run(reg: Registry):
    return reg.create_run("run", seed=1)


@pytest.fixture
def grid():
    """Two rows of 100 bytes a chunk, many chunks in a pack, and digest lists."""
    with small_grid(256, list_threshold=8):
        yield


@pytest.fixture(scope="session")
def fleet() -> Iterator[Any]:
    """Processes that are ranks (`tests.registry.saving.collective.fleet`); started at their first
    use."""
    from tests.registry.saving.collective.fleet import (
        Fleet,  # it needs torch, and few tests need it
    )

    made = Fleet()
    yield made
    made.close()
