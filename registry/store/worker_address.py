"""How a worker in another process reaches the registry that its caller has open.

Only what is no secret travels: URL, id of the registry, and plain options. A secret option is named
with the environment variable that holds it, and the worker reads it there. Specified in
docs/spec.md, section 44.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from holdfast.backends import parse
from holdfast.backends.location import redact
from holdfast.backends.opening import Transport
from holdfast.backends.secrets import may_be_secret
from holdfast.registry.errors import InvalidInput
from holdfast.registry.objects import VARIABLE, from_environment, merged
from holdfast.registry.store.address import Address
from holdfast.registry.store.connecting import open_store
from holdfast.registry.store.store import Store

#: The variables in which a worker looks for secret options.
_VARIABLES = (VARIABLE, "HOLDFAST_SRC_STORAGE_OPTIONS", "HOLDFAST_DST_STORAGE_OPTIONS")
#: Stores that a worker keeps open: those of a sync are two.
_KEPT_OPEN = 8
_ALTERNATIVE = "Open it by its URL, or call this without an executor."

#: The names that lead to an option.
_Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """The address of a registry, without secrets."""

    url: str  # its URL; of a folder the absolute path, which the workers share
    registry_id: str  # its id: a worker that finds another registry there refuses to work
    options: str  # storage options that are no secrets, as JSON
    #: For each secret option the environment variable that holds it, and its path there.
    secrets: tuple[tuple[str, _Path], ...]
    transport: Transport | None  # what moves the bytes of S3
    read_only: bool  # whether workers may only read

    @classmethod
    def of(cls, store: Store, *, read_only: bool) -> WorkerAddress:
        """Return the address of a store that workers may open, too."""
        address, where = store.address, store.backend.url
        if address is None or address.fs is not None:
            raise InvalidInput(
                "workers in other processes cannot open this registry",
                where=where,
                found="a file system object" if address else "a store object of this process",
                hint=_ALTERNATIVE,
            )
        location = parse(address.url)
        if location.scheme == "memory":
            raise InvalidInput(
                "workers in other processes cannot read the memory of this one",
                where=where,
                hint="Use a folder that they share, or a bucket; or call this without an executor.",
            )
        url = location.url if location.scheme == "file" else os.fspath(address.url)
        if redact(url) != url:
            raise InvalidInput(
                "the URL may hold a secret, which is not sent to workers",
                where=where,
                hint=f"Give it as an option in {VARIABLE}, here and in the workers' environment.",
            )
        plain, secrets = _parted(address.storage_options or {}, where)
        return cls(url, store.config.id, plain, secrets, address.transport, read_only)

    def opened(self) -> Store:
        """Return the store, opened once in this process."""
        return _opened(self)

    def _all_options(self) -> dict[str, Any] | None:
        options: dict[str, Any] = json.loads(self.options)
        for variable, path in self.secrets:
            value = _at(from_environment(variable), path)
            if value is None:
                raise InvalidInput(
                    "a worker lacks a secret option of the store",
                    where=f"process {os.getpid()}: {variable}",
                    expected=".".join(path),
                    hint="Set the variable in the environment of every worker.",
                )
            for name in reversed(path):
                value = {name: value}
            options = merged(options, value)
        return options or None


@lru_cache(_KEPT_OPEN)
def _opened(of: WorkerAddress) -> Store:
    address = Address(of.url, of._all_options(), None, of.transport)
    # Logs are compared with the heads that the caller's machine has seen.
    return open_store(address, read_only=of.read_only, expect_id=of.registry_id, remember=False)


def _parted(options: Mapping[str, Any], where: str) -> tuple[str, tuple[tuple[str, _Path], ...]]:
    """Return the options that may travel, and where the others are in the environment."""
    plain: dict[str, Any] = {}
    secrets: list[tuple[str, _Path]] = []
    for path, found in _leaves(options):
        if not _is_plain(found):
            raise InvalidInput(
                "a storage option cannot be sent to workers in other processes",
                where=f"{where}: {'.'.join(path)}",
                expected="a text, a number, or a list of them",
                found=type(found).__name__,
                hint=_ALTERNATIVE,
            )
        if any(map(may_be_secret, path)) and not isinstance(found, bool | None):
            secrets.append((_variable_with(path, found, where), path))
            continue
        value: Any = found
        for name in reversed(path):
            value = {name: value}
        plain = merged(plain, value)
    return json.dumps(plain, sort_keys=True), tuple(secrets)


def _variable_with(path: _Path, value: object, where: str) -> str:
    for variable in _VARIABLES:
        if _at(from_environment(variable), path) == value:
            return variable
    raise InvalidInput(
        "a storage option may be a secret, which is not sent to workers",
        where=f"{where}: {'.'.join(path)}",
        expected=f"the same option in {VARIABLE}",
        hint="Set that variable here and in the environment of every worker.",
    )


def _leaves(options: Mapping[str, Any], path: _Path = ()) -> Iterator[tuple[_Path, object]]:
    for name, value in options.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, str(name)))
        else:
            yield (*path, str(name)), value


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or value == {} or isinstance(value, (str, int))


def _at(options: Mapping[str, Any], path: _Path) -> Any:
    found: Any = options
    for name in path:
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return found
