"""The closed list of names that a pickle of torch may use, and the value that each makes.

It is what `torch.load(weights_only=True)` knows, less the kinds of tensors that no checkpoint can
hold, which are refused by name; and more: values of NumPy, the standard containers, times, paths,
and the version of torch.
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time, timedelta, timezone
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from holdfast.registry.errors import UnsupportedValue
from holdfast.registry.formats.pickles import Keys, Known
from holdfast.registry.formats.source import KEEP
from holdfast.registry.formats.torch.container import torch_of
from holdfast.registry.formats.torch.storages import SparseLayout, StorageType, Tensors
from holdfast.registry.pytree import TensorBytes
from holdfast.registry.values import ITEM_SIZES, Budget

# The names of NumPy in a pickle: element types, scalars and arrays, in both of its spellings.


_DTYPE: Final = re.compile(r"[<>|=]?([biufc][0-9]{1,2}|[SU][0-9]{1,9}|[Mm]8|O8?)", re.ASCII)
_UNITS: Final = frozenset({"Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as"})
_MAX_AXES: Final = 64


def names(budget: Budget, where: object) -> dict[str, Known]:
    """Return the closed list of NumPy's names."""

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


_STORAGES: Final = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
}
_LAYOUTS: Final = ("coo", "csr", "csc", "bsr", "bsc")
#: Kinds of values that a checkpoint cannot hold -> the advice.
_REFUSED: Final = {
    "torch._utils._rebuild_qtensor": (
        "a quantized tensor",
        "Save its .int_repr(), scale and zero point.",
    ),
    "torch._utils._rebuild_meta_tensor_no_storage": (
        "a meta tensor, which has no data",
        "Load or initialise the module first.",
    ),
    "torch._utils._rebuild_nested_tensor": ("a nested tensor", "Save the list of its .unbind()."),
    "torch._utils._rebuild_wrapper_subclass": (
        "a tensor of a class of its own",
        "Save a plain tensor of it.",
    ),
    **{
        f"torch.{kind}Storage": ("a quantized storage", "Save .int_repr(), scale and zero point.")
        for kind in ("QUInt8", "QInt8", "QInt32", "QUInt4x2", "QUInt2x4")
    },
}
#: Element types as values; tensors have those of `ITEM_SIZES` only.
_DTYPES: Final = frozenset(ITEM_SIZES).union(
    ("qint8", "quint8", "qint32", "quint4x2", "quint2x4"),
    *((f"int{bits}", f"uint{bits}") for bits in range(1, 8)),
)
#: Bytes of memory for an item of a container that a call copies.
_ITEM_BYTES: Final = 100
_FACTORIES: Final = (bool, bytes, dict, float, int, list, set, str, tuple)


class Names(Mapping[str, Known]):
    """The closed list, for one file."""

    def __init__(self, tensors: Tensors, keys: Keys, where: object) -> None:
        self._where = where
        self._keys = keys
        self._known: dict[str, Known] = {
            **_tensors(tensors, where),
            **names(keys.budget, where),
            **self._containers(),
            **_times(),
            **self._paths(),
        }

    def __getitem__(self, text: str) -> Known:
        found = self._known.get(text)
        if found is None:
            if text in _REFUSED:
                self._refuse(text)
            found = self._known[text] = self._of_torch(text)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def _refuse(self, text: str) -> NoReturn:
        what, hint = _REFUSED[text]
        raise UnsupportedValue(
            f"the file holds {what} ({text}), which cannot be stored",
            where=self._where,
            expected="tensors and plain values",
            hint=f"{hint} {KEEP}",
        )

    def _of_torch(self, text: str) -> Known:
        """Return a name for which torch is needed."""
        module, _, name = text.rpartition(".")
        if module == "torch" and name in _DTYPES:
            return Known(value=getattr(torch_of(self._where), name))
        if text == "torch.Size":
            return Known(call=self._counted(self._guarded(torch_of(self._where).Size)))
        if text == "torch.device":
            return Known(call=self._guarded(self._device))
        if text == "torch.torch_version.TorchVersion":
            return Known(call=self._counted(self._version), build=lambda value, _: value)
        raise KeyError(text)

    def _device(self, kind: Any, *index: Any) -> Any:
        if type(kind) is not str or len(index) > 1 or any(type(n) is not int for n in index):
            raise TypeError("not a device")
        return torch_of(self._where).device(kind, *index)

    def _version(self, text: Any) -> Any:
        if type(text) is not str:
            raise TypeError("not a version")
        return torch_of(self._where).torch_version.TorchVersion(text)

    def _guarded(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call whose errors of torch are values that do not fit."""

        def call(*arguments: Any) -> Any:
            try:
                return make(*arguments)
            except RuntimeError as error:
                raise ValueError(str(error)) from error

        return call

    def _counted(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call that copies its arguments, which are counted first."""

        def call(*arguments: Any) -> Any:
            self._keys.budget.take(sum(map(_size, arguments)))
            return make(*arguments)

        return call

    def _containers(self) -> dict[str, Known]:
        counted, set_of = self._counted, self._keys.set_of
        found = {
            "collections.OrderedDict": Known(counted(self._keys.ordered_dict), _with_metadata),
            "collections.Counter": Known(counted(_counter)),
            "collections.defaultdict": Known(counted(_default_dict)),
            "collections.deque": Known(counted(_deque), size_bytes=1000),
            "_codecs.encode": Known(counted(_encode)),
        }
        # Pickles for Python 2, as torch makes them, have its names.
        found |= {"__builtin__.long": Known(value=int), "__builtin__.unicode": Known(value=str)}
        for module in ("builtins", "__builtin__"):
            found |= {f"{module}.{one.__name__}": Known(value=one) for one in _FACTORIES}
            found |= {
                f"{module}.set": Known(counted(set_of), value=set),
                f"{module}.frozenset": Known(counted(lambda items=(): frozenset(set_of(items)))),
                f"{module}.bytearray": Known(counted(lambda *given: bytearray(_bytes(*given)))),
                f"{module}.bytes": Known(counted(_bytes), value=bytes),
                f"{module}.complex": Known(_complex),
            }
        return found

    def _paths(self) -> dict[str, Known]:
        def made(kind: type[PurePath]) -> Known:
            def call(*parts: Any) -> PurePath:
                if not all(type(part) is str for part in parts):
                    raise TypeError("not the parts of a path")
                return kind(*parts)

            return Known(call=self._counted(call))

        # A path of the other operating system can only be a pure one here.
        here = type(Path())
        kinds: dict[str, type[PurePath]] = {
            "PosixPath": here if issubclass(here, PurePosixPath) else PurePosixPath,
            "WindowsPath": here if issubclass(here, PureWindowsPath) else PureWindowsPath,
            "PurePosixPath": PurePosixPath,
            "PureWindowsPath": PureWindowsPath,
        }
        return {
            f"{module}.{name}": made(kind)
            for module in ("pathlib", "pathlib._local")
            for name, kind in kinds.items()
        }


def _size(argument: Any) -> int:
    if isinstance(argument, str | bytes | bytearray):
        return 4 * len(argument)
    return _ITEM_BYTES * len(argument) if isinstance(argument, list | tuple | dict | set) else 0


# Tensors


def _tensors(tensors: Tensors, where: object) -> dict[str, Known]:
    rebuilds: dict[str, Callable[..., Any]] = {
        "torch._utils._rebuild_tensor": tensors.tensor,
        "torch._utils._rebuild_tensor_v2": tensors.tensor_v2,
        "torch._utils._rebuild_tensor_v3": tensors.tensor_v3,
        "torch._utils._rebuild_sparse_tensor": tensors.sparse,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch._utils._rebuild_device_tensor_from_cpu_tensor": _from_cpu,
        "torch._utils._rebuild_device_tensor_from_numpy": _from_numpy,
    }
    known = tuple(rebuilds.values())

    def typed(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
        """Make a tensor that has attributes, which a checkpoint does not keep."""
        del state
        if function not in known or kind not in ("Tensor", "Parameter"):
            raise UnsupportedValue(
                "the file holds a tensor of a class of its own",
                where=where,
                hint=f"Save a plain tensor of it. {KEEP}",
            )
        return function(*arguments)

    found = {name: Known(call=call, value=call) for name, call in rebuilds.items()}
    found["torch._tensor._rebuild_from_type_v2"] = Known(call=typed)
    found["torch.Tensor"] = Known(value="Tensor")
    found["torch.nn.parameter.Parameter"] = Known(call=_parameter, value="Parameter")
    found["torch.serialization._get_layout"] = Known(call=_layout)
    found["torch.storage.UntypedStorage"] = Known(value=StorageType(None))
    for kind, dtype in _STORAGES.items():
        for module in ("torch", "torch.cuda"):
            found[f"{module}.{kind}Storage"] = Known(value=StorageType(dtype))
    return found


def _parameter(data: Any, *more: Any) -> Any:
    """Return the tensor of a parameter: hooks and requires_grad are not kept."""
    del more
    if not isinstance(data, TensorBytes):
        raise TypeError("not the tensor of a parameter")
    return data


def _from_cpu(data: Any, dtype: Any, device: Any, requires_grad: Any) -> Any:
    del device, requires_grad
    if not isinstance(data, TensorBytes) or str(dtype) != f"torch.{data.dtype}":
        raise TypeError("not a tensor of this element type")
    return data


def _from_numpy(data: Any, dtype: Any, device: Any, requires_grad: Any) -> Any:
    if not isinstance(data, np.ndarray) or data.dtype.name not in ITEM_SIZES:
        raise TypeError("not the array of a tensor")
    flat: Any = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    made = TensorBytes(data.dtype.name, data.shape, memoryview(flat))
    return _from_cpu(made, dtype, device, requires_grad)


def _layout(text: Any) -> SparseLayout:
    if text not in [f"torch.sparse_{name}" for name in _LAYOUTS]:
        raise ValueError("an unknown layout")
    return SparseLayout(text)


# Containers


def _with_metadata(value: OrderedDict[Any, Any], attributes: Any) -> OrderedDict[Any, Any]:
    if type(attributes) is not dict or not attributes.keys() <= {"_metadata"}:
        raise ValueError("an OrderedDict with attributes")  # they could hide its methods
    vars(value).update(attributes)
    return value


def _counter(counts: Any = ()) -> Counter[Any]:
    if not isinstance(counts, dict | tuple) or (type(counts) is tuple and counts):
        raise TypeError("not the counts of a Counter")
    made: Counter[Any] = Counter()
    dict.update(made, counts)
    return made


def _default_dict(factory: Any = None) -> defaultdict[Any, Any]:
    if factory is not None and factory not in _FACTORIES:
        raise TypeError("not a factory of plain values")
    return defaultdict(factory)


def _deque(items: Any = (), bound: Any = None) -> deque[Any]:
    if type(items) not in (list, tuple) or not (bound is None or type(bound) is int):
        raise TypeError("not the items of a deque")
    return deque(items, bound)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise TypeError("not the text of bytes")
    return text.encode("latin-1")


def _bytes(data: Any = b"", encoding: Any = "latin1") -> bytes:
    return data if type(data) is bytes else _encode(data, encoding)


def _complex(real: Any, imag: Any) -> complex:
    if type(real) is not float or type(imag) is not float:
        raise TypeError("not the parts of a complex number")
    return complex(real, imag)


# Times


def _times() -> dict[str, Known]:
    def stamp(kind: Any, length: int) -> Known:
        def call(data: Any, zone: Any = None) -> Any:
            if type(data) is not bytes or len(data) != length:
                raise TypeError("not the bytes of a time")
            if zone is None:
                return kind(data)
            if kind is date or type(zone) is not timezone:
                raise TypeError("not a time zone")
            return kind(data, zone)

        return Known(call=call)

    def span(*parts: Any) -> timedelta:
        if len(parts) > 3 or any(type(part) is not int for part in parts):
            raise TypeError("not the parts of a timedelta")
        return timedelta(*parts)

    def zone(offset: Any, *name: Any) -> timezone:
        if type(offset) is not timedelta or len(name) > 1 or any(type(n) is not str for n in name):
            raise TypeError("not the parts of a time zone")
        # The unnamed zone of offset zero is UTC itself, as in Python's own reading.
        return timezone(offset, *name)

    return {
        "datetime.datetime": stamp(datetime, 10),
        "datetime.date": stamp(date, 4),
        "datetime.time": stamp(time, 6),
        "datetime.timedelta": Known(call=span),
        "datetime.timezone": Known(call=zone),
    }
