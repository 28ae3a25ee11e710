"""Each room has a door: other rooms import only the names that its packages list."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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

#: What they import late imports numpy.
IMPORT_NUMPY_LATE = {
    "holdfast.registry.deriving.merging.mixing",
    "holdfast.registry.loading.following.resident",
}


def room_of(module: str) -> str:
    return module.split(".")[2] if module.count(".") > 1 else ""


def imports(path: Path) -> list[ast.ImportFrom]:
    return [one for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.ImportFrom)]


def wraps_a_library(path: Path) -> bool:
    body = ast.parse(path.read_text()).body
    named = [alias.name for one in body if isinstance(one, ast.Import) for alias in one.names]
    named += [one.module or "" for one in body if isinstance(one, ast.ImportFrom)]
    return any(name.split(".")[0] in WRAPPED for name in named)


def listed(package: Path) -> set[str]:
    """Return the names that a package offers: those that it imports, defines or has as modules."""
    tree = ast.parse((package / "__init__.py").read_text())
    names = {alias.asname or alias.name for one in ast.walk(tree) for alias in _aliases(one)}
    for one in tree.body:
        if isinstance(one, ast.FunctionDef | ast.ClassDef):
            names.add(one.name)
        elif isinstance(one, ast.Assign):
            names |= {target.id for target in one.targets if isinstance(target, ast.Name)}
        elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            names.add(one.target.id)
    return names


def _aliases(node: ast.AST) -> list[ast.alias]:
    return node.names if isinstance(node, ast.ImportFrom) else []


@pytest.mark.parametrize(
    "module", MODULES, ids=lambda name: name.removeprefix("holdfast.registry.")
)
def test_other_rooms_are_entered_by_their_doors(module: str) -> None:
    wrong = []
    for one in imports(MODULES[module]):
        target = one.module or ""
        there = MODULES.get(target)
        if target.startswith("holdfast.registry.") and there is None:  # a package
            package = ROOT.joinpath(*target.split(".")[1:])
            is_elsewhere = room_of(target) != room_of(module)
            names = {alias.name for alias in one.names}
            modules = {path.stem for path in package.iterdir()}
            if is_elsewhere and names - listed(package) - modules:
                wrong.append(f"line {one.lineno}: {target} does not offer {sorted(names)}")
        elif there is not None and room_of(target) not in (room_of(module), "errors"):
            is_direct = target == "holdfast.registry.values.first_use" or wraps_a_library(there)
            if not is_direct:
                wrong.append(f"line {one.lineno}: {target} is behind its door")
    assert wrong == []


@pytest.mark.parametrize(
    "module", MODULES, ids=lambda name: name.removeprefix("holdfast.registry.")
)
def test_only_the_face_imports_another_room_late(module: str) -> None:
    """`Run` and `Registry` are the face of everything; a plain read imports a few rooms alone."""
    late = [
        f"line {one.lineno}: {one.module}"
        for function in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(function, ast.FunctionDef)
        for one in ast.walk(function)
        if isinstance(one, ast.ImportFrom)
        and (one.module or "").startswith("holdfast.registry.")
        and room_of(one.module or "") != room_of(module)
    ]
    assert room_of(module) in ("face", "cli") or module in IMPORT_NUMPY_LATE or late == []
