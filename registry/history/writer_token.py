"""The writer token: who owns a run, where it resumed, and which saves that forbids."""

from __future__ import annotations

import copy
import logging
import secrets
from collections.abc import Iterator

from holdfast.backends.escape import printable, quoted
from holdfast.registry.errors import Conflict, Fenced, Hint
from holdfast.registry.history.actions import Action, Rewind, SetStatus, TakeOver
from holdfast.registry.history.holds import check_rewind, own_time_ms
from holdfast.registry.history.log_values import format_time
from holdfast.registry.history.replay import CheckpointRecord, PhaseRecord, RunManifest
from holdfast.registry.values import Digest, host_name

_LOGGER = logging.getLogger("holdfast")
_RESTORE = "Continue its training, which restores its newest checkpoint."
TRAIN_ON = Hint("Call `run.restore()` to continue from its newest checkpoint.", _RESTORE)
_GO_ON = Hint("To go on with this one, call `run.restore()`: it loads the newest checkpoint.")


class WriterToken:
    """The right of one handle to save into a run.

    Attributes:
        token: Random; the newest one of a run's log may save.
        resumed_at: Commit number of the checkpoint that training resumed from; `None` if the next
            save simply continues.
        has_asked: Whether the handle looked for a state to resume from.
        resumes: How often training has resumed.
        prefix: With which its tokens begin: the id of a journal, or nothing.
        now_ms: Returns the time by which a hold is over, in milliseconds: best the store's.
    """

    prefix = ""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self.resumed_at: int | None = None
        self.has_asked = self._has_warned = False
        self.resumes = 0
        self.now_ms = own_time_ms
        self._keeps = -1
        self.reset()

    def reset(self) -> None:
        """Take a new token, as in a forked process: the old token is its parent's."""
        self.token = f"{self.prefix}{secrets.token_hex(16)}"
        self._taken = False
        self._attempted: tuple[int, Digest] | None = None
        self._lent: int | None = None

    def lend(self, run: RunManifest) -> WriterToken:
        """Return the token for another process that saves for this handle."""
        lent = copy.copy(self)
        lent._lent, lent.now_ms = None, own_time_ms  # that process asks the store by itself
        if self._lent is None:
            self._lent = run.commits
        return lent

    def _recognize_lent(self, run: RunManifest) -> None:
        """Note it if the other process has saved."""
        if self._lent is None or self.is_fenced(run):
            return
        if any(record.n >= self._lent for record in run.newest_first()):
            self.committed()

    def resume_at(self, n: int, run: RunManifest, *, keeps: int | None = None) -> None:
        """Continue from a checkpoint: the next save supersedes all later checkpoints.

        That save takes the run over, even if this handle was fenced meanwhile.
        """
        self.resumed_at, self._attempted, self._lent = n, None, None
        self.resumes += 1
        self._keeps = n if keeps is None else keeps
        self._taken = self._taken and not self.is_fenced(run)

    @property
    def keeps(self) -> int | None:
        """Commit number of the pivot, after the checkpoint resumed from, that is not superseded."""
        return None if self._keeps == self.resumed_at else self._keeps

    def committed(self) -> None:
        """Note that a commit of this trainer has landed: the run is ours, the rewind is done."""
        self._taken, self.resumed_at, self._attempted, self._lent = True, None, None, None

    def attempt(self, n: int, digest: Digest) -> None:
        """Remember a checkpoint that is about to be committed, for `recognize`."""
        self._attempted = (n, digest)

    def recognize(self, run: RunManifest) -> None:
        """Note it if an earlier save has landed: unanswered, or made by another process."""
        self._recognize_lent(run)
        if self._attempted is None or self.is_fenced(run):
            return
        n, digest = self._attempted
        if (n in run.by_n or run.is_evicted(n)) and run.record(n).manifest == digest:
            self.committed()

    def claim(self, run: RunManifest) -> list[Action]:
        """Return the actions by which the next save takes the run over and rewinds it."""
        self._recognize_lent(run)
        actions: list[Action] = []
        if not self._taken:
            actions.append(TakeOver(token=self.token, host=host_name()))
        if run.status != "running":
            actions.append(SetStatus(status="running"))
        if self.resumed_at is not None and run.is_superseded(self.resumed_at):
            raise Conflict(
                "the checkpoint that this handle resumed from is superseded",
                where=f"{self._run_id}/{run.record(self.resumed_at).manifest.short}",
                hint=Hint.of(
                    "Another trainer went back further.",
                    Hint("Call `run.restore()` to continue there.", _RESTORE),
                ),
            )
        if self.resumed_at is not None and (
            any(map(self.is_behind, run.newest_first())) or any(map(self.is_behind, run.phases))
        ):
            if self._keeps != self.resumed_at:
                raise Conflict(
                    "another trainer has continued after the pivot that this handle resumed from",
                    where=self._run_id,
                    hint=TRAIN_ON,
                )
            check_rewind(run, self._keeps, self.now_ms)
            actions.append(Rewind(to=self.resumed_at))
        return actions

    def warn_of_owner(self, run: RunManifest) -> None:
        """Warn once if a handle that restored nothing is about to take a run from its trainer."""
        owner = run.writer
        is_taken = owner is not None and owner.token != self.token and run.status == "running"
        if self.has_asked or self._has_warned or self._taken or not is_taken:
            return
        assert owner is not None
        self._has_warned = True
        _LOGGER.warning(
            "%s: another trainer owns this run (%s since %s), and this handle never called "
            "run.restore(): it takes the run over, and the other one's next save is refused",
            self._run_id,
            printable(owner.host),
            format_time(owner.time_ms),
        )

    def is_behind(self, record: CheckpointRecord | PhaseRecord) -> bool:
        """Return whether the next save supersedes a checkpoint, or a phase that was entered."""
        if self.resumed_at is None or record.superseded:
            return False
        return record.n > self._keeps

    def is_fenced(self, run: RunManifest) -> bool:
        """Return whether another trainer, or nobody, owns the run."""
        return run.writer is None or run.writer.token != self.token

    @property
    def begins(self) -> bool:
        """Whether this handle restored nothing and has not saved yet."""
        return not self._taken and self.resumed_at is None

    def check_allowed(self, run: RunManifest, *, takes_over: bool) -> None:
        """Refuse a save into a run that was dropped or completed, or that another trainer has."""
        check_not_dropped(run)
        is_fork = run.created is not None and run.created.parent is not None
        if is_fork and not run.has_checkpoints:
            raise Conflict(
                "the fork was interrupted before it got its parent's checkpoint",
                where=self._run_id,
                hint=Hint(
                    "Call `registry.fork` with the same checkpoint and name again.",
                    "Call `holdfast run create --from` with the same checkpoint and name again.",
                ),
            )
        check_not_completed(run)
        if takes_over and self._taken and self.is_fenced(run):
            raise self._fenced(run, "Stop one of the two; what both have saved is kept.", _GO_ON)

    def check_alone(self, run: RunManifest) -> None:
        """Refuse a trainer that found nothing to restore, if another one has saved since."""
        if self.has_asked and self.begins and run.writer is not None and self.is_fenced(run):
            hint = "Two trainers of this run were started. Stop one; started again, it continues"
            raise self._fenced(run, f"{hint} from what was saved.")

    def _fenced(self, run: RunManifest, *hints: str | Hint) -> Fenced:
        winner = run.writer
        if winner is not None and winner.host == host_name():
            child = "Perhaps a child of this process saved, such as a worker of a DataLoader."
            hints = (*hints, child)
        return Fenced(
            "another trainer has taken this run over",
            where=self._run_id,
            found=f"{winner.host} at {format_time(winner.time_ms)}" if winner else None,
            hint=Hint.of(*hints),
        )

    def base_order(self, run: RunManifest) -> Iterator[Digest]:
        """Yield the states against which a save may be stored: resumed from, newest, pinned.

        Deltas of a tensor have the first state as base that has the tensor, so the nearest state
        comes first.
        """
        if self.resumed_at in run.by_n:
            yield run.by_n[self.resumed_at].manifest
        for record in (run.latest(), *run.checkpoints[-1:]):
            if record is not None:
                yield record.manifest
        yield from (pin.manifest for pin in reversed(run.pins))


def check_not_completed(run: RunManifest) -> None:
    """Refuse to train a run that is completed, or to say that it stopped."""
    if run.status == "completed":
        raise Conflict(
            "the run is completed",
            where=run.run_id,
            hint=Hint(
                "Reopen it with `run.status = 'running'`, or create another run.",
                f"Reopen it with `holdfast run set {run.run_id} --status running`, "
                "or create another run.",
            ),
        )


def check_not_dropped(run: RunManifest) -> None:
    """Refuse to add to the history of a run that was dropped."""
    if run.dropped is not None:
        raise Conflict(
            "the run was dropped, and its name cannot be used again"
            if run.is_dropped_for_good
            else "the run was dropped",
            where=run.run_id,
            found=f"dropped for the reason {quoted(run.dropped)}",
            hint=Hint.of(how_to_undrop(run), "Or create a run of another name."),
        )


def how_to_undrop(run: RunManifest) -> Hint | str | None:
    """Return how a dropped run is brought back; `None` if it never can be."""
    if run.is_dropped_for_good:
        return None
    if run.is_hidden:
        return Hint(
            "`run.retention.undrop()` brings it back.",
            f"`holdfast undo {run.run_id}` brings it back.",
        )
    return Hint(
        "It was freed since: `run.retention.undrop(URL)` brings it back from a mirror that has it.",
        f"It was freed since: `holdfast undo {run.run_id} --from MIRROR` brings it back from "
        "a mirror that has it.",
    )
