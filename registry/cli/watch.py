"""`watch` and `follow`: a command for each checkpoint of a run; engines at the newest one."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, get_args

import typer

from holdfast.registry.cli import options, output
from holdfast.registry.cli.command import command as as_command
from holdfast.registry.cli.executing import Command, status_text
from holdfast.registry.cli.opening import opened_at, writes
from holdfast.registry.cli.options import flag, option
from holdfast.registry.cli.output import Note
from holdfast.registry.errors import NotFound, RegistryError
from holdfast.registry.face import Registry, Run
from holdfast.registry.history import check_phase
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.hub.engines import (
    EngineFollower,
    FollowedVersion,
    Requests,
    WeightFolders,
    key_of,
)
from holdfast.registry.loading import Checkpoint
from holdfast.registry.loading.following import Watch
from holdfast.registry.store import Address
from holdfast.registry.values import near

#: What a command of `follow` is told of a version.
_NAMES = ("folder", "ref", "id", "run", "step", "phase")


@as_command(writes, metrics=True)
def watch(
    opened: Registry,
    *,
    run: options.Run,
    address: Address,
    command: str = option("--exec", "CMD", "The command; {ref} is the checkpoint.", default=...),
    phase: str | None = option("--phase", "NAME", "Only checkpoints of this phase."),
    group: str = option("--group", "NAME", "Followers that share the work.", default="default"),
    follower: str | None = option(
        "--follower", "NAME", "Continue with the checkpoints that it held; random by default."
    ),
    hold: float = option(
        "--hold",
        "TIME",
        "How long nobody else takes a checkpoint: 90, 30m, 12h.",
        parser=options.seconds,
        default="1h",
    ),
    attempts: int = option("--attempts", "N", "Tries for each checkpoint.", min=1, default=3),
    once: bool = flag("--once", "Only checkpoints that exist now; do not wait for more."),
) -> Note:
    """Run a command for each checkpoint of a run as it appears.

    Followers of one group share the checkpoints. Each is done at least once, and again by another
    follower if one dies while it works. In the command {ref}, {id}, {run}, {step} and {phase}
    stand for the checkpoint, {{ref}} for {ref} itself. It is run without a shell. Exit status 0
    means done.
    """
    prepared = _split(command)
    followed = opened.run(run)
    coming = followed.follow.checkpoints(
        phase, group=group, follower=follower, hold_s=hold, follow=not once
    )
    if phase is not None:
        _check_phase(followed, check_phase(phase), follow=not once)
    done = 0
    for checkpoint in coming:
        _attend(coming, checkpoint, prepared, address, attempts)
        done += 1
    held = _held_elsewhere(followed.manifest, coming, phase) if once else ""
    return Note(f"{output.counted(done, 'checkpoint')} done; {held or 'no more will come'}")


@as_command(metrics=True)
def follow(
    *,
    run: options.Run,
    address: Address,
    into: Path = option("--into", "DIR", "A folder on the host of the engines.", default=...),
    notify: str | None = option("--notify", "sglang|vllm|COMMAND", "Engines, or a command to run."),
    publish: Path | None = option(
        "--publish", "DIR", "A shared folder for engines that pull: in place of an engine."
    ),
    url: list[str] | None = option("--url", "URL", "An engine; repeatable."),
    best: bool = flag("--best", "Follow the best checkpoint, not the newest."),
    phase: str | None = option("--phase", "NAME", "Only checkpoints of this phase."),
    backwards: bool = flag("--backwards", "Also take an older checkpoint than the one here."),
    requests: str = option(
        "--requests",
        "wait|pause|abort",
        "What becomes of requests that are being answered.",
        default="wait",
    ),
    key_file: Path | None = options.KEY_FILE,
    report: bool = flag("--report", "Note in the run which version the engines have."),
    poll: float = option(
        "--poll", "TIME", "Time between looks at the run.", parser=options.seconds, default="1s"
    ),
    once: bool = flag("--once", "End when every engine has the newest checkpoint."),
) -> Note:
    """Keep inference engines at the newest checkpoint of a run.

    DIR/current leads to its files, as Hugging Face has them. Only chunks that changed are fetched;
    then each engine is told: by --notify sglang or vllm at each --url, or by a command, in which
    {folder}, {ref}, {id}, {run}, {step} and {phase} stand for the version. It is run without a
    shell. DIR/status.json says what each engine has confirmed.
    """
    is_engine = notify in ("sglang", "vllm")
    if (publish is None and notify is None) or (publish is not None and is_engine):
        raise typer.BadParameter("--notify, or --publish, which goes with a command alone")
    if requests not in get_args(Requests):
        raise typer.BadParameter(f"--requests {requests!r}: wait, pause or abort")
    call = None
    if notify is not None and not is_engine:
        call = _program(_split(notify, "--notify", names=_NAMES), address)
    told: AbstractContextManager[Any] = nullcontext(call or notify or "")
    with (
        told if publish is None else WeightFolders(publish, call) as to,
        opened_at(address, read_only=not report) as opened,
        EngineFollower(
            opened.run(run),
            into,
            notify=to,
            urls=url or (),
            best=best,
            phase=phase,
            backwards=backwards,
            requests=requests,  # type: ignore[arg-type]  # checked just before
            key=None if callable(to) else key_of(key_file),
            report=report,
            poll_s=poll,
            follow=not once,
            note=output.note,
        ) as follower,
    ):
        follower.run()
    version = follower.version
    return Note("no checkpoint" if version is None else f"every engine has {version.ref}")


def _program(command: Command, address: Address) -> Callable[[FollowedVersion], None]:
    """Return a call that runs a command for a version, and fails where that does."""

    def call(version: FollowedVersion) -> None:
        values = {name: str(getattr(version, name)) for name in _NAMES}
        status = command.run_with(values, address)
        if status != 0:
            found = status_text(status)
            raise RegistryError("the command does not succeed", where=version.ref, found=found)

    return call


def _check_phase(run: Run, phase: str, *, follow: bool) -> None:
    """Say that a run without declared phases has no checkpoint of this one: it may be mistyped.

    A follower may wait for a phase that comes later, so for it this is a note.
    """
    known = run.manifest.phases_saved
    if phase in known or run.manifest.spec.phases:
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


def _held_elsewhere(run: RunManifest, coming: Watch, phase: str | None) -> str:
    """Return how many checkpoints other followers of the group hold, and until when.

    This follower holds none at the end of its loop.
    """
    chosen = {one.n for one in run.live(None if phase is None else check_phase(phase))}
    now_ms = time.time() * 1000
    ends = [
        claim.until_ms
        for claim in run.group(coming.group).claims
        if claim.checkpoint in chosen and claim.until_ms > now_ms
    ]
    if not ends:
        return ""
    by = "another follower" if len(ends) == 1 else "other followers"
    return f"{len(ends)} held by {by} until {output.time(max(ends))}"


def _split(command: str, option: str = "--exec", **given: Sequence[str]) -> Command:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise typer.BadParameter(f"{option} {command!r}: {error}") from None
    if not words:
        raise typer.BadParameter(f"{option} names no command")
    return Command(words, where=option, as_shell=f"{option} 'sh -c \"...\"'", **given)


def _attend(
    coming: Watch, checkpoint: Checkpoint, command: Command, address: Address, attempts: int
) -> None:
    """Run the command for a checkpoint until it succeeds."""
    for attempt in range(1, attempts + 1):
        if attempt > 1:
            coming.renew()
        status = command.run(checkpoint, address)
        if status == 0:
            output.line(f"done: {checkpoint.ref}")
            return
        output.note(f"{checkpoint.ref}: {status_text(status)}, attempt {attempt} of {attempts}")
    raise RegistryError(
        "the command does not succeed, so this checkpoint is not acknowledged",
        where=checkpoint.ref,
        expected="exit status 0",
        found=f"{status_text(status)}, {output.counted(attempts, 'attempt')}",
        hint="It comes again when its hold is over; a follower with a name gets it at once.",
    )
