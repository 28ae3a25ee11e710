"""List several runs: a run that cannot be read is shown as damaged and does not hide the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from holdfast.registry.cli import output
from holdfast.registry.errors import NotFound, RegistryError, StoreUnavailable
from holdfast.registry.history import Made, Summaries

if TYPE_CHECKING:
    from holdfast.registry.face import Registry, Run
    from holdfast.registry.history import RunLog
    from holdfast.registry.tables import RunChoice

_T = TypeVar("_T")


def log_of(opened: Registry, run: str) -> RunLog:
    """Return the log of a run, to read it: a `Run` comes with all that a save needs."""
    return opened.handle.open_copy(run) or opened.handle.open_log(run)


class Listing:
    """The runs of a registry, for a listing."""

    def __init__(self, opened: Registry) -> None:
        self._opened = opened
        #: The errors of runs that cannot be read or described, by name.
        self.damaged: dict[str, RegistryError] = {}
        self.notes: list[str] = []

    def runs(self, names: Sequence[str] | None = None) -> list[Run]:
        """Return the runs that can be read, opened several at once; name stray folders."""
        found = []
        names = self._opened.run_names() if names is None else names
        for name, run in zip(
            names, self._opened.handle.store.pools.bulk.map(self._open, names), strict=True
        ):
            if isinstance(run, RegistryError):
                self._pass_over(name, run)
            else:
                found.append(run)
        return found

    def summaries(
        self,
        describe: Callable[[Run], Mapping[str, Any]],
        form: int,
        *,
        max_age_s: float = 0,
        kind: Literal["rows", "times"] = "rows",
    ) -> dict[str, Mapping[str, Any]]:
        """Return the result of `describe` for each run that can be read, by name.

        That is JSON with the `fields` of the run, and is kept on this machine: a run that did not
        change is not opened again.
        """
        from holdfast.registry.face import Run  # it comes with all that a save needs

        handle = self._opened.handle

        def make(name: str, log: RunLog | None) -> Made:
            run = Run(handle.run_handle(log)) if log and not handle.journal else self._open(name)
            if isinstance(run, RegistryError):
                return Made(run)
            try:
                return Made(describe(run), run.handle.log)
            except RegistryError as error:
                return Made(error)

        # Neither a log nor a note says what a journal has of its run.
        heads = handle.store.heads if handle.journal is None else None
        kept = Summaries(handle.store, heads, kind, form)
        read = kept.read(self._opened.run_names(), make, max_age_s=max_age_s)
        if kept.oldest_ms is not None:
            listed = output.counted(kept.unasked, "run")
            self.notes.append(f"{listed} as of {output.time(kept.oldest_ms)} or later")
        for name, one in read.items():
            if isinstance(one, RegistryError):
                self._pass_over(name, one)
        return {name: one for name, one in read.items() if isinstance(one, Mapping)}

    def _open(self, name: str) -> Run | RegistryError:
        try:
            return self._opened.run(name)
        except RegistryError as error:
            return error

    def chosen(
        self, summaries: Mapping[str, Mapping[str, Any]], choice: RunChoice
    ) -> list[Mapping[str, Any]]:
        """Return the summaries of a choice; forget the damaged runs that it does not have."""
        from holdfast.registry.tables import RunChoice, damaged_fields, fields_of

        if choice == RunChoice():
            return list(summaries.values())
        rows = [fields_of(one["fields"]) for one in summaries.values()]
        rows += [damaged_fields(name, error) for name, error in self.damaged.items()]
        kept = {str(row["run"]) for row in choice.of(rows)}
        self.damaged = {name: error for name, error in self.damaged.items() if name in kept}
        return [one for name, one in summaries.items() if name in kept]

    def described(self, runs: Iterable[Run], describe: Callable[[Run], _T]) -> dict[str, _T]:
        """Describe each run, by name; a run that cannot be described counts as damaged."""
        found = {}
        for run in runs:
            try:
                found[run.id] = describe(run)
            except RegistryError as error:
                self._pass_over(run.id, error)
        return found

    def _pass_over(self, name: str, error: RegistryError) -> None:
        if isinstance(error, StoreUnavailable):
            raise error  # the other runs would fail in the same way
        if isinstance(error, NotFound):
            place = f"{self._opened.url}: runs/{name}"
            output.note(f"warning: {place} is no run; `holdfast verify` has more")
        else:
            self.damaged[name] = error


# Sparklines: how a number changed, as a word.


_BARS = "▁▂▃▄▅▆▇█"
_CROSS = "×"
#: The most characters of a sparkline.
_WIDTH = 16


def sparkline(values: Sequence[float | None]) -> str:
    """Return a bar for each value, or for the mean of several.

    Where none is finite it has a cross, and where there is none at all a space.
    """
    count = min(len(values), _WIDTH)
    bounds = [len(values) * i // count for i in range(count + 1)] if count else []
    parts = [values[a:b] for a, b in pairwise(bounds)]
    means = [_mean(part) for part in parts]
    known = [one for one in means if one is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    return "".join(
        (_CROSS if there(part) else " ") if one is None else _bar(one, low, high)
        for one, part in zip(means, parts, strict=True)
    ).rstrip()


def there(values: Iterable[float | None]) -> list[float]:
    """Return the values that there are."""
    return [one for one in values if one is not None]


def finite(values: Iterable[float | None]) -> list[float]:
    """Return the values that there are, without NaN and infinity."""
    return [one for one in there(values) if math.isfinite(one)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = finite(values)
    return math.fsum(one / len(known) for one in known) if known else None


def _bar(value: float, low: float, high: float) -> str:
    # Halves, since the difference of two finite numbers may be infinite.
    extent = high / 2 - low / 2
    share = (value / 2 - low / 2) / extent if extent else 0.5
    return _BARS[min(int(share * len(_BARS)), len(_BARS) - 1)]
