"""Dicts and sets of a pickle: a key is hashed only if that is safe."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from holdfast.registry.values.parse_limits import MOST_EQUAL, Budget, KeyHashes

#: How deeply tuples may be nested in a key. Python hashes nested tuples by recursion in C, which
#: has no limit: a deep one would overflow the stack and kill the process.
_MAX_KEY_DEPTH: Final = 8
_PLAIN_KEYS: Final = (str, int, float, bool, bytes, complex, type(None))
#: Bytes of memory for an entry of a dict or set, for a part of a key, and for counting hashes.
_ENTRY_BYTES: Final = 100
_HASHES_BYTES: Final = 400


class Keys:
    """Admits the keys of all dicts and the items of all sets of one reading.

    Args:
        budget: Counts the entries, and what else the reading makes.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        #: Containers by `id`, held so that no other gets it, each with the hashes of its keys.
        self._hashes: dict[int, tuple[Any, KeyHashes]] = {}

    def admit(self, keys: Sequence[Any], target: Any = None) -> Sequence[Any]:
        """Return keys that may be added to a container; to a new one without it.

        Raises:
            TypeError: A key is of another type, or nested too deeply.
            ValueError: Too many keys have the same hash.
        """
        self.budget.take(len(keys) * _ENTRY_BYTES)
        hashes: KeyHashes | None = None
        for key in keys:
            if type(key) is str:
                continue
            self.check(key)
            hashes = hashes or self._hashes_of(target)
            if not hashes.admits(key):
                raise ValueError(f"more than {MOST_EQUAL} keys with the same hash")
        return keys

    def check(self, key: Any, depth: int = _MAX_KEY_DEPTH) -> None:
        """Check that hashing a key is safe, and count how long it takes."""
        if type(key) is int:
            self.budget.take(key.bit_length() >> 3)  # Python computes it anew each time
        elif type(key) is tuple and depth:
            self.budget.take(len(key) * _ENTRY_BYTES)
            for part in key:
                self.check(part, depth - 1)
        elif type(key) not in _PLAIN_KEYS:
            raise TypeError(f"{type(key).__name__} as a key, or tuples that are nested too deeply")

    def _hashes_of(self, target: Any) -> KeyHashes:
        if target is None:
            return KeyHashes()
        if id(target) not in self._hashes:
            self.budget.take(_HASHES_BYTES)
            self._hashes[id(target)] = (target, KeyHashes())
        return self._hashes[id(target)][1]

    def ordered_dict(self, pairs: Any = ()) -> OrderedDict[Any, Any]:
        """Return an OrderedDict of pairs, as a call of its name makes it."""
        found = [(key, value) for key, value in pairs]
        self.admit([key for key, _ in found])
        return OrderedDict(found)

    def set_of(self, items: Any = ()) -> set[Any]:
        """Return a set, as a call of its name makes it."""
        return set(self.admit(list(items)))
