"""The closed list of element types: their torch names and their sizes.

The store is little-endian. A type that is not in this list cannot be stored.
"""

from __future__ import annotations

from typing import Literal

from holdfast.registry.errors import UnsupportedValue

#: The policies for storing a tensor in fewer bits (`holdfast.registry.spec.precision`).
PrecisionName = Literal["fp16", "bf16", "auto", "auto-fp16", "keep"]

#: Name -> bytes per element.
ITEM_SIZES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}

#: The real floating-point types.
FLOATING = frozenset(name for name in ITEM_SIZES if name.startswith(("float", "bfloat")))


def item_size(dtype: str) -> int:
    """Return the bytes per element of a type."""
    try:
        return ITEM_SIZES[dtype]
    except KeyError:
        raise UnsupportedValue(
            "unknown dtype", found=dtype, expected=", ".join(ITEM_SIZES)
        ) from None
