"""Replay a trace through the model of the protocol, and say what the model does not allow.

The trace says when calls began and ended, the logs and epochs at its end say what they put: neither
is ever deleted. The acceptor takes the steps in the order in which they began, and asks the model:

- May this slot name these keys? (`writers.condemned`: rules W1, W2, W2a and W3.)
- May this object be deleted now? (`Collectors.deletable_by_crowd`: rules G1 to G5.)
- Is an object gone that a run needs? (The invariant of `Protocol`.)

Of the store it asks the promises that the model takes for granted: one creator of each slot, reads
and listings that show what was acknowledged before they began. Where calls overlap, or their
outcome is unknown, it takes the order that is allowed. A registry with sealed runs is refused:
their model is another one (`tests.model.sealing`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.registry.errors import IntegrityError, ObjectNotFound
from holdfast.registry.history.actions import Place
from holdfast.registry.history.epochs import Epochs
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.replay import RunManifest, Slot, advance
from holdfast.registry.history.slots import list_runs
from holdfast.registry.objects import ObjectKey, Placement, epoch_key, slot_key
from holdfast.registry.store import Store
from holdfast.registry.writing.object_writer import placed_keys
from tests.model import log as model
from tests.model import writers
from tests.model.collectors import Collectors
from tests.model.keys import Keys
from tests.model.scenario import KEPT, Scenario, State
from tests.traces.reading import NEVER, Call
from tests.traces.recording import digest

_BEFORE = -1  # of the trace
_OBJECTS = ("packs/", "manifests/", "placements/")


@dataclass
class _Run:
    """A run: its slots as the model has them, and how many of them were replayed."""

    name: str
    number: int
    logs: model.Logs
    slots: list[tuple[int, model.Slot, int]] = field(default_factory=list)  # begin, slot, number
    born: int = NEVER  # when its slot 0 was acknowledged
    began: int = NEVER  # when that was asked for
    log: model.Log | None = None


class Acceptor:
    """A trace, to be held against the model.

    Args:
        calls: The calls, in the order in which they began.
        store: The registry after the trace.

    Attributes:
        violations: What the model does not allow, in words.
        counts: How many steps of each kind were taken.
    """

    def __init__(self, calls: Sequence[Call], store: Store) -> None:
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self._calls, self._store = calls, store
        self._bits: dict[str, int] = {}
        self._puts: dict[str, list[Call]] = defaultdict(list)
        for call in calls:
            if call.method.startswith("put"):
                self._puts[call.key].append(call)
        self._epochs = self._read_epochs()
        self._runs = [self._read_run(n, name) for n, name in enumerate(list_runs(store))]
        # Its own keys and logs are not asked for: those of a trace are given with each question.
        scenario = Scenario((), epochs=len(self._epochs))
        self._collectors = Collectors(scenario, KEPT, Keys(1, 1), model.Logs(1, 1))
        self._state = State(0, 0, (), (None,) * len(self._runs), ())
        self._deletable: tuple[State, int] | None = None

    def check(self) -> None:
        """Replay the trace; raise if the model does not allow a step of it."""
        self._replay()
        self._check_store()
        assert not self.violations, "\n".join(self.violations[:20])

    # What was put

    def _bit(self, key: str) -> int:
        return self._bits.setdefault(key, 1 << len(self._bits))

    def _begin(self, key: str, data: bytes) -> tuple[int, int]:
        """Return when something began to be put, and when that was acknowledged at the latest."""
        puts = [one for one in self._puts.get(key, ()) if one.digest == digest(data)]
        if not any(one.may_have_put for one in puts):
            puts = [one for one in puts if one.answer is False]  # a retry after a lost answer
        for one in self._puts.get(key, ()):
            if one.has_put and one not in puts:
                self.violations.append(f"{one.client}: {key} was acknowledged, and is another one")
        if not puts:
            return _BEFORE, _BEFORE
        ends = [one.end for one in puts if isinstance(one.answer, bool)]
        return min(one.begin for one in puts), min(ends, default=NEVER)

    def _read_epochs(self) -> list[tuple[int, int, int]]:
        """Return for each epoch when it was put, begin and end, and the keys that it condemns."""
        epochs, found = Epochs(self._store), []
        known = [ObjectKey.parse(key) for key in self._puts if key.startswith(_OBJECTS)]
        for epoch in range(1, epochs.newest() + 1):
            data = self._store.backend.get(epoch_key(epoch))
            keys = epochs.condemned_by(epoch, known)
            condemned = model.union(self._bit(str(key)) for key in keys)
            found.append((*self._begin(epoch_key(epoch), data), condemned))
        return found

    def _read_run(self, number: int, name: str) -> _Run:
        slots = list(RunLog(self._store, name).slots())
        places = [(s, one) for s in slots for _, one in s.lines if isinstance(one, Place)]
        manifests = {one: n for n, one in enumerate(dict.fromkeys(p.manifest for _, p in places))}
        run = _Run(name, number, model.Logs(len(manifests), len(self._epochs)))
        state, held = RunManifest(run_id=name), set[Any]()
        for slot in slots:
            state = advance(state, [slot])
            if state.sealed_at is not None:
                raise ValueError(f"{name}: a sealed run; its traces cannot be checked")
            begin, end = self._begin(slot_key(name, slot.number), slot.data)
            if slot.number == 0:
                run.began, run.born = begin, end
            begin = max(begin, run.slots[-1][0] if run.slots else _BEFORE)
            run.slots.append((begin, self._slot(slot, state, held, manifests), slot.number))
            held = set(state.held)
        return run

    def _slot(
        self, slot: Slot, state: RunManifest, held: set[Any], known: dict[Any, int]
    ) -> model.Slot:
        """Return a slot in the words of the model."""
        lines = [one for _, one in slot.lines if isinstance(one, Place)]
        now = {one for one in state.held if one in known}
        was = {one for one in held if one in known}
        is_over = state.is_dropped_for_good
        return model.Slot(
            mark=len(self._epochs) if is_over else min(state.epoch, len(self._epochs)),
            places=tuple((known[one.manifest], self._keys(one)) for one in lines),
            names=model.union(model.name_bit(known[one], 0) for one in now - was),
            evicts=model.union(model.name_bit(known[one], 0) for one in was - now),
            drops=is_over,
        )

    def _keys(self, place: Place) -> int:
        """Return the keys that a place names, also where its placement is gone by now."""
        key = str(place.placement_key)
        bodies = [one.body for one in self._puts.get(key, ()) if one.body is not None]
        try:
            body = bodies[0] if bodies else self._store.backend.get(key)
            placement = Placement.decode(body, place.placement_key.digest, where=key)
        except (ObjectNotFound, IntegrityError):
            named: Any = (place.manifest_key, place.placement_key)  # put before the trace
        else:
            named = placed_keys(place, placement)
        return model.union(self._bit(str(one)) for one in named)

    # The steps

    def _steps(self) -> Iterator[tuple[int, int, str, Any]]:
        for number, (begin, _, _) in enumerate(self._epochs):
            yield begin, 1, "epoch", number
        for run in self._runs:
            for at, (begin, _, _) in enumerate(run.slots):
                yield begin, 2, "slot", (run, at)
        for call in self._calls:
            if call.key.startswith(_OBJECTS):
                if call.may_have_put:
                    yield call.begin, 0, "put", call
                elif call.method == "delete":
                    yield call.begin, 3, "delete", call

    def _replay(self) -> None:
        put_in_trace = model.union(self._bit(k) for k in self._puts if k.startswith(_OBJECTS))
        steps = sorted(self._steps(), key=lambda step: step[:2])
        everything = (1 << len(self._bits)) - 1
        self._state = self._state._replace(objects=everything & ~put_in_trace)
        for _, _, kind, what in steps:
            self.counts[kind] += 1
            getattr(self, f"_take_{kind}")(what)

    def _take_put(self, call: Call) -> None:
        generation = ObjectKey.parse(call.key).generation
        if generation > sum(1 for begin, _, _ in self._epochs if begin < call.end):
            self.violations.append(
                f"{call.client}: puts {call.key} under an epoch that is not there"
            )
        self._state = self._state._replace(objects=self._state.objects | self._bit(call.key))

    def _take_epoch(self, number: int) -> None:
        begin, _, condemned = self._epochs[number]
        born = model.union(1 << run.number for run in self._runs if run.born < begin)
        self._state = self._state._replace(epochs=(*self._state.epochs, (condemned, born)))

    def _take_slot(self, what: tuple[_Run, int]) -> None:
        run, at = what
        _, slot, number = run.slots[at]
        head = run.log or run.logs.created
        # Whoever created the run observed every epoch that was there before (W1).
        u = max(head.mark, sum(1 for _, end, _ in self._epochs if end < run.began))
        named = model.union(keys for _, keys in slot.places)
        refused = named & ~head.keys & writers.condemned(self._state, u)
        if refused:
            self.violations.append(
                f"{run.name}, slot {number} names {self._words(refused)}: condemned"
            )
        run.log = run.logs.append(head, slot)
        logs = (*self._state.logs[: run.number], run.log, *self._state.logs[run.number + 1 :])
        self._state = self._state._replace(logs=logs)
        if lost := run.log.keys & ~self._state.objects:
            self.violations.append(
                f"{run.name}, slot {number} needs {self._words(lost)}, which is not there"
            )

    def _take_delete(self, call: Call) -> None:
        bit = self._bit(call.key)
        if self._deletable is None or self._deletable[0][2:4] != self._state[2:4]:
            self._deletable = self._state, self._collectors.deletable_by_crowd(self._state)
        if not bit & self._deletable[1]:
            self.violations.append(f"{call.client}: deletes {call.key}, which no sweep has freed")
        self._state = self._state._replace(objects=self._state.objects & ~bit)
        for run in self._runs:
            if run.log is not None and run.log.keys & bit:
                self.violations.append(f"{call.client}: deletes {call.key}, which {run.name} needs")

    def _words(self, keys: int) -> str:
        return " ".join(key for key, bit in self._bits.items() if bit & keys)

    # The promises of the store

    def _check_store(self) -> None:
        acked: dict[str, int] = {}
        for key, puts in self._puts.items():
            ends = [one.end for one in puts if one.has_put]
            if ends and not key.startswith(_OBJECTS):
                acked[key] = min(ends)
            exclusive = [one for one in puts if one.has_put and one.method == "put_if_absent"]
            if len(exclusive) > 1 and "/log/" in key:
                self.violations.append(f"{key} was created {len(exclusive)} times")
        logs = {
            key: end for key, end in acked.items() if "/log/" in key or key.startswith("epochs/")
        }
        for call in self._calls:
            if call.method == "get" and call.answer == "absent":
                self.counts["read"] += 1
                if logs.get(call.key, NEVER) < call.begin:
                    self.violations.append(f"{call.client}: {call.key} is there, and was not found")
            elif call.method == "list":
                self.counts["listing"] += 1
                shown = set(call.answer)
                for key, end in logs.items():
                    is_due = key.startswith(call.key) and key > call.after and end < call.begin
                    if is_due and key not in shown:
                        self.violations.append(f"{call.client}: {key} is there, and was not listed")
