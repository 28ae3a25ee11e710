"""Choose the backend of a URL, a path, or a file system object of fsspec.

Folders, memory and S3 have stores of our own; every other URL is resolved by fsspec. For S3 the
names of options, credentials and endpoints are those of s3fs, and fsspec's own configuration
(`~/.config/fsspec`, `FSSPEC_S3_...`) counts; the bytes go by boto3 unless `transport` says
otherwise. fsspec is imported only when something asks for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from holdfast.backends.base import Backend
from holdfast.backends.errors import Hint, InvalidLocation, StoreUnsuitable, install_extra
from holdfast.backends.local.backend import LocalBackend
from holdfast.backends.location import (
    SCHEMES,
    Location,
    check_endpoint,
    parse,
    redact,
)

if TYPE_CHECKING:
    from holdfast.backends.fsspec.files import Files
    from holdfast.backends.s3.settings import TakenOptions

Transport = Literal["boto3", "obstore", "s3fs"]

_TRANSPORTS = ("boto3", "obstore", "s3fs")
_EXTRAS = {"botocore": "s3", "obstore": "fast"}
# `dir::file:///PATH`: file systems of fsspec, one in front of another.
_CHAIN = r"[A-Za-z][A-Za-z0-9+.-]+::"
_COPIES = ("simplecache", "filecache", "blockcache", "cached")


def open_backend(
    url: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    fs: Any = None,
    transport: Transport | None = None,
) -> Backend:
    """Return the backend of a URL or path; nothing is created or contacted yet.

    Args:
        url: A form that `holdfast.backends.location` lists, or any URL that fsspec knows; with
            `fs` a path in that file system.
        storage_options: Options of the file system, by the names that fsspec's drivers give them.
        fs: A file system object of fsspec. It is only a model: Holdfast makes its own instances.
        transport: Library that moves the bytes of S3: boto3, s3fs, or obstore for small objects.

    Raises:
        InvalidLocation: It names no place where a registry can be, or an option cannot be used.
        StoreUnsuitable: The file system cannot keep the promises, or a driver is not installed.
    """
    if transport is not None and transport not in _TRANSPORTS:
        raise InvalidLocation(
            "not a transport", expected=" or ".join(_TRANSPORTS), found=repr(transport)
        )
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise InvalidLocation(
            "storage_options is not a mapping", found=f"a {type(storage_options).__name__}"
        )
    options = dict(storage_options or {})
    if fs is not None:
        return _open_object(fs, url, options, transport)
    _refuse_chain(url)
    location = parse(url)
    if location.scheme == "s3":
        return _open_s3(location, _configured("s3") | options, transport)
    if location.scheme not in SCHEMES:
        _refuse({}, transport, location.url)
        return _open_foreign(os.fspath(url), location.scheme, options)
    _refuse(options, transport, location.url)
    if location.scheme == "memory":
        from holdfast.backends.memory import MemoryBackend

        return MemoryBackend(location.name)
    return LocalBackend(location.path)


def open_files(
    url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Files:
    """Return the plain files below a URL or path, through fsspec; nothing is contacted yet.

    Raises:
        InvalidLocation: It names no place, or an option cannot be used.
        StoreUnsuitable: A driver is not installed.
    """
    from holdfast.backends.fsspec.file_systems import make
    from holdfast.backends.fsspec.files import Files

    _refuse_chain(url)
    location, options = parse(url), dict(storage_options or {})
    if location.scheme == "file":
        return Files(make("file", str(location.path), options), str(location.path), options)
    if location.scheme == "s3":
        plain, options = _for_s3fs(location, options)
        return Files(make("s3", plain, options), plain, options)
    return Files(make(location.scheme, os.fspath(url), options), os.fspath(url), options)


def _refuse_chain(url: str | os.PathLike[str]) -> None:
    if not isinstance(url, str) or "::" not in url or not ("://" in url or re.match(_CHAIN, url)):
        return
    copies = {part.partition(":")[0].lower() for part in url.split("::")}.intersection(_COPIES)
    raise StoreUnsuitable(
        "a chain of file systems is not opened by its URL",
        where=redact(url),
        found=f"{min(copies)}, which keeps copies" if copies else "'::'",
        hint="Name the store itself: a cache in front of it would hide new commits."
        if copies
        else Hint(
            "To read through it, make the file system with fsspec and give it with a path in it: "
            "holdfast.open(PATH, fs=fsspec.filesystem('zip', fo=...)).",
            "Copy what is in it to a folder or a store, and give that.",
        ),
    )


def _open_foreign(url: str, scheme: str, options: dict[str, Any]) -> Backend:
    if scheme == "holdfast":
        raise InvalidLocation(
            "holdfast:// names files of checkpoints",
            where=redact(url),
            expected="the URL of the registry itself",
        )
    from holdfast.backends.fsspec.file_systems import make, open_file_system

    return open_file_system(make(scheme, url, options), url)


def _open_object(
    fs: Any, path: str | os.PathLike[str], options: dict[str, Any], transport: str | None
) -> Backend:
    from holdfast.backends.fsspec import file_systems

    where = redact(os.fspath(path))
    file_systems.check_object(fs, os.fspath(path))
    if options:
        raise InvalidLocation(
            "options beside a file system object", where=where, found=", ".join(sorted(options))
        )
    named = file_systems.class_name(fs)
    if named == "s3fs.core.S3FileSystem":
        if transport == "s3fs":
            return file_systems.open_file_system(fs, os.fspath(path))
        location = parse(f"s3://{fs._strip_protocol(os.fspath(path))}")
        return _open_s3(location, file_systems.options_of(fs), transport)
    _refuse({}, transport, where)
    return file_systems.open_file_system(fs, os.fspath(path))


def _open_s3(location: Location, options: dict[str, Any], transport: str | None) -> Backend:
    if transport == "s3fs":
        return _open_by_s3fs(location, options)
    try:
        from holdfast.backends.s3.backend import S3Backend
        from holdfast.backends.s3.settings import take_options

        made = S3Backend
        if transport == "obstore":
            from holdfast.backends.s3.small import SmallObjectsBackend

            made = SmallObjectsBackend
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in _EXTRAS:
            raise
        raise StoreUnsuitable(
            f"{missing.replace('botocore', 'boto3')} is not installed",
            where=location.url,
            hint=install_extra(_EXTRAS[missing]),
        ) from error
    taken = take_options(options, location.url)
    return made(_placed(location, taken), settings=taken.settings)


def _open_by_s3fs(location: Location, options: dict[str, Any]) -> Backend:
    from holdfast.backends.fsspec.file_systems import make, open_file_system

    url, options = _for_s3fs(location, options)
    return open_file_system(make("s3", url, options), url)


def _for_s3fs(location: Location, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the URL without endpoint and region, which s3fs takes as options, and the options."""
    url = location._replace(endpoint_url=None, region=None).url
    if location.endpoint_url is not None:
        options = {**options, "endpoint_url": location.endpoint_url}
    if location.region is not None:
        client = dict(options.get("client_kwargs") or {})
        options = {**options, "client_kwargs": {**client, "region_name": location.region}}
    return url, options


def _placed(location: Location, taken: TakenOptions) -> Location:
    """Return the location with the endpoint and region of the options."""
    if taken.endpoint_url is not None:
        check_endpoint(location.url, taken.endpoint_url)
    for name, given, found in (
        ("endpoint_url", location.endpoint_url, taken.endpoint_url),
        ("region", location.region, taken.region),
    ):
        if None not in (given, found) and given != found:
            raise InvalidLocation(f"URL and options name two values of {name}", where=location.url)
    return location._replace(
        endpoint_url=location.endpoint_url or taken.endpoint_url,
        region=location.region or taken.region,
    )


def _refuse(options: dict[str, Any], transport: str | None, where: str) -> None:
    if options:
        raise InvalidLocation(
            "this kind of store has no options", where=where, found=", ".join(sorted(options))
        )
    if transport is not None:
        raise InvalidLocation("only S3 has a choice of transports", where=where, found=transport)


def _configured(scheme: str) -> dict[str, Any]:
    """Return fsspec's configuration for a scheme; fsspec is imported only if there may be one."""
    named = any(name.startswith("FSSPEC_") for name in os.environ)
    # Without a home folder this changes nothing, where pathlib would raise.
    folder = Path(os.path.expanduser("~"), ".config", "fsspec")  # noqa: PTH111
    if not named and not folder.is_dir():
        return {}
    from holdfast.backends.fsspec.file_systems import configured

    return configured(scheme)
