"""The versions that scripts/setup installs: one for each dependency, within its range."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
#: Installed by its version, before the others (scripts/setup says why).
APART = {"torch", "holdfast-registry"}


def pins() -> dict[str, str]:
    text = (ROOT / "scripts" / "pins.txt").read_text()
    row = r"([a-z0-9.-]+)==([A-Za-z0-9.]+)( ; [^@\\]+)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n"
    parsed = list(re.finditer(row, text))
    assert "".join(match[0] for match in parsed) == text, (
        "a line that is not NAME==VERSION, a marker at most, and hashes"
    )
    return {match[1]: match[2] for match in parsed}


def test_each_dependency_is_pinned_to_a_version_that_its_range_admits() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        named += extra
    versions = pins()
    wanted = [Requirement(line) for line in named]
    checked = [one for one in wanted if canonicalize_name(one.name) not in APART]
    assert len(checked) > 20
    for one in checked:
        assert one.specifier.contains(versions[canonicalize_name(one.name)]), str(one)


def test_torch_and_what_it_brings_are_left_to_the_set_up() -> None:
    brought = ("nvidia-", "cuda-")
    assert not [name for name in pins() if name in APART or name.startswith(brought)]
    assert '"torch==' in (ROOT / "scripts" / "setup").read_text()


@pytest.mark.xdist_group("one worker")
def test_tests_of_a_group_go_to_one_worker(request: pytest.FixtureRequest) -> None:
    """Groups are part of the names by which pytest-xdist deals tests out."""
    dealt_by_group = getattr(request.config.option, "loadgroup", False)
    assert request.node.nodeid.endswith("@one worker") == dealt_by_group
