"""Sealed runs: a collection passes over them, and what it cannot be sure of costs only time."""

from __future__ import annotations

import re

import pytest

from holdfast import Retention
from holdfast.backends.wrappers import Metered, Wrapper
from holdfast.registry.errors import Malformed, RolledBack
from holdfast.registry.face.factory import open_on
from holdfast.registry.history.actions import Mark, Place, Seal
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.replay import Slot, advance
from holdfast.registry.objects import ACTIVE, EPOCHS, NOTES, RUNS, note_key, slot_key
from holdfast.registry.objects.framing import unwrap_frame, wrap_frame
from holdfast.registry.upkeep import sealing
from holdfast.registry.upkeep.gc import collect
from tests.registry.upkeep.test_gc import Aged
from tests.support.faults import Died, Hooked, Once, flip
from tests.support.states import save_small
from tests.support.stores import contents, needed, objects

NAMES = ("a", "b", "c", "d")


@pytest.fixture(autouse=True)
def _no_run_is_looked_at_today(monkeypatch):
    monkeypatch.setattr(sealing, "_SAMPLED", 2**32)


@pytest.fixture
def sealed(reg):
    """Four runs, sealed by one collection that also had to delete something."""
    reg.upgrade()
    for i, name in enumerate(NAMES):
        save_small(reg.create_run(name), i, i + 10, 7)
        reg.run(name).retention.prune(Retention(last=2))
    reg.gc(grace_s=0)
    return reg


def slots(backend, name: str) -> list[Slot]:
    found = contents(backend, f"{RUNS}{name}/log/").items()
    return [Slot.decode(n, data, where=key) for n, (key, data) in enumerate(sorted(found))]


def seals(backend, name: str) -> list[int]:
    return [
        one.number for one in slots(backend, name) if any(isinstance(x, Seal) for _, x in one.lines)
    ]


def gc_elsewhere(backend, grace_s: float = 0.0, **options) -> tuple[object, dict[str, int]]:
    """Collect on a machine that has never seen the registry; return the report and requests."""
    calls = []
    with open_on(Metered(backend, calls)) as opened:
        report = collect(opened.handle.store, grace_s=grace_s, **options)
    return report, [f"{one.method} {one.key}" for one in calls]


def check_whole(backend, reg) -> None:
    fresh = open_on(backend)
    assert objects(backend) == needed(reg) == needed(fresh)
    assert fresh.verify(deep=True).ok


def test_a_collection_reads_and_marks_only_runs_in_which_something_happened(sealed, backend):
    before = {name: len(slots(backend, name)) for name in NAMES}
    _, calls = gc_elsewhere(backend)
    assert not [one for one in calls if one.startswith("get runs/")]
    assert not [one for one in calls if one.startswith("put_if_absent")]
    sealed.run("b").restore()
    save_small(sealed.run("b"), 30)
    sealed.run("b").retention.prune(Retention(last=1))
    assert list(contents(backend, ACTIVE)) == [f"active/b.{before['b']}"]
    report, calls = gc_elsewhere(backend)
    assert report.deleted.objects > 0
    assert {one.split("/")[1] for one in calls if " runs/" in one and "/log/" in one} == {"b"}
    assert {name for name in NAMES if len(slots(backend, name)) > before[name]} == {"b"}
    assert len(seals(backend, "b")) == 2
    assert not contents(backend, ACTIVE)
    check_whole(backend, sealed)
    logs = contents(backend, RUNS)
    gc_elsewhere(backend, full=True)
    gc_elsewhere(backend)
    assert contents(backend, RUNS) == logs
    # A mark announces no writer.
    sealed.run("c").retention.prune(Retention(last=1))
    gc_elsewhere(backend, full=True)
    assert not contents(backend, ACTIVE)


@pytest.mark.parametrize("looks", ["full", "sampled"])
def test_a_commit_whose_marker_is_lost_is_found_by_whoever_reads_its_log(
    sealed, backend, monkeypatch, looks
):
    """As in a copy of a folder in use, of which `active/` was copied before the commit."""
    save_small(sealed.run("b"), 30)
    [marker] = contents(backend, ACTIVE)
    assert sealed.verify().ok
    backend.delete(marker)
    with open_on(backend) as fresh:
        [finding] = fresh.verify().findings
    assert finding.where == "b"
    assert "gc --full" in finding.advice
    if looks == "sampled":
        monkeypatch.setattr(sealing, "_SAMPLED", 1)
    assert gc_elsewhere(backend, full=looks == "full")[0].deleted.objects == 0
    monkeypatch.setattr(sealing, "_SAMPLED", 2**32)
    for _ in range(2):  # its note stands for the run again, with the new checkpoint
        assert gc_elsewhere(backend)[0].deleted.objects == 0
    check_whole(backend, sealed)


def test_the_old_rules_go_on_before_an_upgrade(reg, backend):
    save_small(reg.create_run("a"), 1)
    reg.gc(grace_s=0)
    assert not seals(backend, "a")
    _, calls = gc_elsewhere(backend)
    assert not [one for one in calls if ACTIVE in one]


@pytest.mark.parametrize("is_open", [False, True], ids=["behind a seal", "opened before it"])
@pytest.mark.parametrize("act", ["save", "tag"])
def test_a_writer_announces_itself_before_it_observes_an_epoch(reg, backend, act, is_open):
    reg.upgrade()
    save_small(reg.create_run("a"), 1)
    calls = []
    with open_on(Metered(backend, calls)) as other:
        run = other.run("a") if is_open else None
        reg.gc(grace_s=0)
        run = run or other.run("a")
        calls.clear()
        if act == "save":
            run.restore()
            run.save({"x": 1}, step=9)
        else:
            run.pins.tags.set("t", run.latest())
        run.pins.tags.set("u", run.latest())
    puts = [one.key for one in calls if one.method == "put_if_absent"]
    markers = [key for key in puts if key.startswith(ACTIVE)]
    assert markers == [f"active/a.{seals(backend, 'a')[0] + 1}"]
    kinds = [(one.method, one.key) for one in calls]
    marker, slot = (
        kinds.index(("put_if_absent", markers[0])),
        slot_key("a", len(slots(backend, "a")) - 2),
    )
    assert marker < kinds.index(("put_if_absent", slot))
    if act == "save":
        assert ("list", EPOCHS) in kinds[marker:]


def resealed(reg) -> None:
    """Commit behind the seals of two runs, and seal them again: their first notes are stale."""
    for i, name in enumerate(("a", "d")):
        reg.run(name).restore()
        save_small(reg.run(name), 30 + i)
        reg.gc(grace_s=0)


def without_packs(backend, last: int) -> None:
    """Let the newest notes name no packs."""
    content = unwrap_frame(backend.get(note_key(last)), where="")
    backend.put(note_key(last), wrap_frame(re.sub(rb'"packs":\{[^}]*\}', b'"packs":{}', content)))


BAD = {
    "the newest table is damaged": lambda backend, last: flip(backend, note_key(last), 300),
    "the newest table is cut off": lambda backend, last: backend.put(note_key(last), b""),
    "a table of a newer version": lambda backend, last: backend.put(note_key(last + 1), b"new"),
    "the first table is lost": lambda backend, last: backend.delete(note_key(1)),
    "a table is lost": lambda backend, last: backend.delete(note_key(last - 1)),
    "a note names no packs": without_packs,
    "an unknown marker": lambda backend, last: backend.put(f"{ACTIVE}b-2", b""),
}


#: Where tables are not joined, a lost one matters; the other notes are then as bad as before.
_NOTES = [
    pytest.param(joins, bad, marks=() if joins or "lost" in bad else pytest.mark.soak)
    for joins in (True, False)
    for bad in BAD
]


@pytest.mark.parametrize(("joins", "bad"), _NOTES)
def test_a_bad_note_costs_time_and_no_object(sealed, backend, bad, joins, monkeypatch):
    if not joins:
        monkeypatch.setattr("holdfast.registry.upkeep.run_notes._JOINED_FROM", 99)
    resealed(sealed)
    last = len(contents(backend, NOTES))
    BAD[bad](backend, last)
    # Something of another run is to be deleted, so that runs are marked, too.
    sealed.run("b").retention.prune(Retention(last=1))
    _, calls = gc_elsewhere(backend)
    check = open_on(backend)
    assert objects(backend) == needed(check)
    assert check.verify(deep=True).ok
    # Of tables that are joined only the newest is needed.
    if not (joins and "lost" in bad):
        assert [one for one in calls if one.startswith("get runs/d/")]


def test_a_longer_grace_reads_the_runs(reg, backend):
    aged = Aged(backend)
    reg.upgrade()
    save_small(reg.create_run("a"), 1, 2)
    gc_elsewhere(aged, 3600.0)
    assert not seals(backend, "a")  # it is in use
    aged.grow_older(7200.0)
    gc_elsewhere(aged, 3600.0)
    assert seals(backend, "a")
    _, calls = gc_elsewhere(aged, 3600.0)
    assert not [one for one in calls if one.startswith("get runs/")]
    _, calls = gc_elsewhere(aged, 7000.0)
    assert [one for one in calls if one.startswith("get runs/")]


def _delete(backend, _) -> None:
    for info in list(backend.list(f"{RUNS}b/")):
        backend.delete(info.key)


def _cut(backend, reg) -> None:
    backend.delete(slot_key("b", reg.run("b").manifest.next_slot - 1))


def _replace(backend, reg) -> None:
    _delete(backend, reg)
    save_small(open_on(backend).create_run("b"), *range(40, 60))


@pytest.mark.parametrize("lose", [_delete, _cut, _replace])
def test_a_quiet_run_whose_log_is_lost_stops_collections(sealed, backend, lose, monkeypatch):
    lose(backend, sealed)
    before = contents(backend)
    fresh = open_on(backend)
    (found,) = [one for one in fresh.verify().findings if "a collection has read" in one.message]
    assert (found.where, found.severity) == ("b", "error")
    with pytest.raises(RolledBack, match=r"(?s)runs/b.*Nothing was deleted"):
        gc_elsewhere(backend, full=True)
    # Of runs that are there, a night without `full` looks at some.
    monkeypatch.setattr(sealing, "_SAMPLED", 1)
    with pytest.raises(RolledBack, match=r"(?s)runs/b.*Nothing was deleted.*gc --forget 'b'"):
        gc_elsewhere(backend)
    assert contents(backend) == before


@pytest.mark.parametrize("lose", [_delete, _cut])
@pytest.mark.sometimes("a quiet run has lost its log during a collection")
def test_a_quiet_run_that_is_lost_during_a_collection_stops_it(sealed, backend, lose):
    sealed.run("a").retention.prune(Retention(last=1))
    hooked = Hooked(backend)

    def spoil() -> None:
        lose(backend, sealed)
        backend.put(f"{ACTIVE}b.99", b"")  # and somebody writes there again

    hooked.after = Once(EPOCHS, spoil, "put_if_absent")
    with open_on(hooked) as opened, pytest.raises(RolledBack, match=r"runs/b"):
        collect(opened.handle.store, grace_s=0.0)


@pytest.mark.sometimes("a marker has outlived its seal")
def test_a_dead_writer_and_a_dead_collector_leave_nothing_for_ever(sealed, backend):
    (first,) = seals(backend, "a")
    slow, late = f"{ACTIVE}b.0", f"{ACTIVE}d.{seals(backend, 'd')[0]}"
    backend.put(f"{ACTIVE}a.{first + 1}", b"")  # it died before its commit
    backend.put(slow, b"")  # it was slow
    backend.put(late, b"")  # a collector died before it removed this one

    class Noting(Wrapper):
        def make_durable(self, keys):
            done.extend(keys)

        def delete_many(self, keys):
            done.extend(keys := sorted(keys))
            return super().delete_many(keys)

    done = []
    gc_elsewhere(Noting(backend))
    assert [len(seals(backend, name)) for name in ("a", "b", "d")] == [2, 1, 1]
    assert not contents(backend, ACTIVE)
    # A marker goes when the note that stands for its run cannot be lost any more.
    assert note_key(1) in done[: done.index(slow)]
    assert late in done
    save_small(sealed.run("c"), 30)
    dying = Hooked(backend)

    def die(method: str, key: str) -> None:
        if method == "put_if_absent" and key.startswith(NOTES):
            raise Died

    dying.before = die
    with pytest.raises(Died), open_on(dying) as opened:
        collect(opened.handle.store, grace_s=0.0)
    assert len(seals(backend, "c")) == 2
    assert contents(backend, ACTIVE)
    gc_elsewhere(backend)
    assert not contents(backend, ACTIVE)
    _, calls = gc_elsewhere(backend)
    assert not [one for one in calls if one.startswith("get runs/")]
    check_whole(backend, sealed)


def test_a_run_that_may_be_freed_is_not_passed_over(sealed, backend):
    sealed.run("a").retention.drop(reason="x")
    sealed.run("b").retention.drop(reason="x", now=True)
    gc_elsewhere(backend)
    assert [len(seals(backend, name)) for name in ("a", "b")] == [1, 2]
    sealed.drop_rules(delay_s=0)
    report, _ = gc_elsewhere(backend)
    assert report.freed_runs == ("a",)
    gc_elsewhere(backend)
    check_whole(backend, sealed)
    # A registry that keeps everything reads all runs.
    sealed.drop_rules(keep=True)
    _, calls = gc_elsewhere(backend)
    assert {one.split("/")[1] for one in calls if one.startswith("get runs/")} == {*NAMES}


def test_a_seal_is_alone_in_its_slot(sealed, backend):
    log = RunLog(sealed.handle.store, "a")
    run = log.open()
    place = next(x for one in slots(backend, "a") for _, x in one.lines if isinstance(x, Place))
    with pytest.raises(Malformed, match="a seal beside other lines"):
        advance(run, [Slot.build(run.next_slot, [Seal(), place])])
    assert advance(run, [Slot.build(run.next_slot, [Mark(epoch=9), Seal()])]).sealed_at is not None
