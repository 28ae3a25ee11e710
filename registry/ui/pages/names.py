"""The latest releases, the tags and the labels of all runs: what is in production."""

from __future__ import annotations

import time
from concurrent.futures import wait
from dataclasses import dataclass

from holdfast.registry.curation import Naming
from holdfast.registry.errors import NotFound
from holdfast.registry.history import step_ref
from holdfast.registry.ui.pages.view import Asked, Shown, Trouble, View, tried, trouble_of
from holdfast.registry.ui.source import FRESH_S, Source

#: Rows at most.
_MOST = 1000


@dataclass(frozen=True, slots=True)
class NamesPage:
    """The names of all runs."""

    #: Each name with its checkpoint within the run, if that is kept; releases first, then the
    #: newest first.
    rows: tuple[tuple[Naming, str], ...]
    total: int  # names in all
    pending: int  # runs that are still being read
    troubles: tuple[Trouble, ...] = ()  # the runs that could not be read


def read_names(source: Source, *, within_s: float | None = None) -> NamesPage:
    """Return the names of all runs.

    The requests of opening each run, and for one with a name its newest slots, back to the one that
    set the name.
    """
    until = None if within_s is None else time.monotonic() + within_s
    opened = source.runs(source.names(max_age_s=0 if until is None else FRESH_S), within_s)
    readings = {name: source.begin_namings(run) for name, run in opened.runs.items()}
    wait(readings.values(), None if until is None else max(0, until - time.monotonic()))
    troubles = [trouble_of(one) for one in opened.failed.values() if not isinstance(one, NotFound)]
    rows = []
    for name, reading in readings.items():
        found = tried(reading.result, troubles) if reading.done() else None
        kept = opened.runs[name].manifest.by_n
        for one in found.found if found else ():
            at = None if one.pin is None else one.pin.checkpoint
            rows.append((one, step_ref(kept[at]) if at is not None and at in kept else ""))
    rows.sort(
        key=lambda row: (("release", "tag", "label").index(row[0].kind), -(row[0].time_ms or 0))
    )
    pending = len(opened.pending) + sum(not one.done() for one in readings.values())
    return NamesPage(tuple(rows[:_MOST]), len(rows), pending, tuple(troubles))


def _ask(source: Source, asked: Asked) -> Shown:
    found = read_names(source, within_s=asked.within_s)
    return Shown("Names", found, found.troubles, is_partial=found.pending > 0)


VIEW = View("names", "Names", "/names", "names.html", _ask, place="registry")
