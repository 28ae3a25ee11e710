"""Registries in memory for the tests of the core, and the tools to look at them and harm them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from backends import Backend
from backends.memory import MemoryBackend
from backends.wrappers import Wrapper
from registry.objects import chunking, manifest
from registry.registry import Registry, open_on
from registry.store import create_config
from registry.writing import saving

Open = Callable[..., Registry]


def new_backend(name: str | None = None) -> MemoryBackend:
    """Return a store that holds an empty registry."""
    backend = MemoryBackend(name)
    create_config(backend, "skipped")
    return backend


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
def reg(backend: MemoryBackend, open_registry: Open) -> Registry:
    return open_registry(backend)


@pytest.fixture
def run(reg: Registry):
    return reg.create_run("run", seed=1)


def small_state(i: int = 0) -> dict:
    """Return a state of two components, a few kB each, other ones for every `i`."""
    return {
        "model": {"w": np.arange(600, dtype=np.float32) + i, "b": np.full(100, 0.5 + i)},
        "optimizer": {"m": np.arange(900, dtype=np.int32) * 3 + i, "lr": 0.1, "step": i},
    }


def same(a: object, b: object) -> bool:
    """Return whether two states of dicts, arrays and plain values are equal, types included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    return a == b


def contents(backend: Backend, prefix: str = "") -> dict[str, bytes]:
    """Return every object of a store."""
    return {info.key: backend.get(info.key) for info in backend.list(prefix)}


def objects(backend: Backend) -> set[str]:
    """Return the keys of packs, manifests and placements."""
    return {key for key in contents(backend) if key.startswith(("packs/", "manifests/", "placem"))}


def flip(backend: Backend, key: str, bit: int = 100) -> None:
    """Invert one bit of an object, counted from its end where negative."""
    data = bytearray(backend.get(key))
    data[bit // 8] ^= 1 << bit % 8
    backend.put(key, bytes(data))


def packs_of(checkpoint) -> list[str]:
    return [str(pack.key) for pack in checkpoint._reader.placement.packs]


class Hooked(Wrapper):
    """A store that calls `before(method, key)` and `after(method, key)` around what it does."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.before: Callable[[str, str], object] = lambda method, key: None
        self.after: Callable[[str, str], object] = lambda method, key: None

    def get(self, key, byte_range=None, *, into=None):
        self.before("get", key)
        data = super().get(key, byte_range, into=into)
        self.after("get", key)
        return data

    def put(self, key, body):
        self.before("put", key)
        super().put(key, body)
        self.after("put", key)

    def put_if_absent(self, key, body):
        self.before("put_if_absent", key)
        created = super().put_if_absent(key, body)
        self.after("put_if_absent", key)
        return created


class Once:
    """Does something at the first call that fits, and never again."""

    def __init__(self, prefix: str, action: Callable[[], object], method: str = "") -> None:
        self.prefix, self.action, self.method = prefix, action, method
        self.done = False

    def __call__(self, method: str, key: str) -> None:
        if not self.done and key.startswith(self.prefix) and method.startswith(self.method):
            self.done = True
            self.action()


@contextmanager
def small_grid(chunk_bytes: int = 256, list_threshold: int = 256, pack_bytes: int | None = None):
    """Cut tensors finer, so that small ones have many chunks, digest lists and packs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(manifest, "LIST_THRESHOLD", list_threshold)
        patch.setattr(saving, "LIST_THRESHOLD", list_threshold)
        if pack_bytes is not None:
            patch.setattr(saving, "PACK_BYTES", pack_bytes)
        chunking.grid.cache_clear()
        try:
            yield
        finally:
            chunking.grid.cache_clear()
