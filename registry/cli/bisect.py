"""`bisect`: the first bad checkpoint between a good one and a bad one."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any, Generic, Literal, TypeVar

import typer

from holdfast.registry.cli import options, output
from holdfast.registry.cli.columns import Column, Table, numbers
from holdfast.registry.cli.command import Answer
from holdfast.registry.cli.command import command as as_command
from holdfast.registry.cli.comparing import SHOWN, tensor_diff_json
from holdfast.registry.cli.describe import picked
from holdfast.registry.cli.executing import Command, status_text
from holdfast.registry.cli.opening import reads
from holdfast.registry.cli.options import argument, flag, option
from holdfast.registry.cli.output import Part
from holdfast.registry.comparing import TensorDiff, diff
from holdfast.registry.errors import InvalidInput, MissingObject, NotFound, RegistryError
from holdfast.registry.face import Registry, Run
from holdfast.registry.loading import Checkpoint
from holdfast.registry.store import Address
from holdfast.registry.values import near

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_CONDITION = re.compile(r"\s*(?P<metric>[^<>=!\s]+)\s*(?P<sign>[<>]=?|==|!=)\s*(?P<bound>\S+)\s*")
#: A command's exit status that says neither good nor bad; from the next one on it gives up.
_SKIP = 125
_CHANGED = (
    Column("is", "kind"),
    Column("tensor", "path"),
    *numbers("size=size_bytes", text=output.size),
)

#: Whether a checkpoint is bad, `None` if that is undecided, and why.
_Answer = tuple[bool | None, str]
_T = TypeVar("_T")
Verdict = Literal["good", "bad", "skipped"]


@as_command(reads, table=True)
def bisect(
    opened: Registry,
    *,
    address: Address,
    json: bool,
    run: options.NamedRun,
    command: list[str] | None = argument(
        "-- CMD...", "A command that fails if {ref} is bad.", default=None
    ),
    good: str = option("--good", "REF", "An earlier checkpoint that is good.", default=...),
    bad: str = option("--bad", "REF", "A later checkpoint that is bad.", default=...),
    metric: str | None = option(
        "--metric", "COND", "A checkpoint is bad if this holds: 'loss>2.5'."
    ),
    nonfinite: bool = flag("--nonfinite", "A checkpoint is bad if weights hold NaN or infinity."),
) -> Answer:
    """Find the first bad checkpoint between two of a run.

    Tests the middle one, then the middle of the half that is left: by a command, by a recorded
    metric, or by weights that are not finite. In the command {ref}, {id}, {run}, {step} and
    {phase} stand for the checkpoint. It is run without a shell. Exit status 0 is good, 1 to 124
    bad, 125 undecided, and any other one ends the search.
    """
    test = _test(command, metric, address, nonfinite=nonfinite, json=json)
    searched = opened.run(run)
    line = _line(searched, opened.checkpoint(good), opened.checkpoint(bad))
    if nonfinite and not searched.manifest.spec.finite:
        raise InvalidInput(
            "this run does not check its weights for NaN and infinity",
            where=run,
            expected="a preset with `finite = [...]`, patterns of paths",
            hint="Test by a metric or a command instead.",
        )
    if metric is not None:
        _check_metric(line, _condition(metric)["metric"])
    if not command:
        _check_ends(line, test)
    whys: dict[Checkpoint, str] = {}

    def is_bad(checkpoint: Checkpoint) -> bool | None:
        answer, whys[checkpoint] = _unless_evicted(searched, checkpoint, test)
        if not json:
            verdict = "skipped" if answer is None else "bad" if answer else "good"
            output.line(f"{verdict:7}  {checkpoint.ref}  {whys[checkpoint]}")
        return answer

    if not json:
        left = len(line) - 2
        about = output.counted(steps_left(left), "step")
        output.line(f"{output.counted(left, 'checkpoint')} between them, about {about}")
    found = search(line, is_bad)
    changed = _changed(found)
    return Answer(
        lambda: _json(run, found, whys, changed),
        lambda: _text(found, changed, None if json else SHOWN),
    )


def _test(
    command: Sequence[str] | None,
    metric: str | None,
    address: Address,
    *,
    nonfinite: bool,
    json: bool,
) -> Callable[[Checkpoint], _Answer]:
    """Return the test that tells good from bad."""
    if bool(command) + (metric is not None) + nonfinite != 1:
        raise typer.BadParameter("give one of -- CMD..., --metric and --nonfinite")
    if metric is not None:
        return _by_metric(metric)
    if nonfinite:
        return _by_weights
    assert command
    prepared = Command(command, where="--", as_shell="-- sh -c '...'")
    # With --json, standard output is for the document alone.
    return lambda checkpoint: _by_command(prepared, checkpoint, address, 2 if json else None)


def _by_command(
    command: Command, checkpoint: Checkpoint, address: Address, stdout: int | None
) -> _Answer:
    status = command.run(checkpoint, address, stdout=stdout)
    if status < 0 or status > _SKIP:
        raise RegistryError(
            "the command gave up, so the search ends",
            where=checkpoint.ref,
            expected="exit status 0 if it is good, 1 to 124 if bad, 125 if undecided",
            found=status_text(status),
        )
    return None if status == _SKIP else status != 0, status_text(status)


def _condition(text: str) -> re.Match[str]:
    match = _CONDITION.fullmatch(text)
    try:
        bound = float(match["bound"]) if match else math.nan
    except ValueError:
        bound = math.nan
    if match is None or math.isnan(bound):
        raise typer.BadParameter(f"--metric {text!r} is not a condition such as 'loss>2.5'")
    return match


def _by_metric(condition: str) -> Callable[[Checkpoint], _Answer]:
    match = _condition(condition)
    name, holds, bound = match["metric"], _OPERATORS[match["sign"]], float(match["bound"])

    def test(checkpoint: Checkpoint) -> _Answer:
        value = checkpoint.metrics.get(name)
        if value is None:
            return None, f"no {name}"
        return math.isnan(value) or holds(value, bound), f"{name}={output.number(value)}"

    return test


def _by_weights(checkpoint: Checkpoint) -> _Answer:
    paths = checkpoint.nonfinite
    return bool(paths), f"not finite: {', '.join(paths)}" if paths else "finite"


def _line(run: Run, good: Checkpoint, bad: Checkpoint) -> list[Checkpoint]:
    """Return the checkpoints of the current line from the good one to the bad one."""
    line = run.checkpoints()
    for name, one in (("--good", good), ("--bad", bad)):
        if one not in line:
            raise InvalidInput(
                "not a checkpoint of the run's current line of training",
                where=f"{name} {one.ref}",
                expected=f"one that `holdfast ls {run.id}` lists and that is not superseded",
            )
    first, last = line.index(good), line.index(bad)
    if first >= last:
        raise InvalidInput(
            "the bad one does not come after the good one",
            expected=f"after {good.ref}",
            found=bad.ref,
        )
    return line[first : last + 1]


def _check_metric(line: Sequence[Checkpoint], name: str) -> None:
    """Refuse a metric that no checkpoint has: it is misspelt, and nothing would be found."""
    known = {metric for checkpoint in line for metric in checkpoint.metrics}
    if name not in known:
        raise NotFound(
            "no checkpoint between the two has this metric",
            where=f"--metric {name}",
            expected=", ".join(sorted(known)) or "metrics; it has none",
            hint=near(name, known),
        )


def _check_ends(line: Sequence[Checkpoint], test: Callable[[Checkpoint], _Answer]) -> None:
    """Refuse ends that the test contradicts: a bad --good, a good --bad."""
    for one, expected in ((line[0], False), (line[-1], True)):
        answer, why = test(one)
        if answer is (not expected):
            raise InvalidInput(
                f"this one is {'bad' if answer else 'good'} by the given test",
                where=f"{'--bad' if expected else '--good'} {one.ref}",
                found=why,
            )


def _unless_evicted(
    run: Run, checkpoint: Checkpoint, test: Callable[[Checkpoint], _Answer]
) -> _Answer:
    """Test a checkpoint; it is undecided if retention evicts it before or during the test."""
    if run.refresh().manifest.is_evicted(checkpoint.handle.n):
        return None, "evicted meanwhile"
    answer, why = test(checkpoint)
    if answer and run.refresh().manifest.is_evicted(checkpoint.handle.n):
        return None, f"{why}, evicted meanwhile"
    return answer, why


def _changed(found: Bisected[Checkpoint]) -> list[TensorDiff] | None:
    """Return the tensors that differ between the last good one and the first bad one."""
    try:
        return diff(found.good.handle, found.bad.handle).differing
    except MissingObject as error:
        output.note(f"the changes cannot be shown: {error}")
        return None


def _text(
    found: Bisected[Checkpoint], changed: list[TensorDiff] | None, most: int | None
) -> Iterator[Part]:
    yield ""
    if found.undecided:
        count = output.counted(len(found.undecided), "checkpoint")
        yield f"cannot be narrowed further: {count} between these two undecided"
    bad = "first bad" if found.first_bad else "bad"
    yield {
        "last good": f"{found.good.ref}  {found.good.digest.short}",
        bad: f"{found.bad.ref}  {found.bad.digest.short}",
    }
    if changed:
        yield ""
        rows = [{**tensor_diff_json(one), "size_bytes": one.nbytes} for one in changed[:most]]
        yield Table(_CHANGED, rows)
        yield from output.more(len(changed), most or len(changed))


def _json(
    run: str,
    found: Bisected[Checkpoint],
    whys: dict[Checkpoint, str],
    changed: list[TensorDiff] | None,
) -> dict[str, Any]:
    return {
        "run": run,
        "good": _named(found.good),
        "bad": _named(found.bad),
        "first_bad": found.first_bad and _named(found.first_bad),
        "undecided": [_named(one) for one in found.undecided],
        "steps": [
            {**_named(step.one), "verdict": step.verdict, "why": whys[step.one]}
            for step in found.steps
        ],
        "changed": None if changed is None else [tensor_diff_json(one) for one in changed],
    }


def _named(checkpoint: Checkpoint) -> dict[str, Any]:
    return picked(checkpoint, "ref id=digest")


# Binary search. A test says good, bad, or that it cannot say; then its neighbours are tested. If
# none of them can be decided, the search returns the two between which it is undecided.


@dataclass(frozen=True, slots=True)
class Step(Generic[_T]):
    """One test."""

    one: _T  # the tested checkpoint
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Bisected(Generic[_T]):
    """The result of a search."""

    good: _T  # the last one known to be good
    bad: _T  # the first one known to be bad
    #: Those between the two that could not be decided, in order; any of them may be the first bad
    #: one. Empty where `bad` is certainly the first bad one.
    undecided: tuple[_T, ...]
    steps: tuple[Step[_T], ...]  # the tests, in the order in which they were made

    @property
    def first_bad(self) -> _T | None:
        """The first bad one, where that is certain."""
        return None if self.undecided else self.bad


def search(checkpoints: Sequence[_T], is_bad: Callable[[_T], bool | None]) -> Bisected[_T]:
    """Find the first bad one in a list that turns from good to bad once.

    The first is taken to be good and the last to be bad; neither is tested, and none is tested
    twice.
    """
    if len(checkpoints) < 2:
        raise InvalidInput("a search needs a good checkpoint and a bad one", found=len(checkpoints))
    low, high = 0, len(checkpoints) - 1
    skipped: set[int] = set()
    steps: list[Step[_T]] = []
    while (at := _next(low, high, skipped)) is not None:
        bad = is_bad(checkpoints[at])
        if bad is None:
            skipped.add(at)
        elif bad:
            high = at
        else:
            low = at
        verdict: Verdict = "skipped" if bad is None else "bad" if bad else "good"
        steps.append(Step(checkpoints[at], verdict))
    undecided = tuple(checkpoints[low + 1 : high])
    return Bisected(checkpoints[low], checkpoints[high], undecided, tuple(steps))


def steps_left(untested: int) -> int:
    """Return the number of tests that this many untested ones take, if none is skipped."""
    return int(log2(untested)) + 1 if untested else 0


def _next(low: int, high: int, skipped: set[int]) -> int | None:
    """Return the untested one nearest to the middle."""
    middle = (low + high) // 2
    left = (at for at in range(low + 1, high) if at not in skipped)
    return min(left, key=lambda at: (abs(at - middle), at), default=None)
