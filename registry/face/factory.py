"""Create a registry, or open one that exists: `holdfast.init` and `holdfast.open`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.backends import Backend
from holdfast.backends.location import parse
from holdfast.backends.opening import Transport
from holdfast.registry.errors import InvalidInput, InvalidLocation
from holdfast.registry.face.registry import Registry
from holdfast.registry.objects.codecs import Compression, check_compression
from holdfast.registry.store import (
    Address,
    RegistryConfig,
    choose_cache,
    create_store,
    open_store,
    open_store_on,
)
from holdfast.registry.store.heads import Heads

if TYPE_CHECKING:
    from holdfast.registry.saving.journal import Journal
    from holdfast.registry.store import ChunkCache

#: The schemes of places that a program goes to because a registry says so.
_FOLLOWED = ("file", "s3", "az", "abfs", "abfss", "gs", "gcs")
_LOGGER = logging.getLogger("holdfast")


def init(
    url: str | os.PathLike[str],
    *,
    compression: Compression | None = None,
    keyframe_every: int | None = None,
    skip_race_probe: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    fs: Any = None,
    transport: Transport | None = None,
) -> Registry:
    """Create a registry in a folder, a bucket or a prefix, and open it.

    Args:
        url: Where; `docs/cli.md` lists the forms.
        compression: How chunks are stored unless a save says otherwise: `none`, `zstd`, `lz4`,
            which is faster and saves fewer bytes, or `auto`: zstd, faster for bfloat16 and float32.
            No id depends on it. Default: uncompressed.
        keyframe_every: Store a chunk that changes from save to save whole once in this many
            versions, 1 to 32, unless a save says otherwise, and in between as a difference if that
            is clearly shorter. A save then reads the versions that it builds on, and a load up to
            this many. Differences are compressed, by default by `zstd`. Default: 1, none.
        skip_race_probe: Do not race the store's put-if-absent first. For emulators that are known
            not to be atomic and hold nothing of value; `registry.json` records it.
        storage_options: As for `open`.
        fs: As for `open`.
        transport: As for `open`.

    Raises:
        Conflict: There is a registry already.
        InvalidInput: There is no such compression, or `keyframe_every` is out of range.
        StoreUnsuitable: The store lets two writers win, or lacks a feature that a registry needs.
    """
    from holdfast.registry.writing import check_keyframe_every

    chosen = check_compression(compression)
    every = check_keyframe_every(keyframe_every, compresses=chosen != "none")
    address = Address(url, storage_options, fs, transport)
    store = create_store(
        address, compression=chosen, keyframe_every=every, skip_race_probe=skip_race_probe
    )
    return _signing(Registry(store))


def _signing(registry: Registry, sign: str | None = None) -> Registry:
    """Let the registry sign its commits, if the caller or the environment names a key."""
    source = os.environ.get("HOLDFAST_SIGN") if sign is None else sign
    if source:
        from holdfast.registry.history import CommitSigner

        registry.handle.store.signer = CommitSigner(source)
    return registry


def open(  # noqa: A001 - holdfast.open is the word that users expect
    url: str | os.PathLike[str] | None = None,
    *,
    read_only: bool = False,
    expect_id: str | None = None,
    cache: str | os.PathLike[str] | ChunkCache | None = None,
    remember: bool = True,
    journal: str | os.PathLike[str] | Journal | None = None,
    sign: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    fs: Any = None,
    transport: Transport | None = None,
    follow_moved: bool = False,
) -> Registry:
    """Open a registry.

    Args:
        url: Where it is. Default: the environment variable `HOLDFAST_REGISTRY`; then the options
            in `HOLDFAST_STORAGE_OPTIONS`, a JSON object, count as well.
        read_only: Refuse every write in this process. While `holdfast verify-resume` runs a
            program, every registry but that of `HOLDFAST_REGISTRY` is read-only.
        expect_id: The registry's id as it was remembered; another one is refused.
        cache: A folder of a local disk, or a `ChunkCache`, that keeps the chunks that are read.
            Default: the environment variable `HOLDFAST_CACHE`, for registries in buckets only. An
            empty text: no cache.
        remember: Check its logs against the heads that this machine remembers, and remember the
            new ones; a run that went back is refused (`RolledBack`). `holdfast.trust` accepts it.
            Has no effect if the environment variable `HOLDFAST_HEADS` is `0`.
        journal: A folder of a local disk, or a `Journal`: saves return when they are durable there,
            and are carried into the registry in the background (`docs/journal.md`).
            Default: the environment variable `HOLDFAST_JOURNAL`. An empty text: no journal.
        sign: An Ed25519 key that signs each commit of this process (`docs/security.md`): a file of
            PEM, `env:VARIABLE` or `agent:COMMAND`. It is loaded before the first write.
            Default: the environment variable `HOLDFAST_SIGN`. An empty text: no signatures.
        storage_options: Options of the file system, by the names of fsspec's drivers, such as
            `key`, `secret`, `profile` and `endpoint_url` for `s3://`; `docs/stores.md` lists them.
            An option that cannot be used is refused.
        fs: A file system object of fsspec; `url` is then a path in it.
        transport: Library that moves the bytes of S3: `boto3`, `s3fs`, which is slower, or
            `obstore`, which is faster for small objects and leaves the others to boto3.
        follow_moved: Open the place that the registry has moved to (`Registry.freeze`), if it has,
            and from there on, with none of the options that are given here. A place that names a
            server is refused: credentials of the environment would be sent there.

    Raises:
        NotFound: There is no registry.
        Conflict: It is not the expected registry, or not the one that was here before.
        InvalidLocation: It has moved to a place that is not followed, or in a circle.
        StoreUnavailable: It cannot be reached, and no run of the journal was trained there.
        UnsupportedFormat: It was made by a newer Holdfast.
    """
    place = os.environ.get("HOLDFAST_REGISTRY") if url is None else url
    if place is None:
        raise InvalidInput(
            "no registry is named", hint="Pass its URL or path, or set HOLDFAST_REGISTRY."
        )
    if url is None and fs is None:
        storage_options = Address.of_environment(place, storage_options).storage_options
    address = Address(place, storage_options, fs, transport)
    chunks = choose_cache(cache, is_remote=address.is_remote())
    chosen = _journal(journal)
    if not read_only and _may_not_be_written(place, fs):
        read_only = True
        _LOGGER.warning(
            "%s is opened read-only: verify-resume trains in HOLDFAST_REGISTRY alone", place
        )
    store = open_store(
        address,
        read_only=read_only,
        expect_id=expect_id,
        cache=chunks,
        remember=remember,
        known=_known(None if read_only else chosen),
    )
    registry = _signing(Registry(store, chosen), sign)
    if not follow_moved:
        return registry
    return _followed(
        registry,
        partial(
            open, read_only=read_only, cache=cache, remember=remember, journal=journal, sign=sign
        ),
    )


def _journal(given: str | os.PathLike[str] | Journal | None) -> Journal | None:
    """Return the journal that an argument or the environment names."""
    if given is None and not os.environ.get("HOLDFAST_JOURNAL"):
        return None
    from holdfast.registry.saving.journal import choose_journal

    return choose_journal(given)


def _followed(registry: Registry, reopen: Callable[[str], Registry]) -> Registry:
    """Return the registry at the end of all moves."""
    places: set[str] = set()
    while moved_to := registry.moved_to:
        registry.close()
        if moved_to in places:
            raise InvalidLocation(
                "registries have moved in a circle",
                where=moved_to,
                hint="Open the one that is in use by its own URL.",
            )
        places.add(moved_to)
        registry = reopen(check_followed(moved_to))
    return registry


def check_followed(moved_to: str) -> str:
    """Return a place that a registry names, if this program may go there by itself."""
    location = parse(moved_to)
    if location.scheme not in _FOLLOWED or location.endpoint_url is not None:
        raise InvalidLocation(
            "a registry that has moved is not followed there by itself",
            where=moved_to,
            expected=f"a URL of {', '.join(_FOLLOWED)} without a server",
            hint="Open that place yourself if you trust it.",
        )
    return moved_to


def _may_not_be_written(place: str | os.PathLike[str], fs: Any) -> bool:
    """Return whether `verify-resume` runs this program, and this is not its scratch registry."""
    scratch = os.environ.get("HOLDFAST_REGISTRY")
    if "HOLDFAST_STOP_STEP" not in os.environ or scratch is None:
        return False
    return fs is not None or parse(place) != parse(scratch)


def open_on(
    backend: Backend,
    *,
    cache: ChunkCache | None = None,
    heads: Heads | None = None,
    journal: Journal | None = None,
) -> Registry:
    """Open the registry behind a backend that the caller made."""
    store = open_store_on(backend, cache=cache, heads=heads, known=_known(journal))
    return _signing(Registry(store, journal))


def _known(journal: Journal | None) -> Callable[[str], RegistryConfig | None]:
    """Return a function that looks up in a journal the configuration of an absent registry."""

    def known(place: str) -> RegistryConfig | None:
        from holdfast.registry.saving.journal import known_registry

        return known_registry(journal, place)

    return known
