"""The lines of a slot: a closed union, with one byte string for each line."""

from __future__ import annotations

import math
from typing import get_args

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from holdfast.registry.errors import Malformed, UnsupportedFormat
from holdfast.registry.history.actions import (
    Acknowledge,
    Action,
    AddCheckpoint,
    AppendStream,
    AppliedRow,
    ArchiveStream,
    Claim,
    Commit,
    CommitKeys,
    CreateRun,
    DropRun,
    EnterPhase,
    Evict,
    EvictEntries,
    Eviction,
    HideRun,
    Mark,
    Parent,
    Place,
    PointRelease,
    Promote,
    RaiseVersion,
    Rated,
    RateMatch,
    Recover,
    RemoveHold,
    RemoveTag,
    ReportMetrics,
    Rewind,
    SetHold,
    SetLabels,
    SetNote,
    SetPin,
    SetStatus,
    SetTag,
    TakeOver,
    Thin,
    Thinning,
    UndropRun,
    decode_line,
    line_digest,
)
from holdfast.registry.spec import Retention, RunSpec
from holdfast.registry.spec.policies import Monitor
from holdfast.registry.values import canonical
from holdfast.registry.values.digest import Digest
from tests.support.strategies import digests, json_values, quick, texts

floats = st.floats(allow_nan=False)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
numbers = st.integers(0, 99)
steps = st.integers(0, 2**53)
versions = st.integers(1, 2**31)
metrics = st.dictionaries(texts, floats, max_size=3)


def several(one, least: int = 0):
    return st.lists(one, min_size=least, max_size=3).map(tuple)


monitors = st.builds(
    Monitor, metric=texts, mode=st.sampled_from(["min", "max"]), name=st.none() | texts
)
specs = st.builds(
    RunSpec,
    name=texts,
    monitors=several(monitors).map(lambda some: some[:1]),
    retention=st.builds(Retention, last=st.integers(1, 9), every=st.none() | versions, wait=numbers)
    | st.none(),
    commit_keys=several(texts),
    layout=st.dictionaries(texts, texts, max_size=2),
)
KINDS = (
    st.builds(
        CreateRun,
        config=json_values,
        config_hash=digests,
        input_hash=st.none() | texts,
        seed=st.integers(0, 2**64 - 1).map(lambda seed: f"{seed:016x}"),
        environment=st.dictionaries(texts, texts, max_size=2),
        monitors=several(monitors),
        spec=st.none() | specs,
        parent=st.none()
        | st.builds(
            Parent,
            run=names,
            commit=numbers,
            head=digests,
            checkpoint=digests,
            phase=names,
            step=steps,
        ),
        owner=st.none() | names,
        project=st.none() | st.just("vision/det@2"),
        labels=st.none() | several(names, 1),
        total_steps=st.none() | st.integers(1, 2**63 - 1),
    ),
    st.builds(SetStatus, status=st.sampled_from(["running", "interrupted", "completed", "failed"])),
    st.builds(TakeOver, token=texts, host=texts),
    st.builds(Rewind, to=st.none() | st.integers(0, 99)),
    st.builds(
        AddCheckpoint,
        manifest=digests,
        phase=names,
        step=steps,
        metrics=metrics,
        meta=json_values,
        size_bytes=steps,
        tier=st.none() | names,
        companions=st.none() | st.dictionaries(names, digests, max_size=2),
        # What a save moves is a dict: nothing at all could not be told from an absent field.
        commit_keys=st.none()
        | st.builds(
            CommitKeys,
            order=several(texts),
            values=json_values.filter(lambda value: value is not None),
        ),
        nonfinite=st.none() | several(texts),
        held_back=st.none() | st.booleans(),
    ),
    st.builds(ReportMetrics, checkpoint=numbers, metrics=metrics, tier=st.none() | names),
    st.builds(Evict, evictions=several(st.builds(Eviction, checkpoint=numbers, reason=texts), 1)),
    st.builds(
        Thin,
        thinnings=several(
            st.builds(Thinning, checkpoint=numbers, keep=several(texts, 1), reason=texts), 1
        ),
    ),
    st.builds(Recover, checkpoints=several(numbers, 1)),
    st.builds(SetTag, name=names, checkpoint=numbers),
    st.builds(RemoveTag, name=names),
    st.builds(SetHold, checkpoint=st.none() | numbers, until_ms=numbers, reason=texts),
    st.builds(RemoveHold, checkpoint=st.none() | numbers, reason=st.none() | texts),
    st.builds(SetNote, checkpoint=st.none() | numbers, text=texts),
    st.builds(SetLabels, labels=several(st.just("prod"), 0)),
    st.builds(
        SetPin,
        kind=st.sampled_from(["gate", "release", "artifact"]),
        name=names | st.just("1.2.0-rc.1+build"),
        manifest=digests,
        checkpoint=st.none() | numbers,
        metrics=metrics,
        card=st.none() | digests,
        replaces=st.none() | digests,
    ),
    st.builds(PointRelease, version=texts, reason=texts),
    st.builds(
        EnterPhase,
        from_phase=names,
        to_phase=names,
        source=texts,
        manifest=digests,
        rows=several(
            st.builds(
                AppliedRow,
                part=texts,
                change=st.sampled_from(["carry", "reset", "freeze", "reseed", "discard"]),
                to=st.none() | texts,
            )
        ),
        enabled=several(texts),
        ready=metrics,
        companions=st.dictionaries(names, digests, max_size=2),
        config=st.none() | st.just({"d": [["floor", 1]]}),
        meta=st.none() | st.just("text"),
    ),
    st.builds(DropRun, reason=texts),
    st.builds(HideRun, reason=texts),
    st.builds(UndropRun),
    st.builds(RaiseVersion, version=numbers | st.just("1.2.0")),
    st.builds(
        Promote,
        version=versions,
        manifest=digests,
        checkpoint=st.none() | numbers,
        gate=st.none() | names,
        phase=names,
        step=steps,
        mu=floats,
        sigma=floats,
        frozen=st.booleans(),
    ),
    st.builds(
        RateMatch,
        match=st.text("abc0-", min_size=1, max_size=128),
        ratings=several(
            st.builds(
                Rated, version=versions, mu=floats, sigma=floats, games=numbers, wins=numbers
            ),
            1,
        ),
    ),
    st.builds(EvictEntries, versions=several(versions, 1), reason=texts),
    st.builds(
        AppendStream,
        stream=names,
        lifetime=st.sampled_from(["forever", "resettable"]),
        manifest=digests,
        start=numbers,
        count=versions,
        first_step=steps,
        last_step=steps,
    ),
    st.builds(ArchiveStream, stream=names, label=names),
    st.builds(Claim, group=names, checkpoint=numbers, follower=texts, until_ms=steps),
    st.builds(Acknowledge, group=names, checkpoint=numbers, follower=texts),
)
actions = st.one_of(KINDS)
lines = st.one_of(
    st.builds(
        Commit,
        n=st.integers(0, 99),
        run=names,
        prev=st.none() | digests,
        write=texts,
        author=texts,
        time_ms=st.integers(0, 2**53),
        actions=st.lists(actions, max_size=3).map(tuple),
    ),
    st.builds(
        Place,
        manifest=digests,
        manifest_generation=st.integers(0, 99),
        placement=digests,
        placement_generation=st.integers(0, 99),
    ),
    st.builds(Mark, epoch=st.integers(1, 2**53)),
)


@quick
@given(lines)
def test_a_line_comes_back_with_its_bytes(line):
    read = decode_line(line.encode(), where="x")
    assert read == line
    assert type(read) is type(line)
    assert read.encode() == line.encode()


def test_every_action_is_among_those_that_come_back():
    drawn = settings(phases=[Phase.generate], max_examples=10, database=None)
    kinds = {type(find(one, lambda _: True, settings=drawn)) for one in KINDS}
    assert kinds == {*get_args(get_args(Action)[0])}


@pytest.mark.parametrize("value", [None, {"a": None}, [None, {"b": [None]}], "", 0, False])
def test_nothing_within_a_plain_value_is_left_out(value):
    action = AddCheckpoint(manifest=Digest.of(b""), phase="p", step=0, meta=value, size_bytes=0)
    line = _commit([action])
    assert decode_line(line, where="x").actions[0].meta == value


def test_a_metric_that_is_not_a_number_survives():
    line = _commit([ReportMetrics(checkpoint=1, metrics={"m": math.nan})])
    assert math.isnan(decode_line(line, where="x").actions[0].metrics["m"])


def _commit(some=()) -> bytes:
    return Commit(n=0, run="r", write="w", author="a", time_ms=1, actions=tuple(some)).encode()


def _changed(**changes) -> bytes:
    body = canonical.decode(_commit([SetStatus(status="failed")]), where="x")
    return canonical.encode({**body, **changes})


ADD = AddCheckpoint(manifest=Digest.of(b""), phase="p", step=0, size_bytes=0).to_json()

UNKNOWN = {
    "kind": (_changed(kind="evict"), "evict"),
    "kind of nothing else": (b'{"kind":"later"}', "later"),
    "action": (_changed(actions=[{"action": "pin.move"}]), r"pin\.move"),
    "second action": (_changed(actions=[ADD, {"action": "pin.move"}]), r"pin\.move"),
}


@pytest.mark.parametrize(("line", "found"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_an_unknown_kind_is_an_error_and_is_named(line, found):
    with pytest.raises(UnsupportedFormat, match=rf"the/key.*found {found}.*upgrade"):
        decode_line(line, where="the/key")


BROKEN = {
    "not an object": b"[]",
    "a number": b"5",
    "unknown field": _changed(more=1),
    "unknown field of an action": _changed(actions=[ADD | {"more": 1}]),
    "n negative": _changed(n=-1),
    "n a string": _changed(n="0"),
    "n a flag": _changed(n=True),
    "prev malformed": _changed(prev="ab"),
    "no run": b'{"actions":[],"author":"a","kind":"commit","n":0,"time_ms":1,"write":"w"}',
    "actions no list": _changed(actions=5),
    "step negative": _changed(actions=[ADD | {"step": -1}]),
    "step of a later version": _changed(actions=[ADD | {"step": "1"}]),
    "phase with a slash": _changed(actions=[ADD | {"phase": "a/b"}]),
    "phase with a newline": _changed(actions=[ADD | {"phase": "a\n"}]),
    "metric malformed": _changed(actions=[ADD | {"metrics": {"m": "zz"}}]),
    "size negative": _changed(actions=[ADD | {"size_bytes": -1}]),
    "status unknown": _changed(actions=[{"action": "run.status", "status": "paused"}]),
    "tag of two segments": _changed(
        actions=[{"action": "tag.set", "checkpoint": 1, "name": "a/b"}]
    ),
    "eviction of nothing": _changed(actions=[{"action": "checkpoint.evict", "evictions": []}]),
    "recovery of nothing": _changed(actions=[{"action": "checkpoint.recover", "checkpoints": []}]),
    "pin of an unknown kind": _changed(
        actions=[{"action": "pin.set", "kind": "tag", "manifest": "0" * 64, "name": "a"}]
    ),
    "pin with a slash": _changed(
        actions=[{"action": "pin.set", "kind": "gate", "manifest": "0" * 64, "name": "a/b"}]
    ),
    "companion with a slash": _changed(actions=[ADD | {"companions": {"a/b": "0" * 64}}]),
    "commit keys without an order": _changed(actions=[ADD | {"commit_keys": {"values": None}}]),
    "pool version 0": _changed(actions=[{"action": "pool.evict", "reason": "", "versions": [0]}]),
    "match without a name": _changed(actions=[{"action": "pool.rate", "match": "", "ratings": []}]),
    "segment of nothing": _changed(
        actions=[
            {
                "action": "stream.append",
                "count": 0,
                "first_step": 0,
                "last_step": 0,
                "lifetime": "forever",
                "manifest": "0" * 64,
                "start": 0,
                "stream": "s",
            }
        ]
    ),
    "unknown lifetime": _changed(
        actions=[{"action": "stream.archive", "label": "a", "lifetime": "x", "stream": "s"}]
    ),
    "a specification that contradicts itself": _changed(
        actions=[
            {
                "action": "run.create",
                "config_hash": "0" * 64,
                "environment": {},
                "seed": "0" * 16,
                "spec": {"retention": {"last": 0}},
            }
        ]
    ),
    "mark of epoch 0": b'{"epoch":0,"kind":"mark"}',
}


@pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN.keys())
def test_each_rule_of_a_line_has_its_error(line):
    with pytest.raises(Malformed, match="the/key: breaks the slot format; found"):
        decode_line(line, where="the/key")


@pytest.mark.parametrize(
    "line", [b"{}", b'{"more":1}', _changed(actions=[{}]), _changed(actions=[5])]
)
def test_what_has_no_kind_is_refused(line):
    with pytest.raises((Malformed, UnsupportedFormat), match="the/key"):
        decode_line(line, where="the/key")


@pytest.mark.parametrize("line", [b'{"kind": "mark","epoch":1}', b'{"kind":"mark","epoch":1}', b""])
def test_a_line_that_is_not_canonical_is_refused(line):
    with pytest.raises(Malformed, match="not canonical"):
        decode_line(line, where="x")


def test_commits_are_chained_by_the_digest_of_the_line():
    assert line_digest(_commit()) == Digest.of(_commit())


def test_a_metric_has_one_spelling():
    with pytest.raises(Malformed):
        decode_line(_changed(actions=[ADD | {"metrics": {"m": 1}}]), where="x")
