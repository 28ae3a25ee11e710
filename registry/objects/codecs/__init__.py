"""The encodings of a chunk in a pack: a closed list, numbered for placements.

A codec is chosen from this list by its number or name, and from nowhere else: nothing on a store
can name code. A delta is no codec: a chunk is one if its row in the placement names a base.
Specified in docs/spec.md, section 6.
"""

from __future__ import annotations

from typing import Any, Literal

from holdfast.backends import Buffer
from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput, Malformed
from holdfast.registry.values import near

RAW = "raw"
#: Blosc frames with shuffled bytes: zstd, and lz4 for speed.
ZSTD = "blosc-zstd"
LZ4 = "blosc-lz4"

#: Position = number in a placement's codec column. Append only.
CODECS: tuple[str, ...] = (RAW, ZSTD, LZ4)

#: Two ways to make frames of `ZSTD`: each plane of bytes apart, and by the type of elements.
PLANES = "planes"
AUTO = "auto"
#: The element types of which `AUTO` compresses planes apart: their low bytes are noise.
_PLANES_OF = frozenset({"bfloat16", "float32"})

Compression = Literal["none", "auto", "zstd", "lz4"]
#: The names that users write.
COMPRESSIONS: dict[Compression, str] = {"none": RAW, "auto": AUTO, "zstd": ZSTD, "lz4": LZ4}


def check_compression(wanted: Compression | None) -> Compression | None:
    """Check the name of a compression and return it."""
    if wanted is not None and wanted not in COMPRESSIONS:
        raise InvalidInput(
            "no such compression",
            expected=", ".join(COMPRESSIONS),
            found=quoted(wanted),
            hint=near(str(wanted), COMPRESSIONS),
        )
    return wanted


def for_type(codec: str, dtype: str) -> str:
    """Return how elements of a type are encoded: `AUTO` is decided, others stay."""
    if codec != AUTO:
        return codec
    return PLANES if dtype in _PLANES_OF else ZSTD


def stored_as(codec: str) -> str:
    """Return the member of `CODECS` that reads what this one or this way makes."""
    return ZSTD if codec in (AUTO, PLANES) else codec


def encode(data: Buffer, item_bytes: int, codec: str) -> bytes:
    """Return the encoded form of some bytes."""
    if codec == PLANES:
        return _blosc().encode_planes(data, item_bytes)  # type: ignore[no-any-return]
    return _blosc().encode(data, item_bytes, codec)  # type: ignore[no-any-return]


def decode(stored: Buffer, codec: str, into: memoryview, *, where: str) -> None:
    """Decode stored bytes into memory of exactly their raw length."""
    _blosc().decode(stored, codec, into, where=where)


def join(delta: memoryview, base: Buffer) -> None:
    """Turn a delta into its chunk, or a chunk into its delta, in place: XOR with the base."""
    _blosc().join(delta, base)


def _blosc() -> Any:
    # Importing numcodecs takes a tenth of a second, and raw chunks never need it.
    from holdfast.registry.objects.codecs import blosc

    return blosc


def codec_number(name: str, *, where: str) -> int:
    """Return a codec's number."""
    if name not in CODECS:
        raise Malformed("codec not allowed", where=where, expected=", ".join(CODECS), found=name)
    return CODECS.index(name)


def codec_name(number: int, *, where: str) -> str:
    """Return the codec of a number."""
    if not 0 <= number < len(CODECS):
        raise Malformed(
            "codec not allowed", where=where, expected=f"0..{len(CODECS) - 1}", found=number
        )
    return CODECS[number]
