"""Files and folders as values, found by the paths of the file system."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol


def is_name(text: str) -> bool:
    """Return whether a text names an entry of a folder, and is no step of a path."""
    return text not in ("", ".", "..") and not {"/", "\0"}.intersection(text)


class File(Protocol):
    """A file whose bytes are made when they are read."""

    @property
    def size(self) -> int:
        """Its length in bytes."""

    def read(self, start: int, stop: int) -> bytes:
        """Return a range that is within the file, every byte verified."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder whose entries are found when they are asked for."""

    names: Callable[[], Iterable[str]]  # returns the names that a listing shows
    #: Returns the file or folder of a name; None if there is none. It may know more names.
    get: Callable[[str], File | Folder | None]
    #: Whether all that it lists are folders, so that a listing need not ask.
    has_folders_only: bool = False
    state_id: str | None = None  # the id of the state whose files it holds; None for other folders

    @classmethod
    def of(cls, entries: Mapping[str, File | Folder]) -> Folder:
        """Return a folder of known entries."""
        return cls(lambda: entries, entries.get)


@dataclass(frozen=True, slots=True)
class Literal:
    """A file whose bytes are known."""

    data: bytes

    @property
    def size(self) -> int:
        """Its length in bytes."""
        return len(self.data)

    def read(self, start: int, stop: int) -> bytes:
        """Return a range of it."""
        return self.data[start:stop]
