"""Text from a store, made fit for a terminal: nothing in it can move the cursor or hide itself."""

from __future__ import annotations


def printable(value: object) -> str:
    r"""Return text with control, direction and invisible characters spelled out, as `\x1b`."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _spell(char) for char in text)


def _spell(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
