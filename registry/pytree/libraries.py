"""Load the codecs of torch, numpy and jax at the first of their values or tags, never before.

A state can hold a library's values only if that library is loaded, so flattening looks in
`sys.modules`; rebuilding imports it. No other module of this package imports one of them, except
through the wrappers that are loaded here.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from holdfast.registry.errors import IncompatibleState

#: The module that wraps a library -> the library, and the tags that the module rebuilds.
_WRAPPERS = {
    "holdfast.registry.pytree.torch_arrays": (
        "torch",
        frozenset({"ts", "tt", "tv", "tver", "coo", "csr", "csc", "bsr", "bsc"}),
    ),
    "holdfast.registry.pytree.numpy_arrays": ("numpy", frozenset({"n", "nt", "ns", "nd"})),
    "holdfast.registry.pytree.jax_arrays": ("jax", frozenset()),  # its arrays are stored as numpy's
}
_INSTALL = {
    "torch": "Install it: pip install torch.",
    "numpy": "Install it: pip install numpy.",
    "jax": "Install it: pip install jax.",
}
_loaded: set[str] = set()


def load_seen() -> None:
    """Load the wrapper of every library that this process has imported."""
    if len(_loaded) == len(_WRAPPERS):
        return
    for wrapper, (library, _) in _WRAPPERS.items():
        if wrapper not in _loaded and sys.modules.get(library) is not None:
            _load(wrapper)


def load_for_tag(tag: str) -> bool:
    """Load the wrapper that rebuilds a tag; return whether this call loaded one."""
    for wrapper, (_, tags) in _WRAPPERS.items():
        if tag in tags and wrapper not in _loaded:
            _load(wrapper)
            return True
    return False


def torch_wrapper() -> ModuleType:
    """Return the module that wraps torch."""
    return _load("holdfast.registry.pytree.torch_arrays")


def numpy_wrapper() -> ModuleType:
    """Return the module that wraps numpy."""
    return _load("holdfast.registry.pytree.numpy_arrays")


def _load(wrapper: str) -> ModuleType:
    library = _WRAPPERS[wrapper][0]
    try:
        module = importlib.import_module(wrapper)
    except ImportError as error:
        raise IncompatibleState(
            f"this state holds values of {library}, which cannot be imported",
            found=error,
            hint=_INSTALL[library],
        ) from error
    _loaded.add(wrapper)
    return module
