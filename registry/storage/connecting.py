"""Connect to the store of a registry: create its `registry.json`, or read it.

`holdfast.registry.registries` makes a `Registry` of the `Store` that these functions return.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from holdfast.backends import Backend, Location, open_backend, parse
from holdfast.backends.opening import Transport
from holdfast.backends.probe import probe_put_if_absent
from holdfast.backends.wrappers import ReadOnly
from holdfast.registry.errors import Conflict
from holdfast.registry.storage.chunk_cache import ChunkCache
from holdfast.registry.storage.codecs import Compression
from holdfast.registry.storage.heads import Heads, forget, open_heads
from holdfast.registry.storage.keys import PROBES
from holdfast.registry.storage.option_texts import VARIABLE, from_environment, merged
from holdfast.registry.storage.store import Store, create_config, read_config

_WITHOUT_OPTIONS = ("file", "memory")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a registry is, and how its store is reached; see `holdfast.open`.

    Attributes:
        url: A URL or a path; with `fs` a path in that file system.
        storage_options: Options of the file system, by fsspec's names.
        fs: A file system object of fsspec.
        transport: What moves the bytes of S3.
    """

    url: str | os.PathLike[str]
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    fs: Any = field(default=None, repr=False)
    transport: Transport | None = None

    @classmethod
    def of_environment(
        cls,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        variables: Sequence[str] = (VARIABLE,),
    ) -> Self:
        """Return an address whose options are completed by those in the environment.

        Folders and memory have no options, so for them the environment is not read.

        Args:
            url: A URL or a path.
            storage_options: Options that count more than those of the environment.
            variables: Environment variables with options; the first that is set counts.

        Raises:
            InvalidInput: The variable is not one JSON object.
            InvalidLocation: The URL names no place.
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
            # What is no file system is refused where it is opened.
            named = getattr(self.fs, "protocol", ())
            protocols = {named} if isinstance(named, str) else named
            return {"local", *_WITHOUT_OPTIONS}.isdisjoint(protocols)
        return parse(self.url).scheme not in _WITHOUT_OPTIONS

    def location(self, backend: Backend) -> Location:
        """Return what the heads of the registry are remembered by."""
        # Options may name another server than the URL, and with `fs` there is only a path.
        return replace(parse(backend.url), server=backend.server)


def create_store(
    address: Address,
    *,
    compression: Compression | None,
    keyframe_every: int | None,
    skip_race_probe: bool,
) -> Store:
    """Race the store's put-if-absent and write `registry.json`; see `holdfast.init`."""
    backend = address.open()
    try:
        if not skip_race_probe:
            probe_put_if_absent(backend, prefix=f"{PROBES}{secrets.token_hex(8)}")
        probed: Literal["passed", "skipped"] = "skipped" if skip_race_probe else "passed"
        config = create_config(
            backend,
            probed,
            None if compression == "none" else compression,
            None if keyframe_every == 1 else keyframe_every,
        )
        heads = open_heads(address.location(backend))
        if heads is not None:
            heads.check_registry(config.id, replace=True)
    except BaseException:
        backend.close()
        raise
    return Store(backend, config, heads=heads)


def open_store(
    address: Address,
    *,
    read_only: bool = False,
    expect_id: str | None = None,
    cache: ChunkCache | None = None,
    remember: bool = True,
) -> Store:
    """Open the store of a registry; see `holdfast.open`."""
    backend = address.open()
    location = address.location(backend)
    if read_only:
        backend = ReadOnly(backend)
    try:
        heads = open_heads(location, wanted=remember)
        return open_store_on(backend, expect_id=expect_id, cache=cache, heads=heads)
    except BaseException:
        backend.close()
        raise


def open_store_on(
    backend: Backend,
    *,
    expect_id: str | None = None,
    cache: ChunkCache | None = None,
    heads: Heads | None = None,
) -> Store:
    """Open the store of the registry behind a backend.

    Raises:
        Conflict: It is not the expected registry, or not the one that was here before.
    """
    config = read_config(backend)
    if expect_id is not None and config.id != expect_id:
        raise Conflict(
            "another registry is here than the one that was expected",
            where=backend.url,
            expected=expect_id,
            found=config.id,
            hint="Check the URL; if the registry was replaced on purpose, forget the old id.",
        )
    if heads is not None:
        heads.check_registry(config.id, replace=expect_id is not None)
    return Store(backend, config, cache, heads)


def trust(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    fs: Any = None,
) -> bool:
    """Accept a registry as it is now: forget its heads on this machine.

    Args:
        url: Where it is.
        storage_options: Options of the file system, as for `holdfast.open`: they may say which
            server it is on.
        fs: A file system object of fsspec; `url` is then a path in it.

    Returns:
        Whether anything was remembered.

    Raises:
        InvalidLocation: The URL names no place.
        InvalidInput: The file of heads cannot be removed.
    """
    address = Address(url, storage_options, fs)
    with closing(address.open()) as backend:
        return forget(address.location(backend))
