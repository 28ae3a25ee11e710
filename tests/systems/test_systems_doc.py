"""`docs/systems.md` names tests; every one of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "systems.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", DOC)))
ROWS = [line for line in DOC.splitlines() if line.startswith("| ") and "| asked |" not in line]
STORIES = sorted(path.name for path in Path(__file__).parent.glob("test_[acht]*.py"))


def names_in(path: Path) -> set[str]:
    """Return the names of the test functions of a file, those of classes included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = (node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {name for name in found if name.startswith("test_")}


def test_there_are_rows() -> None:
    assert len(ROWS) > 120
    assert len(NAMED) > 60


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_named_test_exists(path: str, name: str) -> None:
    assert name in names_in(ROOT / path)


@pytest.mark.parametrize("row", ROWS)
def test_every_row_names_a_test_or_says_why_not(row: str) -> None:
    asked, here, test = (cell.strip() for cell in row.strip("|").split(" | "))
    assert asked
    assert here
    if test.strip("| ") == "-":
        assert any(
            reason in here for reason in ("comes with directory layouts", "not tested", "not built")
        )
    else:
        assert re.fullmatch(r"`tests/[\w/]+\.py::test_\w+`", test.strip("| "))


@pytest.mark.parametrize("story", STORIES)
def test_every_test_of_a_story_is_named(story: str) -> None:
    named = {name for path, name in NAMED if path == f"tests/systems/{story}"}
    assert names_in(Path(__file__).parent / story) == named


def test_nothing_cites_files_that_are_not_here() -> None:
    for folder in ("docs", "registry", "backends", "src", "tests", "bench"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".md", ".py", ".toml") and path != Path(__file__):
                text = path.read_text(encoding="utf-8")
                assert not re.search(r"(?<![\w/])seeds/\w+\.md", text), path
    for named in re.findall(r"`((?:docs|registry|tests|bench|design)/[\w./]+)`", DOC):
        assert (ROOT / named).exists(), named
