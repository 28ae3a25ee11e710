"""The ways in which a command opens a registry: to read, to write, or with a bar of its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing, contextmanager
from typing import Any

import typer

from holdfast.backends.errors import install_extra
from holdfast.backends.wrappers import Watched
from holdfast.registry.cli import output
from holdfast.registry.cli.options import STORAGE_OPTION, option
from holdfast.registry.cli.output import Bar
from holdfast.registry.errors import InvalidInput, RegistryError, WorkersFailed
from holdfast.registry.face import (
    Registry,
    open,  # noqa: A004
    open_on,
)
from holdfast.registry.saving.journal import choose_journal
from holdfast.registry.store import VARIABLE, Address, from_pairs
from holdfast.registry.store.heads import open_heads
from holdfast.registry.values import HERE


def address_of(url: str | None, given: Sequence[str] | None, *, side: str = "") -> Address:
    """Return the address of a registry."""
    if url is None:
        raise typer.BadParameter("no URL: give one here, by -r or in HOLDFAST_REGISTRY")
    prefix = f"--{side}-" if side else "--"
    options = from_pairs(given or (), STORAGE_OPTION.replace("--", prefix))
    own = [VARIABLE.replace("_", f"_{side.upper()}_", 1)] if side else []
    return Address.of_environment(url, options, [*own, VARIABLE])


def opened_at(address: Address, *, read_only: bool) -> Registry:
    """Open the registry at an address."""
    return open(address.url, storage_options=address.storage_options, read_only=read_only)


def reads(address: Address, bar: Bar, *, dry_run: bool) -> Registry:  # noqa: ARG001
    """Open a registry for reading."""
    return _watched(opened_at(address, read_only=True), bar)


def writes(address: Address, bar: Bar, *, dry_run: bool) -> Registry:
    """Open a registry for writing; a dry run only reads."""
    return _watched(opened_at(address, read_only=dry_run), bar)


def _watched(registry: Registry, bar: Bar) -> Registry:
    """Let a bar tell what is listed and read before the work that it counts begins."""
    if bar.is_shown:
        store = registry.handle.store
        store.backend = Watched(store.backend, bar.reads, bar.lists)
    return registry


@contextmanager
def moves(address: Address, bar: Bar, *, dry_run: bool) -> Iterator[Registry]:
    """Open a registry for writing; the bar shows the bytes to and from its store."""
    if dry_run:
        with opened_at(address, read_only=True) as registry:
            yield registry
        return
    store = address.open()
    heads = open_heads(address.location(store))
    with open_on(Watched(store, bar), heads=heads) as registry:
        yield registry


@contextmanager
def exported(given: Mapping[str, Any]) -> Iterator[None]:
    """Show the figures of this process while a command runs, and its failure."""
    if given["metrics"] is None:
        yield
        return
    from holdfast.registry.face import Export

    journal = choose_journal(given.get("journal"))
    with closing(Export(given["metrics"], runs=given["metrics_runs"], journal=journal)) as export:
        if export.url is not None:
            output.note(f"metrics: {export.url}")
        try:
            yield
        except RegistryError as error:
            HERE.fail(error, "command")
            raise


DASK = option(
    "--dask", "ADDRESS", "Let the workers of a Dask cluster do it, such as tcp://HOST:8786."
)

SHARD = option(
    "--shard", "I/N", "Only this one of N parts of the objects: each may be on its own machine."
)

_ANSWERS_WITHIN_S = 10


@contextmanager
def workers_at(address: str | None) -> Iterator[Executor | None]:
    """Connect to a Dask scheduler while the block runs; without an address there is no executor."""
    if address is None:
        yield None
        return
    try:
        from distributed import Client
        from distributed.comm import get_address_host_port
    except ModuleNotFoundError as error:
        if error.name != "distributed":
            raise
        raise InvalidInput(
            "Dask is not installed",
            where="--dask",
            hint=install_extra("dask"),
        ) from error
    hint = "`dask scheduler` prints the address to give here."
    try:
        get_address_host_port(address)  # a client of a wrong address would wait for it at its end
        client = Client(address, set_as_default=False, timeout=_ANSWERS_WITHIN_S)
    except ValueError as error:
        raise InvalidInput(
            "not an address", where="--dask", expected="tcp://HOST:PORT", found=address, hint=hint
        ) from error
    except OSError as error:
        raise WorkersFailed(
            "no scheduler of Dask answers", where=f"--dask {address}", found=error, hint=hint
        ) from error
    with client:
        yield client.get_executor()
