"""Rules J1 to J9 of docs/spec.md on the real code: kept they hold, and each one broken shows.

`tests/model/journal.py` breaks them in every order of events; here each is broken in one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast.registry.errors import Conflict, Fenced, RegistryError, Stranded
from holdfast.registry.history.actions import TakeOver
from holdfast.registry.objects.framing import join_lines, split_lines
from holdfast.registry.saving.journal.carrier import Carrier
from holdfast.registry.saving.journal.entry_saves import CarriedSave, EntryToken, LogScan
from holdfast.registry.saving.journal.file_lock import FileLock
from holdfast.registry.saving.journal.folder import RunFolder
from holdfast.registry.saving.journal.line import JournaledLine
from holdfast.registry.saving.journal.records import Note
from holdfast.registry.saving.journal.states import EntryStates
from holdfast.registry.spec import Retention
from holdfast.registry.writing.object_writer import ObjectWriter
from tests.registry.saving.journal.machines import RUN, Machine, actions_of, added
from tests.support.faults import Died, Hooked, Once
from tests.support.sameness import assert_same
from tests.support.states import make_state
from tests.support.stores import new_backend, opened


def die() -> None:
    raise Died


@dataclass
class World:
    """A registry, and machines around it."""

    bucket: Hooked
    here: Machine
    there: Machine
    patch: pytest.MonkeyPatch

    def carry_and_die(self, prefix: str, *, after: bool) -> None:
        """Let a carrier die at its first put of a key."""
        hook = Once(prefix, die, "put_if_absent")
        setattr(self.bucket, "after" if after else "before", hook)
        with pytest.raises(Died):
            self.here.carry()
        self.bucket.before = self.bucket.after = lambda method, key: None

    def between(self, act: Callable[[], object]) -> None:
        """Act once, right before the next slot is put."""
        self.bucket.before = Once(f"runs/{RUN}/log/", act, "put_if_absent")


LOG = f"runs/{RUN}/log/"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_hand: None) -> World:
    bucket = Hooked(new_backend())
    machines = [Machine(bucket, tmp_path / name) for name in ("here", "there")]
    return World(bucket, *machines, monkeypatch)


# J1: the takeover is in the registry before the first acknowledgement


def takeover_first(world: World) -> None:
    direct = world.there.run()
    direct.save(make_state(1), step=1)
    world.there.carry()
    ours = world.here.run()
    ours.restore()
    ours.save(make_state(2), step=2)
    direct.save(make_state(22), step=2)
    world.there.carry()
    world.here.carry()
    assert world.there.outcomes() == {2: "stranded"}
    assert world.here.outcomes() == {1: "carried"}


def acknowledge_without_takeover(world: World) -> None:
    def take_over(self: Any) -> None:
        token, log = self.ownership.token, self._log
        token.prefix = self.folder.id()
        token.reset()
        self.takeover = self.folder.put_takeover(token.token, log.run.next_slot - 1)

    world.patch.setattr(JournaledLine, "take_over", take_over)


# J2: what follows an entry's own takeover decides


def own_takeover_decides(world: World) -> None:
    first = world.here.run()
    for step in (1, 2):
        first.save(make_state(step), step=step)
    world.carry_and_die(LOG, after=True)  # step 1 is in the log
    again = world.here.run()
    again.restore()
    again.save(make_state(3), step=3)  # one's own restart strands nothing
    world.here.carry()
    again.save(make_state(4), step=4)
    other = world.there.run()
    other.restore()
    other.save(make_state(44), step=4)
    world.there.carry()
    last = world.here.run()
    last.restore()
    last.save(make_state(5), step=5)  # the newest token is ours again
    world.here.carry()
    world.there.carry()
    steps = [step for step, _ in added(world.bucket)]
    assert steps == [1, 2, 3, 4, 5]
    assert added(world.bucket)[3][1] == other.checkpoints()[3].digest.hex()
    assert world.here.outcomes()[4] == "stranded"
    with pytest.raises(Fenced):
        again.save(make_state(6), step=6)


def judge_by_the_newest_token(world: World) -> None:
    def require_own(self: Any, takeover: Any) -> None:
        writer = self._log.run.writer
        if not writer.token.startswith(self._ids[0]):
            raise Stranded("by the newest token")

    world.patch.setattr(LogScan, "require_own", require_own)


def strand_after_own_restart(world: World) -> None:
    def foreign(self: Any, takeover: Any) -> list[Any]:
        return [one for one in self._taken if one[0] > takeover.slot]

    world.patch.setattr(LogScan, "foreign", foreign)


def judged_before_the_slot(world: World) -> None:
    ours, other = world.here.run(), world.there.run()
    ours.save(make_state(1), step=1)

    def take_over() -> None:
        other.save(make_state(11), step=1)

    world.between(take_over)
    world.here.carry()
    world.there.carry()
    assert world.here.outcomes() == {1: "stranded"}
    assert len(added(world.bucket)) == 1
    with pytest.raises(Stranded, match="another machine took this run over"):
        ours.save(make_state(2), step=2)
    with pytest.raises(Stranded):
        ours.wait(remote=True)
    assert_same(world.here.run().restore().state, make_state(11))


def judge_once(world: World) -> None:
    kept, judged = LogScan.require_own, set()

    def require_own(self: Any, takeover: Any) -> None:
        if id(self) not in judged:
            judged.add(id(self))
            kept(self, takeover)

    world.patch.setattr(LogScan, "require_own", require_own)


# J3: carrying never takes over


def never_takes_over(world: World) -> None:
    judged_before_the_slot(world)
    takeovers = [one.token for one in actions_of(world.bucket, "run.take_over")]
    assert not takeovers[-1].startswith(world.here.folder.id())


def take_over_again(world: World) -> None:
    def claim(self: Any, run: Any) -> list[Any]:
        return [TakeOver(token=f"{world.here.folder.id()}{secrets.token_hex(4)}", host="here")]

    world.patch.setattr(LogScan, "require_own", lambda self, takeover: None)
    world.patch.setattr(EntryToken, "claim", claim)


# J4: an entry holds its bytes until its slot was read back


def holds_its_bytes(world: World) -> None:
    run = world.here.run()
    states = {1: make_state(1), 2: {**make_state(2), "model": make_state(1)["model"]}}
    states[3] = states[2]  # a state that did not change
    for step, state in states.items():
        run.save(state, step=step)
        if step == 1:
            world.here.carry()
    with opened(world.bucket) as registry:  # what the registry has is of no use to an entry
        registry.run(RUN).retention.drop("a mistake")
        registry.gc(grace_s=0)
    world.here.folder.remove_states(world.here.folder.entry(1).write)
    for number in (2, 3):
        check_whole(world, number)
    world.here.carry()
    assert world.here.outcomes() == {2: "refused", 3: "refused"}
    assert len(list((Path(world.here.folder.path) / "states").iterdir())) == 2


def lean_on_the_entry_before(world: World) -> None:
    kept = EntryStates.link

    def link(self: Any, other: Any, bases: Any) -> bool:
        kept(self, other, bases)
        for info in list(self.store.backend.list("packs/")):
            self.store.backend.delete(info.key)
        return True

    world.patch.setattr(EntryStates, "link", link)


def survives_a_lost_slot(world: World) -> None:
    run = world.here.run()
    run.save(make_state(1), step=1)
    world.carry_and_die(LOG, after=False)
    with opened(world.bucket) as registry:
        assert registry.gc(grace_s=0).deleted.objects > 0
    world.here.carry()
    with opened(world.bucket) as registry:
        assert world.here.outcomes() == {1: "carried"}
        (saved,) = registry.run(RUN).checkpoints()
        assert_same(saved.load(), make_state(1))


def delete_before_the_slot(world: World) -> None:
    kept = CarriedSave.write_states

    def write_states(self: Any) -> Any:
        written = kept(self)
        self._states.remove()
        return written

    world.patch.setattr(CarriedSave, "write_states", write_states)


def survives_a_collection(world: World) -> None:
    """What was copied for a slot is condemned and deleted before the slot is put."""
    run = world.here.run()
    run.save(make_state(1), step=1)

    def collect() -> None:
        with opened(world.bucket) as registry:
            assert registry.gc(grace_s=0).deleted.objects > 0

    world.between(collect)
    world.here.carry()
    with opened(world.bucket) as registry:
        assert registry.verify(deep=True).findings == ()
        (saved,) = registry.run(RUN).checkpoints()
        assert_same(saved.load(), make_state(1))


def check_no_key(world: World) -> None:
    world.patch.setattr(ObjectWriter, "_recheck", lambda self, run, chosen: None)


# J5: in order


def in_order(world: World) -> None:
    run = world.here.run()
    for step in (1, 2, 3):
        run.save(make_state(step), step=step)
    told = []
    world.here.carrier(lambda number, note: told.append((number, note.outcome))).carry()
    assert [step for step, _ in added(world.bucket)] == [1, 2, 3]
    assert told == [(number, "carried") for number in (1, 2, 3)]


def newest_first(world: World) -> None:
    kept = RunFolder.waiting
    world.patch.setattr(RunFolder, "waiting", lambda self: kept(self)[::-1])


# J6: the log is searched for the write


def added_once(world: World) -> None:
    run = world.here.run(retention=Retention(last=1))
    run.save(make_state(1), step=1)
    world.carry_and_die(LOG, after=True)
    world.here.carry()
    for step in (2, 3):
        run.save(make_state(step), step=step)
    world.carry_and_die(LOG, after=True)
    with opened(world.bucket) as registry:  # step 2 is evicted before anybody has noted it
        registry.run(RUN).exchange.push(make_state(22), step=22)
        assert [one.step for one in registry.run(RUN).retention.evicted()] == [1, 2]
    world.here.carry()
    assert [step for step, _ in added(world.bucket)] == [1, 2, 22, 3]


def search_nothing(world: World) -> None:
    world.patch.setattr(LogScan, "commit_of", lambda self, write: None)


def search_the_kept(world: World) -> None:
    kept = LogScan.commit_of

    def commit_of(self: Any, write: str) -> int | None:
        n = kept(self, write)
        return n if n in self._log.run.by_n else None

    world.patch.setattr(LogScan, "commit_of", commit_of)


def put_of_a_dead_carrier(world: World) -> Callable[[], object]:
    """Let a carrier die while its slot is on the way; return what lets the slot arrive."""
    dying, held = world.here.carrier(), []
    put = dying._store.backend.put_if_absent

    def hold(key: str, body: Any) -> bool:
        if key.startswith(LOG):
            held.append((key, body))
            die()
        return put(key, body)

    with world.patch.context() as patch:
        patch.setattr(dying._store.backend, "put_if_absent", hold)
        with pytest.raises(Died):
            dying.carry()
    ((key, body),) = held
    # The bytes of another carrier's slot: the same lines in another order.
    lines = split_lines(bytes(body), where=key)[::-1]
    return lambda: put(key, join_lines(lines))


def recognised_by_write(world: World) -> None:
    """A dead carrier's slot lands between the reading and the put of the next carrier."""
    run = world.here.run(retention=Retention(last=1))
    run.save(make_state(1), step=1)
    arrive = put_of_a_dead_carrier(world)

    def arrive_and_evict() -> None:
        arrive()
        with opened(world.bucket) as registry:
            registry.run(RUN).exchange.push(make_state(22), step=22)

    world.between(arrive_and_evict)
    world.here.carry()
    assert [step for step, _ in added(world.bucket)] == [1, 22]
    assert world.here.outcomes() == {1: "carried"}


def search_once(world: World) -> None:
    kept, asked = LogScan.read_to, set()

    def read_to(self: Any, run: Any) -> None:
        if id(self) not in asked:
            asked.add(id(self))
            kept(self, run)

    world.patch.setattr(LogScan, "read_to", read_to)


# J7: composed when it is carried


def composed_late(world: World) -> None:
    run = world.here.run(retention=Retention(last=1))
    for step in (1, 2):
        run.save(make_state(step), step=step)
    world.carry_and_die(LOG, after=True)

    def evict() -> None:
        with opened(world.bucket) as registry:
            registry.run(RUN).exchange.push(make_state(11), step=11)

    world.between(evict)
    world.here.carry()
    with opened(world.bucket) as registry:
        assert registry.verify(deep=True).findings == ()
        assert [one.step for one in registry.run(RUN).retention.evicted()] == [1, 11]


def compose_once(world: World) -> None:
    kept = CarriedSave.commits

    def commits(self: Any, run: Any) -> Any:
        if not hasattr(self, "composed"):
            self.composed = kept(self, run)
        return self.composed

    world.patch.setattr(CarriedSave, "commits", commits)


# J8: a refusal follows from the entry and the log, and is noted before it is told


def refused_by_the_log(world: World) -> None:
    run = world.here.run()
    run.save(make_state(1), step=1)
    with opened(world.bucket) as registry:
        registry.run(RUN).exchange.push(make_state(11), step=1)
    told: list[tuple[int, bool]] = []

    def tell(number: int, note: Note) -> None:
        told.append((number, world.here.folder.note(number) == note))

    assert world.here.carrier(tell).carry()
    assert told == [(1, True)]
    assert world.here.outcomes() == {1: "refused"}
    with pytest.raises(Conflict, match="is refused"):
        run.save(make_state(2), step=2)
    with pytest.raises(Conflict, match="continues from a save that never enters the run"):
        run.save(make_state(2), step=2)
    run.restore()
    run.save(make_state(2), step=2)
    world.here.carry()
    assert [step for step, _ in added(world.bucket)] == [1, 2]
    check_whole(world, 1)


def check_whole(world: World, number: int) -> None:
    """Check that every byte of an entry is in its own folder."""
    entry, store = world.here.folder.entry(number), world.here.registry().handle.store
    assert entry.save is not None
    EntryStates(world.here.folder, entry.write, store).check_whole([entry.save.place])


def tell_before_noting(world: World) -> None:
    kept, asked = RunFolder.put_note, set()

    def put_note(self: Any, number: int, note: Note) -> Note:
        if number in asked:
            return kept(self, number, note)
        asked.add(number)
        return note

    world.patch.setattr(RunFolder, "put_note", put_note)


def damage_needs_an_own_slot(world: World) -> None:
    """A dead carrier's slot may land after its entry is lost."""
    run = world.here.run()
    run.save(make_state(1), step=1)
    arrive = put_of_a_dead_carrier(world)
    for path in Path(world.here.folder.path).glob(f"**/{1:020d}"):
        if "entries" in path.parts or "states" in path.parts:  # the entry and its copy
            path.write_bytes(b"")
    world.here.carry()
    arrive()
    (outcome,) = world.here.outcomes().values()
    assert (outcome == "carried") == bool(added(world.bucket))


def give_up_at_once(world: World) -> None:
    world.patch.setattr(Carrier, "_put_own_slot", lambda self, committer: None)


def refusal_at_the_head(world: World) -> None:
    """The run was completed, and is open again before the refusal is noted."""
    run = world.here.run()
    run.save(make_state(1), step=1)
    status = world.there.registry().run(RUN)
    status.status = "completed"
    kept = CarriedSave.check

    def check(self: Any, seen: Any) -> None:
        try:
            kept(self, seen)
        finally:
            if seen.status == "completed":
                status.status = "running"

    world.patch.setattr(CarriedSave, "check", check)
    world.here.carry()
    assert world.here.outcomes() == {1: "carried"}


def judge_without_the_head(world: World) -> None:
    kept = Carrier._outcome

    def outcome(self: Any, number: int) -> Note:
        log = self._open().log
        log.refresh()
        world.patch.setattr(log, "refresh", lambda: log.run)
        return kept(self, number)

    world.patch.setattr(Carrier, "_outcome", outcome)


def line_ends_where_a_save_is_refused(world: World) -> None:
    """Saves that continue from a refused one, by this handle and after a restart."""
    run = world.here.run()
    for step in (1, 2):
        run.save(make_state(step), step=step)
    again = world.here.run()
    assert again.restore().checkpoint.step == 2
    again.save(make_state(3), step=3)
    again.status = "interrupted"
    with opened(world.bucket) as registry:
        registry.run(RUN).exchange.push(make_state(11), step=1)
    assert world.here.run().restore().checkpoint.step == 1  # the other program's
    world.here.carry()
    assert set(world.here.outcomes().values()) == {"refused"}
    assert len(added(world.bucket)) == 1
    for number in (1, 2, 3):
        check_whole(world, number)


def forget_the_line(world: World) -> None:
    world.patch.setattr(
        "holdfast.registry.saving.journal.carrier.require_line", lambda run, note: None
    )
    world.patch.setattr(
        "holdfast.registry.saving.journal.line.require_line", lambda run, note: None
    )


def line_goes_on_after_damage(world: World) -> None:
    run = world.here.run()
    for step in (1, 2):
        run.save(make_state(step), step=step)
    world.here.folder.remove_states(world.here.folder.entry(1).write)
    world.here.carry()
    run.restore()  # says that step 1 is not there
    run.save(make_state(3), step=3)
    world.here.carry()
    assert world.here.outcomes() == {1: "damaged", 3: "carried"}
    assert [step for step, _ in added(world.bucket)] == [2, 3]


def end_it_after_damage(world: World) -> None:
    kept = RunFolder.note

    def note(self: Any, number: int) -> Note | None:
        found = kept(self, number)
        is_damaged = found is not None and found.outcome == "damaged"
        return Note(outcome="refused") if is_damaged else found

    world.patch.setattr(RunFolder, "note", note)


# J9: one carrier


def one_carrier(world: World) -> None:
    run = world.here.run()
    run.save(make_state(1), step=1)
    seen: list[bool] = []
    world.between(lambda: seen.append(world.here.carry()))
    assert world.here.carry()
    assert seen == [False]
    assert len(added(world.bucket)) == 1


def no_lock(world: World) -> None:
    world.patch.setattr(FileLock, "acquire", lambda self, **how: True)


RULES = {
    "J1 no takeover": (takeover_first, acknowledge_without_takeover),
    "J2 newest token": (own_takeover_decides, judge_by_the_newest_token),
    "J2 own restart": (own_takeover_decides, strand_after_own_restart),
    "J2 judged once": (judged_before_the_slot, judge_once),
    "J3 carry takes over": (never_takes_over, take_over_again),
    "J4 leans on another": (holds_its_bytes, lean_on_the_entry_before),
    "J4 deleted early": (survives_a_lost_slot, delete_before_the_slot),
    "J7 keys not checked": (survives_a_collection, check_no_key),
    "J5 newest first": (in_order, newest_first),
    "J6 no search": (added_once, search_nothing),
    "J6 search of the kept": (added_once, search_the_kept),
    "J6 by bytes": (recognised_by_write, search_once),
    "J7 composed early": (composed_late, compose_once),
    "J8 told first": (refused_by_the_log, tell_before_noting),
    "J8 no own slot": (damage_needs_an_own_slot, give_up_at_once),
    "J8 not at the head": (refusal_at_the_head, judge_without_the_head),
    "J8 line forgotten": (line_ends_where_a_save_is_refused, forget_the_line),
    "J8 line ends early": (line_goes_on_after_damage, end_it_after_damage),
    "J9 no lock": (one_carrier, no_lock),
}


@pytest.mark.parametrize("scenario", dict.fromkeys(one for one, _ in RULES.values()))
def test_a_rule_holds(scenario: Callable[[World], None], world: World) -> None:
    scenario(world)


@pytest.mark.parametrize("name", RULES)
def test_a_broken_rule_shows(name: str, world: World) -> None:
    scenario, mutate = RULES[name]
    mutate(world)
    with pytest.raises((AssertionError, RegistryError, pytest.fail.Exception)):
        scenario(world)
