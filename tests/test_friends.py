"""Code below the face reaches into no run or state, and no test stops the clock of its process."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.source import REGISTRY, TESTS, tree

pytestmark = pytest.mark.xdist_group("source")


def reaches_in(node: ast.AST) -> bool:
    """Return whether it is a function that hands out what its one argument keeps private."""
    if not isinstance(node, ast.FunctionDef) or len(node.args.args) != 1:
        return False
    (given,) = (one.arg for one in node.args.args)
    inner = (one.value for one in ast.walk(node) if isinstance(one, ast.Return))
    return any(
        isinstance(one, ast.Attribute | ast.Subscript | ast.Call)
        and any(
            isinstance(part, ast.Attribute)
            and part.attr.startswith("_")
            and isinstance(part.value, ast.Name)
            and part.value.id == given
            for part in ast.walk(one)
        )
        for one in inner
    )


def test_no_function_hands_out_what_its_argument_keeps_private() -> None:
    found = [
        f"{path.relative_to(REGISTRY)}: {node.name}"
        for path in REGISTRY.rglob("*.py")
        for node in tree(path).body
        if isinstance(node, ast.FunctionDef) and reaches_in(node)
    ]
    assert found == []


def test_a_function_that_reaches_in_is_seen() -> None:
    seen = ast.parse("def log_of(stored: Stored) -> RunLog:\n    return stored._log").body[0]
    assert reaches_in(seen)


#: The monotonic clock of the process belongs to the loops of its servers too: they would sleep on.
STOPPED_CLOCK = re.compile(r"""\btime(, *["']|\.)monotonic["']""")


def test_no_test_stops_the_clock_of_the_process() -> None:
    assert STOPPED_CLOCK.search('monkeypatch.setattr(module.time, "monotonic", clock)')
    assert STOPPED_CLOCK.search('mock.patch("time.monotonic", clock)')
    assert [
        path.name for path in TESTS.rglob("*.py") if STOPPED_CLOCK.search(path.read_text())
    ] == ["test_friends.py"]
