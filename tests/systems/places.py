"""Where the stories happen: a folder and a bucket, and what can befall them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import registry
from backends import Backend, open_backend
from backends.wrappers.faulty import Fault, Faulty, InjectedCrash
from registry.keys import KINDS
from registry.registry import Registry, open_on
from registry.stored import Stored


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
        registry.init(place.url, skip_race_probe=True).close()
        return place

    def open(self) -> Registry:
        """Open the registry as a process does that remembers nothing."""
        return registry.open(self.url)

    @contextmanager
    def backend(self) -> Iterator[Backend]:
        """Open the store beneath the registry."""
        backend = open_backend(self.url)
        try:
            yield backend
        finally:
            backend.close()

    def copy(self) -> Place:
        """Return a copy of the store, byte for byte."""
        other = Place(self.fresh(), self.fresh)
        if not self.url.startswith("s3://"):
            shutil.copytree(self.url, other.url)  # without the syncs of thousands of puts
            return other
        with self.backend() as source, other.backend() as target:
            for info in source.list():
                target.put(info.key, source.get(info.key))
        return other

    def size_bytes(self) -> int:
        """Return the bytes of all objects."""
        with self.backend() as backend:
            return sum(info.size_bytes for info in backend.list())

    def damage(self, key: str) -> None:
        """Invert one bit in the middle of an object."""
        with self.backend() as backend:
            data = bytearray(backend.get(key))
            data[len(data) // 2] ^= 1
            backend.put(key, bytes(data))

    def objects(self) -> set[str]:
        """Return the keys of packs, manifests and placements."""
        with self.backend() as backend:
            return {info.key for kind in KINDS for info in backend.list(f"{kind}/")}

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


def packs_of(stored: Stored) -> set[str]:
    """Return the keys of the packs that a state needs."""
    return {str(pack.key) for pack in stored.placement.packs}


def own_packs(stored: Stored, others: Sequence[Stored]) -> list[str]:
    """Return the keys of the packs that a state shares with none of the others."""
    shared: set[str] = set().union(*(packs_of(other) for other in others), set())
    return sorted(packs_of(stored) - shared)
