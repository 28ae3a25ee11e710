"""Find the parts of a manifest in its canonical text, without parsing the digests of chunks.

A manifest of a trillion parameters can name millions of chunks, nearly all of its text. As values
of JSON they take most of the time and of the memory of an opening. Here only their spelling is
checked; a digest is made when its tensor is read. A text that a writer would spell otherwise is
refused: `manifest` then parses the whole, which tells the fault.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# A quote within a string has a backslash before it, so these texts occur in no string.
_PART = re.compile(rb'\[("(?:[^"\\]|\\.)*+"),(\{"grid":"rows/1","skeleton":)')
_TENSORS = b',"tensors":['
_CLOSING = re.compile(rb'\],"format":"holdfast\.checkpoint/1","kind":("[a-z]+")\}\Z')
_ENTRY = re.compile(
    rb'\{"chunks":\[([0-9a-f",]*+)\],("dtype":[^{}]*+\})'
    rb'|\{"data":"([^"\\]*+)",("dtype":[^{}]*+\})'
    rb'|\{("dtype":"[^"\\]*+"),"list":"([^"\\]*+)"(,[^{}]*+\})'
)


class OtherSpelling(Exception):
    """No writer spells a manifest so."""


class EntryText(NamedTuple):
    """A tensor in the text of its component: one of `chunks`, `data` and `listed` is given.

    Attributes:
        form: The JSON of its other fields.
        chunks: Where the digests begin and end.
        data: Its inline bytes, as they are spelled.
        listed: The digest of its list, as it is spelled.
    """

    form: bytes
    chunks: tuple[int, int] | None = None
    data: bytes | None = None
    listed: bytes | None = None


class PartText(NamedTuple):
    """A component in the text of its manifest.

    Attributes:
        name: The JSON of its name.
        skeleton: The JSON of its skeleton.
        encoded: The JSON of the whole component.
        tensors: Its tensors.
    """

    name: bytes
    skeleton: bytes
    encoded: bytes
    tensors: list[EntryText]


def split(content: bytes) -> tuple[bytes, list[PartText]]:
    """Return the JSON of the kind, and the components.

    Raises:
        OtherSpelling: The text does not have these parts.
    """
    at = _after(content, 0, b'{"components":[')
    parts: list[PartText] = []
    has_more = False
    while found := _PART.match(content, at):
        begin, inner = found.start(2), found.end()
        cut = content.find(_TENSORS, inner)
        if cut < 0:
            raise OtherSpelling
        tensors, end = _tensors(content, begin, cut + len(_TENSORS))
        end = _after(content, end, b"]}")
        parts.append(PartText(found[1], content[inner:cut], content[begin:end], tensors))
        at = _after(content, end, b"]")
        has_more = content.startswith(b",", at)
        at += has_more
        if not has_more:
            break
    closing = _CLOSING.match(content, at)
    if closing is None or has_more:
        raise OtherSpelling
    return closing[1], parts


def _tensors(content: bytes, begin: int, at: int) -> tuple[list[EntryText], int]:
    """Return the tensors from `at` on, as they are in the text from `begin` on; and their end."""
    found: list[EntryText] = []
    while entry := _ENTRY.match(content, at):
        _, form, data, other, dtype, listed, rest = entry.groups()
        if form is not None:
            start, stop = entry.span(1)
            found.append(EntryText(form, (start - begin, stop - begin)))
        elif data is not None:
            found.append(EntryText(other, data=data))
        else:
            found.append(EntryText(dtype + rest, listed=listed))
        at = entry.end()
        if content[at : at + 1] != b",":
            return found, at
        at += 1
    if found:
        raise OtherSpelling  # a comma without a tensor after it
    return found, at


def _after(content: bytes, at: int, expected: bytes) -> int:
    """Return the end of a text that must be at a position."""
    if not content.startswith(expected, at):
        raise OtherSpelling
    return at + len(expected)
