"""Scan a run's log since a takeover: writes that landed, and takeovers by other trainers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.registry.errors import IntegrityError, ObjectNotFound, RolledBack, Stranded
from holdfast.registry.history import RunLog, format_time
from holdfast.registry.history.actions import AddCheckpoint, Commit, ReportMetrics, TakeOver
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.saving.journal.folder import RunFolder
from holdfast.registry.saving.journal.records import ID_DIGITS, Entry, Takeover


class LogScan:
    """A scan of a log; it continues where it stopped (J2, J6).

    The scan reads the slots themselves: a snapshot keeps no `write` ids, and only the last
    takeover.
    """

    def __init__(self, log: RunLog, start: int, ids: Sequence[str]) -> None:
        self._log = log
        self._ids = ids
        self._next = start
        self._commits: dict[str, int] = {}
        self._taken: list[tuple[int, TakeOver, Commit]] = []
        self.start = start

    def read_to(self, run: RunManifest) -> None:
        """Read every slot up to the head of a run."""
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
                case TakeOver():
                    self._taken.append((slot, action, commit))
        self._commits[commit.write] = n

    def commit_of(self, write: str) -> int | None:
        """Return the number of the commit with a write's checkpoint; `None` if there is none."""
        return self._commits.get(write)

    def takeover_of(self, folder: RunFolder, entry: Entry) -> Takeover:
        """Return the takeover of an entry, from the log if its file is lost."""
        try:
            return folder.takeover(entry.takeover)
        except (IntegrityError, ObjectNotFound):
            found = [
                Takeover(token=action.token, slot=slot)
                for slot, action, _ in self._taken
                if slot >= entry.search_from and action.token[:ID_DIGITS] in self._ids
            ]
            return folder.restore_takeover(entry.takeover, found)

    def require_taken(self, takeover: Takeover) -> None:
        """Check that this log has the takeover, and is not an older or shorter log."""
        if (takeover.slot, takeover.token) not in [
            (slot, one.token) for slot, one, _ in self._taken
        ]:
            raise RolledBack(
                "the log is not the one in which this machine took the run over",
                where=self._log.run_id,
                expected=f"its takeover in slot {takeover.slot}",
                found=f"{self._log.run.next_slot} slots without it",
                hint="The registry was replaced or set back. The journal keeps the saves: "
                "`holdfast journal push RUN FORK --to URL` puts them into a registry.",
            )

    def foreign(self, takeover: Takeover) -> Iterator[tuple[int, TakeOver, Commit]]:
        """Yield the takeovers by other machines since a takeover, with their slots and commits.

        A copy of this journal on another machine counts as another journal, with its own id.
        """
        first, ids = takeover.token[:ID_DIGITS], self._ids
        own = {first, *(ids[ids.index(first) :] if first in ids else ids[-1:])}
        for slot, action, commit in self._taken:
            if slot > takeover.slot and action.token[:ID_DIGITS] not in own:
                yield slot, action, commit

    def require_own(self, takeover: Takeover) -> None:
        """Check that no other machine has taken the run over since a takeover (J2)."""
        for _, action, commit in self.foreign(takeover):
            raise Stranded(
                "another machine took this run over before the save was in the registry",
                where=self._log.run_id,
                found=f"{action.host} at {format_time(commit.time_ms)}",
                hint="Stop this process. The save stays in the journal: `holdfast journal ls` "
                "lists it, `holdfast journal push` puts it into a fork.",
            )
