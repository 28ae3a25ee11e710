"""The lines of a slot: a closed union, with one byte string for each line."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry import canonical
from registry.actions import (
    AddCheckpoint,
    Commit,
    CreateRun,
    Mark,
    Place,
    ReportMetrics,
    Rewind,
    SetStatus,
    SetTag,
    TakeOver,
    decode_line,
    line_digest,
)
from registry.digest import Digest
from registry.errors import Malformed, UnsupportedFormat
from registry.monitors import Monitor
from tests.strategies import digests, json_values, quick, texts

floats = st.floats(allow_nan=False)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
actions = st.one_of(
    st.builds(
        CreateRun,
        config=json_values,
        config_hash=digests,
        input_hash=st.none() | texts,
        seed=st.integers(0, 2**64 - 1).map(lambda seed: f"{seed:016x}"),
        environment=st.dictionaries(texts, texts, max_size=2),
        monitors=st.lists(
            st.builds(Monitor, metric=texts, mode=st.sampled_from(["min", "max"])), max_size=2
        ).map(tuple),
    ),
    st.builds(SetStatus, status=st.sampled_from(["running", "interrupted", "completed", "failed"])),
    st.builds(TakeOver, token=texts, host=texts),
    st.builds(Rewind, to=st.none() | st.integers(0, 99)),
    st.builds(
        AddCheckpoint,
        manifest=digests,
        phase=names,
        step=st.integers(0, 2**53),
        metrics=st.dictionaries(texts, floats, max_size=3),
        meta=json_values,
        size_bytes=st.integers(0, 2**53),
    ),
    st.builds(
        ReportMetrics,
        checkpoint=st.integers(0, 99),
        metrics=st.dictionaries(texts, floats, max_size=3),
    ),
    st.builds(SetTag, name=names, checkpoint=st.integers(0, 99)),
)
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
