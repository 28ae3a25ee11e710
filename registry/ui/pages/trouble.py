"""Errors for pages: a view shows the rest without the part that could not be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from holdfast.registry.errors import RegistryError, StoreUnavailable

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that could not be read, for the page to show."""

    what: str  # the problem, with its place
    hint: str | None  # the next step; `None` if there is none


def trouble_of(error: RegistryError) -> Trouble:
    """Return an error for a page."""
    return Trouble(error.summary, error.cli_hint)


def tried(read: Callable[[], _T], troubles: list[Trouble]) -> _T | None:
    """Call a function that reads. If reading fails, note the trouble and return `None`."""
    try:
        return read()
    except StoreUnavailable:
        raise
    except RegistryError as error:
        troubles.append(trouble_of(error))
        return None
