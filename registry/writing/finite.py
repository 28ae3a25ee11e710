"""Find NaN and infinity in tensors of any library by their bits, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from holdfast.backends import Buffer
from holdfast.registry.pytree import ArrayLeaf

#: Dtype -> (bytes of a word, mask, pattern). A word is not finite if its bits under the mask are
#: the pattern. The mask is the exponent, or all bits if one NaN is the only such value.
_NOT_FINITE = {
    "float8_e5m2": (1, 0x7C, 0x7C),
    "float8_e5m2fnuz": (1, 0xFF, 0x80),
    "float8_e4m3fn": (1, 0x7F, 0x7F),
    "float8_e4m3fnuz": (1, 0xFF, 0x80),
    "float8_e8m0fnu": (1, 0xFF, 0xFF),
    "float16": (2, 0x7C00, 0x7C00),
    "bfloat16": (2, 0x7F80, 0x7F80),
    "float32": (4, 0x7F80_0000, 0x7F80_0000),
    "float64": (8, 0x7FF0_0000_0000_0000, 0x7FF0_0000_0000_0000),
    "complex32": (2, 0x7C00, 0x7C00),
    "complex64": (4, 0x7F80_0000, 0x7F80_0000),
    "complex128": (8, 0x7FF0_0000_0000_0000, 0x7FF0_0000_0000_0000),
}
#: Words in one step: few enough that the masked copy stays in the processor's cache.
_BLOCK = 2**16
#: The most paths that a checkpoint lists.
NAMED_AT_MOST = 8


def is_watched(leaf: ArrayLeaf, patterns: Sequence[str]) -> bool:
    """Return whether a tensor is checked for NaN and infinity."""
    return leaf.dtype in _NOT_FINITE and any(fnmatchcase(leaf.path, p) for p in patterns)


def is_finite(data: Buffer, dtype: str) -> bool:
    """Return whether elements hold neither NaN nor infinity."""
    import numpy as np  # here, since `import holdfast` stays light

    size, mask, pattern = _NOT_FINITE[dtype]
    words = np.frombuffer(data, dtype=f"<u{size}")
    bits, wrong = words.dtype.type(mask), words.dtype.type(pattern)
    return not any(
        ((words[start : start + _BLOCK] & bits) == wrong).any()
        for start in range(0, len(words), _BLOCK)
    )
