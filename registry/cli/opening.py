"""The ways in which a command opens a registry: to read, to write, or with a bar of its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from holdfast.backends import open_backend, parse
from holdfast.registry.cli import progress
from holdfast.registry.factory import open, open_on  # noqa: A004
from holdfast.registry.registry import Registry
from holdfast.registry.storage.heads import open_heads


def reads(url: str, *, dry_run: bool) -> Registry:  # noqa: ARG001 - it reads in any case
    """Open a registry for reading."""
    return open(url, read_only=True)


def writes(url: str, *, dry_run: bool) -> Registry:
    """Open a registry for writing; a dry run only reads."""
    return open(url, read_only=dry_run)


def moves(label: str) -> Callable[..., AbstractContextManager[Registry]]:
    """Return a way to open a registry for writing that shows the bytes to and from the store."""

    @contextmanager
    def opened(url: str, *, dry_run: bool) -> Iterator[Registry]:  # noqa: ARG001
        with progress.bar(label) as advance:
            backend = progress.Watched(open_backend(url), advance)
            with open_on(backend, heads=open_heads(parse(url))) as registry:
                yield registry

    return opened
