"""The pushers: they save again what was just evicted, in runs of their own and in a shared one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.registry.face.run import Run
from holdfast.registry.loading.checkpoint import Checkpoint
from tests.storm.contents import LOOSE, SEEDS, TIGHT, state_of
from tests.storm.worker import Part, Ref, Worker

PHASE = "league"
STREAM = "notes"
#: How many of the states that were evicted last a pusher chooses from.
_JUST_EVICTED = 6


class Pusher(Worker):
    """Saves, and now and then does everything else that names states."""

    slow_commits = 0.1

    def __init__(self, part: Part) -> None:
        super().__init__(part)
        self._own: Run | None = None
        self._last: tuple[Run, int, int] | None = None
        self._hinted: set[tuple[str, int]] = set()

    def forget(self) -> None:
        self._own = self._last = None

    def turn(self) -> None:
        acts: dict[Callable[[], None], int] = {
            self._save: 40,
            self._push: 30,
            self._save_again: 6,
            self._begin_anew: 4,
            self._fork: 4,
            self._undo: 6,
            self._promote: 5,
            self._set_gate: 1,
            self._append: 3,
            self._restore: 3,
        }
        (act,) = self.chance.choices(list(acts), list(acts.values()))
        act()

    # Saving

    def _save(self) -> None:
        run = self._mine()
        step = max((one.step for one in run.manifest.live()), default=0) + 1
        self._keep(run, run.save, self._seed(run), step)

    def _push(self) -> None:
        run = self.shared()
        self._keep(run, run.exchange.push, self._seed(run), self.chance.getrandbits(40))

    def _save_again(self) -> None:
        """Save what this worker saved last, whatever became of it."""
        if self._last is not None:
            run, seed, step = self._last
            self._keep(run, run.exchange.push if "shared" in run.id else run.save, seed, step)

    def _keep(self, run: Run, save: Callable[..., Checkpoint], seed: int, step: int) -> None:
        self.journal.say("saving", run=run.id, seed=seed, step=step)
        self.weather.packs_used()
        if save == run.save and self.chance.random() < 0.2:
            checkpoint = run.save_async(state_of(seed), step=step, phase=PHASE).wait()
        else:
            checkpoint = save(state_of(seed), step=step, phase=PHASE)
        reused, again = self.weather.packs_used()
        told = {"run": run.id, "n": checkpoint.handle.n, "id": checkpoint.digest.hex()}
        self.journal.say("saved", **told, seed=seed, step=step, reused=reused, again=again)
        if self.part.seeds[checkpoint.digest.hex()] != seed:
            self.violation(f"{run.id}, step {step}: saved as the id of another seed than {seed}")
        self._last = run, seed, step
        self._hint(run)

    def _hint(self, run: Run) -> None:
        """Tell the others which states this save has evicted."""
        gone = [one for one in run.history.manifest().checkpoints[-4:] if one.evicted is not None]
        new = [one for one in gone if (run.id, one.n) not in self._hinted]
        self._hinted.update((run.id, one.n) for one in new)
        self.journal.hint([self.part.seeds[one.manifest.hex()] for one in new])

    def _seed(self, run: Run) -> int:
        """Choose what to save: what was just evicted, what the run holds, or anything."""
        (source,) = self.chance.choices(["evicted", "held", "any"], [6, 2, 2])
        if source == "evicted":
            return self.chance.choice(self.journal.hinted(_JUST_EVICTED) or range(SEEDS))
        if source == "held":
            held = [self.part.seeds[one.manifest.hex()] for one in run.manifest.live()]
            return self.chance.choice(held or range(SEEDS))
        return self.chance.choice(range(SEEDS))

    # Runs

    def _mine(self) -> Run:
        """Return the run that this worker trains: what it had, its newest one, or a new one."""
        if self._own is not None and self._own.manifest.dropped is None:
            return self._own
        mine = [name for name in self.reg.run_names() if f"-{self.part.who}-" in name][-1:]
        for name in mine:
            run = self.reg.run(name)
            state = run.manifest
            broken_off = state.created and state.created.parent and not state.has_checkpoints
            if state.dropped is None and not broken_off and self.chance.random() < 0.8:
                self._own = run
                return run
        self._begin_anew()
        return self._own or self.shared()

    def _begin_anew(self) -> None:
        self._own = None
        if self.may_begin():
            preset = self.chance.choice([TIGHT, LOOSE])
            self._own = self.reg.create_run(self.new_name(), seed=1, preset=preset)
            self.journal.say("begun", run=self._own.id)

    def _fork(self) -> None:
        if not self.may_begin() or not self.recent():
            return
        run = self.reg.run(self.chance.choice(self.recent()))
        source = self._any_of(run.checkpoints())
        if source is None:
            return
        with self.confirming(run.id, Ref("checkpoint", source.handle.n)):
            fork = self.reg.fork(source, self.new_name())
            self.journal.say("forked", run=fork.id, id=source.digest.hex())
            self._own = fork

    def _restore(self) -> None:
        run = self._mine()
        at = self._any_of(run.checkpoints())
        if at is None:
            return
        with self.confirming(run.id, Ref("checkpoint", at.handle.n)):
            restored = run.restore(at if self.chance.random() < 0.5 else None)
            if restored is None:
                return
            self.compare(restored.checkpoint, restored.state)
            skipped = {attempt.digest for attempt in restored.report}
            for record in run.refresh().manifest.live():
                if record.manifest in skipped:
                    self.read(run, Ref("checkpoint", record.n))

    # Naming

    def _any_run(self) -> Run:
        return self._mine() if self.chance.random() < 0.5 else self.shared()

    def _any_of(self, checkpoints: list[Checkpoint]) -> Checkpoint | None:
        return self.chance.choice(checkpoints) if checkpoints else None

    def _undo(self) -> None:
        run = self._any_run()
        evicted = self._any_of(run.retention.evicted()[-3:])
        if evicted is None:
            return
        n = evicted.handle.n
        with self.confirming(run.id, Ref("checkpoint", n)):
            run.retention.undo(evicted)
            self.journal.say("undone", run=run.id, n=n)

    def _promote(self) -> None:
        self._name("promoted", lambda run, one: {"version": run.pool.promote(one).version})

    def _set_gate(self) -> None:
        name = f"{self.chance.getrandbits(32):08x}"
        self._name("gated", lambda run, one: {"gate": run.pins.gates.set(name, one) and name})

    def _name(self, did: str, act: Callable[[Run, Checkpoint], dict[str, Any]]) -> None:
        run = self._any_run()
        checkpoint = self._any_of(run.checkpoints())
        if checkpoint is None:
            return
        with self.confirming(run.id, Ref("checkpoint", checkpoint.handle.n)):
            told = act(run, checkpoint)
            self.journal.say(did, run=run.id, id=checkpoint.digest.hex(), **told)

    def _append(self) -> None:
        run, note = self.shared(), f"{self.part.who} {self.chance.getrandbits(48):x}"
        run.streams[STREAM].append({"step": 1, "note": note})
        self.journal.say("appended", run=run.id, note=note)
