"""One place obeys the rules for naming objects, and everything goes through it.

The rules W1 to W4 are worth nothing to a path that puts objects or commits places by itself. This
holds the source against the list of those that touch the store, each with its reason.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache

import pytest

from tests.support.source import REGISTRY, tree

pytestmark = pytest.mark.xdist_group("source")

#: The modules that may change the store, and why they name no object without the writer.
CHANGES = {
    "writing/object_writer.py": "chooses every key of an object (W2)",
    "history/slots.py": "slots",
    "history/log.py": "the copy of a run in a journal",
    "history/snapshots.py": "snapshots and their parts, which are a cache",
    "store/store.py": "registry.json, once, and a file that tells the store's time",
    "saving/journal/states.py": "objects of an entry of the journal, in a folder of its own",
    "history/signatures.py": "signatures of heads of runs, which name no object",
    "face/syncing.py": "signatures at the destination",
    "history/epochs.py": "epochs, which name objects to delete, and none to use",
    "history/condemned_names.py": "the tables of these names, by their digest",
    "upkeep/gc.py": "epochs and deletions",
    "upkeep/sealing.py": "removal of markers",
    "upkeep/run_notes.py": "notes of collectors, which name no object to use",
    "upkeep/upgrading.py": "the epoch of an upgrade",
    "upkeep/repairing.py": "objects under keys that live places name already",
    "upkeep/checkup.py": "the doctor's own probe",
    "ui/page.py": "the pages of a site, outside of every registry",
}
#: The modules that may put lines into a log.
APPENDS = {
    "writing/object_writer.py": "commits that name objects, rechecked (W3, W4)",
    "history/creating.py": "commit 0, which references nothing (W1)",
    "face/syncing.py": "commit 0 of a run at its destination",
    "upkeep/accepting.py": "marks that make a log longer than its note has seen",
    "upkeep/gc.py": "marks",
    "upkeep/planning.py": "lines that free dropped runs",
    "upkeep/sealing.py": "seals, and the marks before them",
    "upkeep/upgrading.py": "the marks of an upgrade",
}
#: The modules that may make the place of a manifest.
PLACES = {
    "writing/placing.py": "a state that was written or adopted through the writer",
}


#: The methods that put, delete and commit.
METHODS = {"put", "put_if_absent", "delete", "delete_many", "append", "Place", "commit"}


@cache
def calls() -> dict[str, dict[str, set[str]]]:
    """Return what each module calls, by method: the texts of what it is called on."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in REGISTRY.rglob("*.py"):
        module = str(path.relative_to(REGISTRY))
        for node in ast.walk(tree(path)):
            # Methods that are handed on uncalled count too.
            if isinstance(node, ast.Attribute) and node.attr in METHODS:
                found[module][node.attr].add(ast.unparse(node.value))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found[module][node.func.id].add("")
    return found


def touching(*methods: str, on: str = "") -> set[str]:
    assert {*methods} <= METHODS
    return {
        module
        for module, called in calls().items()
        for method in methods
        if any(target.endswith(on) for target in called.get(method, ()))
    }


def test_the_store_is_changed_by_those_alone():
    changing = touching("put", "put_if_absent", "delete", "delete_many", on="backend")
    assert changing == set(CHANGES)


def test_lines_are_put_by_those_alone():
    assert touching("append", on="log") == set(APPENDS)


def test_places_are_made_by_those_alone():
    reads = {"history/replay/advance.py"}  # it tells lines apart by their class
    assert touching("Place") - {"actions/lines.py"} - reads == set(PLACES)


def test_what_commits_places_goes_through_the_writer():
    assert touching("commit", on="writer.objects") == {"writing/committer.py"}
