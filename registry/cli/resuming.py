"""`verify-resume`: whether a training program resumes exactly."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.registry.cli import output
from holdfast.registry.cli.command import Answer, command
from holdfast.registry.cli.diffs import differing_json
from holdfast.registry.cli.executing import run_to_end, status_text
from holdfast.registry.cli.options import argument, option
from holdfast.registry.cli.output import Part
from holdfast.registry.errors import InvalidInput
from holdfast.registry.face import ResumeReport, verify_segments

_RUN = "verify-resume"
_SHOWN = 10


@command()
def verify_resume(
    *,
    words: list[str] = argument("CMD", "The training program and its arguments, after --."),
    steps: int = option("--steps", "N", "The step at which they are compared.", default=...),
    at: int | None = option("--at", "STEP", "The step to resume at; by default half of N."),
) -> Answer:
    """Verify that a training program resumes exactly.

    The program runs straight to step N; and to half of it and, in another process, on to N; each
    in a scratch registry. Then the ids are compared. The exit status is 1 if they differ.
    """
    found = verify_segments(
        lambda place, stop: _train(words, place, stop), steps=steps, resume_at=at
    )
    return Answer(lambda: _json(found), lambda: _text(found), status=0 if found.ok else 1)


def _train(words: list[str], place: Path, stop: int) -> None:
    """Run the program to a step. How it ends does not matter, but its checkpoint does."""
    given = {"registry": str(place), "run": _RUN, "stop": str(stop)}
    environment = {
        **os.environ,
        "HOLDFAST_REGISTRY": str(place),
        "HOLDFAST_RUN": _RUN,
        "HOLDFAST_STOP_STEP": str(stop),
        "HOLDFAST_HEADS": "0",
    }
    for name in ("HOLDFAST_STORAGE_OPTIONS", "HOLDFAST_JOURNAL"):  # of the real registry
        environment.pop(name, None)
    output.note(f"training to step {stop} ...")
    filled = [_filled(word, given) for word in words]
    try:
        status = run_to_end(filled, environment, sys.stderr.fileno())  # its output is not ours
    except (OSError, ValueError) as error:
        raise InvalidInput("the command cannot be started", where=words[0], found=error) from error
    if status:
        output.note(f"the command ended with {status_text(status)}")


def _filled(word: str, given: Mapping[str, str]) -> str:
    for name, value in given.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def _text(found: ResumeReport) -> Iterator[Part]:
    where = f"at step {found.steps}, resumed at step {found.resumed_at}"
    if found.ok:
        yield f"exact {where}: {found.straight.short}"
        return
    yield f"NOT exact {where}: {found.straight.short} straight, {found.resumed.short} resumed"
    yield f"first difference: {found.first}"
    assert found.difference is not None  # the ids differ
    lines = [*(one.path for one in found.difference.differing), *map(str, found.difference.values)]
    yield from (f"  {line}" for line in lines[:_SHOWN])
    yield from output.more(len(lines), _SHOWN)
    yield "usual causes:"
    yield from (f"  {cause}" for cause in found.causes)


def _json(found: ResumeReport) -> dict[str, Any]:
    difference = found.difference
    return {
        "ok": found.ok,
        "steps": found.steps,
        "resumed_at": found.resumed_at,
        "straight": found.straight,
        "resumed": found.resumed,
        "first": found.first,
        "deterministic": found.is_deterministic,
        "components": {one.name: one.kind for one in difference.components} if difference else {},
        "tensors": differing_json(difference),
        "causes": list(found.causes),
    }
