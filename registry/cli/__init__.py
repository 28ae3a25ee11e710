"""The command line `holdfast`: the library for a shell.

- `app`: every command by name; the module of a command is imported when the command is called.
- `command`, `options`, `opening`: the parts of a command that all commands share.
- `columns`: the columns of a list as data; which are shown, in which order, and CSV.
- `output`, `listing`, `describe`: text, bars, sparklines and JSON. `terminal`: the process itself,
  prepared before slow imports begin.
- `failures`: the one place where errors become messages and exit statuses, and where calls that the
  messages name become options and commands.

Each other module has the commands of one noun, such as `runs` or `releases`. A command decides
nothing: it calls the public methods of the library. docs/cli.md
describes the commands and their JSON, which is as fixed as an API.
"""

from __future__ import annotations

import gc
import sys
from typing import NoReturn

from holdfast.registry.cli import process
from holdfast.registry.cli.process import INTERRUPTED, Terminated, end_on_signals

__all__ = ["main"]


def main() -> None:
    """Run the command that the process was started with, and exit with its status.

    The commands are imported here, since that takes long enough to be interrupted.
    """
    try:
        end_on_signals()
        process.prepare()
        gc.disable()  # until the command is imported: a fifth of the time of `run ls`
        from holdfast.registry.cli.app import app

        app(prog_name="holdfast")
    except KeyboardInterrupt:
        _end("interrupted", INTERRUPTED)
    except Terminated as error:
        _end(f"ended by signal {error.number}", 128 + error.number)
    except OSError as error:  # of `--help`, which no command prints
        if not process.is_unwritten(error):
            raise
        process.give_up_output()
        _end(f"error: the output could not be written; found {error}", 7)


def _end(message: str, status: int) -> NoReturn:
    """Exit while no command runs; `holdfast.registry.cli.failures` reports how a command ends."""
    print(message, file=sys.stderr)
    sys.exit(status)
