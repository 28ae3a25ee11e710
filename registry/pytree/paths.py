"""Paths of values in a state: linked pairs that are spelled only on demand.

There are two spellings. `join` gives the name of a tensor (`optimizer/state/0/exp_avg`), the same
for a live state and for its stored skeleton. `shown` gives Python
(`state['optimizer']['state'][0]`) for messages. Different values have different names: a key is
written as it is, or as JSON if it could be mistaken for another key.
"""

from __future__ import annotations

import reprlib
from typing import Any

from holdfast.registry.errors import InvalidInput
from holdfast.registry.values import CHARACTER_BYTES, PATH_BYTES, Budget, Json, canonical

#: (link of the container or None, key in it); typed loosely, for mypy has no recursive tuples.
Link = tuple[Any, Any]

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80
_WORDS = frozenset({"null", "true", "false"})


class OddKey:
    """A step of a path that is neither a plain string nor a small integer."""

    __slots__ = ("shown", "text")

    def __init__(self, text: str, shown: str) -> None:
        self.text = text
        self.shown = shown


class Trail:
    """A path that is spelled only if somebody asks for it, and counted before.

    A file can have a key of a megabyte above a million values: spelling the path of each would
    take hours.
    """

    __slots__ = ("_above", "_step", "_text", "budget")

    def __init__(
        self, step: object, above: Trail | None = None, budget: Budget | None = None
    ) -> None:
        self._step = step
        self._above = above
        self.budget = budget or Budget(str(step)[:200], "spelling the paths in it")
        self._text: str | None = None

    def __truediv__(self, step: object) -> Trail:
        return Trail(step, self, self.budget)

    def item(self, step: object) -> str:
        """Spell the path of an item."""
        above, last = self._text or str(self), str(step)
        self.budget.take(PATH_BYTES + CHARACTER_BYTES * (len(above) + len(last)))
        return f"{above}/{last}" if above else last

    def __str__(self) -> str:
        if self._text is None:
            self._text = str(self._step) if self._above is None else self._above.item(self._step)
        return self._text


def segment(node: Json) -> str:
    """Spell one encoded key as a step of a tensor's name."""
    if type(node) is str:
        if node[:1].isalpha() and "/" not in node and node not in _WORDS:
            return node  # nearly all keys; a letter begins no number
        if node and node[0] not in '"{' and "/" not in node and not _looks_like_json(node):
            return node
    elif type(node) is int:
        return str(node)
    return canonical.encode(node).decode()


def component_path(name: str) -> str:
    """Spell the name of a component as the first step; JSON only for a slash or a first quote."""
    if name and "/" not in name and name[0] != '"':
        return name
    return canonical.encode(name).decode()


def join(link: Link) -> str:
    """Spell a path as the name of a tensor."""
    steps: list[str] = []
    parent, key = link
    while parent is not None:
        steps.append(key.text if type(key) is OddKey else segment(key))
        parent, key = parent
    steps.append(component_path(key))
    return "/".join(reversed(steps))


def shown(link: Link | None) -> str:
    """Spell a path as Python, for a message."""
    steps: list[str] = []
    while link is not None:
        link, key = link
        steps.append(key.shown if type(key) is OddKey else f"[{clip(key)}]")
    return "state" + "".join(reversed(steps))


def where(link: Link) -> str:
    """Spell a path in a stored skeleton, for a message; never fails."""
    try:
        return join(link)
    except InvalidInput:
        return shown(link)


def clip(value: object) -> str:
    """Return a short `repr`, whatever the value."""
    try:
        return _REPR.repr(value)
    except Exception:  # from a foreign class, or for an integer too long to print
        return f"a {type(value).__name__}"


def _looks_like_json(text: str) -> bool:
    return text in _WORDS or text.removeprefix("-").isdecimal()
