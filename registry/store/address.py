"""The address of a registry: where it is, and how its store is reached.

`holdfast.registry.store.connecting` connects to the registry at an address. Its storage options are
texts: `KEY=VALUE` of a command line, or JSON in the environment. No message repeats a value, since
it may be a secret. Specified in docs/spec.md, section 1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Never, Self

from holdfast.backends import Backend, Location, open_backend, parse
from holdfast.backends.opening import Transport
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


_WITHOUT_OPTIONS = ("file", "memory")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a registry is, and how its store is reached; see `holdfast.open`."""

    url: str | os.PathLike[str]  # A URL or a path; with `fs` a path in that file system
    #: Options of the file system, by fsspec's names.
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    fs: Any = field(default=None, repr=False)  # a file system object of fsspec
    transport: Transport | None = None  # the library that moves the bytes of S3

    @classmethod
    def of_environment(
        cls,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        variables: Sequence[str] = (VARIABLE,),
    ) -> Self:
        """Return an address whose options are completed by those in the environment.

        Folders and memory have no options, so for them the environment is not read.
        """
        options = dict(storage_options or {})
        if parse(url).scheme not in _WITHOUT_OPTIONS:
            named = next((name for name in variables if os.environ.get(name)), VARIABLE)
            options = merged(from_environment(named), options)
        return cls(url, options or None)

    def environment(self) -> dict[str, str]:
        """Return the variables that lead a child process to this registry."""
        found = {"HOLDFAST_REGISTRY": os.fspath(self.url)}
        if self.storage_options:
            found[VARIABLE] = json.dumps(dict(self.storage_options))
        return found

    def open(self) -> Backend:
        """Return the backend there; nothing is contacted yet."""
        return open_backend(self.url, self.storage_options, self.fs, self.transport)

    def is_remote(self) -> bool:
        """Return whether the store is neither a folder of this machine nor memory."""
        if self.fs is not None:
            # An object that is no file system is refused when it is opened.
            named = getattr(self.fs, "protocol", ())
            protocols = {named} if isinstance(named, str) else named
            return {"local", *_WITHOUT_OPTIONS}.isdisjoint(protocols)
        return parse(self.url).scheme not in _WITHOUT_OPTIONS

    @staticmethod
    def location(backend: Backend) -> Location:
        """Return the location by which the heads of the registry are remembered."""
        # Options may name another server than the URL, and with `fs` there is only a path.
        return parse(backend.url)._replace(server=backend.server)
