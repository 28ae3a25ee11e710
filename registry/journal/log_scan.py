"""What the log of a run says since a takeover: writes that landed, and takeovers of others."""

from __future__ import annotations

from holdfast.registry.errors import Stranded
from holdfast.registry.history.actions import AddCheckpoint, Commit, ReportMetrics, TakeOver
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.log_values import format_time
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.journal.records import Takeover


class LogScan:
    """A scan of a log that goes on where it ended (J2, J6).

    The scan reads the slots themselves: a snapshot keeps no `write` ids, and no takeovers but the
    last.

    Args:
        log: The log.
        start: The first slot.
        journal_id: The id with which the tokens of this journal begin.
    """

    def __init__(self, log: RunLog, start: int, journal_id: str) -> None:
        self._log = log
        self._journal_id = journal_id
        self._next = start
        self._commits: dict[str, int] = {}
        self._foreign: list[tuple[int, TakeOver, Commit]] = []
        self.start = start

    def read_to(self, run: RunManifest) -> None:
        """Read every slot that a run was replayed from.

        Raises:
            IntegrityError: A slot is damaged or missing.
        """
        for slot in self._log.fetch(range(self._next, run.next_slot)):
            for _, commit in slot.commits:
                self._take(slot.number, commit)
            self._next = slot.number + 1

    def _take(self, slot: int, commit: Commit) -> None:
        n = commit.n
        for action in commit.actions:
            match action:
                case ReportMetrics():
                    n = action.checkpoint  # a save that repeated a checkpoint
                case AddCheckpoint():
                    n = commit.n
                case TakeOver() if not action.token.startswith(self._journal_id):
                    self._foreign.append((slot, action, commit))
        self._commits[commit.write] = n

    def commit_of(self, write: str) -> int | None:
        """Return the number of the commit that has the checkpoint of a write; `None` if none."""
        return self._commits.get(write)

    def require_own(self, takeover: Takeover) -> None:
        """Check that no other machine has taken the run over since a takeover (J2).

        Raises:
            Stranded: One has.
        """
        for slot, action, commit in self._foreign:
            if slot > takeover.slot:
                raise Stranded(
                    "another machine took this run over before the save was in the registry",
                    where=self._log.run_id,
                    found=f"{action.host} at {format_time(commit.time_ms)}",
                    hint="Stop this process. The save stays in the journal: `holdfast journal ls` "
                    "lists it, `holdfast journal push` puts it into a fork.",
                )
