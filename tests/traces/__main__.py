"""Record the calls of a program to its registries, or hold what was recorded against the model."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.registry.store import Address
from tests.traces.acceptor import Acceptor
from tests.traces.reading import read
from tests.traces.recording import Recorded


def record(folder: Path, program: str, arguments: list[str]) -> None:
    """Run a program whose stores are recorded."""
    folder.mkdir(parents=True, exist_ok=True)
    opened, place = Address.open, folder.resolve()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Address, "open", lambda address: Recorded(opened(address), place))
        patch.setattr(sys, "argv", [program, *arguments])
        patch.syspath_prepend(str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")


def check(folder: Path, url: str) -> int:
    """Check what was recorded; return the exit status."""
    calls = read(folder)
    with holdfast.open(url) as reg:
        acceptor = Acceptor(calls, reg.handle.store)
        try:
            acceptor.check()
        except AssertionError:
            print("\n".join(acceptor.violations))
            return 1
    print(f"{len(calls)} calls are what the model allows: {dict(acceptor.counts)}")
    return 0


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.traces", description=__doc__)
    acts = parser.add_subparsers(dest="act", required=True)
    recording = acts.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("program")
    recording.add_argument("arguments", nargs=argparse.REMAINDER)
    checking = acts.add_parser("check")
    checking.add_argument("folder", type=Path)
    checking.add_argument("url")
    asked = parser.parse_args()
    if asked.act == "record":
        record(asked.folder, asked.program, asked.arguments)
        return 0
    return check(asked.folder, asked.url)


if __name__ == "__main__":
    sys.exit(main())
