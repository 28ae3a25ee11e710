"""Make text from a store safe to show: it cannot move a cursor, hide text or fill a screen.

Names, metrics and reasons come from anybody who can write to a store. Errors, logs and tables of
the command line show them; this module escapes them first.
"""

from __future__ import annotations

#: Integers of more bits are shown in hexadecimal: decimal digits take quadratic time, and Python
#: may refuse them from 2,125 bits on, depending on how it was started.
MAX_DECIMAL_BITS = 2048
_SHORT = 40


def shown(value: object) -> str:
    """Return `str(value)`, or shortened hexadecimal digits for a very long integer."""
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
    """Return an integer as `0x...`; takes linear time for any length."""
    return f"{value:#x}"


def printable(value: object, *, spare: str = "") -> str:
    r"""Return text with control, direction and invisible characters escaped, such as `\x1b`.

    Args:
        value: The text, or a value that is converted to text.
        spare: Characters that are not escaped.
    """
    text = shown(value)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in spare else _spell(char) for char in text)


def shortened(text: str, most: int) -> str:
    """Return a text of about `most` characters at most: the beginning and the end of a long one."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}... ({len(text)} characters) ...{text[-most // 4 :]}"


def _spell(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
