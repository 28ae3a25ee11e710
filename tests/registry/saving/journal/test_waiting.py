"""What is not a save waits for the saves before it, or is refused; it never comes before them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.distributed import ThreadGroup
from holdfast.registry.errors import Conflict, InvalidInput, OnlyLocal, RolledBack
from holdfast.registry.face.factory import open_on
from holdfast.registry.face.registry import Registry
from holdfast.registry.saving.journal.background import BackgroundCarrier
from holdfast.registry.saving.journal.carrier import Carrier
from holdfast.registry.saving.journal.folder import RunFolder
from holdfast.registry.saving.journal.pushing import push
from holdfast.registry.spec import Retention, RunSpec
from holdfast.registry.store.store import create_config
from tests.registry.saving.journal.machines import RUN, Machine, Outage, actions_of
from tests.support.faults import Hooked
from tests.support.inline import without_threads
from tests.support.sameness import assert_same
from tests.support.stores import contents, new_backend, opened

MONITOR = {"metric": "loss", "mode": "min"}
SPEC = RunSpec.of(
    {
        "phases": [{"name": "1", "monitors": [MONITOR]}, {"name": "2", "monitors": [MONITOR]}],
        "streams": [
            {"name": "samples", "lifetime": "resettable"},
            {"name": "loss", "lifetime": "forever"},
        ],
        "inference": ["model"],
        "pool": {"phase": "1", "size": 4},
        "pivot": {"rows": [{"part": "arms", "change": "reset"}]},
        "transitions": [
            {
                "from_phase": "1",
                "to_phase": "2",
                "source": "latest",
                "rows": [
                    {"part": "model", "change": "carry"},
                    {"part": "arms", "change": "carry"},
                ],
            }
        ],
    }
)


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": np.arange(50.0) + step}, "arms": {"wiki": step, "books": step}}


def save(run: Any, step: int) -> Any:
    streams = {name: [{"step": step, "arms": {f"arm{step}": 1}}] for name in ("samples", "loss")}
    return run.save(state(step), step=step, metrics={"loss": 1 / step}, streams=streams)


class Training:
    """A training whose first checkpoint is in the registry, and two more only in the journal."""

    def __init__(self, bucket: Hooked, path: Path) -> None:
        self.bucket = bucket
        self.machine = Machine(bucket, path)
        self.registry: Registry = self.machine.registry()
        self.run: Any = self.registry.run(RUN, create=True, seed=7, preset=SPEC)
        self.first = save(self.run, 1)
        self.machine.carry()
        self.second, self.third = save(self.run, 2), save(self.run, 3)

    def log(self) -> list[tuple[str, Any]]:
        """Return kind and step of every action in the registry, in order."""
        with without_threads(open_on(self.bucket)) as registry:
            commits = list(registry.run(RUN).history.commits())
        actions = [action for commit in commits for action in commit.actions]
        return [(one.action, getattr(one, "step", None)) for one in actions]


@pytest.fixture
def training(tmp_path: Path, by_hand: None) -> Training:
    return Training(Hooked(new_backend()), tmp_path / "journal")


@pytest.fixture
def carried(training: Training, monkeypatch: pytest.MonkeyPatch) -> Training:
    """The same, and its entries are carried as soon as something waits for them."""
    monkeypatch.setattr(BackgroundCarrier, "wake", lambda self: training.machine.carry())
    return training


def _evict(on: Training) -> None:
    on.run.retention.evict(on.first, "not needed")


def _archive(on: Training) -> None:
    on.run.streams["samples"].archive("old")


def _append(on: Training) -> None:
    on.run.streams["loss"].append({"step": 4})


def _publish(on: Training) -> None:
    on.run.releases.publish("1.0.0", on.first)


def _merge(on: Training) -> None:
    on.run.exchange.merge([on.first, on.third], step=4, pick={"arms": on.third})


def _set_status_elsewhere(on: Training) -> None:
    on.machine.run(preset=SPEC).status = "failed"


def _undo(on: Training) -> None:
    on.run.retention.undo(on.first)


#: What a program can do beside saving, with the action that this adds to the log.
ACTS: dict[str, tuple[Callable[[Training], object], str]] = {
    "transition": (lambda on: on.run.phases.transition(2), "phase.enter"),
    "pivot": (lambda on: on.run.phases.pivot("polish"), "phase.enter"),
    "push": (lambda on: on.run.exchange.push(state(4), step=4), "checkpoint.add"),
    "merge": (_merge, "checkpoint.add"),
    "tag": (lambda on: on.run.pins.tags.set("keeper", on.first), "tag.set"),
    "gate": (lambda on: on.run.pins.gates.set("end"), "pin.set"),
    "artifact": (lambda on: on.run.pins.artifacts.set("vocabulary", {"a": 1}), "pin.set"),
    "release": (_publish, "pin.set"),
    "promote": (lambda on: on.run.pool.promote(on.first), "pool.promote"),
    "evict": (_evict, "checkpoint.evict"),
    "stream": (_append, "stream.append"),
    "archive": (_archive, "stream.archive"),
    "status": (_set_status_elsewhere, "run.status"),
    "drop": (lambda on: on.run.retention.drop("a mistake"), "run.hide"),
}


@pytest.mark.parametrize("name", ACTS)
def test_it_comes_behind_the_saves_before_it(name: str, carried: Training) -> None:
    act, kind = ACTS[name]
    act(carried)
    log = carried.log()
    at = max(index for index, (found, _) in enumerate(log) if found == kind)
    assert log.index(("checkpoint.add", 2)) < log.index(("checkpoint.add", 3)) < at
    assert set(carried.machine.outcomes().values()) == {"carried"}


class Waits(Exception):
    """Somebody waits for the registry."""


@pytest.mark.parametrize("name", [*ACTS, "fork", "undo", "prune"])
def test_it_waits_while_the_registry_is_out_of_reach(
    name: str, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts = {
        "fork": lambda on: on.registry.fork(f"{RUN}/latest", "wide"),
        "undo": _undo,
        "prune": lambda on: on.run.retention.prune(Retention(last=1)),
        **{name: act for name, (act, _) in ACTS.items()},
    }

    def wait(self: BackgroundCarrier, most_s: float) -> None:
        raise Waits

    monkeypatch.setattr(BackgroundCarrier, "sleep", wait)
    before = training.log()
    with pytest.raises(Waits):
        acts[name](training)
    assert training.log() == before
    assert training.machine.folder.waiting() == [2, 3]


@pytest.mark.parametrize(
    "act",
    [
        lambda on: on.second.report({"loss": 1}),
        lambda on: on.run.pins.tags.set("keeper", on.second),
        lambda on: on.run.pins.gates.set("end", on.second),
        lambda on: on.run.retention.evict(on.second, "not needed"),
        lambda on: on.run.retention.undo(on.second),
        lambda on: on.run.releases.publish("1.0.0", on.second),
        lambda on: on.run.pool.promote(on.second),
        lambda on: on.registry.fork(on.second, "wide"),
        lambda on: on.run.restore(at=on.second),
    ],
)
def test_a_name_for_a_checkpoint_that_is_only_here_is_refused(
    act: Callable[[Training], object], training: Training
) -> None:
    before = contents(training.bucket)
    with pytest.raises(OnlyLocal, match=r"run\.wait\(remote=True\)"):
        act(training)
    assert contents(training.bucket) == before


def test_the_default_gate_is_the_best_of_all_saves(carried: Training) -> None:
    assert carried.run.pins.gates.set("end").step == 3


def test_a_fork_by_a_ref_has_the_saves_before_it(carried: Training) -> None:
    assert carried.registry.fork(f"{RUN}/latest", "wide").restore().checkpoint.step == 3


def test_an_undo_is_of_the_evictions_of_the_saves_before_it(
    carried: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = carried.registry.run("other", create=True, seed=7, retention=Retention(last=1))
    carrier = Carrier(
        carried.registry.handle.store,
        RunFolder(carried.machine.journal, carried.registry.id, "other"),
    )
    monkeypatch.setattr(BackgroundCarrier, "sleep", lambda self, most_s: carrier.carry())
    for step in (1, 2):
        run.save(state(step), step=step)
    assert [one.step for one in run.retention.undo()] == [1]


def test_entries_of_a_stream_keep_their_order(carried: Training) -> None:
    carried.run.streams["loss"].append({"step": 4})
    assert [one["step"] for one in carried.run.streams["loss"].read()] == [1, 2, 3, 4]


def test_a_commit_knows_the_saves_that_were_carried_meanwhile(training: Training) -> None:
    training.machine.carry()
    training.run.retention.evict(
        training.first, "not needed"
    )  # by the log that this handle read it is best


def test_a_save_is_refused_at_once_after_what_this_handle_did(carried: Training) -> None:
    carried.run.retention.drop("a mistake")
    with pytest.raises(Conflict, match="a mistake"):
        save(carried.run, 4)
    assert carried.machine.folder.waiting() == []


def test_a_save_after_another_commit_needs_no_registry(
    carried: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried.run.pins.tags.set("keeper", carried.first)
    monkeypatch.setattr(BackgroundCarrier, "wake", lambda self: None)
    outage = Outage()
    outage.is_down, carried.bucket.before = True, outage
    assert save(carried.run, 4).durable_in == "journal"


def test_a_wait_does_not_include_saves_that_come_after_it(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that saves without end, faster than its saves are carried."""
    other = training.machine.run(preset=SPEC)
    other.restore()
    steps = iter(range(4, 100))

    def carry_one_and_save_one(self: BackgroundCarrier, most_s: float) -> None:
        goes = iter([True])
        training.machine.carrier().carry(lambda: next(goes, False))
        save(training.run, next(steps))

    monkeypatch.setattr(BackgroundCarrier, "sleep", carry_one_and_save_one)
    other.pins.tags.set("keeper", training.first)
    assert training.machine.folder.waiting() == [4, 5]


def _lives(registry: Registry, carry: Callable[[], object]) -> Any:
    """Live through phases and pivots; a new process begins after each."""
    run = registry.run(RUN, create=True, seed=7, preset=SPEC)
    for step in (1, 2):
        save(run, step)
    run.phases.pivot("polish", initialise={"arms": lambda: {"wiki": 0}})
    run = registry.run(RUN)
    restored = run.restore()
    assert (restored.checkpoint.step, restored.pivot) == (2, "polish")
    assert list(restored.state) == ["model"]
    for step in (3, 4):
        save(run, step)
    run.phases.transition(2)
    run = registry.run(RUN)
    assert run.phases.transition(2).checkpoint.step == 4  # the same again, until the first save
    save(run, 5)
    run.phases.pivot("more")
    save(run, 6)
    run.phases.pivot("more")  # the same again does nothing
    run = registry.run(RUN)
    assert run.restore().pivot is None
    carry()
    return run


def test_phases_and_pivots_are_the_same_with_and_without_a_journal(
    tmp_path: Path, by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, direct = new_backend(), new_backend()
    machine = Machine(bucket, tmp_path / "journal")
    monkeypatch.setattr(BackgroundCarrier, "sleep", lambda self, most_s: machine.carry())
    _lives(machine.registry(), machine.carry)
    with opened(direct) as registry:
        _lives(registry, lambda: None)
    with opened(bucket) as journaled, opened(direct) as plain:
        ours, theirs = journaled.run(RUN), plain.run(RUN)
        assert [one.digest for one in ours.checkpoints()] == [
            one.digest for one in theirs.checkpoints()
        ]
        for one, other in zip(ours.checkpoints(), theirs.checkpoints(), strict=True):
            assert_same(one.load(), other.load())
        assert _phases(ours) == _phases(theirs)
        for name in ("samples", "loss"):
            assert ours.streams[name].archives == theirs.streams[name].archives
            assert ours.streams[name].read() == theirs.streams[name].read()
        assert ours.streams["loss"].count == 6
        assert actions_of(bucket, "run.rewind") == actions_of(direct, "run.rewind")
        assert journaled.verify(deep=True).findings == ()


def _phases(run: Any) -> list[tuple[Any, ...]]:
    return [
        (one.from_phase, one.to_phase, one.name, one.manifest, one.rows, one.superseded)
        for one in run.manifest.phases
    ]


def test_a_pivot_from_an_older_checkpoint_supersedes_the_saves_after_it(carried: Training) -> None:
    carried.run.restore(at=carried.first)
    assert carried.run.phases.pivot("polish").checkpoint.step == 1
    save(carried.run, 5)
    carried.machine.carry()
    assert [one.step for one in carried.run.checkpoints()] == [1, 5]


def test_a_pivot_after_a_restart_is_of_the_newest_save(carried: Training) -> None:
    run = carried.machine.run(preset=SPEC)
    assert run.restore().checkpoint.step == 3
    assert run.phases.pivot("polish").checkpoint.step == 3
    save(run, 4)
    carried.machine.carry()
    assert [one.step for one in run.checkpoints()] == [1, 2, 3, 4]


def test_a_run_is_not_begun_while_its_saves_are_only_here(training: Training) -> None:
    run = training.machine.registry().run("other", create=True, seed=7)
    run.save(state(1), step=1)
    again = training.machine.registry().run("other")
    with pytest.raises(Conflict, match="at step 1"):
        again.phases.start("fresh")


# A save that repeats one


def _collect(on: Training) -> None:
    with without_threads(open_on(on.bucket)) as registry:
        registry.run(RUN).retention.evict(on.first, "not needed")
        registry.gc(grace_s=0)


def _drop(on: Training) -> None:
    with without_threads(open_on(on.bucket)) as registry:
        registry.run(RUN).retention.drop("a mistake")


def _rewind(on: Training) -> None:
    with without_threads(open_on(on.bucket)) as registry:
        other = registry.run(RUN)
        other.restore(at=other.checkpoints()[0])
        other.save(state(22), step=2)


def test_names_from_an_iterator_outlive_the_way_to_the_registry(training: Training) -> None:
    assert training.second.components  # its manifest is known
    training.machine.carry()
    loaded = training.second.load(only=iter(["model", "arms"]))
    assert_same(loaded, state(2))


@pytest.mark.parametrize(
    ("act", "step", "outcome"),
    [(_collect, 1, "carried"), (_drop, 3, "refused"), (_rewind, 3, "stranded")],
)
def test_a_save_that_repeats_one_is_judged_by_the_log(
    act: Callable[[Training], object],
    step: int,
    outcome: str,
    training: Training,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training.machine.carry()
    act(training)  # which this handle has not read
    saved = training.run.save(state(step), step=step)
    assert saved.durable_in == "journal"
    durable: list[str] = []
    monkeypatch.setattr(training.bucket.inner, "make_durable", durable.extend)
    training.machine.carry()
    assert training.machine.outcomes()[4] == outcome
    if outcome == "carried":
        training.run.wait(remote=True)
        assert_same(saved.load(), state(step))
        assert training.run.checkpoints()[-1] == saved
    else:
        # A loss of power must not undo what it was judged by.
        assert max(contents(training.bucket, f"runs/{RUN}/log/")) in durable
        with pytest.raises(Conflict):
            training.run.wait(remote=True)


# A registry that is gone


def test_a_registry_that_was_replaced_is_told_at_once(training: Training) -> None:
    for key in list(contents(training.bucket)):
        training.bucket.delete(key)
    create_config(training.bucket, "skipped")
    for _ in range(2):  # as the thread would
        with pytest.raises(RolledBack) as told:
            Carrier(training.registry.handle.store, training.machine.folder).carry()
    with pytest.raises(RolledBack, match="push RUN FORK --to URL"):
        training.machine.carry()
    training.run.handle.journal.line.carrier.error = told.value
    with pytest.raises(RolledBack):
        training.run.wait(remote=True)
    assert training.machine.folder.waiting() == [2, 3]


# Sources of streams


def _arms(run: Any, *known: str) -> tuple[str, ...]:
    return run.restore(sources={"streams/samples/arms": known}).stale


def test_stale_names_are_found_in_entries_that_are_only_here(training: Training) -> None:
    run = training.machine.run(preset=SPEC)
    assert _arms(run, "arm1") == ("streams/samples/arms/arm3",)
    assert _arms(run, "arm3") == ()
    training.machine.carry()
    assert _arms(run, "arm1") == ("streams/samples/arms/arm3",)


def test_stale_names_are_those_of_the_line_that_is_continued(training: Training) -> None:
    run = training.machine.run(preset=SPEC)
    run.restore(at=training.first)
    run.save(state(9), step=9)  # without entries
    again = training.machine.run(preset=SPEC)
    assert _arms(again, "arm0") == ("streams/samples/arms/arm1",)
    save(again, 10)
    run = training.machine.run(preset=SPEC)
    assert _arms(run, "arm0") == ("streams/samples/arms/arm10",)
    run.save(state(11), step=11)
    run.save(state(11), step=11, metrics={"loss": 2.0}, streams={"samples": [{"step": 11}]})
    assert _arms(training.machine.run(preset=SPEC), "arm0") == ("streams/samples/arms/arm10",)


@pytest.mark.parametrize("at", range(1, 9))
def test_a_restart_misses_no_save_that_is_carried_while_it_looks(
    at: int, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, list_waiting = itertools.count(1), RunFolder.waiting

    def carried_behind(self: RunFolder) -> list[int]:
        found = list_waiting(self)
        if next(calls) == at:
            training.machine.carry()
        return found

    with monkeypatch.context() as carrying:
        carrying.setattr(RunFolder, "waiting", carried_behind)
        run = training.machine.run(preset=SPEC)
        assert run.restore().checkpoint.step == 3
        save(run, 4)
    training.machine.carry()
    assert [one.step for one in run.checkpoints()] == [1, 2, 3, 4]
    assert actions_of(training.bucket, "run.rewind") == []


@pytest.mark.parametrize("of_run", [True, False], ids=["the run", "a checkpoint"])
def test_a_rewind_that_waited_is_refused_by_a_hold_and_its_saves_go_into_a_fork(
    training: Training, of_run: bool
) -> None:
    training.machine.carry()
    run = training.machine.run(preset=SPEC)
    run.restore(at=run.checkpoints()[0])
    save(run, 8)
    save(run, 9)
    with without_threads(open_on(training.bucket)) as reg:
        held = reg.run("run")
        one = None if of_run else held.checkpoints()[1]
        held.retention.hold(one, until=datetime(2100, 1, 1, tzinfo=UTC), reason="an audit")
    training.machine.carry()
    assert training.machine.outcomes() == {4: "refused", 5: "refused"}
    with without_threads(open_on(training.bucket)) as reg:
        held = reg.run("run")
        assert [one.step for one in held.checkpoints()] == [1, 2, 3]
        assert len(held.retention.holds()) == 1
        for name in ("samples", "loss"):
            assert [entry["step"] for entry in held.streams[name].read()] == [1, 2, 3]
        fork = reg.fork("run/1/step1", "fork")
        push(fork.handle.committer, training.machine.folder)
        assert [one.step for one in fork.checkpoints()] == [1, 8, 9]
        assert [entry["step"] for entry in fork.streams["loss"].read()] == [1, 8, 9]
    again = training.machine.run(preset=SPEC)
    assert again.restore().checkpoint.step == 3
    again.restore(at=again.checkpoints()[0])
    with pytest.raises(Conflict, match=r"a hold forbids this.*an audit"):
        save(again, 9)


def test_ranks_that_save_together_are_told_to_carry_the_journal_first(tmp_path: Path) -> None:
    holdfast.init(tmp_path / "registry").close()
    [group] = ThreadGroup.make(1)
    with (
        holdfast.open(tmp_path / "registry", journal=str(tmp_path / "journal")) as reg,
        pytest.raises(InvalidInput, match="holdfast journal push"),
    ):
        reg.run("run", create=True, group=group)
