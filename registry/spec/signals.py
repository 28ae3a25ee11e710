"""How a training reacts to signals: exit codes, the deadline, and what SIGUSR1 means."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from holdfast.registry.values.records import Record

_ExitCode = Annotated[int, Field(ge=0, le=255)]

#: When SIGUSR1 saves: after the current step, or at the next multiple of the cadence.
WhenAsked = Literal["now", "at_cadence"]


class Signals(Record):
    """How a training reacts to signals.

    Attributes:
        exit_code: Exit status after SIGTERM or a notice of preemption.
        sigint_exit_code: Exit status after SIGINT.
        sigusr1: When SIGUSR1 saves.
        deadline_s: Seconds after the first SIGTERM, SIGINT or notice after which the process ends
            with what is durable.
    """

    exit_code: _ExitCode = 143
    sigint_exit_code: _ExitCode = 130
    sigusr1: WhenAsked = "now"
    deadline_s: Annotated[int, Field(ge=1)] = 25
