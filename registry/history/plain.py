"""Compare plain values by path: of a configuration, or of the components of a state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from holdfast.backends.escape import quoted
from holdfast.registry.errors import RegistryError
from holdfast.registry.history.log_values import decode_plain
from holdfast.registry.objects import Component
from holdfast.registry.pytree import Trail, component_path, leaf_kinds, segment
from holdfast.registry.values import Json, canonical, counted

ValueKind = Literal["changed", "added", "removed"]
_LONGEST = 200
#: A longer list of numbers is one value.
_SHORT = 16
SIGNS: dict[ValueKind, str] = {"changed": "~", "added": "+", "removed": "-"}


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """A plain value that differs between the two."""

    kind: ValueKind  # `changed`, `added` or `removed`
    path: str
    before: Any  # its value in the first
    after: Any  # its value in the second

    @property
    def name(self) -> str:
        """Its path for people: the beginning of a very long one."""
        return self.path if len(self.path) <= _LONGEST else f"{self.path[:_LONGEST]}..."

    def __str__(self) -> str:
        detail = quoted(self.after if self.kind == "added" else self.before)
        if isinstance(self.before, list) and isinstance(self.after, list):
            pairs = zip_longest(self.before, self.after)
            differ = [at for at, (old, new) in enumerate(pairs) if repr(old) != repr(new)]
            of = f"{counted(len(differ), 'number')} of {len(self.after)}"
            detail = f"{of} differ, from {min(differ, default=0)} on"
        elif self.kind == "changed":
            detail = f"{quoted(self.before)} -> {quoted(self.after)}"
        return f"{SIGNS[self.kind]} {self.name}: {detail}"


def compare_configs(before: Json, after: Json) -> tuple[ValueDiff, ...]:
    """Return the values of two encoded configurations that differ, by path from their top.

    They come in the order of the first configuration, added ones last. The order of keys is no
    difference.
    """
    old = _config_values(before)
    found = compare_values(old, _config_values(after))
    places = {path: place for place, path in enumerate(old)}
    return tuple(sorted(found, key=lambda one: places.get(one.path, len(places))))


def compare_values(before: Mapping[str, Json], after: Mapping[str, Json]) -> tuple[ValueDiff, ...]:
    """Return the encoded plain values that differ, decoded."""
    return tuple(_differing(before, after))


def plain_values(parts: Mapping[str, Component]) -> dict[str, Json]:
    """Return the plain values of components by path, encoded as in the manifest."""
    found: dict[str, Json] = {}
    for name, part in parts.items():
        _collect(Trail(component_path(name)), part.skeleton, found)
    return found


def config_by_path(encoded: Json) -> dict[str, Any]:
    """Return the values of an encoded configuration by path, in its order."""
    return {path: _decode(value) for path, value in _config_values(encoded).items()}


def _config_values(encoded: Json) -> dict[str, Json]:
    """Return the values of a configuration; one that is no mapping is the value `config`."""
    found: dict[str, Json] = {}
    _collect(Trail("config"), encoded, found)
    return {path.removeprefix("config/"): value for path, value in found.items()}


def _differing(before: Mapping[str, Json], after: Mapping[str, Json]) -> Iterator[ValueDiff]:
    for path, new in after.items():
        if path not in before:
            yield ValueDiff("added", path, None, _decode(new))
        elif canonical.encode(before[path]) != canonical.encode(new):
            yield ValueDiff("changed", path, _decode(before[path]), _decode(new))
    for path, old in before.items():
        if path not in after:
            yield ValueDiff("removed", path, _decode(old), None)


def _collect(path: Trail, node: Any, found: dict[str, Json]) -> None:
    match node:
        case {"t": _} | {"n": _} | {"nt": _} | {"B": _} | {"BA": _} | {"S": _}:
            return  # an array: compared as a tensor
        case {"d": [_, *_] as pairs} | {"od": [_, *_] as pairs}:
            for key, child in pairs:
                _collect(path / segment(key), child, found)
        case {"sd": [[*pairs], metadata]}:
            _collect(path, {"od": pairs}, found)
            _collect(path / "_metadata", metadata, found)
        case {"tu": [_, *_] as items}:
            _collect(path, items, found)
        case [_, *_] if len(node) > _SHORT and all(map(_is_number, node)):
            found[str(path)] = node  # as one value: the state of a generator has 625 numbers
        case [_, *_]:
            for index, child in enumerate(node):
                _collect(path / index, child, found)
        case _:
            found[str(path)] = node


def _is_number(node: Any) -> bool:
    return type(node) is int or (isinstance(node, dict) and node.keys() == {"f"})


def _decode(node: Json) -> Any:
    try:
        if not leaf_kinds(node):
            return decode_plain(node)
    except RegistryError:
        pass  # a container whose arrays belong to a larger skeleton
    return "(a container with tensors in it)"
