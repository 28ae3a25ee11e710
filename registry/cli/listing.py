"""List several runs: a run that cannot be read is shown as damaged and does not hide the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from holdfast.registry.cli import output
from holdfast.registry.errors import NotFound, RegistryError, StoreUnavailable
from holdfast.registry.registries.registry import Registry
from holdfast.registry.runs.run import Run

_T = TypeVar("_T")


class Listing:
    """The runs of a registry, for a listing.

    Args:
        opened: The registry.

    Attributes:
        damaged: The errors of runs that cannot be read or described, by name.
    """

    def __init__(self, opened: Registry) -> None:
        self._opened = opened
        self.damaged: dict[str, RegistryError] = {}

    def runs(self) -> list[Run]:
        """Return the runs that can be read, opened several at once; name stray folders."""
        found = []
        names = self._opened.runs()
        for name, run in zip(
            names, self._opened.store.pools.bulk.map(self._open, names), strict=True
        ):
            if isinstance(run, NotFound):
                place = f"{self._opened.url}: runs/{name}"
                output.note(f"warning: {place} is no run; `holdfast verify` has more")
            elif isinstance(run, RegistryError):
                self._pass_over(name, run)
            else:
                found.append(run)
        return found

    def _open(self, name: str) -> Run | RegistryError:
        try:
            return self._opened.run(name)
        except RegistryError as error:
            return error

    def described(self, runs: Iterable[Run], describe: Callable[[Run], _T]) -> dict[str, _T]:
        """Describe each run, by name; a run that cannot be described counts as damaged."""
        found = {}
        for run in runs:
            try:
                found[run.id] = describe(run)
            except RegistryError as error:
                self._pass_over(run.id, error)
        return found

    def by_name(
        self, described: Mapping[str, _T], describe: Callable[[str, RegistryError], _T]
    ) -> list[_T]:
        """Return the descriptions of the runs and of the damaged ones, sorted by name."""
        damaged = {name: describe(name, error) for name, error in self.damaged.items()}
        return [
            one for _, one in sorted({**described, **damaged}.items(), key=lambda pair: pair[0])
        ]

    def _pass_over(self, name: str, error: RegistryError) -> None:
        if isinstance(error, StoreUnavailable):
            raise error  # the other runs would fail in the same way
        self.damaged[name] = error
