"""Rules of collectors, of those who read or copy, of the stores, and of the clocks."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from holdfast.registry.errors import Archived, IntegrityError
from holdfast.registry.face.syncing import sync
from holdfast.registry.upkeep.gc import Collector
from tests.stateful.base import (
    COLLECTORS,
    Base,
    Check,
    Reader,
    Stop,
    Sweep,
    check_loads,
    find,
    graces,
    numbers,
    sides,
    stops,
)
from tests.stateful.world import YEAR_S, Process
from tests.support.states import same

_STEPS = ("choose", "condemn", "mark", "delete", "note")
_READERS = 4

jumps = st.sampled_from((10.0, 3600.0, 86_401.0, YEAR_S, 30 * YEAR_S)).flatmap(
    lambda by_s: st.sampled_from((by_s, -by_s))
)


class Collecting(Base):
    """Collectors at every step, late deletes, lost answers, crashes; readers and mirrors beside."""

    # Calls that were stopped

    @precondition(lambda self: self.doing)
    @rule(which=numbers, calls=st.integers(0, 12), after=st.booleans())
    def go_on(self, which: int, calls: int, after: bool) -> None:
        doing = self.pick(self.doing, which)
        doing.act.go(calls, after=after)
        self.settle(doing)

    @precondition(lambda self: self.doing)
    @rule(which=numbers)
    def finish(self, which: int) -> None:
        doing = self.pick(self.doing, which)
        doing.act.go(10**6)
        self.settle(doing)

    @precondition(lambda self: self.doing)
    @rule(which=numbers)
    def kill(self, which: int) -> None:
        doing = self.pick(self.doing, which)
        doing.act.die()
        self.settle(doing)

    @precondition(lambda self: self.doing)
    @rule(which=numbers, calls=st.integers(0, 40), after=st.booleans())
    def lose_answer(self, which: int, calls: int, after: bool) -> None:
        doing = self.pick(self.doing, which)
        doing.act.go(calls, after=after, verdict="lose")
        self.settle(doing)

    # Collectors

    @rule(side=sides, grace_s=graces, full=st.integers(0, 3), stop=stops)
    def collect(self, side: int, grace_s: float, full: int, stop: Stop) -> None:
        """Collect; a full collection takes nothing from notes."""
        process = Process(self.sides[side].shelf)

        def work() -> None:
            process.registry.gc(grace_s=grace_s, full=not full)

        self.call("collect" if full else "collect in full", work, [process], stop)

    @rule(side=sides, stop=stops)
    def upgrade(self, side: int, stop: Stop) -> None:
        """From now on collections seal runs."""
        process = Process(self.sides[side].shelf)

        def work() -> None:
            process.registry.upgrade()

        self.call("upgrade", work, [process], stop)

    @rule(side=sides, who=numbers, min_dead=st.sampled_from((0.01, 0.6)), stop=stops)
    def repack(self, side: int, who: int, min_dead: float, stop: Stop) -> None:
        process = self.process(self.sides[side], who)
        if process is None:
            return

        def work() -> None:
            process.registry.repack(min_dead=min_dead)

        self.call("repack", work, [process], stop, misses="beside others")

    @rule(side=sides, grace_s=graces, stop=stops)
    def start_collector(self, side: int, grace_s: float, stop: Stop) -> None:
        there = self.sides[side]
        if len(there.sweeps) == COLLECTORS:
            # The oldest one is never heard of again.
            gone = next((sweep for sweep in there.sweeps if sweep.is_idle), None)
            if gone is None:
                return
            there.sweeps.remove(gone)
        process = Process(there.shelf)
        there.sweeps.append(
            Sweep(process, Collector(process.registry.handle.store, grace_s=grace_s))
        )
        self._step(there.sweeps[-1], stop)

    @precondition(lambda self: self._sweeps())
    @rule(which=numbers, many=st.integers(1, 3), stop=stops)
    def step_collector(self, which: int, many: int, stop: Stop) -> None:
        unfinished = [one for one in self._sweeps() if one.step < len(_STEPS)]
        if unfinished:
            sweep = self.pick(unfinished, which)
            for left in reversed(range(many)):
                self._step(sweep, None if left else stop)

    @precondition(lambda self: self._sweeps())
    @rule(which=numbers, back=st.integers(1, 3), stop=stops)
    def repeat_collector_step(self, which: int, back: int, stop: Stop) -> None:
        sweep = self.pick(self._sweeps(), which)
        sweep.step = max(0, sweep.step - back)
        self._step(sweep, stop)

    def _sweeps(self) -> list[Sweep]:
        """Return the collectors that stand between two steps."""
        return [one for side in self.sides for one in side.sweeps if one.is_idle]

    def _step(self, sweep: Sweep, stop: Stop) -> None:
        if not sweep.is_idle or sweep.step >= len(_STEPS):
            return
        name = _STEPS[sweep.step]

        def work() -> None:
            getattr(sweep.collector, name)()
            sweep.step += 1

        self.call(name, work, [sweep.process], stop)

    # The store and the clocks

    @rule(side=sides, late=st.booleans())
    def hold_deletes(self, side: int, late: bool) -> None:
        self.sides[side].shelf.holds_deletes = late

    @precondition(lambda self: any(side.shelf.held for side in self.sides))
    @rule(side=sides, which=numbers, again=st.booleans())
    def deliver_delete(self, side: int, which: int, again: bool) -> None:
        if self.sides[side].shelf.held:
            self.sides[side].shelf.deliver(which, again=again)

    @precondition(lambda self: any(side.shelf.held for side in self.sides))
    @rule(side=sides)
    def deliver_deletes(self, side: int) -> None:
        self.sides[side].shelf.deliver_all()

    @rule(side=st.sampled_from((0, 1, 2)), by_s=jumps)
    def jump(self, side: int, by_s: float) -> None:
        clock = self.clock if side == 2 else self.sides[side].shelf.clock
        clock.jump(by_s)

    # Mirrors

    @rule(back=st.booleans(), who=numbers, whom=numbers, stop=stops)
    def sync(self, back: bool, who: int, whom: int, stop: Stop) -> None:
        source, destination = self.sides[::-1] if back else self.sides
        reads, writes = self.process(source, who), self.process(destination, whom)
        if reads is None or writes is None:
            return
        before = {name: list(run.commits) for name, run in source.book.runs.items()}

        def work() -> Check:
            sync(reads.registry, writes.registry)

            def check() -> None:
                for name, commits in before.items():
                    there = destination.book.runs[name].commits if commits else []
                    assert there[: len(commits)] == commits

            return check

        self.call("sync", work, [reads, writes], stop, misses="beside others")

    # Readers

    @precondition(lambda self: len(self.readers) < _READERS)
    @rule(side=sides, who=numbers, which=numbers, of=numbers)
    def open_reader(self, side: int, who: int, which: int, of: int) -> None:
        there = self.sides[side]
        process = self.process(there, who)
        known = [run for run in there.book.runs.values() if run.refs()]
        if process is None or not known:
            return
        run = self.pick(known, which)
        ref = self.pick(sorted(run.refs()), of)
        if not ref.endswith("card"):
            stored = find(process.registry.run(run.name), ref)
            self.readers.append(Reader(there, run.name, stored))

    @precondition(lambda self: self.readers)
    @rule(which=numbers)
    def read_late(self, which: int) -> None:
        reader = self.pick(self.readers, which)
        self.readers.remove(reader)
        if reader.stored.handle.store.backend.is_cut:
            return
        digest, book = reader.stored.digest, reader.side.book
        part = book.runs[reader.run].parts().get(digest, ())
        try:
            loaded = reader.stored.load()
        except Archived:
            needed = book.needs(book.runs[reader.run].places[digest])
            assert part is not None or not needed.isdisjoint(reader.side.shelf.frozen)
            self.tally["read late: archived"] += 1
        except IntegrityError:
            assert part is not None, "a live state was not read"
            self.tally["read late: gone"] += 1
        else:
            assert same(loaded, book.truth(digest))
            self.tally["read late: done"] += 1

    @rule(side=sides, which=numbers)
    def load_all_of_a_run(self, side: int, which: int) -> None:
        book = self.sides[side].book
        known = [run for run in book.runs.values() if run.commits]
        if known:
            run = self.pick(known, which)
            check_loads(Process(book.shelf).registry.run(run.name), run, book)
            self.tally["load: done"] += 1
