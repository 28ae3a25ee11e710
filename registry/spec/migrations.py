"""Migrations: the caller's functions that convert a state from one schema version to another.

A version is a whole number or dotted text, MAJOR.MINOR or MAJOR.MINOR.PATCH; without a patch it is
patch 0. All whole numbers belong to one major version. Only steps that this process registered can
run: a checkpoint names its version, never code.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

from holdfast.backends.escape import shown
from holdfast.registry.errors import IncompatibleState, InvalidInput, RegistryError
from holdfast.registry.pytree import clip

Version = int | str
Migrate = Callable[[dict[str, Any]], dict[str, Any]]

#: Major, minor and patch; whole numbers have the major version -1, which no text can have.
_Parsed = tuple[int, int, int]
_WHOLE = -1
_DOTTED = re.compile(r"(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})(?:\.(0|[1-9][0-9]{0,8}))?")
_EXPECTED = "a whole number from 0, or 'MAJOR.MINOR' or 'MAJOR.MINOR.PATCH'"


class LossyMigration(UserWarning):
    """A migration step lost information of a state; the message names both versions."""


class CannotMigrate(IncompatibleState):
    """The steps of this process do not lead from the version of a state to the wanted one."""


@dataclass(frozen=True, slots=True)
class _Step:
    source: Version
    target: Version
    migrate: Migrate
    lossy: bool

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


class Migrations:
    """A table of steps between versions, and the search for a path through it."""

    def __init__(self) -> None:
        self._steps: dict[tuple[_Parsed, _Parsed], _Step] = {}

    def register(
        self, source: Version, target: Version, migrate: Migrate, *, lossy: bool = False
    ) -> None:
        """Add a step; a function of the same name, as from a reloaded module, replaces it."""
        ends = (_parse(source), _parse(target))
        step = _Step(source, target, migrate, lossy)
        if not callable(migrate):
            raise InvalidInput("a migration needs a function", where=step, found=clip(migrate))
        if ends[0] == ends[1]:
            raise InvalidInput("a migration must lead to another version", where=step)
        if ends[0][0] != ends[1][0]:
            raise InvalidInput(
                "a migration must stay within a major version",
                where=step,
                hint="A new major version is a new kind of state: convert it by hand.",
            )
        taken = self._steps.get(ends)
        if taken is not None and _full_name(taken.migrate) != _full_name(migrate):
            raise InvalidInput("migration is taken", where=step, found=_full_name(taken.migrate))
        self._steps[ends] = step

    def apply(self, state: dict[str, Any], key: str, target: Version) -> dict[str, Any]:
        """Return a state converted to another version, by the fewest registered steps.

        All steps go in one direction, up or down. Of several shortest paths it takes the one with
        the fewest lossy steps, then the one through the lowest versions. It warns with
        `LossyMigration` before a lossy step.
        """
        found = _version_in(state, key)
        path = self._steps_between(found, target, shown(state[key]), f"state[{key!r}]")
        state = copy(state)
        for step in path:
            if step.lossy:
                text = f"the migration of a state from {step} loses information"
                warnings.warn(text, LossyMigration, stacklevel=2)
            state = _take(step, state, key)
        return state

    def check(self, version: object, target: Version, *, where: str) -> None:
        """Refuse a version from which the registered steps do not lead to another one."""
        try:
            found = _parse(version)
        except InvalidInput as error:
            raise CannotMigrate(
                error.what, where=where, expected=error.expected, found=error.found
            ) from error
        self._steps_between(found, target, shown(version), where)

    def _steps_between(self, found: _Parsed, target: Version, text: str, where: str) -> list[_Step]:
        wanted = _parse(target)
        if found[0] != wanted[0]:
            raise CannotMigrate(
                "a migration would cross a major version",
                where=where,
                expected=target,
                found=text,
                hint="Load it with the code of its own version, or convert it by hand.",
            )
        path = self._path(found, wanted)
        if path is None:
            raise CannotMigrate(
                f"no migration from {text} to {target}",
                where=where,
                expected=f"steps that lead there; registered: {self._listed()}",
                hint="Register the missing steps (register_migration).",
            )
        return path

    def _path(self, start: _Parsed, end: _Parsed) -> list[_Step] | None:
        queue: list[tuple[int, int, list[_Parsed]]] = [(0, 0, [start])]
        seen = set()
        while queue:
            length, losses, path = heappop(queue)
            here = path[-1]
            if here == end:
                return [self._steps[ends] for ends in pairwise(path)]
            if here in seen:
                continue
            seen.add(here)
            for (source, there), step in self._steps.items():
                if source == here and (here < there <= end or end <= there < here):
                    heappush(queue, (length + 1, losses + step.lossy, [*path, there]))
        return None

    def _listed(self) -> str:
        return ", ".join(str(self._steps[ends]) for ends in sorted(self._steps)) or "none"


#: The steps of this process; `register_migration` fills it.
MIGRATIONS = Migrations()


def register_migration(
    source: Version, target: Version, migrate: Migrate, *, lossy: bool = False
) -> None:
    """Register a step between two versions of a state in this process; see `Migrations.register`.

    Raises:
        InvalidInput: A version is malformed, both are the same or of different major versions, or
            another function is registered between them.
    """
    MIGRATIONS.register(source, target, migrate, lossy=lossy)


def _take(step: _Step, state: dict[str, Any], key: str) -> dict[str, Any]:
    try:
        state = step.migrate(state)
    except Exception as error:
        error.add_note(f"while migrating a state from {step}")
        raise
    try:
        reached = _version_in(state, key)
    except RegistryError as error:
        raise IncompatibleState(f"the migration {step} failed: {error}") from error
    if reached != _parse(step.target):
        raise IncompatibleState(
            f"the migration {step} did not set the version",
            where=f"state[{key!r}]",
            expected=step.target,
            found=state[key],
        )
    return state


def _version_in(state: dict[str, Any], key: str) -> _Parsed:
    if not isinstance(state, dict):
        raise CannotMigrate("not a state", expected="a dict", found=clip(state))
    if key not in state:
        raise CannotMigrate("a state without a version", where=f"state[{key!r}]")
    try:
        return _parse(state[key])
    except InvalidInput as error:
        raise CannotMigrate(
            error.what, where=f"state[{key!r}]", expected=error.expected, found=error.found
        ) from error


def _parse(version: object) -> _Parsed:
    if type(version) is int and version >= 0:
        return (_WHOLE, version, 0)
    if isinstance(version, str):
        match = _DOTTED.fullmatch(version)
        if match is not None:
            major, minor, patch = map(int, match.groups(default="0"))
            return (major, minor, patch)
    raise InvalidInput("not a version", expected=_EXPECTED, found=clip(version))


def _full_name(migrate: Migrate) -> str:
    named = migrate if hasattr(migrate, "__qualname__") else type(migrate)
    return f"{named.__module__}.{named.__qualname__}"
