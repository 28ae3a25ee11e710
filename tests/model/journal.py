"""The journal of docs/spec.md, section 40, ready to be explored.

A machine takes the run over, acknowledges entries, may restart, with the registry or without, and
carries. The adversary: every
process may die at any step; a PUT that was sent lands at any later time, or never; another machine
takes the run over at any moment; an evictor evicts, a collector deletes what no live checkpoint
needs, a stranger makes an entry illegal and legal again.

A log is append-only, so what a carrier has read is the number of slots that it has read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tests.model.explorer import Step


@dataclass(frozen=True)
class Rules:
    """The rules, each of which can be broken alone; the comment names the rule.

    Attributes:
        takeover_first: J1: nothing is acknowledged before the takeover was read back.
        continues: J1: a process that starts without the registry goes on under its predecessor's
            takeover, and never under a new one.
        by_own_takeover: J2: what follows an entry's own takeover decides, not the newest token.
        own_restarts: J2: a takeover of the same journal strands nothing.
        judged_before: J2: in all slots before the one that is put, after a lost race too.
        never_takes_over: J3.
        holds_bytes: J4: an entry does not lean on the store for its bytes.
        bytes_until_read_back: J4: they stay until the slot was read back.
        keeps_refused: J4: those of refused entries stay for a person.
        keeps_stranded: J4: those of stranded entries too.
        in_order: J5.
        searches: J6: the log is searched for the write before an attempt.
        searches_evicted: J6: in the commits of evicted checkpoints too.
        searches_again: J6: after a lost race once more.
        composed_late: J7: evictions are composed when carrying.
        exact_slot: J7: composed for the slot that is put.
        checks_late: J7: the keys are checked (W3) at each attempt.
        refusal_by_log: J8: for any other reason a slot of one's own comes first.
        noted_first: J8: a refusal is noted before it is told.
        ends_line: J8: earlier notes count too: an entry that follows a refused or stranded one is
            refused.
        one_carrier: J9.
    """

    takeover_first: bool = True
    continues: bool = True
    by_own_takeover: bool = True
    own_restarts: bool = True
    judged_before: bool = True
    never_takes_over: bool = True
    holds_bytes: bool = True
    bytes_until_read_back: bool = True
    keeps_refused: bool = True
    keeps_stranded: bool = True
    in_order: bool = True
    searches: bool = True
    searches_evicted: bool = True
    searches_again: bool = True
    composed_late: bool = True
    exact_slot: bool = True
    checks_late: bool = True
    refusal_by_log: bool = True
    noted_first: bool = True
    ends_line: bool = True
    one_carrier: bool = True


KEPT = Rules()


@dataclass(frozen=True)
class Setting:
    """Who there is, beside the trainer.

    Attributes:
        entries: How many saves the trainer makes at most.
        carriers: How many carriers.
        restarts: How often the trainer's process may start again.
        outages: How often it may start again without the registry.
        others: How often another machine may take the run over.
        taken_before: Whether another machine owned the run before.
        evictions: How many evictions there may be beside those of the carriers.
        sweeps: How many collections there may be.
        blocks: How often a stranger may make the saves illegal, and legal again.
        gives_up: How often a carrier may call an entry lost for a reason outside the log.
    """

    entries: int = 1
    carriers: int = 1
    restarts: int = 0
    outages: int = 0
    others: int = 0
    taken_before: bool = False
    evictions: int = 0
    sweeps: int = 0
    blocks: int = 0
    gives_up: int = 0


class Slot(NamedTuple):
    """A slot of the log: `takes`, `adds`, `evicts`, `sweeps`, `blocks`, `allows` or `nothing`.

    Attributes:
        kind: What it does.
        who: Who wrote it: 0 is the other machine, -1 somebody else.
        entry: The entry that it adds, or evicts.
        evicts: The entry that it evicts beside that.
    """

    kind: str
    who: int = -1
    entry: int = -1
    evicts: int = -1


class Entry(NamedTuple):
    """An acknowledged entry.

    Attributes:
        token: Number of the trainer's takeover: 1 and higher.
        since: Slot of its takeover; where that is unknown, of the acknowledgement.
        note: Its outcome, once noted.
        told: The outcome that somebody was told.
        bytes: Whether its bytes are in the journal.
        stored: Whether its objects are on the store.
        early: The eviction that was composed when it was acknowledged.
        follows: The entry that its training continues from: that of the same process before, or
            what the process restored; -1 for none.
        process: Number of the trainer's process.
    """

    token: int
    since: int
    note: str = ""
    told: str = ""
    bytes: bool = True
    stored: bool = False
    early: int = -1
    follows: int = -1
    process: int = 0


class Carrier(NamedTuple):
    """A carrier: idle, or with an entry, and the number of slots that it has read.

    Attributes:
        step: `idle`, `read`, `sent`, `own slot`, or a verdict that it is about to note.
        entry: The entry.
        read: The number of slots.
        lost: Whether it has lost a race for this entry.
    """

    step: str = "idle"
    entry: int = -1
    read: int = 0
    lost: bool = False


class Put(NamedTuple):
    """A PUT that was sent, and may land at its number."""

    number: int
    slot: Slot


class State(NamedTuple):
    """The state of everything.

    Attributes:
        log: The slots.
        flight: PUTs that were sent and have not landed.
        token: Number of the trainer's takeover; it is sent.
        process: Number of the trainer's process.
        entries: What was acknowledged.
        carriers: The carriers.
        left: How often each actor may still act: the trainer starts, others, evictions, sweeps,
            blocks, carriers give up, the trainer starts without the registry.
    """

    log: tuple[Slot, ...]
    flight: frozenset[Put]
    token: int
    process: int
    entries: tuple[Entry, ...]
    carriers: tuple[Carrier, ...]
    left: tuple[int, ...]


#: Makes a carrier of the one that acts, in a state.
Become = Callable[..., State]


class JournalModel:
    """A setting under some rules: a model for `explorer.explore`.

    Attributes:
        setting: The actors.
        rules: The rules that they keep.
    """

    def __init__(self, setting: Setting, rules: Rules = KEPT) -> None:
        self.setting = setting
        self.rules = rules

    def initial(self) -> State:
        """Return the first state: nobody of this machine has begun."""
        one = self.setting
        log = (Slot("takes", 0),) if one.taken_before else (Slot("nothing"),)
        left = (one.restarts + 1, one.others, one.evictions, one.sweeps, one.blocks, one.gives_up)
        carriers = (Carrier(),) * one.carriers
        return State(log, frozenset(), 0, 0, (), carriers, (*left, one.outages))

    # What must never be

    def wrong(self, state: State) -> str | None:
        """Return the promise that is broken."""
        live: set[int] = set()
        added: list[int] = []
        for number, slot in enumerate(state.log):
            for entry in (slot.evicts, slot.entry if slot.kind == "evicts" else -1):
                if entry >= 0 and entry not in live:
                    return f"Slot {number} evicts entry {entry}, which is not there."
                live.discard(entry)
            if slot.kind == "takes" and slot.who < 0:
                return f"Slot {number}: a carrier takes the run over."
            if slot.kind == "adds":
                if slot.entry in added:
                    return f"Entry {slot.entry} is added twice."
                if added and slot.entry < added[-1]:
                    return f"Entry {slot.entry} is added after entry {added[-1]}."
                if self._foreign(state.log[:number], state.entries[slot.entry]):
                    return f"Entry {slot.entry} enters behind another machine's takeover."
                if self._blocked(state.log[:number]):
                    return f"Slot {number} is not legal."
                if self._line_ended(state, slot.entry):
                    return f"Entry {slot.entry} enters, and the one that it follows never does."
                added.append(slot.entry)
                live.add(slot.entry)
        for number, entry in enumerate(state.entries):
            fault = self._wrong_entry(state, number, entry, number in added, number in live)
            if fault is not None:
                return fault
        return None

    def _wrong_entry(
        self, state: State, number: int, entry: Entry, is_added: bool, is_live: bool
    ) -> str | None:
        if is_live and not entry.stored:
            return f"Entry {number} is in the log, and its objects are gone."
        if not is_added and not entry.bytes and not entry.stored:
            return f"Entry {number} is lost."
        if not is_added and not entry.bytes and entry.note:
            return f"Entry {number} is {entry.note}, and its bytes are gone."
        if entry.note == "carried" and not is_added:
            return f"Entry {number} is noted as carried, and is not in the log."
        for verdict in (entry.note, entry.told):
            if verdict in ("refused", "stranded") and is_added:
                return f"Entry {number} is called {verdict}, and is in the log."
        if "stranded" in (entry.note, entry.told) and not self._foreign(state.log, entry):
            return f"Entry {number} is called stranded, and nobody took the run over."
        return None

    # What the log says

    def _foreign(self, log: tuple[Slot, ...], entry: Entry) -> bool:
        """Return whether another machine's takeover follows an entry's own."""
        return any(slot.kind == "takes" and slot.who == 0 for slot in log[entry.since + 1 :])

    def _stranded(self, log: tuple[Slot, ...], entry: Entry) -> bool:
        """Return whether a carrier calls an entry stranded."""
        takes = [(n, slot.who) for n, slot in enumerate(log) if slot.kind == "takes"]
        if not self.rules.by_own_takeover:
            return bool(takes) and takes[-1][1] == 0
        own = next((n for n, who in takes if who == entry.token), -1)
        later = [who for n, who in takes if n > own and who >= 0]
        return any(who == 0 or not self.rules.own_restarts for who in later)

    @staticmethod
    def _line_ended(state: State, entry: int) -> bool:
        """Return whether an entry follows one that is noted to stay outside."""
        follows = state.entries[entry].follows
        return follows >= 0 and state.entries[follows].note in ("refused", "stranded")

    @staticmethod
    def _restored(state: State) -> int:
        """Return what the next save of the trainer continues from."""
        found = -1
        for number, entry in enumerate(state.entries):
            if entry.process == state.process or entry.note not in ("refused", "stranded"):
                found = number
        return found

    @staticmethod
    def _blocked(log: tuple[Slot, ...]) -> bool:
        found = [slot.kind for slot in log if slot.kind in ("blocks", "allows")]
        return bool(found) and found[-1] == "blocks"

    @staticmethod
    def _live(log: tuple[Slot, ...]) -> list[int]:
        live: list[int] = []
        for slot in log:
            gone = {slot.evicts, slot.entry if slot.kind == "evicts" else -1}
            live = [entry for entry in live if entry not in gone]
            if slot.kind == "adds":
                live.append(slot.entry)
        return live

    def _found(self, log: tuple[Slot, ...], entry: int) -> bool:
        """Return whether a search finds the write of an entry."""
        if not self.rules.searches_evicted:
            return entry in self._live(log)
        return any(slot.kind == "adds" and slot.entry == entry for slot in log)

    # Steps

    def successors(self, state: State) -> Iterator[tuple[Step, State]]:
        """Yield every step that somebody may take next."""
        yield from self._store(state)
        yield from self._trainer(state)
        yield from self._strangers(state)
        for index, carrier in enumerate(state.carriers):
            for words, after in self._carrier(state, index, carrier):
                yield (f"carrier {index + 1}", *words), after

    def _store(self, state: State) -> Iterator[tuple[Step, State]]:
        for put in state.flight:
            flight = state.flight - {put}
            if put.number == len(state.log):
                landed = self._landed(state, put)
                yield ("the store", "takes", *put), landed._replace(flight=flight)
            elif put.number < len(state.log):
                yield ("the store", "refuses", *put), state._replace(flight=flight)

    def _landed(self, state: State, put: Put) -> State:
        entries = state.entries
        if put.slot.kind == "takes" and put.slot.who > 0 and not self.rules.takeover_first:
            # It came after all: entries that did not wait for it belong to it.
            entries = tuple(
                one._replace(since=put.number) if one.token == put.slot.who else one
                for one in entries
            )
        return state._replace(log=(*state.log, put.slot), entries=entries)

    def _trainer(self, state: State) -> Iterator[tuple[Step, State]]:
        who = "the trainer"
        if state.left[0]:
            token = state.token + 1
            put = Put(len(state.log), Slot("takes", token))
            flight = state.flight | {put}
            after = state._replace(token=token, process=state.process + 1, flight=flight)
            yield (who, "sends its takeover"), _spent(after, 0)
        own = [n for n, slot in enumerate(state.log) if slot == Slot("takes", state.token)]
        sent = [put for put in state.flight if put.slot == Slot("takes", state.token)]
        if state.token and not own and not sent:
            put = Put(len(state.log), Slot("takes", state.token))
            yield (who, "sends again"), state._replace(flight=state.flight | {put})
        if state.token and state.left[6] and own:
            after = state._replace(process=state.process + 1)
            if not self.rules.continues:
                after = after._replace(token=state.token + 1)
            yield (who, "starts without the registry"), _spent(after, 6)
        is_out = state.left[6] < self.setting.outages
        may = bool(own) or not self.rules.takeover_first or (is_out and not self.rules.continues)
        if state.token and may and len(state.entries) < self.setting.entries:
            leans = not self.rules.holds_bytes
            live = self._live(state.log)
            entry = Entry(
                state.token,
                own[0] if own else len(state.log) - 1,
                bytes=not leans,
                stored=leans,
                early=live[-1] if live else -1,
                follows=self._restored(state),
                process=state.process,
            )
            after = state._replace(entries=(*state.entries, entry))
            yield (who, "acknowledges", len(state.entries)), after

    def _strangers(self, state: State) -> Iterator[tuple[Step, State]]:
        _, others, evictions, sweeps, blocks, *_ = state.left
        log = state.log
        if others:
            slot = Slot("takes", 0)
            yield ("another machine", "takes over"), _spent(state._replace(log=(*log, slot)), 1)
        if evictions:
            for entry in self._live(log):
                slot = Slot("evicts", entry=entry)
                after = state._replace(log=(*log, slot))
                yield ("the evictor", "evicts", entry), _spent(after, 2)
        if sweeps:
            live = self._live(log)
            entries = tuple(
                one._replace(stored=one.stored and number in live)
                for number, one in enumerate(state.entries)
            )
            after = state._replace(log=(*log, Slot("sweeps")), entries=entries)
            yield ("the collector", "sweeps"), _spent(after, 3)
        if blocks:
            after = state._replace(log=(*log, Slot("blocks")))
            yield ("a stranger", "blocks"), _spent(after, 4)
        if self._blocked(log):
            yield ("a stranger", "allows"), state._replace(log=(*log, Slot("allows")))

    def _carrier(self, state: State, index: int, me: Carrier) -> Iterator[tuple[Step, State]]:
        def become(carrier: Carrier, at: State = state) -> State:
            carriers = (*at.carriers[:index], carrier, *at.carriers[index + 1 :])
            return at._replace(carriers=carriers)

        if me.step == "idle":
            others = any(one.step != "idle" for one in state.carriers)
            if others and self.rules.one_carrier:
                return
            waiting = [n for n, entry in enumerate(state.entries) if not entry.note]
            for entry in waiting[:1] if self.rules.in_order else waiting:
                yield ("reads for", entry), become(Carrier("read", entry, len(state.log)))
            return
        yield ("dies",), become(Carrier())
        if me.step == "read":
            yield from self._decide(state, me, become)
        elif me.step in ("sent", "own slot"):
            yield from self._answered(state, me, become)
        else:
            yield from self._conclude(state, me, become)

    def _decide(self, state: State, me: Carrier, become: Become) -> Iterator[tuple[Step, State]]:
        rules, entry = self.rules, state.entries[me.entry]
        prefix = state.log[: me.read]
        searches = rules.searches and (rules.searches_again or not me.lost)
        if searches and self._found(prefix, me.entry):
            yield ("finds", me.entry), become(me._replace(step="carried"))
            return
        judged = rules.judged_before or not me.lost
        if judged and self._stranded(prefix, entry):
            if not rules.never_takes_over:
                put = Put(me.read, Slot("takes", -1))
                after = state._replace(flight=state.flight | {put})
                yield ("takes over",), become(me._replace(step="own slot"), after)
                return
            yield ("strands", me.entry), become(me._replace(step="stranded"))
            return
        if self._blocked(prefix) or (rules.ends_line and self._line_ended(state, me.entry)):
            yield ("refuses", me.entry), become(me._replace(step="refused"))
            return
        before = state
        if state.left[5]:
            state = _spent(state, 5)
            if rules.refusal_by_log:
                put = Put(me.read, Slot("nothing", -2 - me.entry))
                after = state._replace(flight=state.flight | {put})
                yield ("puts a slot of its own",), become(me._replace(step="own slot"), after)
            else:
                yield ("gives up", me.entry), become(me._replace(step="refused"), state)
        yield from self._send(before, me, become)

    def _send(self, state: State, me: Carrier, become: Become) -> Iterator[tuple[Step, State]]:
        rules, entry = self.rules, state.entries[me.entry]
        number = me.read
        prefix = state.log[:number]
        live = self._live(prefix)
        evicts = live[-1] if live else -1
        if not rules.composed_late:
            evicts = entry.early  # composed when it was acknowledged
        stored = entry.stored
        if not stored and (rules.checks_late or not me.lost):
            if not entry.bytes:
                return  # nobody has its bytes
            stored = True
        slots = [number] if rules.exact_slot else {number, len(state.log)}
        for at in slots:
            put = Put(at, Slot("adds", entry=me.entry, evicts=evicts))
            entries = _with(state.entries, me.entry, entry._replace(stored=stored))
            if not rules.bytes_until_read_back:
                entries = _with(entries, me.entry, entries[me.entry]._replace(bytes=False))
            after = state._replace(flight=state.flight | {put}, entries=entries)
            yield ("puts", me.entry), become(me._replace(step="sent"), after)

    def _answered(self, state: State, me: Carrier, become: Become) -> Iterator[tuple[Step, State]]:
        """Read the log again, after an answer or without one."""
        own = me.step == "own slot"
        landed = len(state.log) > me.read
        mine = landed and (
            state.log[me.read].kind == "nothing"
            if own
            else state.log[me.read] in _adds(state.log, me.entry)
        )
        if own and mine:
            yield ("has put its own slot",), become(me._replace(step="refused"))
        elif mine:
            yield ("reads its slot back",), become(me._replace(step="carried"))
        else:
            after = Carrier("read", me.entry, len(state.log), lost=landed)
            yield ("reads again",), become(after)

    def _conclude(self, state: State, me: Carrier, become: Become) -> Iterator[tuple[Step, State]]:
        rules, entry = self.rules, state.entries[me.entry]
        if not rules.noted_first and not entry.told and me.step != "carried":
            entries = _with(state.entries, me.entry, entry._replace(told=me.step))
            yield ("tells", me.step), state._replace(entries=entries)
        verdict = entry.note or me.step
        keeps = {"refused": rules.keeps_refused, "stranded": rules.keeps_stranded}.get(verdict)
        noted = entry._replace(note=verdict, told=verdict, bytes=entry.bytes and bool(keeps))
        after = state._replace(entries=_with(state.entries, me.entry, noted))
        yield ("notes", verdict), become(Carrier(), after)


def _adds(log: tuple[Slot, ...], entry: int) -> list[Slot]:
    return [slot for slot in log if slot.kind == "adds" and slot.entry == entry]


def _with(entries: tuple[Entry, ...], number: int, entry: Entry) -> tuple[Entry, ...]:
    return (*entries[:number], entry, *entries[number + 1 :])


def _spent(state: State, which: int) -> State:
    left = list(state.left)
    left[which] -= 1
    return state._replace(left=tuple(left))


def ends(model: JournalModel, state: State) -> State:
    """Return where a fresh carrier, running alone, ends: nothing else happens any more."""
    alone = state._replace(carriers=(Carrier(),), flight=frozenset(), left=(0,) * 7)
    quiet = JournalModel(replace(model.setting, carriers=1), model.rules)
    seen = set()
    while alone not in seen:
        seen.add(alone)
        for step, after in quiet.successors(alone):
            if step[0] == "the store" or (step[0] == "carrier 1" and step[1] != "dies"):
                alone = after
                break
    return alone
