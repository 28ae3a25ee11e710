"""Code below the face takes the inner value of a run or a state, and reaches into neither."""

from __future__ import annotations

import ast
from pathlib import Path

REGISTRY = Path(__file__).parents[1] / "registry"


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
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and reaches_in(node)
    ]
    assert found == []


def test_a_function_that_reaches_in_is_seen() -> None:
    seen = ast.parse("def log_of(stored: Stored) -> RunLog:\n    return stored._log").body[0]
    assert reaches_in(seen)
