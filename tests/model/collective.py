"""The collective save of docs/spec.md, section 43, ready to be explored.

Rank 0 leads, rank 1 follows; each has a file to store. The adversary: all steps interleave; a PUT
that was sent lands at any later time, or never; a DELETE lands at any later time, again and again;
a collector condemns what it likes; others commit, adopt what they find, and evict. What a rank
knows of the log is the number of slots that it has read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.model.explorer import Step


@dataclass(frozen=True)
class Rules:
    """The rules, each of which can be broken alone; the comment names the rule.

    Attributes:
        run_before_epoch: CS1: slot 0 exists before rank 0 observes its epoch.
        acknowledged: CS2: a rank reports a key only after its put was acknowledged.
        own_attempt: CS2: rank 0 takes reports of its own attempt only.
        standing: CS2: content that is put gets a key of an epoch that stands, not of a later one.
        hears_marks: CS3: E counts the marks before the slot.
        every_name: CS3: the keys of all ranks are checked.
        from_the_first: CS3: against C(1) to C(E), not only sweeps after those of the ranks.
        own_epoch: CS3: E never comes from a rank.
        own_replay: CS3: only what rank 0's replay uses needs no check.
        exact_slot: CS3: after a lost race everything is checked again.
        refused_chooses_again: CS4: after a refusal the ranks choose again.
        searches: CS5: rank 0 looks for the write before it puts again.
        unknown: CS5: a rank that waits in vain does not say that the save has failed.
        nobody_deletes: CS6.
        checked_again: CS7: the keys of an earlier attempt are checked again.
    """

    run_before_epoch: bool = True
    acknowledged: bool = True
    own_attempt: bool = True
    standing: bool = True
    hears_marks: bool = True
    every_name: bool = True
    from_the_first: bool = True
    own_epoch: bool = True
    own_replay: bool = True
    exact_slot: bool = True
    refused_chooses_again: bool = True
    searches: bool = True
    unknown: bool = True
    nobody_deletes: bool = True
    checked_again: bool = True


KEPT = Rules()


class Key(NamedTuple):
    """The name of an object: the rank whose content it is, the content, and the generation."""

    rank: int
    content: int
    generation: int


@dataclass(frozen=True)
class Setting:
    """Who there is beside the two ranks.

    Attributes:
        sweeps: How many collections there may be.
        found: Keys that are on the store before; nothing needs them.
        kept: Keys that the run uses in slot 1.
        exists: Whether the run exists before.
        attempts: How often the save may be tried.
        changes: Whether another attempt has another content: training went on.
        others: Commits of others: each adopts an object that nothing needs.
        evictions: How often the checkpoint of slot 1 may be evicted.
        lost: How many answers to a put of a slot may be lost.
    """

    sweeps: int = 1
    found: tuple[Key, ...] = ()
    kept: tuple[Key, ...] = ()
    exists: bool = True
    attempts: int = 2
    changes: bool = False
    others: int = 0
    evictions: int = 0
    lost: int = 0


class Slot(NamedTuple):
    """A slot: `made`, `mark` (of epoch `number`), `save` (attempt `number`), `other`, `evicts`."""

    kind: str
    number: int = 0
    names: frozenset[Key] = frozenset()


class Choice(NamedTuple):
    """What a rank has chosen: the attempt, the key, what it was checked to, whether it is there.

    Attributes:
        covered: Whether the rank believes that the run uses the key.
        reported: Whether rank 0 was told.
    """

    attempt: int
    key: Key
    checked: int
    put: bool = False
    covered: bool = False
    reported: bool = False


class State(NamedTuple):
    """The state of everything.

    Attributes:
        objects: Keys on the store.
        sending: Puts of objects that were sent and have not landed.
        deleting: Keys whose DELETE was sent.
        epochs: What each sweep condemned, and whether the run existed when it listed the runs;
            `None` before that.
        log: The slots.
        flight: A put of a slot that was sent: its number and the slot.
        seen: The epochs that the two ranks have observed; -1 before.
        choices: What the two ranks have chosen.
        attempt: The number of the attempt.
        told: The E of the refusal that began this attempt.
        ends: Who has ended, and how: of rank 0, of rank 1.
        left: How often others may still commit, evict, and answers be lost.
    """

    objects: frozenset[Key]
    sending: frozenset[Key]
    deleting: frozenset[Key]
    epochs: tuple[tuple[frozenset[Key], bool | None], ...]
    log: tuple[Slot, ...]
    flight: tuple[int, Slot] | None
    seen: tuple[int, int]
    choices: tuple[Choice | None, Choice | None]
    attempt: int
    told: int
    ends: tuple[str, str]
    left: tuple[int, int, int]


class CollectiveModel:
    """A setting under some rules: a model for `explorer.explore`."""

    def __init__(self, setting: Setting, rules: Rules = KEPT) -> None:
        self.setting, self.rules = setting, rules

    def initial(self) -> State:
        """Return the first state: nobody has observed or chosen anything."""
        one = self.setting
        log = (Slot("made"),) if one.exists else ()
        if one.kept:
            log += (Slot("other", names=frozenset(one.kept)),)
        none = frozenset[Key]()
        objects = frozenset(one.found + one.kept)
        left = (one.others, one.evictions, one.lost)
        return State(
            objects, none, none, (), log, None, (-1, -1), (None, None), 1, 0, ("", ""), left
        )

    def wrong(self, state: State) -> str | None:
        """Return the promise that is broken."""
        lost = _used(state.log) - state.objects
        if lost:
            return f"The run needs {sorted(lost)[0]}, which is not there."
        saves = [slot for slot in state.log if slot.kind == "save"]
        if len(saves) > 1:
            return "The save is in the log twice."
        if any(len({key.content for key in slot.names}) > 1 for slot in saves):
            return "A checkpoint has parts of two states."
        if saves and state.ends[1] == "failed":
            return "A rank said that the save failed, and it is visible."
        return None

    # Steps

    def successors(self, state: State) -> Iterator[tuple[Step, State]]:
        """Yield every step that somebody may take next."""
        yield from self._store(state)
        yield from self._collector(state)
        yield from self._others(state)
        for rank in (0, 1):
            yield from self._rank(state, rank)
        yield from self._leader(state)
        yield from self._follower(state)

    def _store(self, state: State) -> Iterator[tuple[Step, State]]:
        for key in state.sending:
            landed = state._replace(objects=state.objects | {key}, sending=state.sending - {key})
            yield ("the store", "takes", key), landed
        for key in state.deleting & state.objects:
            yield ("the store", "deletes", key), state._replace(objects=state.objects - {key})
        if state.flight is not None and state.flight[0] == len(state.log):
            landed = state._replace(log=(*state.log, state.flight[1]), flight=None)
            yield ("the store", "takes slot", state.flight[0]), landed

    def _collector(self, state: State) -> Iterator[tuple[Step, State]]:
        who = "the collector"
        if len(state.epochs) < self.setting.sweeps:
            condemned = state.objects - _used(state.log)
            after = state._replace(epochs=(*state.epochs, (condemned, None)))
            yield (who, "condemns", tuple(sorted(condemned))), after
        for number, (condemned, exists) in enumerate(state.epochs, start=1):
            if exists is None:
                here = (condemned, bool(state.log))
                epochs = (*state.epochs[: number - 1], here, *state.epochs[number:])
                yield (who, "lists the runs", number), state._replace(epochs=epochs)
                continue
            marks = [n for n, slot in enumerate(state.log) if slot == Slot("mark", number)]
            if exists and not marks:
                after = state._replace(log=(*state.log, Slot("mark", number)))
                yield (who, "marks", number), after
                continue
            used = _used(state.log[: marks[0] + 1]) if marks else frozenset()
            doomed = condemned - used - state.deleting
            if doomed:
                after = state._replace(deleting=state.deleting | doomed)
                yield (who, "sends DELETE for", tuple(sorted(doomed))), after

    def _others(self, state: State) -> Iterator[tuple[Step, State]]:
        commits, evictions, lost = state.left
        if commits and state.log:
            # It has checked what it names as every writer does, at this slot.
            known = frozenset[Key]().union(*(one for one, _ in state.epochs))
            for key in [None, *sorted(state.objects - known)]:
                names = frozenset() if key is None else frozenset({key})
                after = state._replace(
                    log=(*state.log, Slot("other", names=names)),
                    left=(commits - 1, evictions, lost),
                )
                yield ("another writer", "commits", key), after
        if evictions and len(state.log) > 1:
            after = state._replace(
                log=(*state.log, Slot("evicts")), left=(commits, evictions - 1, lost)
            )
            yield ("the evictor", "evicts slot", 1), after

    def _rank(self, state: State, rank: int) -> Iterator[tuple[Step, State]]:
        """A rank observes, chooses, and reports."""
        who, rules = f"rank {rank}", self.rules
        if state.ends[rank]:
            return
        highest = len(state.epochs)
        may = bool(state.log) or rank == 1 or not rules.run_before_epoch
        seen = state.seen[rank]
        # Again only to obey: under the E of a refusal, or later.
        if may and (seen < 0 or seen < state.told):
            after = state._replace(seen=_with(state.seen, rank, highest))
            yield (who, "observes epoch", highest), after
            return
        choice = state.choices[rank]
        if seen >= 0 and choice is None and state.log:
            yield from self._choose(state, rank)
        if choice is None or choice.reported:
            return
        if choice.put or choice.key in state.objects or not rules.acknowledged:
            told = choice._replace(put=True, reported=True)
            yield (who, "reports", choice.key), _chosen(state, rank, told)

    def _choose(self, state: State, rank: int) -> Iterator[tuple[Step, State]]:
        rules, seen = self.rules, state.seen[rank]
        who, content = f"rank {rank}", state.attempt if self.setting.changes else 0
        condemned = frozenset[Key]().union(*(one for one, _ in state.epochs[:seen]))
        for key in sorted(state.objects):
            if key[:2] != (rank, content):
                continue
            # What the run used when the rank has read it, perhaps long ago.
            covered = any(key in slot.names for slot in state.log)
            if key not in condemned or covered:
                choice = Choice(state.attempt, key, seen, put=True, covered=covered)
                yield (who, "finds", key), _chosen(state, rank, choice)
        key = Key(rank, content, seen if rules.standing else seen + 1)
        sent = state._replace(sending=state.sending | {key})
        yield (who, "sends", key), _chosen(sent, rank, Choice(state.attempt, key, seen))

    def _leader(self, state: State) -> Iterator[tuple[Step, State]]:
        if not state.log:
            yield ("rank 0", "creates the run"), state._replace(log=(Slot("made"),))
        mine, theirs = state.choices
        if state.ends[0] or mine is None or theirs is None or state.flight is not None:
            return
        if not (mine.reported and theirs.reported and state.log):
            return
        if self.rules.own_attempt and theirs.attempt != state.attempt:
            return
        if any(slot.kind == "save" for slot in state.log) and self.rules.searches:
            yield ("rank 0", "finds its write"), _ended(state, 0, "saved")
            return
        if self._refused(state, mine, theirs):
            yield from self._again(state)
            return
        slot = Slot("save", state.attempt, frozenset({mine.key, theirs.key}))
        at = len(state.log)
        yield ("rank 0", "puts slot", at), state._replace(flight=(at, slot))

    def _refused(self, state: State, mine: Choice, theirs: Choice) -> bool:
        rules = self.rules
        if not rules.checked_again and state.attempt > 1:
            return False
        marks = [slot.number for slot in state.log if slot.kind == "mark"]
        own = state.seen[0] if rules.own_epoch else state.seen[1]
        highest = max([own, *(marks if rules.hears_marks else [])])
        first = 0
        if not rules.from_the_first:
            first = max(mine.checked, theirs.checked)
        checked = [mine, theirs] if rules.every_name else [mine]
        used = _used(state.log)
        for choice in checked:
            if choice.key in used or (choice.covered and not rules.own_replay):
                continue
            # A sweep condemns only keys of older generations.
            after = max(first, choice.key.generation)
            if any(choice.key in one for one, _ in state.epochs[after:highest]):
                return True
        return False

    def _again(self, state: State) -> Iterator[tuple[Step, State]]:
        if not self.rules.refused_chooses_again:
            mine, theirs = state.choices
            assert mine is not None
            assert theirs is not None
            slot = Slot("save", state.attempt, frozenset({mine.key, theirs.key}))
            yield ("rank 0", "puts in spite of it"), state._replace(flight=(len(state.log), slot))
            return
        yield from self._next_attempt(state, "refuses")

    def _next_attempt(self, state: State, why: str) -> Iterator[tuple[Step, State]]:
        if state.attempt == self.setting.attempts:
            yield ("rank 0", "gives up"), _ended(state, 0, "failed")
            return
        marks = [slot.number for slot in state.log if slot.kind == "mark"]
        told = max([state.seen[0], *marks])
        theirs = state.choices[1]
        deleting = state.deleting
        if not self.rules.nobody_deletes and theirs is not None:
            deleting |= {theirs.key}
        # A report of this attempt may still be under way.
        kept = theirs if not self.rules.own_attempt else None
        after = state._replace(
            attempt=state.attempt + 1, told=told, choices=(None, kept), deleting=deleting
        )
        yield ("rank 0", why), after

    def _follower(self, state: State) -> Iterator[tuple[Step, State]]:
        """A put of a slot is answered, or not; rank 1 waits for the outcome, or not."""
        if state.flight is not None:
            number, slot = state.flight
            if number < len(state.log):
                if self.rules.exact_slot:
                    yield ("rank 0", "loses the race"), state._replace(flight=None)
                else:
                    again = (len(state.log), slot)
                    yield ("rank 0", "puts it one later"), state._replace(flight=again)
            if state.left[2] and not self.rules.searches:
                # It takes silence for a failure, and puts the slot again elsewhere.
                landed = state._replace(log=(*state.log[:number], slot), flight=None)
                left = (*state.left[:2], state.left[2] - 1)
                if number == len(state.log):
                    yield ("the store", "takes it silently"), landed._replace(left=left)
        waits = state.choices[1] is not None and state.choices[1].reported
        if waits and not state.ends[1]:
            is_there = any(slot.kind == "save" for slot in state.log)
            if is_there:
                yield ("rank 1", "finds the write"), _ended(state, 1, "saved")
            else:
                end = "unknown" if self.rules.unknown else "failed"
                yield ("rank 1", "waits in vain"), _ended(state, 1, end)


def _used(log: tuple[Slot, ...]) -> frozenset[Key]:
    """Return the keys that the run uses after some slots."""
    is_evicted = any(slot.kind == "evicts" for slot in log)
    used = frozenset[Key]()
    for number, slot in enumerate(log):
        if not (number == 1 and is_evicted):
            used |= slot.names
    return used


def _chosen(state: State, rank: int, choice: Choice) -> State:
    mine, theirs = state.choices
    return state._replace(choices=(choice, theirs) if rank == 0 else (mine, choice))


def _with(pair: tuple[int, int], at: int, value: int) -> tuple[int, int]:
    return (value, pair[1]) if at == 0 else (pair[0], value)


def _ended(state: State, rank: int, how: str) -> State:
    ends = (how, state.ends[1]) if rank == 0 else (state.ends[0], how)
    return state._replace(ends=ends)
