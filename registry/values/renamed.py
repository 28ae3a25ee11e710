"""Old public names, which work for one more minor version with a warning: docs/compatibility.md."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from operator import attrgetter
from typing import Any, TypeVar, cast

C = TypeVar("C", bound=Callable[..., Any])


def renaming(old: str, now: str, ends: str) -> str:
    """Return the sentence of every such warning."""
    return f"{old} is now {now}; the old name ends in version {ends}"


class Renamed:
    """An attribute or method under its old name: `tag = Renamed("pins.tags.set", ends="0.3")`."""

    def __init__(self, now: str, *, ends: str) -> None:
        self._now, self._ends = now, ends

    def __set_name__(self, owner: type, name: str) -> None:
        own = owner.__name__
        self._text = renaming(f"{own}.{name}", f"{own}.{self._now}", self._ends)

    def __get__(self, instance: object, owner: type) -> Any:
        warnings.warn(self._text, DeprecationWarning, stacklevel=2)
        return attrgetter(self._now)(owner if instance is None else instance)

    def __set__(self, instance: object, value: object) -> None:
        warnings.warn(self._text, DeprecationWarning, stacklevel=2)
        setattr(instance, self._now, value)  # nothing that can be set has moved into another object


def renamed_arguments(names: Mapping[str, str], *, ends: str) -> Callable[[C], C]:
    """Let a function or a class take keyword arguments by their old names too."""

    def decorate(call: C) -> C:
        made: Any = call
        inner = made.__init__ if isinstance(call, type) else made

        @wraps(inner)
        def translate(*args: Any, **given: Any) -> Any:
            for old, now in ((old, names[old]) for old in names.keys() & given):
                before, after = f"{made.__qualname__}({old}=)", f"{made.__qualname__}({now}=)"
                if now in given:
                    raise TypeError(f"{before} and {after} are one argument, given twice")
                warnings.warn(renaming(before, after, ends), DeprecationWarning, stacklevel=2)
                given[now] = given.pop(old)
            return inner(*args, **given)

        if inner is call:
            return cast("C", translate)
        made.__init__ = translate
        return call

    return decorate
