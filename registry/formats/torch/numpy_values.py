"""The names of NumPy in a pickle: element types, scalars and arrays, in both of its spellings.

Arrays of objects are pickles themselves and are refused. An array gets its bytes by NumPy's own
`__setstate__`, once they have been checked against its shape.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from holdfast.registry.errors import UnsupportedValue
from holdfast.registry.formats.pickles import Known
from holdfast.registry.formats.source import KEEP
from holdfast.registry.values.parse_limits import Budget

_DTYPE: Final = re.compile(r"[<>|=]?([biufc][0-9]{1,2}|[SU][0-9]{1,9}|[Mm]8|O8?)", re.ASCII)
_UNITS: Final = frozenset({"Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as"})
_MAX_AXES: Final = 64


def names(budget: Budget, where: object) -> dict[str, Known]:
    """Return the closed list of NumPy's names.

    Args:
        budget: The bound on the bytes of arrays.
        where: The file, for messages.
    """

    def refuse_objects() -> None:
        raise UnsupportedValue(
            "an array of objects would be loaded by running code",
            where=where,
            expected="arrays of numbers, truth values or times",
            hint=f"Nothing in it was run. Store it as a list, or convert it to numbers. {KEEP}",
        )

    def fill(array: NDArray[Any], state: Any) -> NDArray[Any]:
        _, shape, dtype, is_fortran, data = state
        checked = _native(dtype)
        if dtype.hasobject or type(data) is list:
            refuse_objects()
        return _filled(array, shape, dtype, checked, bool(is_fortran), data, budget)

    def from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> NDArray[Any]:
        if not isinstance(dtype, np.dtype) or dtype.hasobject:
            refuse_objects()
        made = np.empty(0, np.uint8)
        return _filled(made, shape, dtype, _native(dtype), order == "F", bytes(data), budget)

    found = {
        "numpy.dtype": Known(call=_dtype, build=_finished_dtype),
        "numpy.ndarray": Known(value=np.ndarray),
    }
    for core in ("numpy.core", "numpy._core"):
        found[f"{core}.multiarray._reconstruct"] = Known(call=_empty, build=fill)
        found[f"{core}.multiarray.scalar"] = Known(call=_scalar)
        found[f"{core}.numeric._frombuffer"] = Known(call=from_buffer)
    return found


def _dtype(text: Any, *flags: Any) -> np.dtype[Any]:
    """Return an element type: the flags say whether it is aligned and copied."""
    if type(text) is not str or _DTYPE.fullmatch(text) is None or len(flags) > 2:
        raise ValueError("not an element type of NumPy")
    return np.dtype(text)


def _finished_dtype(dtype: np.dtype[Any], state: Any) -> np.dtype[Any]:
    """Return an element type in its byte order, a time with its unit."""
    version, order, _, _, fields, _, _, _, *about = state
    if version not in (3, 4) or fields is not None:
        raise ValueError("an element type with fields")
    if dtype.kind in "Mm" and about:
        _, (unit, count, *_) = about[0]
        unit = unit.decode("ascii") if type(unit) is bytes else unit
        if (unit not in _UNITS and unit != "generic") or type(count) is not int or count < 1:
            raise ValueError("not a unit of time")
        if unit != "generic":
            dtype = np.dtype(f"{dtype.kind}8[{count}{unit}]")
    return dtype.newbyteorder(order) if order == ">" else dtype


def _native(dtype: Any) -> np.dtype[Any]:
    if not isinstance(dtype, np.dtype):
        raise TypeError("not an element type")
    return dtype.newbyteorder("=")


def _empty(kind: Any, shape: Any, code: Any) -> NDArray[Any]:
    if kind is not np.ndarray or shape != (0,) or code not in (b"b", "b"):
        raise ValueError("not an array that is filled later")
    return np.empty(0, np.int8)


def _filled(
    array: NDArray[Any],
    shape: Any,
    dtype: np.dtype[Any],
    native: np.dtype[Any],
    is_fortran: bool,
    data: Any,
    budget: Budget,
) -> NDArray[Any]:
    """Give an array its shape, type and bytes."""
    if type(data) not in (bytes, bytearray) or type(shape) is not tuple or len(shape) > _MAX_AXES:
        raise TypeError("not the content of an array")
    if not all(type(n) is int and 0 <= n < 2**62 for n in shape):
        raise ValueError("not the shape of an array")
    if (
        math.prod(shape) * dtype.itemsize != len(data)
        or math.prod(filter(None, shape)) * max(dtype.itemsize, 1) >= 2**62
    ):
        raise ValueError("an array whose bytes do not fit its shape")
    budget.take(len(data))
    if not dtype.isnative:
        data = np.frombuffer(data, dtype).astype(native)
        data = data.tobytes()
    state: Any = (1, shape, native, is_fortran, bytes(data))
    array.__setstate__(state)
    return array


def _scalar(dtype: Any, data: Any) -> Any:
    native = _native(dtype)
    if dtype.kind not in "biufcMm" or type(data) is not bytes or len(data) != dtype.itemsize:
        raise ValueError("not a number of NumPy")
    return np.frombuffer(data, dtype).astype(native)[0]
