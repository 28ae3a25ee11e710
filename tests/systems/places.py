"""Where the stories happen: a folder and a bucket, and what can befall them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pytest

import holdfast
from holdfast import Registry
from holdfast.backends import Backend, open_backend
from holdfast.backends.wrappers.faulty import Fault, Faulty, InjectedCrash
from holdfast.registry import pytree
from holdfast.registry.face.factory import open_on
from holdfast.registry.loading.stored import Stored


@dataclass(frozen=True)
class Place:
    """A registry in a folder or a bucket.

    Attributes:
        url: Where it is.
        fresh: Makes the URL of another place of the same kind.
    """

    url: str
    fresh: Callable[[], str] = field(repr=False)

    @classmethod
    def new(cls, fresh: Callable[[], str]) -> Place:
        """Make an empty registry."""
        place = cls(fresh(), fresh)
        holdfast.init(place.url, skip_race_probe=True).close()
        return place

    def open(self) -> Registry:
        """Open the registry as a process does that remembers nothing."""
        return holdfast.open(self.url)

    @contextmanager
    def backend(self) -> Iterator[Backend]:
        """Open the store beneath the registry."""
        backend = open_backend(self.url)
        try:
            yield backend
        finally:
            backend.close()

    def copy(self) -> Place:
        """Return a copy of a folder, byte for byte."""
        other = Place(self.fresh(), self.fresh)
        shutil.copytree(self.url, other.url)
        return other

    def size_bytes(self) -> int:
        """Return the bytes of all objects."""
        with self.backend() as backend:
            return sum(info.size_bytes for info in backend.list())

    def damage(self, key: str, byte: int | None = None) -> None:
        """Invert a bit of a byte of an object, of the one in its middle where none is named."""
        with self.backend() as backend:
            data = bytearray(backend.get(key))
            data[len(data) // 2 if byte is None else byte] ^= 1
            backend.put(key, bytes(data))

    def damage_tensor(self, stored: Stored, path: str) -> None:
        """Invert a bit of a tensor of a state, in whichever pack it is."""
        part, placement = (
            stored.manifest.components[path.split("/")[0]],
            stored.handle.reader.placement,
        )
        paths = pytree.leaf_paths(path.split("/")[0], part.skeleton)
        (index,) = (number for number, found in paths.items() if found == path)
        rows = list(stored.manifest.all_chunks(stored.handle.reader.base().lists))
        row = placement.rows[rows.index(part.tensors[index].chunks[0])]
        self.damage(str(placement.packs[row.pack].key), row.offset)

    def dies(self, act: Callable[[Registry], object], at: int, after: bool) -> bool:
        """Let a process die at its `at`-th write; return whether it lived to make one.

        Args:
            act: What the process does.
            at: From 1.
            after: Whether that write still has its effect.
        """
        faulty = Faulty(open_backend(self.url), [Fault(at, after=after)])
        reg = open_on(faulty)
        try:
            act(reg)
        except InjectedCrash:
            return True
        finally:
            with suppress(InjectedCrash):
                reg.close()
        return False

    def dies_at_each_write(self, act: Callable[[Registry], object]) -> int:
        """Let processes die at one write after another, the even ones behind it; count them."""
        write = 1
        while self.dies(act, write, after=write % 2 == 0):
            write += 1
        return write - 1


def packs_of(stored: Stored) -> set[str]:
    """Return the keys of the packs that a state needs."""
    return {str(pack.key) for pack in stored.handle.reader.placement.packs}


def own_packs(stored: Stored, others: Sequence[Stored]) -> list[str]:
    """Return the keys of the packs that a state shares with none of the others."""
    shared: set[str] = set().union(*(packs_of(other) for other in others), set())
    return sorted(packs_of(stored) - shared)


#: For what needs a copy of a registry, which takes long in a bucket.
in_a_folder = pytest.mark.parametrize("fresh", ["folder"], indirect=True)
