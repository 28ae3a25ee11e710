"""Codecs of numpy values. Only this module and `jax_arrays` import numpy."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np

from holdfast.registry.errors import IncompatibleState, UnsupportedValue
from holdfast.registry.pytree import refusals
from holdfast.registry.pytree.decoding import ATOMS, DECODERS, Decoder, atom_handler
from holdfast.registry.pytree.encoding import FAMILIES, HANDLERS, Encoder
from holdfast.registry.pytree.leaves import ArrayLeaf
from holdfast.registry.pytree.paths import Link, clip
from holdfast.registry.values import ITEM_SIZES, Json

_SCALARS = (
    *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.longlong),
    *(np.uint8, np.uint16, np.uint32, np.uint64, np.ulonglong),
    *(np.float16, np.float32, np.float64, np.complex64, np.complex128),
    *(np.datetime64, np.timedelta64),
)
#: Types of ml_dtypes are added at their first use.
_NATIVE: dict[str, np.dtype[Any]] = {
    name: np.dtype(name) for name in ITEM_SIZES if name in np.sctypeDict
}
_TIME = r"(datetime64|timedelta64)(\[[0-9]{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
#: dtype objects beyond the element types: other byte orders, strings, raw bytes, objects.
_OTHER_DTYPE = r"[<>|][biufcSUV][0-9]{1,9}|\|O"


# Element types


@lru_cache(maxsize=256)  # NumPy builds the name each time, slowly
def name_of(dtype: np.dtype[Any]) -> str | None:
    """Return the stored name of an element type; datetimes are int64."""
    if dtype.kind in "Mm":
        return "int64" if dtype.isnative else None
    name = str(dtype)
    if name not in ITEM_SIZES or not dtype.isnative or dtype.fields is not None:
        return None
    return name


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the numpy type of a stored name."""
    known = _NATIVE.get(name)
    if known is not None:
        return known
    if name not in ITEM_SIZES:
        raise UnsupportedValue("numpy has no such element type", found=name)
    try:
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    except (ImportError, AttributeError) as error:
        raise IncompatibleState(
            f"numpy arrays of {name} need ml_dtypes, or a newer one",
            found=error,
            hint="Install it: pip install -U ml_dtypes.",
        ) from error
    _NATIVE[name] = dtype
    return dtype


# Memory


def memory_of(array: np.ndarray[Any, Any], nbytes: int = 0) -> memoryview:  # noqa: ARG001
    """View the memory of an array; a copy of it if it is not contiguous."""
    contiguous: Any = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    try:
        return memoryview(contiguous).cast("B")
    except (TypeError, ValueError):  # an axis of no length, dates, or a type of ml_dtypes
        return memoryview(contiguous.reshape(-1).view(np.uint8))


def copy_of(array: np.ndarray[Any, Any], nbytes: int = 0) -> memoryview:
    """Return a copy of the bytes of an array, in C order."""
    return memory_of(np.array(array, order="C"), nbytes)


def allocate(dtype: str, shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], memoryview]:
    """Return a new array and its memory, which is not cleared."""
    array = np.empty(shape, dtype=dtype_named(dtype))
    return array, memory_of(array)


def repeated(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return an array whose elements are all the same one in memory."""
    return np.broadcast_to(np.zeros((), dtype_named(dtype)), shape)


def view_of(target: np.ndarray[Any, Any]) -> memoryview | None:
    """Return the writable memory of an array, or None if it is not contiguous and writable."""
    flags = target.flags
    if name_of(target.dtype) is None or not flags.c_contiguous or not flags.writeable:
        return None
    return memory_of(target.view(np.ndarray))


def describe(target: np.ndarray[Any, Any]) -> tuple[str, tuple[int, ...]]:
    """Return the element type and shape of an array."""
    name = name_of(target.dtype)
    if name is None:
        raise UnsupportedValue("element type cannot be stored", found=target.dtype)
    return name, target.shape


# Arrays


def encode_array(encoder: Encoder, value: np.ndarray[Any, Any], link: Link, depth: int) -> Json:
    """Encode an array as a leaf."""
    dtype = value.dtype
    name = name_of(dtype)
    if name is None:
        what, hint = _explain(dtype)
        encoder.refuse(link, what, hint)
    is_copied = not value.flags.c_contiguous
    opener = copy_of if is_copied else memory_of
    leaf = ArrayLeaf(name, value.shape, value.nbytes, value, opener, link, is_copied)
    index = encoder.add(leaf, link)
    if dtype.kind not in "Mm":
        return {"n": index}
    encoder.enter(value, link, depth)
    encoder.leave(value)
    return {"nt": [index, str(dtype)]}


def _explain(dtype: np.dtype[Any]) -> tuple[str, str]:
    if dtype.fields is not None:
        return "a structured array cannot be stored", (
            "Store one array per field: {name: x[name] for name in x.dtype.names}."
        )
    if dtype.hasobject:
        return "an object array cannot be stored", (
            "Convert it to a numeric dtype (.astype), or store x.tolist()."
        )
    if not dtype.isnative and dtype.kind in "biufcMm":
        return f"byte order unsupported: {dtype.str}", (
            "Convert with .astype(x.dtype.newbyteorder('='))."
        )
    if dtype.kind in "SUT":
        return f"a string array ({dtype}) cannot be stored", "Store x.tolist()."
    if dtype.kind == "V":
        return f"an array of {dtype} cannot be stored", "View it as numpy.uint8 (.view)."
    return f"an array of {dtype} cannot be stored", (
        "Its bits differ between machines: convert to float64 or complex128."
    )


def decode_array(decoder: Decoder, index: Any, link: Link, _: int) -> np.ndarray[Any, Any]:
    """Return the array that was loaded."""
    value = decoder.array(index, link)
    if not isinstance(value, np.ndarray):
        decoder.malformed(link, "not an array", "an array", type(value).__name__)
    return value


def decode_time_array(decoder: Decoder, payload: Any, link: Link, depth: int) -> Any:
    """Rebuild an array of dates or durations from its int64."""
    decoder.check_list(payload, link, depth, 2)
    index, name = payload
    if type(name) is not str or not re.fullmatch(_TIME, name):
        decoder.malformed(link, "a bad unit of time", "datetime64[ns] or its like", clip(name))
    value = decode_array(decoder, index, link, depth)
    try:
        dtype = np.dtype(name)
        if str(dtype) == name and value.dtype == np.int64:
            return value.view(dtype)
    except (TypeError, ValueError):
        pass
    return decoder.malformed(
        link, "a bad array of times", "int64 and a unit", f"{value.dtype}, {name}"
    )


HANDLERS[np.ndarray] = encode_array
DECODERS["n"] = decode_array
DECODERS["nt"] = decode_time_array


# Scalars and dtype objects


def pack_dtype(dtype: np.dtype[Any]) -> str:
    """Return the canonical name of a dtype object."""
    name = str(dtype)
    if dtype.fields is None and dtype.subdtype is None:
        if (name in ITEM_SIZES and dtype.isnative) or (dtype.kind in "Mm" and dtype.isnative):
            return name
        if re.fullmatch(_OTHER_DTYPE, dtype.str) and np.dtype(dtype.str) == dtype:
            return dtype.str
    raise ValueError("a structured or unknown dtype")


def unpack_dtype(name: Any) -> np.dtype[Any]:
    """Undo `pack_dtype`."""
    if type(name) is not str:
        raise ValueError("not a name")
    if name in ITEM_SIZES:
        return dtype_named(name)
    if re.fullmatch(_TIME, name) or re.fullmatch(_OTHER_DTYPE, name):
        return np.dtype(name)
    raise ValueError("not the name of a dtype")


def pack_scalar(value: np.generic) -> Json:
    """Return type and little-endian bits."""
    return [pack_dtype(value.dtype), value.tobytes().hex()]


def unpack_scalar(payload: Any) -> Any:
    """Undo `pack_scalar`."""
    name, digits = payload
    if name not in ITEM_SIZES and not re.fullmatch(_TIME, name):
        raise ValueError("not a type of scalars")
    dtype = unpack_dtype(name)
    raw = bytes.fromhex(digits)
    if len(raw) != dtype.itemsize:
        raise ValueError("wrong number of bits")
    return np.frombuffer(raw, dtype)[0]


def encode_other_scalar(encoder: Encoder, value: Any, link: Link, depth: int) -> Json:
    """Encode a scalar of ml_dtypes; refuse the other scalars of numpy."""
    if type(value) is value.dtype.type and str(value.dtype) in ITEM_SIZES:
        return _encode_scalar(encoder, value, link, depth)
    return encoder.refuse(link, *refusals.explain(value))


_encode_scalar = atom_handler("ns", pack_scalar)
FAMILIES[np.generic] = encode_other_scalar
for _cls in _SCALARS:
    HANDLERS[_cls] = _encode_scalar
ATOMS["ns"] = (unpack_scalar, pack_scalar)
FAMILIES[np.dtype] = atom_handler("nd", pack_dtype)
ATOMS["nd"] = (unpack_dtype, pack_dtype)
