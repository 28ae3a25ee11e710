"""Connect to the store of a registry: create its `registry.json`, or read it.

`holdfast.registry.face` makes a `Registry` of the `Store` that these functions return.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal

from holdfast.backends import Backend
from holdfast.registry.errors import Conflict, StoreUnavailable
from holdfast.registry.objects import PROBES
from holdfast.registry.objects.codecs import Compression
from holdfast.registry.store.address import Address
from holdfast.registry.store.heads import Heads, forget, open_heads, place_name
from holdfast.registry.store.store import RegistryConfig, Store, create_config, read_config

if TYPE_CHECKING:
    from holdfast.registry.store.chunk_cache import ChunkCache

#: The variable that names the folder of the cache; empty for none.
FOLDER_VARIABLE = "HOLDFAST_CACHE"
#: Returns the configuration of the registry at a place, as it was kept elsewhere.
Known = Callable[[str], RegistryConfig | None]


def choose_cache(
    asked: str | os.PathLike[str] | ChunkCache | None, *, is_remote: bool
) -> ChunkCache | None:
    """Return the cache of a registry that is being opened."""
    if asked is None and is_remote:
        asked = os.environ.get(FOLDER_VARIABLE)
    if asked is None or asked == "":
        return None
    from holdfast.registry.store.chunk_cache import ChunkCache

    if isinstance(asked, ChunkCache):
        return asked
    return ChunkCache(asked) if os.fspath(asked) else None


def create_store(
    address: Address,
    *,
    compression: Compression | None,
    keyframe_every: int | None,
    skip_race_probe: bool,
) -> Store:
    """Race the store's put-if-absent and write `registry.json`; see `holdfast.init`."""
    from holdfast.backends.probe import probe_put_if_absent

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
        heads = open_heads(Address.location(backend))
        if heads is not None:
            heads.check_registry(config.id, replace=True)
    except BaseException:
        backend.close()
        raise
    return Store(backend, config, heads=heads, address=address)


def open_store(
    address: Address,
    *,
    read_only: bool = False,
    expect_id: str | None = None,
    cache: ChunkCache | None = None,
    remember: bool = True,
    known: Known = lambda place: None,  # noqa: ARG005
) -> Store:
    """Open the store of a registry; see `holdfast.open`."""
    backend = address.open()
    location = Address.location(backend)
    if read_only:
        from holdfast.backends.wrappers import ReadOnly

        backend = ReadOnly(backend)
    try:
        heads = open_heads(location, wanted=remember)
        store = open_store_on(backend, expect_id=expect_id, cache=cache, heads=heads, known=known)
        store.address = address
        return store
    except BaseException:
        backend.close()
        raise


def open_store_on(
    backend: Backend,
    *,
    expect_id: str | None = None,
    cache: ChunkCache | None = None,
    heads: Heads | None = None,
    known: Known = lambda place: None,  # noqa: ARG005
) -> Store:
    """Open the store of the registry behind a backend; `known` is asked if it does not answer."""
    away: RegistryConfig | None = None
    try:
        config = read_config(backend)
    except StoreUnavailable:
        away = known(place_name(Address.location(backend)))
        if away is None:
            raise
        config = away
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
    store = Store(backend, config, cache, heads)
    store.is_away = away is not None
    return store


def trust(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, fs: Any = None
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
        return forget(Address.location(backend))
