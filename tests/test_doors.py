"""Each room has a door: other rooms import only the names that its packages list."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.support.source import ROOT, tree

pytestmark = pytest.mark.xdist_group("source")
MODULES = {
    ".".join(["holdfast", *path.relative_to(ROOT).with_suffix("").parts]): path
    for path in (ROOT / "registry").rglob("*.py")
}
#: They are imported by name, since a door that offers them would load the library.
WRAPPED = {
    *("IPython", "distributed", "fsspec", "jax", "jinja2", "lightning", "markupsafe", "ml_dtypes"),
    *("msgpack", "openskill", "plotly", "pyarrow", "starlette", "torch", "transformers"),
    *("uvicorn", "wandb", "yaml", "zarr"),
}

#: What it imports late imports numpy.
IMPORT_NUMPY_LATE = "holdfast.registry.loading.following.swapping"
#: `Stored` and `Checkpoint`.
FACE_OF_STATES = {
    f"holdfast.registry.loading.{name}" for name in ("checkpoint", "state_handle", "stored")
}


def room_of(module: str) -> str:
    return module.split(".")[2] if module.count(".") > 1 else ""


def imports(inside: ast.AST) -> list[ast.ImportFrom]:
    return [one for one in ast.walk(inside) if isinstance(one, ast.ImportFrom)]


def wraps_a_library(path: Path) -> bool:
    body = tree(path).body
    named = [alias.name for one in body if isinstance(one, ast.Import) for alias in one.names]
    named += [one.module or "" for one in body if isinstance(one, ast.ImportFrom)]
    return any(name.split(".")[0] in WRAPPED for name in named)


@cache
def listed(package: Path) -> set[str]:
    """Return the names that a package offers: those that it imports, defines or has as modules."""
    module = tree(package / "__init__.py")
    names = {alias.asname or alias.name for one in imports(module) for alias in one.names}
    for one in module.body:
        if isinstance(one, ast.FunctionDef | ast.ClassDef):
            names.add(one.name)
        elif isinstance(one, ast.Assign):
            names |= {target.id for target in one.targets if isinstance(target, ast.Name)}
        elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            names.add(one.target.id)
    return names


def past_the_door(module: str) -> list[str]:
    wrong = []
    for one in imports(tree(MODULES[module])):
        target = one.module or ""
        there = MODULES.get(target)
        if target.startswith("holdfast.registry.") and there is None:  # a package
            package = ROOT.joinpath(*target.split(".")[1:])
            is_elsewhere = room_of(target) != room_of(module)
            names = {alias.name for alias in one.names}
            modules = {path.stem for path in package.iterdir()}
            if is_elsewhere and names - listed(package) - modules:
                wrong.append(f"{module}:{one.lineno}: {target} does not offer {sorted(names)}")
        elif there is not None and room_of(target) != room_of(module):
            is_room = there.parent == ROOT / "registry"  # a room of one module is its own door
            is_direct = target == "holdfast.registry.values.first_use" or wraps_a_library(there)
            if not (is_room or is_direct):
                wrong.append(f"{module}:{one.lineno}: {target} is behind its door")
    return wrong


def test_other_rooms_are_entered_by_their_doors() -> None:
    assert [line for module in MODULES for line in past_the_door(module)] == []


def test_only_the_face_imports_another_room_late() -> None:
    """They have the public classes; a plain read imports only what all of their calls need."""
    late = [
        f"{module}:{one.lineno}: {one.module}"
        for module, path in MODULES.items()
        if room_of(module) not in ("face", "cli")
        if module not in {IMPORT_NUMPY_LATE, *FACE_OF_STATES}
        for function in ast.walk(tree(path))
        if isinstance(function, ast.FunctionDef)
        for one in imports(function)
        if (one.module or "").startswith("holdfast.registry.")
        and room_of(one.module or "") != room_of(module)
    ]
    assert late == []
