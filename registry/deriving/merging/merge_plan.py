"""Plan a merge from manifests alone: which tensors are averaged, and which are kept.

Reads and writes nothing. States that cannot be merged are refused here; the message names the paths
and says what to do about them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from holdfast.registry import pytree
from holdfast.registry.errors import Hint, IncompatibleState, InvalidInput, NotFound
from holdfast.registry.history import compare_values, plain_values
from holdfast.registry.objects import Component, TensorEntry
from holdfast.registry.pytree import FlatComponent, FlatState, NamedLeaf
from holdfast.registry.spec.precision import optimizer_leaves
from holdfast.registry.values import FLOATING, Json, abridged, canonical, near

_MAX_VALUE_CHARS = 200


@dataclass(frozen=True, slots=True)
class MergeInput:
    """A stored state that goes into a merge."""

    ref: str  # its name
    kind: str  # `dict` or `odict`
    parts: Mapping[str, Component]  # its components, keys that its commit keeps included, in order


@dataclass(frozen=True, slots=True, eq=False)
class MergedTensor:
    """A tensor of the result."""

    leaf: NamedLeaf  # its path, dtype and shape
    entries: tuple[TensorEntry, ...]  # the tensor that is kept, or the tensors that are averaged
    sources: tuple[int, ...]  # the numbers of their inputs

    @property
    def is_average(self) -> bool:
        """Whether it has to be computed."""
        return len(self.entries) > 1


@dataclass(frozen=True, slots=True)
class MergePlan:
    """The state that a merge makes."""

    state: FlatState  # its skeletons, with arrays whose bytes are not in memory
    tensors: Mapping[str, tuple[MergedTensor, ...]]  # the tensors for these arrays, by component

    @property
    def averages(self) -> bool:
        """Whether anything has to be computed."""
        return any(one.is_average for part in self.tensors.values() for one in part)


def plan_merge(
    inputs: Sequence[MergeInput], count: int, average: Sequence[str] | None, pick: Mapping[str, int]
) -> MergePlan:
    """Decide for each tensor of the result whether it is averaged or kept."""
    return _Planner(inputs, count, average, pick).plan()


class _Planner:
    """Plans one merge."""

    def __init__(
        self,
        inputs: Sequence[MergeInput],
        count: int,
        average: Sequence[str] | None,
        pick: Mapping[str, int],
    ) -> None:
        self._inputs = inputs
        self._sources = inputs[:count]
        self._average = average
        self._pick = pick
        self._patterns: dict[str, int] = {}
        self._wrong: dict[str, list[str]] = {}

    def plan(self) -> MergePlan:
        self._check_names()
        names = dict.fromkeys(name for one in self._sources for name in one.parts)
        names.update(dict.fromkeys(name for name in self._pick if name not in self._patterns))
        parts, tensors = [], {}
        for name in names:
            made = self._joined(name)
            if made is not None:
                skeleton, tensors[name] = made
                leaves = tuple(one.leaf for one in tensors[name])
                parts.append(FlatComponent(name, skeleton, leaves))
        self._refuse()
        return MergePlan(FlatState(self._inputs[0].kind, tuple(parts)), tensors)

    def _check_names(self) -> None:
        """Check that every name is in the inputs; note which are patterns of paths."""
        known = {path for one in self._sources for path in _paths(one.parts)}
        components = {name for one in self._sources for name in one.parts}
        for name in self._average or ():
            if name not in components and not any(fnmatchcase(path, name) for path in known):
                raise _nothing(name, "the sources", [*components, *known])
        for name, number in self._pick.items():
            of = self._inputs[number]
            if name in of.parts:
                continue
            if not any(fnmatchcase(path, name) for path in known & _paths(of.parts)):
                raise _nothing(name, of.ref, [*of.parts, *_paths(of.parts)])
            self._patterns[name] = number
        self._check_order()

    def _check_order(self) -> None:
        """Refuse names that select no tensor, since the meta of the merge would record them."""
        owner = {
            path: self._owner(name, path)
            for one in self._sources
            for name in one.parts
            for path in _paths({name: one.parts[name]})
        }
        for pattern in self._patterns:
            if pattern not in owner.values():
                raise InvalidInput(
                    "earlier picks take every tensor of this one",
                    where=f"pick {pattern!r}",
                    found=_takers(path for path in owner.items() if fnmatchcase(path[0], pattern)),
                    hint="Components that are picked as a whole come first, then the first pattern "
                    "that matches: put the narrower pattern first, and write 'model/*' for the "
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
                    "every tensor that this would average is picked",
                    where=f"average {name!r}",
                    found=_takers(met),
                    hint=Hint(
                        "Leave it out of `average`, or of `pick`.",
                        "Leave it out of `--average`, or of `--pick`.",
                    ),
                )

    def _owner(self, name: str, path: str) -> str | None:
        """Return the pick that takes a tensor of a component, if any."""
        if name in self._pick and name not in self._patterns:
            return name
        return next((one for one in self._patterns if fnmatchcase(path, one)), None)

    def _joined(self, name: str) -> tuple[Json, tuple[MergedTensor, ...]] | None:
        """Return a component of the result; `None` if it cannot be made, which is noted."""
        if name in self._pick and name not in self._patterns:
            number = self._pick[name]
            part = self._inputs[number].parts[name]
            return part.skeleton, _kept(name, part, number)
        lacking = [one.ref for one in self._sources if name not in one.parts]
        if lacking:
            self._note("missing", f"{name} is not in {', '.join(lacking)}")
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
        tensors = [
            self._tensor(name, path, number, parts, number in wanted)
            for number, path in paths.items()
        ]
        return first.skeleton, tuple(one for one in tensors if one is not None)

    def _averaged(self, name: str, part: Component, paths: Mapping[int, str]) -> set[int]:
        """Return the numbers of the tensors that are averaged where they differ."""
        names = self._average
        if names is None:
            leaves = tuple(one.leaf for one in _kept(name, part, 0))
            made = FlatComponent(name, part.skeleton, leaves)
            return paths.keys() - optimizer_leaves(made)
        return {
            number
            for number, path in paths.items()
            if name in names or any(fnmatchcase(path, one) for one in names)
        }

    def _is_alike(self, name: str, one: Component, other: Component) -> bool:
        """Return whether two components differ only in their tensors; note other differences."""
        if canonical.encode(one.skeleton) == canonical.encode(other.skeleton):
            return True
        one_paths, other_paths = _paths({name: one}), _paths({name: other})
        for path in sorted(one_paths ^ other_paths):
            self._note("structure", f"{path} is in some of them only")
        values = compare_values(plain_values({name: one}), plain_values({name: other}))
        for value in values:
            if value.kind == "changed":
                clause = f"{value.path} is {value.before!r} and {value.after!r}"
                self._note("plain", clause[:_MAX_VALUE_CHARS])
            else:
                self._note("structure", f"{value.path} is in some of them only")
        if not values and one_paths == other_paths:
            self._note("structure", f"{name} has containers of other types, or in another order")
        return False

    def _tensor(
        self, name: str, path: str, number: int, parts: Sequence[Component], is_averaged: bool
    ) -> MergedTensor | None:
        entries = tuple(part.tensors[number] for part in parts)
        for pattern, of in self._patterns.items():
            if fnmatchcase(path, pattern):
                return self._picked_tensor(name, path, number, parts[0], of)
        if len({entry.original for entry in entries}) > 1:
            # The result has an original type only if all sources agree, in whatever order they are.
            entries = tuple(entry._replace(original=None) for entry in entries)
        first = entries[0]
        if all(entry == first for entry in entries):
            return _merged_tensor(path, (first,), (0,))
        shapes = dict.fromkeys((entry.dtype, entry.shape) for entry in entries)
        if len(shapes) > 1:
            found = " and ".join(f"{dtype}{list(shape)}" for dtype, shape in shapes)
            self._note("structure", f"{path} is {found}")
        elif not is_averaged:
            self._note("optimizer" if self._average is None else "unnamed", path)
        elif not _can_average(first.dtype):
            self._note("whole", f"{path} ({first.dtype})")
        else:
            return _merged_tensor(path, entries, tuple(range(len(entries))))
        return None

    def _picked_tensor(
        self, name: str, path: str, number: int, first: Component, of: int
    ) -> MergedTensor | None:
        """Return a tensor that is picked by its path."""
        part = self._inputs[of].parts.get(name)
        if part is None or _arrays(name, part) != _arrays(name, first):
            where = self._inputs[of].ref
            self._note(
                "structure", f"{path} is picked, but {name} has another structure in {where}"
            )
            return None
        return _merged_tensor(path, (part.tensors[number],), (of,))

    def _note(self, problem: str, clause: str) -> None:
        self._wrong.setdefault(problem, []).append(clause)

    def _refuse(self) -> None:
        for problem, (message, hint) in _REFUSALS.items():
            clauses = list(dict.fromkeys(self._wrong.get(problem, ())))
            if clauses:
                raise IncompatibleState(
                    message,
                    where=", ".join(one.ref for one in self._sources),
                    found=abridged(clauses),
                    hint=hint,
                )


#: Problem -> message and hint.
_REFUSALS = {
    "missing": (
        "a component is not in every source",
        "Pick it from a source that has it, or drop the source that lacks it.",
    ),
    "structure": (
        "the sources differ in their structure",
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
        "optimizer state differs between the sources, and is only averaged if `average` names it",
        "Pick its component from one of the sources, or name it in `average` with all others that "
        "are to be averaged.",
    ),
    "unnamed": (
        "tensors differ between the sources and are neither averaged nor picked",
        "Name their components in `average`, or pick them from one of the sources.",
    ),
}


def _can_average(dtype: str) -> bool:
    # float8_e8m0fnu has only powers of two, whose average is rarely one.
    return dtype.startswith("complex") or (dtype in FLOATING and dtype != "float8_e8m0fnu")


def _kept(name: str, part: Component, number: int) -> tuple[MergedTensor, ...]:
    paths = pytree.leaf_paths(name, part.skeleton)
    return tuple(
        _merged_tensor(paths[at], (entry,), (number,)) for at, entry in enumerate(part.tensors)
    )


def _merged_tensor(
    path: str, entries: tuple[TensorEntry, ...], sources: tuple[int, ...]
) -> MergedTensor:
    first = entries[0]
    return MergedTensor(NamedLeaf(first.dtype, first.shape, first.nbytes, path), entries, sources)


def _paths(parts: Mapping[str, Component]) -> set[str]:
    return {
        path
        for name, part in parts.items()
        for path in pytree.leaf_paths(name, part.skeleton).values()
    }


def _arrays(name: str, part: Component) -> tuple[object, object]:
    return pytree.leaf_paths(name, part.skeleton), pytree.leaf_kinds(part.skeleton)


def _takers(met: Iterable[tuple[str, str | None]]) -> str:
    return abridged([f"{path} is picked by {by!r}" for path, by in met])


def _nothing(name: str, where: str, known: Iterable[str]) -> NotFound:
    return NotFound(
        "no such component, and no tensor with such a path",
        where=f"{where}: {name}",
        hint=near(name, known) or "`holdfast show --tensors` lists the paths.",
    )
