"""Who is in charge of a run: the writer token, where training resumed, and what that forbids."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from registry.errors import Conflict, Fenced
from registry.history.actions import Action, Rewind, SetStatus, TakeOver
from registry.history.log_values import format_time
from registry.history.replay import CheckpointRecord, PhaseRecord, RunManifest
from registry.values.digest import Digest
from registry.values.environment import host_name


class Charge:
    """What one handle knows of its right to save into a run.

    Attributes:
        resumed_at: Commit number of the checkpoint that training resumed from; `None` when the next
            save simply goes on.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self.resumed_at: int | None = None
        self.reset()

    def reset(self) -> None:
        """Be another trainer, as in a forked child: the old token is its parent's."""
        self._token = secrets.token_hex(16)
        self._taken = False
        self._attempted: tuple[int, Digest] | None = None

    def resume_at(self, n: int, state: RunManifest) -> None:
        """Go on from a checkpoint: the next save supersedes whatever came after it.

        That save takes the run over, also where this handle was fenced meanwhile.
        """
        self.resumed_at, self._attempted = n, None
        self._taken = self._taken and not self.is_fenced(state)

    def committed(self) -> None:
        """Note that a commit of the trainer has landed: the run is ours, and the way back done."""
        self._taken, self.resumed_at, self._attempted = True, None, None

    def attempt(self, n: int, digest: Digest) -> None:
        """Remember what is about to be put, so that `recognize` knows it again."""
        self._attempted = (n, digest)

    def recognize(self, state: RunManifest) -> None:
        """Find out that an earlier save landed after all whose answers were lost."""
        if self._attempted is None or self.is_fenced(state):
            return
        n, digest = self._attempted
        if (n in state.by_n or state.is_evicted(n)) and state.record(n).manifest == digest:
            self.committed()

    def claim(self, state: RunManifest) -> list[Action]:
        """Return what the first save says besides its checkpoint: who is in charge, from where."""
        actions: list[Action] = []
        if not self._taken:
            actions.append(TakeOver(token=self._token, host=host_name()))
        if state.status != "running":
            actions.append(SetStatus(status="running"))
        if self.resumed_at is not None and state.is_superseded(self.resumed_at):
            raise Conflict(
                "training has gone back behind the checkpoint that this handle resumed from",
                where=f"{self._run_id}/{state.record(self.resumed_at).manifest.short}",
                hint="Another trainer did that. Call `run.restore()` to go on from what stands.",
            )
        if self.resumed_at is not None and (
            any(map(self.is_behind, state.newest_first())) or any(map(self.is_behind, state.phases))
        ):
            actions.append(Rewind(to=self.resumed_at))
        return actions

    def is_behind(self, record: CheckpointRecord | PhaseRecord) -> bool:
        """Return whether the next save supersedes a checkpoint, or a phase that was entered."""
        if self.resumed_at is None or record.superseded:
            return False
        return record.n > self.resumed_at

    def is_fenced(self, state: RunManifest) -> bool:
        """Return whether another trainer, or nobody, is in charge."""
        return state.writer is None or state.writer.token != self._token

    @property
    def begins(self) -> bool:
        """Whether this handle restored nothing and has not saved yet."""
        return not self._taken and self.resumed_at is None

    def check_allowed(self, state: RunManifest, *, takes_over: bool) -> None:
        """Refuse a save into a run that is over, or that another trainer has taken over.

        Raises:
            Conflict: The run is completed or dropped, or a fork that has nothing yet of its parent.
            Fenced: Another trainer has taken it over.
        """
        check_not_dropped(state)
        is_fork = state.created is not None and state.created.parent is not None
        if is_fork and not state.has_checkpoints:
            raise Conflict(
                "the fork broke off before it had its parent's checkpoint",
                where=self._run_id,
                hint="Call `registry.fork` with the same checkpoint and name again.",
            )
        if state.status == "completed":
            raise Conflict(
                "the run is completed",
                where=self._run_id,
                hint="Reopen it with `run.set_status('running')`, or begin another run.",
            )
        if takes_over and self._taken and self.is_fenced(state):
            winner = state.writer
            raise Fenced(
                "another trainer has taken this run over",
                where=self._run_id,
                found=f"{winner.host} at {format_time(winner.time_ms)}" if winner else None,
                hint="Stop this process; what it saved until then is kept.",
            )

    def base_order(self, state: RunManifest) -> Iterator[Digest]:
        """Yield the states that a save may be stored against: resumed from, newest, pinned.

        The first that has a tensor is what its deltas are to, so the nearest comes first.
        """
        if self.resumed_at in state.by_n:
            yield state.by_n[self.resumed_at].manifest
        for record in (state.latest(), *state.checkpoints[-1:]):
            if record is not None:
                yield record.manifest
        yield from (pin.manifest for pin in reversed(state.pins))


def check_not_dropped(state: RunManifest) -> None:
    """Refuse to add to the history of a run that was dropped.

    Raises:
        Conflict: It was.
    """
    if state.dropped is not None:
        raise Conflict(
            "the run was dropped",
            where=state.run_id,
            found=state.dropped,
            hint="Begin another run.",
        )
