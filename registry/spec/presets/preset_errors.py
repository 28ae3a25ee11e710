"""Describe the errors of a preset for people: by names, with suggestions.

`holdfast.registry.spec` has the rules; this module only words their errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from holdfast.registry.spec.run_spec import RunSpec
from holdfast.registry.values import InvalidRecord, Record, near

#: Name of a list -> the noun for its entries, and the fields that name an entry.
_ENTRIES = {
    "phases": ("phase", ("name",)),
    "gates": ("gate", ("name",)),
    "streams": ("stream", ("name",)),
    "tiers": ("tier", ("name",)),
    "monitors": ("monitor", ("metric",)),
    "dtypes": ("dtype rule", ("path",)),
    "draws": ("draw", ("kind",)),
    "transitions": ("transition", ("from_phase", "to_phase")),
    "ready": ("readiness", ("metric",)),
    "rows": ("row", ("part",)),
}
_SOURCE = "must be gates/NAME, latest or best"
_NAME = "must be letters, digits, '.', '_' and '-', at most 64, a letter or digit first"

_Path = tuple[int | str, ...]


def describe(error: InvalidRecord, table: Mapping[str, Any]) -> str:
    """Return all errors of a preset as one text."""
    found = []
    for path, what in _errors(error):
        where = _where(path, table)
        found.append(what if not where or what.startswith(where) else f"{where}: {what}")
    return "; ".join(dict.fromkeys(found))


def _errors(error: InvalidRecord) -> Iterator[tuple[_Path, str]]:
    """Yield the path and the description of each error."""
    for path, text, kind, value in error.problems:
        if kind == "unknown":
            yield path[:-1], _unknown(path)
        elif kind == "missing":
            yield path[:-1], f"{path[-1]!r} {text}"
        elif text.startswith("must match"):
            form = _SOURCE if path[-1] == "source" else _NAME
            yield path, f"{form}, not {value!r}"
        else:
            text = text.replace("an object", "a table")
            shown = isinstance(value, str | int | float) and text.startswith("must")
            yield path, f"{text}, not {value!r}" if shown else text


def _unknown(path: _Path) -> str:
    name, model = str(path[-1]), _model(path[:-1])
    known = list(model.fields()) if model else []
    meant = near(name, known)
    more = meant[0].lower() + meant[1:] if meant else f"known are {', '.join(known)}"
    return f"no field {name!r} ({more})"


def _model(path: _Path) -> type[Record] | None:
    """Return the record at a path of a specification."""
    model: type[Record] | None = RunSpec
    for part in path:
        if model is not None and isinstance(part, str):
            model = _record(model.hints().get(part))
    return model


def _record(annotation: Any) -> type[Record] | None:
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return annotation
    return next(filter(None, map(_record, get_args(annotation))), None)


def _where(path: _Path, table: Any) -> str:
    """Return a path in words, with the names of entries of lists."""
    words: list[str] = []
    for before, part in zip(("", *path), path, strict=False):
        table = _below(table, part)
        if isinstance(part, str):
            words.append(part)
            continue
        noun, fields = _ENTRIES.get(str(before), (f"{before}, entry", ()))
        names = [table.get(name) for name in fields] if isinstance(table, dict) else [None]
        is_named = bool(names) and all(isinstance(name, str) for name in names)
        words[-1:] = [f"{noun} {' to '.join(map(str, names)) if is_named else part + 1}"]
    return ", ".join(words)


def _below(table: Any, part: int | str) -> Any:
    if isinstance(table, dict):
        return table.get(part)
    if isinstance(table, list) and isinstance(part, int) and part < len(table):
        return table[part]
    return None
