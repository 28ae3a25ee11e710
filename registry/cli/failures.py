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
| 130, 143, 141 | interrupted, terminated, or the reader of the output went away: 128 + signal |
"""

from __future__ import annotations

import re
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import typer

from holdfast.backends.escape import printable
from holdfast.registry.cli import terminal
from holdfast.registry.cli.terminal import INTERRUPTED, Terminated
from holdfast.registry.errors import IntegrityError, RegistryError, StorageError

# The words of the command line for messages of the library, whose hints name calls of Python.


_MONITOR = "`--monitor loss:min`, or another METRIC:min or METRIC:max"
_RETRAIN = "Continue its training, which restores its newest checkpoint."
#: What the library says, and what a command says; `X` stands for any value.
_WORDS = {
    "such as Retention(last=3, best=1)": "such as `--last 3`",
    "Pass monitor=Monitor(metric=..., mode=...) to": f"Give {_MONITOR}, to",
    "with monitor=Monitor(metric='loss', mode='min'), or pass one.": f"with {_MONITOR}.",
    "Continue it with reg.run(id), or choose another name.": "Choose another name.",
    "reg.stored(ref) returns it, with `load` and `load_into`.": "`holdfast show` describes it, and "
    "`holdfast pull` writes it to a file.",
    "Reopen it with `run.set_status('running')`, or create": "Create",
    "Call `registry.fork` with": "Call `holdfast run fork` with",
    "Call `run.restore()` to continue there.": _RETRAIN,
    "Call `run.restore()` to continue from its newest checkpoint.": _RETRAIN,
    "Call `run.restore()` first, or create another run.": "Give a later step, or another run.",
    "To continue from an earlier checkpoint, call `run.restore()` first; it supersedes the later "
    "ones. Otherwise use": "Use",
    "To go back, call `run.restore(at=...)` with a checkpoint of that phase.": "Use another run.",
    "Name one: layout=...": "Name one by `--layout`.",
    "`run.evicted()` returns the evicted one: until it is collected it can be loaded, and saved at "
    "another step.": "Name those that shall come back, without this one.",
    "Its ratings stay: `run.pool.history(X)`.": "Its ratings stay in `holdfast log`.",
    ", or pass allow_nonfinite=True": "",
    "Save it with allow_nonfinite=True if you want it anyway.": "Choose another checkpoint.",
    "Guard the call: `if rank == 0: run.save(...)`. Every": "Run it on rank 0 alone. Every",
    "Load fewer components with only=[...].": "Choose components by `--only`.",
    "Name components by only=[...] where that is possible,": "Choose components by `--only`,",
    "Leave it out of `average`, or of `pick`.": "Leave it out of `--average`, or of `--pick`.",
    "Pass allow_lossy_optimizer=True (`--allow-lossy-optimizer`)": "Give `--allow-lossy-optimizer`",
    "Use str(key); in YAML, quote it.": "Quote it.",
    "Convert it: float(x), str(x), x.tolist().": "Write it as text, a number or a list.",
    "can be read by `load_into`": "can be read by a program",
    "boolean, None, date": "boolean, null, date",
    "Save the model with safe_serialization=True.": "Save the model as safetensors.",
    ", or load it in Python: holdfast.open(URL).checkpoint(REF).load().": ".",
    ", or load the checkpoint in Python: holdfast.open(URL).checkpoint(REF).load().": ".",
    "a state of `formats.read` of an opaque file": "a file that was pushed as an opaque one",
    "a file of torch.save(state_dict, path)": "a file of torch.save with the state of a module",
    "Save module.state_dict() instead.": "Save the state of the module instead.",
    "Save it with the state: `holdfast.formats.read(DIR)` shows its form.": "`holdfast push DIR` "
    "stores a folder with it.",
    "Call `run.wait(remote=True)` first:": "Call `holdfast journal carry` first:",
    "run.transition(X) first: it checks and records the change": "a transition first, by the "
    "training program: it checks and records the change",
    "Pass companions={X: state} once; later saves use it too.": "A training program gives it once; "
    "later saves use it too.",
    "To begin it again call `run.restore(at=...)` with": "Its training begins it again from",
}
_PATTERN = re.compile("|".join(re.escape(one).replace("X", ".*?") for one in _WORDS))


def in_commands(text: str) -> str:
    """Return a message with options and commands in place of calls."""
    return _PATTERN.sub(_replaced, text)


def _replaced(found: re.Match[str]) -> str:
    """Return the words for what was found; a pattern with a value is found by its beginning."""
    text = found[0]
    return _WORDS.get(text) or next(
        (words for one, words in _WORDS.items() if text.startswith(one.partition("X")[0])), ""
    )


DEBUG = "HOLDFAST_DEBUG"
BROKEN_PIPE = 128 + signal.SIGPIPE
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
        terminal.give_up_output()
        raise typer.Exit(BROKEN_PIPE) from error
    except Exception as error:
        if is_usage(error):
            raise
        if terminal.is_unwritten(error):
            terminal.give_up_output()
            failed = StorageError(
                "the output could not be written",
                found=error,
                hint="Everything committed before this stays.",
            )
            _report_error(failed, debug=debug)
            raise typer.Exit(failed.exit_code) from error
        _report_fault(error, debug=debug)
        raise typer.Exit(1) from error


def mark(error: RegistryError) -> str:
    """Return how a listing shows a run that failed like this."""
    return "unreadable" if isinstance(error, StorageError) else "damaged"


def end_damaged(damaged: Mapping[str, RegistryError]) -> None:
    """Report runs that could not be read on stderr, and end the command with an exit status."""
    for name, error in damaged.items():
        _print(f"{mark(error)}: {name}: {error.summary}")
    if damaged:
        for hint in dict.fromkeys(error.hint or _VERIFY for error in damaged.values()):
            _print(f"hint: {hint}")
        codes = [error.exit_code for error in damaged.values()]
        damage = IntegrityError.exit_code
        raise typer.Exit(damage if damage in codes else codes[0])


def is_usage(error: BaseException) -> bool:
    """Return whether typer reports an error itself: a wrong command line, or an exit."""
    return isinstance(error, typer.Exit | typer.Abort) or hasattr(error, "format_message")


def _report_error(error: RegistryError, *, debug: bool) -> None:
    text = str(error)
    if error.hint is not None:
        text = text.removesuffix(error.hint).removesuffix(". ")
    _print(f"error: {text}")
    for more in getattr(error, "__notes__", ()):
        _print(f"note: {more}")
    if error.hint is not None:
        _print(f"hint: {error.hint}")
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
    print(printable(in_commands(text)), file=sys.stderr)
