"""The ways in which a command opens a registry: to read, to write, or with a bar of its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

from holdfast.backends.wrappers import Watched
from holdfast.registry.cli.options import STORAGE_OPTION
from holdfast.registry.cli.progress import Bar
from holdfast.registry.registries.factory import open, open_on  # noqa: A004
from holdfast.registry.registries.registry import Registry
from holdfast.registry.storage.address import Address
from holdfast.registry.storage.heads import open_heads
from holdfast.registry.storage.option_texts import VARIABLE, from_pairs


def address_of(url: str | None, given: Sequence[str] | None, *, side: str = "") -> Address:
    """Return the address of a registry.

    Args:
        url: Its URL, if the command line or the environment has one.
        given: Storage options from the command line; they count more than the environment.
        side: What distinguishes the registry from others of the command, in the names of the
            option and the variable.

    Raises:
        BadParameter: There is no URL.
    """
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
    return opened_at(address, read_only=True)


def writes(address: Address, bar: Bar, *, dry_run: bool) -> Registry:  # noqa: ARG001
    """Open a registry for writing; a dry run only reads."""
    return opened_at(address, read_only=dry_run)


@contextmanager
def moves(address: Address, bar: Bar, *, dry_run: bool) -> Iterator[Registry]:  # noqa: ARG001
    """Open a registry for writing; the bar shows the bytes to and from its store."""
    store = address.open()
    heads = open_heads(address.location(store))
    with open_on(Watched(store, bar), heads=heads) as registry:
        yield registry
