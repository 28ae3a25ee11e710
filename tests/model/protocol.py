"""The collection protocol of docs/spec.md, ready to be explored.

The adversary: store calls interleave in any order; an actor may stop for ever at any step; a DELETE
that was sent lands at any later time, any number of times; collectors condemn any keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.model import collectors, writers
from tests.model.collectors import Collectors
from tests.model.explorer import Step
from tests.model.keys import Keys, single
from tests.model.log import CHECKPOINT, DUE, HIDDEN, SHOWN, Log, Logs, Slot, name_bit, union
from tests.model.scenario import (
    KEPT,
    Collector,
    Epochs,
    Evict,
    Forget,
    Free,
    Hide,
    Relocate,
    Rules,
    Scenario,
    Spoil,
    State,
    Thin,
    Writer,
)
from tests.model.writers import Turn, Writers

#: Everything on which the next steps of an actor depend.
Seen = tuple[object, ...]


class Protocol:
    """A scenario under some rules: a model for `explorer.explore`.

    Attributes:
        scenario: The actors and the first state.
    """

    def __init__(self, scenario: Scenario, rules: Rules = KEPT) -> None:
        files = [file for needs in scenario.files for file in needs]
        files += [actor.file for actor in scenario.actors if isinstance(actor, Relocate)]
        self.scenario = scenario
        self._keys = Keys(max(files) + 1, scenario.epochs)
        self._logs = Logs(len(scenario.files), scenario.epochs)
        self._rules = rules
        self._writers = Writers(scenario, rules, self._keys, self._logs)
        self._collectors = Collectors(scenario, rules, self._keys, self._logs)
        # Collectors last: states that differ only in which of them is where are one (`_known`).
        self._actors = sorted(scenario.actors, key=lambda actor: isinstance(actor, Collector))
        self._others = sum(not isinstance(actor, Collector) for actor in self._actors)
        self._programs = [
            self._writers.program(actor) if isinstance(actor, Writer | Relocate) else ()
            for actor in self._actors
        ]
        self._crowd_kept: dict[Seen, list[collectors.Move]] = {}
        self._deletable_kept: dict[Seen, int] = {}
        self._collectors_kept: dict[Seen, list[collectors.Move]] = {}
        self._writers_kept: dict[Seen, list[writers.Move]] = {}

    def initial(self) -> State:
        """Return the first state: all objects have generation 0."""
        logs = tuple(None if held is None else self._holding(held) for held in self.scenario.runs)
        memory = tuple(
            collectors.Memory() if isinstance(actor, Collector) else writers.Memory()
            for actor in self._actors
        )
        objects = self._with_strangers(collectors.live(logs), ())
        return State(objects, 0, (), logs, memory)

    def _holding(self, manifests: tuple[int, ...]) -> Log:
        log = self._logs.created
        for manifest in manifests:
            keys = union(self._keys.key(file, 0) for file in self.scenario.files[manifest])
            slot = Slot(places=((manifest, keys),), names=name_bit(manifest, CHECKPOINT))
            log = self._logs.append(log, slot)
        return log

    def wrong(self, state: State) -> str | None:
        """The invariant: every key that the current place of a live manifest needs exists."""
        for run, log in enumerate(state.logs):
            if log is None:
                continue
            lost = log.keys & ~state.objects
            if lost:
                return f"Run {run} needs {self._keys.words[lost]}, which is not there."
            if log.early:
                return f"Run {run} was freed before its delay had passed."
            if log.unplaced:
                return f"Run {run} shows a manifest that has no place."
        return None

    def successors(self, state: State) -> Iterator[tuple[Step, State]]:
        """Yield every possible next step, and the state after it."""
        objects, deleting, epochs, logs, memory, forgotten = state
        yield from self._store(state)
        if self.scenario.crowd:
            for words, _, published, longer, _ in self._crowd_moves(state):
                there = self._with_strangers(objects, published)
                after = State(there, deleting, published, longer, memory, forgotten)
                yield ("the crowd", *words), after
        for index, actor in enumerate(self._actors):
            if isinstance(actor, Collector):
                for words, sent, published, longer, then in self._collector_moves(index, state):
                    there = self._with_strangers(objects, published)
                    known = self._known(state, index, then)
                    after = State(there, sent, published, longer, known, forgotten)
                    yield (actor.who, *words), after
            elif isinstance(actor, Evict):
                yield from self._evict(actor, index, state)
            elif isinstance(actor, Thin):
                yield from self._thin(actor, index, state)
            elif isinstance(actor, Hide | Free):
                yield from self._drop(actor, index, state)
            elif isinstance(actor, Spoil | Forget):
                yield from self._garbage(actor, index, state)
            else:
                run = actor.run
                for words, there, log, me in self._writer_moves(actor, index, state):
                    longer = (*logs[:run], log, *logs[run + 1 :])
                    known = self._known(state, index, me)
                    after = State(there, deleting, epochs, longer, known, forgotten)
                    yield (actor.who, *words), after

    # The next steps of an actor depend only on what it can see, so they are cached.

    def _crowd_moves(self, state: State) -> list[collectors.Move]:
        seen = (state.epochs, state.logs)
        moves = self._crowd_kept.get(seen)
        if moves is None:
            moves = self._crowd_kept[seen] = list(self._collectors.crowd(state))
        return moves

    def _deletable_by_crowd(self, state: State) -> int:
        seen = (state.epochs, state.logs)
        deleting = self._deletable_kept.get(seen)
        if deleting is None:
            deleting = self._deletable_kept[seen] = self._collectors.deletable_by_crowd(state)
        return deleting

    def _collector_moves(self, index: int, state: State) -> list[collectors.Move]:
        seen = (state.memory[index], *state[:4])
        moves = self._collectors_kept.get(seen)
        if moves is None:
            me = state.memory[index]
            moves = self._collectors_kept[seen] = list(self._collectors.moves(me, state))
        return moves

    def _writer_moves(
        self, actor: Writer | Relocate, index: int, state: State
    ) -> list[writers.Move]:
        me, log = state.memory[index], state.logs[actor.run]
        seen = (index, me, log, state.objects, state.epochs, state.forgotten)
        moves = self._writers_kept.get(seen)
        if moves is None:
            turn = Turn(actor, self._programs[index], me, state, log)
            moves = self._writers_kept[seen] = list(self._writers.moves(turn))
        return moves

    def _store(self, state: State) -> Iterator[tuple[Step, State]]:
        """Yield DELETEs that land, and puts of strangers if those are steps."""
        objects, deleting, epochs, logs, memory, forgotten = state
        # One that nobody needs yet can wait: it lands again, and an absent key only leaves fewer
        # choices (a writer may always put its own).
        landing = deleting
        if self.scenario.crowd:
            landing |= self._deletable_by_crowd(state)
        if not self.scenario.apart and self._rules.names_kept:
            landing &= collectors.live(logs)
        for key in single(objects & landing):
            forgets = 0 if self._rules.names_kept else forgotten | key
            after = State(objects & ~key, deleting, epochs, logs, memory, forgets)
            yield ("the store", "deletes", self._keys.words[key]), after
        if self.scenario.strangers and self.scenario.apart:
            for key in single(self._keys.up_to(len(epochs)) & ~objects):
                after = State(objects | key, deleting, epochs, logs, memory, forgotten)
                yield ("a stranger", "puts", self._keys.words[key]), after

    def _with_strangers(self, objects: int, epochs: Epochs) -> int:
        """Return the objects once strangers have put theirs, where that is no step.

        For the same reason they may as well put all that they can as soon as they can.
        """
        if self.scenario.strangers and not self.scenario.apart:
            return objects | self._keys.up_to(len(epochs))
        return objects

    def _known(self, state: State, index: int, me: Seen) -> tuple[Any, ...]:
        """Return the memories of all actors after one of them has changed."""
        known = (*state.memory[:index], me, *state.memory[index + 1 :])
        if index < self._others or len(known) - self._others < 2:
            return known
        return known[: self._others] + tuple(sorted(known[self._others :]))

    def _evict(self, actor: Evict, index: int, state: State) -> Iterator[tuple[Step, State]]:
        log = state.logs[actor.run]
        name = name_bit(actor.manifest, actor.name)
        done = state.memory[index][0]
        if done or log is None or log.dropped or log.stage or not (actor.drop or log.names & name):
            return
        slot = Slot(drops=True) if actor.drop else Slot(evicts=name)
        logs = list(state.logs)
        logs[actor.run] = self._logs.append(log, slot)
        known = self._known(state, index, writers.Memory(step=1))
        words = (actor.who, "drops" if actor.drop else "evicts in", f"run {actor.run}")
        yield words, state._replace(logs=tuple(logs), memory=known)

    def _thin(self, actor: Thin, index: int, state: State) -> Iterator[tuple[Step, State]]:
        log = state.logs[actor.run]
        if state.memory[index][0] or log is None or actor.manifest not in log.held:
            return
        kept = union(self._keys.of_file(file) for file in actor.keeps) & log.places[actor.manifest]
        logs = list(state.logs)
        logs[actor.run] = self._logs.append(log, Slot(places=((actor.manifest, kept),)))
        known = self._known(state, index, writers.Memory(step=1))
        words = (actor.who, "thins in", f"run {actor.run}")
        yield words, state._replace(logs=tuple(logs), memory=known)

    def _drop(self, actor: Hide | Free, index: int, state: State) -> Iterator[tuple[Step, State]]:
        log, (step, *_) = state.logs[actor.run], state.memory[index]
        if log is None or log.dropped:
            return
        clock, same = self._rules.store_clock, self._rules.same_hide
        if isinstance(actor, Hide):
            if log.stage == SHOWN and step < actor.times:
                yield self._with_slot(actor, index, state, "hides", Slot(hides=True), step + 1)
            return
        if log.stage == HIDDEN and clock:
            yield self._with_slot(actor, index, state, "waits, the delay passes", Slot(ages=True))
        if step == 0 and log.stage in ((DUE,) if clock else (HIDDEN, DUE)):
            yield self._with_slot(actor, index, state, "finds due", None, 1)
        if step == 1 and log.stage in ((DUE,) if clock and same else (HIDDEN, DUE)):
            yield self._with_slot(actor, index, state, "frees", Slot(frees=True), 2)

    def _with_slot(
        self,
        actor: Hide | Free,
        index: int,
        state: State,
        verb: str,
        slot: Slot | None,
        step: int | None = None,
    ) -> tuple[Step, State]:
        logs, memory = list(state.logs), state.memory
        if slot is not None:
            logs[actor.run] = self._logs.append(logs[actor.run] or self._logs.created, slot)
        if step is not None:
            memory = self._known(state, index, writers.Memory(step=step))
        words = (actor.who, verb, f"run {actor.run}")
        return words, state._replace(logs=tuple(logs), memory=memory)

    def _garbage(
        self, actor: Spoil | Forget, index: int, state: State
    ) -> Iterator[tuple[Step, State]]:
        """Yield the next step of who puts garbage, or of the operator who gives the run up."""
        log, step = state.logs[actor.run], state.memory[index][0]
        if isinstance(actor, Spoil):
            steps = {
                0: ("puts garbage into", Slot(garbage=True)),
                1: ("takes it from", Slot(garbage=False)),
            }
        else:
            steps = {
                0: ("ends the log of", Slot(drops=self._rules.ended_first)),
                1: ("forgets", Slot(forgets=True)),
            }
        first = isinstance(actor, Forget) and step == 0
        if log is None or step not in steps or (first and not log.garbage):
            return
        verb, slot = steps[step]
        logs = list(state.logs)
        logs[actor.run] = self._logs.append(log, slot)
        known = self._known(state, index, writers.Memory(step=step + 1))
        yield (actor.who, verb, f"run {actor.run}"), state._replace(logs=tuple(logs), memory=known)
