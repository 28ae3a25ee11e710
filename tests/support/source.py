"""The source of this project, for tests that read it.

They belong to the xdist group `source`: each file is parsed once, by one worker.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
REGISTRY, TESTS = ROOT / "registry", ROOT / "tests"


@cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))
