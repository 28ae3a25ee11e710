"""Every error that Holdfast raises: `from holdfast.errors import Fenced, NotFound`.

All of them are `RegistryError`s. The tree, with the exit status of the command for each, is at the
top of `holdfast.registry.errors`.
"""

from __future__ import annotations

from holdfast.registry.errors import (
    AccessDenied,
    AmbiguousRef,
    BeyondLimit,
    Conflict,
    Damaged,
    Diverged,
    Fenced,
    IncompatibleState,
    IntegrityError,
    InvalidInput,
    InvalidLocation,
    Malformed,
    MissingObject,
    NotFound,
    ObjectNotFound,
    ObjectTruncated,
    OutOfRange,
    ReadOnlyStore,
    RegistryError,
    RestoreFailed,
    RolledBack,
    StorageError,
    StoreFull,
    StoreUnavailable,
    StoreUnsuitable,
    UnsupportedFormat,
    UnsupportedValue,
)

__all__ = [
    "AccessDenied",
    "AmbiguousRef",
    "BeyondLimit",
    "Conflict",
    "Damaged",
    "Diverged",
    "Fenced",
    "IncompatibleState",
    "IntegrityError",
    "InvalidInput",
    "InvalidLocation",
    "Malformed",
    "MissingObject",
    "NotFound",
    "ObjectNotFound",
    "ObjectTruncated",
    "OutOfRange",
    "ReadOnlyStore",
    "RegistryError",
    "RestoreFailed",
    "RolledBack",
    "StorageError",
    "StoreFull",
    "StoreUnavailable",
    "StoreUnsuitable",
    "UnsupportedFormat",
    "UnsupportedValue",
]
