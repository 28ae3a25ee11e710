"""The documents name files, functions and rooms that exist."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests" / "golden" / "README.md"]
)
#: A path of our code; a pattern such as `registry/cli/*.py` is not one.
CODE = re.compile(
    r"(?<![\w/.-])(?:registry|backends|tests|src|scripts|bench|examples)/[\w/.-]*\w/?"
)
OURS = [
    path.relative_to(ROOT).as_posix()
    for folder in (
        "registry",
        "backends",
        "src",
        "tests",
        "examples",
        "bench",
        "scripts",
        "terraform",
    )
    for path in (ROOT / folder).rglob("*.py")
]
DOTTED = re.compile(r"\bholdfast\.((?:registry|backends)(?:\.\w+)+)")
LINKED = re.compile(r"\[`([\w.]+)`\]\(\.\./((?:registry|backends)/[\w/]+\.py)\)")


def defined(path: Path) -> set[str]:
    """Return the names that a module defines, those of classes with their class."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            found |= {f"{node.name}.{one.name}" for one in methods}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_and_module_that_a_document_names_is_there(document: Path) -> None:
    text = document.read_text()
    named = {path.rstrip("/.") for path in CODE.findall(text)}
    assert sorted(path for path in named if not (ROOT / path).exists()) == []
    without_folder = re.findall(r"`([\w/]+\.py)`", text)
    assert [
        name for name in without_folder if not any(f"/{p}".endswith(f"/{name}") for p in OURS)
    ] == []
    for dotted in DOTTED.findall(text):
        parts = dotted.split(".")
        # The last part may be a name in the module.
        paths = [ROOT.joinpath(*parts[:n]) for n in (len(parts), len(parts) - 1)]
        assert any(p.is_dir() or p.with_suffix(".py").exists() for p in paths), dotted


def test_every_function_that_the_page_links_is_in_its_file() -> None:
    linked = LINKED.findall(PAGE)
    assert len(linked) > 30
    assert [(name, path) for name, path in linked if name not in defined(ROOT / path)] == []


def test_the_rooms_are_the_layers_that_imports_keep_to() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(
        one["layers"]
        for one in contracts["contracts"]
        if one.get("containers") == ["holdfast.registry"]
    )
    expected = [{room.strip(" ()") for room in layer.split("|")} for layer in layers]
    table = PAGE.split("| room of `registry/` |")[1].split("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert [set(re.findall(r"`(\w+)`", row)) for row in rows] == expected


ROOMS = sorted(
    path.parent
    for package in ("registry", "backends")
    for path in (ROOT / package).rglob("__init__.py")
    if path.parent != ROOT / "registry"
)


def test_rooms_name_their_modules_and_their_specification() -> None:
    sections = re.findall(r"^## (\d+)\.", (ROOT / "docs" / "spec.md").read_text(), re.MULTILINE)
    cited = re.compile(r"docs/spec\.md,\s+sections?\s+([\d,\s]+(?:(?:to|and)\s+\d+)*)")
    for room in ROOMS:
        text = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
        assert text is not None, room
        assert len(text.splitlines()) >= 3, room
        listed = re.findall(r"^- ((?:`\w+`(?:, with |, | and )?)+)", text, flags=re.MULTILINE)
        named = {name for names in listed for name in re.findall(r"`(\w+)`", names)}
        assert named - {path.stem for path in room.iterdir()} == set(), room
        for where in cited.findall(text):
            assert set(re.findall(r"\d+", where)) <= set(sections), room
