"""Note which rare places of the library a test has been at, in all of its processes.

A test that lets chance decide finds nothing at a place that it never comes to. So it names the
places that it is for, and fails unless it was at each. The library has no code for that: `Watch`
compiles the functions of the places again with one call more. `tests.support.places` names them.
"""

from __future__ import annotations

import ast
import importlib
import marshal
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import ClassVar, NamedTuple, Self

from tests.support.rewriting import Source, target

#: Names the folder of a watch to processes that a test starts.
VARIABLE = "HOLDFAST_SOMETIMES"
_HOOK = "__been_at__"
_CODE, _SEEN = "places.code", "places.seen"


class Place(NamedTuple):
    """A place in the library.

    Attributes:
        module: Below `holdfast`.
        function: The function or method, with dots.
        at: How the first line of one of its statements begins. Of a statement with a body, the
            place is the begin of the body: the branch was taken.
        when: An expression that has to be true before the statement, where being there is not rare.
    """

    module: str
    function: str
    at: str
    when: str | None = None


def rewritten(places: Mapping[str, Place]) -> dict[tuple[str, str], CodeType]:
    """Return new code by module and function; it tells of the places.

    Raises:
        LookupError: A place is not in the source, or more than once.
    """
    made: dict[tuple[str, str], CodeType] = {}
    for module in sorted({place.module for place in places.values()}):
        source = Source(module)
        here = {name: place for name, place in places.items() if place.module == module}
        for name, place in here.items():
            _tell(source, name, place)
        codes = source.codes()
        made |= {(module, one.function): codes[one.function] for one in here.values()}
    return made


def _tell(source: Source, name: str, place: Place) -> None:
    """Add the call that tells of a place to the tree."""
    bodies = [
        (body, number)
        for node in ast.walk(source.function(place.function))
        for body in _bodies(node)
        for number, one in enumerate(body)
        if source.lines[_line(one) - 1].strip().startswith(place.at)
        and not hasattr(one, _HOOK)  # it has the line of its statement
    ]
    if len(bodies) != 1:
        where = f"{place.module}, {place.function}: {place.at!r}"
        raise LookupError(f"the place {name!r} is there {len(bodies)} times: {where}")
    ((body, number),) = bodies
    condition = f"if {place.when}: " if place.when else ""
    (call,) = ast.parse(f"{condition}{_HOOK}({name!r})").body
    node = body[number]
    for one in ast.walk(call):
        setattr(one, _HOOK, True)
        ast.copy_location(one, node if isinstance(node, ast.stmt) else body[0])
    inner = getattr(node, "body", None)
    if inner is not None and place.when is None:
        inner.insert(0, call)
    else:
        assert isinstance(node, ast.stmt)
        body.insert(number, call)


def _bodies(node: ast.AST) -> list[list[ast.AST]]:
    found = [getattr(node, name, None) for name in ("body", "orelse", "finalbody", "handlers")]
    return [one for one in found if isinstance(one, list)]


def _line(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 1))


@dataclass
class _Here:
    """What this process has told."""

    fd: int
    told: set[str]

    def been_at(self, name: str) -> None:
        if name not in self.told:
            self.told.add(name)
            os.write(self.fd, name.encode() + b"\n")


def watch_here(folder: str) -> list[tuple[str, str, CodeType]]:
    """Tell of the places in this process; return the code that was there before."""
    path = Path(folder)
    here = _Here(os.open(path / _SEEN, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), set())
    before = []
    for module, function, code in marshal.loads((path / _CODE).read_bytes()):
        changed = target(module, function)
        before.append((module, function, changed.__code__))
        setattr(importlib.import_module(f"holdfast.{module}"), _HOOK, here.been_at)
        changed.__code__ = code
    return before


class Watch:
    """A watch over some places, from `with` on, in this process and in those it starts.

    Args:
        folder: Where processes tell what they have been at.
        places: By name.
        is_here: Whether this process counts, too.

    Attributes:
        is_on: Off while a changed function is tried. A watch would put its old code back.
    """

    is_on: ClassVar[bool] = True

    def __init__(self, folder: Path, places: Mapping[str, Place], *, is_here: bool = False) -> None:
        self._folder, self._is_here = folder, is_here
        self._places = dict(places) if self.is_on else {}
        self._before: list[tuple[str, str, CodeType]] = []

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        code = [(*where, one) for where, one in rewritten(self._places).items()]
        (self._folder / _CODE).write_bytes(marshal.dumps(code))
        (self._folder / _SEEN).touch()
        os.environ[VARIABLE] = str(self._folder)
        if self._is_here:
            self._before = watch_here(str(self._folder))
        return self

    def __exit__(self, *_: object) -> None:
        os.environ.pop(VARIABLE, None)
        for module, function, code in self._before:
            target(module, function).__code__ = code

    @property
    def seen(self) -> dict[str, int]:
        """By place, how many processes have been there."""
        told = (self._folder / _SEEN).read_text().split("\n")[:-1]
        return {name: told.count(name) for name in self._places if name in told}

    @property
    def missing(self) -> list[str]:
        """The places where nobody has been."""
        return sorted(self._places.keys() - self.seen.keys())

    def check(self, but: Iterable[str] = ()) -> None:
        """Fail unless somebody was at each place."""
        missing = [name for name in self.missing if name not in set(but)]
        assert not missing, f"never been at: {missing}"
