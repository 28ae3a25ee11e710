"""An error as a page shows it: the view goes on without what could not be read."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.registry.errors import RegistryError


@dataclass(frozen=True, slots=True)
class Trouble:
    """What could not be read.

    Attributes:
        what: The problem, with its place.
        hint: The next step; `None` if there is none.
    """

    what: str
    hint: str | None


def trouble_of(error: RegistryError) -> Trouble:
    """Return an error for a page."""
    return Trouble(error.summary, error.hint)
