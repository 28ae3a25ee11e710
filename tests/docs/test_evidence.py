"""`docs/evidence.md` has the rows of `scripts/evidence`, and their commands name what exists."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from evidence import ROWS, Row, counted, shown  # noqa: E402

DOC = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
COMMANDS = sorted({one for row in ROWS for one in (row.sample, row.whole)})
#: Words of an expression of `-k` that are no names.
_JOINING = {"and", "or", "not"}


def _lines() -> dict[str, list[str]]:
    """Return the cells of the table of counts by their first one."""
    table = DOC.partition("|---|---:|---|---|---|\n")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()]
    return {cells[0].strip(): [one.strip() for one in cells[1:]] for cells in rows}


def test_the_page_has_every_row_and_no_other() -> None:
    lines = _lines()
    assert set(lines) == {row.name for row in ROWS}
    for row in ROWS:
        count, sample, whole, _ = lines[row.name]
        assert re.fullmatch(r"[\d,]+( \(\d+ \w.*\))?|not run", count), row.name
        assert (sample, whole) == (f"`{row.sample}`", f"`{row.whole}`")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_tests_that_exist(command: str) -> None:
    words = shlex.split(command)
    paths = [ROOT / word for word in words if word.startswith(("tests/", "scripts/"))]
    assert paths or words[:3] == ["python", "-m", "tests.mutants"]
    for path in paths:
        assert path.exists(), path
    if "-k" in words:
        expression = words[words.index("-k") + 1]
        files = [file for path in paths for file in _python(path)]
        texts = "\n".join(file.read_text(encoding="utf-8") for file in files)
        names = [name for file in files for name in _tests(file)]
        for word in set(re.findall(r"\w+", expression)) - _JOINING:
            known = any(word in name for name in names)
            assert known or (not word.startswith("test_") and word in texts), word


def test_a_count_adds_what_was_printed() -> None:
    row = Row("points", "", "", r"died at (\d+) points")
    assert counted(row, "a: died at 12 points\nb: died at 30 points, again") == 42
    assert counted(Row("lines", "", "", r"(?m)^seen()"), "seen one\nnot seen\nseen two") == 2
    mutants = next(row for row in ROWS if row.name == "mutants")
    said = "gc: 3 tried\nkilled: line 1\nnot reached: line 3\nkilled: line 2\n"
    assert shown(mutants, said) == "3 (2 killed, 1 not reached)"


def _python(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def _tests(path: Path) -> list[str]:
    if path.suffix != ".py":
        return []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = (node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return [name for name in found if name.startswith("test_")]
