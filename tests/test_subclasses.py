"""Classes of the registry: no private override across modules, no row of a save that changes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.source import REGISTRY, tree

pytestmark = pytest.mark.xdist_group("source")
#: What becomes of a `SaveRequest`, step by step.
ROWS = ("FlatSave", "PlannedSave", "WrittenSave")


class Class(NamedTuple):
    """A class of the registry, and the names of its bases."""

    path: Path
    node: ast.ClassDef
    bases: list[str]

    @property
    def methods(self) -> set[str]:
        return {one.name for one in self.node.body if isinstance(one, ast.FunctionDef)}

    def __str__(self) -> str:
        return f"{self.path.relative_to(REGISTRY)}: {self.node.name}"


@cache
def classes() -> list[Class]:
    return [
        Class(path, node, [ast.unparse(base).partition("[")[0] for base in node.bases])
        for path in REGISTRY.rglob("*.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    ]


def above(one: Class) -> Iterator[Class]:
    """Yield the classes that a class is derived from; a name may stand for several."""
    for base in one.bases:
        for found in classes():
            if found.node.name == base and found.node is not one.node:
                yield found
                yield from above(found)


def overridden(one: Class) -> set[str]:
    """Return the private methods of other modules' classes that a class overrides.

    A name such as `_agree_` or `_repr_html_` marks a method that subclasses are to define.
    """
    theirs = {name for base in above(one) if base.path != one.path for name in base.methods}
    return {name for name in one.methods & theirs if name[0] == "_" and name[-1] != "_"}


def names(one: Class) -> set[str]:
    """Return every name in a class: arguments, attributes, annotations."""
    parts = [
        part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "")
        for part in ast.walk(one.node)
    ]
    return {*parts, *(part.arg for part in ast.walk(one.node) if isinstance(part, ast.arg))}


def test_no_private_method_of_another_module_is_overridden() -> None:
    assert {str(one): found for one in classes() if (found := overridden(one))} == {}


def test_a_change_holds_the_state_writer_and_no_committer() -> None:
    changes = [one for one in classes() if "Change" in {base.node.name for base in above(one)}]
    assert len(changes) > 10
    held = {"committer", "_committer", "Committer"}
    assert [str(one) for one in changes if held & names(one)] == []


def test_the_rows_of_a_save_are_frozen_and_no_subclasses() -> None:
    rows = [one for one in classes() if one.node.name in {"SaveRequest", *ROWS}]
    assert len(rows) == 1 + len(ROWS)
    for one in rows:
        (made,) = (ast.unparse(decorator) for decorator in one.node.decorator_list)
        assert made.startswith("dataclass(frozen=True, slots=True"), one
    assert [
        str(one) for one in classes() if {base.node.name for base in above(one)} & {*ROWS}
    ] == []
