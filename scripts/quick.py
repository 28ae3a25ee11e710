"""Run the tests that the changed files reach, the nearest first, for less than a minute.

    python scripts/quick.py [--list] [FILE...]

The files that changed are those that differ from where this branch left `main`, committed or not;
FILE names others instead. A test file is the nearer, the fewer imports lead from it to the change.
A file that is no module of ours reaches the tests that name it, or else those of its folder.
"""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
TESTS = "tests"
#: The seconds after which no further test begins, and the most test files that are collected.
SECONDS, FILES = 30.0, 40


def changed_files(root: Path) -> list[Path]:
    """Return the files that differ from where the branch left `main`, and those git has not yet."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, check=False
        )
        return done.stdout.splitlines() if done.returncode == 0 else []

    base = git("merge-base", "HEAD", "main") or ["HEAD"]
    differing = git("diff", "--name-only", "--no-renames", base[0])
    named = differing + git("ls-files", "--others", "--exclude-standard")
    return [Path(name) for name in dict.fromkeys(named)]


class Reach:
    """Which test files a change reaches, and how far they are from it.

    Args:
        root: The checkout; the packages are importable from there.
        packages: The packages to look at; without them those of import-linter.
        tests: The package of the tests.
    """

    def __init__(self, root: Path, packages: Sequence[str] = (), tests: str = TESTS) -> None:
        self._root = root
        self._packages = packages or _linted(root)
        self._tests_folder = Path(tests)
        self._graph = grimp.build_graph(*self._packages, tests, cache_dir=None)

    def of(self, changed: Iterable[Path]) -> list[Path]:
        """Return the test files, the nearest first."""
        distances: dict[Path, tuple[int, bool]] = {}
        for file in changed:
            for test, distance in self._of_one(file):
                near = (distance, self._mirror(file) not in test.parents)
                distances[test] = min(near, distances.get(test, near))
        return sorted(distances, key=lambda test: (distances[test], test))

    def _of_one(self, file: Path) -> Iterator[tuple[Path, int]]:
        if _is_test(file) and (self._root / file).exists():
            yield file, -1
        yield from ((test, 0) for test in self._named_after(file))
        module = self._module(file)
        yield from self._naming(file) if module is None else self._importers(module)

    def _module(self, file: Path) -> str | None:
        """Return the name by which a file is imported; folders may be parts of a package."""
        name = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        names = [name, name.removeprefix("src."), *(f"{one}.{name}" for one in self._packages)]
        found = (one for one in names if file.suffix == ".py" and one in self._graph.modules)
        return next(found, None)

    def _importers(self, module: str) -> Iterator[tuple[Path, int]]:
        distances, queue = {module: 0}, [module]
        for one in queue:
            for importer in sorted(self._graph.find_modules_that_directly_import(one)):
                if importer not in distances:
                    distances[importer] = distances[one] + 1
                    queue.append(importer)
        for importer, distance in distances.items():
            path = Path(*importer.split(".")).with_suffix(".py")
            if _is_test(path):
                yield path, distance
            elif path.name == "conftest.py":  # nobody imports it: its fixtures serve its folder
                yield from ((test, distance + 1) for test in self._tests(path.parent))

    def _naming(self, file: Path) -> Iterator[tuple[Path, int]]:
        """Yield the tests that name a file which nobody imports, or those of its folder."""
        tests = list(self._tests(self._tests_folder))
        naming = [test for test in tests if file.name in (self._root / test).read_text()]
        yield from ((test, 1) for test in naming or self._tests(self._mirror(file)))

    def _mirror(self, file: Path) -> Path:
        """Return the folder of tests that mirrors the folder of a file."""
        is_test = file.parts[0] == self._tests_folder.name
        return file.parent if is_test else self._tests_folder / file.parent

    def _named_after(self, file: Path) -> Iterator[Path]:
        """Yield the tests of `a/b/c.py` by name: `tests/a/b/test_c.py`, and `tests/a/test_b.py`."""
        mirror = self._mirror(file)
        for test in (mirror / f"test_{file.stem}.py", mirror.with_name(f"test_{mirror.name}.py")):
            if (self._root / test).exists():
                yield test

    def _tests(self, folder: Path) -> Iterator[Path]:
        for path in sorted((self._root / folder).rglob("test_*.py")):
            yield path.relative_to(self._root)


class Deadline:
    """A plugin of pytest: the nearest files first, and no further test after some seconds."""

    def __init__(self, files: Sequence[Path], seconds: float) -> None:
        self._ranks = {file.as_posix(): rank for rank, file in enumerate(files)}
        self._seconds = seconds
        self._left = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put the nearest first; hold no test back for its waiting."""
        items.sort(key=lambda item: self._ranks.get(item.nodeid.partition("::")[0], 0))
        self._begun = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        """Pass over what would begin too late."""
        late = time.monotonic() - self._begun > self._seconds
        self._left += late
        return late or None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Tell what was not run."""
        if self._left:
            terminalreporter.write_line(
                f"quick check: {self._left} tests farther from the change were left to the full "
                f"check after {self._seconds:.0f} s"
            )


def try_in_time(files: Sequence[Path], seconds: float, *options: str) -> int:
    """Run files of tests, the nearest first; return pytest's status."""
    # pytest 9.1 loses the fixtures of a folder that its arguments leave and come back to.
    names = sorted(map(str, files))
    return pytest.main(["-q", *options, *names], plugins=[Deadline(files, seconds)])


def _linted(root: Path) -> list[str]:
    """Return the packages whose imports import-linter looks at."""
    told = tomllib.loads((root / "pyproject.toml").read_text())
    found: list[str] = told["tool"]["importlinter"]["root_packages"]
    return found


def _is_test(file: Path) -> bool:
    return file.name.startswith("test_") and file.suffix == ".py"


def main(words: Sequence[str]) -> int:
    """Run the tests, or list their files."""
    sys.path.insert(0, str(ROOT))
    changed = [Path(word) for word in words if word != "--list"] or changed_files(ROOT)
    reached = Reach(ROOT).of(changed)
    print(f"quick check: {len(changed)} files changed, {len(reached)} files of tests reached")
    if len(reached) > FILES:
        print(f"quick check: the nearest {FILES} are tried")
    files = reached[:FILES]
    if "--list" in words or not files:
        print(*files, sep="\n")
        return 0
    return try_in_time(files, SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
