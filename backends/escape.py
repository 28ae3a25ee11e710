"""Text from a store, made fit for a message: it cannot move a cursor, hide itself or fill a screen.

Names, metrics and reasons come from whoever wrote to the store. They reach a person as the parts of
an error, in a line of a log or in a table of the command line, and each of them passes here first.
"""

from __future__ import annotations

#: Integers of more bits are shown in hexadecimal: to make digits of them takes quadratic time, and
#: Python refuses to from 2,125 bits on, depending on how it was started.
MAX_DECIMAL_BITS = 2048
_SHORT = 40


def shown(value: object) -> str:
    """Return `str(value)`; of an integer that is too long for it hexadecimal digits, shortened."""
    if isinstance(value, int) and value.bit_length() > MAX_DECIMAL_BITS:
        digits = hexadecimal(value)
        return f"{digits[:_SHORT]}... ({value.bit_length()} bits)"
    try:
        return str(value)
    except (ValueError, RecursionError):  # it holds such an integer, or nests too deeply
        return f"a {type(value).__name__} too long to show"


def quoted(value: object) -> str:
    """Return `repr(value)`, or what can be shown of a value that has none."""
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
        value: The text, or what is shown as one.
        spare: Characters that stay as they are.
    """
    text = shown(value)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in spare else _spell(char) for char in text)


def shortened(text: str, most: int) -> str:
    """Return a text of at most about so many characters: of a longer one its beginning and end."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}... ({len(text)} characters) ...{text[-most // 4 :]}"


def _spell(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
