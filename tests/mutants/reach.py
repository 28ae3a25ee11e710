"""Find the tests that run the statement of each change, and how long they take."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import CodeType

import pytest

from tests.mutants.mutations import Mutation, change_of
from tests.support.rewriting import Source, target

_HOOK = "__reached__"


def hooked(drawn: Sequence[Mutation]) -> dict[tuple[str, str], CodeType]:
    """Return code that tells the number of each change before its statement."""
    made = {}
    for module in sorted({one.module for one in drawn}):
        source = Source(module)
        here = [(n, one) for n, one in enumerate(drawn) if one.module == module]
        places = [(n, *_statement(source, one)) for n, one in here]
        for number, block, statement in places:
            (call,) = ast.parse(f"{_HOOK}({number})").body
            for node in ast.walk(call):
                ast.copy_location(node, statement)
            block.insert(block.index(statement), call)
        codes = source.codes()
        made |= {(module, one.function): codes[one.function] for _, one in here}
    return made


def _statement(source: Source, mutation: Mutation) -> tuple[list[ast.stmt], ast.stmt]:
    """Return the statement that a change is in, and the block that has it."""
    function = source.function(mutation.function)
    changed = change_of(mutation, function)[0]
    found = None
    for node in ast.walk(function):  # outer ones first
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            for one in block if isinstance(block, list) else ():
                if any(inner is changed for inner in ast.walk(one)):
                    found = block, one
    assert found is not None
    return found


class Reach:
    """Notes which test reaches which change, in this process: a plugin of pytest."""

    def __init__(self, drawn: Sequence[Mutation]) -> None:
        self._test = ""
        self._failed: set[str] = set()
        self._reached: dict[int, set[str]] = defaultdict(set)
        self._seconds: dict[str, float] = defaultdict(float)
        for (module, function), code in hooked(drawn).items():
            setattr(importlib.import_module(f"holdfast.{module}"), _HOOK, self._note)
            target(module, function).__code__ = code

    def _note(self, number: int) -> None:
        self._reached[number].add(self._test)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._test = item.nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._failed.add(report.nodeid)

    def write(self, path: Path) -> None:
        """Write what was noted, without tests that fail as the library is."""
        told = {
            "seconds": self._seconds,
            "reached": {
                number: sorted(tests - self._failed) for number, tests in self._reached.items()
            },
            "failed": sorted(self._failed),
            "modules": sorted(one for one in sys.modules if one.startswith("holdfast.")),
        }
        path.write_text(json.dumps(told))


def found_in(folder: Path, count: int) -> list[list[tuple[float, str]]]:
    """Return for each change the tests that reach it, the shortest first, with their seconds."""
    seconds: dict[str, float] = {}
    reached: list[set[str]] = [set() for _ in range(count)]
    for path in folder.glob("reach-*.json"):
        told = json.loads(path.read_text())
        seconds |= told["seconds"]
        for number, tests in told["reached"].items():
            reached[int(number)].update(tests)
    return [sorted((seconds[one], one) for one in tests if one) for tests in reached]


def modules_in(folder: Path) -> set[str]:
    """Return the modules of the library that the tests have imported."""
    told = (json.loads(path.read_text()) for path in folder.glob("reach-*.json"))
    return {module for one in told for module in one["modules"]}
