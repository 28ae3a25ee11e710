"""The address of a registry: where it is, and how its store is reached.

`holdfast.registry.store.connecting` connects to the registry at an address.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from holdfast.backends import Backend, Location, open_backend, parse
from holdfast.backends.opening import Transport
from holdfast.registry.objects import VARIABLE, from_environment, merged

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
        """Open the store; nothing is contacted yet."""
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
        return replace(parse(backend.url), server=backend.server)
