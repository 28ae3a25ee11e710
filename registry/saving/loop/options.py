"""`Stopping`, and the arguments of `Run.checkpointer`, checked; the processes of a training."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from typing import Protocol

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput
from holdfast.registry.saving.collective.group import Group
from holdfast.registry.saving.loop.notice import Notice, NoticeSource
from holdfast.registry.saving.pending import Busy, check_busy
from holdfast.registry.saving.save_request import check_may_fail
from holdfast.registry.spec import Monitor, Signals, WhenAsked
from holdfast.registry.values import one_of, seconds
from holdfast.registry.writing import Storing

#: The module that needs torch.
_TORCH_RANKS = "holdfast.registry.saving.collective.torch_group"
_WHAT = "not a setting of a checkpointer"


class Ranks(Protocol):
    """The processes of one training run, seen from this process.

    With mpi4py: `rank` is `comm.Get_rank()`, and `highest(value)` returns
    `comm.allreduce(value, op=MPI.MAX)`.
    """

    @property
    def rank(self) -> int:
        """The number of this process."""

    def highest(self, value: int) -> int:
        """Return the highest value of all processes; each calls this at the same point."""


class Alone:
    """A training run of one process."""

    rank = 0

    def highest(self, value: int) -> int:
        """Return the value."""
        return value


_ALONE = Alone()


def ranks_here(given: Ranks | None, barrier_s: float, group: Group | None = None) -> Ranks:
    """Return the given ranks, or those of torch.distributed if it is initialized."""
    found = _found(given, barrier_s)
    if group is not None and (found.rank != group.rank or (group.size > 1 and found is _ALONE)):
        raise InvalidInput(
            "the ranks of the checkpointer are not those of the run's group",
            where="ranks",
            expected=f"rank {group.rank} of {group.size}",
            found=f"rank {found.rank}" if found is not _ALONE else "one process",
            hint="Pass `Stopping(ranks=...)`: an object with `rank` and `highest(value)` over the "
            "same ranks.",
        )
    return found


def _found(given: Ranks | None, barrier_s: float) -> Ranks:
    if given is not None:
        if not isinstance(getattr(given, "rank", None), int) or not hasattr(given, "highest"):
            raise InvalidInput(
                "not the ranks of a training",
                where="ranks",
                expected="an object with `rank` and `highest(value)`",
                found=quoted(given),
            )
        return given
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return _ALONE
    if distributed.get_world_size() == 1:
        return _ALONE
    found: Ranks = importlib.import_module(_TORCH_RANKS).TorchRanks(barrier_s)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """How a training loop is asked to stop, and how it leaves.

    `run.checkpointer(stopping=Stopping(exits=False))`. `docs/training.md` describes it.

    Attributes:
        notice: A notice of preemption: the path of a file that will exist, or a function that
            returns something true. It is asked at most once a second, and counts as SIGTERM.
        exits: Raise SystemExit after a request to stop. `False`: only set `.stopped`.
        exit_code: Exit status after SIGTERM. Default: the preset's, or 143.
        sigint_exit_code: Exit status after SIGINT. Default: the preset's, or 130.
        sigusr1: Whether SIGUSR1 saves after the current step (`now`) or at the next multiple of
            `every_steps` (`at_cadence`). Default: the preset's, or `now`.
        deadline_s: Seconds after a request to stop after which the process ends with what is
            durable. Default: the preset's, or 25.
        ranks: The processes of the training, which stop together: an object with `rank` and
            `highest(value)`. Default: those of torch.distributed if it is initialized.
        barrier_s: Seconds after which waiting for the other ranks of torch.distributed is an error.

    Raises:
        InvalidInput: A value is wrong.
    """

    notice: NoticeSource | None = None
    exits: bool = True
    exit_code: int | None = None
    sigint_exit_code: int | None = None
    sigusr1: WhenAsked | None = None
    deadline_s: float | None = None
    ranks: Ranks | None = None
    barrier_s: float = 1800.0

    def __post_init__(self) -> None:
        """Check the values; the ranks are looked at when training begins."""
        Notice(self.notice)
        _check_count("exit_code", self.exit_code, 0, 255)
        _check_count("sigint_exit_code", self.sigint_exit_code, 0, 255)
        if self.sigusr1 is not None:
            one_of(self.sigusr1, WhenAsked, what=_WHAT, where="sigusr1")
        if self.deadline_s is not None:
            seconds(self.deadline_s, "deadline_s", what=_WHAT)
        seconds(self.barrier_s, "barrier_s", what=_WHAT)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """The arguments of `Run.checkpointer`; see there."""

    every_steps: int | None
    every_s: float | None
    on_best: bool | Monitor
    background: bool
    busy: Busy
    save_at_end: bool
    stopping: Stopping
    may_fail: int
    phase: int | str | None
    storing: Storing
    allow_nonfinite: bool
    group: Group | None  # the ranks that save together, if the handle has them

    def __post_init__(self) -> None:
        """Check them."""
        _check_count("every_steps", self.every_steps, 1, 2**53)
        if self.every_s is not None:
            seconds(self.every_s, "every_s", what=_WHAT)
        check_busy(self.busy)
        check_may_fail(self.may_fail, every_rank=self.group is not None)
        if self.group is not None and self.busy != "wait":  # each rank would skip another save
            raise _wrong("busy", "wait, since all ranks save together", self.busy)
        if self.group is not None and self.storing.precision is not None:
            raise _wrong("storing", "no precision, since all ranks save together", "a policy")
        if not isinstance(self.on_best, bool | Monitor):
            raise _wrong("on_best", "True, or Monitor(metric=..., mode=...)", self.on_best)
        if not isinstance(self.stopping, Stopping):
            raise _wrong("stopping", "holdfast.Stopping(...)", self.stopping)


def reaction(stopping: Stopping, preset: Signals | None) -> Signals:
    """Return how the training reacts to signals: as asked here, or as the preset says."""
    asked = {name: getattr(stopping, name) for name in Signals.fields()}
    given = {name: value for name, value in asked.items() if value is not None}
    return (preset or Signals()).changed(**given)  # a deadline may be less than a second


def stop_step() -> int | None:
    """Return the step at which `holdfast verify-resume` ends this program, if it runs it."""
    text = os.environ.get("HOLDFAST_STOP_STEP", "")
    if not text:
        return None
    if not text.isdecimal():
        raise _wrong("HOLDFAST_STOP_STEP", "a whole number from 0", text)
    return int(text)


def _check_count(name: str, value: object, least: int, most: int) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    if value is not None and not is_count:
        raise _wrong(name, f"a whole number from {least} to {most}", value)


def _wrong(name: str, expected: str, found: object) -> InvalidInput:
    return InvalidInput(_WHAT, where=name, expected=expected, found=quoted(found))
