"""Columns of Arrow tables: name, type and meaning. Times are UTC in microseconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.registry.errors import InvalidInput

#: `time` is `timestamp[us, tz=UTC]`.
Type = Literal["bool", "int64", "float64", "string", "time"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    type: Type  # its type. Every column may have nulls.
    about: str  # what it holds, with its unit. The field's metadata have it as `description`.


def table(columns: Sequence[Column], rows: Iterable[Mapping[str, object]]) -> Any:
    """Return rows as a `pyarrow.Table`; what a row lacks is null."""
    pa = arrow()
    types = {
        "bool": pa.bool_(),
        "int64": pa.int64(),
        "float64": pa.float64(),
        "string": pa.string(),
        "time": pa.timestamp("us", tz="UTC"),
    }
    fields = [
        pa.field(one.name, types[one.type], metadata={"description": one.about}) for one in columns
    ]
    kept = list(rows)
    arrays = [pa.array([row.get(one.name) for row in kept], types[one.type]) for one in columns]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def arrow() -> Any:
    """Return the package pyarrow."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise InvalidInput(
            "this needs the package pyarrow",
            found=error,
            hint="Install it with: pip install 'holdfast[pyarrow]'",
        ) from error
    return pa
