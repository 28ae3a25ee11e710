"""Values by name in a temporary database, for what would not fit in memory of a large registry."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Generic, TypeVar
from weakref import finalize

from holdfast.registry.errors import StorageError

_BEGIN = """
PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -16384;
CREATE TABLE shelf (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
"""
_PUT = "INSERT OR REPLACE INTO shelf VALUES (?, ?)"
_GET = "SELECT value FROM shelf WHERE name = ?"
_V = TypeVar("_V", int, str, bytes)


class Shelf(Generic[_V]):
    """Values by name; a few MB of them are in memory. Any thread may use it."""

    def __init__(self) -> None:
        # A temporary file, gone with the connection, and that with the shelf.
        self._db, self._lock = sqlite3.connect("", check_same_thread=False), Lock()
        finalize(self, self._db.close)
        self._db.executescript(_BEGIN)

    def __setitem__(self, name: str, value: _V) -> None:
        self.take([(name, value)])

    def take(self, values: Iterable[tuple[str, _V]]) -> None:
        """Take values; a later one of a name replaces an earlier one."""
        with self._lock, space():
            self._db.executemany(_PUT, values)

    def get(self, name: str) -> _V | None:
        """Return a value; `None` if there is none of this name."""
        with self._lock, space():
            rows: list[tuple[_V]] = self._db.execute(_GET, (name,)).fetchall()
        return rows[0][0] if rows else None

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        """Yield all names in order; nothing may be put meanwhile."""
        with space():
            for (name,) in self._db.execute("SELECT name FROM shelf ORDER BY name"):
                yield name

    def __len__(self) -> int:
        with space():
            count: int = self._db.execute("SELECT COUNT(*) FROM shelf").fetchone()[0]
        return count


@contextmanager
def space() -> Iterator[None]:
    """Say what to do if a temporary database finds no space."""
    try:
        yield
    except sqlite3.Error as error:
        raise no_room(error) from error


def no_room(error: Exception) -> StorageError:
    """Return the error for a temporary file that failed; the store itself is not full."""
    hint = "Set TMPDIR to a folder with more space."
    return StorageError("a temporary file cannot be written", found=error, hint=hint)
