"""Slow tests, and the cases of tests with many of them, take turns in the check.

A run of all tests tries one in four of them, at least one of each test and of each folder: another
one with every third commit, as Python changes with every commit (`.ci/run`). The others are marked
for `scripts/soak`. A run that is given paths tries them all, such as `sh scripts/check tests`.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ONE_IN = 4
#: A test with fewer cases is tried with all of them.
MANY = 6
#: The tests that take most of the time, slowest first, but for those of the promises: those have
#: every turn. `scripts/slow` writes it.
SLOW = Path(__file__).parents[1] / "slow.txt"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker whose turn it is."""
    node.workerinput["turn"] = _turn(node.config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark for the soak what does not have its turn."""
    settings = getattr(config, "workerinput", None)
    turn = settings["turn"] if settings else _turn(config)
    if turn is not None:
        for item in waiting(items, SLOW.read_text().split(), turn):
            item.add_marker(pytest.mark.soak)


def waiting(items: Iterable[Any], slow: list[str], turn: int) -> list[Any]:
    """Return the tests that do not have their turn."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("soak") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    groups = defaultdict(list)
    for test, its in cases.items():
        if len(its) >= MANY:
            # In the order of their parameters, one of four could be all those of one store.
            its.sort(key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
            groups[test] = [[case] for case in its]
    for test in slow:
        if test in cases and test not in groups:
            groups[test.partition("::")[0].rpartition("/")[0]].append(cases[test])
    waits = []
    for group in groups.values():
        turns = min(ONE_IN, len(group))
        waits += [one for n, them in enumerate(group) if n % turns != turn % turns for one in them]
    return waits


def _turn(config: pytest.Config) -> int | None:
    """Return whose turn it is in a run of all tests: by the number of commits, if git knows it."""
    whole = config.args_source is not pytest.Config.ArgsSource.ARGS
    return _commits() // 3 % ONE_IN if whole else None


@cache
def _commits() -> int:
    asked = subprocess.run(
        ["git", "rev-list", "--count", "HEAD"], capture_output=True, text=True, check=False
    )
    return int(asked.stdout or 0)
