"""What all tests share."""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.registry.values import environment
from tests.support.places import PLACES
from tests.support.processes import address_of_server, use_server
from tests.support.sometimes import Watch

pytest_plugins = ["tests.servers.fixtures", "tests.support.browsing", "tests.support.turns"]

# There is none while modules are imported and tests collected, and much to look through.
gc.disable()


#: They take long or wait much, which the other tests fill; at the end no worker waits for another.
_FIRST = (
    *("tests/storm/", "tests/test_example.py", "tests/contention/", "tests/systems/circle/"),
    *("tests/damage/test_file_bombs.py", "tests/test_scripts.py", "tests/docs/test_site.py"),
    *("tests/crash/", "tests/schedules/", "tests/stateful/", "tests/backends/"),
)


#: Longer texts in the id of a test are cut: some tests try texts of megabytes.
_ID_CHARS = 200
#: Fixtures and parameters of the tests that need an emulator, which takes long to start.
_EMULATORS = {
    "azurite": ("azurite", "azure_url", "adlfs", "azure"),
    "fake_gcs": ("fake_gcs", "gs_url", "gcsfs", "google"),
}


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Start one server of processes for all workers; it gets ready while they collect."""
    node.workerinput["server_of_processes"] = address_of_server()


def pytest_configure(config: pytest.Config) -> None:
    """Let a worker start processes at the server of this run."""
    if settings := getattr(config, "workerinput", None):
        use_server(settings["server_of_processes"])


def pytest_make_parametrize_id(val: object) -> str | None:
    """Give a test with a long text a short id; pytest numbers those that are alike."""
    if isinstance(val, str | bytes) and len(val) > _ID_CHARS:
        return f"{val[: _ID_CHARS // 4]!r} and {len(val)} in all"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that take long, and let one worker start each emulator."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            given = getattr(item, "callspec", None)
            params = given.params.values() if given else ()
            names = {one for one in params if isinstance(one, str)}
            names.update(getattr(item, "fixturenames", ()))
            for emulator, users in _EMULATORS.items():
                if not names.isdisjoint(users):
                    item.add_marker(pytest.mark.xdist_group(emulator))
                    break

    def turn(item: pytest.Item) -> int:
        turns = (n for n, one in enumerate(_FIRST) if item.nodeid.startswith(one))
        return next(turns, len(_FIRST))

    items.sort(key=turn)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that has not been at the rare places that it is marked with."""
    names = [name for marker in item.iter_markers("sometimes") for name in marker.args]
    if not names:
        yield
        return
    places = {name: PLACES[name] for name in names}
    with (
        tempfile.TemporaryDirectory() as folder,
        Watch(Path(folder), places, is_here=True) as watch,
    ):
        yield
        watch.check()


def pytest_collection_finish() -> None:
    """Look for garbage in what tests make, and not in all the modules and tests again and again."""
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def states_are_kept_apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never touch the user's own state folder; processes that tests start inherit this."""
    folder = tmp_path_factory.mktemp("state")
    os.environ["XDG_STATE_HOME"] = str(folder)  # for good: some things are written at the very end
    return folder


@pytest.fixture(autouse=True)
def nothing_is_remembered(
    states_are_kept_apart: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Let a test remember no head of another: some make registries at the same place."""
    name = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]
    monkeypatch.setenv("XDG_STATE_HOME", str(states_are_kept_apart / name))


@pytest.fixture(autouse=True)
def runs_end_with_their_test() -> Iterator[None]:
    """Leave no run to the end of the process, where its store is gone."""
    yield
    if ending := sys.modules.get("holdfast.registry.saving.ending"):
        ending.forget_all()


@pytest.fixture(scope="session", autouse=True)
def git_is_asked_once() -> Iterator[None]:
    """Ask git about this checkout once: thousands of runs begin in it."""
    ask, checkout = environment._git_commit, Path.cwd()
    told: dict[str, str] = {}

    def remembering() -> str:
        if Path.cwd() != checkout:
            return ask()
        path = os.environ.get("PATH", "")
        if path not in told:
            told[path] = ask()
        return told[path]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "_git_commit", remembering)
        yield
