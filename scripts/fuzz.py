"""Run fuzz targets in processes, one after another, and sum what they did (scripts/fuzz).

A process ends after some minutes and the next one begins with the inputs that it found: memory of
the fuzzer, which only grows, stays small, and a machine that stops loses little.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from holdfast.registry.formats.table import FORMATS, OPAQUE, TREE

#: Seconds of the processor in one process.
SLICE_S = 240.0
#: A status line of libFuzzer: how many branches inputs have reached, and how they combined.
STATUS = re.compile(rb"cov: (\d+) ft: (\d+)")


@dataclass
class Figures:
    """What the processes of one format did together."""

    seconds: float = 0
    inputs: int = 0
    refused: int = 0
    peak_mib: int = 0
    reached: str = "own mutations"

    def add(self, seconds: float, inputs: int, refused: int, peak_mib: int) -> None:
        """Add those of one process."""
        self.seconds += seconds
        self.inputs += inputs
        self.refused += refused
        self.peak_mib = max(self.peak_mib, peak_mib)

    def __str__(self) -> str:
        return (
            f"{self.inputs} inputs in {self.seconds:.0f} s ({self.reached}), {self.refused} "
            f"refused, peak {self.peak_mib} MiB"
        )


def fuzz(name: str, seconds: float, corpus: Path) -> int:
    """Fuzz one format; print the sums after each process.

    Args:
        name: The format.
        seconds: How long, in seconds of the processor.
        corpus: A folder for the inputs that reached something new.

    Returns:
        The exit status of the process that failed; 0 if none did.
    """
    figures = Figures()
    while (left := seconds - figures.seconds) > 0:
        part = str(min(left, SLICE_S))
        command = [sys.executable, "-m", "tests.support.fuzzing", name, part, str(corpus)]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            said = (done.stdout + done.stderr).decode(errors="replace").splitlines()
            told = "\n".join(line for line in said if " cov: " not in line)
            print(f"{name}: FAILED with status {done.returncode}\n{told}", flush=True)
            return done.returncode
        figures.add(**json.loads(done.stdout))
        for branches, features in STATUS.findall(done.stderr)[-1:]:
            figures.reached = f"{int(branches)} branches, {int(features)} features"
        print(f"{name}: {figures}, no fault", flush=True)
    return 0


def main(name: str, seconds: str, corpus: str | None = None) -> int:
    """Fuzz one format, or all of them, and return the exit status."""
    known = [one.name for one in FORMATS if one not in (TREE, OPAQUE)]
    if name not in (*known, "all"):
        sys.exit(f"no such format: {name}; one of {', '.join(known)}, or all")
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(2) as threads:
        folder = Path(corpus or temporary)
        some = known if name == "all" else [name]
        failed = threads.map(lambda one: fuzz(one, float(seconds), folder / one), some)
        return int(any(list(failed)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
