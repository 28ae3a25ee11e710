"""Stores of bytes: folders, buckets and memory behind one interface.

- `base`: `Backend`, the interface: its docstrings say what each method promises.
- `local`: a folder; `s3`: a bucket; `memory`: neither; `fsspec`: any file system of fsspec.
- `location`: reads URLs, and hides secrets in them; `secrets` hides those of options.
- `opening`: `open_backend` makes the backend of a URL.
- `patience`, `waiting`: how long a call may take. `probe`: whether two writers can win.
- `wrappers`: backends around a backend; `testing`: the contract that every backend passes.

This package knows nothing of checkpoints and never imports `registry`. Importing it loads no cloud
SDK: `open_backend` imports one when a URL asks for it. Specified in docs/spec.md, section 1.
"""

from __future__ import annotations

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
from holdfast.backends.location import Location, parse
from holdfast.backends.opening import open_backend, open_files

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
    "open_files",
    "parse",
    "refuse_links",
]
