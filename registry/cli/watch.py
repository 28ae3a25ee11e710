"""`watch`: a command run for each checkpoint of a run, as they come."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated

import typer

from registry.checkpoint import Checkpoint
from registry.cli import options, output
from registry.errors import InvalidInput, RegistryError
from registry.registry import open  # noqa: A004
from registry.watching import Watch

# What a command that is told to end may take to tidy up, before it is killed.
_GRACE_S = 10
_PLACE = re.compile(r"\{(ref|id|run|step|phase)\}")


def watch(
    run: options.Run,
    registry: options.Registry,
    *,
    command: Annotated[
        str, typer.Option("--exec", metavar="CMD", help="What to run; {ref} is the checkpoint.")
    ],
    phase: Annotated[
        str | None, typer.Option("--phase", metavar="NAME", help="Only this phase's.")
    ] = None,
    group: Annotated[
        str, typer.Option("--group", metavar="NAME", help="Followers that share the work out.")
    ] = "default",
    follower: Annotated[
        str | None,
        typer.Option("--follower", metavar="NAME", help="Goes on with what it held; random."),
    ] = None,
    hold: Annotated[
        float,
        typer.Option("--hold", metavar="SECONDS", help="How long nobody else takes a checkpoint."),
    ] = 3600,
    attempts: Annotated[
        int, typer.Option("--attempts", min=1, metavar="N", help="Tries for each checkpoint.")
    ] = 3,
    once: Annotated[
        bool, typer.Option("--once", help="Only what is there now; do not wait for more.")
    ] = False,
) -> None:
    """Run a command for each checkpoint, as they come.

    Followers of one group share the checkpoints out: each is done at least once, and again by
    another follower where one dies over it. In the command {ref}, {id}, {run}, {step} and {phase}
    stand for the checkpoint; it is run without a shell. Exit status 0 means done.
    """
    words = _split(command)
    with open(registry) as opened:
        coming = opened.run(run).watch(
            phase, group=group, follower=follower, hold_s=hold, follow=not once
        )
        done = 0
        for checkpoint in coming:
            _attend(coming, checkpoint, words, registry, attempts)
            done += 1
    output.note(f"{output.counted(done, 'checkpoint')} done; no more will come")


def _split(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise typer.BadParameter(f"--exec {command!r}: {error}") from None
    if not words:
        raise typer.BadParameter("--exec names no command")
    if not _PLACE.search(words[0]) and shutil.which(words[0]) is None:
        raise _not_startable(words[0], "no such command")
    return words


def _attend(
    coming: Watch, checkpoint: Checkpoint, words: Sequence[str], registry: str, attempts: int
) -> None:
    """Run the command for a checkpoint until it succeeds.

    Raises:
        RegistryError: It does not; the checkpoint is then not acknowledged.
    """
    values = _values(checkpoint)
    arguments = [_PLACE.sub(lambda place: values[place[1]], word) for word in words]
    named = {f"HOLDFAST_{name.upper()}": value for name, value in values.items()}
    environment = {**os.environ, **named, "HOLDFAST_REGISTRY": registry}
    for attempt in range(1, attempts + 1):
        if attempt > 1:
            coming.renew()
        status = _run(arguments, environment)
        if status == 0:
            output.line(f"done: {checkpoint.ref}")
            return
        output.note(f"{checkpoint.ref}: {_told(status)}, attempt {attempt} of {attempts}")
    raise RegistryError(
        "the command does not succeed, so this checkpoint is not acknowledged",
        where=checkpoint.ref,
        expected="exit status 0",
        found=f"{_told(status)}, {output.counted(attempts, 'attempt')}",
        hint="It comes again when its hold is over; a follower with a name gets it at once.",
    )


def _values(checkpoint: Checkpoint) -> dict[str, str]:
    return {
        "ref": checkpoint.ref,
        "id": checkpoint.digest.hex(),
        "run": checkpoint.run_id,
        "step": str(checkpoint.step),
        "phase": str(checkpoint.phase),
    }


def _told(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"ended by signal {-status}"


def _run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end; whatever ends this process first ends it and its children."""
    sys.stdout.flush()  # what was said before the command stands before what it says
    try:
        # A group of its own, so that what the command started can be ended with it.
        child = subprocess.Popen(
            arguments, env=environment, stdin=subprocess.DEVNULL, process_group=0
        )
    except (OSError, ValueError) as error:
        raise _not_startable(arguments[0], str(error)) from error
    try:
        return child.wait()
    except BaseException:
        _end(child)
        raise


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a command and all of its group: asked first, killed if that takes too long."""
    try:
        _signal(child, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
    finally:
        _signal(child, signal.SIGKILL)
        child.wait()


def _signal(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def _not_startable(name: str, why: str) -> InvalidInput:
    return InvalidInput(
        "the command cannot be started",
        where=name,
        found=why,
        hint="It is run without a shell: write --exec 'sh -c \"...\"' for one.",
    )
