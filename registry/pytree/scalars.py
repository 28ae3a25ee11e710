"""Codecs of numbers, strings and byte strings; long ones leave the skeleton as leaves."""

from __future__ import annotations

import base64
from decimal import Decimal
from fractions import Fraction
from math import gcd
from types import EllipsisType
from typing import Any

from holdfast.registry.pytree.decoding import DECODERS, Decoder, atom
from holdfast.registry.pytree.encoding import HANDLERS, Encoder
from holdfast.registry.pytree.leaves import bytes_leaf
from holdfast.registry.pytree.paths import Link
from holdfast.registry.values import MAX_INTEGER, Json, float_from_hex, float_to_hex

#: Longer byte strings become leaves, in bytes.
MAX_INLINE_BYTES = 4096
#: Longer strings become leaves, in bytes of UTF-8.
MAX_INLINE_TEXT_BYTES = 65536
#: Checking that a fraction is reduced takes quadratic time, so its parts are bounded, in bits.
MAX_FRACTION_BITS = 16384


# Integers and floats


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


def pack_complex(value: complex) -> Json:
    """Return the bits of both parts."""
    return [float_to_hex(value.real), float_to_hex(value.imag)]


def unpack_complex(payload: Any) -> complex:
    """Undo `pack_complex`."""
    real, imag = payload
    return complex(float_from_hex(real), float_from_hex(imag))


def pack_fraction(value: Fraction) -> Json:
    """Return numerator and denominator."""
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_FRACTION_BITS:
        raise ValueError(f"a part has more than {MAX_FRACTION_BITS} bits")
    return [pack_int(value.numerator), pack_int(value.denominator)]


def unpack_fraction(payload: Any) -> Fraction:
    """Undo `pack_fraction`."""
    numerator, denominator = map(unpack_int, payload)
    if max(numerator.bit_length(), denominator.bit_length()) > MAX_FRACTION_BITS:
        raise ValueError("too long")
    if denominator < 1 or gcd(numerator, denominator) != 1:
        raise ValueError("not reduced")
    return Fraction(numerator, denominator)


def pack_range(value: range) -> Json:
    """Return start, stop and step."""
    return [pack_int(value.start), pack_int(value.stop), pack_int(value.step)]


def _encode_plain(encoder: Encoder, value: Any, link: Link, depth: int) -> Json:  # noqa: ARG001
    return value  # type: ignore[no-any-return]


def _encode_int(encoder: Encoder, value: int, link: Link, depth: int) -> Json:  # noqa: ARG001
    if -MAX_INTEGER <= value <= MAX_INTEGER:
        return value
    return {"i": format(value, "x")}


def _encode_float(encoder: Encoder, value: float, link: Link, depth: int) -> Json:  # noqa: ARG001
    return {"f": float_to_hex(value)}


HANDLERS[type(None)] = HANDLERS[bool] = _encode_plain
atom(int, "i", lambda value: format(value, "x"), lambda text: unpack_int({"i": text}))
atom(float, "f", float_to_hex, float_from_hex)
HANDLERS[int], HANDLERS[float] = _encode_int, _encode_float
atom(complex, "c", pack_complex, unpack_complex)
atom(range, "range", pack_range, lambda payload: range(*map(unpack_int, payload)))
atom(Decimal, "decimal", str, Decimal)
atom(Fraction, "fraction", pack_fraction, unpack_fraction)
atom(EllipsisType, "ellipsis", lambda _: True, lambda _: ...)


# Strings and byte strings


def pack_bytes(value: bytes | bytearray) -> Json:
    """Return base64."""
    return base64.b64encode(value).decode()


def encode_text(encoder: Encoder, value: str, link: Link, depth: int) -> Json:  # noqa: ARG001
    """Encode a string; a long one becomes a leaf of its UTF-8 bytes."""
    text = encoder.text(value, link)
    if len(text) * 4 > MAX_INLINE_TEXT_BYTES and not encoder.role:
        data = text.encode()
        if len(data) > MAX_INLINE_TEXT_BYTES:
            return {"S": encoder.add(bytes_leaf(data, link), link)}
    return text


def encode_bytes(encoder: Encoder, value: bytes, link: Link, depth: int) -> Json:  # noqa: ARG001
    """Encode a byte string; a long one becomes a leaf."""
    if len(value) > MAX_INLINE_BYTES and not encoder.role:
        return {"B": encoder.add(bytes_leaf(value, link), link)}
    return {"b": pack_bytes(value)}


def encode_bytearray(
    encoder: Encoder,
    value: bytearray,
    link: Link,
    depth: int,  # noqa: ARG001
) -> Json:
    """Encode a byte array; a long one becomes a leaf."""
    if len(value) > MAX_INLINE_BYTES and not encoder.role:
        return {"BA": encoder.add(bytes_leaf(value, link), link)}
    return {"ba": pack_bytes(value)}


def _raw(decoder: Decoder, index: Any, link: Link) -> bytes | bytearray | memoryview:
    data = decoder.array(index, link)
    if not isinstance(data, bytes | bytearray | memoryview):
        decoder.malformed(link, "not a byte string", "bytes", type(data).__name__)
    return data


def decode_text(decoder: Decoder, payload: Any, link: Link, depth: int) -> str:  # noqa: ARG001
    """Rebuild a long string."""
    try:
        return str(_raw(decoder, payload, link), "utf-8")
    except UnicodeDecodeError as error:
        decoder.malformed(link, "a string that is not UTF-8", "UTF-8", error.reason)


atom(bytes, "b", pack_bytes, base64.b64decode)
atom(bytearray, "ba", pack_bytes, lambda text: bytearray(base64.b64decode(text)))
HANDLERS.update({str: encode_text, bytes: encode_bytes, bytearray: encode_bytearray})
DECODERS["S"] = decode_text
DECODERS["B"] = lambda decoder, payload, link, _: bytes(_raw(decoder, payload, link))
DECODERS["BA"] = lambda decoder, payload, link, _: bytearray(_raw(decoder, payload, link))
