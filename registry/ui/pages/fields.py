"""Fields of runs, named as in a filter: chosen as columns, grouped by, and drawn as axes."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.registry.values import number

#: The fields of a run by name, of `run_fields`.
Fields = Mapping[str, object]
#: Columns of one table at most, and of those that nobody chose.
MOST_COLUMNS = 16
_UNASKED = 4
#: Names that are offered of each kind, and groups that are shown, at most.
_MOST_CHOICES = 200
_MOST_GROUPS = 50
#: Axes of each kind that charts of fields offer, at most.
_MOST_AXES = 40
#: Beginnings of names of metrics, and how a heading says them.
METRIC_KINDS = {"metrics.": "at best", "last.": "last", "min.": "lowest", "max.": "highest"}
#: Beginning of names of the configuration.
CONFIG = "config."


@dataclass(frozen=True, slots=True)
class Choices:
    """The fields that a page offers."""

    config: tuple[str, ...]  # keys of the configurations, each after `config.`
    metrics: tuple[str, ...]  # names of metrics


def choices_of(rows: Iterable[Fields]) -> Choices:
    """Return all possible columns."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    config = [name for name in names if name.startswith(CONFIG)]
    metrics = [name.removeprefix("last.") for name in names if name.startswith("last.")]
    return Choices(tuple(config[:_MOST_CHOICES]), tuple(sorted(metrics)[:_MOST_CHOICES]))


def differing(rows: Sequence[Fields], most: int = _UNASKED) -> tuple[str, ...]:
    """Return the first keys of the configurations that have several values in these runs."""
    found: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(CONFIG) and value is not None:
                found.setdefault(name, set()).add(text_of(value))
    return tuple(name for name, values in found.items() if len(values) > 1)[:most]


def heading(name: str, metrics: Collection[str] = ()) -> str:
    """Return a field as the heading of a column: `lr`, `val/loss last`.

    A key of the configuration that one of these metrics is called, too, says that it is one.
    """
    for beginning, kind in METRIC_KINDS.items():
        if name.startswith(beginning):
            return f"{name.removeprefix(beginning)} {kind}"
    key = name.removeprefix(CONFIG)
    return f"{key} (config)" if key in metrics else key


def text_of(value: object) -> str:
    """Return a field as text."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case int():
            return f"{value:,}"
        case float():
            return number(value)
        case tuple() | list():
            return ", ".join(map(str, value))
    return str(value)


def space_of(
    rows: Sequence[tuple[str, Fields]], best: str
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the fields that can be axes, and the runs by them, as JSON for the page.

    `best` is the metric of the best values, and empty if these runs have several.
    """
    config = differing([fields for _, fields in rows], _MOST_AXES)
    known = choices_of(fields for _, fields in rows)
    kinds = [start + name for name in known.metrics for start in METRIC_KINDS]
    names = [*config, *(("best",) if best else ()), *kinds[:_MOST_AXES], "latest_step"]
    names = [
        name for name in names if any(_axis_value(one.get(name)) is not None for _, one in rows)
    ]
    labels = {name: heading(name, known.metrics) for name in names}
    labels |= {"best": f"best {best}", "latest_step": "latest step"}
    return tuple(names), {
        "best": best and "best",
        "axes": [*config[:6], *(["best"] if best else [])],
        "x": names[0] if names else "",
        "y": next((name for name in names if name in ("best", *kinds)), "latest_step"),
        "fields": [{"name": name, "label": labels[name]} for name in names],
        "runs": [
            {"name": run, "values": {name: _axis_value(fields.get(name)) for name in names}}
            for run, fields in rows
        ],
    }


def _axis_value(value: object) -> float | str | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value if math.isfinite(value) else None
    return None if value is None else text_of(value)[:80]


def band_of(
    curves: Iterable[tuple[str, Mapping[int, float]]],
) -> Iterator[tuple[str, int, list[tuple[int, float, float]]]]:
    """Yield each group of curves, its size, and step, mean and deviation of its values."""
    found: dict[str, list[Mapping[int, float]]] = {}
    for group, values in curves:
        found.setdefault(group, []).append(values)
    for group, some in sorted(found.items(), key=lambda pair: _natural(pair[0])):
        points = []
        for step in sorted({step for values in some for step in values}):
            present = [v for values in some if (v := values.get(step)) is not None]
            finite = [value for value in present if math.isfinite(value)]
            if finite:
                spread = statistics.stdev(finite) if len(finite) > 1 else 0.0
                points.append((step, statistics.fmean(finite), spread))
        yield group, len(some), points


def _natural(text: str) -> tuple[float, str]:
    """Return the key that sorts texts of numbers as numbers, before all others."""
    try:
        return float(text.replace(",", "")), text
    except ValueError:
        return math.inf, text


def condition(name: str, value: object) -> str:
    """Return the filter of the runs with this value; empty if it cannot be written."""
    text = "none" if value is None else text_of(value) if isinstance(value, bool) else str(value)
    if isinstance(value, int | float) or value is None:
        return f"{name}={text}"
    return f'{name}="{text}"' if '"' not in text + name and " " not in name else ""


@dataclass(frozen=True, slots=True)
class Group:
    """The runs with one value of a field, and their best values of one metric."""

    value: str  # the value as text; empty for runs without it
    where: str  # a filter that finds these runs
    metric: str
    runs: int
    mean: float
    deviation: float | None  # sample standard deviation; `None` for one run
    low: float
    high: float
    best: str  # name of the best run


def groups_of(
    rows: Iterable[tuple[str, object, str, float, float]], field: str
) -> tuple[Group, ...]:
    """Return groups of runs, those with the best mean first; metrics are never mixed.

    A row is a run: its name, its value of the field, its metric, its best value of that, and the
    rank of this value, which is lower for better ones.
    """
    found: dict[tuple[str, str], list[tuple[float, float, str, object]]] = {}
    for name, value, metric, best, rank in rows:
        if math.isfinite(best):
            found.setdefault((metric, text_of(value)), []).append((rank, best, name, value))
    counts = Counter(metric for (metric, _), some in found.items() for _ in some)
    ranked = sorted(
        found.items(),
        key=lambda pair: (
            -counts[pair[0][0]],
            pair[0][0],
            statistics.fmean(one[0] for one in pair[1]),
        ),
    )
    return tuple(
        _group(text, metric, some, condition(field, some[0][3]))
        for (metric, text), some in ranked[:_MOST_GROUPS]
    )


def _group(
    text: str, metric: str, some: Sequence[tuple[float, float, str, object]], where: str
) -> Group:
    values = [best for _, best, _, _ in some]
    return Group(
        text,
        where,
        metric,
        len(values),
        statistics.fmean(values),
        statistics.stdev(values) if len(values) > 1 else None,
        min(values),
        max(values),
        min(some, key=lambda one: one[0])[2],
    )
