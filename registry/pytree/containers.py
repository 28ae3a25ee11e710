"""Codecs of the standard containers: dicts, sequences, sets, slices."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import suppress
from itertools import pairwise
from typing import Any

from holdfast.registry.errors import RegistryError
from holdfast.registry.pytree.decoding import DECODERS, DecodeNode, Decoder, pack_int, unpack_int
from holdfast.registry.pytree.encoding import HANDLERS, Encoder, Handler
from holdfast.registry.pytree.paths import Link, OddKey, clip
from holdfast.registry.values import MOST_EQUAL, Json, KeyHashes, canonical

#: The only default factories that are stored, by name; a name is never looked up anywhere else.
FACTORIES: dict[str, type] = {
    factory.__name__: factory for factory in (bool, dict, float, int, list, set, str, tuple, bytes)
}
_FACTORY_NAMES: dict[object, str] = {factory: name for name, factory in FACTORIES.items()}
_METADATA = OddKey("._metadata", "._metadata")
_EQUAL = f"more than {MOST_EQUAL} keys or items with the same hash"


# Encoding


def encode_pairs(encoder: Encoder, value: dict[Any, Any], link: Link, depth: int) -> list[Json]:
    """Encode a dict as ordered pairs."""
    encoder.enter(value, link, depth)
    depth += 1
    pairs: list[Json] = []
    append = pairs.append
    handlers, node = HANDLERS.get, encoder.node
    hashes = KeyHashes()
    odd: set[str] | None = None  # spellings of the keys that are neither strings nor small integers
    for key, item in value.items():
        encoded: Json = key
        step: Any = key
        if type(key) is not str or not key.isascii():
            encoded, step = encoder.key(key, link, depth)
            if not hashes.admits(key):
                encoder.refuse(link, _EQUAL, "Store them as a list of pairs.")
            if type(step) is OddKey:
                odd = odd or set()
                if step.text in odd and _loads_as_one(encoded):
                    encoder.refuse(link, "two keys are stored alike", "Store a list of pairs.")
                odd.add(step.text)
        handler = handlers(type(item))
        if handler is None:
            append([encoded, node(item, (link, step), depth)])
        else:
            append([encoded, handler(encoder, item, (link, step), depth)])
    encoder.leave(value)
    return pairs


def _loads_as_one(node: Json) -> bool:
    """Return whether two loads of a key are equal; those of NaN are not."""
    with suppress(RegistryError, TypeError):  # such as for the lack of an adapter
        return len({Decoder(()).plain(node, (None, ""), 1) for _ in range(2)}) == 1
    return False


def encode_items(encoder: Encoder, value: Any, link: Link, depth: int) -> list[Json]:
    """Encode the items of a sequence."""
    encoder.enter(value, link, depth)
    depth += 1
    node = encoder.node
    items = [node(item, (link, index), depth) for index, item in enumerate(value)]
    encoder.leave(value)
    return items


def encode_ordered(encoder: Encoder, value: OrderedDict[Any, Any], link: Link, depth: int) -> Json:
    """Encode an OrderedDict with the version metadata that a torch module adds to it."""
    pairs = encode_pairs(encoder, value, link, depth)
    attributes = vars(value)
    if not attributes:
        return {"od": pairs}
    if attributes.keys() != {"_metadata"}:
        name = next(key for key in attributes if key != "_metadata")
        encoder.refuse(
            link, f"an OrderedDict with an attribute ({name}) cannot be stored", "Store both apart."
        )
    with encoder.plain("the metadata of a state_dict"):
        metadata = encoder.node(attributes["_metadata"], (link, _METADATA), depth + 1)
    return {"sd": [pairs, metadata]}


def encode_defaultdict(
    encoder: Encoder, value: defaultdict[Any, Any], link: Link, depth: int
) -> Json:
    """Encode a defaultdict whose factory is None or in the closed list."""
    factory: Any = value.default_factory
    name = _FACTORY_NAMES.get(factory) if isinstance(factory, type) else None
    if factory is not None and name is None:
        encoder.refuse(
            link,
            f"a defaultdict of {clip(factory)} cannot be stored",
            f"Use one of {', '.join(FACTORIES)}, or store dict(x).",
        )
    return {"dd": [name, encode_pairs(encoder, value, link, depth)]}


def encode_set(encoder: Encoder, value: Any, link: Link, depth: int) -> list[Json]:
    """Encode the items of a set in the order of their encoded bytes, whatever the hash order."""
    if not all(map(KeyHashes().admits, value)):
        encoder.refuse(link, _EQUAL, "Store them as a list.")
    with encoder.plain("a set"), encoder.inside(value, link, depth):
        items = [encoder.node(item, link, depth + 1) for item in value]
    spelled = {canonical.encode(item): item for item in items}
    if len(spelled) < len(items):
        encoder.refuse(link, "two items of a set are stored alike", "Store them as a list.")
    return [spelled[text] for text in sorted(spelled)]


def encode_deque(encoder: Encoder, value: deque[Any], link: Link, depth: int) -> Json:
    """Encode a deque with its bound."""
    bound = None if value.maxlen is None else pack_int(value.maxlen)
    return {"deque": [bound, encode_items(encoder, value, link, depth)]}


def encode_slice(encoder: Encoder, value: slice, link: Link, depth: int) -> Json:
    """Encode the three parts of a slice."""
    with encoder.plain("a slice"), encoder.inside(value, link, depth):
        parts = (value.start, value.stop, value.step)
        return {"slice": [encoder.node(part, link, depth + 1) for part in parts]}


def _tagged(tag: str, encode: Handler) -> Handler:
    return lambda encoder, value, link, depth: {tag: encode(encoder, value, link, depth)}


HANDLERS.update(
    {
        dict: _tagged("d", encode_pairs),
        OrderedDict: encode_ordered,
        Counter: _tagged("counter", encode_pairs),
        defaultdict: encode_defaultdict,
        list: encode_items,
        tuple: _tagged("tu", encode_items),
        set: _tagged("set", encode_set),
        frozenset: _tagged("fset", encode_set),
        deque: encode_deque,
        slice: encode_slice,
    }
)


# Decoding


def fill(decoder: Decoder, target: Any, payload: Any, link: Link, depth: int) -> Any:
    """Set the pairs of a payload in a dict."""
    decoder.check_list(payload, link, depth)
    depth += 1
    node, hashes = decoder.node, KeyHashes()
    for pair in payload:
        if type(pair) is not list or len(pair) != 2:
            decoder.malformed(link, "not a pair", "[key, value]", clip(pair))
        key, item = pair
        step = key
        if type(key) is not str:
            key, step = decoder.key(key, link, depth)
        try:
            if step is not key and not hashes.admits(key):
                decoder.malformed(link, _EQUAL, "fewer", clip(key))
            if type(item) is dict and len(item) == 1:  # as nearly all in a model
                [(tag, inner)] = item.items()
                if tag in DECODERS:
                    target[key] = DECODERS[tag](decoder, inner, (link, step), depth)
                    continue
            target[key] = node(item, (link, step), depth)
        except TypeError:
            decoder.malformed(link, "a key that cannot be hashed", "a hashable key", clip(key))
    if len(target) != len(payload):
        decoder.malformed(link, "a key occurs twice", f"{len(payload)} keys", f"{len(target)}")
    return target


def decode_defaultdict(decoder: Decoder, payload: Any, link: Link, depth: int) -> Any:
    """Rebuild a defaultdict."""
    decoder.check_list(payload, link, depth, 2)
    name, pairs = payload
    if name is not None and (type(name) is not str or name not in FACTORIES):
        decoder.malformed(link, "an unknown default factory", ", ".join(FACTORIES), clip(name))
    factory = None if name is None else FACTORIES[name]
    return fill(decoder, defaultdict(factory), pairs, link, depth)


def decode_state_dict(decoder: Decoder, payload: Any, link: Link, depth: int) -> Any:
    """Rebuild an OrderedDict that carries version metadata."""
    decoder.check_list(payload, link, depth, 2)
    result: Any = fill(decoder, OrderedDict(), payload[0], link, depth)
    result._metadata = decoder.plain(payload[1], (link, _METADATA), depth + 1)
    return result


def decode_set(decoder: Decoder, payload: Any, link: Link, depth: int) -> Any:
    """Rebuild the items of a set; they must be in the order of their bytes."""
    decoder.check_list(payload, link, depth)
    spelled = [canonical.encode(item) for item in payload]
    if any(first >= second for first, second in pairwise(spelled)):
        decoder.malformed(link, "a set out of order", "ascending items", clip(payload))
    items = [decoder.plain(item, link, depth + 1) for item in payload]
    try:
        if not all(map(KeyHashes().admits, items)):
            decoder.malformed(link, _EQUAL, "fewer", clip(payload))
        result = set(items)
    except TypeError:
        decoder.malformed(link, "an item that cannot be hashed", "hashable items", clip(items))
    if len(result) != len(items):
        decoder.malformed(link, "an item occurs twice", "distinct items", clip(payload))
    return result


def decode_deque(decoder: Decoder, payload: Any, link: Link, depth: int) -> Any:
    """Rebuild a deque."""
    decoder.check_list(payload, link, depth, 2)
    bound, nodes = payload
    items = decoder.nodes(nodes, link, depth)
    try:
        limit = None if bound is None else unpack_int(bound)
        if limit is None or len(items) <= limit:
            return deque(items, limit)
    except (ValueError, OverflowError):
        pass
    return decoder.malformed(link, "a bad bound of a deque", "at least its length", clip(bound))


def decode_slice(decoder: Decoder, payload: Any, link: Link, depth: int) -> Any:
    """Rebuild a slice."""
    decoder.check_list(payload, link, depth, 3)
    return slice(*(decoder.plain(part, link, depth + 1) for part in payload))


def _filled(new: type[dict[Any, Any]]) -> DecodeNode:
    return lambda decoder, payload, link, depth: fill(decoder, new(), payload, link, depth)


DECODERS.update(
    {
        "d": _filled(dict),
        "od": _filled(OrderedDict),
        "sd": decode_state_dict,
        "counter": _filled(Counter),
        "dd": decode_defaultdict,
        "tu": lambda decoder, payload, link, depth: tuple(decoder.nodes(payload, link, depth)),
        "set": decode_set,
        "fset": lambda decoder, payload, link, depth: frozenset(
            decode_set(decoder, payload, link, depth)
        ),
        "deque": decode_deque,
        "slice": decode_slice,
    }
)
