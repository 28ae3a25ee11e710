"""Which tensors of a brain are stored with half precision, by the class of their names.

A policy names a precision for each class of tensors. The first class counts of which a part of the
name stands anywhere in the path; so everything below `weights` is a weight, a bias too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from holdfast.registry.errors import InvalidInput
from holdfast.registry.formats.thalia.tensors import as_array
from holdfast.registry.pytree import TensorBytes, Trail
from holdfast.registry.pytree import allocate_bytes as allocate
from holdfast.registry.values import near

Width = Literal["fp32", "fp16", "auto"]

#: Class -> parts of names, in the order in which they are tried.
_CLASSES: Final = {
    "weights": ("weight", "w_"),
    "biases": ("bias", "b_"),
    "membrane": ("membrane", "v_mem"),
    "traces": ("trace", "eligibility", "stdp"),
    "thresholds": ("threshold", "v_thresh", "theta"),
    "conductances": ("conductance", "g_"),
}
_FLOATS: Final = ("float16", "float32", "float64")
#: `auto` narrows tensors above this size.
_AUTO_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """A precision for each class of tensors.

    `fp32` and `fp16` are the element types that are stored; `auto` is fp16 for a tensor of more
    than 1 MiB and fp32 for a smaller one. Integers and truth values are never changed.

    Attributes:
        weights: Whatever has `weight` or `w_` in its path: all that is below `weights`.
        biases: `bias` or `b_`.
        membrane: `membrane` or `v_mem`.
        traces: `trace`, `eligibility` or `stdp`.
        thresholds: `threshold`, `v_thresh` or `theta`.
        conductances: `conductance` or `g_`.
        default: All others.
    """

    weights: Width = "fp32"
    biases: Width = "fp32"
    membrane: Width = "fp32"
    traces: Width = "fp32"
    thresholds: Width = "fp32"
    conductances: Width = "fp32"
    default: Width = "fp32"

    def __post_init__(self) -> None:
        for width in astuple(self):
            if width not in get_args(Width):
                raise InvalidInput(
                    "not a precision", expected=", ".join(get_args(Width)), found=repr(width)
                )

    def dtype(self, path: str, nbytes: int) -> str:
        """Return the element type for a floating-point tensor.

        Args:
            path: Its path in the state.
            nbytes: Its size before it is converted.
        """
        name = path.lower().replace("/", ".")
        kind = next(
            (kind for kind, parts in _CLASSES.items() if any(part in name for part in parts)),
            "default",
        )
        width = getattr(self, kind)
        if width == "auto":
            width = "fp16" if nbytes > _AUTO_BYTES else "fp32"
        return "float16" if width == "fp16" else "float32"


POLICIES: Final = {
    "fp32": PrecisionPolicy(),
    "fp16": PrecisionPolicy(weights="fp16", traces="fp16", conductances="fp16"),
    "mixed": PrecisionPolicy(weights="auto", traces="fp16", conductances="fp16"),
}
"""The policies that have names, as `save(..., precision="mixed")` takes them."""


def named(policy: str | PrecisionPolicy) -> PrecisionPolicy:
    """Return a policy by its name."""
    if isinstance(policy, PrecisionPolicy):
        return policy
    if policy not in POLICIES:
        raise InvalidInput(
            "no such precision policy",
            expected=", ".join(POLICIES),
            found=repr(policy),
            hint=near(str(policy), list(POLICIES)),
        )
    return POLICIES[policy]


def converted(state: dict[str, Any], policy: PrecisionPolicy) -> dict[str, Any]:
    """Return a state whose regions and pathways have the types of a policy.

    Tuples are left as they are: the programs of Thalia do not look into them.
    """

    def convert(tensor: TensorBytes, path: str) -> TensorBytes:
        if tensor.dtype not in _FLOATS:
            return tensor
        return cast(tensor, policy.dtype(path, tensor.data.nbytes), path)

    return state | {kind: _mapped(state.get(kind, {}), Trail(kind), convert) for kind in _PARTS}


def widened(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state whose floating-point tensors are float32, as Thalia loads narrowed files."""

    def widen(tensor: TensorBytes, path: str) -> TensorBytes:
        return cast(tensor, "float32", path) if tensor.dtype in _FLOATS else tensor

    return state | {kind: _mapped(state.get(kind, {}), Trail(kind), widen) for kind in _PARTS}


_PARTS: Final = ("regions", "pathways")


def _mapped(value: Any, path: Trail, convert: Callable[[TensorBytes, str], TensorBytes]) -> Any:
    if isinstance(value, TensorBytes):
        return convert(value, str(path))
    if isinstance(value, dict):
        return {key: _mapped(item, path / key, convert) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, path / at, convert) for at, item in enumerate(value)]
    return value


def cast(tensor: TensorBytes, dtype: str, path: str) -> TensorBytes:
    """Return a tensor with another floating-point type."""
    if tensor.dtype == dtype:
        return tensor
    array: NDArray[Any] = as_array(tensor)
    made, _ = allocate(dtype, tensor.shape)
    narrow = as_array(made)
    with np.errstate(over="ignore", under="ignore"):
        np.copyto(narrow, array, casting="unsafe")
    if narrow.itemsize < array.itemsize and np.any(np.isinf(narrow)):
        lost = np.isinf(narrow) & np.isfinite(array)
        if np.any(lost):
            raise InvalidInput(
                f"a number is too large for {dtype}",
                where=path,
                found=float(np.max(np.abs(array[lost]))),
                hint="Keep this tensor in fp32.",
            )
    return made
