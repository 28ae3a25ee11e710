"""Follow a run: each checkpoint goes to one follower of each group.

The run's log records the checkpoints that a group has finished, and which follower works on which
one until when. So followers need no other way to agree, and any of them may die. This module
chooses the next checkpoint and waits for it; `holdfast.registry.history.retention` keeps claimed
ones.
"""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Iterator, Sequence
from threading import Event
from typing import Self

from holdfast.registry.errors import Conflict, InvalidInput
from holdfast.registry.history import check_name, check_phase
from holdfast.registry.history.actions import Acknowledge, Action, Claim
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.loading.checkpoint import Checkpoint
from holdfast.registry.spec import check_phase_is_declared
from holdfast.registry.values import HERE, seconds
from holdfast.registry.writing import Committer, Composed

#: Statuses after which no checkpoint comes any more.
OVER = ("completed", "failed")
# Tests replace these clocks.
_sleep = time.sleep
_monotonic = time.monotonic


def _now_ms() -> int:
    return int(time.time() * 1000)


class Patience:
    """The waits of a follower between polls of a log, and its timeout."""

    def __init__(
        self, poll_s: float = 1.0, longest_poll_s: float = 30.0, timeout_s: float | None = None
    ) -> None:
        self._poll_s = seconds(poll_s, "poll_s")
        self._longest_poll_s = max(self._poll_s, seconds(longest_poll_s, "longest_poll_s"))
        self._timeout_s = math.inf if timeout_s is None else seconds(timeout_s, "timeout_s")
        self.begin()

    def begin(self) -> None:
        """Start the timeout, with the shortest wait."""
        self._deadline = _monotonic() + self._timeout_s
        self.encourage()

    def encourage(self) -> None:
        """Go back to the shortest wait, because the log has grown."""
        self._pause_s = self._poll_s

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return self._deadline <= _monotonic()

    def wait(self, longest_s: float = math.inf, over: Event | None = None) -> None:
        """Sleep, `longest_s` seconds at most, or until `over` is set."""
        # With jitter, so that followers do not poll all at once.
        jittered_s = self._pause_s * random.uniform(0.5, 1)
        sleep = _sleep if over is None else over.wait
        sleep(max(0.0, min(jittered_s, self._deadline - _monotonic(), longest_s)))
        self._pause_s = min(self._longest_poll_s, 2 * self._pause_s)


class Watch(Iterator[Checkpoint]):
    """The checkpoints of a run as they come; `RunFollow.checkpoints` explains the arguments.

    Attributes:
        group: The group of followers.
        follower: The name of this follower.
    """

    def __init__(
        self,
        committer: Committer,
        phase: int | str | None,
        *,
        group: str,
        hold_s: float,
        patience: Patience,
        follow: bool,
        follower: str | None,
    ) -> None:
        self._committer = committer
        self._log = committer.log
        self._phase = None if phase is None else check_phase(phase)
        if self._phase is not None:
            check_phase_is_declared(self._log.run.spec, self._phase)
        self.group = check_name(group, "a group of followers")
        self.follower = check_name(follower or secrets.token_hex(8), "a follower")
        self._hold_ms = math.ceil(seconds(hold_s, "hold_s") * 1000)
        self._patience = patience
        self._follow = follow
        self._end: int | None = None
        self._held: int | None = None

    def __iter__(self) -> Self:
        # A new loop does not acknowledge the last checkpoint of the loop before it.
        self._held = None
        return self

    def __next__(self) -> Checkpoint:
        """Acknowledge the last checkpoint, wait for the next one and claim it."""
        self._patience.begin()
        while True:
            before = self._log.run.next_slot
            run = self._log.refresh()
            if self._end is None and not self._follow:
                self._end = run.commits
            taken = self._take()
            if self._log.run.next_slot > before:
                self._count(self._log.run)
            if taken is not None:
                return Checkpoint(self._committer.store, self._log, taken)
            if self._is_over() or self._patience.is_over:
                self._log.make_durable()  # otherwise acknowledgements of others could be lost
                raise StopIteration
            if run.next_slot > before:
                self._patience.encourage()
            self._patience.wait(self._until_expiry_s())

    def acknowledge(self) -> None:
        """Acknowledge the last checkpoint, before the loop is left on purpose.

        Raises:
            Conflict: Others write to the run too often; the checkpoint is not acknowledged.
        """
        self._committer.commit(
            Composed(lambda run: self._acknowledgement(run) or None, on_dropped=True), waits=False
        )
        self._held = None

    def renew(self) -> None:
        """Hold the last checkpoint for another `hold_s` from now.

        Raises:
            InvalidInput: No checkpoint is held.
            Conflict: The hold was over, and another follower took or acknowledged the checkpoint;
                or the run was dropped.
        """
        held = self._held
        if held is None:
            raise InvalidInput("this follower holds no checkpoint", where=self._where)

        def compose(run: RunManifest) -> Sequence[Action]:
            group = run.group(self.group)
            holder = next((one.follower for one in group.claims if one.checkpoint == held), None)
            if holder != self.follower:
                raise Conflict(
                    "this checkpoint is no longer this follower's",
                    where=f"{self._where}: {self._log.knowing(held).by_n[held].manifest.short}",
                    expected=self.follower,
                    found=holder or "nobody: it was acknowledged",
                    hint="Hold it longer than the work takes.",
                )
            return self._claim(held)

        self._log.refresh()
        self._committer.commit(compose, waits=False)

    def _take(self) -> CheckpointRecord | None:
        """Acknowledge the held checkpoint and claim the next one, both in one commit."""
        if self._held is None and next(self._free(self._log.run), None) is None:
            return None  # without a commit, a poll is only one request for the next slot
        taken: CheckpointRecord | None = None

        def compose(run: RunManifest) -> Sequence[Action] | None:
            nonlocal taken
            taken = next(self._free(run), None)
            claim = [] if taken is None else self._claim(taken.n)
            return [*self._acknowledgement(run), *claim] or None

        try:
            self._committer.commit(Composed(compose, on_dropped=True), waits=False)
        except Conflict:
            # All races for a slot were lost, because many others write. The hold stays.
            return None
        self._held = None if taken is None else taken.n
        return taken

    def _count(self, run: RunManifest) -> None:
        """Count what the group has still to finish, what it works on included."""
        done, live = {*run.group(self.group).done}, run.live(self._phase)
        times = [one.time_ms for one in live if one.n not in done and not one.held_back]
        oldest_s = min(times) / 1000 if times else None
        HERE.put("follower_waiting_checkpoints", len(times), run=self._log.run_id)
        HERE.put("follower_oldest_timestamp_seconds", oldest_s, run=self._log.run_id)

    def _open(self, run: RunManifest) -> Iterator[CheckpointRecord]:
        """Yield the checkpoints that the group has not finished, in log order."""
        if run.dropped is not None:
            return
        done = {*run.group(self.group).done, self._held}
        for record in run.live(self._phase):
            is_known = self._end is None or record.n < self._end
            if is_known and not record.held_back and record.n not in done:
                yield record

    def _free(self, run: RunManifest) -> Iterator[CheckpointRecord]:
        """Yield the open checkpoints that no other follower holds."""
        held = self._held_by_others(run)
        return (record for record in self._open(run) if record.n not in held)

    def _held_by_others(self, run: RunManifest) -> dict[int, int]:
        """Return the checkpoints that others hold, each with the end of the hold in ms."""
        now_ms = _now_ms()
        return {
            claim.checkpoint: claim.until_ms
            for claim in run.group(self.group).claims
            if claim.follower != self.follower and claim.until_ms > now_ms
        }

    def _is_over(self) -> bool:
        """Return whether no checkpoint can come any more."""
        run = self._log.run
        if self._held is not None or next(self._free(run), None) is not None:
            return False  # races were lost: an acknowledgement or a claim is still to be written
        if not self._follow or run.dropped is not None:
            return True
        # Checkpoints that others hold may become free again, if these followers die.
        return run.status in OVER and next(self._open(run), None) is None

    def _until_expiry_s(self) -> float:
        """Return the seconds until the first hold of the others ends."""
        run = self._log.run
        held, now_ms = self._held_by_others(run), _now_ms()
        ends = [held[record.n] for record in self._open(run) if record.n in held]
        return (min(ends) - now_ms) / 1000 if ends else math.inf

    def _claim(self, n: int) -> list[Action]:
        until_ms = _now_ms() + self._hold_ms
        claim = Claim(group=self.group, checkpoint=n, follower=self.follower, until_ms=until_ms)
        return [claim]

    def _acknowledgement(self, run: RunManifest) -> list[Action]:
        """Return the action that acknowledges the held checkpoint, unless it is in the log."""
        held = self._held
        if held is None or run.dropped is not None or held in run.group(self.group).done:
            return []
        return [Acknowledge(group=self.group, checkpoint=held, follower=self.follower)]

    @property
    def _where(self) -> str:
        return f"{self._log.run_id}: group {self.group}"
