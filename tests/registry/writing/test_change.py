"""The loop that carries every change of a run through: each of its rules, with changes made here.

`W1` to `W5` are the rules of docs/spec.md, "Collecting garbage".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest

from holdfast.backends import Backend
from holdfast.backends.wrappers import Wrapper
from holdfast.registry.errors import Conflict, MissingObject, RolledBack
from holdfast.registry.face.registry import Registry
from holdfast.registry.history import slots
from holdfast.registry.history.actions import Line, Mark, Place, SetPin, SetStatus, TakeOver
from holdfast.registry.history.authorship import commit_line
from holdfast.registry.history.epochs import encode_sweep
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.replay import NeedsHistory, RunManifest
from holdfast.registry.objects.keys import ObjectKey, epoch_key, slot_key
from holdfast.registry.store.store import Store
from holdfast.registry.values.digest import Digest
from holdfast.registry.writing.change import Change, Composed, NewCommit, NewCommits, Stale
from holdfast.registry.writing.committer import Committer
from holdfast.registry.writing.object_writer import ChosenKeys
from holdfast.registry.writing.placing import Written
from holdfast.registry.writing.state_writer import StateWriter
from tests.support.faults import Hooked, Once
from tests.support.states import save_small, small_state
from tests.support.stores import Open, contents, objects

RUN = "run"
SLOTS = f"runs/{RUN}/log/"
RUNNING = SetStatus(status="running")


class Noting(Wrapper):
    """A store that notes what is put and what is made durable, in order."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.noted: list[tuple[str, str]] = []

    def put_if_absent(self, key, body):
        self.noted.append(("put", key))
        return super().put_if_absent(key, body)

    def make_durable(self, keys) -> None:
        self.noted += [("sync", key) for key in keys]
        super().make_durable(keys)


class Pinned(NewCommit):
    """A change that writes a state and pins it, and notes what it is asked."""

    def __init__(self, writer: StateWriter, state: object) -> None:
        self.writer = writer
        self.state = state
        self.asked: list[str] = []
        self.seen: list[int] = []
        self.state_written: Written

    def check(self, run: RunManifest) -> None:
        self.asked.append("check")
        super().check(run)

    def write_states(self) -> Sequence[Written]:
        self.asked.append("write")
        self.state_written = self.writer.write_plain(self.state)
        return [self.state_written]

    def actions(self, run: RunManifest) -> Sequence[SetPin] | None:
        self.asked.append("lines")
        self.seen.append(run.next_slot)
        manifest = self.state_written.state.manifest.digest
        return [SetPin(kind="artifact", name=f"at{run.commits}", manifest=manifest)]


class Naming(Change):
    """A change that names keys of objects that are there already."""

    def __init__(self, chosen: ChosenKeys) -> None:
        self.chosen = chosen
        self.times = 0

    def check(self, run: RunManifest) -> None:
        pass

    def write(self) -> ChosenKeys:
        self.times += 1
        return self.chosen

    def lines(self, run: RunManifest) -> list[Line]:
        return [commit_line(run, [RUNNING])]


def keys_of(place: Place, store: Store) -> frozenset[ObjectKey]:
    packs = store.placement(place.placement_key).packs
    return frozenset({place.manifest_key, place.placement_key, *(pack.key for pack in packs)})


def swept(backend: Backend, store: Store, epoch: int, keys: object) -> None:
    """Publish a sweep, and mark the run with it (G1, G3)."""
    parsed = [ObjectKey.parse(str(key)) for key in keys]
    assert backend.put_if_absent(epoch_key(epoch), encode_sweep(epoch, parsed))
    said(store, lambda run: [Mark(epoch=epoch)])


def said(store: Store, lines: Callable[[RunManifest], Sequence[Line]]) -> RunManifest:
    """Put a slot by another handle."""
    log = RunLog(store, RUN)
    log.open()
    return log.append(lines)


def taken(store: Store) -> None:
    said(store, lambda run: [commit_line(run, [TakeOver(token="w", host="h")])])


@pytest.fixture
def other(run: object, backend: Backend, open_registry: Open) -> Store:
    """The store of another handle; the run is there."""
    return open_registry(backend).handle.store


def committer_on(backend: Backend, open_registry: Open) -> Committer:
    registry: Registry = open_registry(backend)
    log = RunLog(registry.handle.store, RUN)
    log.open()
    return Committer(StateWriter(registry.handle.store, log))


@pytest.fixture
def hooked(other: Store, backend: Backend) -> Hooked:
    return Hooked(backend)


@pytest.fixture
def committer(hooked: Hooked, open_registry: Open) -> Committer:
    return committer_on(hooked, open_registry)


# The questions that a change is asked


def test_objects_are_written_before_the_one_slot_that_names_them(other, backend, open_registry):
    noting = Noting(backend)
    committer = committer_on(noting, open_registry)
    change = Pinned(committer.writer, small_state())
    run = committer.commit(change)
    puts = [key for method, key in noting.noted if method == "put"]
    assert puts[-1] == slot_key(RUN, 1)
    assert set(puts[:-1]) == objects(backend) == set(map(str, change.state_written.chosen.keys))
    assert run.is_placed(change.state_written.state.place)
    assert change.asked == ["check", "write", "check", "lines"]


def test_after_a_lost_race_it_answers_for_the_run_of_the_winner(committer, hooked, other):
    hooked.before = Once(SLOTS, lambda: taken(other), "put_if_absent")
    change = Pinned(committer.writer, small_state())
    run = committer.commit(change)
    assert change.asked == ["check", "write", "check", "lines", "check", "lines"]
    assert change.seen == [1, 2]
    assert (run.next_slot, run.commits, run.writer.token) == (3, 3, "w")


def test_nothing_is_put_if_there_is_nothing_to_say(committer, backend):
    before = contents(backend)
    assert committer.commit(lambda run: None) is committer.log.run
    assert contents(backend) == before


def test_several_commits_are_put_in_one_slot(committer):
    class Two(NewCommits):
        writes = False

        def commits(self, run):
            return [[RUNNING], [], [TakeOver(token="t", host="h")]]

    run = committer.commit(Two())
    assert (run.next_slot, run.commits, run.writer.token) == (2, 3, "t")


def test_a_place_that_the_run_gives_already_is_not_put_again(committer, backend):
    change = Pinned(committer.writer, small_state())
    committer.commit(change)
    placed = committer.log.run.places
    committer.commit(Pinned(committer.writer, small_state()))
    assert committer.log.run.places == placed
    (slot,) = committer.log.slots(2)
    assert [type(line).__name__ for _, line in slot.lines] == ["Commit"]


# Runs that take no change


def test_nothing_is_written_for_a_run_that_was_dropped(other, backend, reg, open_registry):
    reg.run(RUN).retention.drop("no use")
    committer = committer_on(backend, open_registry)
    before = contents(backend)
    change = Pinned(committer.writer, small_state())
    with pytest.raises(Conflict, match=r"the run was dropped.*no use"):
        committer.commit(change)
    assert change.asked == ["check"]
    assert contents(backend) == before


def test_a_run_that_is_dropped_while_a_change_is_written_takes_no_more(committer, hooked, reg):
    hooked.before = Once("manifests/", lambda: reg.run(RUN).retention.drop("no use"))
    change = Pinned(committer.writer, small_state())
    with pytest.raises(Conflict, match="the run was dropped"):
        committer.commit(change)
    assert change.asked == ["check", "write", "check", "lines", "check"]
    assert committer.log.run.next_slot == 2


def test_a_change_that_only_says_something_is_refused_as_well(committer, reg):
    reg.run(RUN).retention.drop("no use")
    asked: list[int] = []
    with pytest.raises(Conflict, match="the run was dropped"):
        committer.commit(lambda run: asked.append(run.next_slot) or [RUNNING])
    assert asked == [1]  # before the drop was known, and never after it
    answered = Composed(lambda run: None, on_dropped=True)
    assert committer.commit(answered).dropped == "no use"


# Reasons to write again


def test_w3_what_was_condemned_before_the_slot_is_written_again(committer, hooked, other, backend):
    hooked.before = Once(SLOTS, lambda: swept(backend, other, 1, objects(backend)), "put_if_absent")
    change = Pinned(committer.writer, small_state())
    run = committer.commit(change)
    assert change.asked.count("write") == 2
    assert {key.generation for key in change.state_written.chosen.keys} == {1}
    assert keys_of(run.places[-1], committer.store) == change.state_written.chosen.keys


def test_w3_a_mark_moves_the_epoch_though_no_race_is_lost(committer, other, backend):
    first = Pinned(committer.writer, small_state())
    orphans = committer.writer.write_plain(small_state()).chosen.keys  # the epoch is observed
    swept(backend, other, 1, orphans)
    committer.log.refresh()
    run = committer.commit(first)
    assert {key.generation for key in keys_of(run.places[-1], committer.store)} == {1}
    assert first.asked.count("write") == 2


def test_w2a_what_the_run_uses_itself_is_named_without_a_question(committer, other, backend):
    placed = Pinned(committer.writer, small_state())
    committer.commit(placed)
    keys, place = placed.state_written.chosen.keys, placed.state_written.state.place
    swept(backend, other, 1, keys)
    committer.log.refresh()
    change = Naming(ChosenKeys(keys, {key: [place] for key in keys}))
    committer.commit(change)
    assert change.times == 1


def test_w2a_covers_no_key_that_the_run_does_not_use_any_more(committer, other, backend):
    placed = Pinned(committer.writer, small_state())
    committer.commit(placed)
    keys, place = placed.state_written.chosen.keys, placed.state_written.state.place
    swept(backend, other, 1, keys)
    moved = place.changed(manifest_generation=1)
    backend.put(str(moved.manifest_key), backend.get(str(place.manifest_key)))
    said(other, lambda run: [moved])
    committer.log.refresh()
    before = committer.log.run.next_slot
    change = Naming(ChosenKeys(keys, {key: [place] for key in keys}))
    with pytest.raises(Conflict, match="overtook this commit 5 times in a row"):
        committer.commit(change)
    assert (change.times, committer.log.run.next_slot) == (5, before)


def test_what_does_not_fit_any_more_is_written_again(committer, hooked, other):
    class Fitting(Pinned):
        def actions(self, run):
            if run.writer is not None and self.asked.count("write") == 1:
                raise Stale
            return super().actions(run)

    hooked.before = Once(SLOTS, lambda: taken(other), "put_if_absent")
    change = Fitting(committer.writer, small_state())
    committer.commit(change)
    assert change.asked.count("write") == 2
    assert change.seen == [1, 2]


def test_a_change_that_never_fits_is_given_up_after_a_minute(committer, backend, monkeypatch):
    clock = SimpleNamespace(monotonic=itertools.count().__next__, sleep=lambda _: None)
    monkeypatch.setattr(slots, "time", clock)
    asked = []

    def never(run):
        asked.append(run)
        raise Stale

    class Sync(Composed):
        noun = "sync"

    before = contents(backend)
    with pytest.raises(Conflict, match=r"this sync 5 times in a row.*Nothing was committed"):
        committer.commit(Sync(never))
    assert len(asked) > 20  # each attempt takes some three seconds by this clock
    assert contents(backend) == before


class Missing(Naming):
    """A change that misses an object at first."""

    def __init__(self, missed: Callable[[], object], *, is_read_again: bool = False) -> None:
        super().__init__(ChosenKeys())
        self.missed = missed
        self.is_read_again = is_read_again

    def write(self) -> ChosenKeys:
        super().write()
        if self.times == 1:
            self.missed()
            raise MissingObject("gone", where="packs/x")
        return self.chosen

    def read_again(self) -> bool:
        return self.is_read_again


def test_an_object_that_is_missing_for_good_is_told(committer):
    change = Missing(lambda: None)
    with pytest.raises(MissingObject, match="gone"):
        committer.commit(change)
    assert change.times == 1


def test_after_a_missing_object_it_is_written_again_if_the_run_has_moved(committer, other):
    change = Missing(lambda: taken(other))
    assert committer.commit(change).next_slot == 3
    assert change.times == 2


def test_after_a_missing_object_it_is_written_again_if_its_source_has_moved(committer):
    change = Missing(lambda: None, is_read_again=True)
    committer.commit(change)
    assert change.times == 2


def test_a_run_that_has_moved_says_better_why_an_object_is_missing(committer, other):
    class Overtaken(Missing):
        def write(self):
            self.times = 0  # it is missing for good
            return super().write()

        def lines(self, run):
            raise Conflict(f"taken by {run.writer.token}")

    with pytest.raises(Conflict, match="taken by w"):
        committer.commit(Overtaken(lambda: taken(other)))


def test_records_of_evicted_checkpoints_are_read_when_they_are_needed(committer, run, reg):
    from holdfast import Retention

    save_small(run, 1, 2)
    run.retention.prune(Retention(last=1))
    committer.log.refresh()
    evicted = reg.run(RUN).retention.evicted()[0].handle.n

    class Knowing(Pinned):
        def write_states(self):
            self.writer.log.run.record(evicted)
            return super().write_states()

    with pytest.raises(NeedsHistory):
        committer.log.run.record(evicted)
    change = Knowing(committer.writer, small_state(3))
    committer.commit(change)
    assert change.asked.count("write") == 1
    with pytest.raises(NeedsHistory):
        committer.log.run.record(evicted)  # compact again
    committer.commit(lambda run: run.record(evicted) and [RUNNING])


# The slot itself


def test_w4_nothing_is_put_after_a_slot_that_is_not_the_one_that_was_read(committer, backend):
    committer.commit(lambda run: [RUNNING])
    backend.delete(slot_key(RUN, 1))
    before = contents(backend)
    with pytest.raises(RolledBack):
        committer.commit(lambda run: [RUNNING])
    with pytest.raises(RolledBack):  # nor is a caller told that there is nothing to say
        committer.commit(lambda run: None)
    assert contents(backend) == before


def test_w4_a_look_that_was_overtaken_while_it_was_written_does_not_count(
    committer, backend, other
):
    class Late(Naming):
        def write(self):
            taken(other)
            committer.log.refresh()
            backend.delete(slot_key(RUN, 1))
            return super().write()

    with pytest.raises(RolledBack):
        committer.commit(Late(ChosenKeys()))


def test_w5_what_others_put_is_durable_before_the_slot(other, backend, open_registry):
    writing = committer_on(backend, open_registry)
    theirs = writing.writer.write_plain(small_state()).chosen.keys  # put, and named by nobody yet
    swept(backend, other, 1, [ObjectKey("packs", Digest.of(b"gone"), 0)])
    noting = Noting(backend)
    committer = committer_on(noting, open_registry)
    committer.commit(Naming(ChosenKeys(theirs)))
    slot = noting.noted.index(("put", slot_key(RUN, 2)))
    synced = {key for method, key in noting.noted[:slot] if method == "sync"}
    assert synced == {*map(str, theirs), epoch_key(1), slot_key(RUN, 1)}


def test_w5_the_epoch_that_objects_are_put_under_is_durable(other, backend, open_registry):
    assert backend.put_if_absent(epoch_key(1), encode_sweep(1, []))
    noting = Noting(backend)
    committer = committer_on(noting, open_registry)
    committer.commit(Pinned(committer.writer, small_state()))
    synced = noting.noted.index(("sync", epoch_key(1)))
    assert synced < min(noting.noted.index(("put", key)) for key in objects(backend))


def test_w5_slots_that_were_read_are_durable_before_it_is_said_that_all_is_said(
    other, backend, open_registry
):
    noting = Noting(backend)
    committer = committer_on(noting, open_registry)
    committer.commit(lambda run: None)
    assert noting.noted == [("sync", slot_key(RUN, 0))]


def test_w1_no_epoch_is_observed_for_what_writes_nothing(committer, backend):
    backend.put(epoch_key(1), b"damaged")
    assert committer.commit(lambda run: [RUNNING]).commits == 2
