"""No demand without a change to the library that makes its test fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.systems.faults import FEATURES, noticing
from tests.systems.faults.form import Lived
from tests.systems.mutants import MUTANTS, VARIABLE
from tests.systems.test_systems_doc import DOC, NAMED, names_in

DEMANDS = "tests/systems/test_demands.py"
ROOT = Path(__file__).parents[2]


def test_every_demand_has_its_mutant_and_its_row() -> None:
    assert names_in(ROOT / DEMANDS) == set(MUTANTS)
    for name, mutant in MUTANTS.items():
        assert f"`{DEMANDS}::{name}`" in DOC
        assert mutant.old is not None


def run(plugin: str, *arguments: str, timeout: float, **env: str) -> tuple[int, str]:
    """Run tests with a plugin in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-p", f"tests.systems.{plugin}", *arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.soak
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails_the_test_of_its_demand(name: str) -> None:
    code, told = run("mutants", f"{DEMANDS}::{name}", timeout=240, **{VARIABLE: name})
    assert code == 1, f"{MUTANTS[name].fault}: nothing noticed\n{told}"
    assert "1 failed" in told, told
    assert "TypeError" not in told, told  # a mutant that fits no more


#: By file, the tests that a fault of a feature fails.
NOTICING = {
    path: {name for fault in FEATURES for name in noticing(fault, path)}
    for path in sorted({path for files in FEATURES.values() for path in files})
}


def test_every_other_test_of_a_row_has_a_fault() -> None:
    rows = {one for one in NAMED if one[0] != DEMANDS}
    assert {(path, name) for path, names in NOTICING.items() for name in names} == rows
    for fault in FEATURES:
        assert fault.old is not None


@pytest.mark.soak
@pytest.mark.parametrize("path", NOTICING)
def test_a_fault_of_a_feature_fails_its_tests(path: str) -> None:
    named = " or ".join(sorted(NOTICING[path]))
    code, told = run("faults", "-k", named, path, timeout=900)
    assert code == 0, told


@pytest.mark.soak
@pytest.mark.parametrize(
    "fault", [one for one in FEATURES if isinstance(one, Lived)], ids=lambda one: one.fault
)
def test_a_fault_that_is_lived_fails_its_tests(fault: Lived) -> None:
    for path, names in FEATURES[fault].items():
        tests = [f"{path}::{name}" for name in names]
        code, told = run("mutants", *tests, timeout=600, **{VARIABLE: fault.fault})
        assert code == 1, told
        assert "passed" not in told.splitlines()[-1], told
        assert "TypeError" not in told, told
