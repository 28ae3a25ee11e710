"""The arguments of `Run.checkpointer`, checked."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, Literal, get_args

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput
from holdfast.registry.saving.background import check_busy
from holdfast.registry.saving.collective.group import Group
from holdfast.registry.saving.loop.notice import Notice, NoticeSource
from holdfast.registry.saving.loop.ranks import Ranks
from holdfast.registry.saving.pending import Busy
from holdfast.registry.saving.save_request import OnError, check_on_error
from holdfast.registry.spec import Monitor, Signals, WhenAsked


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """The arguments of `Run.checkpointer`, which explains them."""

    every_steps: int | None
    every_s: float | None
    on_best: bool | Monitor
    background: bool
    busy: Busy
    save_at_end: bool
    notice: NoticeSource | None
    exits: bool
    exit_code: int | None
    sigint_exit_code: int | None
    sigusr1: WhenAsked | None
    deadline_s: float | None
    ranks: Ranks | None
    barrier_s: float
    on_error: OnError
    give_up_after: int
    save: dict[str, Any]  # the arguments of every save, by name
    group: Group | None  # the ranks that save together, if the handle has them

    def __post_init__(self) -> None:
        """Check them."""
        _check_count("every_steps", self.every_steps, 1, 2**53)
        _check_seconds("every_s", self.every_s)
        _check_seconds("deadline_s", self.deadline_s)
        _check_seconds("barrier_s", self.barrier_s)
        _check_count("exit_code", self.exit_code, 0, 255)
        _check_count("sigint_exit_code", self.sigint_exit_code, 0, 255)
        check_busy(self.busy)
        self.goes_on()
        if self.group is not None:
            self._check_together()
        Notice(self.notice)
        if not isinstance(self.on_best, bool | Monitor):
            raise _wrong("on_best", "True, or Monitor(metric=..., mode=...)", self.on_best)
        if self.sigusr1 is not None and self.sigusr1 not in get_args(WhenAsked):
            raise _wrong("sigusr1", " or ".join(get_args(WhenAsked)), self.sigusr1)

    def goes_on(self) -> int:
        """Return how many saves by the cadence may fail in a row before an error is raised."""
        together = self.group is not None
        return check_on_error(self.on_error, self.give_up_after, every_rank=together)

    def _check_together(self) -> None:
        """Refuse settings that ranks which save together cannot follow; the first save would."""
        if self.busy != "wait":  # each rank would leave another save out
            raise _wrong("busy", "wait, since all ranks save together", self.busy)
        if self.save["precision"] is not None:
            raise _wrong("precision", "None, since all ranks save together", "a policy")

    def reaction(self, preset: Signals | None) -> Reaction:
        """Return how the training reacts to signals: as asked here, or as the preset says."""
        known = preset or Signals()
        return Reaction(
            known.exit_code if self.exit_code is None else self.exit_code,
            known.sigint_exit_code if self.sigint_exit_code is None else self.sigint_exit_code,
            self.sigusr1 or known.sigusr1,
            float(known.deadline_s if self.deadline_s is None else self.deadline_s),
        )


@dataclass(frozen=True, slots=True)
class Reaction:
    """How a training reacts to signals; the fields of `Signals`, with a time of any length."""

    exit_code: int
    sigint_exit_code: int
    sigusr1: Literal["now", "at_cadence"]
    deadline_s: float


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


def _check_seconds(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < float(value) < math.inf):  # type: ignore[arg-type]
        raise _wrong(name, "a number of seconds above 0", value)


def _wrong(name: str, expected: str, found: object) -> InvalidInput:
    return InvalidInput(
        "not a setting of a checkpointer", where=name, expected=expected, found=quoted(found)
    )
