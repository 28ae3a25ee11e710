"""Files of a few kilobytes that once took gigabytes or hours: memory and time stay bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from holdfast.registry.values.parse_limits import VARIABLE
from tests.support import attacks

MIB = 2**20
#: So large that a careless reader needs many times of what is allowed here.
COUNT = 400_000
#: The processor time of a sound reader of one file is some seconds at most.
MOST_S = 100
#: Reads files in every way, each in a process of its own; prints a line of JSON for each: its name,
#: by how many MiB the process grew, and what came of it.
_PROGRAM = """
import json, os, resource, sys
from pathlib import Path
from holdfast.registry import formats
from holdfast.registry.errors import RegistryError
from holdfast.registry.formats.table import FORMATS

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

def attempt(act):
    try:
        return str(act())[:200]
    except RegistryError as error:
        return type(error).__name__ + " " + str(error)[:200]

def look(path):
    before = peak()
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_S, MOST_S))
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    said = [
        attempt(lambda: formats.detect(path)),
        attempt(lambda: formats.inspect(path)),
        attempt(lambda: formats.read(path, portable=True) and "read"),
        attempt(lambda: formats.validate(path)),
    ]
    print(json.dumps([Path(path).name, peak() - before, said]), flush=True)

for one in FORMATS:
    assert one.module
for path in sys.argv[1:]:
    child = os.fork()
    if not child:
        look(path)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, list[str]]]:
    """By how many MiB reading each file lets a process grow, and what it says."""
    folder = tmp_path_factory.mktemp("bombs")
    paths = [str(attacks.planted(name, COUNT, folder)) for name in attacks.FILES]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.replace("MOST_S", str(MOST_S)), *paths],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, VARIABLE: str(64 * MIB)},
    )
    rows = map(json.loads, done.stdout.splitlines())
    return {name: (grown, said) for name, grown, said in rows}


@pytest.mark.xdist_group("file_bombs")
@pytest.mark.parametrize("name", attacks.FILES)
def test_memory_and_time_stay_in_proportion(
    name: str, seen: dict[str, tuple[int, list[str]]]
) -> None:
    grown, said = seen[name]  # a process that ran out of memory or time has said nothing
    assert len(said) == 4
    length = len(attacks.FILES[name](COUNT))
    assert grown < 200 + 12 * length // MIB, said
