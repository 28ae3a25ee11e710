"""Completion of runs, refs, components and presets in a shell: read-only, quick and silent."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import typer

from holdfast.backends import parse
from holdfast.registry.store import Address
from holdfast.registry.store.heads import open_heads

if TYPE_CHECKING:  # the other commands import this module too
    from holdfast.registry.face import Registry

#: The longest time that names are looked for.
_LIMIT_S: Final = 0.3

Names = Callable[[typer.Context, str], list[str]]


def _offering(find: Callable[[typer.Context, str], Iterator[str] | list[str]]) -> Names:
    """Return a completion that offers nothing where names are not found in time, or at all."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        with suppress(Exception), _in_time():
            return [name for name in find(ctx, incomplete) if name.startswith(incomplete)]
        return []

    return complete


@contextmanager
def _in_time() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, _LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _opened(ctx: typer.Context) -> Registry:
    """Open the registry of a command line, if it is a folder; no head is noted."""
    from holdfast.registry.face import open_on

    return open_on(Address(_url(ctx)).open())


def _url(ctx: typer.Context) -> Any:
    return ctx.params.get("url") or ctx.params["registry"]


def _runs(ctx: typer.Context) -> list[str]:
    """Return the runs in a folder; of a bucket those that this machine remembers."""
    place = parse(_url(ctx))
    if place.scheme == "file":
        return _opened(ctx).run_names()
    return sorted(heads.all()) if (heads := open_heads(place)) else []


def _refs(ctx: typer.Context, incomplete: str) -> Iterator[str]:
    from holdfast.registry.face import refs_of

    run, slash, _ = incomplete.partition("/")
    if not slash:
        yield from _runs(ctx)
    elif parse(_url(ctx)).scheme == "file":
        yield from (f"{run}/{path}" for path in refs_of(_opened(ctx).run(run).manifest))
    else:
        yield from (f"{run}/latest", f"{run}/best")


def _components(ctx: typer.Context, _: str) -> list[str]:
    if parse(_url(ctx)).scheme != "file":
        return []
    # An option that still lacks its value leaves the arguments before it unread.
    ref = ctx.params.get("ref") or ctx.args[0]
    return list(_opened(ctx).stored(ref).components)


def _presets(*_: Any) -> list[str]:
    from holdfast.registry.spec.presets import preset_names

    return preset_names()


RUNS = _offering(lambda ctx, _: _runs(ctx))
REFS = _offering(_refs)
COMPONENTS = _offering(_components)
PRESETS = _offering(_presets)
