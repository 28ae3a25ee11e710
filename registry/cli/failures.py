"""How a failed command ends: errors become messages and exit statuses here alone.

| status | meaning |
|---|---|
| 0 | done |
| 1 | an error that no class below covers, or a fault of Holdfast itself |
| 2 | the command line is wrong |
| 3 | an argument, file or URL is wrong |
| 4 | a name resolves to nothing, or to several things |
| 5 | somebody else got there first |
| 6 | bytes differ from those that were committed |
| 7 | the store, or a disk, failed |
| 8 | a store, format or version that cannot be used |
| 9, 10 | `file check` knows no such format; something is over the size of `du --over` |
| 130, 143, 141 | interrupted, terminated, or the reader of the output went away: 128 + signal |
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer

from holdfast.backends.escape import printable
from holdfast.registry.cli import process
from holdfast.registry.cli.process import INTERRUPTED, Terminated
from holdfast.registry.errors import AccessDenied, IntegrityError, RegistryError, StorageError

DEBUG = "HOLDFAST_DEBUG"
BROKEN_PIPE = 128 + signal.SIGPIPE
#: What a parser says, and how a command says it.
_WORDS = {
    r"Input should be a valid integer.*": "not a whole number",
    r"Input should be a valid number.*": "not a number",
    r"Input should be greater than or equal to (\S+)": r"expected \1 or more",
    r"Input should be less than or equal to (\S+)": r"expected \1 or less",
}
_VERIFY = "`holdfast verify` shows which checkpoints are affected, and how to help."


@contextmanager
def reported(*, debug: bool = False) -> Iterator[None]:
    """Turn every failure of the block into a message on stderr and an exit status."""
    try:
        yield
        sys.stdout.flush()
    except RegistryError as error:
        _report_error(error, debug=debug)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt as error:
        _print("interrupted; everything committed before this stays")
        raise typer.Exit(INTERRUPTED) from error
    except Terminated as error:
        _print(f"ended by signal {error.number}; everything committed before this stays")
        raise typer.Exit(128 + error.number) from error
    except BrokenPipeError as error:
        process.give_up_output()
        raise typer.Exit(BROKEN_PIPE) from error
    except Exception as error:
        if is_usage(error):
            raise
        failed = _of_system(error)
        if failed is not None:
            _report_error(failed, debug=debug)
            raise typer.Exit(failed.exit_code) from error
        _report_fault(error, debug=debug)
        raise typer.Exit(1) from error


def _of_system(error: Exception) -> RegistryError | None:
    """Return an error of the system as one of ours; `None` for a fault."""
    if process.is_unwritten(error):
        process.give_up_output()
        hint = "Everything committed before this stays."
        return StorageError("the output could not be written", found=error, hint=hint)
    if isinstance(error, PermissionError) and error.filename is not None:
        return AccessDenied(
            "Permission denied",
            where=error.filename,
            found=f"user id {os.geteuid()}",
            hint="Ask its owner for access.",
        )
    return None


def mark(error: RegistryError) -> str:
    """Return how a listing shows a run that failed like this."""
    return "unreadable" if isinstance(error, StorageError) else "damaged"


def end_damaged(damaged: Mapping[str, RegistryError]) -> None:
    """Report runs that could not be read on stderr, and end the command with an exit status."""
    for name, error in damaged.items():
        _print(f"{mark(error)}: {name}: {error.summary}")
    if damaged:
        for hint in dict.fromkeys(error.cli_hint or _VERIFY for error in damaged.values()):
            _print(f"hint: {hint}")
        codes = [error.exit_code for error in damaged.values()]
        damage = IntegrityError.exit_code
        raise typer.Exit(damage if damage in codes else codes[0])


def is_usage(error: BaseException) -> bool:
    """Return whether typer reports an error itself: a wrong command line, or an exit."""
    return isinstance(error, typer.Exit | typer.Abort) or hasattr(error, "format_message")


#: Options of other tools, each with ours.
_OTHERS = {"--keep": "--last", "--limit": "-n", "--output": "--to", "-o": "--to"}
_OTHERS |= {"--status": "--where", "--filter": "--where", "--total": "--free"}


def report_usage(error: Any) -> int:
    """Report a wrong command line on stderr, and return the exit status."""
    text = error.format_message()
    if text.startswith("Usage: "):  # the help of a group, which was called without a command
        print(text, file=sys.stderr)
    else:
        text = text.removeprefix("Invalid value: ")
        for parsers, ours in _WORDS.items():
            text = re.sub(parsers, ours, text)
        other = _OTHERS.get(text.removeprefix("No such option: ").partition(" ")[0])
        known = error.ctx.command.params if error.ctx is not None else ()
        if other and any(other in one.opts for one in known):
            text = f"{text.partition(' (')[0]}: use `{other}`"
        _print(f"error: {text[:1].lower()}{text[1:].removesuffix('.')}")
        if error.ctx is not None:
            _print(f"hint: {_usage_hint(error, text)}")
    return int(error.exit_code)


def _usage_hint(error: Any, text: str) -> str:
    """Return the next step after a wrong command line."""
    path, command = error.ctx.command_path, error.ctx.command
    if text.startswith("Missing option '--registry'"):
        return "Give -r PATH, or set HOLDFAST_REGISTRY; `holdfast init PATH` creates a registry."
    option = getattr(error, "option_name", "")
    if option and hasattr(command, "commands"):
        return f"Options of a command come after its name: `{path} COMMAND {option}`."
    words = (one.metavar or "" for one in command.params if one.param_type_name == "argument")
    if option and any("CMD" in one for one in words):
        return f"Write -- before CMD if {option} is its own; `{path} --help` describes the others."
    return f"`{path} --help` describes it."


def _report_error(error: RegistryError, *, debug: bool) -> None:
    _print(f"error: {error.summary}")
    for more in getattr(error, "__notes__", ()):
        _print(f"note: {more}")
    if error.cli_hint is not None:
        _print(f"hint: {error.cli_hint}")
    if debug:
        _trace(error)


def _report_fault(error: Exception, *, debug: bool) -> None:
    if debug:
        _trace(error)
        return
    if isinstance(error, MemoryError) or str(error) == "can't start new thread":
        _print(f"error: the system gave no more memory or threads; found {error or 'MemoryError'}")
        _print(
            "hint: Raise the limits of the process or its container. Look at `run show` before "
            "you repeat a command that writes."
        )
        return
    _print(f"error: a fault of holdfast itself: {type(error).__name__}: {error}")
    _print(f"hint: Run it again with {DEBUG}=1 and report what it prints.")


def _trace(error: Exception) -> None:
    # Errors of other libraries, the causes of ours, repeat their input without escaping it.
    print(printable("".join(traceback.format_exception(error)), spare="\n"), file=sys.stderr)


def _print(text: str) -> None:
    print(printable(text), file=sys.stderr)
