"""The writer's side, W1 to W4 and W2a: one store call a step.

Three things need no step of their own:

- Reading the head before a put, if `Scenario.apart` is off. The put succeeds only if no other slot
  was put meanwhile, so the head is then still the same; epochs are immutable, and the chosen keys
  are the writer's own. If another slot was put meanwhile, the put changes nothing, and u is read
  again with the next head before it is used.
- Looking before an upload: whether or not a usable key exists, a writer may put its own.
- A lost answer. The writer reads the slot: its own bytes mean that it has succeeded, other bytes
  that it has lost the race; without a slot it puts again, as if it had been slow. An upload that
  lands late, or twice, is a stranger's (`Scenario.strangers`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.model.keys import Keys, single
from tests.model.log import FREED, SHOWN, Log, Logs, Slot, name_bit, union
from tests.model.scenario import Relocate, Rules, Scenario, State, Writer


class Memory(NamedTuple):
    """The memory of a writer.

    Attributes:
        step: Index of the next step of its program.
        u: Its observed epoch.
        keys: The keys that it has chosen so far.
        trusted: Chosen keys that are not checked, by a broken rule.
        head: The log as it was read last, if that is a step of its own.
        seen: The objects that it has listed before it observed its epoch.
    """

    step: int = 0
    u: int = 0
    keys: int = 0
    trusted: int = 0
    head: int = -1
    seen: int = 0


#: Stands for the chosen keys of an undrop that does not look again, by a broken rule.
BLIND = -1


class Turn(NamedTuple):
    """A writer, and everything that it can see.

    Attributes:
        actor: The actor.
        program: Its steps, in order.
        me: Its memory.
        state: The state of the model.
        log: The log of its run; `None` before slot 0.
    """

    actor: Writer | Relocate
    program: tuple[str, ...]
    me: Memory
    state: State
    log: Log | None


class Move(NamedTuple):
    """A step of a writer: its words in a trace, and the state after it."""

    words: tuple[object, ...]
    objects: int
    log: Log | None
    me: Memory


class Writers:
    """The steps of all writers of a scenario."""

    def __init__(self, scenario: Scenario, rules: Rules, keys: Keys, logs: Logs) -> None:
        self._files = scenario.files
        self._apart = scenario.apart
        self._rules = rules
        self._keys = keys
        self._logs = logs

    def program(self, actor: Writer | Relocate) -> tuple[str, ...]:
        """Return the steps of a writer in their order."""
        rules = self._rules
        steps = ["observe", "choose"]
        if isinstance(actor, Writer) and actor.born and rules.slot_0_references_nothing:
            earliest = 0 if rules.run_before_epoch else 1
            steps.insert(earliest if rules.run_before_key else 2, "create")  # W1
        if isinstance(actor, Writer) and actor.early:
            steps.insert(steps.index("observe"), "list")
        steps += ["read", "put"] if self._apart else ["commit"]
        if isinstance(actor, Writer) and not (rules.one_slot and rules.places_with_commits):
            steps.append("commit the rest")
        return (*steps, "done")

    def moves(self, turn: Turn) -> Iterator[Move]:
        """Yield the next steps of a writer."""
        _, program, me, state, log = turn
        match program[me.step]:
            case "create":
                # Somebody else's slot 0 is as good.
                words = "creates its run" if log is None else "finds its run"
                yield Move((words,), state.objects, log or self._logs.created, _next(me))
            case "list":
                after = _next(me)._replace(seen=state.objects)
                yield Move(("lists objects",), state.objects, log, after)
            case "observe":
                u = len(state.epochs)
                after = _next(me)._replace(u=u, seen=me.seen)
                yield Move(("observes epoch", u), state.objects, log, after)
            case "choose":
                yield from self._choose(turn)
            case "read":
                head = -1 if log is None else log.number
                yield Move(("reads its log",), state.objects, log, _next(me)._replace(head=head))
            case "put":
                if me.trusted == BLIND or me.head == (-1 if log is None else log.number):
                    yield from self._commit(turn)
                else:
                    back = me._replace(step=me.step - 1, head=-1)
                    yield Move(("loses the slot",), state.objects, log, back)
            case "commit":
                yield from self._commit(turn)
            case "commit the rest":
                assert log is not None
                assert isinstance(turn.actor, Writer)
                slot = self._everything(turn.actor, me, log)
                yield self._put(turn, log, slot, _done(program))

    def _choose(self, turn: Turn) -> Iterator[Move]:
        """W2: choose a key for the next file that has none, in any way."""
        actor, _, me, state, log = turn
        is_hidden = log is not None and log.stage not in (SHOWN, FREED)
        if is_hidden and _undrops(actor) and not self._rules.undrop_looks:
            blind = Memory(step=len(turn.program) - 2, trusted=BLIND)
            yield Move(("finds its run hidden",), state.objects, log, blind)
        lacking = [file for file in self._wanted(actor) if not me.keys & self._keys.of_file(file)]
        keys = self._keys.of_file(lacking[0])
        chosen = _next(me) if len(lacking) == 1 else me
        words = self._keys.words

        usable = (me.seen or state.objects) & keys  # what it has listed may be gone by now
        if self._rules.refuse_condemned and self._checks(actor):
            usable &= ~condemned(state, me.u)
        for key in single(usable):
            after = Memory(chosen.step, me.u, me.keys | key, me.trusted)
            yield Move(("finds", words[key]), state.objects, log, after)

        new = self._keys.key(lacking[0], me.u if self._rules.generations else 0)
        again = 0 if self._rules.generations else new
        after = Memory(chosen.step, me.u, me.keys | new, me.trusted | again)
        yield Move(("puts", words[new]), state.objects | new, log, after)

        if actor.own and log is not None:
            yield from self._choose_own(turn, log, keys, chosen)

    def _choose_own(self, turn: Turn, log: Log, keys: int, chosen: Memory) -> Iterator[Move]:
        """W2a: choose the keys that its own run holds."""
        actor, program, me, state, _ = turn
        for key in single(self._covered(actor, log) & keys):
            believed = 0 if self._rules.exact_slot else key
            after = Memory(chosen.step, me.u, me.keys | key, me.trusted | believed)
            words = ("takes from its own log", self._keys.words[key])
            yield Move(words, state.objects, log, after)
        is_shown = log.stage == SHOWN
        if (
            isinstance(actor, Writer)
            and is_shown
            and all(self._is_live(log, m) for m in actor.manifests)
        ):
            # A promotion of what is live says nothing of places.
            slot = Slot(names=_names(actor))
            yield self._put(turn, log, slot, _done(program))

    def _commit(self, turn: Turn) -> Iterator[Move]:
        """W3, then W4."""
        actor, program, me, state, log = turn
        head = log or self._logs.created  # `None`: a fork that references in commit 0
        if me.trusted == BLIND:
            yield self._put(turn, head, Slot(shows=True), _done(program))
            return
        is_wrong = (head.stage != SHOWN) != _undrops(actor) and not isinstance(actor, Relocate)
        if (
            is_wrong
            or head.dropped
            or (isinstance(actor, Relocate) and actor.manifest not in head.held)
        ):
            yield Move(("gives up",), state.objects, log, _done(program))
            return
        if _undrops(actor) and (head.stage != FREED or not self._rules.undrop_adopts):
            yield self._put(turn, head, Slot(shows=True), _done(program))
            return
        u = max(me.u, head.mark)
        refused = self._refused(turn, head, u)
        if refused:
            back = Memory(step=program.index("choose"), u=u, keys=me.keys & ~refused)
            yield Move(("may not name", self._keys.words[refused]), state.objects, log, back)
            return
        if "commit the rest" in program:
            later = Memory(step=program.index("commit the rest"), keys=me.keys)
            assert isinstance(actor, Writer)
            yield self._put(turn, head, self._too_little(actor), later)
        else:
            yield self._put(turn, head, self._everything(actor, me, head), _done(program))

    def _refused(self, turn: Turn, head: Log, u: int) -> int:
        """Return the chosen keys that may not be named any more."""
        actor, _, me, state, _ = turn
        rules = self._rules
        if not (rules.recheck and self._checks(actor)):
            return 0
        since = 0 if rules.refuse_condemned else me.u
        unproven = me.keys & ~me.trusted & ~self._covered(actor, head)
        refused = unproven & condemned(state, u, after=since)
        if not rules.generations:
            refused |= me.trusted & condemned(state, u, after=me.u)
        return refused

    def _put(self, turn: Turn, head: Log, slot: Slot, me: Memory) -> Move:
        longer = self._logs.append(head, slot)
        placed = union(keys for _, keys in slot.places)
        verb = "commits, placing" if isinstance(turn.actor, Writer) else "moves to"
        words = (verb, self._keys.words[placed] if placed else "nothing new")
        return Move(words, turn.state.objects, longer, me)

    def _everything(self, actor: Writer | Relocate, me: Memory, head: Log) -> Slot:
        """Return the slot of a writer that keeps the rules."""
        places = [
            (manifest, union(me.keys & self._keys.of_file(file) for file in files))
            for manifest, files in self._needs(actor)
        ]
        changed = tuple(place for place in places if head.places[place[0]] != place[1])
        if isinstance(actor, Relocate):
            return Slot(places=changed)
        passing = _passing(actor)
        names = _names(actor) | passing
        return Slot(places=changed, names=names, evicts=passing, shows=actor.undrops)

    def _too_little(self, actor: Writer) -> Slot:
        """Return the first of two slots of a sync that breaks the rules."""
        return Slot(names=_passing(actor) if self._rules.places_with_commits else _names(actor))

    def _needs(self, actor: Writer | Relocate) -> list[tuple[int, tuple[int, ...]]]:
        """Return what is to be placed: each manifest with its files."""
        if isinstance(actor, Relocate):
            return [(actor.manifest, (actor.file,))]
        return [(manifest, self._files[manifest]) for manifest in actor.manifests]

    def _wanted(self, actor: Writer | Relocate) -> list[int]:
        """Return the files that need a key, each once."""
        return list(dict.fromkeys(file for _, files in self._needs(actor) for file in files))

    def _covered(self, actor: Writer | Relocate, log: Log) -> int:
        """Return the keys that W2a lets be named at the slot after this log without a check."""
        if not actor.own:
            return 0
        if not self._rules.by_parts:
            # The places before the thinning count as well: those of the first state.
            named = (file for manifest in log.held for file in self._files[manifest])
            return log.keys | union(self._keys.key(file, 0) for file in named)
        return log.keys if self._rules.held_only else log.placed

    def _is_live(self, log: Log, manifest: int) -> bool:
        placed = bool(log.places[manifest]) and not log.dropped
        return manifest in log.held or (placed and not self._rules.held_only)

    def _checks(self, actor: Writer | Relocate) -> bool:
        return self._rules.relocation_checks or not isinstance(actor, Relocate)


def condemned(state: State, u: int, *, after: int = 0) -> int:
    """Return the keys that the sweeps up to u condemned."""
    keys = union(keys for keys, _ in state.epochs[after:u])
    return keys & ~(state.forgotten & state.objects)


def _undrops(actor: Writer | Relocate) -> bool:
    return isinstance(actor, Writer) and actor.undrops


def _names(actor: Writer) -> int:
    return union(name_bit(manifest, actor.name) for manifest in actor.manifests)


def _passing(actor: Writer) -> int:
    return 0 if actor.passing is None else name_bit(actor.passing, actor.name)


def _next(me: Memory) -> Memory:
    return Memory(me.step + 1, me.u, me.keys, me.trusted)


def _done(program: tuple[str, ...]) -> Memory:
    return Memory(step=len(program) - 1)
