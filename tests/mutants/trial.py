"""Try a change: run the tests that reach it in a process of its own, until one of them fails."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import pytest

from tests.mutants.mutations import Mutation
from tests.support.rewriting import target

Outcome = Literal["killed", "out of time", "survived", "not reached"]


#: How pytest ends when it was called wrong, or found no test.
_NOT_RUN = (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)


@dataclass(frozen=True)
class Verdict:
    """What became of a change.

    Attributes:
        name: Of the mutation.
        line: Where it is.
        outcome: `killed` by a test that failed, `out of time` if the tests took far longer than
            without the change, `survived`, or `not reached` by any test.
        tests: How many tests were chosen, of how many that reach it.
        reaching: How many tests reach it.
        by: What the tests said last.
    """

    name: str
    line: int
    outcome: Outcome
    tests: int
    reaching: int
    by: str = ""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Limits:
    """How much is tried for one change.

    Attributes:
        seconds: Of tests, by the time that they take without the change.
        tests: The most tests.
        slower: How many times as long they may take, and not less than `least_s`.
        least_s: See `slower`.
    """

    seconds: float = 20.0
    tests: int = 60
    slower: float = 10.0
    least_s: float = 120.0


def chosen(reaching: Sequence[tuple[float, str]], limits: Limits) -> list[tuple[float, str]]:
    """Return the shortest tests, as many as the limits allow, and one in any case."""
    taken: list[tuple[float, str]] = []
    for seconds, test in reaching[: limits.tests]:
        if taken and sum(one for one, _ in taken) + seconds > limits.seconds:
            break
        taken.append((seconds, test))
    return taken


def attempt(
    mutation: Mutation, reaching: Sequence[tuple[float, str]], limits: Limits, root: Path
) -> Verdict:
    """Run the tests that reach a change, with it."""
    tests = chosen(reaching, limits)
    told = (mutation.name, mutation.line)
    if not tests:
        return Verdict(*told, "not reached", 0, 0)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.setpgid(0, 0)  # with what its tests start
        os.close(reading)
        _run(mutation, [test for _, test in tests], writing, root)
    os.close(writing)
    usual_s = sum(seconds for seconds, _ in tests)
    outcome, by = _await(child, reading, max(limits.least_s, limits.slower * usual_s))
    return Verdict(*told, outcome, len(tests), len(reaching), by)


def _run(mutation: Mutation, tests: Sequence[str], writing: int, root: Path) -> None:
    """Be the process that runs tests, folder by folder: conftests of several do not mix."""
    code = 70
    said = io.StringIO()
    try:
        os.chdir(root)
        target(mutation.module, mutation.function).__code__ = mutation.code()
        folders: dict[str, list[str]] = {}
        for test in tests:
            folders.setdefault(test.partition("::")[0].rpartition("/")[0], []).append(test)
        code = 0
        for some in folders.values():
            with redirect_stdout(said), redirect_stderr(said):
                options = ["-q", "-x", "-n0", "-p", "no:cacheprovider"]
                code = int(pytest.main([*options, *some]))
            if code:
                break
    except BaseException as error:
        said.write(f"\n{type(error).__name__}: {error}")
    finally:
        os.write(writing, said.getvalue().encode()[-60_000:])
        os._exit(code)


def _await(child: int, reading: int, limit_s: float) -> tuple[Outcome, str]:
    """Wait for the process; return what it found, and its last line."""
    until = time.monotonic() + limit_s
    os.set_blocking(reading, False)
    said, status = b"", None
    while status is None and time.monotonic() < until:
        with suppress(BlockingIOError):
            said += os.read(reading, 65_536)
        done, found = os.waitpid(child, os.WNOHANG)
        status = found if done else None
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
        return "out of time", f"after {limit_s:.0f} s"
    with suppress(BlockingIOError):
        said += os.read(reading, 65_536)
    os.close(reading)
    lines = [one for one in said.decode(errors="replace").splitlines() if one.strip()]
    failed = [one for one in lines if one.startswith(("FAILED", "ERROR", "E  "))]
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return "survived", lines[-1] if lines else ""
    assert code not in _NOT_RUN, said.decode(errors="replace")
    return "killed", (failed or lines or [f"ended with {code}"])[-1][:200]
