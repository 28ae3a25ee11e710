"""Check the metadata of foreign Zarr arrays before zarr sees it: element types, shapes, codecs.

Decides which arrays can become tensors, and which codecs zarr may use. Codecs are a closed list:
those of zarr and numcodecs that turn numbers into numbers. Without it, metadata could name a codec
that unpickles (`pickle` of version 2), or any codec of an installed package. This module reads no
file and does not need zarr; section 31 of the specification has the rules.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NoReturn

import numpy as np

from holdfast.registry.errors import InvalidInput
from holdfast.registry.loading.zarr.layout import (
    BITS,
    DOCUMENT,
    DTYPE_ATTRIBUTE,
    ORIGINAL_ATTRIBUTE,
    is_position,
)
from holdfast.registry.objects import NARROW_DTYPES, ORIGINAL_DTYPES
from holdfast.registry.values import ITEM_SIZES

#: The most chunks of an array, including those within shards: zarr lists them all at once.
MAX_CHUNKS = 2**20
#: The most axes of an array, as in NumPy.
_MAX_AXES = 64
_SHARDING = "sharding_indexed"
#: The most levels of shards within shards.
_MAX_SHARDS = 4
#: Codecs of version 3 itself.
_CODECS = frozenset({"bytes", "transpose", "blosc", "gzip", "zstd", "crc32c", _SHARDING})
#: Codecs of numcodecs: by these ids in version 2, as `numcodecs.ID` in version 3.
_NUMCODECS = frozenset(
    {
        *("blosc", "bz2", "gzip", "lz4", "zlib", "zstd"),
        *("astype", "bitround", "delta", "fixedscaleoffset", "packbits", "quantize", "shuffle"),
        *("adler32", "crc32", "crc32c", "fletcher32", "jenkins_lookup3"),
    }
)
#: Codecs whose output can be much longer than their input. A chunk may have one of them, and
#: nothing but checksums around it, so that `expansion` can check it first.
_COMPRESSORS = frozenset({"blosc", "bz2", "gzip", "lz4", "zlib", "zstd"})
_CRC_BYTES = 4
#: The most codecs of a chain: each makes a copy of the chunk.
_MAX_CODECS = 32
#: Fields of codecs that name an element type; none may be one of objects.
_DTYPE_FIELDS = ("dtype", "astype", "encode_dtype", "decode_dtype")
_PLAIN_DTYPE = re.compile(r"[<>|=]?[biufc][0-9]{1,2}|u?int[0-9]{1,2}|float[0-9]{2}|bool")
#: Element types that zarr reads, under the same names.
_NATIVE = frozenset(ITEM_SIZES) - frozenset(BITS)
#: NumPy's letters of version 2 -> our names.
_LETTERS = {
    "b1": "bool",
    **{f"{kind[0]}{n}": f"{kind}{8 * n}" for kind in ("int", "uint") for n in (1, 2, 4, 8)},
    **{f"f{n}": f"float{8 * n}" for n in (2, 4, 8)},
    **{f"c{n}": f"complex{8 * n}" for n in (8, 16)},
}
_V2_DTYPE = re.compile(r"[<>|]([biufc][0-9]{1,2})")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]{1,16}")
_HINT = "Nothing was stored. Convert the array, or leave it out of the folder."


@dataclass(frozen=True, slots=True)
class Chunks:
    """How chunks are encoded: those of an array, or those within a shard."""

    shape: tuple[int, ...]  # axis lengths; every one at least 1
    compressor: str | None  # the codec of a chunk, if its output can be longer than its input
    trailer_bytes: int  # length of the checksums after the compressed bytes, or after the shard
    shard: Shard | None = None  # how a chunk is divided, if it is a shard
    growth: int = 1  # how many times longer filters make the decompressed bytes, at most


@dataclass(frozen=True, slots=True)
class Shard:
    """A chunk that is divided into smaller ones, with an index of their offsets."""

    count: int  # the number of inner chunks
    inner: Chunks  # how they are encoded
    is_index_last: bool  # whether the index is after the chunks, and not before
    byte_order: str  # byte order of the index, as `struct` spells it
    index_trailer_bytes: int  # length of the checksums after the index


@dataclass(frozen=True, slots=True)
class ArrayNode:
    """A foreign array."""

    where: str  # the folder and the path in it, for messages
    version: Literal[2, 3]  # the version of the format: 2 or 3
    documents: Mapping[str, bytes]  # the metadata that zarr gets to see, by the name of the file
    dtype: str  # the element type
    shown: str  # the element type for zarr: an unsigned integer if zarr has no name for `dtype`
    shape: tuple[int, ...]  # axis lengths
    chunks: Chunks  # the shape and the encoding of its chunks
    #: The first step of the keys of chunks, `c` or none, and the separator of positions.
    naming: tuple[str, str]
    original: str | None  # the wider element type that it had before it lost precision, or None

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Axis lengths of a chunk, or of a shard; every one at least 1."""
        return self.chunks.shape

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk in bytes; chunks at the edges count as whole."""
        return math.prod(self.chunk_shape) * ITEM_SIZES[self.dtype]

    def chunk_key(self, position: tuple[int, ...]) -> str:
        """Return the key of the chunk at a position of the grid."""
        first, separator = self.naming
        return separator.join([first] * bool(first) + [str(n) for n in position]) or "0"

    def position(self, key: str) -> tuple[int, ...] | None:
        """Return the grid position of the chunk with a key; None if it is no key of a chunk."""
        first, separator = self.naming
        steps = key.split(separator)
        if first and steps.pop(0) != first:
            return None
        if not self.shape:
            return () if steps == ([] if first else ["0"]) else None
        if len(steps) != len(self.shape) or not all(map(is_position, steps)):
            return None
        found = tuple(map(int, steps))
        grid = zip(found, self.shape, self.chunk_shape, strict=True)
        return found if all(at * size < length for at, length, size in grid) else None


def array_v3(where: str, document: Mapping[str, Any]) -> ArrayNode:
    """Check the metadata of an array of version 3."""
    shape = _lengths(where, "shape", document.get("shape"), least=0)
    chunk = _lengths(where, "chunk_shape", _chunk_shape(where, document), least=1)
    naming = _naming(where, document.get("chunk_key_encoding"))
    name = document.get("data_type")
    if not isinstance(name, str) or name not in ITEM_SIZES:
        _refuse_dtype(where, name)
    shown = BITS.get(name, name)
    codecs: Any = document.get("codecs")
    chunks = _chunks(where, codecs, chunk)
    _check_count(where, shape, chunks)
    fill = document.get("fill_value")
    if shown != name:
        fill = _fill_bits(where, name, fill)
    seen = {**document, "data_type": shown, "fill_value": fill, "attributes": {}}
    seen.pop("dimension_names", None)
    documents = {DOCUMENT: json.dumps(seen).encode()}
    attributes = document.get("attributes")
    dtype = _true_dtype(where, name, shown, attributes)
    original = _original(where, dtype, attributes)
    return ArrayNode(where, 3, documents, dtype, shown, shape, chunks, naming, original)


def array_v2(where: str, document: Mapping[str, Any], attributes: object) -> ArrayNode:
    """Check the metadata of an array of version 2."""
    shape = _lengths(where, "shape", document.get("shape"), least=0)
    naming = "", _separator(where, document.get("dimension_separator"), ".")
    chunk = _lengths(where, "chunks", document.get("chunks"), least=1)
    letters = document.get("dtype")
    found = _V2_DTYPE.fullmatch(letters) if isinstance(letters, str) else None
    if found is None or found[1] not in _LETTERS:
        _refuse_dtype(where, letters)
    name = _LETTERS[found[1]]
    if document.get("order") not in ("C", "F"):
        _broken(where, "another order of the elements", "C or F", document.get("order"))
    filters = document.get("filters") or []
    if not isinstance(filters, list):
        _broken(where, "filters are not a list", "a list or null", filters)
    codecs = [codec for codec in (*filters, document.get("compressor")) if codec is not None]
    for codec in codecs:
        _check_codec(where, codec, "id", _NUMCODECS)
    growth = _growth(where, [(codec["id"], codec) for codec in codecs])
    compressor = _compressor(where, [codec["id"] for codec in codecs])
    chunks = Chunks(chunk, *compressor, growth=growth)
    _check_count(where, shape, chunks)
    documents = {".zarray": json.dumps(document).encode(), ".zattrs": b"{}"}
    dtype = _true_dtype(where, name, name, attributes)
    original = _original(where, dtype, attributes)
    return ArrayNode(where, 2, documents, dtype, name, shape, chunks, naming, original)


def _chunk_shape(where: str, document: Mapping[str, Any]) -> object:
    if document.get("node_type") != "array":
        _broken(where, "a node is neither array nor group", "array", document.get("node_type"))
    match document.get("chunk_grid"):
        case {"name": "regular", "configuration": {"chunk_shape": shape}}:
            return shape
        case other:
            return _broken(where, "another grid of chunks", "regular", other)


def check_version(where: str, document: Mapping[str, Any], version: int) -> None:
    """Check that a document has the version that its file name implies."""
    if document.get("zarr_format") != version:
        raise InvalidInput(
            "the metadata has another version of Zarr than its file name implies",
            where=where,
            expected=f"zarr_format {version}",
            found=shorten(document.get("zarr_format")),
            hint=_HINT,
        )


def _naming(where: str, encoding: object) -> tuple[str, str]:
    """Return the first step of the keys of chunks, and the separator of positions."""
    match encoding:
        case {"name": "default" | "v2" as name, **rest}:
            configuration = rest.get("configuration") or {}
        case other:
            _broken(where, "another naming of chunks", "default or v2", other)
    if not isinstance(configuration, dict):
        _broken(where, "another naming of chunks", "an object", configuration)
    separator = configuration.get("separator")
    if name == "default":
        return "c", _separator(where, separator, "/")
    return "", _separator(where, separator, ".")


def _separator(where: str, given: object, default: str) -> str:
    if given is None:
        return default
    if not isinstance(given, str) or given not in ("/", "."):
        _broken(where, "another separator in names of chunks", "'/' or '.'", given)
    return given


def _lengths(where: str, what: str, value: object, *, least: int) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or len(value) > _MAX_AXES
        or any(type(n) is not int or not least <= n < 2**63 for n in value)
    ):
        _broken(where, f"a bad {what}", f"whole numbers from {least} to 2^63", value)
    return tuple(value)


def _chunks(where: str, codecs: object, shape: tuple[int, ...], depth: int = 0) -> Chunks:
    """Check a chain of codecs; return how it encodes chunks of a shape."""
    if not isinstance(codecs, list) or depth > _MAX_SHARDS:
        _broken(where, "codecs are not a list, or nest too deeply", "a list", codecs)
    checked = [_check_codec(where, codec, "name", _CODECS) for codec in codecs]
    names = [name for name, _ in checked]
    shards = [_shard(where, found, shape, depth) for name, found in checked if name == _SHARDING]
    if not shards:
        return Chunks(shape, *_compressor(where, names), growth=_growth(where, checked))
    if names[0] != _SHARDING or any(name != "crc32c" for name in names[1:]):
        _broken(where, "codecs around shards", "crc32c or none", ", ".join(names))
    return Chunks(shape, None, _CRC_BYTES * (len(names) - 1), shards[0])


def _shard(
    where: str, configuration: Mapping[str, Any], shape: tuple[int, ...], depth: int
) -> Shard:
    """Check how shards of a shape are divided."""
    part = _lengths(where, "shape within a shard", configuration.get("chunk_shape"), least=1)
    if len(part) != len(shape):
        _broken(where, "another number of axes within a shard", len(shape), len(part))
    index = configuration.get("index_codecs", [{"name": "bytes"}, {"name": "crc32c"}])
    _chunks(where, index, (), depth + 1)
    inner = _chunks(where, configuration.get("codecs"), part, depth + 1)
    if any(whole % size for whole, size in zip(shape, part, strict=True)):
        _broken(where, "a shard that is not a whole number of chunks", list(shape), list(part))
    names = [codec["name"] for codec in index]
    if names.count("bytes") > 1 or not {*names} <= {"bytes", "crc32c"}:
        # Other codecs could expand a few bytes to many, or make no sense for an index.
        _broken(where, "another encoding of a shard's index", "bytes, crc32c", ", ".join(names))
    endian = [codec.get("configuration") or {} for codec in index if codec["name"] == "bytes"]
    return Shard(
        count=math.prod(whole // size for whole, size in zip(shape, part, strict=True)),
        inner=inner,
        is_index_last=configuration.get("index_location") != "start",
        byte_order=">" if endian and endian[0].get("endian") == "big" else "<",
        index_trailer_bytes=_CRC_BYTES * names.count("crc32c"),
    )


def _compressor(where: str, names: Sequence[str]) -> tuple[str | None, int]:
    """Return the compressor of a chain of codecs, if any, and the bytes of checksums after it."""
    plain = [name.removeprefix("numcodecs.") for name in names]
    found = [number for number, name in enumerate(plain) if name in _COMPRESSORS]
    if not found:
        return None, 0
    around = names[found[0] + 1 :]
    if any(name != "crc32c" for name in around):
        _broken(where, "codecs around a compressor", "crc32c or none", ", ".join(names))
    return plain[found[0]], _CRC_BYTES * len(around)


def _growth(where: str, codecs: Sequence[tuple[str, Mapping[str, Any]]]) -> int:
    """Return how many times longer the filters of a chain make what they decode, at most."""
    if len(codecs) > _MAX_CODECS:
        _broken(where, "too many codecs", f"at most {_MAX_CODECS}", len(codecs))
    size = most = Fraction(1)
    for name, codec in reversed(codecs):
        match name.removeprefix("numcodecs."):
            case "packbits":
                size *= 8
            case "astype":
                size *= _ratio(where, codec.get("decode_dtype"), codec.get("encode_dtype"))
            case "delta" | "fixedscaleoffset" | "quantize":
                plain = codec.get("dtype")
                size *= _ratio(where, plain, codec.get("astype") or plain)
        most = max(most, size)
    return math.ceil(most)


def _ratio(where: str, decoded: str | None, encoded: str | None) -> Fraction:
    """Return how many times longer the elements of one type are than those of another."""
    try:
        return Fraction(np.dtype(decoded or "c16").itemsize, np.dtype(encoded or "u1").itemsize)
    except TypeError as error:
        _broken(where, "an unknown element type of a codec", "numbers", error)


def _check_codec(
    where: str, codec: object, key: str, known: frozenset[str]
) -> tuple[str, Mapping[str, Any]]:
    """Check that a codec is in the closed list; return its name and configuration."""
    if not isinstance(codec, dict) or not isinstance(codec.get(key), str):
        _broken(where, "a codec without a name", f"an object with {key!r}", codec)
    name = codec[key]
    configuration = codec.get("configuration") or {} if key == "name" else codec
    is_known = name in known or (key == "name" and name.removeprefix("numcodecs.") in _NUMCODECS)
    if not is_known or not isinstance(configuration, dict):
        raise InvalidInput(
            "an array has a codec that is not supported",
            where=where,
            expected=", ".join(sorted(known)),
            found=shorten(codec),
            hint=_HINT,
        )
    for field in _DTYPE_FIELDS:
        value = configuration.get(field)
        if value is not None and not (isinstance(value, str) and _PLAIN_DTYPE.fullmatch(value)):
            _broken(where, f"codec {name!r} is not for numbers", "numbers", value)
    return name, configuration


def _check_count(where: str, shape: tuple[int, ...], chunks: Chunks) -> None:
    if len(shape) != len(chunks.shape):
        _broken(where, "chunks have another number of axes", len(shape), len(chunks.shape))
    count = math.prod(-(-n // m) for n, m in zip(shape, chunks.shape, strict=True))
    shard = chunks.shard
    while shard is not None:
        count *= shard.count
        shard = shard.inner.shard
    if count > MAX_CHUNKS:
        _broken(where, "too many chunks in one array", f"at most {MAX_CHUNKS}", count)


def _true_dtype(where: str, name: str, shown: str, attributes: object) -> str:
    """Return the element type that the attribute names, or `name` without the attribute."""
    named = attributes.get(DTYPE_ATTRIBUTE) if isinstance(attributes, dict) else None
    if named is None:
        return name
    if not isinstance(named, str) or BITS.get(named, named) != shown or name not in (named, shown):
        _broken(where, f"attribute {DTYPE_ATTRIBUTE!r} does not fit the array", name, named)
    return named


def _original(where: str, dtype: str, attributes: object) -> str | None:
    """Return the original element type of an array, from its attribute."""
    named = attributes.get(ORIGINAL_ATTRIBUTE) if isinstance(attributes, dict) else None
    if named is None:
        return None
    if not isinstance(named, str) or named not in ORIGINAL_DTYPES or dtype not in NARROW_DTYPES:
        _broken(
            where,
            f"attribute {ORIGINAL_ATTRIBUTE!r} does not fit the array",
            f"{' or '.join(sorted(ORIGINAL_DTYPES))}, of {' or '.join(sorted(NARROW_DTYPES))}",
            f"{named}, of {dtype}",
        )
    return named


def _fill_bits(where: str, name: str, fill: object) -> int:
    """Return the bits of a fill value of a type that is read as unsigned integers."""
    if fill in (None, 0):
        return 0
    if isinstance(fill, str) and _HEXADECIMAL.fullmatch(fill):
        bits = int(fill, 16)
        if bits < 256 ** ITEM_SIZES[name]:
            return bits
    elif isinstance(fill, int | float) or fill in ("NaN", "Infinity", "-Infinity"):
        try:
            import ml_dtypes

            return int.from_bytes(getattr(ml_dtypes, name)(float(fill)).tobytes(), "little")
        except (ImportError, AttributeError, OverflowError):
            pass
    expected = "0 or 0x..., or with ml_dtypes installed a number"
    return _broken(where, f"an unsupported fill value of {name}", expected, fill)


def _refuse_dtype(where: str, found: object) -> NoReturn:
    raise InvalidInput(
        "an array has an element type that cannot be stored",
        where=where,
        expected=", ".join(ITEM_SIZES),
        found=shorten(found),
        hint=_HINT,
    )


def _broken(where: str, what: str, expected: object, found: object) -> NoReturn:
    raise InvalidInput(
        f"not a Zarr array that can be read: {what}",
        where=where,
        expected=expected,
        found=shorten(found),
        hint=_HINT,
    )


def shorten(found: object) -> str:
    """Return foreign text, short enough for a message."""
    text = str(found) or type(found).__name__
    return text if len(text) <= 200 else f"{text[:200]}..."
