"""bfloat16 and float8 as element types of zarr: those of `ml_dtypes`, registered with zarr.

zarr itself has no such types. Their names are those of `ml_dtypes`, which other writers of Zarr
use, too. A type that another package has registered under its name stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeGuard

import numpy as np
from zarr.core.dtype.npy.float import BaseFloat
from zarr.dtype import data_type_registry

from holdfast.registry.loading.zarr.layout import BITS
from holdfast.registry.values import ITEM_SIZES


@dataclass(frozen=True, kw_only=True)
class _MlFloat(BaseFloat[Any, Any]):
    """A type of `ml_dtypes`; its subclasses name it."""

    native: ClassVar[np.dtype[Any]]
    _zarr_v2_names: ClassVar[tuple[str, ...]] = ()

    @property
    def item_size(self) -> int:
        """Size of an element in bytes."""
        return self.native.itemsize

    def to_native_dtype(self) -> Any:
        """Return the type of NumPy."""
        return self.native

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Any:
        """Return this type for the type of NumPy; for another one raise zarr's own error."""
        # Where zarr defines that error depends on its version; its base class raises it.
        return cls() if dtype == cls.native else super().from_native_dtype(dtype)

    def _check_scalar(self, data: object) -> TypeGuard[Any]:
        return isinstance(data, self.native.type) or super()._check_scalar(data)

    def to_json_scalar(self, data: object, *, zarr_format: Any) -> float | str:  # noqa: ARG002
        """Return a fill value for metadata."""
        # zarr would look at its type, which is no type of NumPy's own.
        found = np.float64(self.cast_scalar(data))
        return "NaN" if np.isnan(found) else _INFINITE.get(float(found), float(found))

    def from_json_scalar(self, data: Any, *, zarr_format: Any) -> Any:
        """Return a fill value of metadata: a number, its name, or its bits as `0x...`."""
        if isinstance(data, str) and data.startswith("0x"):
            bits = int(data, 16).to_bytes(self.item_size, "little")
            return np.frombuffer(bits, self.native)[0]
        return super().from_json_scalar(data, zarr_format=zarr_format)


_INFINITE: dict[float, float | str] = {np.inf: "Infinity", -np.inf: "-Infinity"}


@cache
def native_types() -> frozenset[str]:
    """Register the types with zarr, once; return their names."""
    try:
        import ml_dtypes
    except ImportError:
        return frozenset()
    floats = (name for name in BITS if "float" in name)
    known = frozenset(name for name in floats if hasattr(ml_dtypes, name))
    for name in known:
        if name not in data_type_registry.contents:
            data_type_registry.register(name, _type_of(name, np.dtype(getattr(ml_dtypes, name))))
    return known


def _type_of(name: str, native: np.dtype[Any]) -> type[_MlFloat]:
    """Make the type of zarr for a type of NumPy."""
    assert native.itemsize == ITEM_SIZES[name]
    members = {
        "native": native,
        "dtype_cls": type(native),
        "_zarr_v3_name": name,
        "__module__": __name__,
        "__doc__": f"{name} of ml_dtypes.",
    }
    made = type(f"{name.title()}Type", (_MlFloat,), members)
    globals()[made.__name__] = made  # pickle finds it by its name
    return made
