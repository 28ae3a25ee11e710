"""`unflatten`: rebuild a state from its stored components, or check that it can be rebuilt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from holdfast.registry.errors import IncompatibleState, Malformed
from holdfast.registry.pytree import containers, scalars, tensor_bytes  # noqa: F401 - they register codecs
from holdfast.registry.pytree.decoding import AdapterOf, Decoder
from holdfast.registry.pytree.encoding import registered
from holdfast.registry.pytree.paths import clip
from holdfast.registry.values import Json

#: Tags whose payload is an array or ends with arrays.
_ARRAYS = frozenset({"t", "n", "nt", "B", "BA", "S", "coo", "csr", "csc", "bsr", "bsc"})
_KINDS: dict[str, type[dict[str, Any]]] = {"dict": dict, "odict": OrderedDict}


def unflatten(
    kind: str,
    components: Sequence[tuple[str, Json, Sequence[object]]],
    *,
    adapter: AdapterOf = registered,
) -> dict[str, Any]:
    """Rebuild a state; `adapter` makes the values of adapters by name."""
    cls = _KINDS.get(kind)
    if cls is None:
        raise Malformed("unknown kind of state", expected=", ".join(_KINDS), found=clip(kind))
    state = cls()
    for name, skeleton, arrays in components:
        if type(name) is not str or name in state:
            raise Malformed("a component without a name of its own", found=clip(name))
        state[name] = unflatten_component(skeleton, arrays, name=name, adapter=adapter)
    return state


def unflatten_component(
    skeleton: Json, arrays: Sequence[object], *, name: str = "", adapter: AdapterOf = registered
) -> Any:
    """Rebuild one component; `name` is for messages. Raises the errors of `unflatten`."""
    link = (None, name)
    decoder = Decoder(arrays, adapter)
    value = decoder.node(skeleton, link, 1)
    decoder.finish(link)
    return value


def check_values(name: str, skeleton: Json) -> None:
    """Check that the values of a skeleton can be rebuilt, without its arrays.

    Values of an adapter or a library that this process does not have are not checked.
    """
    try:
        unflatten_component(_without_arrays(skeleton), (), name=name)
    except IncompatibleState:
        return


def _without_arrays(node: Any) -> Any:
    """Return a node with null in place of each array; keys and sets hold none and are kept."""
    if type(node) is list:
        return [_without_arrays(item) for item in node]
    if type(node) is not dict or len(node) != 1:
        return node
    [(tag, payload)] = node.items()
    try:
        match tag:
            case "d" | "od" | "counter":
                return {tag: _pairs(payload)}
            case "sd":
                return {tag: [_pairs(payload[0]), *payload[1:]]}
            case "dd":
                return {tag: [payload[0], _pairs(payload[1]), *payload[2:]]}
            case "deque":
                return {tag: [payload[0], _without_arrays(payload[1]), *payload[2:]]}
            case "tu":
                return {tag: _without_arrays(payload)}
            case "ad":
                return _without_arrays(payload[1])
    except (TypeError, ValueError, LookupError):
        return node  # decoding refuses it
    return None if tag in _ARRAYS else node


def _pairs(payload: Any) -> list[Any]:
    return [[key, _without_arrays(value)] for key, value in payload]
