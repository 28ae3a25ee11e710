"""What is wrong with a preset, in words: where by name, what was meant, and no library's terms.

Owns the words alone; which rules there are is the business of `holdfast.registry.spec`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import ValidationError

from holdfast.registry.spec import RunSpec
from holdfast.registry.values.records import Record
from holdfast.registry.values.suggest import near

#: What one entry of a list is called, and the fields that name it.
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
_SUBJECT = re.compile(r"^(Input|String|Tuple|Dictionary|Value|Data) should ")
_PLAIN = {
    "a valid tuple": "a list",
    "a valid array": "a list",
    "a valid string": "a text",
    "a valid integer": "a whole number",
    "an object": "a table",
    " after validation": "",
}
_SOURCE = "must be gates/NAME, latest or best"
_NAME = "must be letters, digits, '.', '_' and '-', at most 64, a letter or digit first"

_Place = tuple[int | str, ...]


def told(error: ValidationError, table: Mapping[str, Any]) -> str:
    """Return everything that is wrong with a preset.

    Args:
        error: What its specification said of it.
        table: The preset as it was read.
    """
    found = []
    for place, what in _wrongs(error, ()):
        where = _where(place, table)
        found.append(what if not where or what.startswith(where) else f"{where}: {what}")
    return "; ".join(dict.fromkeys(found))


def _wrongs(error: ValidationError, within: _Place) -> Iterator[tuple[_Place, str]]:
    """Yield the place and the words of each thing that is wrong."""
    errors = error.errors(include_url=False)
    places = [one["loc"] for one in errors]
    for one in errors:
        place = (*within, *one["loc"])
        depth = len(one["loc"])
        if one["type"] == "too_short" and any(p[:depth] == one["loc"] != p for p in places):
            continue  # its entries are there, and wrong
        cause = one.get("ctx", {}).get("error")
        inner = getattr(cause, "__cause__", None)
        if isinstance(inner, ValidationError):
            # A value that users make by hand as well: its own error wraps the one that says where.
            yield from _wrongs(inner, place)
        elif one["type"] == "extra_forbidden":
            yield place[:-1], _unknown(place)
        elif one["type"] == "missing":
            yield place[:-1], f"{place[-1]!r} is missing"
        elif one["type"] == "string_pattern_mismatch":
            form = _SOURCE if place[-1] == "source" else _NAME
            yield place, f"{form}, not {one['input']!r}"
        else:
            yield place, str(cause) if cause is not None else _plainly(one["msg"], one["input"])


def _unknown(place: _Place) -> str:
    name, model = str(place[-1]), _model(place[:-1])
    known = list(model.model_fields) if model else []
    meant = near(name, known)
    more = meant[0].lower() + meant[1:] if meant else f"known are {', '.join(known)}"
    return f"no field {name!r} ({more})"


def _model(place: _Place) -> type[Record] | None:
    """Return the record that stands at a place of a specification."""
    model: type[Record] | None = RunSpec
    for part in place:
        if model is not None and isinstance(part, str):
            field = model.model_fields.get(part)
            model = None if field is None else _record(field.annotation)
    return model


def _record(annotation: Any) -> type[Record] | None:
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return annotation
    return next(filter(None, map(_record, get_args(annotation))), None)


def _plainly(text: str, value: object) -> str:
    for theirs, plain in _PLAIN.items():
        text = text.replace(theirs, plain)
    said = _SUBJECT.sub("must ", text)
    return f"{said}, not {value!r}" if isinstance(value, str | int | float) else said


def _where(place: _Place, table: Any) -> str:
    """Return a place in words, entries of lists by their names."""
    words: list[str] = []
    for before, part in zip(("", *place), place, strict=False):
        table = _below(table, part)
        if isinstance(part, str):
            words.append(part)
            continue
        noun, names = _ENTRIES.get(str(before), (f"{before}, entry", ()))
        said = [table.get(name) for name in names] if isinstance(table, dict) else [None]
        named = bool(said) and all(isinstance(name, str) for name in said)
        words[-1:] = [f"{noun} {' to '.join(map(str, said)) if named else part + 1}"]
    return ", ".join(words)


def _below(table: Any, part: int | str) -> Any:
    if isinstance(table, dict):
        return table.get(part)
    if isinstance(table, list) and isinstance(part, int) and part < len(table):
        return table[part]
    return None
