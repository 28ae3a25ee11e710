"""The collector's side, G1 to G5: one store call a step, by single processes or by a crowd.

Three things need no step of their own, unless `Scenario.apart` is on:

- Choosing the keys to condemn. A collector condemns any keys of generations before its epoch,
  whether they exist or not; that includes every result of a listing.
- Reading the head before a mark is put. The line depends only on whether there is such a mark yet,
  and a put at an existing slot changes nothing.
- Replaying (G4). A collector may have read each log at its mark or at any later slot. Slots do not
  change, so the result is computed when it is needed (`Log.unneeded`). G5 deletes each key that
  every run did not need at some such slot: all that one collector can find unneeded, and more,
  since the slots may differ from key to key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.model.keys import Keys, subsets
from tests.model.log import FREED, Log, Logs, Slot, union
from tests.model.scenario import Epochs, Rules, Scenario, State

IDLE, PUBLISH, LIST, SWEEP, MARK, DONE = range(6)


class Memory(NamedTuple):
    """The memory of a collector.

    Attributes:
        step: Its next step.
        e: Its epoch.
        listed: The runs that it listed, as bits; -1 before it did.
        seen: Keys that it found needed too early, by a broken rule; -1 otherwise.
        keys: The keys that it will condemn; later those that it found needed.
        replayed: The runs that it replayed, as bits.
        head: A run and the log that was read of it.
    """

    step: int = IDLE
    e: int = 0
    listed: int = -1
    seen: int = -1
    keys: int = 0
    replayed: int = 0
    head: tuple[int, int] = (-1, -1)


class Move(NamedTuple):
    """A step of a collector: its words in a trace, and the state after it."""

    words: tuple[object, ...]
    deleting: int
    epochs: Epochs
    logs: tuple[Log | None, ...]
    me: Memory


class Collectors:
    """The steps of all collectors of a scenario."""

    def __init__(self, scenario: Scenario, rules: Rules, keys: Keys, logs: Logs) -> None:
        self._highest = scenario.epochs
        self._apart = scenario.apart
        self._rules = rules
        self._keys = keys
        self._logs = logs

    def moves(self, me: Memory, state: State) -> Iterator[Move]:
        """Yield the next steps of one collector."""
        match me.step:
            case 0:  # IDLE
                yield from self._begin(me, state)
            case 1:  # PUBLISH
                if me.e == len(state.epochs) + 1:
                    words, epochs = self._publish(state, me.keys)
                    after = me._replace(step=LIST, keys=0)
                    yield Move(words, state.deleting, epochs, state.logs, after)
                else:
                    yield _private(state, Memory(), "loses the epoch")
            case 2:  # LIST
                yield from self._list(me, state)
            case 3 | 4:  # SWEEP, MARK
                yield from self._mark(me, state)
                yield from self._sweep(me, state)

    def _begin(self, me: Memory, state: State) -> Iterator[Move]:
        """G1, or joining the sweep of another collector, which may have died."""
        if not self._rules.publish_before_list and me.listed < 0:
            yield _private(state, me._replace(listed=born(state.logs)), "lists the runs")
            return
        if not self._rules.remark and me.seen < 0:
            yield _private(state, me._replace(seen=live(state.logs)), "replays the logs")
            return
        e = len(state.epochs) + 1
        if e <= self._highest and self._apart:
            for keys in subsets(state.objects):
                after = me._replace(step=PUBLISH, e=e, keys=keys)
                yield _private(state, after, "chooses", self._keys.words[keys])
        elif e <= self._highest:
            for keys in self._condemnable(e):
                words, epochs = self._publish(state, keys)
                after = me._replace(step=LIST, e=e)
                yield Move(words, state.deleting, epochs, state.logs, after)
        for e in range(1, len(state.epochs) + 1):
            yield from self._list(me._replace(e=e), state, "joins sweep", e, "and")

    def _condemnable(self, e: int) -> Iterator[int]:
        return subsets(self._keys.up_to(e - 1))

    def _publish(self, state: State, keys: int) -> tuple[tuple[object, ...], Epochs]:
        epochs = (*state.epochs, (keys, born(state.logs)))
        return ("publishes epoch", len(epochs), "condemning", self._keys.words[keys]), epochs

    def _list(self, me: Memory, state: State, *words: object) -> Iterator[Move]:
        """G2."""
        listed = me.listed if me.listed >= 0 else born(state.logs)
        blocked, passable = self._garbage(state, listed)
        choices = [listed & ~keys for keys in subsets(passable)] if passable else []
        choices = [one for one in (listed, *choices) if not one & blocked]
        if not self._rules.every_run:
            choices += [listed & ~(1 << run) for run in runs(listed)]
        for choice in choices:
            after = me._replace(step=SWEEP, listed=choice)
            if not self._rules.replay_reaches_mark:
                after = after._replace(seen=live(state.logs))
            yield _private(state, after, *words, "lists the runs")

    def _garbage(self, state: State, listed: int) -> tuple[int, int]:
        """Return the runs that nobody can read, and those that may be passed over."""
        logs = [(run, state.logs[run]) for run in runs(listed)]
        garbage = union(1 << run for run, log in logs if log is not None and log.garbage)
        forgotten = union(1 << run for run, log in logs if log is not None and log.forgotten)
        return garbage, forgotten if self._rules.forgotten_by_name else forgotten | garbage

    def _mark(self, me: Memory, state: State) -> Iterator[Move]:
        """G3 in one of the runs that lack it."""
        for run in runs(me.listed):
            log = state.logs[run]
            if self._is_marked(log, me.e):
                continue
            assert log is not None
            if log.garbage:
                continue  # it stops here
            read = (run, log.number)
            if self._apart and me.head != read:
                yield _private(state, me._replace(head=read), "reads run", run)
            else:
                logs = self._marked(state, run, me.e)
                words = ("marks run", run)
                yield Move(words, state.deleting, state.epochs, logs, me._replace(head=(-1, -1)))

    def _sweep(self, me: Memory, state: State) -> Iterator[Move]:
        """G4, then G5."""
        ready = [run for run in runs(me.listed) if self._is_marked(state.logs[run], me.e)]
        if not self._rules.all_marked or (ready and not self._rules.shard_of_keys):
            ready = list(runs(me.listed))
        if self._apart:
            for run in ready:
                log = state.logs[run]
                if not me.replayed >> run & 1:
                    assert log is not None
                    replayed, keys = me.replayed | 1 << run, me.keys | log.keys
                    after = me._replace(replayed=replayed, keys=keys)
                    yield _private(state, after, "replays run", run)
            ready = list(runs(me.replayed))
        if len(ready) < me.listed.bit_count():
            return
        unneeded = self._unneeded(me, state)
        words = ("sends DELETEs of", self._keys.words[unneeded])
        yield Move(words, state.deleting | unneeded, state.epochs, state.logs, Memory(DONE))

    def _unneeded(self, me: Memory, state: State) -> int:
        """Return C_e without M_e."""
        condemned = state.epochs[me.e - 1][0]
        if not self._rules.spare_the_live:
            return condemned
        if me.seen >= 0:
            return condemned & ~me.seen
        if self._apart:
            return condemned & ~me.keys
        return self._unused(state, me.e, me.listed)

    def _is_marked(self, log: Log | None, e: int) -> bool:
        if log is not None and log.stage == FREED and not self._rules.freed_marked:
            return True
        return log is not None and log.mark >= (e if self._rules.mark_of_this_epoch else 1)

    def _marked(self, state: State, run: int, e: int) -> tuple[Log | None, ...]:
        """Return the logs with mark(e) in a run's next slot."""
        log = state.logs[run]
        assert log is not None
        return (*state.logs[:run], self._logs.append(log, Slot(mark=e)), *state.logs[run + 1 :])

    def _unused(self, state: State, e: int, listed: int) -> int:
        """Return the condemned keys that every listed run did without at its mark or later."""
        keys = state.epochs[e - 1][0]
        for run in runs(listed):
            log = state.logs[run]
            assert log is not None
            # Unmarked only where a rule is broken: then it is read as it is.
            keys &= log.unneeded[e - 1] if log.mark >= e else ~log.keys
        return keys

    def crowd(self, state: State) -> Iterator[Move]:
        """Yield the next steps of any number of collectors.

        They share nothing but the store, and some of them may be anywhere in any sweep, so nobody's
        memory matters; nor need a DELETE be sent before it lands (`deletable_by_crowd`).
        """
        if len(state.epochs) < self._highest:
            for keys in self._condemnable(len(state.epochs) + 1):
                words, epochs = self._publish(state, keys)
                yield Move(words, state.deleting, epochs, state.logs, Memory())
        for run in runs(born(state.logs)):
            for e in range(1, len(state.epochs) + 1):
                if not self._is_marked(state.logs[run], e):
                    logs = self._marked(state, run, e)
                    words = ("marks run", run, "for epoch", e)
                    yield Move(words, state.deleting, state.epochs, logs, Memory())

    def deletable_by_crowd(self, state: State) -> int:
        """Return the keys whose DELETE somebody may have sent by now.

        Who listed the runs right after an epoch was published saw the fewest of them, and waits for
        no others. What is once unused by `Log.unneeded` stays so; so does what is deleting.
        """
        deleting = 0
        for e, (_, listed) in enumerate(state.epochs, start=1):
            if all(self._is_marked(state.logs[run], e) for run in runs(listed)):
                deleting |= self._unused(state, e, listed)
        return deleting


def _private(state: State, me: Memory, *words: object) -> Move:
    """Return a step that nobody else notices."""
    return Move(words, state.deleting, state.epochs, state.logs, me)


def born(logs: tuple[Log | None, ...]) -> int:
    """Return the runs that exist, as bits."""
    return union(1 << run for run, log in enumerate(logs) if log is not None)


def live(logs: tuple[Log | None, ...]) -> int:
    """Return the keys that live manifests need."""
    return union(log.keys for log in logs if log is not None)


def runs(bits: int) -> list[int]:
    """Return the runs of a set."""
    return [run for run in range(bits.bit_length()) if bits >> run & 1]
