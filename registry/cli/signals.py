"""Signals that end the command, handled before slow imports begin."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT


class Terminated(BaseException):
    """A signal asked the process to end. Not an `Exception`, so that no handler catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def end_on_signals() -> None:
    """Let SIGTERM unwind the stack, so that unfinished work is cleaned up."""
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    raise Terminated(number)
