"""Dicts and sets of a pickle: a key is hashed only if that is safe."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

#: How deeply tuples may be nested in a key. Python hashes nested tuples by recursion in C, which
#: has no limit: a deep one would overflow the stack and kill the process.
_MAX_KEY_DEPTH: Final = 8
_PLAIN_KEYS: Final = (str, int, float, bool, bytes, complex, type(None))


def ordered_dict(pairs: Any = ()) -> OrderedDict[Any, Any]:
    """Return an OrderedDict of pairs, as a call of its name makes it."""
    return OrderedDict((check_key(key), value) for key, value in pairs)


def set_of(items: Any = ()) -> set[Any]:
    """Return a set, as a call of its name makes it."""
    return set(map(check_key, items))


def check_key(key: Any, depth: int = _MAX_KEY_DEPTH) -> Any:
    """Return a key of a dict, or an item of a set, if hashing it is safe.

    Raises:
        TypeError: It is of another type, or nested too deeply.
    """
    if type(key) in _PLAIN_KEYS:
        return key
    if type(key) is not tuple or not depth:
        raise TypeError(f"{type(key).__name__} as a key, or tuples that are nested too deeply")
    for part in key:
        check_key(part, depth - 1)
    return key
