"""Give functions of the library other code for a while, made of their own source.

The new code is compiled from the whole module, so that names, lines and tracebacks stay the same.
Only functions of a module and methods of its classes can be replaced.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any


class Source:
    """The source of a module below `holdfast`, as a tree that may be changed."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.file = inspect.getfile(importlib.import_module(f"holdfast.{module}"))
        text = Path(self.file).read_text(encoding="utf-8")
        self.lines = text.splitlines()
        self.tree = ast.parse(text)

    def function(self, name: str) -> ast.FunctionDef:
        """Return a function by its name with dots.

        Raises:
            LookupError: There is none.
        """
        for found, node in functions(self.tree):
            if found == name:
                return node
        raise LookupError(f"{self.module} has no function {name}")

    def codes(self) -> dict[str, CodeType]:
        """Compile the tree as it is now; return the code of each function."""
        ast.fix_missing_locations(self.tree)
        whole = compile(self.tree, self.file, "exec", dont_inherit=True)
        found = {one.co_qualname: one for one in _codes(whole)}
        return {name: found[name] for name, _ in functions(self.tree)}


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a module and the methods of its classes, with their names."""

    def below(body: list[ast.stmt], path: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                yield f"{path}{node.name}", node
            elif isinstance(node, ast.ClassDef):
                yield from below(node.body, f"{path}{node.name}.")

    return below(tree.body, "")


def target(module: str, name: str) -> FunctionType:
    """Return the function itself, below what decorates it."""
    found: Any = importlib.import_module(f"holdfast.{module}")
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    found = getattr(found, "__func__", getattr(found, "fget", found))
    found = inspect.unwrap(found)
    assert isinstance(found, FunctionType), f"{module}.{name} is no function"
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield one
            yield from _codes(one)
