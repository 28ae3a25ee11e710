"""Patterns of file names, such as `epoch_{step:04d}_step_{global_step:08d}.pt`: written and read.

A pattern has the fields of Python's format strings: `{step:08d}` a whole number with at least this
many digits, `{value:.4f}` a number with that many decimals, `{name}` text without a slash. Reading
takes any number of digits: programs and documents do not always agree on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from string import Formatter
from typing import Any

from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.values import check_path_name

_SPEC = re.compile(r"(0\d{1,2}d|\.\d{1,2}f|)", re.ASCII)
_READS = {"d": r"\d{1,18}", "f": r"-?\d{1,300}(?:\.\d{1,20})?", "": r"[^/]{1,255}"}


def written(pattern: str, fields: Mapping[str, Any]) -> str:
    """Return the name for some fields; unknown fields are ignored."""
    made = []
    for literal, name, spec in _parts(pattern):
        made.append(literal)
        if name is None:
            continue
        try:
            text = format(fields[name], spec)
        except (KeyError, ValueError, TypeError) as error:
            raise IncompatibleState(
                "a file cannot be named", where=pattern, expected=f"a value of {name}", found=error
            ) from error
        if "/" in text:
            raise InvalidInput("a field of a file name has a slash", where=pattern, found=text)
        made.append(text)
    return check_path_name("".join(made), pattern)


def fields_of(pattern: str, name: str) -> dict[str, Any] | None:
    """Return the fields of a name, numbers as numbers; `None` if the name does not match."""
    found = _reader(pattern).fullmatch(name)
    if found is None:
        return None
    kinds = {field: spec[-1:] for _, field, spec in _parts(pattern) if field}
    reads = {"d": int, "f": float, "": str}
    return {field: reads[kinds[field]](text) for field, text in found.groupdict().items()}


@cache
def _reader(pattern: str) -> re.Pattern[str]:
    text, known = "", set[str]()
    for literal, name, spec in _parts(pattern):
        text += re.escape(literal)
        if name in known:
            text += f"(?P={name})"
        elif name is not None:
            known.add(name)
            text += f"(?P<{name}>{_READS[spec[-1:]]})"
    return re.compile(text, re.ASCII)


@cache
def _parts(pattern: str) -> list[tuple[str, str | None, str]]:
    try:
        parts = [(text, name, spec or "") for text, name, spec, _ in Formatter().parse(pattern)]
    except ValueError as error:
        raise InvalidInput("not a pattern of names", where=pattern, found=error) from error
    for _, name, spec in parts:
        if name is not None and (not name.isidentifier() or not _SPEC.fullmatch(spec)):
            raise InvalidInput("not a field of a name", where=pattern, found=f"{name}:{spec}")
    return parts
