"""The inner value of an open registry: its store and its journal, and how its runs are opened."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from holdfast.registry.errors import Conflict, Hint, NotFound
from holdfast.registry.objects import check_run_id
from holdfast.registry.store import Store
from holdfast.registry.values import near

if TYPE_CHECKING:
    from holdfast.registry.history import RunLog
    from holdfast.registry.history.actions import CreateRun
    from holdfast.registry.saving import RunHandle
    from holdfast.registry.saving.collective import Group
    from holdfast.registry.saving.journal import Journal

_LOGGER = logging.getLogger("holdfast")


class RegistryHandle:
    """An open registry as the rest of Holdfast takes it. Imports what some calls need in them."""

    def __init__(self, store: Store, journal: Journal | None = None) -> None:
        self.store = store
        self.journal = journal  # where its runs are saved first
        self.suggests = True  # whether the error of a run that is absent lists all runs

    @property
    def url(self) -> str:
        """Where it is, without secrets."""
        return self.store.backend.url

    def run_names(self) -> list[str]:
        """Return the names of all runs, sorted; warn of those that were here and are gone."""
        from holdfast.registry.history import list_runs

        # Before the listing: a run that begins meanwhile would be seen, and not listed.
        seen = self.store.heads.all() if self.store.heads is not None else {}
        names = list_runs(self.store)
        for gone in sorted(seen.keys() - set(names)):
            _LOGGER.warning("%s: the run %s was here and is gone", self.url, gone)
        return names

    def begin_run(self, run_id: str | None, action: CreateRun) -> RunLog:
        """Create a run, under a default name if none is given; return its log."""
        from holdfast.registry.history import RunLog, default_ids
        from holdfast.registry.spec import RunSpec

        for name in [run_id] if run_id is not None else default_ids(int(action.seed, 16)):
            log = RunLog(self.store, check_run_id(name))
            if self.store.heads is not None and self.store.heads.seen(name) is not None:
                log.open()  # it exists, or did: `open` refuses a run that is gone
            if self.begin(log, action):
                if log.run.spec == RunSpec(monitors=action.monitors):
                    _LOGGER.info("%s: no preset: every checkpoint is kept", name)
                return log
        raise Conflict(
            "a run of this name exists",
            where=run_id,
            hint=Hint(
                "Continue it with reg.run(id), or choose another name.", "Choose another name."
            ),
        )

    def begin(self, log: RunLog, action: CreateRun) -> bool:
        """Put commit 0; return whether this call created the run."""
        from holdfast.registry.history import Epochs, begin

        look = log.look()  # meanwhile
        Epochs.of(self.store).observe()  # nobody begins a run in a frozen registry
        return begin(log, action, look)

    def open_log(self, name: str, *, must_exist: bool = True, by_id: bool = False) -> RunLog:
        """Open the log of a run; `by_id`: however old it is, as an id names the same bytes."""
        from holdfast.registry.history import RunLog, list_runs

        log = RunLog(self.store, check_run_id(name))
        log.open(check_head=not by_id)
        if must_exist and log.run.commits == 0:
            listed = Hint(
                "`reg.run_names()` lists the runs; `reg.run(name, create=True)` begins one.",
                "`holdfast run ls` lists the runs.",
            )
            hint = (near(name, list_runs(self.store)) or listed) if self.suggests else None
            raise NotFound("no such run", where=f"{self.url}: {name}", hint=hint)
        return log

    def open_copy(self, name: str) -> RunLog | None:
        """Return a run from the journal, if the registry is away and the journal has the run."""
        if self.journal is None or not self.store.is_away:
            return None
        from holdfast.registry.history import RunLog
        from holdfast.registry.saving.journal import RunFolder

        log = RunLog(self.store, check_run_id(name))
        folder = RunFolder(self.journal, self.store.config.id, name)
        return log if folder.open_copy(log) else None

    def run_handle(self, log: RunLog, group: Group | None = None) -> RunHandle:
        """Return the handle of an opened run, with the saver that fits: the group's, or ours."""
        from holdfast.registry.saving import LocalSaver, RunHandle
        from holdfast.registry.writing import Committer, StateWriter

        committer = Committer(StateWriter(self.store, log))
        saver: LocalSaver | JournaledSaver | CollectiveSaver
        journaled, ranks = None, None
        if group is not None:
            from holdfast.registry.saving.collective import CollectiveSaver

            saver = ranks = CollectiveSaver(committer, group)
        elif self.journal is not None:
            from holdfast.registry.saving.journal import JournaledSaver

            saver = journaled = JournaledSaver(committer, self.journal)
        else:
            saver = LocalSaver(committer)
        own = saver.ownership
        training = own if journaled is None else journaled.line
        return RunHandle(self.store, log, committer, own, saver, training, journaled, ranks)
