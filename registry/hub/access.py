"""Tokens of the endpoint, and the runs that each may read.

The clients send the user's own token of Hugging Face to every endpoint. It is compared as a
digest, and neither kept nor logged nor answered.
"""

from __future__ import annotations

import hashlib
import secrets
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from holdfast.registry.errors import InvalidInput

_MAX_BYTES = 2**20
_FORM = "SHA256 PATTERN,... NAME"


class Token(NamedTuple):
    """A token, by its digest."""

    sha256: bytes  # of its text in UTF-8
    runs: tuple[str, ...]  # patterns of names of runs, such as `llm-*`
    name: str  # for the access log

    def allows(self, run_id: str) -> bool:
        """Return whether it may read a run of this name, whether or not there is one."""
        return any(fnmatchcase(run_id, pattern) for pattern in self.runs)


#: Of everybody, where no token is asked for.
ANYBODY = Token(b"", ("*",), "-")


class Access(NamedTuple):
    """Everybody who may ask."""

    tokens: tuple[Token, ...] | None  # `None`: no token is asked for

    @classmethod
    def generated(cls) -> tuple[Access, str]:
        """Return access for one new token to all runs, and the token."""
        text = secrets.token_urlsafe(24)
        return cls((Token(_digest(text), ("*",), "local"),)), text

    def caller(self, authorization: str | None) -> Token | None:
        """Return who sent a header `Authorization`; `None` for a stranger."""
        if self.tokens is None:
            return ANYBODY
        digest, found = _digest((authorization or "").removeprefix("Bearer ")), None
        for token in self.tokens:  # all of them, so that the time tells nothing
            if secrets.compare_digest(digest, token.sha256):
                found = token
        return found


def read_tokens(path: Path) -> Access:
    """Return the tokens of a file: a line for each, with its SHA-256, its runs and its name."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        lines = data.decode().splitlines()
    except (OSError, ValueError) as error:
        raise InvalidInput("the tokens cannot be read", where=path, found=error) from error
    if len(data) > _MAX_BYTES:
        raise InvalidInput("too many tokens", where=path, expected=f"at most {_MAX_BYTES} bytes")
    tokens = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if words and not line.startswith("#"):
            tokens.append(_token(words, f"{path}, line {number}"))
    if not tokens:
        raise InvalidInput("no token", where=path, expected=f"lines of the form {_FORM}")
    return Access(tuple(tokens))


def _token(words: list[str], where: str) -> Token:
    try:
        sha256, patterns, name = words
        digest = bytes.fromhex(sha256)
        if len(digest) != hashlib.sha256().digest_size or not all(patterns.split(",")):
            raise ValueError
    except ValueError:
        # Without what was found: it may be a token that was to be hashed.
        raise InvalidInput(
            "not a token",
            where=where,
            expected=_FORM,
            hint='`printf %s "$TOKEN" | sha256sum` prints the digest of a token.',
        ) from None
    return Token(digest, tuple(patterns.split(",")), name)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()
