"""Sources over stores in memory, as the pages hold them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.backends import Backend
from holdfast.backends.wrappers import Metered, ReadOnly
from holdfast.registry.face.factory import open_on
from holdfast.registry.ui.source import Source


@contextmanager
def source_of(backend: Backend) -> Iterator[Source]:
    """Open a source that remembers nothing and cannot write."""
    meter = Metered(ReadOnly(backend))
    source = Source(open_on(meter), meter)
    try:
        yield source
    finally:
        source.close()
