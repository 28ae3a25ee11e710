"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from registry import environment

pytest_plugins = ["tests.servers.fixtures"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the storm: it takes a minute of waiting, which the other tests fill."""
    items.sort(key=lambda item: "tests/storm/" not in item.nodeid)


@pytest.fixture(scope="session", autouse=True)
def git_is_asked_once() -> Iterator[None]:
    """Ask git about this checkout once: thousands of runs begin in it, and each would ask twice."""
    ask, checkout = environment._git, Path.cwd()
    told: dict[tuple[str, ...], str] = {}

    def remembering(*arguments: str) -> str:
        if Path.cwd() != checkout:
            return ask(*arguments)
        question = (os.environ.get("PATH", ""), *arguments)
        if question not in told:
            told[question] = ask(*arguments)
        return told[question]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "_git", remembering)
        yield
