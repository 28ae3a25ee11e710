"""A registry without threads: thousands of them can be opened in a test, each in one order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, cast

from holdfast.registry.face.registry import Registry
from holdfast.registry.store.threads import Pools


class Inline(Executor):
    """An executor without threads."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class InlinePools:
    """Stands in for `holdfast.registry.store.threads.Pools`."""

    def __init__(self) -> None:
        self.hashing = self.copying = self.bulk = self.small = self.runs = Inline()

    def close(self) -> None:
        """Do nothing: there is nothing to stop."""


def without_threads(registry: Registry) -> Registry:
    """Let a registry do all its work in the caller's thread."""
    registry.handle.store.pools.close()
    registry.handle.store.pools = cast("Pools", InlinePools())
    return registry
