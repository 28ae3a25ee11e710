"""Faults of one feature each, and the tests of the rows of `docs/systems.md` that notice them.

Each document has a module; a test that several documents name stands in that of the first of them.

As a plugin of pytest (`-p tests.systems.faults`) it runs each test as it is, which lives the
story of its file, and then once with each fault that names it; such a run passes if the test fails.
`test_mutants.py` does so for every file. A process that such a test starts has the fault, too, if
it calls `mutants.make_named`. A fault that has to be there while the story is lived
(`Lived`) gets a process of its own, as those of `mutants.py` do.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest

from tests.systems.faults import adr004, andrea, cobre, hydra, thalia
from tests.systems.faults.form import Lived
from tests.systems.mutants import VARIABLE, Mutant

ROOT = Path(__file__).parents[3]
#: Errors of a fault that fits the library no more.
_UNFIT = (TypeError, AttributeError, NameError, ImportError)
_NOT_NOTICED = (KeyboardInterrupt, SystemExit, pytest.skip.Exception)
#: Each fault with the tests that notice it, by file.
FEATURES: dict[Mutant, dict[str, list[str]]] = {}
for _table in (hydra.FAULTS, adr004.FAULTS, andrea.FAULTS, cobre.FAULTS, thalia.FAULTS):
    for _fault, _files in _table:
        for _path, _names in _files.items():
            FEATURES.setdefault(_fault, {}).setdefault(_path, []).extend(_names)


def noticing(fault: Mutant, path: str) -> dict[str, str]:
    """Return the tests of a file that notice a fault, each with the parameter that is needed."""
    named = (one.rstrip("]").partition("[") for one in FEATURES[fault].get(path, ()))
    return {name: kind for name, _, kind in named}


def _path_of(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT).as_posix()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test as it is, and with each of its faults."""
    path, name = _path_of(metafunc.definition), metafunc.function.__name__
    made = [one for one in FEATURES if name in noticing(one, path) and not isinstance(one, Lived)]
    faults = [None, *made]
    metafunc.fixturenames.append("fault")
    metafunc.parametrize("fault", faults, ids=lambda one: one.fault if one else "sound")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what a fault does to other parameters of a test than `test_name[parameter]`."""

    def stays(item: pytest.Item) -> bool:
        fault = item.callspec.params["fault"]
        return fault is None or noticing(fault, _path_of(item))[item.originalname] in item.name

    items[:] = filter(stays, items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Make the fault while the test itself runs; the test has to fail."""
    fault = item.callspec.params.get("fault")
    if fault is None:
        return (yield)
    module = importlib.import_module(f"holdfast.{fault.module}")
    *above, last = fault.name.split(".")
    owner = attrgetter(".".join(above))(module) if above else module
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, last, fault.change(inspect.getattr_static(owner, last)))
        patch.setenv(VARIABLE, fault.fault)  # for the processes that the test starts
        try:
            yield
        except _UNFIT:
            raise
        except BaseException as noticed:
            if isinstance(noticed, _NOT_NOTICED):
                raise
            return None
    raise AssertionError(f"{fault.fault}: nothing noticed")
