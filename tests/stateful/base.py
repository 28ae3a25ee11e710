"""The base of all rules: two registries, stopped calls, and the conditions after each step."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant

from holdfast.backends.memory import MemoryBackend
from holdfast.backends.wrappers import InjectedCrash
from holdfast.registry.errors import (
    Archived,
    Conflict,
    IntegrityError,
    InvalidInput,
    NotFound,
    RolledBack,
    StoreUnavailable,
    Thinned,
)
from holdfast.registry.face.run import Run
from holdfast.registry.history import creating as creation
from holdfast.registry.history import log
from holdfast.registry.history.log import RunLog
from holdfast.registry.loading.checkpoint import Checkpoint
from holdfast.registry.loading.stored import Stored
from holdfast.registry.upkeep.gc import Collector
from holdfast.registry.upkeep.run_notes import Notes
from holdfast.registry.values.digest import Digest
from tests.stateful.book import Book, RunBook, cut_to
from tests.stateful.contents import CONTENTS, content, digest_of
from tests.stateful.world import Act, Clock, Process, Shelf, new_shelf
from tests.support.states import same

#: Runs that are begun in each registry; the names tell which.
RUNS = ("h1", "h2", "h3", "h4", "h5", "h6"), ("m1", "m2", "m3")
#: Processes of each registry, beside those of collectors.
PROCESSES = 4
#: Calls that go on at once and are stopped somewhere.
ACTS = 3
COLLECTORS = 3

#: An answer that says: not so. Nothing was done.
REFUSALS = (Conflict, InvalidInput, NotFound)

numbers = st.integers(0, 999)
#: States to save; the second half stands for unneeded ones.
states = st.integers(0, 2 * CONTENTS - 1)
sides = st.sampled_from((0, 0, 0, 0, 1))
graces = st.sampled_from((0.0, 0.0, 0.0, 60.0, 86_400.0))

#: Before or after which call to the stores something stops; not at all without it.
Stop = tuple[int, bool] | None
Misses = Literal["never", "beside others", "ever"]
#: Looks whether what was said to be done is done.
Check = Callable[[], object]
_T = TypeVar("_T")


def _stop(number: int) -> Stop:
    return None if number < 0 else (number * number // 200, number % 2 == 1)


#: Early calls more often than late ones: there are the windows between looking and acting.
stops = st.integers(0, 150).map(lambda number: _stop(number - 70))


@dataclass
class Sweep:
    """A collector at work."""

    process: Process
    collector: Collector
    step: int = 0

    @property
    def is_idle(self) -> bool:
        return self.process.act is None


@dataclass
class Side:
    """A registry with everybody who works on it."""

    shelf: Shelf
    book: Book
    processes: list[Process]
    sweeps: list[Sweep] = field(default_factory=list)

    def idle(self) -> list[Process]:
        return [process for process in self.processes if process.act is None]


@dataclass
class Doing:
    """A call that was stopped somewhere."""

    what: str
    act: Act
    misses: Misses
    processes: list[Process]

    @property
    def may_miss(self) -> bool:
        return self.misses == "ever" or (self.misses == "beside others" and self.act.was_stopped)


@dataclass
class Reader:
    """A state that somebody opened, and has not read yet."""

    side: Side
    run: str
    stored: Stored


class Base(RuleBasedStateMachine):
    """Two registries, processes that work on them, and the model of each."""

    #: How often what was called ended how, over all examples.
    tally: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        # It would turn half of the rules off in most lives; what is looked for takes many of them.
        self._rules_strategy.enabled_rules_strategy = st.just(SimpleNamespace(is_enabled=bool))
        self.patch = pytest.MonkeyPatch()
        self.clock = Clock()
        for name, module in list(sys.modules.items()):
            if name.startswith("holdfast.registry.") and getattr(module, "time", None) is time:
                self.patch.setattr(module, "time", self.clock)
        # It asks git, which takes longer than all the rest.
        self.patch.setattr(creation, "describe_environment", dict)
        # Often enough that a run of a few slots has some.
        self.patch.setattr(log, "SNAPSHOT_EVERY", 5)
        truths: dict[Digest, Any] = {}
        self.sides = [self._new_side(truths) for _ in range(2)]
        self.doing: list[Doing] = []
        self.readers: list[Reader] = []

    def _new_side(self, truths: dict[Digest, Any]) -> Side:
        shelf = new_shelf()
        book = Book(shelf, Process(shelf, reads_all=True).registry.handle.store, truths)
        return Side(shelf, book, [Process(shelf) for _ in range(PROCESSES)])

    # Choosing

    @staticmethod
    def pick(known: Sequence[_T], number: int) -> _T:
        return known[number % len(known)]

    def process(self, side: Side, number: int) -> Process | None:
        """Return a process with nothing else to do."""
        idle = side.idle()
        return self.pick(idle, number) if idle else None

    def own_run(self, side: int, number: int) -> RunBook | None:
        """Return a run that is written in this registry."""
        known = self.sides[side].book.runs
        names = [name for name in RUNS[side] if name in known]
        return known[self.pick(names, number)] if names else None

    def content(self, side: int, number: int) -> int:
        """Return the number of a state to save: often an unneeded one that still exists."""
        there = self.sides[side]
        if number >= CONTENTS:
            held = {digest for run in there.book.runs.values() for digest in run.held()}
            unneeded = there.shelf.manifests() - held
            known = [one for one in range(CONTENTS) if digest_of(content, one) in unneeded]
            if known:
                return self.pick(known, number)
        return number % CONTENTS

    def checkpoint(self, run: Run, number: int) -> Checkpoint:
        """Return a checkpoint as a handle knows the run, perhaps long gone; newer ones more often.

        Raises:
            NotFound: There is none.
        """
        known = run.history.manifest().checkpoints
        if not known:
            raise NotFound("none yet")
        return run.history.checkpoint(known[max(0, len(known) - 1 - number % 5)].n)

    # Doing

    def call(
        self,
        what: str,
        work: Callable[[], Check | None],
        processes: list[Process],
        stop: Stop,
        *,
        misses: Misses = "never",
    ) -> None:
        """Let processes do something, at once or up to a stop.

        Args:
            what: Its name in the tally.
            work: Does it; returns a check to be made when the model has been brought up to date.
            processes: Who does it.
            stop: Where it stops.
            misses: Whether it may find that what it needs is gone: never, when others came in
                between, or in any case.
        """
        act = Act(work, processes)
        doing = Doing(what, act, misses, processes)
        if stop is None or len(self.doing) >= ACTS:
            act.do()
        else:
            act.go(stop[0], after=stop[1])
        self.settle(doing)

    def settle(self, doing: Doing) -> None:
        """Note how a call ended, if it has."""
        act = doing.act
        self.read()
        if not act.is_over:
            if doing not in self.doing:
                self.doing.append(doing)
            return
        if doing in self.doing:
            self.doing.remove(doing)
        match act.error:
            case None:
                ending = "done"
                if act.outcome is not None:
                    act.outcome()
            case InjectedCrash():
                ending = "killed"
                self._bury(doing.processes)
            case StoreUnavailable() if act.was_failed:
                ending = "no answer"
            case Archived() if any(side.shelf.archived for side in self.sides):
                ending = "archived"
            case Thinned():
                ending = "refused: Thinned"
            case IntegrityError() if doing.may_miss:
                ending = "missing"
            case error if isinstance(error, REFUSALS):
                ending = f"refused: {type(error).__name__}"
            case error:
                raise error
        stopped = ", stopped on the way" if act.was_stopped else ""
        Base.tally[f"{doing.what}: {ending}{stopped}"] += 1

    def _bury(self, processes: list[Process]) -> None:
        for side in self.sides:
            side.sweeps = [one for one in side.sweeps if one.process not in processes]
            side.processes = [
                Process(side.shelf) if process in processes else process
                for process in side.processes
            ]

    # What must hold

    def read(self) -> None:
        for side in self.sides:
            side.book.read()

    @invariant()
    def what_is_live_is_there(self) -> None:
        self.read()
        for side in self.sides:
            side.book.check()

    def teardown(self) -> None:
        try:
            # After a failure nothing more is to be found out.
            if sys.exc_info()[0] is None:
                self._end()
        finally:
            while self.doing:
                self.doing.pop().act.die()
            self.patch.undo()

    def _end(self) -> None:
        Base.tally["~ end"] += 1
        for number, doing in enumerate(list(self.doing)):
            if number % 2:
                doing.act.go(10**6)
            else:
                doing.act.die()
            self.settle(doing)
        for number, side in enumerate(self.sides):
            late = (len(side.shelf.held) + number) % 2
            side.shelf.holds_deletes = False
            if not late:
                side.shelf.deliver_all()
            for _ in range(2):
                Process(side.shelf).registry.gc(grace_s=0)
            side.shelf.deliver_all()
            self._check_at_rest(side)

    def _check_at_rest(self, side: Side) -> None:
        side.book.read()
        side.book.check()
        assert side.shelf.objects() == set(side.book.needed()), "an orphan stays"
        registry = Process(side.shelf).registry
        report = registry.verify(deep=True)
        assert report.ok, report.findings
        if side.shelf.frozen:
            side.shelf.thaw()
            report = registry.verify(deep=True)
            assert report.ok, report.findings
        assert registry.run_names() == sorted(side.book.runs)
        for name, known in side.book.runs.items():
            state = RunLog(registry.handle.store, name).open()
            assert state.held == known.held()
            parts = {one: of for one, of in known.parts().items() if of is not None}
            thinned = {one: {*of} for one, of in state.thinned.items() if one in state.held}
            assert thinned == parts
            if state.commits:
                check_loads(registry.run(name), known, side.book)
        self._check_fresh_container(side)

    @staticmethod
    def _check_fresh_container(side: Side) -> None:
        """Delete the log of a run that notes name: the next collection of any machine stops."""
        noted = sorted(Notes.read(Process(side.shelf).registry.handle.store).by_run)
        if noted:
            name = noted[len(side.book.runs[noted[0]].commits) % len(noted)]
            for key in [info.key for info in side.shelf.list(f"runs/{name}/")]:
                MemoryBackend.delete(side.shelf, key)
            before = side.shelf.objects()
            with pytest.raises(RolledBack):
                Process(side.shelf).registry.gc(grace_s=0)
            assert side.shelf.objects() == before
            assert not Process(side.shelf).registry.verify().ok
            Base.tally["a run is lost: refused"] += 1


def check_loads(run: Run, known: RunBook, book: Book) -> None:
    """Check that every ref of a run loads as the model says, and that nothing else is found."""
    for ref, digest in known.refs().items():
        found, parts = find(run, ref), known.part_of(ref)
        assert found.digest == digest, ref
        try:
            loaded = found.load() if parts is None else found.load(only=[*parts])
        except Archived:
            # It waits; what needs nothing of an archive does not.
            assert not book.needs(known.places[digest]).isdisjoint(book.shelf.frozen), ref
        else:
            assert same(loaded, cut_to(book.truth(digest), parts)), ref
    if known.is_dropped:
        return
    assert [one.handle.n for one in run.checkpoints()] == sorted(known.live())
    assert {entry.version for entry in run.pool.roster()} == known.pool.keys()
    for name, stream in known.streams.items():
        kept = {None: (stream.segments, stream.entries), **stream.archives}
        for label, (segments, entries) in kept.items():
            needed = {key for one, *_ in segments for key in book.needs(known.places[one])}
            if needed.isdisjoint(book.shelf.frozen):
                assert run.streams[name].read(archive=label) == entries
    if known.release is not None:
        assert run.releases.latest().version == known.release


def find(run: Run, ref: str) -> Any:
    """Return what a ref of the model names, by the public surface."""
    match ref.split("/"):
        case ["commits", n]:
            return run.history.checkpoint(int(n))
        case ["commits", n, "companions", name]:
            return run.history.checkpoint(int(n)).companion(name)
        case ["gates", name]:
            return run.pins.gates.get(name)
        case ["artifacts", name]:
            return run.pins.artifacts.get(name)
        case ["releases", version]:
            return run.releases.get(version)
        case ["releases", version, "card"]:
            return Card(run.releases.get(version))
        case ["tags", name]:
            return run.history.checkpoint(
                next(p.checkpoint for p in run.manifest.pins_of("tag") if p.name == name)
            )
        case ["pool", version]:
            return run.pool.entry(int(version[1:]))
    raise AssertionError(ref)


class Card:
    """A model card, to be loaded like a state."""

    def __init__(self, release: Any) -> None:
        self._release = release
        self.digest = release.handle.pin.card

    def load(self) -> dict[str, Any]:
        return {"card": self._release.card}
