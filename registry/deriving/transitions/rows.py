"""The rows of a table of changes: find their parts in a source, then carry them out.

Finding changes nothing and notes every problem; carrying out then makes the state that the new
phase begins with. Nothing here knows of runs or commits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from holdfast.registry import pytree
from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.pytree import traversal
from holdfast.registry.spec import Change, Row, first_of
from holdfast.registry.values import near

#: Makes a part that is reset; of a pattern, a mapping of the paths below the key to new values.
Initialise = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True, slots=True)
class Applied:
    """A row that was carried out."""

    part: str  # its key or pattern: the alternative that exists
    change: Change  # the row's change of this part
    to: str | None  # the key or companion that the part became; `None` where it became none
    #: The leaves that a pattern matched; those of a reset the caller has to make.
    paths: tuple[str, ...]
    why: str  # the source of the rule


@dataclass(frozen=True, slots=True)
class NewPhase:
    """The state and the companions that a phase begins with."""

    #: Carried parts, frozen copies, and new parts.
    state: dict[str, Any] = field(default_factory=dict)
    #: Frozen states that every checkpoint of the phase has.
    companions: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Found:
    """A row, and its part in the source."""

    row: Row
    part: str  # the alternative that exists
    paths: tuple[str, ...] = ()  # the paths that a pattern matches

    @property
    def key(self) -> str:
        return self.part.split("/")[0]

    def applied(self) -> Applied:
        row = self.row
        return Applied(self.part, row.change, row.to or row.companion, self.paths, row.why)


class Table:
    """The rows that apply, found in a source."""

    def __init__(
        self,
        rows: Iterable[Row],
        enabled: Collection[str],
        source: Mapping[str, Any],
        rest: Literal["carry", "reset"] | None = None,
    ) -> None:
        self._source = source
        self._rows = [
            row
            for row in rows
            if (row.when is None or row.when in enabled) and row.unless not in enabled
        ]
        #: Problems, as clauses; only a table without any can be carried out.
        self.problems: list[str] = []
        leaves = {
            name: [path for path, _ in traversal.walk(name, value)]
            for name, value in source.items()
        }
        self._taken = list(self._find(("carry", "freeze"), leaves))
        unnamed = [] if rest is None else self._unnamed()
        self._carried = unnamed if rest == "carry" else []
        made = self._made(leaves)
        self._cut = list(self._find(("reset", "discard"), made, patterns=True))
        self._left = [
            _Found(row, first_of(row.part, source) or row.alternatives[0])
            for row in self._rows
            if row.change in ("reset", "discard", "reseed") and not row.is_pattern
        ]
        self._check_complete(made, unnamed)
        found = [*self._taken, *self._cut, *self._left]
        found.sort(key=lambda one: self._rows.index(one.row))
        rests = [Applied(name, rest, None, (), "") for name in unnamed if rest is not None]
        self.applied = (*(one.applied() for one in found), *rests)  # every row that applies

    @property
    def reseeded(self) -> dict[str, int | None]:
        """The index of each new seed among the children of the phase's sequence.

        `None` stands for the sequence itself.
        """
        seeds: dict[str, int | None] = {}
        for found in self._left:
            if found.row.change == "reseed" and found.row.seeds:
                seeds.update(found.row.seeds)
            elif found.row.change == "reseed":
                seeds[found.part] = None
        return seeds

    def check(self, what: str, ref: str, hint: str = "Nothing was changed.") -> None:
        """Refuse a source that the table does not fit."""
        if self.problems:
            message, found = f"{what} does not fit this checkpoint", "; ".join(self.problems)
            raise IncompatibleState(message, where=ref, found=found, hint=hint)

    def carry_out(self, initialise: Initialise) -> NewPhase:
        """Make the state that the new phase begins with."""
        makers = self._makers(initialise)
        made = NewPhase({name: self._source[name] for name in self._carried})
        for found in self._taken:
            part = self._take(found)
            if found.row.companion is None:
                made.state[found.row.to or found.key] = part
            else:
                made.companions.setdefault(found.row.companion, {})[found.key] = part
        for found in self._cut:
            rest = _cut(found, made.state[found.key], makers.get(found.row.part))
            if rest is traversal.DROP:
                del made.state[found.key]
            else:
                made.state[found.key] = rest
        for found in self._left:
            if found.row.part in makers:
                made.state[found.part] = makers[found.row.part]()
        if self._carried:  # in the order of the source, on which ids depend
            ordered = {name: made.state[name] for name in self._source if name in made.state}
            return NewPhase({**ordered, **made.state}, made.companions)
        return made

    def _find(
        self, changes: Collection[Change], leaves: Mapping[str, list[str]], patterns: bool = False
    ) -> Iterator[_Found]:
        """Yield the rows with these changes, each with the alternative that exists."""
        for row in self._rows:
            if row.change not in changes or (patterns and not row.is_pattern):
                continue
            for part in row.alternatives:
                key = part.split("/")[0]
                paths = [path for path in leaves.get(key, ()) if fnmatchcase(path, part)]
                if paths or (key in leaves and not row.is_pattern):
                    yield _Found(row, part, tuple(paths) if row.is_pattern else ())
                    break
            else:
                self.problems.append(f"there is nothing to {row.change}: {row.part}")

    def _made(self, leaves: Mapping[str, list[str]]) -> dict[str, list[str]]:
        """Return the leaves of the new state, before patterns take some out."""
        made = {name: leaves[name] for name in self._carried}
        in_companions = set()
        for found in self._taken:
            if found.row.companion is not None:
                part = (found.row.companion, found.key)
                if part in in_companions:
                    self.problems.append(f"two rows make {found.key} of companion {part[0]}")
                in_companions.add(part)
                continue
            to = found.row.to or found.key
            if to in made:
                self.problems.append(f"two rows make {to}")
            paths = found.paths or leaves[found.key]
            made[to] = [to + path[len(found.key) :] for path in paths]
        return made

    def _unnamed(self) -> list[str]:
        """Return the keys of the source that no row names as a whole."""
        whole = [row for row in self._rows if not row.is_pattern]
        named = {first_of(row.part, self._source) for row in whole}
        return [name for name in self._source if name not in named]

    def _check_complete(self, made: Collection[str], unnamed: Collection[str]) -> None:
        """Note keys with contradicting rows, and keys without a row."""
        for one in self._left:
            if one.part in made:
                self.problems.append(f"two rows about {one.part}: one makes it, one does not")
        named = {one.key for one in [*self._taken, *self._left] if not one.row.is_pattern}
        for name in self._source:
            if name not in named and name not in unnamed:
                self.problems.append(f"no row of the table covers {name}")

    def _makers(self, initialise: Initialise) -> dict[str, Callable[[], Any]]:
        resets = [one for one in [*self._cut, *self._left] if one.row.change == "reset"]
        names = {name: one for one in resets for name in (one.row.part, *one.row.alternatives)}
        for name in initialise:
            if name not in names:
                raise InvalidInput(
                    "only parts that the transition resets can be initialised",
                    where=f"initialise[{name!r}]",
                    expected=", ".join(one.row.part for one in resets) or "nothing",
                    hint=near(name, names),
                )
        return {names[name].row.part: maker for name, maker in initialise.items()}

    def _take(self, found: _Found) -> Any:
        """Return a part of the source, or a frozen copy of it."""
        value, wanted = self._source[found.key], frozenset(found.paths)
        row = found.row

        def visit(path: str, leaf: Any) -> Any:
            if row.is_pattern and path not in wanted:
                return traversal.DROP
            return traversal.frozen(leaf, row.dtype) if row.change == "freeze" else leaf

        return traversal.rebuild(found.key, value, visit)


def _cut(found: _Found, value: Any, maker: Callable[[], Any] | None) -> Any:
    """Return a part of the new state; replace the leaves of a pattern, or take them out."""
    made: Mapping[str, Any] = {} if maker is None else maker()
    wanted = frozenset(found.paths)
    below = {path.removeprefix(f"{found.key}/"): path for path in found.paths}
    if maker is not None and set(made) != set(below):
        raise IncompatibleState(
            "`initialise` made other paths than the reset took out",
            where=f"initialise[{found.row.part!r}]",
            expected=", ".join(below),
            found=", ".join(map(str, made)),
        )
    new = {below[name]: fresh for name, fresh in made.items()}

    def visit(path: str, leaf: Any) -> Any:
        if path not in wanted:
            return leaf
        if path not in new:
            return traversal.DROP
        _check_like(path, leaf, new[path])
        return new[path]

    return traversal.rebuild(found.key, value, visit)


def _check_like(path: str, old: Any, new: Any) -> None:
    """Refuse another dtype. The shape may differ: a new layer may take more inputs."""
    if not traversal.is_array(old):
        return
    wanted = pytree.describe(old)[0]
    found = pytree.describe(new)[0] if traversal.is_array(new) else type(new).__name__
    if found != wanted:
        raise IncompatibleState(
            "`initialise` made a part with another dtype", where=path, expected=wanted, found=found
        )
