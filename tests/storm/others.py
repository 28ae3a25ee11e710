"""The collectors, the pruner and the readers."""

from __future__ import annotations

from holdfast.registry.face.run import Run
from holdfast.registry.spec import Retention
from tests.storm.pushing import Pusher
from tests.storm.worker import Part, Worker, refs

#: Runs that are kept; of more the pruner drops old ones.
_LIVE_RUNS = 9


class Collector(Worker):
    """Collects without grace."""

    slow_commits = 0.01
    patience = 4.0

    def turn(self) -> None:
        report = self.reg.gc(grace_s=0)
        told = {"deleted": report.deleted.objects, "spared": report.spared.objects}
        self.journal.say("collected", epoch=report.epoch, **told)


class Pruner(Worker):
    """Lets go of checkpoints in all runs, and of whole runs; now and then it repacks one."""

    def __init__(self, part: Part) -> None:
        super().__init__(part)
        self._dropped: set[str] = set()

    def turn(self) -> None:
        shared = self.shared_name()
        live = self._live()
        if not live:
            return
        if self.chance.random() < 0.03:
            self._repack(self.chance.choice(live))
        elif shared in live and self.chance.random() < 0.4:
            self._prune(self.reg.run(shared))
        elif len(live) > _LIVE_RUNS:
            self._drop(self.reg.run(min(live, key=lambda name: (name == shared, name))))
        else:
            self._prune(self.reg.run(self.chance.choice(live)))

    def _live(self) -> list[str]:
        """Return the runs that are not known to be dropped; of the oldest all is known."""
        live = [name for name in self.reg.run_names() if name not in self._dropped]
        for name in list(live):
            if self.reg.run(name).manifest.dropped is None:
                break
            self._dropped.add(name)
            live.remove(name)
        return live

    def _drop(self, run: Run) -> None:
        self._dropped.add(run.id)
        if run.manifest.dropped is not None:
            return
        seeds = [one.manifest for one in run.manifest.checkpoints if one.evicted is None]
        run.retention.drop("the storm has moved on", now=True)
        self.journal.say("dropped", run=run.id)
        self.journal.hint([self.part.seeds[manifest.hex()] for manifest in seeds])

    def _prune(self, run: Run) -> None:
        plan = run.retention.prune(Retention(last=1))
        gone = [verdict.checkpoint for verdict in plan.evicted]
        self.journal.say("evicted", run=run.id, checkpoints=[one.n for one in gone])
        self.journal.hint([self.part.seeds[one.manifest.hex()] for one in gone])

    def _repack(self, name: str) -> None:
        report = self.reg.repack([name])
        self.journal.say("repacked", placed=report.checkpoints)


class Reader(Worker):
    """Loads whatever a run holds."""

    def __init__(self, part: Part) -> None:
        super().__init__(part)
        self._runs: list[Run] = []

    def forget(self) -> None:
        self._runs = []

    def turn(self) -> None:
        run = self._run()
        found = refs(run.manifest) if run else []
        if run and found:
            ref = self.chance.choice(found)
            by_name = ref.kind == "checkpoint" and self.chance.random() < 0.3
            self.read(run, ref, by_name=by_name)

    def _run(self) -> Run | None:
        """Return a run: one that this handle has read before, as it stood then, or another."""
        if self._runs and self.chance.random() < 0.5:
            run = self.chance.choice(self._runs)
            return run if self.chance.random() < 0.3 else run.refresh()
        recent = self.recent()
        if not recent:
            return None
        run = self.reg.run(self.chance.choice(recent))
        self._runs = [*self._runs[-3:], run]
        return run


ROLES: dict[str, type[Worker]] = {
    "pusher": Pusher,
    "collector": Collector,
    "pruner": Pruner,
    "reader": Reader,
}


def work(part: Part) -> None:
    """Be a process of the storm."""
    ROLES[part.role](part).work()
