"""The root of the error tree and its storage branch.

The whole tree is drawn atop `registry/errors.py`. Root and storage branch live here because imports
run downwards: a backend raises them, and everything above catches them.
"""

from __future__ import annotations

from typing import ClassVar

from holdfast.backends.escape import printable, shortened

#: Longer parts of a message are shortened to about this length: names can be very long.
_MAX_PART = 2000


class RegistryError(Exception):
    """Anything that Holdfast refuses or fails to do.

    The message says what went wrong, where, what was expected and found, and what to do next;
    each part is also an attribute. Parts may be text from a store: control, direction and invisible
    characters in them are spelled out, and long ones are shortened.

    Attributes:
        what: What went wrong, a clause without a full stop.
        where: The key, path, run, reference or URL concerned.
        expected: What a correct input or object would have been.
        found: What was there instead.
        hint: What the reader can do next, a sentence.
        exit_code: Exit status of the `holdfast` command for this class (`docs/cli.md`).
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ) -> None:
        # A list of several failures has lines of its own.
        self.what = printable(what, spare="\n")
        self.where = _part(where)
        self.expected = _part(expected)
        self.found = _part(found)
        self.hint = _part(hint)
        super().__init__(self._message())

    @property
    def summary(self) -> str:
        """The message without the hint: for reports that give advice of their own."""
        text = self.what if self.where is None else f"{self.where}: {self.what}"
        parts = [text]
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        if self.found is not None:
            parts.append(f"found {self.found}")
        return "; ".join(parts)

    def _message(self) -> str:
        return self.summary if self.hint is None else f"{self.summary}. {self.hint}"

    def __str__(self) -> str:
        # KeyError would show the repr of its argument.
        return self._message()

    def __reduce__(self) -> tuple[object, ...]:
        # The default replays args (the message) into `what` and would lose the parts.
        return (_rebuild, (type(self), self.__dict__.copy()))


def _part(value: object) -> str | None:
    return None if value is None else shortened(printable(value), _MAX_PART)


def _rebuild(cls: type[RegistryError], parts: dict[str, str | None]) -> RegistryError:
    error = cls.__new__(cls)
    error.__dict__.update(parts)
    return error


class StorageError(RegistryError, OSError):
    """The store did not do what was asked of it."""

    exit_code = 7


class ObjectNotFound(StorageError, FileNotFoundError):
    """The store says that the key is absent (only 404 means absent)."""


class ObjectTruncated(StorageError, EOFError):
    """An object ends before the range that was asked of it."""


class AccessDenied(StorageError, PermissionError):
    """Credentials are missing, expired or not sufficient."""


class ReadOnlyStore(StorageError, PermissionError):
    """A write was asked of a store that was opened for reading."""


class StoreFull(StorageError):
    """No space or quota is left."""


class StoreUnavailable(StorageError, ConnectionError):
    """The store did not answer in time or faultily; the outcome of a write is unknown."""


class StoreUnsuitable(StorageError):
    """The store cannot keep the five promises (no exclusive create, no hard links, ...)."""

    exit_code = 8


class InvalidLocation(StorageError, ValueError):
    """A URL or path does not name a place where a registry can be."""

    exit_code = 3
