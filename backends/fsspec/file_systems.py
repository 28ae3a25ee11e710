"""Which file systems of fsspec hold a registry, and how a URL or an object becomes a store.

| file system | store |
|---|---|
| `s3fs.core.S3FileSystem` | S3, its bytes by boto3; by s3fs with `transport="s3fs"` |
| `adlfs.spec.AzureBlobFileSystem` | Azure, by adlfs |
| `gcsfs.core.GCSFileSystem`, `gcsfs.extended_gcsfs.ExtendedGcsFileSystem` | Google, by gcsfs |
| `LocalFileSystem` | our folder, which syncs and links |
| `MemoryFileSystem` | our store in memory |
| one that keeps copies (`simplecache`, `filecache`, ...) | refused: old copies hide new commits |
| any other | read only |

fsspec's own create looks for the object and then writes, and most file systems do the same: two
writers can both win. So a class is listed by hand once its create is known to be a condition that
the server decides, from the version on that has it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from typing import Any

import fsspec
import fsspec.config
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from holdfast.backends.base import Backend
from holdfast.backends.errors import (
    InvalidLocation,
    StoreUnavailable,
    StoreUnsuitable,
    install_extra,
)
from holdfast.backends.fsspec.dialect import Dialect
from holdfast.backends.fsspec.store import FsspecBackend
from holdfast.backends.local.backend import LocalBackend
from holdfast.backends.location import parse, redact
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.secrets import Secrets

# Which extra of Holdfast brings the driver of a scheme.
_EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "azure"),
}
# Options of every file system, and the beginnings of those that adlfs passes on when it logs in.
_COMMON = (
    *("use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache"),
    *("asynchronous", "loop", "batch_size"),
)
_OF_LOGIN = ("exclude_", "managed_identity_", "workload_identity_")
_NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class _Listed:
    """A class of file systems whose create is a condition of the server.

    Attributes:
        package: The distribution that has it.
        least: The first version that the tests ran with.
        dialect: Module and class of its dialect.
    """

    package: str
    least: tuple[int, ...]
    dialect: tuple[str, str]


_LISTED = {
    "s3fs.core.S3FileSystem": _Listed("s3fs", (2026, 3), ("s3", "S3Dialect")),
    **dict.fromkeys(
        ("gcsfs.core.GCSFileSystem", "gcsfs.extended_gcsfs.ExtendedGcsFileSystem"),
        _Listed("gcsfs", (2026, 3), ("gcs", "GcsDialect")),
    ),
    "adlfs.spec.AzureBlobFileSystem": _Listed("adlfs", (2026, 2), ("azure", "AzureDialect")),
}
_UNPROVEN = (
    "its create is not known to be a condition of the server; a driver that looks for the object "
    "and then writes it lets two writers win"
)


def make(scheme: str, url: str, options: Mapping[str, Any]) -> Any:
    """Make a file system for a URL.

    Raises:
        InvalidLocation: fsspec knows no such scheme, or refuses the options.
        StoreUnsuitable: The driver is not installed.
        StoreUnavailable: The driver connects at once, and nobody answers.
    """
    hidden = Secrets([options, configured(scheme)])
    try:
        made: type = fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise _not_installed(scheme, url, error) from error
    except ValueError:
        raise InvalidLocation(
            f"unknown scheme {scheme!r}",
            where=redact(url),
            expected="a path, file:///PATH, memory://NAME, s3://BUCKET/PREFIX, or a scheme that "
            "fsspec knows",
        ) from None
    _check_options(made, options, url)
    try:
        named = made._get_kwargs_from_urls(url)  # type: ignore[attr-defined]
        return made(**{**named, **options}, skip_instance_cache=True)
    except ImportError as error:
        raise _not_installed(scheme, url, error) from error
    except Exception as error:
        said = hidden.hide(f"{type(error).__name__}: {error}").rstrip(".!")
        given = f"Options given: {', '.join(sorted(options)) or 'none'}."
        name = made.__module__.partition(".")[0]
        # Without the cause: constructors repeat what they were given.
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise StoreUnavailable(
                f"{name} could not connect", where=redact(url), found=said, hint=given
            ) from None
        raise InvalidLocation(
            f"{name} refuses the location or its options",
            where=redact(url),
            found=said,
            hint=" ".join(filter(None, [given, _log_in(made)])),
        ) from None


def _not_installed(scheme: str, url: str, error: ImportError) -> StoreUnsuitable:
    extra = _EXTRAS.get(scheme)
    return StoreUnsuitable(
        "the driver of this store is not installed",
        where=redact(url),
        found=error,
        hint=install_extra(extra) if extra else "Install the package that it needs.",
    )


def _log_in(made: type) -> str:
    listed = _LISTED.get(f"{made.__module__}.{made.__qualname__}")
    return _dialect(listed).log_in if listed else ""


def _check_options(made: type, options: Mapping[str, Any], url: str) -> None:
    """Refuse options that a listed class would ignore.

    Raises:
        InvalidLocation: There is one.
    """
    if f"{made.__module__}.{made.__qualname__}" not in _LISTED:
        return  # of others nobody knows which options they have
    # s3fs passes it on to its session.
    known = {*_COMMON} | ({"profile"} if made.__module__ == "s3fs.core" else set())
    for one in made.__mro__:
        if one not in (AsyncFileSystem, AbstractFileSystem, object) and "__init__" in vars(one):
            known |= signature(one.__init__).parameters.keys()  # type: ignore[misc]
    unknown = [n for n in options if n not in known and not n.startswith(_OF_LOGIN)]
    if unknown:
        close = get_close_matches(unknown[0], known - {"self", "args", "kwargs"})
        raise InvalidLocation(
            f"{made.__module__.partition('.')[0]} has no such option",
            where=redact(url),
            found=", ".join(sorted(unknown)),
            hint=f"Did you mean {close[0]}?" if close else None,
        )


def check_object(fs: Any, path: str) -> None:
    """Refuse an object that is no file system of fsspec, and a URL of another file system.

    Raises:
        InvalidLocation: It is one of these.
    """
    if not isinstance(fs, AbstractFileSystem):
        raise InvalidLocation(
            "fs is no file system of fsspec",
            where=redact(path),
            found=f"a {type(fs).__name__}",
            hint="Give an object, such as fsspec.filesystem('s3', ...).",
        )
    known = (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
    scheme, mark, _ = path.partition("://")
    if mark and "/" not in scheme and scheme not in known:
        raise InvalidLocation(
            "the URL is of another kind than the file system object",
            where=redact(path),
            expected=f"{known[0]}://..., or a path",
        )


def open_file_system(fs: Any, path: str) -> Backend:
    """Open the store at a path of a file system object; S3 goes by s3fs here.

    Raises:
        StoreUnsuitable: The file system is refused; the message gives the reason.
    """
    if isinstance(fs, CachingFileSystem):
        raise StoreUnsuitable(
            "a file system that keeps copies is refused",
            where=redact(str(path)),
            found=class_name(fs),
            hint="Give the file system behind it: copies would hide new commits.",
        )
    if isinstance(fs, LocalFileSystem):
        return LocalBackend(fs._strip_protocol(path))
    if isinstance(fs, MemoryFileSystem):
        return MemoryBackend(parse(f"memory://{fs._strip_protocol(path).strip('/')}").name)
    return FsspecBackend(fs, path, dialect_of(fs))


def dialect_of(fs: Any) -> Dialect:
    """Return how a file system is asked, and whether it is written to."""
    name = class_name(fs)
    listed = _LISTED.get(name)
    # A subclass may have another create.
    if listed is None:
        return Dialect(name, _UNPROVEN)
    if _version(listed.package) < listed.least:
        wanted = ".".join(map(str, listed.least))
        return Dialect(
            name,
            f"{listed.package} is older than {wanted}, and may ignore the condition of a create",
        )
    return _dialect(listed)


def _dialect(listed: _Listed) -> Dialect:
    module = import_module(f"holdfast.backends.fsspec.{listed.dialect[0]}")
    found: Dialect = getattr(module, listed.dialect[1])()
    return found


def options_of(fs: Any) -> dict[str, Any]:
    """Return the options with which a file system was made, each by its name."""
    bound = signature(type(fs).__init__).bind(fs, *fs.storage_args, **fs.storage_options)
    named = dict(bound.arguments)
    rest = [p.name for p in bound.signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    for name in rest:
        named |= named.pop(name, {})
    named.pop(next(iter(bound.signature.parameters)))
    return named


def configured(scheme: str) -> dict[str, Any]:
    """Return the options that fsspec's configuration files and environment give for a scheme."""
    return dict(fsspec.config.conf.get(scheme, {}))


def class_name(fs: Any) -> str:
    """Return the full name of the class of a file system."""
    return f"{type(fs).__module__}.{type(fs).__qualname__}"


def _version(package: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, _NUMBER.findall(version(package))))[:3]
    except PackageNotFoundError:
        return ()
