"""Stores of bytes: folders, buckets and memory behind one interface.

- `base`: `Backend`, the interface: its docstrings say what each method promises.
- `local`, with `disk`, `folders`, `walk`, `mounts` and `reserve`: a folder.
- `s3`, with `s3_client`, `s3_body`, `s3_errors` and `s3_proof`: a bucket; `memory`: neither.
- `location`: reads URLs, and hides secrets in them; `open_backend` makes the backend of a URL.
- `patience`, `waiting`: how long a call may take. `probe`: whether two writers can win.
- `wrappers`: backends around a backend; `testing`: the contract that every backend passes.

This package knows nothing of checkpoints and never imports `registry`. Importing it loads no cloud
SDK: `open_backend` imports one when a URL asks for it. Specified in docs/spec.md, section 1.
"""

from __future__ import annotations

import os

if __name__ != "holdfast.backends":
    # Loaded under another name, every class would exist twice.
    raise ImportError("import `holdfast`: `backends` is a part of it and has no name of its own")

from holdfast.backends.base import Backend, Body, Buffer, ByteRange, ObjectInfo, refuse_links
from holdfast.backends.errors import (
    AccessDenied,
    InvalidLocation,
    ObjectNotFound,
    ObjectTruncated,
    ReadOnlyStore,
    RegistryError,
    StorageError,
    StoreFull,
    StoreUnavailable,
    StoreUnsuitable,
)
from holdfast.backends.local import LocalBackend
from holdfast.backends.location import Location, parse
from holdfast.backends.memory import MemoryBackend

__all__ = [
    "AccessDenied",
    "Backend",
    "Body",
    "Buffer",
    "ByteRange",
    "InvalidLocation",
    "Location",
    "ObjectInfo",
    "ObjectNotFound",
    "ObjectTruncated",
    "ReadOnlyStore",
    "RegistryError",
    "StorageError",
    "StoreFull",
    "StoreUnavailable",
    "StoreUnsuitable",
    "open_backend",
    "parse",
    "refuse_links",
]


def open_backend(url: str | os.PathLike[str]) -> Backend:
    """Open the store at a URL or path; nothing is created or contacted yet.

    Args:
        url: A form that `holdfast.backends.location` lists.

    Raises:
        InvalidLocation: It names no place where a registry can be.
        StoreUnsuitable: The file system cannot keep the promises, or an SDK is not installed.
    """
    location = parse(url)
    if location.scheme == "memory":
        return MemoryBackend(location.name)
    if location.scheme == "file":
        return LocalBackend(location.path)
    return _open_s3(location)


def _open_s3(location: Location) -> Backend:
    try:
        from holdfast.backends.s3 import S3Backend
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "botocore":
            raise
        raise StoreUnsuitable(
            "boto3 is not installed",
            where=location.url,
            hint="Install the extra: pip install 'holdfast[s3]'.",
        ) from error
    return S3Backend(location)
