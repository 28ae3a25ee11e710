"""Keep the secrets among a file system's options out of messages.

Libraries repeat addresses, headers and options in their errors. Whatever may be secret in options
is replaced there; `holdfast.backends.location` does the same for URLs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

from holdfast.backends.errors import Hint, StorageError
from holdfast.backends.location import redact

_SENSITIVE = r"(?i)key|secret|token|pass|cred|sas|sig|connection|auth|header"
# A part of a connection string or of a signed address.
_PART = r"(\w+)=([^;&\s]+)"
# Variables that drivers read begin with these.
_READ = ("AWS_", "AZURE_", "FSSPEC_", "GOOGLE_")
# Shorter texts would hide words that are no secret.
_LEAST = 6


def may_be_secret(name: str) -> bool:
    """Return whether the value of an option of this name may be a secret."""
    return bool(re.search(_SENSITIVE, name))


class Secrets:
    """The secrets of some options, and those in the environment that drivers read.

    Args:
        options: Options, as mappings and lists of any depth.
    """

    def __init__(self, options: object) -> None:
        read = {name: text for name, text in os.environ.items() if name.startswith(_READ)}
        found = set(_secrets([options, read], secret=False))
        self._found = sorted(found, key=len, reverse=True)

    def hide(self, text: str) -> str:
        """Return a text with `***` for each secret in it."""
        for secret in self._found:
            text = text.replace(secret, "***")
        return redact(text)

    def _raise_hidden(self, error: StorageError) -> NoReturn:
        said = error.hints or Hint("")
        parts = (error.what, error.where, error.expected, error.found, said.python, said.cli)
        if not any(part is not None and self.hide(part) != part for part in parts):
            if any(secret in repr(error.__cause__) for secret in self._found):
                raise error from None
            raise error
        what, where, expected, found, python, cli = (
            None if part is None else self.hide(part) for part in parts
        )
        hint = Hint(python, cli) if python else None
        raise type(error)(
            what or "", where=where, expected=expected, found=found, hint=hint
        ) from None


@contextmanager
def hidden(secrets: Callable[[], Secrets]) -> Iterator[None]:
    """Hide secrets in errors of ours; an error that held one loses its cause.

    Args:
        secrets: Returns the secrets when there is an error: a driver may find some late.
    """
    try:
        yield
    except StorageError as error:
        secrets()._raise_hidden(error)


def _secrets(value: object, *, secret: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, held in value.items():
            yield from _secrets(held, secret=secret or may_be_secret(str(name)))
    elif isinstance(value, (list, tuple, set)):
        for held in value:
            yield from _secrets(held, secret=secret)
    elif isinstance(value, str) and secret:
        parts = (held for name, held in re.findall(_PART, value) if may_be_secret(name))
        yield from (part for part in (value, *parts) if len(part) >= _LEAST)
