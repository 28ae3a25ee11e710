"""Segments: consecutive entries of an append-only stream, such as a loss history, as states.

An entry maps names to plain values and has a whole `step`. A segment stores its entries by columns,
so that 200,000 numbers are one array, and returns them exactly: the order of keys, every type and
every bit. The state of a segment is `{"entries": {...}}` with

    count      the number of entries
    orders     each distinct list of keys, in the order of first appearance; one for most streams
    order      the index in `orders` of each entry: an unsigned integer for each; only if there is
               more than one list
    columns    for each key, in the order of first appearance, its values in the entries that have
               it: int64 if all are int and fit, float64 if all are float, otherwise a list

`orders` and `order` say which entries lack a key, so that is not stored again. This module also
decides which segments a new one is merged with. It neither stores nor names segments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from types import NoneType
from typing import TYPE_CHECKING, Any

from holdfast.registry import pytree
from holdfast.registry.errors import InvalidInput, Malformed, UnsupportedValue
from holdfast.registry.history import check_step
from holdfast.registry.pytree import clip

#: A segment of more entries is never merged.
MERGE_CAP = 1_000_000
_STEP = "step"
_ATOMS = frozenset({bool, float, int, NoneType})
#: Values are checked at their depth in the state; paths begin like this.
_SHOWN = "state['entries']['columns']"
_NAMED = "entries/columns/"

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


# Entries


def check_entries(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return entries as a stream keeps them: checked copies."""
    if isinstance(entries, Mapping | str | bytes) or not isinstance(entries, Iterable):
        raise InvalidInput(
            "entries are not a list of mappings",
            expected="[{'step': 0, ...}, ...]",
            found=type(entries).__name__,
            hint="Put a single entry into a list.",
        )
    return [_checked(index, entry) for index, entry in enumerate(entries)]


def _checked(index: int, entry: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise InvalidInput(
            "an entry is not a mapping",
            where=f"entries[{index}]",
            expected="{'step': 0, ...}",
            found=type(entry).__name__,
        )
    fields = dict(entry)
    if _STEP not in fields:
        raise InvalidInput(
            "an entry has no step", where=f"entries[{index}]", expected="a key 'step'"
        )
    fields[_STEP] = check_step(fields[_STEP], f"entries[{index}][{_STEP!r}]")
    return {
        key: value if _is_simple(key, value) else _copied(index, key, value)
        for key, value in fields.items()
    }


def _is_simple(key: object, value: object) -> bool:
    """Return whether key and value need no further check; nearly all values do not."""
    kind = type(value)
    return (
        (kind in _ATOMS or (kind is str and value.isascii()))  # type: ignore[attr-defined]
        and type(key) is str
        and key.isascii()
    )


def _copied(index: int, key: object, value: object) -> Any:
    if type(key) is not str:
        raise InvalidInput(
            "a key of an entry is not a string", where=f"entries[{index}]", found=clip(key)
        )
    try:
        flat = pytree.flatten({"entries": {"columns": {index: {key: value}}}})
    except UnsupportedValue as error:
        where = "entries" + (error.where or "").removeprefix(_SHOWN)
        raise UnsupportedValue(error.what, where=where, hint=error.hints) from error
    (component,) = flat.components
    if component.leaves:
        _refuse_arrays(component)
    texts = [leaf.buffer() for leaf in component.leaves]
    copy = pytree.unflatten_component(component.skeleton, texts, name=component.name)
    return copy["columns"][index][key]


def _refuse_arrays(component: pytree.FlatComponent) -> None:
    # Long strings and byte strings are leaves too, and allowed.
    kinds = pytree.leaf_kinds(component.skeleton)
    for number, leaf in enumerate(component.leaves):
        if kinds[number] not in ("bytes", "str"):
            raise UnsupportedValue(
                "an entry holds an array or a tensor",
                where="entries/" + leaf.path.removeprefix(_NAMED),
                hint="Append a number (x.item()) or a list (x.tolist()); keep arrays in a state.",
            )


# Segments


def pack_entries(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of a segment."""
    orders: dict[tuple[str, ...], int] = {}
    order: list[int] = []
    values: defaultdict[str, list[Any]] = defaultdict(list)
    for entry in entries:
        order.append(orders.setdefault(tuple(entry), len(orders)))
        for key, value in entry.items():
            values[key].append(value)
    body: dict[str, Any] = {"count": len(order), "orders": [list(keys) for keys in orders]}
    if len(orders) > 1:
        np = _numpy()
        body["order"] = np.array(order, dtype=np.min_scalar_type(len(orders) - 1))
    body["columns"] = {key: _column(items) for key, items in values.items()}
    if order and not _are_steps(body["columns"].get(_STEP), len(order)):
        raise InvalidInput(
            "an entry has no step, or one that is not a whole number from 0",
            where="entries",
            hint="Call check_entries first; its message says which entry.",
        )
    return {"entries": body}


def unpack_entries(
    state: Mapping[str, Any], start: int = 0, stop: int | None = None
) -> list[dict[str, Any]]:
    """Return the entries of a segment, or its slice `[start:stop]`.

    Nested values belong to the state; they are not copied.
    """
    segment = _read(state)
    window = range(segment.count)[start:stop]
    if not window:
        return []
    first, last = segment.used(window.start), segment.used(window.stop)
    feeds = {
        key: iter(part if isinstance(part, list) else part.tolist())
        for key, column in segment.columns.items()
        for part in [column[first.get(key, 0) : last.get(key, 0)]]
    }
    forms = [[(key, feeds[key].__next__) for key in keys] for keys in segment.orders]
    picks: Iterable[int] = repeat(0, len(window))
    if segment.order is not None:
        picks = segment.order[window.start : window.stop].tolist()
    return [{key: draw() for key, draw in forms[pick]} for pick in picks]


def steps(state: Mapping[str, Any]) -> Array:
    """Return the step of each entry of a segment, int64, in the order of the entries."""
    segment = _read(state)
    np = _numpy()
    found: Array = segment.columns[_STEP] if segment.count else np.empty(0, np.int64)
    return found


def merge_count(counts: Sequence[int], new: int, *, cap: int = MERGE_CAP) -> int:
    """Return how many of the last segments a new one is merged with.

    Each remaining segment has at least twice the entries of the next one, unless it is beyond the
    cap. So n entries are in at most log2(n) segments below the cap, and an entry is rewritten only
    if its segment grows by half: O(n log n) entries in all, however large each append is.
    """
    merged = 0
    for count in reversed(counts):
        if count > cap or count >= 2 * new:
            break
        new += count
        merged += 1
    return merged


# Columns


def _column(values: list[Any]) -> Array | list[Any]:
    np, kinds = _numpy(), set(map(type, values))
    column: Array | list[Any] = values
    if kinds == {float}:
        column = np.array(values, np.float64)
    elif kinds == {int}:
        with suppress(OverflowError):  # beyond int64
            column = np.array(values, np.int64)
    return column


def _are_steps(column: object, count: int) -> bool:
    np = _numpy()
    return (
        isinstance(column, np.ndarray)
        and column.dtype == np.int64
        and column.shape == (count,)
        and int(column.min(initial=0)) >= 0
    )


# Reading: the state came from a store and may be anything


@dataclass(frozen=True, slots=True)
class _Segment:
    """The parts of a segment."""

    count: int  # entries
    columns: Mapping[str, Any]  # values by key
    orders: list[list[str]]  # the distinct lists of keys
    order: Array | None  # which of them each entry has; `None` where there is one or none

    def used(self, stop: int) -> dict[str, int]:
        """Return how many values of each column belong to the first `stop` entries."""
        tally = [stop]
        if self.order is not None:
            tally = _numpy().bincount(self.order[:stop], minlength=len(self.orders)).tolist()
        used: dict[str, int] = defaultdict(int)
        for keys, number in zip(self.orders, tally, strict=False):
            for key in keys:
                used[key] += number
        return used


def _read(state: Mapping[str, Any]) -> _Segment:
    body = state.get("entries") if isinstance(state, Mapping) else None
    if not isinstance(body, Mapping) or body.keys() - {"order"} != {"count", "orders", "columns"}:
        raise _malformed("not a segment", "count, orders, columns", clip(body))
    count, orders, columns = body["count"], body["orders"], body["columns"]
    if type(count) is not int or count < 0:
        raise _malformed("a bad count", "a whole number from 0", clip(count))
    if not _are_orders(orders) or bool(orders) != bool(count):
        raise _malformed("bad orders of keys", "distinct lists of keys with a step", clip(orders))
    order = body.get("order")
    several = len(orders) > 1
    if several != ("order" in body) or (several and not _are_picks(order, count, len(orders))):
        raise _malformed("a bad order", f"{count} numbers below {len(orders)}", clip(order))
    segment = _Segment(count, columns, orders, order)
    _check_columns(segment)
    return segment


def _are_orders(orders: object) -> bool:
    return (
        isinstance(orders, list)
        and all(
            isinstance(keys, list)
            and all(type(key) is str for key in keys)
            and _STEP in keys
            and len(set(keys)) == len(keys)
            for keys in orders
        )
        and len(set(map(tuple, orders))) == len(orders)
    )


def _are_picks(order: object, count: int, orders: int) -> bool:
    np = _numpy()
    return (
        isinstance(order, np.ndarray)
        and order.dtype.kind == "u"
        and order.shape == (count,)
        and bool(np.all(order < orders))
    )


def _check_columns(segment: _Segment) -> None:
    np, used, columns = _numpy(), segment.used(segment.count), segment.columns
    if not isinstance(columns, Mapping) or columns.keys() != used.keys():
        raise _malformed("other columns than keys", clip(list(used)), clip(columns))
    for key, column in columns.items():
        if isinstance(column, np.ndarray):
            fits = column.shape == (used[key],) and column.dtype in (np.int64, np.float64)
        else:
            fits = isinstance(column, list) and len(column) == used[key]
        if not fits:
            raise _malformed(f"a bad column {key!r}", f"{used[key]} values", clip(column))
    if segment.count and not _are_steps(columns[_STEP], segment.count):
        raise _malformed("a bad column of steps", "int64 from 0", clip(columns[_STEP]))


def _malformed(what: str, expected: str, found: str) -> Malformed:
    return Malformed(f"{what} in a segment", where="entries", expected=expected, found=found)


@cache
def _numpy() -> Any:
    """Return NumPy, imported at first use: `import holdfast` stays light."""
    import numpy as np

    return np
