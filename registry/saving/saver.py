"""The saver that saves straight into the registry, and `RunHandle`, which has a saver.

`JournaledSaver` is for a handle with a journal, `CollectiveSaver` for ranks that save together.
All three have the same methods, a `Pipeline` and an `Ownership`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.registry.history import RunLog
from holdfast.registry.history.actions import RunStatus
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.saving.ownership import Ownership
from holdfast.registry.saving.pending import Backlog
from holdfast.registry.saving.pipeline import Pipeline
from holdfast.registry.saving.save_request import PlannedSave, SaveRequest, plan_save, take_apart
from holdfast.registry.store import Store
from holdfast.registry.writing import Committer, NewCommit

if TYPE_CHECKING:
    from holdfast.registry.saving.collective import CollectiveSaver
    from holdfast.registry.saving.journal import JournaledLine, JournaledSaver


class LocalSaver:
    """A saver whose saves return when they are durable in the registry.

    docs/architecture.md has the steps of a save.
    """

    def __init__(self, committer: Committer) -> None:
        self.ownership = Ownership(committer)
        self.pipeline = Pipeline(self.ownership, self.prepare, self.ownership.save)
        self.ownership.logged.goes_alone = lambda: not self.pipeline.is_busy

    def prepare(self, state: object, request: SaveRequest) -> PlannedSave:
        """Take a state apart, and check it against the rules of the run."""
        return plan_save(take_apart(state, request), self.ownership.run)

    def commit(self, change: NewCommit) -> RunManifest:
        """Commit a change that only the owner of a run may make; it takes the run over."""
        self.pipeline.settle()
        return self.ownership.commit(change)

    def set_status(self, status: RunStatus) -> None:
        """Set the run's status; any handle may."""
        self.pipeline.settle()
        self.ownership.logged.flush()  # a run that is over takes no entries
        self.ownership.set_status(status)

    def leave(self, status: RunStatus, error: BaseException | None = None) -> None:
        """Set the status, unless another trainer owns the run; after a signal `interrupted`."""
        self.ownership.leave(status, error)

    def close(self) -> None:
        """Finish the running saves and stop the thread."""
        self.pipeline.close()
        self.ownership.logged.flush()


@dataclass(frozen=True, slots=True)
class RunHandle:
    """An open run as the rest of Holdfast takes it: what reads it, commits to it and saves."""

    store: Store
    log: RunLog
    committer: Committer
    ownership: Ownership  # this handle's hold on the run
    saver: LocalSaver | JournaledSaver | CollectiveSaver
    #: The run as training sees it: the ownership, or with a journal the run that is expected.
    training: Ownership | JournaledLine
    journal: JournaledSaver | None = None  # the saver, if it has a journal
    ranks: CollectiveSaver | None = None  # the saver, if all ranks of a job save together

    @contextmanager
    def telling_ranks(self, step: int | None = None) -> Iterator[None]:
        """Tell the ranks that save together if a step before a save fails on this one."""
        with nullcontext() if self.ranks is None else self.ranks.telling_ranks(step):
            yield

    def wait(self, *, remote: bool, timeout_s: float | None) -> None:
        """Wait for the running saves; with `remote` also until a journal's are in the registry."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        self.saver.pipeline.wait(timeout_s)
        self.saver.pipeline.settle()
        if remote and self.journal is not None:
            self.journal.await_entries(None if until is None else until - time.monotonic())

    def backlog(self) -> Backlog | None:
        """Count the saves that only this machine's journal holds; `None` without a journal."""
        return None if self.journal is None else self.journal.backlog()


def ask(handle: RunHandle, step: object, **options: Any) -> SaveRequest:
    """Check the arguments of a save; ranks that save together all hear of an error."""
    with handle.telling_ranks():
        return SaveRequest.of(step, every_rank=handle.ranks is not None, **options)
