"""Run the commands of docs/evidence.md, and print what they count as rows of its table."""

from __future__ import annotations

import datetime as dt
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Seconds after which a command is stopped: then its row says so.
LIMIT_S = 600


@dataclass(frozen=True)
class Row:
    """What is counted, and how.

    Attributes:
        name: What is counted.
        sample: The command of the sample; `pytest` and its arguments, or a program.
        whole: The command of all of it.
        count: A pattern, whose group is a number that is added, or an outcome that is counted.
    """

    name: str
    sample: str
    whole: str
    count: str


ROWS = (
    Row(
        "model states",
        "pytest -n0 -s tests/model/test_in_step.py tests/model/test_durability.py",
        "pytest -n0 -s -m 'soak or not soak' tests/model",
        r"(\d+) states",
    ),
    Row(
        "schedules",
        "pytest -n0 -s tests/schedules/test_collective.py -k 'few_preemptions and misses'",
        "sh scripts/soak -n0 -s tests/schedules",
        r"schedules=(\d+)",
    ),
    Row(
        "crash points",
        "pytest -n0 -s tests/crash/test_store_calls.py -k 'test_death_at_every_call and memory'",
        "sh scripts/soak -n0 -s tests/crash/test_store_calls.py -k test_death_at_every_call",
        r"died at (\d+) points",
    ),
    Row(
        "faults: calls without an answer",
        "pytest -n0 -s tests/crash/test_store_calls.py -k 'test_no_answer_at_every_call'",
        "sh scripts/soak -n0 -s tests/crash/test_store_calls.py -k test_no_answer_at_every_call",
        r"no answer at (\d+) points",
    ),
    Row(
        "kills of a pusher",
        "pytest -n0 -s tests/crash/test_kill.py",
        "sh scripts/soak -n0 -s tests/crash/test_kill.py",
        r"(\d+) kills:",
    ),
    Row(
        "kills in a storm",
        "pytest -n0 -s tests/storm/test_storm.py -k test_a_storm_in_a_folder_loses_nothing",
        "sh scripts/soak -n0 -s tests/storm",
        r'"kills": (\d+)',
    ),
    Row(
        "flips: files cut, bits changed",
        "pytest -n0 -s tests/damage/test_bytes.py -k test_file_that_ends_too_early",
        "sh scripts/soak -n0 -s tests/damage/test_bytes.py -k test_flip_of_every_bit",
        r": (\d+) cases: \d+ loads refused",
    ),
    Row(
        "forgeries",
        "pytest -n0 -s tests/damage/test_forgery.py -k test_forged_fields",
        "sh scripts/soak -n0 -s tests/damage/test_forgery.py -k test_every_field_forged",
        r"\w+: (\d+) cases: \d+ refused",
    ),
    Row(
        "fuzz executions",
        "sh scripts/fuzz npz 10",
        "sh scripts/fuzz all 3600",
        r"(\d+) inputs in",
    ),
    Row(
        "races",
        "pytest -n0 tests/contention -k folder",
        "sh scripts/soak -n0 tests/contention",
        r"(\d+) passed",
    ),
    Row(
        "rare places",
        "pytest -n0 -s tests/storm/test_storm.py -k test_a_storm_in_a_folder_loses_nothing",
        "sh scripts/soak -n0 -s tests/storm tests/stateful tests/crash tests/schedules",
        r'(?m)^  "[a-z0 ]+": \d+()',
    ),
    Row(
        "steps of traces",
        "pytest -n0 -s tests/storm/test_storm.py -k test_a_storm_in_a_folder_loses_nothing",
        "sh scripts/soak -n0 -s tests/storm tests/traces",
        r'"trace: \w+": (\d+)',
    ),
    Row(
        "mutants",
        "python -m tests.mutants FOLDER --count 8 --tests tests/registry/writing",
        "python -m tests.mutants FOLDER --count 300 --seed 1",
        r"(?m)^(killed|survived|out of time|not reached)\b",
    ),
)


def words_of(command: str) -> str:
    """Return a command as it is run: with the folder that it needs."""
    return command.replace("FOLDER", tempfile.gettempdir() + f"/evidence-{os.getpid()}")


def run(command: str) -> tuple[str, bool]:
    """Run a command; return what it printed, and whether it went well."""
    try:
        done = subprocess.run(
            words_of(command),
            shell=True,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace"), False
    return done.stdout.decode(errors="replace"), done.returncode == 0


def counted(row: Row, said: str) -> int:
    """Return the number of a row: the numbers in what was printed, or how often it was said."""
    found = re.findall(row.count, said)
    return sum(int(one) if one.isdecimal() else 1 for one in found)


def shown(row: Row, said: str) -> str:
    """Return the cell of a row: its number, and of outcomes how often each was said."""
    outcomes = Counter(one for one in re.findall(row.count, said) if not one.isdecimal() and one)
    each = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.items())
    return f"{counted(row, said):,}" + f" ({each})" * bool(each)


def main(names: list[str]) -> int:
    """Print the rows; return the exit status."""
    chosen = [row for row in ROWS if not names or any(name in row.name for name in names)]
    if not chosen:
        print(f"no such row; there are: {', '.join(row.name for row in ROWS)}")
        return 2
    today = dt.datetime.now(tz=dt.UTC).date()
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    print("| what | count | command | machine, date |\n|---|---:|---|---|", flush=True)
    told: dict[str, tuple[str, bool]] = {}
    failed = 0
    for row in chosen:
        if row.sample not in told:
            told[row.sample] = run(row.sample)
        said, is_well = told[row.sample]
        count = counted(row, said)
        is_well = is_well and count > 0
        failed += not is_well
        number = shown(row, said) + ", FAILED" * (not is_well)
        print(f"| {row.name} | {number} | `{row.sample}` | {machine}, {today} |", flush=True)
        if not is_well:
            print(said[-3000:], file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
