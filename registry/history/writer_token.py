"""Who is in charge of a run: the writer token, where training resumed, and what that forbids."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from holdfast.registry.errors import Conflict, Fenced
from holdfast.registry.history.actions import Action, Rewind, SetStatus, TakeOver
from holdfast.registry.history.log_values import format_time
from holdfast.registry.history.replay import CheckpointRecord, PhaseRecord, RunManifest
from holdfast.registry.values.digest import Digest
from holdfast.registry.values.process import host_name


class WriterToken:
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

    def resume_at(self, n: int, run: RunManifest) -> None:
        """Go on from a checkpoint: the next save supersedes whatever came after it.

        That save takes the run over, also where this handle was fenced meanwhile.
        """
        self.resumed_at, self._attempted = n, None
        self._taken = self._taken and not self.is_fenced(run)

    def committed(self) -> None:
        """Note that a commit of the trainer has landed: the run is ours, and the way back done."""
        self._taken, self.resumed_at, self._attempted = True, None, None

    def attempt(self, n: int, digest: Digest) -> None:
        """Remember what is about to be put, so that `recognize` knows it again."""
        self._attempted = (n, digest)

    def recognize(self, run: RunManifest) -> None:
        """Find out that an earlier save landed after all whose answers were lost."""
        if self._attempted is None or self.is_fenced(run):
            return
        n, digest = self._attempted
        if (n in run.by_n or run.is_evicted(n)) and run.record(n).manifest == digest:
            self.committed()

    def claim(self, run: RunManifest) -> list[Action]:
        """Return what the first save says besides its checkpoint: who is in charge, from where."""
        actions: list[Action] = []
        if not self._taken:
            actions.append(TakeOver(token=self._token, host=host_name()))
        if run.status != "running":
            actions.append(SetStatus(status="running"))
        if self.resumed_at is not None and run.is_superseded(self.resumed_at):
            raise Conflict(
                "training has gone back behind the checkpoint that this handle resumed from",
                where=f"{self._run_id}/{run.record(self.resumed_at).manifest.short}",
                hint="Another trainer did that. Call `run.restore()` to go on from what stands.",
            )
        if self.resumed_at is not None and (
            any(map(self.is_behind, run.newest_first())) or any(map(self.is_behind, run.phases))
        ):
            actions.append(Rewind(to=self.resumed_at))
        return actions

    def is_behind(self, record: CheckpointRecord | PhaseRecord) -> bool:
        """Return whether the next save supersedes a checkpoint, or a phase that was entered."""
        if self.resumed_at is None or record.superseded:
            return False
        return record.n > self.resumed_at

    def is_fenced(self, run: RunManifest) -> bool:
        """Return whether another trainer, or nobody, is in charge."""
        return run.writer is None or run.writer.token != self._token

    @property
    def begins(self) -> bool:
        """Whether this handle restored nothing and has not saved yet."""
        return not self._taken and self.resumed_at is None

    def check_allowed(self, run: RunManifest, *, takes_over: bool) -> None:
        """Refuse a save into a run that is over, or that another trainer has taken over.

        Raises:
            Conflict: The run is completed or dropped, or a fork that has nothing yet of its parent.
            Fenced: Another trainer has taken it over.
        """
        check_not_dropped(run)
        is_fork = run.created is not None and run.created.parent is not None
        if is_fork and not run.has_checkpoints:
            raise Conflict(
                "the fork broke off before it had its parent's checkpoint",
                where=self._run_id,
                hint="Call `registry.fork` with the same checkpoint and name again.",
            )
        if run.status == "completed":
            raise Conflict(
                "the run is completed",
                where=self._run_id,
                hint="Reopen it with `run.set_status('running')`, or begin another run.",
            )
        if takes_over and self._taken and self.is_fenced(run):
            winner = run.writer
            raise Fenced(
                "another trainer has taken this run over",
                where=self._run_id,
                found=f"{winner.host} at {format_time(winner.time_ms)}" if winner else None,
                hint="Stop this process; what it saved until then is kept.",
            )

    def base_order(self, run: RunManifest) -> Iterator[Digest]:
        """Yield the states that a save may be stored against: resumed from, newest, pinned.

        The first that has a tensor is what its deltas are to, so the nearest comes first.
        """
        if self.resumed_at in run.by_n:
            yield run.by_n[self.resumed_at].manifest
        for record in (run.latest(), *run.checkpoints[-1:]):
            if record is not None:
                yield record.manifest
        yield from (pin.manifest for pin in reversed(run.pins))


def check_not_dropped(run: RunManifest) -> None:
    """Refuse to add to the history of a run that was dropped.

    Raises:
        Conflict: It was.
    """
    if run.dropped is not None:
        raise Conflict(
            "the run was dropped",
            where=run.run_id,
            found=run.dropped,
            hint="Begin another run.",
        )
