"""Make text from a store safe to show: it cannot move a cursor, hide or fill a screen.

Anybody who writes to a store chooses names, metrics and reasons. They are shown in errors, in logs
and in tables of the command line; this module escapes them first.
"""

from __future__ import annotations

#: Integers of more bits are shown in hexadecimal: decimal digits take quadratic time, and Python
#: may refuse them from 2,125 bits on, depending on how it was started.
MAX_DECIMAL_BITS = 2048
_SHORT = 40


def shown(value: object) -> str:
    """Return `str(value)`; for a very long integer shortened hexadecimal digits."""
    if isinstance(value, int) and value.bit_length() > MAX_DECIMAL_BITS:
        digits = hexadecimal(value)
        return f"{digits[:_SHORT]}... ({value.bit_length()} bits)"
    try:
        return str(value)
    except (ValueError, RecursionError):  # it holds such an integer, or nests too deeply
        return f"a {type(value).__name__} too long to show"


def quoted(value: object) -> str:
    """Return `repr(value)`, or a substitute if that fails."""
    try:
        is_long = isinstance(value, int) and value.bit_length() > MAX_DECIMAL_BITS
        return shown(value) if is_long else repr(value)
    except Exception:  # of a foreign class, or of an integer that is too long
        return shown(value)


def hexadecimal(value: int) -> str:
    """Return an integer of any length as `0x...`, in linear time."""
    return f"{value:#x}"


def printable(value: object, *, spare: str = "") -> str:
    r"""Return text with control, direction and invisible characters spelled out, as `\x1b`.

    Args:
        value: The text, or a value that is converted to text.
        spare: Characters that stay as they are.
    """
    text = shown(value)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in spare else _spell(char) for char in text)


def shortened(text: str, most: int) -> str:
    """Return a text of at most about `most` characters; a longer one keeps beginning and end."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}... ({len(text)} characters) ...{text[-most // 4 :]}"


def _spell(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
