"""The changes: of a comparison, a condition, a number, a result, or one statement less."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType

from tests.support.rewriting import Source, functions

#: The modules from which changes are drawn, by what they are for.
MODULES = {
    "commit": (
        *("registry.writing.committer", "registry.writing.object_writer"),
        *("registry.history.log", "registry.history.slots", "registry.history.epochs"),
        "registry.history.authorship",
    ),
    "gc": (
        *("registry.upkeep.gc", "registry.upkeep.planning", "registry.upkeep.live"),
        "registry.upkeep.sealing",
    ),
    "journal": (
        *("registry.saving.journal.carrier", "registry.saving.journal.folder"),
        *("registry.saving.journal.entry_saves", "registry.saving.journal.background"),
    ),
    "collective": (
        *("registry.saving.collective.talk", "registry.saving.collective.sides"),
        *("registry.saving.collective.agreement", "registry.saving.collective.exchange"),
    ),
}

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_SUMS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True)
class Mutation:
    """A change of a function.

    Attributes:
        module: Below `holdfast`.
        function: Its name, with dots.
        number: Which change of the function it is.
        before: The changed part, as it is.
        after: The same, changed.
        line: Where it is in the file, from 1.
    """

    module: str
    function: str
    number: int
    before: str
    after: str
    line: int

    @property
    def name(self) -> str:
        """A name that stays when lines move."""
        return f"{self.module}:{self.function}: {self.before} -> {self.after}"

    def code(self) -> CodeType:
        """Return the code of the function with the change."""
        source = Source(self.module)
        change_of(self, source.function(self.function))[2]()
        return source.codes()[self.function]


def draw(count: int, seed: int) -> list[Mutation]:
    """Return so many changes, in equal numbers from each part of `MODULES`."""
    chance, drawn = random.Random(seed), []
    for number, modules in enumerate(MODULES.values()):
        found = [one for module in modules for one in mutations(module)]
        drawn += chance.sample(found, len(range(number, count, len(MODULES))))
    chance.shuffle(drawn)
    return drawn


@cache
def mutations(module: str) -> list[Mutation]:
    """Return every change of a module."""
    found = []
    for name, node in functions(Source(module).tree):
        for number, (part, after, _) in enumerate(_changes(copy.deepcopy(node))):
            before = " ".join(ast.unparse(part).split())
            found.append(Mutation(module, name, number, before, after, part.lineno))
    return found


#: The part, how it reads when it is changed, and what changes it.
_Change = tuple[ast.stmt | ast.expr, str, Callable[[], object]]


def change_of(mutation: Mutation, function: ast.FunctionDef) -> _Change:
    """Return a change in the tree of its function."""
    return list(_changes(function))[mutation.number]


def _changes(function: ast.FunctionDef) -> Iterator[_Change]:
    """Yield the changes of a function, always in one order; each is made in the tree."""
    yield from _of_statement(function)
    notes = [one.annotation for one in ast.walk(function) if isinstance(one, ast.AnnAssign)]
    unused = {id(part) for note in notes for part in ast.walk(note)}  # nothing evaluates them
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    for statement in body:
        for node in ast.walk(statement):
            if id(node) not in unused:
                yield from _of_statement(node)
                yield from _of_expression(node)


def _of_statement(node: ast.AST) -> Iterator[_Change]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        for at, one in enumerate(block) if isinstance(block, list) else ():
            is_call = isinstance(one, ast.Expr) and isinstance(one.value, ast.Call)
            if is_call or isinstance(one, ast.AugAssign | ast.Raise | ast.Continue | ast.Break):
                yield one, "pass", _leave_out(block, at)
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        opposite = ast.UnaryOp(ast.Not(), node.test)
        yield node.test, f"not ({_text(node.test)})", _set(node, "test", opposite)


def _of_expression(node: ast.AST) -> Iterator[_Change]:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
            yield _changed(node, "ops", [_COMPARISONS[type(operator)]()])
        case ast.BinOp(op=operator) if type(operator) in _SUMS:
            yield _changed(node, "op", _SUMS[type(operator)]())
        case ast.BoolOp(op=operator):
            yield _changed(node, "op", ast.Or() if isinstance(operator, ast.And) else ast.And())
        case ast.Constant(value=bool(value)):
            yield _changed(node, "value", not value)
        case ast.Constant(value=int(value)):
            yield _changed(node, "value", value + 1)


def _changed(node: ast.expr, field: str, value: object) -> _Change:
    before = getattr(node, field)
    setattr(node, field, value)
    after = _text(node)
    setattr(node, field, before)
    return node, after, _set(node, field, value)


def _set(node: ast.AST, field: str, value: object) -> Callable[[], object]:
    return lambda: setattr(node, field, value)


def _leave_out(block: list[ast.stmt], at: int) -> Callable[[], object]:
    def leave_out() -> None:
        # It stays in the source: the function has to need the same names from around it.
        unused = ast.If(test=ast.Constant(value=False), body=[block[at]], orelse=[])
        block[at] = ast.copy_location(unused, block[at])

    return leave_out


def _text(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())
