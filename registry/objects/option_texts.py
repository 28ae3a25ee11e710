"""Storage options as text: `KEY=VALUE` of a command line, or JSON in the environment.

No message repeats a value, since it may be a secret. Specified in docs/spec.md, section 1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, Never

from holdfast.backends.secrets import may_be_secret
from holdfast.registry.errors import InvalidInput

#: The environment variable with the options of the store that holds the registry.
VARIABLE = "HOLDFAST_STORAGE_OPTIONS"


def from_environment(variable: str = VARIABLE) -> dict[str, Any]:
    """Return the options in an environment variable; none if it is not set."""
    text = os.environ.get(variable)
    if not text:
        return {}
    try:
        found = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        said = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        at = f", at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        # Without the cause: it holds the whole text.
        raise InvalidInput(
            "not JSON", where=variable, expected='an object: {"NAME": VALUE, ...}', found=said + at
        ) from None
    if not isinstance(found, dict):
        raise InvalidInput(
            "not a JSON object",
            where=variable,
            expected='an object: {"NAME": VALUE, ...}',
            found=type(found).__name__,
        )
    return found


def from_pairs(texts: Iterable[str], where: str) -> dict[str, Any]:
    """Read texts of the form `KEY=VALUE`; a dot in KEY leads into a nested option."""
    found: dict[str, Any] = {}
    for number, text in enumerate(texts, start=1):
        name, equals, value = text.partition("=")
        path = name.split(".")
        if not equals or not all(path):
            raise InvalidInput(
                "a storage option has no name, or no value",
                where=f"{where}, number {number}",
                expected="KEY=VALUE or KEY.KEY=VALUE",
                hint="Secrets belong in the environment or in fsspec's configuration files.",
            )
        one: object = _value(path[-1], value)
        for part in reversed(path):
            one = {part: one}
        assert isinstance(one, dict)
        if _clashes(found, one):
            raise InvalidInput("a storage option is given twice", where=f"{where} {name}")
        found = merged(found, one)
    return found


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return options, overridden by those of `over`."""
    found = dict(under)
    for name, value in over.items():
        before = found.get(name)
        nested = isinstance(before, Mapping) and isinstance(value, Mapping)
        found[name] = merged(before, value) if nested else value  # type: ignore[arg-type]
    return found


def _clashes(found: Mapping[str, Any], one: Mapping[str, Any]) -> bool:
    for name, value in one.items():
        if name in found:
            before = found[name]
            if not isinstance(before, Mapping) or not isinstance(value, Mapping):
                return True
            return _clashes(before, value)
    return False


def _value(name: str, text: str) -> object:
    """Return a value parsed as JSON, or else the text.

    A number is text where a secret may be meant: an access key may consist of digits.
    """
    try:
        found = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    return text if is_number and may_be_secret(name) else found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} twice")
    return found


def _refuse(name: str) -> Never:
    raise ValueError(f"{name}, which is not JSON")
