"""`Decoder`: rebuilds the values of one component.

The skeleton is foreign and may be hostile: every node is checked, no name is imported, and every
defect raises `Malformed` with the path. The codec modules fill `DECODERS` and `ATOMS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from holdfast.registry.errors import IncompatibleState, Malformed
from holdfast.registry.pytree import libraries
from holdfast.registry.pytree.encoding import HANDLERS, MAX_DEPTH, Encoder, Handler, registered
from holdfast.registry.pytree.paths import Link, OddKey, clip, where
from holdfast.registry.values import MAX_INTEGER, Json, canonical

DecodeNode = Callable[["Decoder", Any, Link, int], Any]
DecodeAtom = Callable[[Any], Any]
#: Returns the function that makes the values of the adapter of a name.
AdapterOf = Callable[[str], Callable[[Any], Any] | None]

#: Tag -> the function that rebuilds a node with other nodes or arrays in it.
DECODERS: dict[str, DecodeNode] = {}
#: Tag -> (payload to value, value to payload); the second proves that the spelling is canonical.
ATOMS: dict[str, tuple[DecodeAtom, Callable[[Any], Json]]] = {}


class Decoder:
    """Rebuilds the values of one component from its skeleton and its arrays."""

    __slots__ = ("_arrays", "_next", "_plain", "adapter")

    def __init__(self, arrays: Sequence[object], adapter: AdapterOf = registered) -> None:
        self._arrays = arrays
        self.adapter = adapter
        self._next = 0
        self._plain = False

    def node(self, node: Any, link: Link, depth: int) -> Any:
        """Decode a node."""
        kind = type(node)
        if kind is dict:
            if len(node) != 1:
                self.malformed(link, "a node is not one tag", "one key", f"{len(node)} keys")
            [(tag, payload)] = node.items()
            decode = DECODERS.get(tag)
            if decode is not None:
                return decode(self, payload, link, depth)
            return self._atom(tag, payload, link, depth)
        if kind is str or kind is bool or node is None:
            return node
        if kind is int:
            if -MAX_INTEGER <= node <= MAX_INTEGER:
                return node
            self.malformed(link, "an integer beyond 2^53", "tag 'i'", clip(node))
        if kind is list:
            return self.nodes(node, link, depth)
        return self.malformed(link, "not a node of a skeleton", "canonical JSON", kind.__name__)

    def nodes(self, payload: Any, link: Link, depth: int) -> list[Any]:
        """Decode a JSON array of nodes."""
        self.check_list(payload, link, depth)
        depth += 1
        node = self.node
        return [node(item, (link, index), depth) for index, item in enumerate(payload)]

    def key(self, node: Any, link: Link, depth: int) -> tuple[Any, Any]:
        """Decode a key of a dict; return it and its step in a path."""
        value = self.plain(node, link, depth)
        if type(node) is str or type(node) is int:
            return value, node
        return value, OddKey(canonical.encode(node).decode(), f"[{clip(value)}]")

    def plain(self, node: Any, link: Link, depth: int) -> Any:
        """Decode a node that must hold no array."""
        outer, self._plain = self._plain, True
        value = self.node(node, link, depth)
        self._plain = outer
        return value

    def array(self, index: Any, link: Link) -> Any:
        """Return the array that a node names; arrays must be named in order."""
        expected = self._next
        if type(index) is int and index == expected < len(self._arrays) and not self._plain:
            self._next = expected + 1
            return self._arrays[index]
        if type(index) is not int or index != expected:
            self.malformed(link, "arrays out of order", f"array {expected}", clip(index))
        if expected >= len(self._arrays):
            self.malformed(
                link, "no such array", f"an index below {len(self._arrays)}", clip(index)
            )
        return self.malformed(link, "an array in a key or set", "a plain value", f"array {index}")

    def finish(self, link: Link) -> None:
        """Check that every array was used."""
        if self._next != len(self._arrays):
            self.malformed(
                link, "arrays left over", f"{self._next} arrays", f"{len(self._arrays)} arrays"
            )

    def check_list(self, payload: Any, link: Link, depth: int, length: int | None = None) -> None:
        """Check that a payload is a JSON array, not too deep, and of `length` if that is given."""
        if type(payload) is not list or (length is not None and len(payload) != length):
            expected = "a list" if length is None else f"a list of {length}"
            self.malformed(link, "wrong payload", expected, clip(payload))
        if depth >= MAX_DEPTH:
            self.malformed(link, "nested too deeply", f"at most {MAX_DEPTH} levels", "more")

    def malformed(self, link: Link, what: str, expected: object, found: object) -> NoReturn:
        """Raise the error that names the path."""
        raise Malformed(f"{what} in a skeleton", where=where(link), expected=expected, found=found)

    def _atom(self, tag: Any, payload: Any, link: Link, depth: int) -> Any:
        codec = ATOMS.get(tag)
        if codec is None:
            if libraries.load_for_tag(tag):
                return self.node({tag: payload}, link, depth)
            self.malformed(link, "an unknown tag", "a tag of the format", clip(tag))
        unpack, pack = codec
        try:
            value = unpack(payload)
            if canonical.encode(pack(value)) == canonical.encode(payload):
                return value
        except IncompatibleState:
            raise
        except Exception as error:  # foreign bytes can make a constructor raise anything
            raise Malformed(
                f"bad value under tag {tag!r} in a skeleton", where=where(link), found=clip(payload)
            ) from error
        return self.malformed(
            link, f"another spelling under tag {tag!r}", "the canonical one", clip(payload)
        )


def decode_adapted(decoder: Decoder, payload: Any, link: Link, depth: int) -> Any:
    """Rebuild a value of a type that the caller registered."""
    decoder.check_list(payload, link, depth, 2)
    name, node = payload
    if type(name) is not str:
        decoder.malformed(link, "an adapter without a name", "a string", clip(name))
    from_plain = decoder.adapter(name)
    if from_plain is None:
        raise IncompatibleState(
            f"no adapter named {name!r} is registered",
            where=where(link),
            hint="Call holdfast.register_adapter with this name before loading.",
        )
    plain = decoder.node(node, link, depth + 1)
    try:
        return from_plain(plain)
    except Exception as error:  # the caller's code may raise anything for a hostile value
        raise Malformed(
            f"the adapter {name!r} refused its stored value", where=where(link), found=error
        ) from error


DECODERS["ad"] = decode_adapted


def atom(cls: type, tag: str, pack: Callable[[Any], Json], unpack: Callable[[Any], Any]) -> None:
    """Register a codec of values that are stored in the skeleton as a whole."""
    HANDLERS[cls] = atom_handler(tag, pack)
    ATOMS[tag] = (unpack, pack)


def atom_handler(tag: str, pack: Callable[[Any], Json]) -> Handler:
    """Return the handler that stores the result of `pack`."""

    def handle(encoder: Encoder, value: Any, link: Link, depth: int) -> Json:  # noqa: ARG001
        try:
            return {tag: pack(value)}
        except ValueError as error:
            encoder.refuse(link, f"{clip(value)} cannot be stored ({error})", "Store its parts.")

    return handle


def pack_int(value: int) -> Json:
    """Return an integer as itself, or tagged beyond 2^53."""
    if -MAX_INTEGER <= value <= MAX_INTEGER:
        return value
    return {"i": format(value, "x")}


def unpack_int(node: Any) -> int:
    """Undo `pack_int`."""
    if type(node) is int:
        value = node
    elif type(node) is dict and node.keys() == {"i"} and type(node["i"]) is str:
        value = int(node["i"], 16)
    else:
        raise ValueError("not an integer")
    if pack_int(value) != node:
        raise ValueError("not the canonical spelling of an integer")
    return value
