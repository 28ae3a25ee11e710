"""The entries of a stream as a table: a row for each, a column for each key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.registry.history import json_ready
from holdfast.registry.tables.columns import Column, Type, table

_INT64 = range(-(2**63), 2**63)
#: Integers that float64 holds exactly.
_EXACT = range(-(2**53), 2**53 + 1)


def entry_table(entries: Sequence[Mapping[str, Any]]) -> Any:
    """Return entries as a `pyarrow.Table`: `step` first, the other keys as they first appear.

    The type of a column is that of its values: `bool`, `string`, `int64`, or `float64` for floats,
    and for ints beside floats. If they are of other types, nest, or do not fit, each is its JSON.
    """
    keys = dict.fromkeys(["step", *(key for entry in entries for key in entry)])
    columns: list[Column] = []
    made: list[dict[str, object]] = [{} for _ in entries]
    for key in keys:
        values = [entry.get(key) for entry in entries]
        type_ = "int64" if key == "step" else _type_of(values)
        columns.append(Column(key, type_ or "string", f"{key} of the entry"))
        for row, value in zip(made, values, strict=True):
            row[key] = _text(value) if type_ is None else value
    return table(columns, made)


def _type_of(values: Sequence[object]) -> Type | None:
    """Return the type of a column; `None` if its values are shown as JSON."""
    kinds = {type(value) for value in values} - {type(None)}
    if kinds == {bool}:
        return "bool"
    if kinds == {str}:
        return "string"
    ints = [value for value in values if type(value) is int]
    if kinds == {int}:
        return "int64" if all(value in _INT64 for value in ints) else None
    if kinds and kinds <= {int, float}:
        return "float64" if all(value in _EXACT for value in ints) else None
    return None


def _text(value: object) -> str | None:
    return None if value is None else json.dumps(json_ready(value))
