"""Sealed runs: a collection that reads the active runs, and of all others a note.

One content, stored under a key for each generation. A run is a tuple of slots. Markers, seals and
notes are those of docs/collection-proof.md; the rules W1 to W5 and G1 to G5 of `protocol` are kept.

A DELETE that was sent may land at any time, so nothing may need its key from then on, and the model
never lets it land: an absent key only leaves fewer choices. The removal of a marker lands at any
time, again and again. Any actor may stop for ever at any step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.model.explorer import Step
from tests.model.keys import subsets

#: Slots: `("saves", g)` places the content under generation g; `("mark", e)`; the others are alone.
SlotLine = tuple[str, int]
Log = tuple[SlotLine, ...]
EVICTS, SEALS, CREATES = ("evicts", 0), ("seals", 0), ("creates", 0)


@dataclass(frozen=True)
class Rules:
    """The rules; each can be broken.

    Attributes:
        numbered: W1', S3: a marker has the number after the newest seal, and a removal names it.
        marker_first: W1': behind a seal, the marker is put before the epoch is observed.
        every_commit: W1': behind a seal, a commit that names no object puts the marker too.
        marker_after_seal: W3': a writer that meets a seal puts the marker with the new number.
        epoch_after_marker: W3': ... and observes the epoch again after that.
        note_before_removal: S3: markers are removed only once the note stands.
        note_by_slot: S2: a note is named by run and slot; the highest slot is the newest.
        seal_before_note: S1, S2: a note is of a seal that stands in the log.
        markers_after_epoch: G2': the markers are listed after the epoch is published.
        runs_after_epoch: G4': ... and so are the runs.
        notes_after_listing: G4': the notes are read after the markers are listed.
        notes_by_name: G4': a listing says which notes there are, never a table of them.
        unknown_is_active: G4': a run without marker and note is marked and replayed.
        old_refuse: Programs from before refuse a log with a seal.
        known_before_reading: R1: a reader lists the notes before it reads the log.
        markers_before_notes: R2: ... and later the markers before the notes.
        newer_notes: R2: ... and a run of which a newer note says more has changed.
        unsealed_is_asked: R2: ... and so has a run that was not sealed.
    """

    numbered: bool = True
    marker_first: bool = True
    every_commit: bool = True
    marker_after_seal: bool = True
    epoch_after_marker: bool = True
    note_before_removal: bool = True
    note_by_slot: bool = True
    seal_before_note: bool = True
    markers_after_epoch: bool = True
    runs_after_epoch: bool = True
    notes_after_listing: bool = True
    notes_by_name: bool = True
    unknown_is_active: bool = True
    old_refuse: bool = True
    known_before_reading: bool = True
    markers_before_notes: bool = True
    newer_notes: bool = True
    unsealed_is_asked: bool = True


KEPT = Rules()


@dataclass(frozen=True)
class Trainer:
    """Saves the content in a run.

    Attributes:
        run: The run.
        born: Whether it creates the run.
        old: A program from before markers and seals.
    """

    run: int
    born: bool = False
    old: bool = False


@dataclass(frozen=True)
class Evictor:
    """Evicts the content from a run."""

    run: int = 0


@dataclass(frozen=True)
class Collector:
    """Performs one sweep: its own, or one that it joins."""


@dataclass(frozen=True)
class Sealer:
    """Seals a run, or finishes the seal of another; it is a part of a collection."""


@dataclass(frozen=True)
class Reader:
    """Reads a run, and later asks without its log whether anything was committed since."""

    run: int = 0


Actor = Trainer | Evictor | Collector | Sealer | Reader


@dataclass(frozen=True)
class Setting:
    """The actors and the first state.

    Attributes:
        actors: In any order.
        runs: Whether each run exists at first; it then holds the content under generation 0.
        first: How the first runs stand: `new`; `sealed` after an eviction, by a sealer that died;
            or `noted`, after the seal was finished.
        epochs: Sweeps that may be published.
    """

    actors: tuple[Actor, ...]
    runs: tuple[bool, ...] = (True,)
    first: str = "new"
    epochs: int = 1


#: A run and the number of one of its markers; or a run, a slot and the keys that it used there.
Marker = tuple[int, int]
Note = tuple[int, int, int]


class State(NamedTuple):
    """The state of the store and of the actors; keys are bits, by generation."""

    objects: int
    deleting: int
    epochs: tuple[int, ...]
    logs: tuple[Log | None, ...]
    markers: frozenset[Marker] = frozenset()
    removing: frozenset[Marker] = frozenset()
    notes: tuple[Note, ...] = ()
    memory: tuple[Any, ...] = ()


class Writing(NamedTuple):
    """The memory of a trainer or an evictor.

    Attributes:
        step: Its next step.
        read: Slots that it has read.
        number: Of its marker.
        u: Its observed epoch; -1 before.
        key: The key that it chose; 0 before.
    """

    step: str = "open"
    read: int = 0
    number: int = 0
    u: int = -1
    key: int = 0


class Collecting(NamedTuple):
    """The memory of a collector.

    Attributes:
        step: Its next step.
        e: Its epoch; 0 before.
        active: Runs with a marker, as bits; -1 before they were listed.
        listed: All runs, in the same way.
        notes: The notes that it has read too early, by a broken rule.
        spared: Keys that notes need.
    """

    step: str = "publish"
    e: int = 0
    active: int = -1
    listed: int = -1
    notes: tuple[Note, ...] | None = None
    spared: int = 0


class Sealing(NamedTuple):
    """The memory of a sealer: its next step, and the seal."""

    step: str = "seal"
    run: int = 0
    slot: int = 0
    keys: int = 0


class Reading(NamedTuple):
    """The memory of a reader.

    Attributes:
        step: Its next step.
        known: The slots of the notes that it knows, as bits; -1 before they were listed.
        read: Slots that it has read.
        sealed: Whether there is a seal among them.
        due: Slots that stood when it began to ask: it may miss no commit in them.
        marked: Whether a marker was listed; -1 before.
        noted: Whether a newer note says more; -1 before.
        missed: Whether it took the run for unchanged, and a commit was due.
    """

    step: str = "read"
    known: int = -1
    read: int = 0
    sealed: bool = False
    due: int = 0
    marked: int = -1
    noted: int = -1
    missed: bool = False


DONE = "done"


class Sealed:
    """A setting under some rules: a model for `explorer.explore`.

    Args:
        setting: The actors and the first state.
        rules: Those that are kept.
        reach: Check that no commit stands behind a seal without a marker, in place of the data.
    """

    def __init__(self, setting: Setting, rules: Rules = KEPT, *, reach: bool = False) -> None:
        self._setting = setting
        self._rules = rules
        self._reach = reach
        last = setting.actors[-1]
        self._alike = setting.actors.index(last)
        #: A table of the notes that stand at first.
        self._table = self.initial().notes
        self._steps = {
            Trainer: self._trainer,
            Evictor: self._evictor,
            Collector: self._collector,
            Sealer: self._sealer,
            Reader: self._reader,
        }

    def initial(self) -> State:
        """Return the first state."""
        setting = self._setting
        memories = {Collector: Collecting(), Sealer: Sealing(), Reader: Reading()}
        memory = tuple(memories.get(type(actor), Writing()) for actor in setting.actors)
        log: Log = (CREATES, ("saves", 0))
        if setting.first in ("sealed", "noted"):
            log = (*log, EVICTS, SEALS)
        logs = tuple(log if exists else None for exists in setting.runs)
        there = [run for run, exists in enumerate(setting.runs) if exists]
        notes = tuple((run, 3, 0) for run in there if setting.first == "noted")
        return State(1, 0, (), logs, notes=notes, memory=memory)

    def wrong(self, state: State) -> str | None:
        """Return what is wrong with a state."""
        if any(isinstance(me, Reading) and me.missed for me in state.memory):
            return "A reader takes a run for unchanged in which something was committed."
        for run, log in enumerate(state.logs):
            if log is None:
                continue
            if not self._reach:
                if held(log) & state.deleting:
                    return f"Run {run} needs {_words(held(log))}, whose DELETE may land."
                continue
            behind = [line for line in log[newest_seal(log) + 1 :] if line[0] != "mark"]
            numbers = [number for of, number in state.markers if of == run]
            if newest_seal(log) >= 0 and behind and max(numbers, default=-1) <= newest_seal(log):
                return f"Run {run} {behind[0][0]} behind a seal, and no collection reads it."
        return None

    def successors(self, state: State) -> Iterator[tuple[Step, State]]:
        """Yield every step that somebody may take next."""
        for marker in sorted(state.markers & state.removing):
            after = state._replace(markers=state.markers - {marker})
            yield ("the store", "removes the marker", "{}.{}".format(*marker)), after
        for number, actor in enumerate(self._setting.actors):
            me = state.memory[number]
            for words, after, then in self._steps[type(actor)](actor, me, state):
                memory = self._known(state, number, then)
                who = f"{type(actor).__name__.lower()} {number}"
                yield (who, *words), after._replace(memory=memory)

    def _known(self, state: State, number: int, me: Any) -> tuple[Any, ...]:
        """Return all memories after one has changed; equal actors at the end are one."""
        known = [*state.memory]
        known[number] = me
        alike = self._alike
        return (*known[:alike], *sorted(known[alike:]))

    # Writers

    def _trainer(self, actor: Trainer, me: Writing, state: State) -> Iterator[Any]:
        log = state.logs[actor.run]
        match me.step:
            case "open":
                yield from self._open(actor, me, state)
            case "marker":
                yield from self._put_marker(actor.run, me, state, self._after_marker(me))
            case "create":
                # Somebody else's slot 0 is as good.
                logs = state.logs if log else _with(state.logs, actor.run, (CREATES,))
                then = me._replace(step=self._after_create(me), read=1)
                yield ("creates its run",), state._replace(logs=logs), then
            case "observe":
                u = len(state.epochs)
                late = not self._rules.marker_first and SEALS in (log or ())[: me.read]
                step = "late marker" if late and not actor.old else "choose"
                yield ("observes epoch", u), state, me._replace(step=step, u=u)
            case "late marker":
                yield from self._put_marker(actor.run, me, state, "choose")
            case "choose":
                yield from self._choose(actor, me, state)
            case "commit":
                yield from self._commit(actor, me, state)

    def _open(self, actor: Trainer, me: Writing, state: State) -> Iterator[Any]:
        log = state.logs[actor.run]
        if log is None and not actor.born:
            return
        if actor.old and self._rules.old_refuse and SEALS in (log or ()):
            yield ("refuses its log",), state, me._replace(step=DONE)
            return
        # W1': no marker for a run that was never sealed: without a note it is active.
        sealed = SEALS in (log or ()) and not actor.old
        step = "marker" if sealed and self._rules.marker_first else "observe"
        if log is None and step == "observe":
            step = "create"
        number = self._number(log or ())
        yield ("reads its log",), state, Writing(step, len(log or ()), number)

    def _number(self, log: Log) -> int:
        return newest_seal(log) + 1 if self._rules.numbered else 0

    def _after_marker(self, me: Writing) -> str:
        return "choose" if me.u >= 0 and not self._rules.epoch_after_marker else "observe"

    def _after_create(self, me: Writing) -> str:
        return "observe" if me.u < 0 else "choose"

    def _put_marker(self, run: int, me: Writing, state: State, then: str) -> Iterator[Any]:
        after = state._replace(markers=state.markers | {(run, me.number)})
        yield ("puts the marker", f"{run}.{me.number}"), after, me._replace(step=then)

    def _choose(self, actor: Trainer, me: Writing, state: State) -> Iterator[Any]:
        """W2, and W2a."""
        log = state.logs[actor.run]
        own = held(log or ())
        usable = (state.objects & ~_condemned(state, me.u)) | own
        for g in range(len(state.epochs) + 1):
            if usable >> g & 1:
                yield ("finds", f"a.{g}"), state, me._replace(step="commit", key=1 << g)
        new = 1 << me.u
        put = state._replace(objects=state.objects | new)
        yield ("puts", f"a.{me.u}"), put, me._replace(step="commit", key=new)

    def _commit(self, actor: Trainer, me: Writing, state: State) -> Iterator[Any]:
        """W3, W3', then W4."""
        log = state.logs[actor.run]
        assert log is not None
        if SEALS in log[me.read :]:
            if actor.old and self._rules.old_refuse:
                yield ("refuses its log",), state, me._replace(step=DONE)
                return
            if self._rules.marker_after_seal and not actor.old:
                again = Writing("marker", len(log), self._number(log), me.u)
                yield ("meets a seal",), state, again
                return
        u = max([me.u, *(e for kind, e in log if kind == "mark")])
        if me.key & ~held(log) & _condemned(state, u):
            back = me._replace(step="choose", u=u, key=0)
            yield ("may not name", _words(me.key)), state, back
            return
        saved = (*log, ("saves", me.key.bit_length() - 1))
        after = state._replace(logs=_with(state.logs, actor.run, saved))
        yield ("commits", _words(me.key)), after, Writing(DONE)

    def _evictor(self, actor: Evictor, me: Writing, state: State) -> Iterator[Any]:
        log = state.logs[actor.run]
        if log is None or not held(log):
            return
        match me.step:
            case "open":
                step = "marker" if self._rules.every_commit and SEALS in log else "evict"
                yield ("reads its log",), state, Writing(step, len(log), self._number(log))
            case "marker":
                yield from self._put_marker(actor.run, me, state, "evict")
            case "evict" if SEALS in log[me.read :] and self._rules.every_commit:
                yield ("meets a seal",), state, Writing("marker", len(log), self._number(log))
            case "evict":
                after = state._replace(logs=_with(state.logs, actor.run, (*log, EVICTS)))
                yield ("evicts",), after, Writing(DONE)

    # Collectors

    def _collector(self, _: Collector, me: Collecting, state: State) -> Iterator[Any]:
        rules = self._rules
        match me.step:
            case "publish":
                if not rules.markers_after_epoch and me.active < 0:
                    yield self._list_markers(me, state)
                elif not rules.runs_after_epoch and me.listed < 0:
                    yield self._list_runs(me, state)
                elif not rules.notes_after_listing and me.notes is None:
                    yield ("reads the notes",), state, me._replace(notes=state.notes)
                else:
                    yield from self._publish(me, state)
            case "list markers":
                yield self._list_markers(me, state)
            case "list runs":
                yield self._list_runs(me, state)
            case "read notes":
                yield self._read_notes(me, state)
            case "sweep":
                yield from self._sweep(me, state)

    def _publish(self, me: Collecting, state: State) -> Iterator[Any]:
        e = len(state.epochs) + 1
        then = self._next(me)
        if e <= self._setting.epochs:
            for keys in subsets((1 << e) - 1):
                after = state._replace(epochs=(*state.epochs, keys))
                words = ("publishes epoch", e, "condemning", _words(keys))
                yield words, after, then._replace(e=e)
        for e in range(1, len(state.epochs) + 1):
            yield ("joins sweep", e), state, then._replace(e=e)

    def _next(self, me: Collecting) -> Collecting:
        if me.active < 0:
            return me._replace(step="list markers")
        return me._replace(step="list runs" if me.listed < 0 else "read notes")

    def _list_markers(self, me: Collecting, state: State) -> Any:
        listed = me._replace(active=_bits(run for run, _ in state.markers))
        publishes = me.step == "publish"
        return ("lists the markers",), state, listed if publishes else self._next(listed)

    def _list_runs(self, me: Collecting, state: State) -> Any:
        listed = me._replace(listed=_bits(r for r, log in enumerate(state.logs) if log))
        publishes = me.step == "publish"
        return ("lists the runs",), state, listed if publishes else self._next(listed)

    def _read_notes(self, me: Collecting, state: State) -> Any:
        """G4': of a run without a marker the newest note counts; without one it is active."""
        notes = state.notes if me.notes is None else me.notes
        if not self._rules.notes_by_name:
            notes = self._table
        active, spared = me.active & me.listed, 0
        for run in range(len(state.logs)):
            if me.listed >> run & 1 and not me.active >> run & 1:
                keys = [keys for of, _, keys in notes if of == run]
                spared |= keys[-1] if keys else 0
                if not keys and self._rules.unknown_is_active:
                    active |= 1 << run
        # What was listed does not matter any more.
        then = Collecting("sweep", me.e, active, 0, None, spared)
        return ("reads the notes",), state, then

    def _sweep(self, me: Collecting, state: State) -> Iterator[Any]:
        """G3, G4 and G5."""
        unneeded = state.epochs[me.e - 1] & ~me.spared
        waits = False
        for run, log in enumerate(state.logs):
            if not me.active >> run & 1:
                continue
            assert log is not None
            marked = [n for n, (kind, e) in enumerate(log) if kind == "mark" and e >= me.e]
            if not marked:
                logs = _with(state.logs, run, (*log, ("mark", me.e)))
                yield ("marks run", run), state._replace(logs=logs), me
                waits = True
            else:
                # At any slot from its mark on.
                used = ~0
                for end in range(marked[0] + 1, len(log) + 1):
                    used &= held(log[:end])
                unneeded &= ~used
        if not waits:
            after = state._replace(deleting=state.deleting | unneeded)
            yield ("sends DELETEs of", _words(unneeded)), after, Collecting(DONE)

    def _sealer(self, _: Sealer, me: Sealing, state: State) -> Iterator[Any]:
        """S1, S2 and S3."""
        removal = {
            (me.run, number) for number in range(me.slot + 1)
        }  # also of those that a slow writer is yet to put
        match me.step:
            case "seal":
                yield from self._seal(state)
            case "note":
                notes = self._with_note(state.notes, (me.run, me.slot, me.keys))
                first = self._rules.note_before_removal
                then = me._replace(step="remove") if first else Sealing(DONE)
                words = ("notes run", me.run, "at slot", me.slot, _words(me.keys))
                yield words, state._replace(notes=notes), then
            case "remove":
                after = state._replace(removing=state.removing | removal)
                first = self._rules.note_before_removal
                then = Sealing(DONE) if first else me._replace(step="note")
                yield ("removes the markers of run", me.run, "up to", me.slot), after, then
            case "late seal":
                log = state.logs[me.run]
                assert log is not None
                logs = _with(state.logs, me.run, (*log, SEALS))
                yield ("seals run", me.run), state._replace(logs=logs), Sealing(DONE)

    def _seal(self, state: State) -> Iterator[Any]:
        first = "note" if self._rules.note_before_removal else "remove"
        for run, log in enumerate(state.logs):
            if log is None:
                continue
            if not self._rules.seal_before_note:
                after = state._replace(
                    notes=self._with_note(state.notes, (run, len(log), held(log))),
                    removing=state.removing | {(run, n) for n in range(len(log) + 1)},
                )
                yield ("notes run", run), after, Sealing("late seal", run, len(log), held(log))
                continue
            logs = _with(state.logs, run, (*log, SEALS))
            then = Sealing(first, run, len(log), held(log))
            yield ("seals run", run), state._replace(logs=logs), then
            removed = max((number for of, number in state.removing if of == run), default=-1)
            noted = {slot for of, slot, _ in state.notes if of == run}
            for slot, line in enumerate(log):
                if line == SEALS and not (slot in noted and slot <= removed):
                    then = Sealing(first, run, slot, held(log[:slot]))
                    yield ("finds the seal of run", run), state, then

    def _reader(self, actor: Reader, me: Reading, state: State) -> Iterator[Any]:
        """R1, then R2 at any later time."""
        log, rules = state.logs[actor.run], self._rules
        notes = _bits(slot for run, slot, _ in state.notes if run == actor.run)
        match me.step:
            case "read" if rules.known_before_reading and me.known < 0:
                yield ("lists the notes",), state, me._replace(known=notes)
            case "read" if log is not None:
                then = me._replace(step="ask", read=len(log), sealed=SEALS in log)
                yield ("reads the log",), state, then
            case "ask" if me.known < 0:
                yield ("lists the notes",), state, me._replace(known=notes)
            case "ask":
                assert log is not None
                yield ("asks",), state, me._replace(step="list", due=len(log))
            case "list":
                first = me.marked < 0 if rules.markers_before_notes else me.noted >= 0
                if first:
                    marked = any(run == actor.run for run, _ in state.markers)
                    then = me._replace(marked=marked)
                    words = "lists the markers"
                else:
                    newer = (notes & ~me.known) >> me.read
                    then = me._replace(noted=bool(newer) and rules.newer_notes)
                    words = "lists the newer notes"
                if then.marked >= 0 and then.noted >= 0:
                    assert log is not None
                    then = self._answer(then, log)
                yield (words,), state, then

    def _answer(self, me: Reading, log: Log) -> Reading:
        is_quiet = not me.marked and not me.noted
        is_quiet &= me.sealed or not self._rules.unsealed_is_asked
        commits = any(kind not in ("mark", "seals") for kind, _ in log[me.read : me.due])
        return Reading(DONE, missed=is_quiet and commits)

    def _with_note(self, notes: tuple[Note, ...], note: Note) -> tuple[Note, ...]:
        """Return the notes with one more, the newest of a run last."""
        if not self._rules.note_by_slot:
            return (*(one for one in notes if one[0] != note[0]), note)
        return tuple(sorted({*notes, note}))


def held(log: Log) -> int:
    """Return the key that a run needs after some slots; 0 without one."""
    for kind, g in reversed(log):
        if kind == "saves":
            return 1 << g
        if kind == "evicts":
            return 0
    return 0


def newest_seal(log: Log) -> int:
    """Return the slot of the newest seal; -1 without one."""
    return max((slot for slot, line in enumerate(log) if line == SEALS), default=-1)


def _condemned(state: State, u: int) -> int:
    keys = 0
    for one in state.epochs[: max(u, 0)]:
        keys |= one
    return keys


def _bits(runs: Any) -> int:
    keys = 0
    for run in runs:
        keys |= 1 << run
    return keys


def _with(logs: tuple[Log | None, ...], run: int, log: Log) -> tuple[Log | None, ...]:
    return (*logs[:run], log, *logs[run + 1 :])


def _words(keys: int) -> str:
    names = [f"a.{g}" for g in range(keys.bit_length()) if keys >> g & 1]
    return " ".join(names) or "nothing"
