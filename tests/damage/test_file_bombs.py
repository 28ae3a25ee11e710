"""Files of a few kilobytes that once took gigabytes or hours: memory and time stay bounded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.registry.values.parse_limits import VARIABLE
from tests.support import attacks

MIB = 2**20
#: Large enough that a careless reader needs a hundred times of what is allowed here.
COUNT = 400_000
#: Reads a file in every way; prints by how many MiB the process grew, and the results.
_PROGRAM = """
import resource, sys
from holdfast.registry import formats
from holdfast.registry.errors import RegistryError
from holdfast.registry.formats.table import FORMATS

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

for one in FORMATS:
    assert one.module
path, before = sys.argv[1], peak()
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
acts = {
    "detect": lambda: formats.detect(path),
    "inspect": lambda: formats.inspect(path),
    "read": lambda: formats.read(path, portable=True) and "read",
    "validate": lambda: formats.validate(path),
}
for name, act in acts.items():
    try:
        said = act()
    except RegistryError as error:
        said = error
    print(peak() - before, name, str(said)[:300].replace(chr(10), " "))
"""


def read_apart(path: Path, most_mib: int = 64) -> list[tuple[int, str]]:
    """Return by how many MiB a process grew at most, and what came of it, for each act."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, VARIABLE: str(most_mib * MIB)},
        preexec_fn=_bounded,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-1500:]
    rows = [line.split(" ", 1) for line in done.stdout.splitlines()]
    return [(int(grown), said) for grown, said in rows]


def _bounded() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))


@pytest.mark.parametrize("name", attacks.FILES)
def test_memory_and_time_stay_in_proportion(name: str, tmp_path: Path) -> None:
    path = attacks.planted(name, COUNT, tmp_path)
    said = read_apart(path)
    assert [line.split()[0] for _, line in said] == ["detect", "inspect", "read", "validate"]
    assert said[-1][0] < 300 + 12 * path.stat().st_size // MIB, said
