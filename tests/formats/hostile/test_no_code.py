"""Nothing in the source can run what came with a checkpoint: the doors are not there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.source import ROOT, tree

pytestmark = pytest.mark.xdist_group("source")
SOURCES = sorted(
    {
        path.relative_to(ROOT)
        for package in ("registry", "backends", "src")
        for path in (ROOT / package).rglob("*.py")
    }
)
MODULES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy"}
BUILTINS = {"eval", "exec", "__import__"}
#: Attributes, by the name that they are called on: functions that unpickle unless told otherwise.
LOADERS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("pd", "read_pickle")}


def violations(source: ast.Module) -> Iterator[str]:
    for node in ast.walk(source):
        match node:
            case ast.Import(names=names):
                yield from (n.name for n in names if n.name.partition(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES:
                yield module
            case ast.Name(id=name) if name in BUILTINS:
                yield name
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)) as call:
                if (owner, name) in LOADERS and not _is_safe(call):
                    yield f"{owner}.{name}"


def _is_safe(call: ast.Call) -> bool:
    given = {word.arg: word.value for word in call.keywords}
    match given.get("weights_only"):
        case ast.Constant(value=True):
            return True
    return False


def test_no_door() -> None:
    found = {path: list(violations(tree(ROOT / path))) for path in SOURCES}
    assert len(found) > 400
    # `run raise-version --migration FILE:NAME` runs a program that the user names there.
    named = {Path("registry/cli/runs.py"): ["runpy"]}
    assert {path: doors for path, doors in found.items() if doors} == named


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from marshal import loads",
        "from cloudpickle.x import y",
        "eval('1')",
        "run = exec",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "torch.load(f, weights_only=flag)",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_the_test_finds_doors(source: str) -> None:
    assert list(violations(ast.parse(source)))


def test_the_test_lets_others_pass() -> None:
    harmless = "import json\ntorch.load(f, weights_only=True)\nx.eval()"
    assert not list(violations(ast.parse(harmless)))
