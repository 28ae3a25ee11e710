"""A process of the storm: its registry handle, its journal, its runs, and what it may be refused.

The roles are in `pushing` and `others`. Whatever a turn raises that is not one of the refusals here
is a violation, which the worker writes into its journal before it goes on.
"""

from __future__ import annotations

import os
import random
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.backends import open_backend
from holdfast.registry.errors import (
    Conflict,
    MissingObject,
    NotFound,
    RestoreFailed,
    StoreUnavailable,
)
from holdfast.registry.face.factory import open_on
from holdfast.registry.face.registry import Registry
from holdfast.registry.face.run import Run
from holdfast.registry.history.actions import Place
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.loading.stored import Stored
from holdfast.registry.values.digest import Digest
from tests.storm.contents import LOOSE, difference
from tests.storm.journal import Journal
from tests.storm.weather import DELETED, Weather
from tests.traces.recording import Recorded

#: What any call may say when others were faster, without anything being wrong.
REFUSALS = (Conflict, NotFound, StoreUnavailable)
#: Errors for a state that was evicted and collected since: to be confirmed.
LOSSES = (MissingObject, RestoreFailed)
#: Workers write to this many of the newest runs.
_RECENT = 12
#: Folder of the calls to the store, below that of the journals.
TRACE = "trace"
_ATTEMPTS = 10
#: A worker whose storm has forgotten it goes by itself.
_LONGEST_S = 3 * 3600


@dataclass(frozen=True)
class Part:
    """What a process is to do, and in which storm.

    Attributes:
        role: `pusher`, `collector`, `pruner` or `reader`.
        number: Among those of its role.
        life: How often it has been started.
        url: The registry.
        folder: Where the journals are.
        began_s: When the storm began, by the monotonic clock of the machine.
        seconds: How long it lasts.
        runs: How many runs may be begun in that time.
        pause_s: A worker pauses so long between its turns, on average.
        delay_s: The store takes up to so long, now and then.
        seed: Of the storm.
        seeds: Seeds of states by their ids.
    """

    role: str
    number: int
    life: int
    url: str
    folder: str
    began_s: float
    seconds: float
    runs: int
    pause_s: float
    delay_s: float
    seed: int
    seeds: Mapping[str, int]

    @property
    def who(self) -> str:
        """Which worker this is, however often it was started."""
        return f"{self.role}{self.number}"

    @property
    def journal(self) -> str:
        """Name of the journal of this process."""
        return f"{self.who}-{self.life:05d}"

    @property
    def elapsed_s(self) -> float:
        """Seconds since the storm began."""
        return time.monotonic() - self.began_s


@dataclass(frozen=True)
class Ref:
    """Something that a run holds.

    Attributes:
        kind: `checkpoint`, `gate` or `pool`.
        name: Commit number, name or version.
    """

    kind: str
    name: str | int

    def held(self, state: RunManifest) -> Digest | None:
        """Return the id of the state that this names, or `None` where it was evicted."""
        if state.dropped is not None:
            return None
        if self.kind == "gate":
            pin = state.pin("gate", str(self.name))
            return pin.manifest if pin else None
        if self.kind == "pool":
            entries = [one for one in state.roster() if one.version == self.name]
            return entries[0].manifest if entries else None
        record = state.by_n.get(int(self.name))
        return record.manifest if record and record.evicted is None else None

    def find(self, run: Run) -> Stored:
        """Return what this names."""
        if self.kind == "gate":
            return run.pins.gates.get(str(self.name))
        if self.kind == "pool":
            return run.pool.entry(int(self.name))
        return run.history.checkpoint(int(self.name))


def refs(state: RunManifest) -> list[Ref]:
    """Return everything that a run holds and that can be loaded."""
    if state.dropped is not None:
        return []
    return [
        *(Ref("checkpoint", one.n) for one in state.checkpoints if one.evicted is None),
        *(Ref("gate", pin.name) for pin in state.pins_of("gate")),
        *(Ref("pool", entry.version) for entry in state.roster()),
    ]


class Worker:
    """A process of the storm.

    Attributes:
        slow_commits: How likely the store is late with a slot of a log.
        patience: How many times the pause of the storm it waits between its turns.
    """

    slow_commits = 0.0
    patience = 1.0

    def __init__(self, part: Part) -> None:
        self.part = part
        self.chance = random.Random(f"{part.seed} {part.journal}")
        self.journal = Journal(part.folder, part.journal)
        self.reg = self._open()

    def turn(self) -> None:
        """Do one thing."""
        raise NotImplementedError

    def work(self) -> None:
        """Do one thing after another until this process is killed."""
        parent = os.getppid()
        while os.getppid() == parent and self.part.elapsed_s < _LONGEST_S:
            if self.chance.random() < 0.02:
                self.reg.close()
                self.reg = self._open()
                self.forget()
            self.guarded_turn()
            time.sleep(self.chance.uniform(0, 2 * self.patience * self.part.pause_s))

    def guarded_turn(self) -> None:
        """Do one thing, and say how it went where it failed."""
        try:
            self.turn()
        except REFUSALS as error:
            self.journal.say("refused", error=type(error).__name__, summary=error.what)
        except Exception as error:
            self.violation(f"{type(error).__name__}: {error}", trace=traceback.format_exc())

    def forget(self) -> None:
        """Let go of what belongs to the handle that was closed."""

    def violation(self, what: str, **more: object) -> None:
        """Say that a promise is broken."""
        self.journal.say("violation", what=what, at_s=self.part.elapsed_s, **more)

    def _open(self) -> Registry:
        deleted = os.path.join(self.part.folder, DELETED)  # noqa: PTH118
        inner = open_backend(self.part.url)
        self.weather = Weather(
            inner,
            self.chance,
            slow_commits=self.slow_commits,
            longest_s=self.part.delay_s,
            deleted=deleted,
        )
        return open_on(Recorded(self.weather, Path(self.part.folder) / TRACE))

    # Runs

    def shared(self) -> Run:
        """Return the run that all push into at this time."""
        return self.reg.run(self.shared_name(), create=True, seed=1, preset=LOOSE)

    def shared_name(self) -> str:
        """Return the name of the run that all push into at this time."""
        period = max(8.0, self.part.seconds / 8)
        born_ms = int(self.part.elapsed_s // period * period * 1000)
        return f"{born_ms:09d}-shared"

    def recent(self) -> list[str]:
        """Return the names of the newest runs."""
        return self.reg.run_names()[-_RECENT:]

    def may_begin(self) -> bool:
        """Return whether one more run may be begun by now."""
        share = min(1.0, self.part.elapsed_s / self.part.seconds)
        return len(self.reg.run_names()) < 12 + (self.part.runs - 12) * share

    def new_name(self) -> str:
        """Return a name for a run; names sort by the time at which they were made up."""
        born_ms = int(self.part.elapsed_s * 1000)
        return f"{born_ms:09d}-{self.part.who}-{self.chance.getrandbits(32):08x}"

    # Reading

    def read(self, run: Run, ref: Ref, *, by_name: bool = False) -> None:
        """Load what a run holds: the right bytes, or a refusal that the log confirms."""
        place: Place | None = None
        for attempt in range(_ATTEMPTS):
            try:
                found = (
                    self.reg.stored(f"{run.id}/{ref.find(run).digest.hex()}") if by_name else None
                )
                stored = found or ref.find(run)
                self.compare(stored, stored.load())
            except (*LOSSES, NotFound) as error:
                now = self._place(run, ref)
                if now is None:
                    self.journal.say("gone", run=run.id)
                    return
                if attempt and now == place:
                    self.violation(
                        f"{run.id} {ref}: held, and cannot be read: {error}", place=str(now)
                    )
                    return
                place = now
            else:
                self.journal.say("read", run=run.id)
                return
        self.journal.say("refused", error="moved too often", summary=run.id)

    def _place(self, run: Run, ref: Ref) -> Place | None:
        """Return the place of a state by the log as it is now; `None` where it was evicted."""
        state = run.refresh().manifest
        held = ref.held(state)
        return None if held is None else state.by_manifest[held]

    def compare(self, stored: Stored, state: object) -> None:
        """Hold a loaded state against what its id, and the seed in it, say that it is."""
        assert isinstance(state, dict)
        seed = state["model"]["seed"]
        if self.part.seeds.get(stored.digest.hex(), seed) != seed:
            self.violation(f"{stored.ref}: the state of another seed, {seed}")
        where = difference(state, seed)
        if where is not None:
            self.violation(f"{stored.ref}: wrong content at {where}")

    @contextmanager
    def confirming(self, run_id: str, ref: Ref) -> Iterator[None]:
        """Make sure that a state that could not be read was evicted, or can be read by now."""
        try:
            yield
        except LOSSES as error:
            self.journal.say("refused", error=type(error).__name__, summary=error.what)
            self.read(self.reg.run(run_id), ref)
