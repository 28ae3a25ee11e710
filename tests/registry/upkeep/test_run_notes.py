"""Notes of collectors save reading, find logs that were lost, and do no harm if they are bad."""

from __future__ import annotations

import re
from collections import Counter

import pytest

import holdfast
from holdfast import Retention
from holdfast.backends.wrappers import Metered, Wrapper
from holdfast.registry.errors import MissingObject, RolledBack
from holdfast.registry.face.factory import open_on
from holdfast.registry.history.log import RunLog
from holdfast.registry.objects.framing import unwrap_frame, wrap_frame
from holdfast.registry.objects.keys import NOTES, RUNS, note_key, slot_key
from holdfast.registry.store import Address
from holdfast.registry.store.heads.memory import Heads
from holdfast.registry.upkeep import run_notes
from holdfast.registry.upkeep.gc import DAY_S, collect
from holdfast.registry.upkeep.run_notes import Notes
from tests.registry.upkeep.test_gc import Aged
from tests.support.faults import Hooked, Once, flip
from tests.support.states import same, save_small, small_state
from tests.support.stores import contents, needed, objects


@pytest.fixture
def noted(reg):
    """A registry of two runs, collected: `kept` has its newest checkpoints, `other` shares one."""
    save_small(reg.create_run("kept"), *range(1, 21))
    reg.run("kept").retention.prune(Retention(last=3))
    save_small(reg.create_run("other"), 20, 21, 22)
    reg.gc(grace_s=0)
    return reg


def _read_by(backend, grace_s: float = 0.0) -> list[str]:
    """Collect on a machine that remembers nothing; return the slots and placements it read."""
    calls = []
    with open_on(Metered(backend, calls)) as opened:
        collect(opened.handle.store, grace_s=grace_s)
    got = [call.key for call in calls if call.method == "get"]
    return sorted(key for key in got if key.startswith((RUNS, "placements/")))


def test_only_new_slots_and_placements_are_read(noted, backend):
    kept = noted.run("kept").manifest.next_slot
    marked = [slot_key("kept", kept - 2), slot_key("kept", kept - 1)]
    idle = [slot_key("other", 3), slot_key("other", 4)]  # the newest commit, and the mark
    assert _read_by(backend) == [*marked, *idle]
    save_small(noted.run("kept"), 30)
    placement = str(noted.run("kept").latest().handle.reader.place.placement_key)
    assert _read_by(backend) == [placement, *marked, slot_key("kept", kept), *idle]
    noted.run("kept").retention.prune(Retention(last=1))
    noted.gc(grace_s=0)
    assert objects(backend) == needed(noted)


def test_a_note_tells_only_of_slots_that_cannot_be_lost(reg, backend):
    save_small(reg.create_run("run"), 1)
    done = []

    class Noting(Wrapper):
        def make_durable(self, keys):
            done.extend(keys)

        def put_if_absent(self, key, body):
            done.append(key)
            return super().put_if_absent(key, body)

    with open_on(Noting(backend)) as opened:
        collect(opened.handle.store, grace_s=0.0)
    newest = slot_key("run", reg.run("run").manifest.next_slot - 1)
    assert done == [newest, note_key(1)]


def _drop_the_end(backend, reg) -> None:
    for number in range(2, reg.run("kept").manifest.next_slot):
        backend.delete(slot_key("kept", number))
    for info in list(backend.list(f"{RUNS}kept/snapshots/")):
        backend.delete(info.key)


def _delete(backend, _) -> None:
    for info in list(backend.list(f"{RUNS}kept/")):
        backend.delete(info.key)


def _replace(backend, reg) -> None:
    _delete(backend, reg)
    run = open_on(backend).create_run("kept")
    save_small(run, *range(30, 60))


@pytest.mark.parametrize("lose", [_delete, _drop_the_end, _replace])
def test_a_log_that_was_lost_stops_a_machine_that_has_never_seen_it(
    noted, backend, open_registry, lose
):
    lose(backend, noted)
    before = contents(backend)
    fresh = open_registry(backend)
    with pytest.raises(RolledBack, match=r"(?s)kept.*Nothing was deleted.*gc --forget 'kept'"):
        fresh.gc(grace_s=0)
    assert contents(backend) == before
    (found,) = [one for one in fresh.verify().findings if "a collection has read" in one.message]
    assert (found.kind, found.where, found.severity) == ("head", "kept", "error")
    # An operator gives it up: then the note counts no more, and the others are collected.
    assert fresh.gc(grace_s=0, forget=["kept"]).deleted.objects > 0
    save_small(open_registry(backend).run("other"), 23)
    again = open_registry(backend)
    again.gc(grace_s=0)
    assert same(again.checkpoint("other/main/step20").load(), small_state(20))
    assert not [one for one in again.verify().findings if "a collection has read" in one.message]
    _delete(backend, noted)
    open_registry(backend).gc(grace_s=0)


def _rewrite(backend, old: bytes, new: bytes) -> None:
    content = unwrap_frame(backend.get(note_key(1)), where="")
    assert old in content
    backend.put(note_key(1), wrap_frame(content.replace(old, new)))


BAD = {
    "a flipped bit": lambda backend: flip(backend, note_key(1)),
    "gone": lambda backend: backend.delete(note_key(1)),
    "no frame": lambda backend: backend.put(note_key(1), b"x" * 100),
    "an unknown format": lambda b: _rewrite(b, b"holdfast.notes/1", b"holdfast.notes/9"),
    "another replay": lambda b: _rewrite(b, b'"replay":', b'"replay":9'),
    "another registry": lambda b: _rewrite(b, b'"registry":"', b'"registry":"f'),
    "another run's": lambda b: _rewrite(b, b'"run_id":"kept"', b'"run_id":"kepp"'),
    "no run": lambda b: _rewrite(b, b"holdfast.run/1", b"holdfast.run/7"),
    "a foreign name": lambda backend: backend.put(f"{NOTES}junk", b"x"),
}


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_a_bad_note_costs_time_and_no_object(noted, backend, open_registry, spoil):
    spoil(backend)
    assert open_registry(backend).verify().ok
    is_foreign = spoil is BAD["a foreign name"]
    assert (slot_key("kept", 0) in _read_by(backend.copy())) is not is_foreign
    noted.run("kept").retention.prune(Retention(last=1))
    assert open_registry(backend).gc(grace_s=0).deleted.objects > 0
    fresh = open_registry(backend)
    assert objects(backend) == needed(fresh)
    assert fresh.verify(deep=True).ok


@pytest.mark.parametrize("upgraded", [False, True])
def test_a_note_does_not_stand_for_a_placement_that_is_gone(
    noted, backend, open_registry, upgraded
):
    if upgraded:
        noted.upgrade()
    noted.gc(grace_s=0)
    assert not upgraded or noted.gc(grace_s=0).runs == 2
    backend.delete(str(noted.run("kept").latest().handle.reader.place.placement_key))
    before = contents(backend)
    with pytest.raises(MissingObject, match="placements/"):
        open_registry(backend).gc(grace_s=0)
    assert contents(backend) == before


def test_a_longer_grace_reads_from_the_first_slot(backend, open_registry):
    """It asks what the run held a day ago, and the note says only what it holds now."""
    aged = Aged(backend)
    old = open_registry(aged)
    save_small(old.create_run("run"), 1, 2, 3)
    aged.grow_older(10 * DAY_S)
    old.run("run").retention.prune(Retention(last=2))
    old.gc(grace_s=0)
    assert slot_key("run", 0) in _read_by(aged, DAY_S)
    aged.grow_older(10 * DAY_S)
    assert slot_key("run", 0) not in _read_by(aged, DAY_S)


@pytest.mark.parametrize("knows_slot", [True, False])
def test_a_machine_that_knows_less_than_a_note_finds_its_commit_in_the_log(
    tmp_path, knows_slot, monkeypatch
):
    note = Heads.note

    def noted(self, *of):
        note(self, *of[:-1], of[-1] if knows_slot else None)

    with monkeypatch.context() as patch:
        patch.setattr(Heads, "note", noted)
        with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
            save_small(reg.create_run("run"), 1)
    with open_on(Address(tmp_path / "reg").open()) as elsewhere:  # it remembers nothing here
        run = elsewhere.run("run")
        run.restore()
        save_small(run, 2, 3)
        elsewhere.gc(grace_s=0)
    with holdfast.open(tmp_path / "reg") as reg:
        assert reg.gc(grace_s=0).runs == 1


@pytest.mark.parametrize("grace_s", [0.0, DAY_S])
def test_what_was_undone_after_a_note_stays(backend, open_registry, grace_s):
    aged = Aged(backend)
    old = open_registry(aged)
    save_small(old.create_run("run"), 1, 2, 3)
    aged.grow_older(10 * DAY_S)
    old.run("run").retention.prune(Retention(last=1))
    old.gc()
    old.run("run").retention.undo()
    assert open_registry(aged).gc(grace_s=grace_s).deleted.objects == 0
    assert same(open_registry(aged).checkpoint("run/main/step1").load(), small_state(1))


def test_of_two_collectors_at_once_both_are_heard(noted, backend, open_registry):
    """The loser's table does not replace the winner's, which it has not read."""
    save_small(noted.run("kept"), 30)
    born = open_registry(backend)

    def another() -> None:
        save_small(born.create_run("born"), 40)
        born.gc(grace_s=0)

    hooked = Hooked(backend)
    hooked.before = Once(NOTES, another, "put_if_absent")
    open_registry(hooked).gc(grace_s=0)
    assert list(contents(backend, NOTES)) == [note_key(n) for n in (1, 2, 3)]
    notes = Notes.read(noted.handle.store)
    assert set(notes.by_run) == {"kept", "other", "born"}
    backend.delete(note_key(1))
    _delete(backend, noted)
    with pytest.raises(RolledBack, match="kept"):
        open_registry(backend).gc(grace_s=0)


def test_a_run_that_is_noted_while_another_one_lists_is_not_missed(noted, backend, open_registry):
    other = open_registry(backend)

    class Overtaken(Wrapper):
        is_done = False

        def list(self, prefix="", **more):
            found = list(super().list(prefix, **more))
            if prefix == RUNS and not self.is_done:
                self.is_done = True
                save_small(other.create_run("born"), 40)
                other.gc(grace_s=0)
            yield from found

    assert open_registry(Overtaken(backend)).gc(grace_s=0).deleted.objects == 0


def test_many_small_tables_become_few(noted, backend, open_registry):
    for step in range(100, 130):
        save_small(noted.run("other"), step)
        noted.run("other").retention.prune(Retention(last=2))
        open_registry(backend).gc(grace_s=0)
    calls = []
    with open_on(Metered(backend, calls)) as opened:
        calls.clear()
        notes = Notes.read(opened.handle.store)
    read = Counter(call.method for call in calls)["get"]
    assert len(contents(backend, NOTES)) == 31
    assert read <= 5
    assert {name: note.seen.slot for name, note in notes.by_run.items()} == {
        name: _newest_commit(opened, name) for name in ("kept", "other")
    }


def _newest_commit(reg, name: str) -> int:
    log = RunLog(reg.handle.store, name)
    return max(slot.number for slot in log.slots() if slot.commits)


def test_large_notes_are_parted(reg, backend, open_registry, monkeypatch):
    monkeypatch.setattr(run_notes, "_TABLE_BYTES", 5000)
    for number in range(6):
        save_small(reg.create_run(f"run{number}"), number)
    reg.gc(grace_s=0)
    assert 1 < len(contents(backend, NOTES)) < 6
    assert len(Notes.read(reg.handle.store).by_run) == 6
    save_small(reg.run("run0"), 9)
    assert slot_key("run5", 0) not in _read_by(backend)
    assert len(Notes.read(reg.handle.store).by_run) == 6


@pytest.mark.parametrize("spoiled", [b'["packs/', b'"manifest":"', None])
def test_a_full_collection_says_which_notes_differ_and_replaces_them(
    noted, backend, open_registry, spoiled
):
    if spoiled is not None:
        content = unwrap_frame(backend.get(note_key(1)), where="")
        at = content.index(b'"packs"', content.index(b'"run":"kept"'))
        at = content.index(spoiled, at) + len(spoiled) + 30
        wrong = content[:at] + (b"0" if content[at : at + 1] != b"0" else b"1") + content[at + 1 :]
        backend.put(note_key(1), wrap_frame(wrong))
    report = open_registry(backend).gc(grace_s=0, full=True)
    again = open_registry(backend).gc(grace_s=0, full=True)
    assert (report.full, again.differing) == (True, ())
    assert report.differing == (() if spoiled is None else ("kept",))
    assert report.deleted.objects == 0
    assert open_registry(backend).verify(deep=True).ok


def test_a_note_without_an_author_does_not_differ(noted, backend, open_registry):
    """Programs from before did not write it."""
    content = unwrap_frame(backend.get(note_key(1)), where="")
    older = re.sub(rb'"author":"[^"]*",', b"", content)
    assert len(older) < len(content)
    backend.put(note_key(1), wrap_frame(older))
    assert open_registry(backend).gc(grace_s=0, full=True).differing == ()
    assert not [key for key in _read_by(backend) if key.startswith("placements/")]


def test_every_so_many_collections_one_reads_everything(reg, backend, monkeypatch):
    monkeypatch.setattr(run_notes, "_FULL_EVERY", 4)
    reg.create_run("run")
    first = []
    for step in range(1, 10):
        save_small(reg.run("run"), step)
        first.append(slot_key("run", 0) in _read_by(backend))
    assert first == [True, False, False, False] * 2 + [True]
