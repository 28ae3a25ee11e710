"""The root of the error tree and its storage branch.

`registry/errors.py` shows the whole tree. Root and storage branch are here because imports go
downwards: backends raise these errors, and all other code catches them.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import ClassVar, NamedTuple

from holdfast.backends.escape import printable, shortened

#: Longer parts of a message are shortened to about this many characters.
_MAX_PART = 2000
_DISTRIBUTION = "holdfast-registry"


class Hint(NamedTuple):
    """The next step for the reader, in the words of each face; a plain string suits both.

    Attributes:
        python: A sentence that names calls of Python.
        cli: A sentence that names commands and options; `None` if no command shows the hint.
    """

    python: str
    cli: str | None = None

    @classmethod
    def of(cls, *parts: str | Hint | None) -> Hint | None:
        """Join sentences; return `None` if there are none."""
        known = [Hint(part, part) if isinstance(part, str) else part for part in parts if part]
        said = " ".join(part.cli for part in known if part.cli)
        return cls(" ".join(part.python for part in known), said or None) if known else None


def install_extra(extra: str) -> str:
    """Return the hint to install an extra, from where Holdfast itself came."""
    metadata = import_module("importlib.metadata")  # slow, and needed here alone
    try:
        found = json.loads(
            metadata.distribution(_DISTRIBUTION).read_text("direct_url.json") or "{}"
        )
    except metadata.PackageNotFoundError:  # a checkout on the path
        found = {}
    # An installation that came from no index has the record of PEP 610.
    url, vcs = found.get("url"), found.get("vcs_info")
    if found.get("dir_info", {}).get("editable"):
        wanted = f"-e '{url}[{extra}]'"
    elif url:
        place = f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else url
        wanted = f"'{_DISTRIBUTION}[{extra}] @ {place}'"
    else:
        wanted = f"'{_DISTRIBUTION}[{extra}]'"
    return f"Install the extra: pip install {wanted}."


class RegistryError(Exception):
    """The base of all errors of Holdfast.

    The message has up to five parts, each of which is also an attribute. Parts may be text from a
    store, so control, direction and invisible characters are escaped, and long parts shortened.

    Attributes:
        what: The problem, a clause without a full stop.
        where: The key, path, run, reference or URL.
        expected: A correct input or object.
        found: The wrong input or object.
        hints: The next step for the reader: `hint` has the words of Python, `cli_hint` those of
            the command.
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
        hint: str | Hint | None = None,
    ) -> None:
        # A list of several failures may have several lines.
        self.what = printable(what, spare="\n")
        self.where = _part(where)
        self.expected = _part(expected)
        self.found = _part(found)
        said = Hint.of(hint)
        self.hints = None if said is None else Hint(_text(said.python), _part(said.cli))
        super().__init__(str(self))

    @property
    def hint(self) -> str | None:
        """The next step for the reader, a sentence that may name calls of Python."""
        return None if self.hints is None else self.hints.python

    @property
    def cli_hint(self) -> str | None:
        """The next step for the reader of a command; it names commands and options."""
        return None if self.hints is None else self.hints.cli

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

    @property
    def cli_message(self) -> str:
        """The message with the hint of the command."""
        return self._message(self.cli_hint)

    def _message(self, hint: str | None) -> str:
        return self.summary if hint is None else f"{self.summary}. {hint}"

    def __str__(self) -> str:
        # KeyError would show the repr of its argument.
        return self._message(self.hint)

    def __reduce__(self) -> tuple[object, ...]:
        # By default pickle would pass the message as `what` and lose the parts.
        return (_rebuild, (type(self), self.__dict__.copy()))


def _part(value: object) -> str | None:
    return None if value is None else _text(value)


def _text(value: object) -> str:
    return shortened(printable(value), _MAX_PART)


def _rebuild(cls: type[RegistryError], parts: dict[str, object]) -> RegistryError:
    # By name Python would find that of another builtin class, where there are two.
    error = OSError.__new__(cls) if issubclass(cls, OSError) else cls.__new__(cls)
    error.__dict__.update(parts)
    error.args = (str(error),)
    return error


class StorageError(RegistryError, OSError):
    """The store failed or refused a call."""

    exit_code = 7


class ObjectNotFound(StorageError, FileNotFoundError):
    """The store has no object with this key."""


class ObjectTruncated(StorageError, EOFError):
    """An object ends before the requested range does."""


class AccessDenied(StorageError, PermissionError):
    """Credentials are missing, expired or not sufficient."""


class Archived(StorageError):
    """An object is in an archive of its store, and can be read hours after a request for it."""


class ReadOnlyStore(StorageError, PermissionError):
    """A store that was opened for reading cannot be written."""


class StoreFull(StorageError):
    """No space or quota is left."""


class StoreUnavailable(StorageError, ConnectionError):
    """The store gave no answer in time or a wrong one; the outcome of a write is unknown."""


class StoreUnsuitable(StorageError):
    """The store cannot keep the five promises (no exclusive create, no hard links, ...)."""

    exit_code = 8


class InvalidLocation(StorageError, ValueError):
    """A URL or path cannot be the location of a registry."""

    exit_code = 3
