"""The process that trains with a journal while its bucket comes and goes, and it is killed."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import holdfast
from holdfast.registry.errors import StorageError
from holdfast.registry.saving.journal import background
from tests.crash.pusher import state_at
from tests.support.pictures import RUN

_PAUSE_S = 0.05
#: No outage takes as long; what is out of reach for longer is the error of the test.
_LONGEST_OUTAGE_S = 120.0


def train_until_killed(url: str, journal: str, last: int, acks: Connection) -> None:
    """Save step after step, and tell of each; at the end wait until the bucket has all of them."""
    background.RETRY_S, background.LONGEST_RETRY_S = _PAUSE_S, 4 * _PAUSE_S
    run, step = _begin(url, journal)
    acks.send(("restored", step, "", 0.0))
    while step < last:
        step += 1
        checkpoint = _save(run, step)
        acks.send(("saved", step, checkpoint.digest.hex(), run.handle.journal.waited_s))
    run.wait(remote=True)
    acks.send(("done", step, "", run.handle.journal.waited_s))


def _begin(url: str, journal: str) -> tuple[holdfast.Run, int]:
    begun = time.monotonic()
    while True:
        try:
            run = holdfast.open(url, journal=journal).run(RUN, create=True, seed=7)
            restored = run.restore()
        except StorageError as error:  # the bucket is out of reach
            _pause(begun, error)
            continue
        return run, restored.checkpoint.step if restored else 0


def _save(run: holdfast.Run, step: int) -> holdfast.Checkpoint:
    """Save a step; only the first save of a process can need the bucket."""
    begun = time.monotonic()
    while True:
        try:
            return run.save(state_at(step), step=step)
        except StorageError as error:
            assert not run.handle.journal.line.takeover
            _pause(begun, error)


def _pause(begun: float, error: StorageError) -> None:
    """Wait for the bucket a little; raise its error if that has taken too long."""
    if time.monotonic() > begun + _LONGEST_OUTAGE_S:
        raise error
    time.sleep(_PAUSE_S)
