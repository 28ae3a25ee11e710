"""The error tree. One root; each branch needs another reaction.

RegistryError                     anything Holdfast refuses or fails to do             exit 1
├── StorageError                  the store failed: wait, fix access, then retry       exit 7
│   ├── ObjectNotFound            the key is absent
│   ├── ObjectTruncated           the object ends too early
│   ├── AccessDenied              credentials missing, expired, insufficient
│   ├── Archived                  an object has to be restored first: ask, then wait
│   ├── ReadOnlyStore             write to a store opened for reading
│   ├── StoreFull                 no space or quota left
│   ├── StoreUnavailable          no answer; the outcome of a write is unknown
│   ├── StoreUnsuitable           cannot keep the five promises                        exit 8
│   ├── OnlyLocal                 a checkpoint is in the journal, but not in the registry yet
│   └── InvalidLocation           not a URL or path of a registry                      exit 3
├── InvalidInput                  the caller's argument is wrong: correct it           exit 3
│   ├── UnsupportedValue          a value in a state cannot be stored
│   ├── OutOfRange                an index is beyond its tensor
│   └── IncompatibleState         a state does not fit the target (keys, shapes, format)
├── NotFound                      a name resolves to nothing: check the name           exit 4
│   ├── AmbiguousRef              a name resolves to several things
│   └── NoSuchPath                a path of `holdfast://` is no file or folder
├── Conflict                      another writer was first: look, then decide          exit 5
│   ├── Fenced                    another trainer took the run over
│   │   └── Stranded              ... while saves were only in the journal of this machine
│   └── Diverged                  two registries hold different histories of a run
├── Frozen                        the registry may not be written: it has moved         exit 5
├── IntegrityError                bytes differ from those committed: verify, repair    exit 6
│   ├── Damaged                   a file's bytes do not hash to its digest
│   ├── Malformed                 a file breaks a rule of its format
│   ├── BeyondLimit               reading a file would take more memory than allowed
│   ├── MissingObject             a file that a live checkpoint needs is gone
│   │   └── Thinned               a component was given up, and the checkpoint kept
│   └── RolledBack                a log is not the one that was seen before, or shorter
├── UnsupportedFormat             written by a newer or unknown Holdfast: upgrade      exit 8
├── RankFailed                    a rank of the job died, was late or failed: see it   exit 1
├── WorkersFailed                 the workers of an executor died or cannot work       exit 1
└── RestoreFailed                 no retained checkpoint could be loaded               exit 6

The root and the storage branch, except `OnlyLocal`, are defined in `backends/errors.py`.
"""

from __future__ import annotations

from holdfast.backends.errors import (
    AccessDenied,
    Archived,
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
from holdfast.backends.errors import Hint as Hint

__all__ = [
    "AccessDenied",
    "AmbiguousRef",
    "Archived",
    "BeyondLimit",
    "Conflict",
    "Damaged",
    "Diverged",
    "Fenced",
    "Frozen",
    "IncompatibleState",
    "IntegrityError",
    "InvalidInput",
    "InvalidLocation",
    "Malformed",
    "MissingObject",
    "NoSuchPath",
    "NotFound",
    "ObjectNotFound",
    "ObjectTruncated",
    "OnlyLocal",
    "OutOfRange",
    "RankFailed",
    "ReadOnlyStore",
    "RegistryError",
    "RestoreFailed",
    "RolledBack",
    "StorageError",
    "StoreFull",
    "StoreUnavailable",
    "StoreUnsuitable",
    "Stranded",
    "Thinned",
    "UnsupportedFormat",
    "UnsupportedValue",
    "WorkersFailed",
]


class OnlyLocal(StorageError):
    """A checkpoint is durable in this machine's journal, but not in the registry yet."""


class InvalidInput(RegistryError, ValueError):
    """An argument is wrong; nothing was read or written."""

    exit_code = 3


class UnsupportedValue(InvalidInput, TypeError):
    """A value in a state cannot be stored; the message names its path."""


class OutOfRange(InvalidInput, IndexError):
    """An index is beyond its tensor, or there are more indices than axes."""


class IncompatibleState(InvalidInput):
    """A state does not fit the target that it is loaded into or written to."""


class NotFound(RegistryError, KeyError):
    """A name resolves to nothing."""

    exit_code = 4


class AmbiguousRef(NotFound):
    """A name resolves to more than one thing."""


class NoSuchPath(NotFound, FileNotFoundError):
    """A path of the file system `holdfast://` names no file or folder."""


class Conflict(RegistryError):
    """A commit of another writer excludes this one."""

    exit_code = 5


class Fenced(Conflict):
    """Another trainer has taken the run over; this one may no longer save."""


class Stranded(Fenced):
    """Another machine took the run over while saves were only in the journal of this one."""


class Diverged(Conflict):
    """Two registries hold different commits at the same position of one run's history."""


class Frozen(RegistryError):
    """The registry was frozen: nobody may write to it; where it goes on is in the message."""

    exit_code = 5


class IntegrityError(RegistryError):
    """Bytes on the store differ from the committed bytes."""

    exit_code = 6


class Damaged(IntegrityError):
    """The bytes of a file do not hash to its digest."""


class Malformed(IntegrityError):
    """A file breaks a rule of its format."""


class BeyondLimit(IntegrityError):
    """Reading a file would take more memory than allowed; the message says how to allow more."""


class MissingObject(IntegrityError):
    """A file that a kept checkpoint needs is gone: data loss unless a mirror has it."""


class Thinned(MissingObject):
    """A component of a kept checkpoint is gone, because the checkpoint was thinned on purpose."""


class RolledBack(IntegrityError):
    """A log is shorter than before, or a different one: it was set back or replaced."""


class UnsupportedFormat(RegistryError):
    """A file was written in a format, or by a version, that this one does not know."""

    exit_code = 8


class RestoreFailed(RegistryError):
    """No retained checkpoint of a run could be loaded; the message lists each one tried and why."""

    exit_code = 6


class RankFailed(RegistryError):
    """Another rank of a collective save or load died, was late, or failed.

    Attributes:
        rank: The first rank that it names.
    """

    rank: int = -1


class WorkersFailed(RegistryError):
    """The workers of an executor died, were taken away, or cannot work."""
