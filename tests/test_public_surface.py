"""The names that users build on: few, sorted, all there, and cheap to import."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from types import ModuleType

import pytest

import holdfast
import holdfast.backends

HEAVY = {
    *("torch", "boto3", "botocore", "s3fs", "fsspec", "obstore", "safetensors", "zarr"),
    *("ml_dtypes", "sklearn", "moto", "typer", "rich"),
}


@pytest.mark.parametrize(
    "package", [holdfast, holdfast.backends], ids=lambda package: package.__name__
)
def test_all_is_sorted_and_without_doubles(package: ModuleType) -> None:
    assert list(package.__all__) == sorted(set(package.__all__))


def test_the_surface_is_small() -> None:
    assert len(holdfast.__all__) <= 20


def test_all_is_what_the_package_defines() -> None:
    """What is bound in the package and neither a module nor private is promised, and vice versa."""
    assert all(hasattr(holdfast, name) for name in holdfast.__all__)  # loads what is lazy
    lazy = {"TYPE_CHECKING", "import_module"}
    names = {
        name
        for name, value in vars(holdfast).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    }
    assert names - lazy == set(holdfast.__all__)


def test_all_of_the_backends_is_there() -> None:
    assert set(holdfast.backends.__all__) <= set(vars(holdfast.backends))


@pytest.mark.parametrize("name", holdfast.__all__)
def test_every_name_says_what_it_is(name: str) -> None:
    assert (getattr(holdfast, name).__doc__ or "").strip()


def test_errors_are_all_exported_and_of_one_root() -> None:
    errors = importlib.import_module("holdfast.registry.errors")
    assert list(errors.__all__) == sorted(errors.__all__)
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert defined == set(errors.__all__)
    assert all(issubclass(getattr(errors, name), holdfast.RegistryError) for name in defined)
    assert all(getattr(errors, name).exit_code > 0 for name in defined)


def test_import_loads_nothing_heavy() -> None:
    program = "import json, sys, holdfast; holdfast.open; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert loaded & HEAVY == set()
