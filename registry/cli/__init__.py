"""The command line, `holdfast`: what the library does, for a shell. `docs/cli.md` describes it."""

from __future__ import annotations

import sys

from registry.cli.app import app
from registry.cli.failures import end_on_signals

__all__ = ["app", "main"]


def main() -> None:
    """Run the command that the process was started with, and exit with its status."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal of another encoding gets escapes, not a fault.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    end_on_signals()
    app(prog_name="holdfast")
