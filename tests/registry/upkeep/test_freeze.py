"""A frozen registry is written to by nobody, and says where it goes on."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

import holdfast
from holdfast import Retention, sync
from holdfast.backends import InvalidLocation
from holdfast.backends.wrappers import Fault, Faulty, InjectedCrash, Wrapper
from holdfast.registry.errors import Frozen, InvalidInput, UnsupportedFormat
from holdfast.registry.face.factory import open_on
from holdfast.registry.history.log import RunLog
from holdfast.registry.saving.journal.settings import Journal
from tests.support.states import same, save_small, small_state
from tests.support.stores import contents, new_backend

ELSEWHERE = "s3://other-bucket/team"
WRITES = {
    "save": lambda reg, run: run.save(small_state(9), step=9),
    "tag": lambda reg, run: run.pins.tags.set("x", run.latest()),
    "status": lambda reg, run: setattr(run, "status", "failed"),
    "report": lambda reg, run: run.latest().report({"loss": 1.0}),
    "prune": lambda reg, run: run.retention.prune(Retention(last=1)),
    "drop": lambda reg, run: run.retention.drop("over"),
    "create": lambda reg, run: reg.create_run("new", seed=3),
    "begin": lambda reg, run: reg.run("new", create=True, seed=3),
    "fork": lambda reg, run: reg.fork("run/latest", "new"),
    "gc": lambda reg, run: reg.gc(grace_s=0),
    "upgrade": lambda reg, run: reg.upgrade(),
}


@pytest.fixture
def trained(reg, run):
    """A registry with a run of two saves, and another registry that has it, too."""
    save_small(run, 1, 2)
    return reg


@pytest.mark.parametrize("opened", ["before", "after"])
@pytest.mark.parametrize("act", WRITES)
def test_nobody_writes_and_everybody_is_told_where(trained, backend, open_registry, act, opened):
    other = open_registry(backend)
    run = other.run("run")
    if opened == "before":
        run.restore()
    trained.freeze(ELSEWHERE)
    if opened == "after":
        other = open_registry(backend)
        run = other.run("run")
    before = contents(backend)
    with pytest.raises(Frozen, match=rf"moved to '{ELSEWHERE}'.*Nothing was committed") as refused:
        WRITES[act](other, run)
        run.restore()  # a takeover, where the save was none of this handle's
        WRITES[act](other, run)
    assert refused.value.exit_code == 5
    kept = {key: data for key, data in contents(backend).items() if not key.startswith(".probe")}
    assert {key for key in kept if "/log/" in key} == {key for key in before if "/log/" in key}
    assert other.moved_to == ELSEWHERE
    assert same(other.checkpoint("run/latest").load(), small_state(2))
    (note,) = other.verify().findings
    assert (note.severity, ELSEWHERE in note.message) == ("note", True)


def test_a_sync_may_read_from_it_and_not_write_to_it(trained, open_registry):
    mirror = open_registry(new_backend("mirror-of-frozen"))
    trained.freeze()
    sync(trained, mirror)
    assert mirror.checkpoint("run/latest").digest == trained.checkpoint("run/latest").digest
    assert mirror.moved_to is None
    save_small(mirror.create_run("theirs", seed=5), 1)
    with pytest.raises(Frozen, match="freeze --off"):
        sync(mirror, trained, ["theirs"])
    assert trained.run_names() == ["run"]


class Meanwhile(Wrapper):
    """A store on which an act happens just before the first put of a kind of key."""

    def __init__(self, inner, prefix, act) -> None:
        super().__init__(inner)
        self.prefix, self.act = prefix, act

    def put_if_absent(self, key, data):
        if key.startswith(self.prefix):
            self.prefix = "never"
            self.act()
        return super().put_if_absent(key, data)


def test_a_save_in_the_middle_of_which_it_happens_is_not_committed(trained, backend):
    with open_on(Meanwhile(backend, "runs/run/log/", trained.freeze)) as other:
        run = other.run("run")
        with pytest.raises(Frozen):
            run.restore()
            run.save(small_state(3), step=3)
    assert [ck.step for ck in trained.run("run").checkpoints()] == [1, 2]


def test_a_thaw_lets_the_same_handles_write_again(trained, backend, run):
    other = open_on(backend)
    trained.freeze(ELSEWHERE)
    with pytest.raises(Frozen):
        save_small(run, 3)
    report = other.thaw()
    assert (report.moved_to, report.epoch, report.marked) == (None, 2, 1)
    save_small(run, 3)
    run.pins.tags.set("x", run.latest())
    assert other.moved_to is None
    assert other.gc(grace_s=0).epoch is None
    other.close()


def test_another_place_is_told_instead_and_the_same_one_costs_nothing(trained, backend):
    assert trained.freeze(ELSEWHERE).epoch == 1
    assert trained.freeze(ELSEWHERE).marked == 0
    assert trained.freeze("s3://third-bucket").epoch == 2
    assert trained.moved_to == "s3://third-bucket"
    assert len(contents(backend, "epochs/")) == 2


def test_an_older_program_is_refused(trained, backend, open_registry, monkeypatch):
    trained.freeze()
    monkeypatch.setattr("holdfast.registry.store.store.WRITER_VERSION", 2)
    with pytest.raises(UnsupportedFormat, match="writer version 4"):
        open_registry(backend).create_run("new", seed=3)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_freeze_that_is_killed_is_finished_by_the_next(
    trained, backend, open_registry, at, after
):
    trained.create_run("other", seed=2)
    dying = open_on(Faulty(backend, [Fault(at=at, after=after)]))
    with pytest.raises(InjectedCrash):
        dying.freeze(ELSEWHERE)
    dying.close()
    report = open_registry(backend).freeze(ELSEWHERE)
    assert report.epoch == 1
    assert {RunLog(trained.handle.store, name).open().epoch for name in ("run", "other")} == {1}


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("s3://KEY:SECRET@bucket/team", InvalidLocation),
        ("s3://bucket/" + "a/" * 600, InvalidInput),
        ("memory://scratch", InvalidInput),
    ],
)
def test_a_place_that_everybody_is_told_is_checked(trained, backend, url, error):
    with pytest.raises(error) as refused:
        trained.freeze(backend.url if url.startswith("memory") else url)
    assert "SECRET" not in str(refused.value)
    assert contents(backend, "epochs/") == {}


def test_who_opens_it_follows_only_if_asked_and_takes_no_option_along(tmp_path, run, trained):
    old, new = tmp_path / "old", tmp_path / "new"
    with holdfast.init(old) as first, holdfast.init(new) as second:
        save_small(first.create_run("run", seed=1), 1)
        sync(first, second)
        first.freeze(str(new))
        ids = [one.id for one in (first, second)]
    with holdfast.open(old) as stays, holdfast.open(old, follow_moved=True) as goes:
        assert [stays.id, goes.id] == ids
    for place in ("memory://elsewhere", "s3://bucket/team?endpoint_url=http://192.0.2.1"):
        with holdfast.open(old) as first:
            first.freeze(place)
        with pytest.raises(InvalidLocation, match="Open that place yourself"):
            holdfast.open(old, follow_moved=True)


def _moved(*places) -> list[str]:
    """Make registries of which each has moved to the next; return their ids."""
    ids = []
    for place in places:
        with holdfast.init(place) as reg:
            ids.append(reg.id)
    for old, new in itertools.pairwise(places):
        with holdfast.open(old) as reg:
            reg.freeze(str(new))
    return ids


def test_a_registry_that_moved_twice_is_followed_to_the_end(tmp_path):
    places = [tmp_path / name for name in ("first", "second", "third")]
    ids = _moved(*places)
    with holdfast.open(places[0], follow_moved=True) as goes:
        assert goes.id == ids[2]
    # Each place is checked, not only the first.
    with holdfast.open(places[2]) as third:
        third.freeze("memory://elsewhere")
    with pytest.raises(InvalidLocation, match="Open that place yourself"):
        holdfast.open(places[0], follow_moved=True)


def test_registries_that_moved_in_a_circle_are_not_followed_for_ever(tmp_path):
    places = [tmp_path / name for name in ("first", "second", "third")]
    _moved(*places)
    with holdfast.open(places[2]) as third:
        third.freeze(str(places[1]))
    with pytest.raises(InvalidLocation, match="moved in a circle"):
        holdfast.open(places[0], follow_moved=True)


def test_a_registry_moves_to_a_bucket_while_training_goes_on(tmp_path, moto_url):
    """The steps of docs/guides/operator.md."""
    old, far = str(tmp_path / "old"), moto_url()
    holdfast.init(old).close()
    holdfast.init(far, skip_race_probe=True).close()
    saved, begun, moved = [], threading.Event(), threading.Event()

    def train() -> None:
        url, step = old, 0
        while step < 40:
            with holdfast.open(url) as reg:
                run = reg.run("run", create=True, seed=1)
                restored = run.restore()
                step = 0 if restored is None else restored.checkpoint.step
                try:
                    while step < 40:
                        step += 1
                        run.save(small_state(step), step=step)
                        saved.append((url, step))
                        begun.set()
                except Frozen:
                    url = reg.moved_to
                    assert moved.wait(300)  # until the last sync is over

    trainer = threading.Thread(target=train)
    trainer.start()
    assert begun.wait(300)
    with holdfast.open(old) as here, holdfast.open(far) as there:
        sync(here, there)
        here.freeze(far)
        sync(here, there)
        moved.set()
        trainer.join(300)
        steps = [ck.step for ck in there.run("run").checkpoints()]
        assert there.verify(deep=True).ok
    assert not trainer.is_alive()
    assert steps == list(range(1, 41))
    assert {step for _, step in saved} == set(steps)


def test_a_journal_keeps_its_saves_until_the_thaw(tmp_path):
    url = str(tmp_path / "reg")
    with (
        holdfast.init(url) as operator,
        holdfast.open(url, journal=tmp_path / "journal") as reg,
    ):
        run = reg.run("run", create=True, seed=1)
        run.save(small_state(1), step=1)
        run.wait(remote=True)
        operator.freeze(ELSEWHERE)
        run.save(small_state(2), step=2)
        for act in (
            lambda: run.wait(remote=True),
            lambda: run.pins.tags.set("x", operator.run("run").latest()),
            lambda: run.save(small_state(3), step=3),
        ):
            with pytest.raises(Frozen, match=ELSEWHERE):
                act()
        backlog = run.backlog()
        assert (backlog.entries, backlog.refused, backlog.damaged) == (1, 0, 0)
        operator.thaw()
        run.save(small_state(3), step=3)
        run.wait(remote=True)
        assert [ck.step for ck in operator.run("run").checkpoints()] == [1, 2, 3]


def test_a_save_that_waits_at_the_bound_of_a_journal_is_told(tmp_path):
    url, bound = str(tmp_path / "reg"), Journal(tmp_path / "journal", max_bytes=60_000)
    with holdfast.init(url) as operator, holdfast.open(url, journal=bound) as reg:
        run = reg.run("run", create=True, seed=1)
        run.save({"w": np.zeros(5000)}, step=1)
        run.wait(remote=True)
        operator.freeze(ELSEWHERE)
        run.save({"w": np.ones(5000)}, step=2)
        with pytest.raises(Frozen, match=ELSEWHERE):  # there is no room for a third
            run.save({"w": np.full(5000, 2.0)}, step=3)
