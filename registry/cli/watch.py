"""`watch`: a command run for each checkpoint of a run, as they come."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated

import typer

from registry.checkpoint import Checkpoint
from registry.cli import describe, options, output
from registry.errors import InvalidInput, NotFound, RegistryError
from registry.plain import check_phase
from registry.registry import open  # noqa: A004
from registry.run import Run
from registry.state import RunManifest
from registry.suggest import near
from registry.watching import Watch

# What a command that is told to end may take to tidy up, before it is killed.
_GRACE_S = 10
# `${name}` is a shell's, where the command is one; `{{name}}` stands for `{name}` itself.
_PLACE = re.compile(r"\{\{(?P<kept>[A-Za-z_]+)\}\}|(?<!\$)\{(?P<name>[A-Za-z_]+)\}")
_NAMES = ("ref", "id", "run", "step", "phase")


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
    stand for the checkpoint, {{ref}} for {ref} itself; it is run without a shell. Exit status 0
    means done.
    """
    words = _split(command)
    with open(registry) as opened:
        followed = opened.run(run)
        coming = followed.watch(phase, group=group, follower=follower, hold_s=hold, follow=not once)
        if phase is not None:
            _check_phase(followed, check_phase(phase), follow=not once)
        done = 0
        for checkpoint in coming:
            _attend(coming, checkpoint, words, registry, attempts)
            done += 1
        held = _held_elsewhere(followed.manifest, coming, phase) if once else ""
    output.note(f"{output.counted(done, 'checkpoint')} done; {held or 'no more will come'}")


def _check_phase(run: Run, phase: str, *, follow: bool) -> None:
    """Say that a run without declared phases has nothing of this one: it may be mistyped.

    Who waits may wait for a phase that is yet to come, so there it is a note.

    Raises:
        NotFound: Nobody waits.
    """
    known = list(dict.fromkeys(one.phase for one in run.manifest.checkpoints))
    if phase in known or run.spec.phases:
        return
    error = NotFound(
        "no checkpoint of this phase yet",
        where=f"{run.id}: phase {phase}",
        found=f"phases {', '.join(known)}" if known else "no checkpoints",
        hint=near(phase, known),
    )
    if not follow:
        raise error
    output.note(f"waiting: {error}")


def _held_elsewhere(state: RunManifest, coming: Watch, phase: str | None) -> str:
    """Return how many checkpoints other followers of the group hold, and until when.

    At the end of its loop this one holds none.
    """
    chosen = {one.n for one in state.live(None if phase is None else check_phase(phase))}
    now_ms = time.time() * 1000
    ends = [
        claim.until_ms
        for claim in state.group(coming.group).claims
        if claim.checkpoint in chosen and claim.until_ms > now_ms
    ]
    if not ends:
        return ""
    by = "another follower" if len(ends) == 1 else "other followers"
    return f"{len(ends)} held by {by} until {output.time(describe.when(max(ends)))}"


def _split(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise typer.BadParameter(f"--exec {command!r}: {error}") from None
    if not words:
        raise typer.BadParameter("--exec names no command")
    for place in _PLACE.finditer(" ".join(words)):
        if place["name"] and place["name"] not in _NAMES:
            raise _unknown(place["name"])
    if not _PLACE.search(words[0]) and shutil.which(words[0]) is None:
        raise _not_startable(words[0], "no such command")
    return words


def _unknown(name: str) -> InvalidInput:
    known = ", ".join(f"{{{one}}}" for one in _NAMES)
    meant = near(name, _NAMES)
    return InvalidInput(
        "no such placeholder",
        where=f"--exec {{{name}}}",
        expected=known,
        hint=f"{f'{meant} ' if meant else ''}Write {{{{{name}}}}} for these very characters.",
    )


def _filled(word: str, values: Mapping[str, str]) -> str:
    return _PLACE.sub(
        lambda one: f"{{{one['kept']}}}" if one["kept"] else values[one["name"]], word
    )


def _attend(
    coming: Watch, checkpoint: Checkpoint, words: Sequence[str], registry: str, attempts: int
) -> None:
    """Run the command for a checkpoint until it succeeds.

    Raises:
        RegistryError: It does not; the checkpoint is then not acknowledged.
    """
    values = _values(checkpoint)
    arguments = [_filled(word, values) for word in words]
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
