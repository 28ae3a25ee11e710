"""The types of the fixtures, and the parts that tests of several commands share."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from click.testing import Result

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


class Terminal(io.StringIO):
    """A text that says it is a terminal."""

    def isatty(self) -> bool:
        return True
