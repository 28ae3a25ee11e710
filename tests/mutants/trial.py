"""Try changes: run the tests that reach each of them, in a process of its own, until one fails.

One run of pytest imports and collects everything once. For each change it forks a child that gives
the function its new code, and runs the tests there: a trial costs little more than its tests.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from tests.mutants.mutations import MODULES, Mutation
from tests.mutants.reach import Reach, found_in, modules_in
from tests.support.rewriting import target
from tests.support.sometimes import Watch

Outcome = Literal["killed", "out of time", "survived", "not reached"]
#: How a child ends if its tests passed, if one failed, and if they could not be run.
_PASSED, _FAILED, _NOT_RUN = 0, 1, 2
#: Tests of the first part, by their seconds: most changes are noticed by these.
_FIRST_S = 1.0


@dataclass(frozen=True)
class Verdict:
    """What became of a change.

    Attributes:
        number: Of the change.
        name: The same.
        line: Where it is.
        outcome: `killed` by a test that failed, `out of time` if the tests took far longer than
            without the change, `survived`, or `not reached` by any test.
        tests: How many tests were chosen.
        reaching: How many tests reach it.
        seconds: Of tests that it was tried for at most.
        by: The test that failed, and how.
    """

    number: int
    name: str
    line: int
    outcome: Outcome
    tests: int
    reaching: int
    seconds: float
    by: str = ""

    def is_final(self, seconds: float) -> bool:
        """Return whether more seconds of tests would find nothing else."""
        is_open = self.outcome == "survived" and self.tests < self.reaching
        return not is_open or self.seconds >= seconds


@dataclass(frozen=True)
class Limits:
    """How much is tried for one change.

    Attributes:
        seconds: Of tests, by the time that they take without the change.
        slower: How many times as long they may take, and not less than `least_s`.
        least_s: See `slower`.
    """

    seconds: float = 10.0
    slower: float = 4.0
    least_s: float = 20.0


def chosen(reaching: Sequence[tuple[float, str]], limit_s: float) -> list[tuple[float, str]]:
    """Return the shortest tests, as many as take so long, and one in any case."""
    taken: list[tuple[float, str]] = []
    for seconds, test in reaching:
        if taken and sum(one for one, _ in taken) + seconds > limit_s:
            break
        taken.append((seconds, test))
    return taken


def verdicts_in(folder: Path) -> dict[int, Verdict]:
    """Return the last verdict on each change."""
    path = folder / "verdicts.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    told = [Verdict(**json.loads(line)) for line in lines]
    return {one.number: one for one in told}


class Trials:
    """The run of pytest, of which this is a plugin.

    Args:
        folder: Keeps which tests reach which change, and the verdicts.
        drawn: The changes.
        limits: How much is tried for each.
        jobs: Trials at once.
        tests: Folders and files of tests.
        most: How many of the changes are tried; all by default.
    """

    def __init__(
        self,
        folder: Path,
        drawn: Sequence[Mutation],
        limits: Limits,
        jobs: int,
        tests: Sequence[Path],
        most: int | None = None,
    ) -> None:
        self._folder, self._drawn, self._limits = folder, drawn, limits
        self._jobs, self._tests, self._most = jobs, [one.resolve() for one in tests], most
        self._items: dict[str, pytest.Item] = {}

    def run(self) -> None:
        """Run pytest; a process does so once."""
        # One argument: pytest loses fixtures if it gets several folders.
        arguments = [os.path.commonpath(self._tests), "-q", "-s", "-n0", "-p", "no:cacheprovider"]
        code = pytest.main([*arguments, "-m", "not soak and not radosgw"], plugins=[self])
        assert code == pytest.ExitCode.OK, code

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Collect the folders and files that were asked for."""
        for one in self._tests:
            if one.is_relative_to(collection_path) or collection_path.is_relative_to(one):
                return None
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try the changes instead of running the tests."""
        self._items = {item.nodeid: item for item in session.items}
        Watch.is_on = False
        for module in {module for modules in MODULES.values() for module in modules}:
            importlib.import_module(f"holdfast.{module}")
        if not [*self._folder.glob("reach-*.json")]:
            self._share_out(self._look)
        for module in modules_in(self._folder):
            importlib.import_module(module)
        with suppress(ImportError):
            importlib.import_module("botocore.loaders")  # for a fixture of all tests
        self._share_out(self._try)
        return True

    def _share_out(self, work: Callable[[int], str]) -> None:
        """Let processes do their shares of some work."""
        children = [_fork(partial(work, job)) for job in range(self._jobs)]
        for child, reading in children:
            with os.fdopen(reading) as file:
                said = file.read()
            _, status = os.waitpid(child, 0)
            assert not status, said

    def _look(self, job: int) -> str:
        """Run a share of all tests, to find which of them reach which change."""
        files = sorted({item.path for item in self._items.values()})[job :: self._jobs]
        reach = Reach(self._drawn)
        _run([one for one in self._items.values() if one.path in files], reach)
        reach.write(self._folder / f"reach-{job}.json")
        return ""

    def _try(self, job: int) -> str:
        """Try a share of the changes that more trials may tell more of."""
        found, known = found_in(self._folder, len(self._drawn)), verdicts_in(self._folder)
        for number in range(len(self._drawn[: self._most]))[job :: self._jobs]:
            if number not in known or not known[number].is_final(self._limits.seconds):
                verdict = self._attempt(number, found[number])
                with (self._folder / "verdicts.jsonl").open("a") as file:
                    file.write(json.dumps(asdict(verdict)) + "\n")
        return ""

    def _attempt(self, number: int, reaching: Sequence[tuple[float, str]]) -> Verdict:
        """Run the tests that reach a change, with it."""
        mutation, tests = self._drawn[number], chosen(reaching, self._limits.seconds)
        outcome: Outcome = "not reached"
        by = ""
        if tests:
            limit_s = max(self._limits.least_s, self._limits.slower * sum(one for one, _ in tests))
            outcome, by = _await(*_fork(partial(self._run_with, mutation, tests)), limit_s)
        told = (outcome, len(tests), len(reaching), self._limits.seconds, by)
        return Verdict(number, mutation.name, mutation.line, *told)

    def _run_with(self, mutation: Mutation, tests: Sequence[tuple[float, str]]) -> str:
        os.setpgid(0, 0)  # with what the tests start
        target(mutation.module, mutation.function).__code__ = mutation.code()
        first = {name for _, name in chosen(tests, _FIRST_S)}
        wanted = {name for _, name in tests}
        for some in (first, wanted - first):
            items = [one for name, one in self._items.items() if name in some]
            _run(items, failures := _Failures())
            if failures.said:
                return failures.said
        return ""


class _Failures:
    """Ends a run at the first test that fails, and notes it: a plugin of pytest."""

    def __init__(self) -> None:
        self.said = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.said:
            errors = [line[1:] for line in report.longreprtext.splitlines() if line[:2] == "E "]
            self.said = f"{report.nodeid}: {(errors or ['?'])[0].strip()}"[:400]


def _run(items: Sequence[pytest.Item], plugin: Reach | _Failures) -> None:
    """Run tests in this process, with a plugin."""
    if items:
        items[0].config.pluginmanager.register(plugin)
    for item, after in zip(items, [*items[1:], None], strict=False):
        item.ihook.pytest_runtest_protocol(item=item, nextitem=after)
        if isinstance(plugin, _Failures) and plugin.said:
            with suppress(BaseException):
                item.session._setupstate.teardown_exact(None)  # ends servers of its fixtures
            break


def _fork(work: Callable[[], str]) -> tuple[int, int]:
    """Let a child work; return it, and a pipe with what the work returned, or how it failed."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    code = _NOT_RUN
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nowhere, standard)
        said = work()
        code = _FAILED if said else _PASSED
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        os.write(writing, said.encode()[:4_000])
        os._exit(code)


def _await(child: int, reading: int, limit_s: float) -> tuple[Outcome, str]:
    """Wait for a child, and end it if it takes too long; return what it found."""
    until, status = time.monotonic() + limit_s, None
    while status is None and time.monotonic() < until:
        time.sleep(0.02)
        done, found = os.waitpid(child, os.WNOHANG)
        status = found if done else None
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
        os.close(reading)
        return "out of time", f"after {limit_s:.0f} s"
    with os.fdopen(reading) as file:
        said = file.read()
    code = os.waitstatus_to_exitcode(status)
    assert code != _NOT_RUN, said
    return ("survived", "") if code == _PASSED else ("killed", said or f"ended with {code}")
