"""Replay: folding slots is associative, every rule of a legal history is checked, best is pure."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.registry.errors import Damaged, Malformed
from holdfast.registry.history.actions import (
    AddCheckpoint,
    Commit,
    CreateRun,
    Mark,
    RemoveTag,
    ReportMetrics,
    Rewind,
    SetStatus,
    SetTag,
    TakeOver,
    line_digest,
)
from holdfast.registry.history.replay import RunManifest, Slot, advance
from holdfast.registry.objects.framing import join_lines
from holdfast.registry.spec.policies import Monitor
from holdfast.registry.values.digest import Digest
from tests.support.lives import digest, place
from tests.support.strategies import quick

CREATE = CreateRun(config=None, config_hash=Digest.of(b""), seed="0" * 16, environment={})
START = RunManifest(run_id="r")


def add(i: int, phase: str = "main", **metrics: float) -> AddCheckpoint:
    return AddCheckpoint(manifest=digest(i), phase=phase, step=i, metrics=metrics, size_bytes=10)


class History:
    """A legal log as it grows: one call, one slot."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.commits = 0
        self.head: Digest | None = None

    def commit(self, *actions, **changes) -> Commit:
        fields = {
            "n": self.commits,
            "run": "r",
            "prev": self.head,
            "write": f"w{self.commits}",
            "author": "me@here",
            "time_ms": 1000 + self.commits,
            "actions": actions,
        }
        return Commit(**(fields | changes))

    def put(self, *lines) -> History:
        slot = Slot.build(len(self.slots), lines)
        for raw, _ in slot.commits:
            self.commits += 1
            self.head = line_digest(raw)
        self.slots.append(slot)
        return self

    def then(self, *actions) -> History:
        return self.put(self.commit(*actions))

    @property
    def run(self) -> RunManifest:
        return advance(START, self.slots)


def begun() -> History:
    return History().then(CREATE)


@st.composite
def histories(draw):
    history = begun()
    known: list[int] = []
    for i in range(1, draw(st.integers(0, 10)) + 1):
        kind = draw(st.sampled_from(["add", "add", "two", "mark", "place", "status", "more"]))
        if kind == "mark":
            history.put(Mark(epoch=draw(st.integers(1, 5))))
            continue
        if kind == "place":
            history.put(place(digest(draw(st.integers(0, 5))), generation=draw(st.integers(0, 3))))
            continue
        if kind == "status":
            history.then(
                SetStatus(status=draw(st.sampled_from(["running", "failed", "completed"])))
            )
            continue
        if kind == "more" and known:
            target = draw(st.sampled_from(known))
            history.then(
                draw(
                    st.sampled_from(
                        [
                            Rewind(to=target),
                            Rewind(),
                            SetTag(name=f"t{target % 2}", checkpoint=target),
                            ReportMetrics(checkpoint=target, metrics={"loss": float(i)}),
                            TakeOver(token=f"t{i}", host="h"),
                        ]
                    )
                )
            )
            continue
        known.append(history.commits)
        line = history.commit(add(i, loss=float(-i)))
        if kind == "two":
            after = Commit(
                n=line.n + 1,
                run="r",
                prev=line_digest(line.encode()),
                write="x",
                author="a",
                time_ms=1,
                actions=(TakeOver(token="t", host="h"),),
            )
            history.put(place(digest(i)), line, after)
        else:
            history.put(place(digest(i)), line)
    return history.slots


@quick
@given(histories(), st.data())
def test_folding_at_once_slot_by_slot_or_from_a_snapshot_is_the_same(slots, data):
    whole = advance(START, slots)
    step = START
    for slot in slots:
        step = advance(step, [slot])
    assert step == whole
    cut = data.draw(st.integers(0, len(slots)))
    snapshot = RunManifest.decode(advance(START, slots[:cut]).encode(), where="x")
    assert advance(snapshot, slots[cut:]) == whole
    assert advance(snapshot, slots[cut:]).encode() == whole.encode()


@quick
@given(histories())
def test_a_run_manifest_comes_back(slots):
    run = advance(START, slots)
    assert RunManifest.decode(run.encode(), where="x") == run


@quick
@given(histories())
def test_a_slot_comes_back(slots):
    for slot in slots:
        assert Slot.decode(slot.number, slot.data, where="x") == slot


def test_folding_does_not_change_the_state_it_starts_from():
    history = begun().put(place(digest(1)), History.commit(begun(), add(1)))
    before = history.run
    frozen = before.encode()
    history.then(Rewind()).then(SetTag(name="t", checkpoint=1)).put(place(digest(1), generation=7))
    after = advance(before, history.slots[2:])
    assert before.encode() == frozen
    assert (after.tags, after.by_n[1].superseded) == ({"t": 1}, True)
    assert before.by_manifest[digest(1)] == place(digest(1))
    assert after.by_manifest[digest(1)] == place(digest(1), generation=7)


# What the actions mean


def test_a_run_begins_running_and_knows_its_beginning():
    run = begun().run
    assert (run.status, run.created, run.created_ms) == ("running", CREATE, 1000)
    assert (run.next_slot, run.commits, run.writer) == (1, 1, None)
    assert run.latest() is None


def test_a_checkpoint_is_named_by_its_commit_and_keeps_what_was_said():
    action = AddCheckpoint(
        manifest=digest(5), phase="2", step=7, metrics={"a": 1.0}, meta={"d": []}, size_bytes=9
    )
    record = begun().then(action).run.latest()
    assert (record.n, record.manifest, record.phase, record.step) == (1, digest(5), "2", 7)
    assert (record.metrics, record.meta, record.size_bytes) == ({"a": 1.0}, {"d": []}, 9)
    assert (record.time_ms, record.superseded) == (1001, False)


def test_latest_is_the_last_live_checkpoint_in_log_order_whatever_its_step():
    run = begun().then(add(9)).then(add(3)).then(add(5, "two")).run
    assert run.latest().step == 5
    assert run.latest("main").step == 3
    assert run.latest("none") is None
    assert [record.step for record in run.live("main")] == [9, 3]


def test_a_rewind_supersedes_what_came_after_and_no_more():
    run = begun().then(add(1)).then(add(2)).then(add(3)).then(Rewind(to=2), add(4)).run
    assert [record.n for record in run.live()] == [1, 2, 4]
    assert run.by_n[3].superseded
    assert run.latest().n == 4


def test_a_rewind_to_nothing_supersedes_everything_before_it():
    run = begun().then(add(1)).then(Rewind(), add(2)).run
    assert [record.n for record in run.live()] == [2]


def test_metrics_are_merged_and_the_newest_value_stands():
    run = begun().then(add(1, a=1.0, b=2.0)).run
    run = (
        begun()
        .then(add(1, a=1.0, b=2.0))
        .then(ReportMetrics(checkpoint=1, metrics={"b": 3.0, "c": 4.0}))
        .run
    )
    assert run.by_n[1].metrics == {"a": 1.0, "b": 3.0, "c": 4.0}


def test_a_tag_moves_and_may_name_what_is_superseded():
    history = begun().then(add(1)).then(add(2)).then(SetTag(name="t", checkpoint=1))
    assert history.run.tags == {"t": 1}
    assert history.then(SetTag(name="t", checkpoint=2), Rewind(to=1)).run.tags == {"t": 2}


def test_a_tag_that_is_removed_holds_nothing():
    history = begun().then(add(1)).then(add(2))
    before = history.run
    history.then(SetTag(name="t", checkpoint=1))
    assert history.run.uses != before.uses
    after = history.then(RemoveTag(name="t")).run
    assert (after.tags, after.pinned, after.uses) == ({}, {}, before.uses)
    assert history.then(SetTag(name="t", checkpoint=2)).run.tags == {"t": 2}


def test_a_take_over_names_writer_host_and_time():
    writer = begun().then(TakeOver(token="tok", host="gpu7")).run.writer
    assert (writer.token, writer.host, writer.time_ms) == ("tok", "gpu7", 1001)


def test_an_older_mark_after_a_newer_one_takes_nothing_back():
    assert begun().put(Mark(epoch=4)).put(Mark(epoch=2)).run.epoch == 4


def test_the_last_place_of_a_manifest_wins():
    run = begun().put(place(digest(1))).put(place(digest(1), generation=3)).run
    assert run.by_manifest == {digest(1): place(digest(1), generation=3)}


LOW, HIGH = Monitor(metric="m", mode="min"), Monitor(metric="m", mode="max")


def _rated(*values):
    history = begun()
    for i, value in enumerate(values):
        history.then(add(i) if value is None else add(i, m=value))
    return history


@pytest.mark.parametrize(
    ("values", "lowest", "highest"),
    [
        ((3.0, 1.0, 2.0), 1, 0),
        ((1.0, 1.0), 0, 0),
        ((math.nan, 5.0, None), 1, 1),
        ((None, math.nan), None, None),
        ((), None, None),
        ((0.0, -0.0), 0, 0),
        ((math.inf, -math.inf), 1, 0),
        ((math.inf, math.nan), 0, 0),
        ((None, 2.0, None, 1.0, None, 3.0, math.nan), 3, 5),
    ],
)
def test_the_best_value_wins_and_nan_and_missing_never_do(values, lowest, highest):
    run = _rated(*values).run
    for monitor, expected in ((LOW, lowest), (HIGH, highest)):
        found = run.best(monitor)
        assert (None if found is None else found.step) == expected


def test_what_is_superseded_is_never_best():
    run = _rated(5.0, 1.0).then(Rewind(to=1)).run
    assert run.best(LOW).step == 0


def test_best_is_within_a_phase():
    run = begun().then(add(1, "a", m=1.0)).then(add(2, "b", m=2.0)).run
    assert run.best(LOW, "b").step == 2


# What makes a history illegal


def _illegal():
    two = begun().then(add(1))
    other_run = two.commit(add(2), run="other")
    yield "a gap", lambda: advance(START, [two.slots[1]]), "a gap before it at 0"
    yield "again", lambda: advance(two.run, [two.slots[1]]), "a gap before it at 2"
    yield "other run", lambda: two.put(other_run).run, "a commit of run other"
    yield "n skipped", lambda: _then(commit={"n": 3}), "commit 3 instead of 2"
    yield "n again", lambda: _then(commit={"n": 1}), "commit 1 instead of 2"
    yield "not chained", lambda: _then(commit={"prev": digest(0)}), "does not chain"
    yield "no link", lambda: _then(commit={"prev": None}), "does not chain"
    yield (
        "no beginning",
        lambda: History().then(SetStatus(status="failed")).run,
        "created by commit 0",
    )
    yield "nothing at all", lambda: History().then().run, "created by commit 0"
    yield "link in commit 0", lambda: _first(prev=digest(1)), "does not chain"
    yield "begun later", lambda: begun().then(CREATE).run, "created by commit 0"
    yield "created twice", lambda: History().then(CREATE, CREATE).run, "created twice"
    yield (
        "begun again",
        lambda: begun().then(SetStatus(status="failed"), CREATE).run,
        "created twice",
    )
    yield (
        "checkpoint in commit 0",
        lambda: History().then(CREATE, add(1)).run,
        "references a manifest",
    )
    yield "two in one", lambda: begun().then(add(1), add(2)).run, "two checkpoints in one commit"
    yield "rewind to nothing", lambda: begun().then(Rewind(to=5)).run, "checkpoint of commit 5"
    yield (
        "tag of nothing",
        lambda: begun().then(SetTag(name="t", checkpoint=0)).run,
        "which added none",
    )
    yield (
        "tag that is not there",
        lambda: begun().then(add(1)).then(RemoveTag(name="t")).run,
        "no tag t to remove",
    )
    yield (
        "report of nothing",
        lambda: begun().then(ReportMetrics(checkpoint=1, metrics={})).run,
        "which added none",
    )


def _then(commit):
    history = begun().then(add(1))
    return history.put(history.commit(add(2), **commit)).run


def _first(**changes):
    history = History()
    return history.put(history.commit(CREATE, **changes)).run


@pytest.mark.parametrize(
    ("fold", "rule"),
    [(fold, rule) for _, fold, rule in _illegal()],
    ids=[n for n, *_ in _illegal()],
)
def test_each_rule_of_history_is_checked(fold, rule):
    with pytest.raises(Malformed, match=rf"r: slot \d.*the history is not legal.*{rule}"):
        fold()


def test_a_damaged_slot_is_named():
    data = bytearray(begun().slots[0].data)
    data[3] ^= 1
    with pytest.raises(Damaged, match="the/key"):
        Slot.decode(0, bytes(data), where="the/key")


def test_commits_are_given_with_their_exact_bytes():
    history = begun()
    line = history.commit(add(1)).encode()
    slot = Slot.build(1, [Mark(epoch=1), line, place(digest(1))])
    assert [raw for raw, _ in slot.commits] == [line]
    assert slot.data == join_lines([Mark(epoch=1).encode(), line, place(digest(1)).encode()])
