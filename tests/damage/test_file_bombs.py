"""Files of a few kilobytes that once took gigabytes or hours: memory and time stay bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.backends.limits import VARIABLE
from tests.support import attacks

MIB = 2**20
#: So large that a careless reader needs many times of what is allowed here.
COUNT = 100_000
#: What reads pickles reads those of deltas as well: two of them in every run, the others by a soak.
AGAIN = {
    name
    for name in attacks.FILES
    if name.endswith(".delta.thalia.zst") and not name.startswith(("sets.", "wide-int."))
}
#: The processor time of a sound reader of one file is a second or two.
MOST_S = 20
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


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(attacks.FILES.keys() - AGAIN, id="each once"),
        pytest.param(AGAIN, id="those of deltas", marks=pytest.mark.soak),
    ],
)
def test_memory_and_time_stay_in_proportion(names: set[str], tmp_path: Path) -> None:
    paths = [attacks.planted(name, COUNT, tmp_path) for name in sorted(names)]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.replace("MOST_S", str(MOST_S)), *paths],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, VARIABLE: str(16 * MIB)},
    )
    seen = {name: (grown, said) for name, grown, said in map(json.loads, done.stdout.splitlines())}
    # A process that ran out of memory or time has said nothing.
    assert seen.keys() == names
    for path in paths:
        grown, said = seen[path.name]
        assert len(said) == 4, path.name
        assert grown < 50 + 12 * path.stat().st_size // MIB, (path.name, grown, said)
