"""`docs/collection-proof.md` says where its rules stand, where they are tested, and how much.

What it cites exists; its numbers are the code's; and the proof's list of what can make a run hold a
manifest is whole, so that a new action cannot slip past it.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from holdfast.registry.history import log, snapshots
from holdfast.registry.history.actions import Action
from holdfast.registry.history.epochs import Epochs
from holdfast.registry.upkeep import gc, live, planning
from holdfast.registry.values import Record
from holdfast.registry.values.digest import Digest
from holdfast.registry.writing import committer, object_writer

ROOT = Path(__file__).parents[1]
PAGES = ("collection.md", "collection-proof.md")  # for operators, and the proof
TEXT = "\n".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in PAGES)
FLAT = " ".join(TEXT.split())

TESTS = sorted(set(re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", TEXT)))
SOURCES = sorted(set(re.findall(r"`(registry/[\w/]+\.py)`", TEXT)))
CLASSES = {
    "ChosenKeys": object_writer.ChosenKeys,
    "Collector": gc.Collector,
    "Epochs": Epochs,
    "Needs": live.Needs,
    "Planner": planning.Planner,
    "RunLog": log.RunLog,
    "ObjectWriter": object_writer.ObjectWriter,
}
SYMBOLS = sorted(set(re.findall(r"`([A-Z]\w+)\.(\w+)`", TEXT)))
HAZARDS = re.findall(r"^\| (H\d+) \| (.+) \| (.+) \| (.+) \|$", TEXT, re.M)

#: Actions that name a manifest which the run need not hold for that: a fork's parent is another
#: run, and what a transition began from is told by its id alone.
TELLS_ONLY = {("run.create", "parent"), ("phase.enter", "manifest")}
#: Names no manifest, and makes a run hold some all the same.
BRINGS_BACK = {"checkpoint.recover"}


@cache
def names_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_there_is_something_to_check() -> None:
    assert len(TESTS) > 15
    assert len(SYMBOLS) > 10


def test_every_cited_test_exists() -> None:
    for path, name in TESTS:
        assert (ROOT / path).exists(), path
        assert not name or name in names_in(ROOT / path), name


def test_every_cited_module_and_symbol_exists() -> None:
    assert [path for path in SOURCES if not (ROOT / path).is_file()] == []
    assert [(owner, name) for owner, name in SYMBOLS if not hasattr(CLASSES[owner], name)] == []


def test_every_hazard_has_an_answer_and_a_test() -> None:
    assert [number for number, *_ in HAZARDS] == [f"H{n}" for n in range(1, 25)]
    for _, wrong, answer, tested in HAZARDS:
        assert wrong.strip()
        assert answer.strip()
        assert re.search(r"`tests/", tested)


@pytest.mark.parametrize(
    ("says", "value", "said"),
    [
        ("(default: one day)", gc.DAY_S, 86_400.0),
        ("none of the last four epochs has condemned", gc._RECENT_EPOCHS, 4),
        ("all but the two newest snapshots of each run", snapshots._SNAPSHOTS_KEPT, 2),
        ("if they are older than an hour and than the grace", planning.LEFTOVER_S, 3600.0),
        ("gives up after five sweeps in a row", committer._ATTEMPTS, 5),
    ],
)
def test_numbers_are_the_codes(says: str, value: float, said: float) -> None:
    assert says in FLAT
    assert value == said


def _names_a_manifest(annotation: Any) -> bool:
    parts = get_args(annotation)
    is_record = isinstance(annotation, type) and issubclass(annotation, Record)
    nested = annotation.hints() if is_record else {}
    return (
        annotation is Digest
        or any(_names_a_manifest(part) for part in parts)
        or any(map(_names_a_manifest, nested.values()))
    )


def test_the_proof_knows_every_action_that_makes_a_run_hold_something() -> None:
    (listed,) = re.findall(r"Everything that makes a manifest held \(([^)]*)\)", FLAT)
    union, _ = get_args(Action)
    naming = {
        (model.action, field)
        for model in get_args(union)
        for field, hint in model.hints().items()
        if _names_a_manifest(hint) and not field.endswith("_hash")
    }
    holding = {action for action, field in naming - TELLS_ONLY} | BRINGS_BACK
    assert set(re.findall(r"`([\w.]+)`", listed)) == holding
