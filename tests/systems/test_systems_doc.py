"""`docs/systems.md` names tests and benchmarks that exist, and counts its own rows."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "systems.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", DOC)))
NOT_MET = re.compile(r"not (built|met|reproduced): ")
DOCUMENTS = ("Hydra", "ADR-004", "ANDREA", "Cobre", "Thalia")
STORIES = sorted(path.name for path in Path(__file__).parent.glob("test_[acht]*.py"))


@cache
def names_in(path: Path) -> set[str]:
    """Return the names of the test functions of a file, those of classes included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = (node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {name for name in found if name.startswith("test_")}


TEST = r"`tests/[\w/]+\.py::test_\w+`"
#: Columns of the table of the other side, with what their rows' last cells name.
SIDES = {
    "both ways": {"both", "to file and to native"},
    "to file only": {"to file"},
    "to native only": {"to native"},
    "none": {"none"},
}


def rows() -> list[tuple[str, str, str, str, str]]:
    """Return document and cells of each row; a row of `Folders` names the document itself."""
    found, document = [], ""
    for line in DOC.splitlines():
        if line.startswith("## "):
            document = line.removeprefix("## ")
        elif line.startswith("| ") and document and "| asked |" not in line:
            asked, here, test, other = (cell.strip() for cell in line.strip("|").split(" | "))
            named, colon, _rest = asked.partition(": ")
            if document == "Folders":
                assert colon
                assert named in DOCUMENTS, line
            found.append((named if document == "Folders" else document, asked, here, test, other))
    return found


ROWS = rows()


def outcome(asked: str, here: str, test: str) -> str | None:
    """Return whether a demand is met; `None` of a row that is none."""
    if asked.startswith("("):
        return None
    if NOT_MET.match(here):
        return "not met"
    return "measured" if test.startswith("`bench/") else "met"


def side(cell: str) -> str:
    """Return the directions that the last cell of a row has tests of, `none`, or a dash."""
    if cell == "-" or re.fullmatch(r"none: .{20,}", cell):
        return cell.partition(":")[0]
    named = [part.partition(": ") for part in cell.split("; ")]
    assert all(re.fullmatch(TEST, test) for _, _, test in named), cell
    return " and ".join(way for way, _, _ in named)


def test_there_are_rows() -> None:
    assert len(ROWS) > 250
    assert len(NAMED) > 60


def test_the_counts_are_those_of_the_rows() -> None:
    counts = []
    for document in (*DOCUMENTS, "all"):
        kinds = Counter(outcome(*row[:3]) for name, *row in ROWS if document in (name, "all"))
        del kinds[None]
        numbers = [kinds[kind] for kind in ("met", "measured", "not met")]
        counts.append(f"| {document} | {sum(numbers)} | {' | '.join(map(str, numbers))} |")
    assert [line for line in DOC.splitlines() if line in counts] == counts, "\n".join(counts)


def test_the_counts_of_the_other_side_are_those_of_the_rows() -> None:
    counts = []
    for document in (*DOCUMENTS, "all"):
        sides = [
            side(row[-1])
            for name, *row in ROWS
            if document in (name, "all") and not row[0].startswith("(")
        ]
        numbers = [sum(one in named for one in sides) for named in SIDES.values()]
        assert sum(numbers) + sides.count("-") == len(sides), sorted(set(sides))
        counts.append(f"| {document} | {sum(numbers)} | {' | '.join(map(str, numbers))} |")
    heading = f"| document | rows about files | {' | '.join(SIDES)} |"
    lines = DOC.splitlines()
    begin = lines.index(heading) + 2
    assert lines[begin : begin + len(counts)] == counts, "\n".join(counts)


def test_every_named_test_exists() -> None:
    assert [(path, name) for path, name in NAMED if name not in names_in(ROOT / path)] == []


def test_every_row_names_a_test_or_says_why_not() -> None:
    for _, asked, here, test, _other in ROWS:
        assert asked
        assert here, asked
        if test == "-":
            assert NOT_MET.match(here), here
            assert len(here) > 40, here
        elif test.startswith("`bench/"):
            assert here.startswith("measured"), here
            assert (ROOT / test.strip("`")).exists(), test
        else:
            assert re.fullmatch(TEST, test), test


def test_every_test_of_a_story_is_named() -> None:
    named = {
        story: {name for path, name in NAMED if path == f"tests/systems/{story}"}
        for story in STORIES
    }
    assert {story: names_in(Path(__file__).parent / story) for story in STORIES} == named


def test_nothing_cites_files_that_are_not_here() -> None:
    for folder in ("docs", "registry", "backends", "src", "tests", "bench"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".md", ".py", ".toml") and path != Path(__file__):
                text = path.read_text(encoding="utf-8")
                assert not re.search(r"(?<![\w/])seeds/\w+\.md", text), path
    for named in re.findall(r"`((?:docs|registry|tests|bench|design)/[\w./]+)`", DOC):
        assert (ROOT / named).exists(), named
