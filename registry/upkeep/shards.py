"""A part of the keys of a registry, for a collection or verification on one of several machines.

A shard has the objects whose digests begin with its share of the 256 first bytes. Logs have no
shards: each shard reads all of them. Specified in docs/spec.md, section 13.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.backends import Backend
from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput
from holdfast.registry.objects import ObjectKey

#: First bytes of a digest, and folders of a kind of object.
_FIRSTS = 256
_TEXT = re.compile("([0-9]{1,3})/([0-9]{1,3})")
_FOLDER = re.compile("[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of the keys; by default all of them."""

    number: int = 1  # from 1 to `of`
    of: int = 1

    @classmethod
    def parse(cls, text: str | None) -> Shard:
        """Read `I/N`; `None` is everything."""
        if text is None:
            return cls()
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        number, of = map(int, match.groups()) if match else (0, 0)
        if not 1 <= number <= of <= _FIRSTS:
            raise InvalidInput(
                "not a shard",
                where="shard",
                expected=f"I/N, with I from 1 to N, and N at most {_FIRSTS}",
                found=quoted(text),
                hint="The shards 1/4, 2/4, 3/4 and 4/4 are a whole registry.",
            )
        return cls(number, of)

    @property
    def is_all(self) -> bool:
        """Whether it has every key."""
        return self.of == 1

    def has(self, key: ObjectKey) -> bool:
        """Return whether an object is in it."""
        return bool(self._has(key.digest[0]))

    def of_rows(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return those of some rows whose keys are in it."""
        if self.is_all:
            return rows
        firsts = (rows["key"][:, 0] >> np.uint64(56)).astype(int)
        found: np.ndarray[Any, Any] = rows[self._has(firsts)]
        return found

    def prefixes(self, backend: Backend, kind: str) -> list[str]:
        """Return the prefixes to list for its objects of a kind.

        Names that are no folders of objects are among them, so that every shard finds them.
        """
        if self.is_all:
            return [f"{kind}/"]
        found = [info.key for info in backend.list(f"{kind}/", delimiter=True)]
        names = [key.removeprefix(f"{kind}/").rstrip("/") for key in found]
        return [
            key
            for key, name in zip(found, names, strict=True)
            if not _FOLDER.fullmatch(name) or self._has(int(name, 16))
        ]

    def _has(self, first: Any) -> Any:
        """Return whether it has digests with this first byte, or with each of an array."""
        return first * self.of // _FIRSTS == self.number - 1
