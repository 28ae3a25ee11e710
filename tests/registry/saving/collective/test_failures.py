"""A rank that dies, fails or is late: nothing half is visible, nobody hangs, a retry works."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import Checkpoint, Registry
from holdfast.backends import limits
from holdfast.distributed import Group
from holdfast.registry.errors import (
    IncompatibleState,
    InvalidInput,
    RankFailed,
    StoreUnavailable,
    UnsupportedValue,
)
from holdfast.registry.history.actions import AddCheckpoint
from holdfast.registry.history.log import RunLog
from holdfast.registry.saving.collective import talk
from holdfast.registry.saving.collective.sides import Following, Leading
from holdfast.registry.spec import RunSpec
from holdfast.registry.writing.object_writer import Condemned
from tests.registry.saving.collective.ranks import Mortal, Troubled, group_of, mortals, together
from tests.registry.saving.collective.rows import WHOLE, Rows, state
from tests.support.faults import Died
from tests.support.stores import objects

#: Long enough for a rank that is well, on a busy machine.
WELL_S = 30.0


pytestmark = pytest.mark.usefixtures("rows_are_sharded")


def saving(reg: Registry, step: int = 1, **other: Any) -> Callable[[Group], Checkpoint]:
    def save(group: Group) -> Checkpoint:
        with holdfast.open(reg.url) as mine:
            run = mine.run("run", group=group)
            return run.save(state(group.rank, group.size), step=step, **other)

    return save


def calls_of(reg: Registry, victim: int) -> int:
    """Return how often a rank calls its group in a save; the run keeps nothing of it."""
    groups = [Troubled(one, lambda: None) for one in group_of(3, WELL_S)]
    reg.create_run("trial")

    def save(group: Group) -> Checkpoint:
        with holdfast.open(reg.url) as mine:
            return mine.run("trial", group=group).save(state(group.rank, 3), step=1)

    assert all(isinstance(one, Checkpoint) for one in together(groups, save))
    return groups[victim].calls


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_at_any_call_leaves_nothing_half(reg: Registry, victim: int) -> None:
    calls = calls_of(reg, victim)
    assert calls > 6
    seen = set()
    for step, at in enumerate(range(1, calls + 1), start=1):
        found = together(mortals(3, WELL_S, victim, at), saving(reg, step))
        assert isinstance(found.pop(victim), Died)
        visible = [one.step for one in reg.run("run").checkpoints()]
        if all(isinstance(one, Checkpoint) for one in found):
            seen.add("saved")
            assert visible[-1] == step
        else:
            for error in found:
                assert isinstance(error, RankFailed), found
                assert error.rank == victim, found
            unknown = all("unknown" in str(error) for error in found)
            seen.add("unknown" if unknown else "failed")
            assert step not in visible
        again = together(group_of(3, WELL_S), saving(reg, step))
        assert len({one.digest for one in again}) == 1, again
    assert "failed" in seen
    assert "saved" in seen
    assert not reg.verify(deep=True).findings


def test_a_late_rank_learns_how_its_call_ended_and_saves_with_the_next(reg: Registry) -> None:
    groups = mortals(3, WELL_S)
    others_are_done = threading.Event()
    left = threading.Barrier(2, action=others_are_done.set)
    all_know = threading.Barrier(3)

    def save(group: Mortal) -> tuple[Any, Checkpoint]:
        with holdfast.open(reg.url) as mine:
            run = mine.run("run", group=group)
            if group.rank == 1:
                group.fall_silent()
                others_are_done.wait(WELL_S)
                group.speak()
            with pytest.raises(RankFailed) as error:
                run.save(state(group.rank, 3), step=1)
            if group.rank != 1:
                left.wait(WELL_S)
            all_know.wait(WELL_S)
            return error.value, run.save(state(group.rank, 3), step=1)

    found = together(groups, save)
    assert all(isinstance(one, tuple) for one in found), found
    assert [error.rank for error, _ in found] == [1, 1, 1]
    assert "no word from rank 1" in str(found[0][0])
    assert len({made.digest for _, made in found}) == 1


class Noting(Troubled):
    """A rank that notes for how long it would wait."""

    def __init__(self, group: Group) -> None:
        super().__init__(group, lambda: None)
        self.waits_s = set[float]()

    def receive(self, name: str, senders: Sequence[int], timeout_s: float) -> dict[int, bytes]:
        self.waits_s.add(timeout_s)
        return super().receive(name, senders, timeout_s)


def test_nobody_is_given_up_before_the_deadline(reg: Registry) -> None:
    groups = [Noting(one) for one in group_of(2, WELL_S)]
    assert all(isinstance(one, Checkpoint) for one in together(groups, saving(reg)))
    first, second = (one.waits_s - {0} for one in groups)
    assert (first, min(second)) == ({WELL_S}, WELL_S + talk._GRACE_S)


def test_the_error_of_one_rank_is_raised_on_all_in_its_class(
    reg: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise StoreUnavailable("no answer", where="packs/aa")

    monkeypatch.setattr(Following, "_store", fail)
    found = together(group_of(2, WELL_S), saving(reg))
    assert [type(one) for one in found] == [StoreUnavailable] * 2
    assert found[0].where == "rank 1: packs/aa"
    assert found[1].where == "packs/aa"
    assert not reg.run("run").checkpoints()


def test_a_state_that_cannot_be_stored_on_one_rank_fails_on_all(reg: Registry) -> None:
    def save(group: Group) -> Checkpoint:
        with holdfast.open(reg.url) as mine:
            bad = {"f": print} if group.rank == 1 else {"f": 1}
            return mine.run("run", group=group).save(bad, step=1)

    found = together(group_of(3, WELL_S), save)
    assert [type(one) for one in found] == [UnsupportedValue] * 3
    assert "rank 1" in str(found[0])


def test_a_state_that_could_not_be_read_again_is_refused_on_all(
    reg: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(group: Group) -> Checkpoint:
        with holdfast.open(reg.url) as mine:
            return mine.run("run", group=group).save(large, step=1)

    large = {"values": list(range(20_000)), "w": np.arange(500)}
    monkeypatch.setenv(limits.VARIABLE, "60000")
    found = together(group_of(2, WELL_S), save)
    assert [type(one) for one in found] == [InvalidInput] * 2, found
    assert all("would take too much memory" in str(one) for one in found)
    assert objects(reg.handle.store.backend) == set()


@pytest.mark.parametrize("kind", ["save", "exchange.push", "save_async"])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_wrong_argument_on_one_rank_fails_on_all(reg: Registry, kind: str, bad: int) -> None:
    def save(group: Group) -> Checkpoint:
        with holdfast.open(reg.url) as mine:
            run = mine.run("run", group=group)
            act = attrgetter(kind)(run)
            with pytest.raises(InvalidInput, match="step"):
                given = act({"x": 1}, step=-1 if group.rank == bad else 1)
                given.wait()
            return run.save({"x": 1}, step=2)

    found = together(group_of(2, WELL_S), save)
    assert [one.step for one in found] == [2, 2], found
    assert [one.step for one in reg.run("run").checkpoints()] == [2]


@pytest.mark.parametrize(
    ("differing", "path"),
    [
        (lambda rank: {"loss": {"last": [1.0, rank / 2]}}, "loss/last/1"),
        (lambda rank: {"b": {"x": np.arange(300) + rank}}, "b/x"),
        (lambda rank: {"b": {"x": np.arange(3) + rank}}, "b/x"),
        (lambda rank: {f"k{rank}": 1}, "components"),
        # Equal to Python, and other values.
        (lambda rank: {"a": {"b": (0, [1, True][rank])}}, ": a/b/1:"),
        (lambda rank: {"a": {"b": [{"x": 1}, OrderedDict(x=1)][rank]}}, ": a/b:"),
        (lambda rank: {"a": {"b": [[1], (1,)][rank]}}, ": a/b:"),
    ],
)
def test_values_that_differ_under_one_name_are_refused_by_path(
    reg: Registry, differing: Callable[[int], Any], path: str
) -> None:
    def save(group: Group) -> Checkpoint:
        with holdfast.open(reg.url) as mine:
            return mine.run("run", group=group).save(differing(group.rank), step=1)

    for error in together(group_of(2, WELL_S), save):
        assert isinstance(error, IncompatibleState), error
        assert path in str(error)
        assert "rank 1" in str(error)
    assert not reg.run("run").checkpoints()


def test_copies_of_a_part_are_one_part_and_have_to_be_equal(reg: Registry) -> None:
    """Each of four ranks has a quarter of `w`; of the others two ranks have each half."""
    halved = {"large": WHOLE[:700], "small": np.arange(5.0)}

    def saving_with(differs: str) -> Callable[[Group], Any]:
        def save(group: Group) -> Any:
            parts = {"w": Rows(WHOLE, group.rank, 4)}
            for name, whole in halved.items():
                mine = whole + np.float32(name == differs and group.rank == 3)
                parts[name] = Rows(mine, group.rank % 2, 2, is_copied=True)
            with holdfast.open(reg.url) as opened:
                return opened.run("run", group=group).save({"model": parts}, step=1).digest

        return save

    for name, place in (("large", "ranks 1 and 3: model/large"), ("small", "run: model/small")):
        for error in together(group_of(4, WELL_S), saving_with(name)):
            assert isinstance(error, IncompatibleState), error
            assert place in str(error)
    alone = reg.create_run("alone").save({"model": {"w": WHOLE, **halved}}, step=1)
    assert together(group_of(4, WELL_S), saving_with("")) == [alone.digest] * 4
    assert not reg.verify(deep=True).findings


def test_metrics_that_differ_are_refused(reg: Registry) -> None:
    def save(group: Group) -> Checkpoint:
        return saving(reg, metrics={"loss": float(group.rank)})(group)

    for error in together(group_of(2, WELL_S), save):
        assert isinstance(error, IncompatibleState)
        assert "metrics['loss']" in str(error)


def test_weights_that_are_not_finite_on_one_rank_are_named_on_all(reg: Registry) -> None:
    reg.create_run("watched", preset=RunSpec(name="own", finite=("model/*",)))

    def save(group: Group) -> tuple[str, ...]:
        whole = WHOLE[:700].copy()
        if group.rank:
            whole[600:] = np.nan  # in the part of this rank
        parts = {"w": Rows(whole, group.rank, 2), "b": np.arange(300.0)}
        with holdfast.open(reg.url) as mine:
            return mine.run("watched", group=group).save({"model": parts}, step=1).nonfinite

    assert together(group_of(2, WELL_S), save) == [("model/w",)] * 2


def test_values_of_each_rank_are_kept_under_their_rank(reg: Registry) -> None:
    made = together(group_of(3, WELL_S), saving(reg))
    assert [one.load()["rng"] for one in made] == [{0: 0, 1: 1, 2: 2}] * 3
    np.testing.assert_array_equal(made[0].load()["model"]["w"], WHOLE)


def test_packs_that_another_writer_has_put_are_read_by_the_rank_that_needs_them(
    reg: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that holds other bytes is replaced; the ranks may be on machines that know nothing."""
    together(group_of(2, WELL_S), saving(reg))
    sound = {path: path.read_bytes() for path in tmp_path.glob("reg/packs/*/*")}
    for path, data in sound.items():
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    reg.create_run("other")

    def save(group: Group) -> Checkpoint:
        with holdfast.open(reg.url) as mine:
            return mine.run("other", group=group).save(state(group.rank, 2), step=1)

    made = together(group_of(2, WELL_S), save)
    np.testing.assert_array_equal(made[0].load()["model"]["w"], WHOLE)
    assert sound.keys() == {*tmp_path.glob("reg/packs/*/*")}
    assert all(path.read_bytes() == data for path, data in sound.items())


def test_a_training_continues_from_its_newest_checkpoint_at_another_world_size(
    reg: Registry,
) -> None:
    together(group_of(3, WELL_S), saving(reg))

    def resume(group: Group) -> tuple[Any, Checkpoint]:
        with holdfast.open(reg.url) as mine:
            run = mine.run("run", group=group)
            part = state(group.rank, group.size, seed=5)["model"]
            found = run.restore_into({"model": part}, strict=False)
            assert found is not None
            assert found.step == 1
            return part, run.save(state(group.rank, group.size), step=2)

    made = together(group_of(2, WELL_S), resume)
    assert all(isinstance(one, tuple) for one in made), made
    np.testing.assert_array_equal(np.concatenate([one["w"].part for one, _ in made]), WHOLE)
    np.testing.assert_array_equal(made[1][0]["b"], np.arange(100))
    alone = reg.run("run")
    part = {"model": {"w": np.zeros_like(WHOLE), "b": np.zeros(100, np.int64)}}
    assert alone.restore_into(part) == made[0][1]
    np.testing.assert_array_equal(part["model"]["w"], WHOLE)


def test_background_saves_store_what_was_there_when_they_began(reg: Registry) -> None:
    def save(group: Group) -> Checkpoint:
        with holdfast.open(reg.url) as mine:
            run = mine.run("run", group=group)
            mine_of = state(group.rank, group.size)
            pending = run.save_async(mine_of, step=1)
            mine_of["model"]["w"].part[:] = -1
            mine_of["model"]["b"][:] = -1
            with pytest.raises(InvalidInput, match="busy"):
                run.save_async(mine_of, step=2, busy="skip")
            return pending.wait(WELL_S)

    made = together(group_of(2, WELL_S), save)
    assert len({one.digest for one in made}) == 1, made
    np.testing.assert_array_equal(made[1].load()["model"]["w"], WHOLE)


def test_a_collection_between_the_report_of_a_rank_and_the_commit(
    reg: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packs that the ranks find, and a sweep then condemns, are stored again under its epoch."""
    together(group_of(2, WELL_S), saving(reg))
    reg.run("run").retention.drop("its packs are found again", now=True)
    reg.create_run("next")
    swept = []
    stored = Leading._have_stored

    def sweep_after(self: Leading, *args: Any) -> Any:
        reports = stored(self, *args)
        if not swept:
            with holdfast.open(reg.url) as other:
                swept.append(other.gc(grace_s=0))
        else:
            generations = {
                pack.key.generation for report in reports for pack in report.stored.packs
            }
            assert generations == {1}
        return reports

    monkeypatch.setattr(Leading, "_have_stored", sweep_after)

    def save(group: Group) -> Checkpoint:
        with holdfast.open(reg.url) as mine:
            run = mine.run("next", group=group)
            return run.save(state(group.rank, group.size), step=1)

    made = together(group_of(2, WELL_S), save)
    assert all(isinstance(one, Checkpoint) for one in made), made
    assert swept[0].deleted, "nothing was condemned: the test is void"
    np.testing.assert_array_equal(made[1].load()["model"]["w"], WHOLE)
    assert not reg.verify(deep=True).findings


def test_a_write_that_landed_is_not_put_again(
    reg: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CS5: the answer to the put of the slot was lost, and another attempt begins.

    Meanwhile the checkpoint was evicted, so only its `write` tells that it was there.
    """
    append, lost = RunLog.append, []

    def lose(self: RunLog, compose: Any, **other: Any) -> Any:
        made = append(self, compose, **other)
        if self.run.checkpoints and not lost:
            lost.append(True)
            run = reg.run("run")
            first = run.latest()
            assert first is not None
            run.exchange.push({"x": 1}, step=2)
            run.retention.evict(first, reason="a test")
            raise Condemned([])
        return made

    monkeypatch.setattr(RunLog, "append", lose)
    made = together(group_of(2, WELL_S), saving(reg))
    assert lost
    assert [one.step for one in made] == [1, 1]
    adds = [
        a
        for c in reg.run("run").history.commits()
        for a in c.actions
        if isinstance(a, AddCheckpoint)
    ]
    assert [one.step for one in adds] == [1, 2]


@pytest.mark.parametrize("rank_0_dies", [False, True])
def test_a_repeat_that_only_took_the_run_over_is_found_by_its_write(
    reg: Registry, monkeypatch: pytest.MonkeyPatch, rank_0_dies: bool
) -> None:
    """CS5: the commit of such a repeat names no checkpoint, and no number of one."""
    first = together(group_of(2, WELL_S), saving(reg))[0]
    groups: list[Mortal] = mortals(2, WELL_S)
    append, lost = RunLog.append, []

    def lose(self: RunLog, compose: Any, **other: Any) -> Any:
        made = append(self, compose, **other)
        if not lost:
            lost.append(made.commits)
            groups[0]._die() if rank_0_dies else None
            raise Condemned([])
        return made

    monkeypatch.setattr(RunLog, "append", lose)
    found = together(groups, saving(reg))
    assert lost == [first.handle.n + 2], "the last commit is not the repeat: the test is void"
    assert isinstance(found[0], Died if rank_0_dies else Checkpoint)
    assert [one.handle.n for one in found[rank_0_dies:]] == [first.handle.n] * (2 - rank_0_dies)
