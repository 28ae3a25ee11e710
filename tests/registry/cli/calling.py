"""The types of the fixtures, and the parts that tests of several commands share."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from click.testing import Result

from holdfast.registry.cli import app

Call = Callable[..., Result]
CallJson = Callable[..., Any]

#: The fields of a checkpoint as JSON.
RECORD = {
    *("ref", "id", "run", "phase", "step", "created", "size_bytes", "metrics", "meta", "marks"),
    "nonfinite",
}
HOLDFAST = [sys.executable, "-m", "holdfast.registry.cli"]


def start(command: list[str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TERM": "xterm-256color"},
    )


def walk() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each command, with the words that call it and all of its parameters."""
    for name, entry in app._later(app._COMMANDS).items():
        yield (name,), entry.whole()
    for group, (_, commands) in app._GROUPS.items():
        for name, entry in app._later(commands).items():
            yield (group, name), entry.whole()


class Terminal(io.StringIO):
    """A text that says it is a terminal."""

    def isatty(self) -> bool:
        return True
