"""`unflatten`: components put together again into the state they came from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from holdfast.registry.errors import Malformed
from holdfast.registry.pytree import containers, scalars, stamps
from holdfast.registry.pytree.decoding import Decoder
from holdfast.registry.pytree.paths import clip
from holdfast.registry.values.canonical import Json

# Imported for the codecs that they register.
__all__ = ["containers", "scalars", "stamps", "unflatten", "unflatten_component"]

_KINDS: dict[str, type[dict[str, Any]]] = {"dict": dict, "odict": OrderedDict}


def unflatten(
    kind: str, components: Sequence[tuple[str, Json, Sequence[object]]]
) -> dict[str, Any]:
    """Put a state together.

    Args:
        kind: `FlatState.kind`.
        components: Name, skeleton and arrays by number, of each component in order.

    Raises:
        Malformed: A skeleton breaks a rule of the format or does not fit its arrays.
        IncompatibleState: A value needs a library or an adapter that is not here.
    """
    cls = _KINDS.get(kind)
    if cls is None:
        raise Malformed("unknown kind of state", expected=", ".join(_KINDS), found=clip(kind))
    state = cls()
    for name, skeleton, arrays in components:
        if type(name) is not str or name in state:
            raise Malformed("a component without a name of its own", found=clip(name))
        state[name] = unflatten_component(skeleton, arrays, name=name)
    return state


def unflatten_component(skeleton: Json, arrays: Sequence[object], *, name: str = "") -> Any:
    """Put one component together; `name` is for messages. Raises as `unflatten` does."""
    link = (None, name)
    decoder = Decoder(arrays)
    value = decoder.node(skeleton, link, 1)
    decoder.finish(link)
    return value
