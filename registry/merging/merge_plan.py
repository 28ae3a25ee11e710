"""What a merged state is made of, told from manifests alone: which tensor is averaged, which kept.

Pure. What may not be merged is refused here, before anything is read or written: the message names
the paths and what to do about them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from holdfast.registry import pytree
from holdfast.registry.comparing.diff import compare_values, plain_values
from holdfast.registry.errors import IncompatibleState, InvalidInput, NotFound
from holdfast.registry.precision.optimizers import optimizer_leaves
from holdfast.registry.pytree import FlatComponent, FlatState
from holdfast.registry.pytree.leaves import NamedLeaf
from holdfast.registry.storage.manifest import Component, TensorEntry
from holdfast.registry.values import canonical
from holdfast.registry.values.canonical import Json
from holdfast.registry.values.dtypes import FLOATING
from holdfast.registry.values.suggest import near

_NAMED_AT_MOST = 8
_SAID_AT_MOST = 200


@dataclass(frozen=True, slots=True)
class Material:
    """A stored state that goes into a merge.

    Attributes:
        ref: Its name.
        kind: `dict` or `odict`.
        parts: Its components, keys that its commit keeps included, in order.
    """

    ref: str
    kind: str
    parts: Mapping[str, Component]


@dataclass(frozen=True, slots=True, eq=False)
class Blend:
    """A tensor of the result.

    Attributes:
        leaf: Its path, dtype and shape.
        entries: The tensor that it is, or those that it is the average of.
        sources: Numbers of the materials that they are of.
    """

    leaf: NamedLeaf
    entries: tuple[TensorEntry, ...]
    sources: tuple[int, ...]

    @property
    def is_average(self) -> bool:
        """Whether it has to be computed."""
        return len(self.entries) > 1


@dataclass(frozen=True, slots=True)
class MergePlan:
    """A state that is to be made.

    Attributes:
        state: Its skeletons, with arrays whose bytes are not in memory.
        blends: What these are made of, by component.
    """

    state: FlatState
    blends: Mapping[str, tuple[Blend, ...]]

    @property
    def averages(self) -> bool:
        """Whether anything has to be computed."""
        return any(one.is_average for part in self.blends.values() for one in part)


def plan_merge(
    materials: Sequence[Material],
    count: int,
    average: Sequence[str] | None,
    pick: Mapping[str, int],
) -> MergePlan:
    """Decide what each tensor of the result is.

    Args:
        materials: The sources, then whatever else something is picked from.
        count: Number of the sources.
        average: Names of components, and patterns of tensors' paths; without it all that has an
            average and is no optimizer state.
        pick: Names and patterns, each with the number of the material that it is taken from.

    Raises:
        NotFound: A name is that of nothing.
        InvalidInput: A pattern decides about no tensor, since others come before it.
        IncompatibleState: Something is not the same in all sources, and neither averaged nor
            picked, or cannot be averaged.
    """
    return _Planning(materials, count, average, pick).plan()


class _Planning:
    """One merge being planned."""

    def __init__(
        self,
        materials: Sequence[Material],
        count: int,
        average: Sequence[str] | None,
        pick: Mapping[str, int],
    ) -> None:
        self._materials = materials
        self._sources = materials[:count]
        self._average = average
        self._pick = pick
        self._patterns: dict[str, int] = {}
        self._wrong: dict[str, list[str]] = {}

    def plan(self) -> MergePlan:
        self._check_names()
        names = dict.fromkeys(name for one in self._sources for name in one.parts)
        names.update(dict.fromkeys(name for name in self._pick if name not in self._patterns))
        parts, blends = [], {}
        for name in names:
            is_picked = name in self._pick and name not in self._patterns
            made = self._picked(name) if is_picked else self._joined(name)
            if made is not None:
                skeleton, blends[name] = made
                leaves = tuple(one.leaf for one in blends[name])
                parts.append(FlatComponent(name, skeleton, leaves, _is_bare(skeleton)))
        self._refuse()
        return MergePlan(FlatState(self._materials[0].kind, tuple(parts)), blends)

    def _check_names(self) -> None:
        """Hold the names against the materials; note which are patterns of paths."""
        known = {path for one in self._sources for path in _paths(one.parts)}
        components = {name for one in self._sources for name in one.parts}
        for name in self._average or ():
            if name not in components and not any(fnmatchcase(path, name) for path in known):
                raise _nothing(name, "the sources", [*components, *known])
        for name, number in self._pick.items():
            of = self._materials[number]
            if name in of.parts:
                continue
            if not any(fnmatchcase(path, name) for path in known & _paths(of.parts)):
                raise _nothing(name, of.ref, [*of.parts, *_paths(of.parts)])
            self._patterns[name] = number
        self._check_order()

    def _check_order(self) -> None:
        """Refuse what decides about no tensor: the meta of the merge would say that it did."""
        owner = {
            path: self._owner(name, path)
            for one in self._sources
            for name in one.parts
            for path in _paths({name: one.parts[name]})
        }
        for pattern in self._patterns:
            if pattern not in owner.values():
                raise InvalidInput(
                    "what is picked before this takes every tensor of it",
                    where=f"pick {pattern!r}",
                    found=_takers(path for path in owner.items() if fnmatchcase(path[0], pattern)),
                    hint="The first pattern that matches decides, after components that are "
                    "picked as a whole: put the narrower one first, and write 'model/*' for the "
                    "rest of a component.",
                )
        for name in self._average or ():
            met = [
                (path, by)
                for path, by in owner.items()
                if path == name or path.startswith(f"{name}/") or fnmatchcase(path, name)
            ]
            if met and all(by is not None for _, by in met):
                raise InvalidInput(
                    "every tensor of what is to be averaged is picked",
                    where=f"average {name!r}",
                    found=_takers(met),
                    hint="Leave it out of `average`, or of `pick`.",
                )

    def _owner(self, name: str, path: str) -> str | None:
        """Return the pick that a tensor of a component falls to, if any."""
        if name in self._pick and name not in self._patterns:
            return name
        return next((one for one in self._patterns if fnmatchcase(path, one)), None)

    def _picked(self, name: str) -> tuple[Json, tuple[Blend, ...]]:
        number = self._pick[name]
        part = self._materials[number].parts[name]
        return part.skeleton, _kept(name, part, number)

    def _joined(self, name: str) -> tuple[Json, tuple[Blend, ...]] | None:
        lacking = [one.ref for one in self._sources if name not in one.parts]
        if lacking:
            self._say("missing", f"{name} is not in {', '.join(lacking)}")
            return None
        parts = [one.parts[name] for one in self._sources]
        first = parts[0]
        if not self._patterns and all(part.digest == first.digest for part in parts):
            return first.skeleton, _kept(name, first, 0)
        alike = [self._is_alike(name, first, part) for part in parts[1:]]
        if not all(alike):
            return None
        paths = pytree.leaf_paths(name, first.skeleton)
        wanted = self._averaged(name, first, paths)
        blends = [
            self._blend(name, path, number, parts, number in wanted)
            for number, path in paths.items()
        ]
        return first.skeleton, tuple(one for one in blends if one is not None)

    def _averaged(self, name: str, part: Component, paths: Mapping[int, str]) -> set[int]:
        """Return the numbers of the tensors that are averaged where they differ."""
        names = self._average
        if names is None:
            leaves = tuple(one.leaf for one in _kept(name, part, 0))
            made = FlatComponent(name, part.skeleton, leaves, _is_bare(part.skeleton))
            return paths.keys() - optimizer_leaves(made)
        return {
            number
            for number, path in paths.items()
            if name in names or any(fnmatchcase(path, one) for one in names)
        }

    def _is_alike(self, name: str, one: Component, other: Component) -> bool:
        """Tell whether two components differ in their tensors alone."""
        if canonical.encode(one.skeleton) == canonical.encode(other.skeleton):
            return True
        had, has = _paths({name: one}), _paths({name: other})
        for path in sorted(had ^ has):
            self._say("structure", f"{path} is in some of them only")
        values = compare_values(plain_values({name: one}), plain_values({name: other}))
        for value in values:
            if value.kind == "changed":
                said = f"{value.path} is {value.before!r} and {value.after!r}"
                self._say("plain", said[:_SAID_AT_MOST])
            else:
                self._say("structure", f"{value.path} is in some of them only")
        if not values and had == has:
            self._say("structure", f"{name} has containers of other types, or in another order")
        return False

    def _blend(
        self, name: str, path: str, number: int, parts: Sequence[Component], is_averaged: bool
    ) -> Blend | None:
        entries = tuple(part.tensors[number] for part in parts)
        for pattern, of in self._patterns.items():
            if fnmatchcase(path, pattern):
                return self._taken(name, path, number, parts[0], of)
        if len({entry.original for entry in entries}) > 1:
            # Said of the result only where it is true of every source, in whatever order they come.
            entries = tuple(replace(entry, original=None) for entry in entries)
        first = entries[0]
        if all(entry == first for entry in entries):
            return _blend(path, (first,), (0,))
        shapes = dict.fromkeys((entry.dtype, entry.shape) for entry in entries)
        if len(shapes) > 1:
            said = " and ".join(f"{dtype}{list(shape)}" for dtype, shape in shapes)
            self._say("structure", f"{path} is {said}")
        elif not is_averaged:
            self._say("optimizer" if self._average is None else "unnamed", path)
        elif not _can_average(first.dtype):
            self._say("whole", f"{path} ({first.dtype})")
        else:
            return _blend(path, entries, tuple(range(len(entries))))
        return None

    def _taken(self, name: str, path: str, number: int, first: Component, of: int) -> Blend | None:
        """Return a tensor that is picked by its path."""
        part = self._materials[of].parts.get(name)
        if part is None or _arrays(name, part) != _arrays(name, first):
            where = self._materials[of].ref
            self._say("structure", f"{path} is picked, and {name} is built otherwise in {where}")
            return None
        return _blend(path, (part.tensors[number],), (of,))

    def _say(self, what: str, said: str) -> None:
        self._wrong.setdefault(what, []).append(said)

    def _refuse(self) -> None:
        for what, (message, hint) in _REFUSALS.items():
            said = list(dict.fromkeys(self._wrong.get(what, ())))
            if said:
                more = len(said) - _NAMED_AT_MOST
                raise IncompatibleState(
                    message,
                    where=", ".join(one.ref for one in self._sources),
                    found="; ".join(said[:_NAMED_AT_MOST]) + (f"; and {more} more" * (more > 0)),
                    hint=hint,
                )


#: What can be wrong -> what is said of it, and what to do.
_REFUSALS = {
    "missing": (
        "a component is not in every source",
        "Pick it from a source that has it, or leave out the source that lacks it.",
    ),
    "structure": (
        "the sources are not built alike",
        "Only states of one structure can be merged; pick whole components that differ in it.",
    ),
    "plain": (
        "plain values differ between the sources",
        "They are never averaged: pick their component from one of the sources.",
    ),
    "whole": (
        "these tensors differ, and their type has no average",
        "Pick them, by path or with their whole component, from one of the sources.",
    ),
    "optimizer": (
        "optimizer state differs between the sources, and is not averaged unasked",
        "Pick its component from one of the sources, or name it and all others that are to be "
        "averaged in `average`.",
    ),
    "unnamed": (
        "tensors differ between the sources and are neither averaged nor picked",
        "Name their components in `average`, or pick them from one of the sources.",
    ),
}


def _can_average(dtype: str) -> bool:
    # That of powers of two, all that float8_e8m0fnu has, is mostly none.
    return dtype.startswith("complex") or (dtype in FLOATING and dtype != "float8_e8m0fnu")


def _kept(name: str, part: Component, number: int) -> tuple[Blend, ...]:
    paths = pytree.leaf_paths(name, part.skeleton)
    return tuple(_blend(paths[at], (entry,), (number,)) for at, entry in enumerate(part.tensors))


def _blend(path: str, entries: tuple[TensorEntry, ...], sources: tuple[int, ...]) -> Blend:
    first = entries[0]
    return Blend(NamedLeaf(first.dtype, first.shape, first.nbytes, path), entries, sources)


def _is_bare(skeleton: Json) -> bool:
    return isinstance(skeleton, dict) and not {"t", "n", "nt"}.isdisjoint(skeleton)


def _paths(parts: Mapping[str, Component]) -> set[str]:
    return {
        path
        for name, part in parts.items()
        for path in pytree.leaf_paths(name, part.skeleton).values()
    }


def _arrays(name: str, part: Component) -> tuple[object, object]:
    return pytree.leaf_paths(name, part.skeleton), pytree.leaf_kinds(part.skeleton)


def _takers(met: Iterable[tuple[str, str | None]]) -> str:
    return "; ".join(f"{path} is that of {by!r}" for path, by in [*met][:_NAMED_AT_MOST])


def _nothing(name: str, where: str, known: Iterable[str]) -> NotFound:
    return NotFound(
        "no such component, and no tensor of such a path",
        where=f"{where}: {name}",
        hint=near(name, known) or "`holdfast show --tensors` lists the paths.",
    )
