"""A run that cannot be read stops every collection until an operator gives it up by its name."""

from __future__ import annotations

import os
import shutil

import pytest

import holdfast
from holdfast import Retention, sync
from holdfast.backends.wrappers import Fault, Faulty, InjectedCrash
from holdfast.registry.errors import (
    Conflict,
    IntegrityError,
    InvalidInput,
    Malformed,
    MissingObject,
    NotFound,
    RegistryError,
    RolledBack,
)
from holdfast.registry.face.factory import open_on
from holdfast.registry.history.epochs import Epochs
from holdfast.registry.history.log import RunLog
from holdfast.registry.objects.framing import join_lines
from holdfast.registry.objects.keys import ObjectKey, slot_key
from holdfast.registry.store import Workers
from holdfast.registry.upkeep.gc import Collector, collect
from holdfast.registry.upkeep.live import Needs
from holdfast.registry.upkeep.usage import measure
from tests.support.faults import flip
from tests.support.states import same, save_small, small_state
from tests.support.stores import contents, new_backend, objects

_JUNK = "runs/x/log/junk"
_BEYOND = slot_key("x", 10**20 - 1)


def _placement(backend, reg) -> None:
    flip(backend, str(reg.run("x").latest().handle.reader.place.placement_key))


#: Ways to make run `x` unreadable: one file that somebody put, damaged or deleted.
GARBAGE = {
    "a name that is no slot": lambda backend, reg: backend.put(_JUNK, b""),
    "a file beside the log": lambda backend, reg: backend.put("runs/x/notes", b""),
    "garbage in the next slot": lambda backend, reg: backend.put(slot_key("x", 4), b"garbage"),
    "an unknown line": lambda backend, reg: backend.put(
        slot_key("x", 4), join_lines([b'{"kind":"lease"}'])
    ),
    "garbage in the last slot of all": lambda backend, reg: backend.put(_BEYOND, b"garbage"),
    "a damaged slot": lambda backend, reg: flip(backend, slot_key("x", 2)),
    "a lost slot": lambda backend, reg: backend.delete(slot_key("x", 2)),
    "a damaged placement": _placement,
}


def _needed(reg) -> set[str]:
    """Return what the other run needs."""
    log = RunLog(reg.handle.store, "other")
    log.open()
    needs = Needs(Workers(None, reg.handle.store)).of(log.run)
    return set(map(str, map(ObjectKey.of_record, needs)))


@pytest.fixture
def two(reg, backend):
    """A registry with two runs that share a state; the other one has evicted something too."""
    save_small(reg.create_run("x"), 1, 2, 3)
    save_small(reg.create_run("other"), 3, 4, 5)
    reg.run("other").retention.prune(Retention(last=1))
    reg.run("other").retention.undo()
    reg.run("other").retention.prune(Retention(last=2))
    return reg


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_a_run_that_cannot_be_read_stops_the_others_until_it_is_forgotten(
    two, backend, open_registry, garbage
):
    before = contents(backend)
    training = open_registry(backend).run("x")
    garbage(backend, two)
    damaged = contents(backend)
    with pytest.raises(RegistryError, match=r"Nothing was deleted.*holdfast gc --forget 'x'"):
        open_registry(backend).gc(grace_s=0)
    operator = open_registry(backend)
    planned = operator.gc(grace_s=0, forget=["x"], dry_run=True)
    assert contents(backend) == damaged
    report = operator.gc(grace_s=0, forget=["x"])
    assert planned.forgotten == report.forgotten == ("x",)
    assert planned.condemned == report.deleted
    assert report.deleted.objects > 0
    # The other run has what it needs, and collects on without a further word from anybody.
    fresh = open_registry(backend)
    assert objects(backend) == _needed(fresh)
    for step in (4, 5):
        assert same(fresh.checkpoint(f"other/main/step{step}").load(), small_state(step))
    save_small(fresh.run("other"), 6)
    fresh.run("other").retention.prune(Retention(last=1))
    assert open_registry(backend).gc(grace_s=0).deleted.objects > 0
    # Nor does it hinder verification and mirrors, each night: what is wrong with it is known.
    checked = open_registry(backend).verify(deep=True)
    assert (checked.ok, checked.checkpoints) == (True, 1)
    assert {one.severity for one in checked.findings} <= {"note"}
    assert measure(open_registry(backend).handle.store).damaged == {}
    there = open_registry(new_backend())
    assert [one.run_id for one in sync(open_registry(backend), there).runs] == ["other"]
    with pytest.raises(RegistryError):
        sync(open_registry(backend), there, runs=["x"])
    # Nothing follows in the forgotten run, neither by a handle from before nor once it is mended.
    with pytest.raises(RegistryError):
        training.save(small_state(7), step=7)
    for key, data in before.items():
        if key.startswith("runs/x/"):
            backend.put(key, data)
    for key in (_JUNK, "runs/x/notes", _BEYOND):
        backend.delete(key)
    returned = open_registry(backend)
    assert returned.gc(grace_s=0).forgotten == ()
    with pytest.raises(RegistryError):
        returned.run("x").save(small_state(8), step=8)
    assert same(returned.checkpoint("other").load(), small_state(6))


def test_only_a_run_that_cannot_be_read_is_forgotten(two, backend):
    before = contents(backend)
    with pytest.raises(InvalidInput, match="holdfast run rm other"):
        two.gc(grace_s=0, forget=["other"])
    with pytest.raises(NotFound, match="none"):
        two.gc(grace_s=0, forget=["none"])
    assert contents(backend) == before


def test_who_forgets_one_run_is_stopped_by_the_next(two, backend, open_registry):
    save_small(two.create_run("third"), 8)
    backend.put(_JUNK, b"")
    backend.put("runs/third/log/junk", b"")
    before = contents(backend)
    with pytest.raises(Malformed, match="third"):
        open_registry(backend).gc(grace_s=0, forget=["x"])
    assert contents(backend) == before
    assert open_registry(backend).gc(grace_s=0, forget=["x", "third"]).forgotten == ("third", "x")


def test_a_forgotten_run_that_somebody_replaces_is_read_and_never_written(
    two, backend, open_registry
):
    """By an older copy, which does not say that the run was forgotten."""
    before = contents(backend, "runs/x/")
    backend.put(_JUNK, b"")
    open_registry(backend).gc(grace_s=0, forget=["x"])
    for key in contents(backend, "runs/x/"):
        backend.delete(key)
    for key, data in before.items():
        backend.put(key, data)
    with pytest.raises(Conflict, match="forgotten"):
        open_registry(backend).run("x").save(small_state(3), step=4)
    with pytest.raises(MissingObject, match=r"Nothing was deleted"):
        open_registry(backend).gc(grace_s=0)
    assert open_registry(backend).gc(grace_s=0, forget=["x"]).forgotten == ("x",)
    assert open_registry(backend).gc(grace_s=0).forgotten == ()


def test_a_run_of_a_name_that_no_run_may_have_is_forgotten(two, backend, open_registry):
    backend.put(slot_key(".hidden", 0), b"garbage")
    with pytest.raises(Malformed, match="hidden"):
        open_registry(backend).gc(grace_s=0)
    assert open_registry(backend).gc(grace_s=0, forget=[".hidden"]).forgotten == (".hidden",)
    save_small(two.run("other"), 9)
    two.run("other").retention.prune(Retention(last=1))
    assert open_registry(backend).gc(grace_s=0).deleted.objects > 0


def test_it_is_recorded_in_an_epoch_that_older_writers_refuse(two, backend, open_registry):
    backend.put(_JUNK, b"")
    collector = Collector(two.handle.store, grace_s=0, forget=["x"])
    assert len(collector.choose().to_condemn)
    collector.forget()
    # Another collector is faster with the next epoch, and knows of it by then.
    assert collect(open_registry(backend).handle.store, grace_s=0).epoch == 2
    assert collector.condemn() == 2
    collector.mark()
    collector.delete()
    epochs = Epochs(two.handle.store)
    kinds = {1: "forget", 2: "sweep"}
    for epoch, kind in kinds.items():
        header = epochs.header(epoch)
        assert (header.entry, header.min_writer) == (kind, 2)
        assert header.forgotten == {"x": 4}
    assert [found.where for found in two.verify().findings] == [_JUNK]


def test_a_forgotten_run_that_is_another_one_at_the_marks_stops_the_collection(two, backend):
    backend.put(_JUNK, b"")
    collector = Collector(two.handle.store, grace_s=0, forget=["x"])
    collector.choose()
    collector.forget()
    collector.condemn()
    backend.delete(slot_key("x", 4))  # the end of its log
    with pytest.raises(Malformed, match="forgotten is another one"):
        collector.mark()


@pytest.mark.parametrize("at", range(1, 8))
def test_a_collector_that_dies_while_it_forgets_is_followed_by_another(
    two, backend, open_registry, at
):
    backend.put(_JUNK, b"")
    dying = open_on(Faulty(backend, [Fault(at=at)]))
    with pytest.raises(InjectedCrash):
        dying.gc(grace_s=0, forget=["x"])
    dying.close()
    open_registry(backend).gc(grace_s=0, forget=["x"])
    fresh = open_registry(backend)
    assert objects(backend) == _needed(fresh)
    assert fresh.gc(grace_s=0).deleted.objects == 0


def test_a_run_that_is_gone_is_forgotten_by_who_has_seen_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("HOLDFAST_HEADS", raising=False)
    with holdfast.init(tmp_path / "reg") as reg:
        save_small(reg.create_run("x"), 1)
        save_small(reg.create_run("other"), 2)
    shutil.rmtree(tmp_path / "reg/runs/x")
    with holdfast.open(tmp_path / "reg") as reg:
        with pytest.raises(RolledBack, match="Nothing was deleted"):
            reg.gc(grace_s=0)
        assert reg.gc(grace_s=0, forget=["x"]).deleted.objects == 4
        assert reg.gc(grace_s=0).deleted.objects == 0
        assert same(reg.checkpoint("other").load(), small_state(2))
        # Its name is used up: collectors pass over it.
        with pytest.raises(RegistryError):
            reg.create_run("x")


def test_a_forgotten_run_that_comes_back_is_not_copied_and_does_not_hinder(
    two, backend, open_registry
):
    backend.put(_JUNK, b"")
    two.gc(grace_s=0, forget=["x"])
    backend.delete(_JUNK)
    there = open_registry(new_backend())
    with pytest.raises(IntegrityError, match=r"Not copied: x. Copied or up to date: other"):
        sync(open_registry(backend), there, runs=["x", "other"])
    assert [one.run_id for one in sync(open_registry(backend), there).runs] == ["other"]
    assert open_registry(backend).run("x").manifest.dropped is not None
    assert open_registry(backend).verify(deep=True).findings == ()


@pytest.mark.parametrize("kind", [one for one in GARBAGE if one != "a file beside the log"])
def test_a_repack_goes_on_past_a_run_that_cannot_be_read(two, backend, open_registry, kind):
    """Past a forgotten one always; past another one if other runs are named."""
    save_small(two.run("other"), *range(6, 12))
    GARBAGE[kind](backend, two)
    before = contents(backend, "runs/x/")
    damaged = contents(backend)
    for named in (None, ["x"]):
        with pytest.raises(RegistryError, match=r"holdfast gc --forget 'x'.*name the runs"):
            open_registry(backend).repack(named, min_dead=1)
    assert contents(backend) == damaged
    assert open_registry(backend).repack(["other"], min_dead=1).runs == ("other",)
    assert contents(backend, "runs/x/") == before  # its packs are where it expects them
    assert damaged.keys() <= contents(backend).keys()
    open_registry(backend).gc(grace_s=0, forget=["x"])
    save_small(open_registry(backend).run("other"), 12, 13)
    assert open_registry(backend).repack(min_dead=1).runs == ("other",)
    fresh = open_registry(backend)
    for one in fresh.run("other").checkpoints():
        assert same(one.load(), small_state(one.step))


def test_a_run_of_deeply_nested_folders_is_forgotten(tmp_path):
    with holdfast.init(tmp_path / "reg") as reg:
        save_small(reg.create_run("x"), 1)
        save_small(reg.create_run("other"), 2)
        nested = str(tmp_path / "reg/runs/x")
        for _ in range(1000):
            nested += "/d"
            os.mkdir(nested)  # noqa: PTH102 - pathlib would call itself for each folder
        os.close(os.open(f"{nested}/notes", os.O_CREAT | os.O_WRONLY))
        with pytest.raises(RegistryError, match="holdfast gc --forget 'x'"):
            reg.gc(grace_s=0)
        assert reg.gc(grace_s=0, forget=["x"]).forgotten == ("x",)
        assert reg.gc(grace_s=0).forgotten == ()
        assert reg.run_names() == ["other", "x"]
        assert same(reg.checkpoint("other").load(), small_state(2))
    os.unlink(f"{nested}/notes")  # noqa: PTH108
    while nested.endswith("/d"):  # pytest could not
        os.rmdir(nested)  # noqa: PTH106
        nested = nested[:-2]
