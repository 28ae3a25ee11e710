"""No demand without a change to the library that makes its test fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.systems.features import FEATURES
from tests.systems.mutants import MUTANTS, VARIABLE
from tests.systems.test_systems_doc import DOC, NAMED, names_in

DEMANDS = "tests/systems/test_demands.py"
ROOT = Path(__file__).parents[2]


def test_every_demand_has_its_mutant_and_its_row() -> None:
    assert names_in(ROOT / DEMANDS) == set(MUTANTS)
    for name, mutant in MUTANTS.items():
        assert f"`{DEMANDS}::{name}`" in DOC
        assert mutant.old is not None


@pytest.mark.soak
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails_the_test_of_its_demand(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-p", "tests.systems.mutants", f"{DEMANDS}::{name}"],
        cwd=ROOT,
        env={**os.environ, VARIABLE: name},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1, f"{MUTANTS[name].fault}: nothing noticed\n{done.stdout}"
    assert "1 failed" in done.stdout, done.stdout
    assert "TypeError" not in done.stdout, done.stdout  # a mutant that fits no more


#: By file, the tests that a fault of a feature fails.
NOTICING = {
    path: {name for _, files in FEATURES for name in files.get(path, ())}
    for path in sorted({path for _, files in FEATURES for path in files})
}


def test_tests_that_a_fault_fails_are_named_by_rows_and_counted() -> None:
    noticing = {(path, name) for path, names in NOTICING.items() for name in names}
    assert noticing <= set(NAMED)
    rows = {one for one in NAMED if one[0] != DEMANDS}
    for fault, _ in FEATURES:
        assert fault.old is not None
    assert f"{len(noticing)} of the other {len(rows)} tests" in DOC


@pytest.mark.soak
@pytest.mark.parametrize("path", NOTICING)
def test_a_fault_of_a_feature_fails_its_tests(path: str) -> None:
    named = " or ".join(sorted(NOTICING[path]))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-p", "tests.systems.features", "-k", named, path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
