"""The ways in which a command opens a registry: to read, to write, or with a bar of its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from holdfast.backends.wrappers import Watched
from holdfast.registry.cli import progress
from holdfast.registry.cli.options import STORAGE_OPTION
from holdfast.registry.factory import open, open_on  # noqa: A004
from holdfast.registry.registry import Registry
from holdfast.registry.storage.connecting import Address
from holdfast.registry.storage.heads import open_heads
from holdfast.registry.storage.option_texts import VARIABLE, from_pairs


def address_of(url: str, given: Sequence[str] | None, *, side: str = "") -> Address:
    """Return the address of a registry.

    Args:
        url: Its URL.
        given: Storage options from the command line; they count more than the environment.
        side: What distinguishes the registry from others of the command, in the names of the
            option and the variable.
    """
    prefix = f"--{side}-" if side else "--"
    options = from_pairs(given or (), STORAGE_OPTION.replace("--", prefix))
    own = [VARIABLE.replace("_", f"_{side.upper()}_", 1)] if side else []
    return Address.of_environment(url, options, [*own, VARIABLE])


def opened_at(address: Address, *, read_only: bool) -> Registry:
    """Open the registry at an address."""
    return open(address.url, storage_options=address.storage_options, read_only=read_only)


def reads(address: Address, *, dry_run: bool) -> Registry:  # noqa: ARG001 - it reads in any case
    """Open a registry for reading."""
    return opened_at(address, read_only=True)


def writes(address: Address, *, dry_run: bool) -> Registry:
    """Open a registry for writing; a dry run only reads."""
    return opened_at(address, read_only=dry_run)


def moves(label: str) -> Callable[..., AbstractContextManager[Registry]]:
    """Return a way to open a registry for writing that shows the bytes to and from the store."""

    @contextmanager
    def opened(address: Address, *, dry_run: bool) -> Iterator[Registry]:  # noqa: ARG001
        with progress.bar(label) as advance:
            store = address.open()
            heads = open_heads(address.location(store))
            with open_on(Watched(store, advance), heads=heads) as registry:
                yield registry

    return opened
