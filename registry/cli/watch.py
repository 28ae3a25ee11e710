"""`watch`: a command run for each checkpoint of a run, as they come."""

from __future__ import annotations

import shlex
import time
from typing import Annotated

import typer

from registry.checkpoint import Checkpoint
from registry.cli import options, output
from registry.cli.executing import Command, told
from registry.errors import NotFound, RegistryError
from registry.following.watching import Watch
from registry.plain import check_phase
from registry.registry import open  # noqa: A004
from registry.run import Run
from registry.state import RunManifest
from registry.suggest import near


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
    prepared = _split(command)
    with open(registry) as opened:
        followed = opened.run(run)
        coming = followed.watch(phase, group=group, follower=follower, hold_s=hold, follow=not once)
        if phase is not None:
            _check_phase(followed, check_phase(phase), follow=not once)
        done = 0
        for checkpoint in coming:
            _attend(coming, checkpoint, prepared, registry, attempts)
            done += 1
        held = _held_elsewhere(followed.manifest, coming, phase) if once else ""
    output.note(f"{output.counted(done, 'checkpoint')} done; {held or 'no more will come'}")


def _check_phase(run: Run, phase: str, *, follow: bool) -> None:
    """Say that a run without declared phases has nothing of this one: it may be mistyped.

    Who waits may wait for a phase that is yet to come, so there it is a note.

    Raises:
        NotFound: Nobody waits.
    """
    known = run.manifest.phases_saved
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
    return f"{len(ends)} held by {by} until {output.time(max(ends))}"


def _split(command: str) -> Command:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise typer.BadParameter(f"--exec {command!r}: {error}") from None
    if not words:
        raise typer.BadParameter("--exec names no command")
    return Command(words, where="--exec", as_shell="--exec 'sh -c \"...\"'")


def _attend(
    coming: Watch, checkpoint: Checkpoint, command: Command, registry: str, attempts: int
) -> None:
    """Run the command for a checkpoint until it succeeds.

    Raises:
        RegistryError: It does not; the checkpoint is then not acknowledged.
    """
    for attempt in range(1, attempts + 1):
        if attempt > 1:
            coming.renew()
        status = command.run(checkpoint, registry)
        if status == 0:
            output.line(f"done: {checkpoint.ref}")
            return
        output.note(f"{checkpoint.ref}: {told(status)}, attempt {attempt} of {attempts}")
    raise RegistryError(
        "the command does not succeed, so this checkpoint is not acknowledged",
        where=checkpoint.ref,
        expected="exit status 0",
        found=f"{told(status)}, {output.counted(attempts, 'attempt')}",
        hint="It comes again when its hold is over; a follower with a name gets it at once.",
    )
