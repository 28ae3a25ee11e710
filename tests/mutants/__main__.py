"""Draw changes of the library by a seed, and try each on the tests that run its statement.

What was tried is in `FOLDER/verdicts.jsonl`; called again, it goes on with the rest.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.mutants.mutations import MODULES, Mutation, draw
from tests.mutants.reach import COUNT, FOLDER, SEED, found_in
from tests.mutants.trial import Limits, attempt

ROOT = Path(__file__).parents[2]
#: Folders of tests that run the library in their own process, each by a run of pytest.
TESTS = (
    *("tests/registry/writing", "tests/registry/history", "tests/registry/upkeep"),
    *("tests/registry/saving/journal", "tests/registry/saving/collective"),
    *("tests/registry/saving/local", "tests/schedules", "tests/stateful"),
)


def look(folder: Path, count: int, seed: int, tests: list[str], workers: int) -> None:
    """Run the tests once, to find which of them reach which change."""
    env = {**os.environ, FOLDER: str(folder), COUNT: str(count), SEED: str(seed)}
    for path in tests:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.reach", path]
        command += ["-n", str(workers), "--dist", "loadgroup", "-p", "no:cacheprovider"]
        print(path, flush=True)
        subprocess.run(command, cwd=ROOT, env=env, check=False)


def try_all(
    folder: Path,
    drawn: list[Mutation],
    limits: Limits,
    jobs: int,
    found: list[list[tuple[float, str]]],
) -> None:
    """Try the changes that were not tried yet, several at once."""
    path = folder / "verdicts.jsonl"
    path.touch()
    done = {json.loads(line)["number"] for line in path.read_text().splitlines()}
    for module in {module for modules in MODULES.values() for module in modules}:
        importlib.import_module(f"holdfast.{module}")
    left = [number for number in range(len(drawn)) if number not in done]
    children = []
    for job in range(jobs):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        try:
            for number in left[job::jobs]:
                verdict = attempt(drawn[number], found[number], limits, ROOT)
                line = json.dumps({"number": number, **verdict.as_dict()}) + "\n"
                with path.open("a") as file:
                    file.write(line)
                print(f"{number}: {verdict.outcome}: {verdict.name}", flush=True)
            code = 0
        finally:
            os._exit(code)
    for child in children:
        os.waitpid(child, 0)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--most", type=int, help="try only so many of them")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), metavar="PATH")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw(asked.count, asked.seed)
    if not [*folder.glob("reach-*.json")]:
        look(folder, asked.count, asked.seed, asked.tests, asked.jobs)
    found = found_in(folder, len(drawn))
    try_all(folder, drawn[: asked.most], Limits(), asked.jobs, found)
    verdicts = [json.loads(line) for line in (folder / "verdicts.jsonl").read_text().splitlines()]
    print(dict(Counter(one["outcome"] for one in verdicts)))
    for one in verdicts:
        if one["outcome"] not in ("killed", "out of time"):
            print(f"{one['outcome']}: line {one['line']}: {one['name']}")


if __name__ == "__main__":
    main()
