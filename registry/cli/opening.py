"""Opening a registry for a command, with a bar for what it moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from backends import open_backend, parse
from registry.cli import progress
from registry.heads import recall
from registry.registry import Registry, open_on


@contextmanager
def watched(url: str, label: str) -> Iterator[Registry]:
    """Open a registry; a terminal shows how many bytes have gone in and out."""
    with progress.bar(label) as advance:
        backend = progress.Watched(open_backend(url), advance)
        with open_on(backend, heads=recall(parse(url))) as registry:
            yield registry
