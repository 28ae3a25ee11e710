"""Several runs told of together: one that cannot be read is shown as damaged and hides no other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import typer

from registry.cli import output
from registry.errors import IntegrityError, NotFound, RegistryError, StoreUnavailable
from registry.registry import Registry
from registry.run import Run

DAMAGED = "damaged"
_VERIFY = "`holdfast verify` tells what is affected and what to do."

_T = TypeVar("_T")


class Listing:
    """The runs of a registry, told of one by one.

    Args:
        opened: The registry.

    Attributes:
        damaged: What is wrong with runs that cannot be read, or not be told of, by name.
    """

    def __init__(self, opened: Registry) -> None:
        self._opened = opened
        self.damaged: dict[str, RegistryError] = {}

    def runs(self) -> list[Run]:
        """Return the runs that can be read; a stray folder among them is named on stderr."""
        found = []
        for name in self._opened.runs():
            try:
                found.append(self._opened.run(name))
            except NotFound:
                place = f"{self._opened.url}: runs/{name}"
                output.note(f"warning: {place} is no run; `holdfast verify` has more")
            except RegistryError as error:
                self._pass_over(name, error)
        return found

    def told(self, runs: Iterable[Run], tell: Callable[[Run], _T]) -> dict[str, _T]:
        """Return what is to be told of each run by name; one of which nothing can be is damaged."""
        found = {}
        for run in runs:
            try:
                found[run.id] = tell(run)
            except RegistryError as error:
                self._pass_over(run.id, error)
        return found

    def _pass_over(self, name: str, error: RegistryError) -> None:
        if isinstance(error, StoreUnavailable):
            raise error  # of the other runs nothing would be told either
        self.damaged[name] = error

    def finish(self) -> None:
        """End the command with the status of damage, where there is any."""
        end(self.damaged)


def end(damaged: Mapping[str, RegistryError]) -> None:
    """Tell of runs that could not be read on stderr, and end the command with a status for it.

    Raises:
        Exit: There are any. The status is that of damage, or of the first error where none is that.
    """
    for name, error in damaged.items():
        output.note(f"damaged: {name}: {error.summary}")
    if damaged:
        for hint in dict.fromkeys(error.hint or _VERIFY for error in damaged.values()):
            output.note(f"hint: {hint}")
        codes = [error.exit_code for error in damaged.values()]
        damage = IntegrityError.exit_code
        raise typer.Exit(damage if damage in codes else codes[0])
