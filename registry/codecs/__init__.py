"""How a chunk's bytes are encoded inside a pack: a closed list, numbered for placements.

A codec is chosen by number or name from this list and from nowhere else; nothing on the store can
name code.
"""

from __future__ import annotations

from registry.errors import Malformed

RAW = "raw"

#: Position = number in a placement's codec column. Append only.
CODECS: tuple[str, ...] = (RAW,)


def codec_number(name: str, *, where: str) -> int:
    """Return a codec's number.

    Raises:
        Malformed: The name is not in the list.
    """
    if name not in CODECS:
        raise Malformed("codec not allowed", where=where, expected=", ".join(CODECS), found=name)
    return CODECS.index(name)


def codec_name(number: int, *, where: str) -> str:
    """Return the name behind a number.

    Raises:
        Malformed: The number is not in the list.
    """
    if not 0 <= number < len(CODECS):
        raise Malformed(
            "codec not allowed", where=where, expected=f"0..{len(CODECS) - 1}", found=number
        )
    return CODECS[number]


__all__ = ["CODECS", "RAW", "codec_name", "codec_number"]
