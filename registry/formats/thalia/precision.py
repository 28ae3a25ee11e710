"""Which tensors of a brain are stored with half precision, by the class of their names.

A policy names a precision for each class of tensors. The first class counts of which a part of the
name stands anywhere in the path; so everything below `weights` is a weight, a bias too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from holdfast.registry.errors import InvalidInput
from holdfast.registry.formats.thalia.tensors import as_array, mapped
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
    """A precision for each class of tensors, or for patterns of their names.

    `fp32` and `fp16` are the element types that are stored; `auto` is fp16 for a tensor of more
    than 1 MiB and fp32 for a smaller one. Integers and truth values are never changed.

    With `patterns` no class counts. A pattern such as `weights/*` fits a path that has its names,
    one after the other; `*` is any text of a name. The first that fits counts, or `default`.

    Attributes:
        weights: Whatever has `weight` or `w_` in its path: all that is below `weights`.
        biases: `bias` or `b_`.
        membrane: `membrane` or `v_mem`.
        traces: `trace`, `eligibility` or `stdp`.
        thresholds: `threshold`, `v_thresh` or `theta`.
        conductances: `conductance` or `g_`.
        default: All others.
        patterns: Precisions by pattern: `{"weights/*": "fp16", "membrane": "fp32"}`.
    """

    weights: Width = "fp32"
    biases: Width = "fp32"
    membrane: Width = "fp32"
    traces: Width = "fp32"
    thresholds: Width = "fp32"
    conductances: Width = "fp32"
    default: Width = "fp32"
    patterns: Mapping[str, Width] = field(default_factory=dict, repr=False, hash=False)

    def __post_init__(self) -> None:
        by_class = [getattr(self, kind) for kind in _CLASSES]
        for width in (*by_class, self.default, *self.patterns.values()):
            if width not in get_args(Width):
                raise InvalidInput(
                    "not a precision", expected=", ".join(get_args(Width)), found=repr(width)
                )
        if self.patterns and set(by_class) != {"fp32"}:
            raise InvalidInput(
                "a policy has patterns or classes, not both",
                expected="default and patterns",
                found=repr(self),
            )

    def __str__(self) -> str:
        if not self.patterns:
            return repr(self)
        return f"PrecisionPolicy(default={self.default!r}, patterns={dict(self.patterns)!r})"

    def dtype(self, path: str, nbytes: int) -> str:
        """Return the element type for a floating-point tensor.

        Args:
            path: Its path in the state.
            nbytes: Its size before it is converted.
        """
        width = self._by_pattern(path) if self.patterns else getattr(self, _class_of(path))
        if width == "auto":
            width = "fp16" if nbytes > _AUTO_BYTES else "fp32"
        return "float16" if width == "fp16" else "float32"

    def _by_pattern(self, path: str) -> Width:
        names = path.split("/")
        for pattern, width in self.patterns.items():
            wanted = pattern.split("/")
            starts = range(len(names) - len(wanted) + 1)
            if any(all(map(fnmatchcase, names[at:], wanted)) for at in starts):
                return width
        return self.default


def _class_of(path: str) -> str:
    name = path.lower().replace("/", ".")
    found = (kind for kind, parts in _CLASSES.items() if any(part in name for part in parts))
    return next(found, "default")


POLICIES: Final = {
    "fp32": PrecisionPolicy(),
    "fp16": PrecisionPolicy(weights="fp16", traces="fp16", conductances="fp16"),
    "mixed": PrecisionPolicy(weights="auto", traces="fp16", conductances="fp16"),
}
"""The policies that have names, as `save(..., precision="mixed")` takes them."""


def named(policy: str | PrecisionPolicy | None) -> PrecisionPolicy | None:
    """Return a policy by its name."""
    if policy is None or isinstance(policy, PrecisionPolicy):
        return policy
    if policy not in POLICIES:
        raise InvalidInput(
            "no such precision policy",
            expected=", ".join(POLICIES),
            found=repr(policy),
            hint=near(str(policy), list(POLICIES)),
        )
    return POLICIES[policy]


def converted(state: dict[str, Any], policy: PrecisionPolicy | None) -> dict[str, Any]:
    """Return a state whose regions and pathways have the types of a policy, if there is one.

    Tuples are left as they are: the programs of Thalia do not look into them.
    """

    def convert(leaf: Any, path: Trail) -> Any:
        if policy is None or not isinstance(leaf, TensorBytes) or leaf.dtype not in _FLOATS:
            return leaf
        return cast(leaf, policy.dtype(str(path), leaf.data.nbytes), str(path))

    return _changed(state, convert)


def widened(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state whose floating-point tensors are float32, as Thalia loads narrowed files."""

    def widen(leaf: Any, path: Trail) -> Any:
        is_float = isinstance(leaf, TensorBytes) and leaf.dtype in _FLOATS
        return cast(leaf, "float32", str(path)) if is_float else leaf

    return _changed(state, widen)


def _changed(state: dict[str, Any], change: Callable[[Any, Trail], Any]) -> dict[str, Any]:
    parts = {kind: state.get(kind, {}) for kind in ("regions", "pathways")}
    return state | {
        kind: mapped(one, Trail(kind), change, tuples=False) for kind, one in parts.items()
    }


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
