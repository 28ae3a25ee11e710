"""Power loss: W5, and the syncs of a collector, as a model to explore.

One run, one file of a state (a pack, say), at most one sweep. A name is created in one step and
synced with its folder in another; its creator may stop for ever in between. The power may fail
after any step: each name that was not synced may then be lost. All rules of `protocol` are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.model.explorer import Step

#: How a name stands.
ABSENT, NAMED, DURABLE = 0, 1, 2
#: What a slot says: the state is saved under generation 0 or 1, or evicted; or it is a mark.
SAVED, EVICT, MARK = ("saves 0", "saves 1"), "evicts", "marks"
STOPPED = -1


@dataclass(frozen=True)
class Rules:
    """The names of other actors that an actor syncs, and when.

    Attributes:
        objects: Existing objects that a writer names, before its slot.
        slots: The slots that were read, before the next one is put.
        acknowledgements: The slots that were read, before anybody reports that nothing is left to
            do, collectors included.
        epochs: The observed epoch, before anything is put or marked under it.
        reread: The slots that a collector has replayed, before it deletes.
    """

    objects: bool = True
    slots: bool = True
    acknowledgements: bool = True
    epochs: bool = True
    reread: bool = True


class Memory(NamedTuple):
    """The memory of an actor.

    Attributes:
        step: Its next step.
        u: Its observed epoch.
        own: Whether it created the name that it will use.
        read: Slots that it has read.
    """

    step: int = 0
    u: int = 0
    own: bool = False
    read: int = 0


class State(NamedTuple):
    """The state of the store and of the actors.

    Attributes:
        file: The file under generation 0 and 1: absent, present or durable.
        epoch: The same for epoch 1.
        log: The content of each slot.
        synced: Number of durable slots.
        acked: Number of acknowledged slots.
        deleting: Whether a DELETE of the file of generation 0 was sent.
        memory: The memory of each actor.
    """

    file: tuple[int, int] = (ABSENT, ABSENT)
    epoch: int = ABSENT
    log: tuple[str, ...] = ()
    synced: int = 0
    acked: int = 0
    deleting: bool = False
    memory: tuple[Memory, ...] = ()


def held(log: tuple[str, ...]) -> int | None:
    """Return the generation under which the state is held, if it is."""
    for slot in reversed(log):
        if slot in SAVED:
            return SAVED.index(slot)
        if slot == EVICT:
            return None
    return None


class Power:
    """A model for `explorer.explore`.

    Args:
        actors: Each is a `writer`, an `evictor` or a `collector`.
        rules: Those that are kept.
        saved: Whether the state is saved already, for good.
    """

    def __init__(
        self, actors: tuple[str, ...], rules: Rules | None = None, *, saved: bool = False
    ) -> None:
        self._actors = actors
        self._rules = rules or Rules()
        self._saved = saved

    def initial(self) -> State:
        """Return the first state."""
        memory = tuple(Memory() for _ in self._actors)
        if not self._saved:
            return State(memory=memory)
        return State((DURABLE, ABSENT), log=(SAVED[0],), synced=1, acked=1, memory=memory)

    def wrong(self, state: State) -> str | None:
        """Return the damage that a power loss could leave."""
        if len(state.log) - state.synced > 1:
            return "A slot may be lost, and a later one stay: the log has a gap."
        if state.acked > state.synced:
            return "An acknowledged slot may be lost."
        if state.deleting and state.epoch != DURABLE:
            return "An epoch by which something is deleted may be lost."
        if state.file[1] == DURABLE and state.epoch != DURABLE:
            return "The epoch of a file may be lost."
        for left in {state.log, state.log[: state.synced]}:
            generation = held(left)
            if generation is not None and state.file[generation] != DURABLE:
                return "A state that is held may have lost its file."
            if MARK in left and state.epoch != DURABLE:
                return "An epoch that is marked may be lost."
        return None

    def successors(self, state: State) -> Iterator[tuple[Step, State]]:
        """Yield every step that somebody may take next, and the state after it."""
        for number, actor in enumerate(self._actors):
            me = state.memory[number]
            if me.step == STOPPED:
                continue
            words, after, then = getattr(self, f"_{actor}")(state, me)
            memory = (*state.memory[:number], then, *state.memory[number + 1 :])
            yield (f"{actor} {number}", words), after._replace(memory=memory)

    def _writer(self, state: State, me: Memory) -> tuple[str, State, Memory]:
        following = me._replace(step=me.step + 1)
        match me.step:
            case 0:
                u = int(state.epoch != ABSENT)
                return "observes an epoch", state, following._replace(u=u)
            case 1:
                if me.u and self._rules.epochs:
                    return "syncs the epochs", state._replace(epoch=DURABLE), following
                return "goes on", state, following
            case 2:
                if state.file[me.u] != ABSENT:
                    return "finds the file", state, following
                named = self._with_file(state, me.u, NAMED)
                return "names the file", named, following._replace(own=True)
            case 3:
                # What a collector has deleted meanwhile is not there to be synced.
                if (me.own or self._rules.objects) and state.file[me.u] != ABSENT:
                    return "syncs the file", self._with_file(state, me.u, DURABLE), following
                return "goes on", state, following
            case 4:
                if held(state.log) is not None:
                    return "finds it saved", state, me._replace(step=7, read=len(state.log))
                if MARK in state.log and me.u == 0:
                    return "may not name it", state, Memory(STOPPED)
                return "reads the log", state, following._replace(read=len(state.log))
            case 5:
                return self._put(state, me, SAVED[me.u], back=4)
            case 6:
                return self._sync_and_tell(state)
            case _:
                return self._tell(state, me)

    def _evictor(self, state: State, me: Memory) -> tuple[str, State, Memory]:
        match me.step:
            case 0:
                if held(state.log) is None:
                    return "finds nothing", state, Memory(STOPPED)
                return "reads the log", state, Memory(1, read=len(state.log))
            case 1:
                return self._put(state, me, EVICT, back=0)
            case _:
                return self._sync_and_tell(state)

    def _collector(self, state: State, me: Memory) -> tuple[str, State, Memory]:
        match me.step:
            case 0:
                if state.epoch == ABSENT:
                    return "names the epoch", state._replace(epoch=NAMED), Memory(1, own=True)
                return "joins the sweep", state, Memory(1)
            case 1:
                if me.own or self._rules.epochs:
                    return "syncs the epochs", state._replace(epoch=DURABLE), Memory(2)
                return "goes on", state, Memory(2)
            case 2:
                read = len(state.log)
                return "reads the log", state, Memory(4 if MARK in state.log else 3, read=read)
            case 3:
                return self._put(state, me, MARK, back=2, then=5)
            case 4:
                if self._rules.acknowledgements:
                    return "syncs the log", self._synced(state, me.read), Memory(6)
                return "finds the mark", state, Memory(6)
            case 5:
                return "syncs the log", self._synced(state, len(state.log)), Memory(6)
            case 6:
                if held(state.log) == 0:
                    return "finds it held", state, Memory(STOPPED)
                return "finds it unneeded", state, Memory(7, read=len(state.log))
            case 7:
                if self._rules.reread:
                    return "syncs the log", self._synced(state, me.read), Memory(8)
                return "goes on", state, Memory(8)
            case _:
                deleted = self._with_file(state, 0, ABSENT)._replace(deleting=True)
                return "deletes the file", deleted, Memory(STOPPED)

    def _put(
        self, state: State, me: Memory, slot: str, *, back: int, then: int | None = None
    ) -> tuple[str, State, Memory]:
        if self._rules.slots and state.synced < me.read:
            return "syncs the log", self._synced(state, me.read), me
        if len(state.log) != me.read:
            return "loses the slot", state, me._replace(step=back)
        after = state._replace(log=(*state.log, slot))
        return slot, after, me._replace(step=me.step + 1 if then is None else then)

    def _sync_and_tell(self, state: State) -> tuple[str, State, Memory]:
        after = self._synced(state, len(state.log))
        return "syncs and tells", after._replace(acked=len(state.log)), Memory(STOPPED)

    def _tell(self, state: State, me: Memory) -> tuple[str, State, Memory]:
        if self._rules.acknowledgements and state.synced < me.read:
            return "syncs the log", self._synced(state, me.read), me
        acked = max(state.acked, me.read)
        return "tells that it is saved", state._replace(acked=acked), Memory(STOPPED)

    @staticmethod
    def _synced(state: State, slots: int) -> State:
        return state._replace(synced=max(state.synced, slots))

    @staticmethod
    def _with_file(state: State, generation: int, stands: int) -> State:
        file = list(state.file)
        file[generation] = stands
        return state._replace(file=(file[0], file[1]))


@dataclass(frozen=True)
class SealRules:
    """The names that the writers of sealed runs sync, and before what.

    Attributes:
        marker: A marker, before the epoch is observed; also if another writer put it.
        seal: A seal, before its note is put.
        note: A note, before markers are removed.
    """

    marker: bool = True
    seal: bool = True
    note: bool = True


class SealState(NamedTuple):
    """A run that was sealed at slot 1, and what became of it.

    Attributes:
        log: The content of each slot.
        synced: Number of durable slots.
        markers: How the marker with each number stands.
        notes: How the note of each slot stands.
        memory: The memory of each actor.
    """

    log: tuple[str, ...] = (SAVED[0], "seals")
    synced: int = 2
    markers: tuple[tuple[int, int], ...] = ()
    notes: tuple[tuple[int, int], ...] = ((1, DURABLE),)
    memory: tuple[Memory, ...] = ()


class SealedPower:
    """Writers and sealers of one run, whose store may lose its power at any step.

    After that each name that was not synced is gone, while writers on other machines go on.

    Args:
        actors: Each is a `writer` or a `sealer`.
        rules: Those that are kept.
    """

    def __init__(self, actors: tuple[str, ...], rules: SealRules | None = None) -> None:
        self._actors = actors
        self._rules = rules or SealRules()

    def initial(self) -> SealState:
        """Return the first state: a sealed run."""
        return SealState(memory=tuple(Memory() for _ in self._actors))

    def wrong(self, state: SealState) -> str | None:
        """Return what a collection would overlook."""
        newest = max((slot for slot, _ in state.notes), default=-1)
        if newest >= 0 and state.log[newest : newest + 1] != ("seals",):
            return "The newest note is of a seal that is lost."
        if not state.markers and EVICT in state.log[newest + 1 :]:
            return "There is a commit after the newest note, and no marker."
        return None

    def successors(self, state: SealState) -> Iterator[tuple[Step, SealState]]:
        """Yield every step that somebody may take next."""
        lost = state._replace(
            log=state.log[: state.synced],
            markers=tuple(one for one in state.markers if one[1] == DURABLE),
            notes=tuple(one for one in state.notes if one[1] == DURABLE),
        )
        if lost != state:
            yield ("the power", "fails"), lost
        for number, actor in enumerate(self._actors):
            me = state.memory[number]
            if me.step == STOPPED:
                continue
            words, after, then = getattr(self, f"_{actor}")(state, me)
            memory = (*state.memory[:number], then, *state.memory[number + 1 :])
            yield (f"{actor} {number}", words), after._replace(memory=memory)

    def _writer(self, state: SealState, me: Memory) -> tuple[str, SealState, Memory]:
        seals = [slot for slot, line in enumerate(state.log) if line == "seals"]
        following = me._replace(step=me.step + 1)
        match me.step:
            case 0:
                return "reads the log", state, Memory(1, u=seals[-1] + 1, read=len(state.log))
            case 1:
                if any(number == me.u for number, _ in state.markers):
                    return "finds the marker", state, following
                named = state._replace(markers=(*state.markers, (me.u, NAMED)))
                return "puts the marker", named, following
            case 2:
                if self._rules.marker and any(number == me.u for number, _ in state.markers):
                    rest = tuple(one for one in state.markers if one[0] != me.u)
                    synced = state._replace(markers=(*rest, (me.u, DURABLE)))
                    return "syncs the marker", synced, following
                # The store answers that it is not there: it is put again.
                return "goes on", state, me._replace(step=1) if self._rules.marker else following
            case 3:
                if len(state.log) < me.read:
                    return "finds its log shorter", state, Memory(STOPPED)
                if seals[-1] + 1 > me.u:
                    return "meets a seal", state, Memory()
                longer = (*state.log, EVICT)
                return EVICT, state._replace(log=longer, synced=len(state.log)), following
            case _:
                return "syncs the log", _all_synced(state), Memory(STOPPED)

    def _sealer(self, state: SealState, me: Memory) -> tuple[str, SealState, Memory]:
        slot = me.read
        following = me._replace(step=me.step + 1)
        match me.step:
            case 0:
                longer = (*state.log, "seals")
                after = state._replace(log=longer, synced=len(state.log))
                return "seals", after, Memory(1, read=len(state.log))
            case 1:
                if not self._rules.seal:
                    return "goes on", state, following
                if state.log[slot : slot + 1] != ("seals",):
                    return "finds its seal lost", state, Memory(STOPPED)
                return "syncs the log", _all_synced(state), following
            case 2:
                named = state._replace(notes=(*state.notes, (slot, NAMED)))
                return "puts the note", named, following
            case 3:
                if not self._rules.note:
                    return "goes on", state, following
                if not any(of == slot for of, _ in state.notes):
                    return "finds its note lost", state, Memory(STOPPED)
                rest = tuple(one for one in state.notes if one[0] != slot)
                return "syncs the note", state._replace(notes=(*rest, (slot, DURABLE))), following
            case _:
                left = tuple(one for one in state.markers if one[0] > slot)
                return "removes the markers", state._replace(markers=left), Memory(STOPPED)


def _all_synced(state: SealState) -> SealState:
    return state._replace(synced=len(state.log))
