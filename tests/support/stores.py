"""Stores in memory with an empty registry, and what is in a store."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from holdfast import Stored
from holdfast.backends import Backend
from holdfast.backends.memory import MemoryBackend
from holdfast.registry.face.factory import open_on
from holdfast.registry.face.registry import Registry
from holdfast.registry.objects import chunking, tensor_entry
from holdfast.registry.objects.codecs import CODECS
from holdfast.registry.store.store import create_config
from holdfast.registry.writing import packing
from tests.support.inline import without_threads

Open = Callable[..., Registry]
_numbers = itertools.count(1)


class Scratch(MemoryBackend):
    """A store in memory with a URL of its own."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._url = f"memory://{name or f'scratch-{next(_numbers)}'}"

    @property
    def url(self) -> str:
        return self._url

    def copy(self) -> Scratch:
        """Return another store with the same objects."""
        other = Scratch()
        for key, data in contents(self).items():
            other.put(key, data)
        return other


def new_backend(name: str | None = None) -> Scratch:
    """Return a store that holds an empty registry; one with a name can be opened by its URL."""
    backend = Scratch(name)
    create_config(backend, "skipped")
    return backend


@contextmanager
def opened(backend: Backend) -> Iterator[Registry]:
    """Open a registry with nothing remembered from before."""
    registry = without_threads(open_on(backend))
    try:
        yield registry
    finally:
        registry.close()


def contents(backend: Backend, prefix: str = "") -> dict[str, bytes]:
    """Return every object of a store."""
    return {info.key: backend.get(info.key) for info in backend.list(prefix)}


def bytes_in(backend: Backend, prefix: str = "") -> int:
    """Return the bytes of the objects of a store whose keys begin with a prefix."""
    return sum(map(len, contents(backend, prefix).values()))


def bytes_read(calls: list[Any]) -> int:
    """Return the bytes that the calls of a `Metered` store have read from packs."""
    read = [call for call in calls if call.method == "get" and call.key.startswith("packs/")]
    return sum(len(call.byte_range) for call in read)


def objects(backend: Backend) -> set[str]:
    """Return the keys of packs, manifests and placements."""
    return {key for key in contents(backend) if key.startswith(("packs/", "manifests/", "placem"))}


def packs(backend: Backend) -> set[str]:
    """Return the keys of packs."""
    return {info.key for info in backend.list("packs/")}


def packs_of(checkpoint: Stored) -> list[str]:
    return [str(pack.key) for pack in checkpoint.handle.reader.placement.packs]


@contextmanager
def small_grid(
    chunk_bytes: int = 256, list_threshold: int = 256, pack_bytes: int | None = None
) -> Iterator[None]:
    """Cut tensors finer, so that small ones have many chunks, digest lists and packs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(tensor_entry, "LIST_THRESHOLD", list_threshold)
        patch.setattr(packing, "LIST_THRESHOLD", list_threshold)
        if pack_bytes is not None:
            patch.setattr(packing, "PACK_BYTES", pack_bytes)
        chunking.grid.cache_clear()
        try:
            yield
        finally:
            chunking.grid.cache_clear()


def slots(backend: Backend, run_id: str = "run") -> dict[str, bytes]:
    """Return the slots of a run's log."""
    return contents(backend, f"runs/{run_id}/log/")


def needed(registry: Registry) -> set[str]:
    """Return the objects that places of what is held name, by way of the public face alone."""
    keys: set[str] = set()
    for name in registry.run_names():
        state = registry.run(name).manifest
        for digest in state.held:
            place = state.by_manifest[digest]
            keys |= {str(place.manifest_key), str(place.placement_key)}
            keys |= {
                str(pack.key) for pack in registry.handle.store.placement(place.placement_key).packs
            }
    return keys


def codecs_of(checkpoint: Stored) -> set[str]:
    """Return the codecs of a checkpoint's chunks."""
    return {CODECS[row.codec] for row in checkpoint.handle.reader.placement.rows}


def commit_lines(backend: Backend, run_id: str = "") -> list[bytes]:
    """Return the lines of the commits of a run, or of all runs."""
    logs = contents(backend, f"runs/{run_id}/log/" if run_id else "runs/")
    lines = [line for key, data in logs.items() if "/log/" in key for line in data.splitlines()]
    return [line for line in lines if b'"kind":"commit"' in line]


def kind_of(key: str) -> str:
    """Return the kind of an object: `log` and `snapshots` of a run, otherwise its first folder."""
    parts = key.split("/")
    return parts[2] if parts[0] == "runs" and len(parts) > 2 else parts[0]
