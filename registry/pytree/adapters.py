"""Register adapters: they store and load a caller's own types.

An adapter names a type; the name is stored, the type never is. Loading looks up the name among the
adapters of this process and runs nothing else, so a checkpoint cannot choose code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.registry.errors import InvalidInput
from holdfast.registry.pytree import containers, libraries, scalars, tensor_bytes  # noqa: F401 - they register codecs
from holdfast.registry.pytree.encoding import ADAPTERS, HANDLERS, Adapter


def register_adapter(
    name: str, cls: type, *, to_plain: Callable[[Any], Any], from_plain: Callable[[Any], Any]
) -> None:
    """Teach this process to store and load a type, such as a named tuple, enum or dataclass.

    Args:
        name: The name that is stored for the type, for example `myproject.Config`. Never change it.
        cls: The exact type; subclasses are not included.
        to_plain: Returns a storable value for an instance; it may hold arrays.
        from_plain: Undoes `to_plain`.

    Raises:
        InvalidInput: The name belongs to another type, or the type to another name, or the type
            is built in.
    """
    if type(name) is not str or not name or not isinstance(cls, type):
        raise InvalidInput("an adapter needs a name and a type", found=f"{name!r}, {cls!r}")
    libraries.load_seen()
    if cls in HANDLERS or cls.__module__ == "builtins":
        raise InvalidInput("a built-in type takes no adapter", where=cls.__name__)
    ADAPTERS.add(Adapter(name, cls, to_plain, from_plain))
