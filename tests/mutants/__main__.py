"""Draw changes of the library by a seed, and try each on the tests that run its statement.

What was tried is in `FOLDER/verdicts.jsonl`; called again, it goes on with the rest. Called again
with more `--seconds`, it tries those that survived on more of their tests.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from tests.mutants.mutations import MODULES, draw
from tests.mutants.survivors import SURVIVORS
from tests.mutants.trial import Limits, Trials, verdicts_in
from tests.support.processes import address_of_server, use_server

ROOT = Path(__file__).parents[2]
#: Tests that run the library in their own process.
TESTS = (
    *("tests/registry/writing", "tests/registry/history", "tests/registry/upkeep"),
    *("tests/registry/saving/journal", "tests/registry/saving/collective"),
    *("tests/registry/saving/local", "tests/registry/test_sync.py", "tests/stateful"),
    *("tests/registry/store", "tests/registry/curation/test_dropping.py"),
    "tests/registry/test_full_disk.py",
    *("tests/schedules/test_schedules.py", "tests/schedules/test_collective.py"),
    *("tests/crash/test_store_calls.py", "tests/crash/test_journal.py"),
)


def tell(folder: Path) -> None:
    """Print what became of the changes, by part, and those that no test has noticed."""
    verdicts = sorted(verdicts_in(folder).values(), key=lambda one: one.name)
    for part, modules in MODULES.items():
        mine = [one.outcome for one in verdicts if one.name.partition(":")[0] in modules]
        print(f"{part}: {len(mine)} tried: {dict(Counter(mine))}")
    for one in verdicts:
        if one.outcome in ("survived", "not reached"):
            explained = ", explained" * (one.name in SURVIVORS)
            print(f"{one.outcome} {one.tests} of {one.reaching} tests{explained}: ", end="")
            print(f"line {one.line}: {one.name}")
        else:
            print(f"{one.outcome}: line {one.line}: {one.name}")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--most", type=int, help="try only so many of them")
    parser.add_argument("--seconds", type=float, default=10.0, help="of tests for each")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), metavar="PATH")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    tests = [ROOT / one for one in asked.tests]
    limits = Limits(asked.seconds)
    use_server(address_of_server())  # for all trials
    Trials(folder, draw(asked.count, asked.seed), limits, asked.jobs, tests, asked.most).run()
    tell(folder)


if __name__ == "__main__":
    main()
