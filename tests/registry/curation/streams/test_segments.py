"""Segments give entries back exactly, whole or in part; appends stay few segments."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.registry import pytree
from holdfast.registry.curation.streams.segments import (
    check_entries,
    merge_count,
    pack_entries,
    steps,
    unpack_entries,
)
from holdfast.registry.errors import InvalidInput, Malformed, UnsupportedValue
from tests.registry.pytree.states import floats, texts
from tests.support.sameness import assert_same, through
from tests.support.strategies import quick

values = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | texts | st.binary(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(texts | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)
whole = st.integers(0, 2**53)


@st.composite
def any_entries(draw):
    columns = draw(st.lists(texts.filter(lambda name: name != "step"), max_size=4, unique=True))
    kinds = {key: draw(st.sampled_from([floats, st.integers(), values])) for key in columns}
    entries = []
    for _ in range(draw(st.integers(0, 6))):
        keys = draw(st.permutations([*draw(st.sets(st.sampled_from(columns or ["x"]))), "step"]))
        entries.append(
            {key: draw(whole if key == "step" else kinds.get(key, values)) for key in keys}
        )
    return entries


def packed(entries):
    """Return a segment as a store gives it back."""
    return through(pack_entries(check_entries(entries)))


@quick
@given(any_entries(), st.integers(-8, 8), st.none() | st.integers(-8, 8))
def test_entries_come_back_exactly(entries, start, stop):
    state = packed(entries)
    assert_same(unpack_entries(state), entries)
    assert_same(unpack_entries(state, start, stop), entries[start:stop])
    assert_same(steps(state), np.array([entry["step"] for entry in entries], np.int64))


def test_many_entries_of_numbers_are_two_arrays():
    count = 200_000
    entries = [{"step": i, "loss": 1 / (i + 1)} for i in range(count)]
    state = pack_entries(entries)
    (component,) = pytree.flatten(state).components
    assert [(leaf.dtype, leaf.shape) for leaf in component.leaves] == [
        ("int64", (count,)),
        ("float64", (count,)),
    ]
    assert "order" not in state["entries"]
    assert unpack_entries(through(state)) == entries
    assert unpack_entries(state, 150_000, 150_002) == entries[150_000:150_002]


def test_every_bit_of_a_float_survives():
    bits = [0x7FF0000000000001, 0x7FF8000000000000, 0xFFF8DEADBEEF0001, 1 << 63, 1]
    losses = [struct.unpack("<d", struct.pack("<Q", number))[0] for number in bits]
    state = packed([{"step": 0, "loss": loss} for loss in losses])
    assert state["entries"]["columns"]["loss"].dtype == np.float64
    back = [entry["loss"] for entry in unpack_entries(state)]
    assert [struct.unpack("<Q", struct.pack("<d", loss))[0] for loss in back] == bits


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ([1, 2**63 - 1, -(2**63)], np.int64),
        ([1, 2**63], list),
        ([True, False], list),
        ([1, True], list),
        ([1, 1.0], list),
        ([0.5, math.inf], np.float64),
        ([np.float64(0.5)], list),
        ([None, 1], list),
    ],
)
def test_a_column_is_an_array_only_of_one_type(column, kind):
    entries = [{"step": 0, "x": value} for value in column]
    state = packed(entries)
    stored = state["entries"]["columns"]["x"]
    assert stored.dtype == kind if isinstance(stored, np.ndarray) else kind is list
    assert_same(unpack_entries(state), entries)


def test_absent_keys_and_orders_of_keys():
    entries = [
        {"step": 3, "loss": 0.5},
        {"loss": 0.25, "step": 2},
        {"step": 2},
        {"step": 1, "loss": None, "text": "ä"},
        {"step": 0, "loss": 1.0},
    ]
    body = packed(entries)["entries"]
    assert body["orders"] == [
        ["step", "loss"],
        ["loss", "step"],
        ["step"],
        ["step", "loss", "text"],
    ]
    assert body["order"].tolist() == [0, 1, 2, 3, 0]
    assert body["columns"]["loss"] == [0.5, 0.25, None, 1.0]
    for start in range(6):
        for stop in range(6):
            assert_same(unpack_entries({"entries": body}, start, stop), entries[start:stop])


def test_no_entries():
    state = packed([])
    assert unpack_entries(state) == []
    assert steps(state).tolist() == []


def test_as_many_keys_as_entries():
    entries = [{"step": i, f"k{i}": i} for i in range(3000)]
    state = packed(entries)
    assert state["entries"]["order"].dtype == np.uint16
    assert unpack_entries(state) == entries


# What is appended


def test_entries_are_copies():
    nested = {"pulls": [1, 2]}
    given_ = {"step": 0, "arm": nested}
    (entry,) = check_entries([given_])
    nested["pulls"].append(3)
    given_["step"] = 9
    assert entry == {"step": 0, "arm": {"pulls": [1, 2]}}


def test_a_step_of_any_library_becomes_an_int():
    steps_ = [np.int32(4), torch.tensor(5), 6]
    given_ = [{"loss": 0.5, "step": step} for step in steps_]
    entries = check_entries(entry for entry in given_)
    assert all(entry["step"] is step for entry, step in zip(given_, steps_, strict=True))
    assert [(type(entry["step"]), entry["step"]) for entry in entries] == [
        (int, n) for n in (4, 5, 6)
    ]
    assert list(entries[0]) == ["loss", "step"]


def test_long_strings_and_bytes_are_plain():
    entries = [{"step": 0, "sample": "ä" * 70_000, "raw": b"\0" * 5000}]
    assert_same(check_entries(entries), entries)
    assert_same(unpack_entries(packed(entries)), entries)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"loss": 1.0}, r"entries\[1\]: an entry has no step"),
        ({"step": -1}, r"entries\[1\]\['step'\]: not a step.*found -1"),
        ({"step": 1.0}, r"entries\[1\]\['step'\]: not a step"),
        ({"step": True}, r"entries\[1\]\['step'\]: not a step"),
        ({"step": 2**53 + 1}, r"entries\[1\]\['step'\]: not a step"),
        ({"step": 0, 5: 1}, r"entries\[1\]: a key of an entry is not a string; found 5"),
        ([("step", 0)], r"entries\[1\]: an entry is not a mapping.*found list"),
    ],
)
def test_what_is_no_entry(entry, said):
    with pytest.raises(InvalidInput, match=said):
        check_entries([{"step": 0}, entry])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.ones(2), "entries/1/x: an entry holds an array"),
        (torch.ones(()), "entries/1/x: an entry holds an array"),
        ({"a": ["b" * 70_000, np.ones(2)]}, "entries/1/x/a/1: an entry holds an array"),
        ({"a": [print]}, r"entries\[1\]\['x'\]\['a'\]\[0\]: a function cannot be stored"),
        ("\ud800", r"entries\[1\]\['x'\]: a string with a lone surrogate"),
    ],
)
def test_what_is_not_plain_is_named(value, said):
    with pytest.raises(UnsupportedValue, match=said):
        check_entries([{"step": 0}, {"step": 1, "x": value}])


def test_a_key_that_cannot_be_stored():
    with pytest.raises(UnsupportedValue, match="lone surrogate"):
        check_entries([{"step": 0, "\ud800": 1}])


def test_what_passes_can_be_stored_however_deep():
    def nested(depth):
        value = 0
        for _ in range(depth):
            value = [value]
        return [{"step": 0, "x": value}]

    deepest = max(depth for depth in range(80, 110) if _passes(nested(depth)))
    assert_same(unpack_entries(packed(nested(deepest))), nested(deepest))
    with pytest.raises(UnsupportedValue, match="levels deep"):
        check_entries(nested(deepest + 1))
    with pytest.raises(UnsupportedValue, match="levels deep"):
        pytree.flatten(pack_entries(nested(deepest + 1)))


def _passes(entries):
    try:
        check_entries(entries)
    except UnsupportedValue:
        return False
    return True


@pytest.mark.parametrize("entries", [{"step": 0}, "step", None, 5])
def test_not_a_list_of_entries(entries):
    with pytest.raises(InvalidInput, match="entries are not a list of mappings"):
        check_entries(entries)


@pytest.mark.parametrize(
    "entries", [[{"loss": 1}], [{"step": 0}, {}], [{"step": -1}], [{"step": 0.5}], [{"step": True}]]
)
def test_nothing_without_steps_is_packed(entries):
    with pytest.raises(InvalidInput, match="check_entries"):
        pack_entries(entries)


# What a store may give back


def _two_orders():
    return pack_entries([{"step": 0, "x": 1}, {"step": 1}])["entries"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"more": 1}, "not a segment"),
        ({"count": -1}, "a bad count"),
        ({"count": True}, "a bad count"),
        ({"count": 2**62}, "a bad order"),
        ({"count": 0}, "bad orders of keys"),
        ({"orders": [["step", "x"], ["x"]]}, "bad orders of keys"),
        ({"orders": [["step", "x"], ["step", "step"]]}, "bad orders of keys"),
        ({"orders": [["step", "x"], ["step", "x"]]}, "bad orders of keys"),
        ({"orders": [["step", 1], ["step"]]}, "bad orders of keys"),
        ({"orders": "step"}, "bad orders of keys"),
        ({"orders": [["step", "x"]]}, "a bad order"),
        ({"order": None}, "a bad order"),
        ({"order": [0, 1]}, "a bad order"),
        ({"order": np.array([0, 2], np.uint8)}, "a bad order"),
        ({"order": np.array([0, 1, 1], np.uint8)}, "a bad order"),
        ({"order": np.array([0, 1], np.int8)}, "a bad order"),
        ({"order": np.array([1, 1], np.uint8)}, "a bad column 'x'"),
        ({"columns": [1]}, "other columns than keys"),
        ({"columns": {"step": np.arange(2)}}, "other columns than keys"),
        ({"columns": {"step": np.arange(2), "x": [1, 2]}}, "a bad column 'x'"),
        ({"columns": {"step": np.arange(2), "x": np.ones(1, np.float32)}}, "a bad column 'x'"),
        ({"columns": {"step": np.arange(2), "x": np.ones((1, 1))}}, "a bad column 'x'"),
        ({"columns": {"step": np.arange(2), "x": "a"}}, "a bad column 'x'"),
        ({"columns": {"step": [0, 1], "x": [1]}}, "a bad column of steps"),
        ({"columns": {"step": np.arange(2) - 1, "x": [1]}}, "a bad column of steps"),
        ({"columns": {"step": np.ones(2), "x": [1]}}, "a bad column of steps"),
    ],
)
def test_what_is_no_segment(changes, said):
    state = {"entries": _two_orders() | changes}
    for read in (unpack_entries, steps):
        with pytest.raises(Malformed, match=said):
            read(state)


def test_a_count_that_nothing_stands_for_takes_no_memory():
    body = pack_entries([{"step": 0}])["entries"] | {"count": 2**62}
    with pytest.raises(Malformed, match="a bad column 'step'"):
        unpack_entries({"entries": body})


@pytest.mark.parametrize("state", [{}, {"entries": 1}, {"entries": {}}, [], None])
def test_not_a_segment_at_all(state):
    with pytest.raises(Malformed, match="not a segment"):
        unpack_entries(state)


# Merging


def _append(counts, new, **options):
    """Return the counts after an append, and how many entries were written."""
    swallowed = merge_count(counts, new, **options)
    kept = counts[: len(counts) - swallowed]
    written = new + sum(counts[len(kept) :])
    return [*kept, written], written


def test_many_small_appends_leave_few_segments():
    counts, written = [], 0
    for _ in range(10_000):
        counts, more = _append(counts, 20)
        written += more
        assert len(counts) <= 20
    total = 200_000
    assert sum(counts) == total
    assert written <= total * math.log2(total)


@quick
@given(st.lists(st.integers(1, 500) | st.just(1), max_size=300), st.booleans())
def test_appends_of_any_size(sizes, falling):
    counts, written = [], 0
    for new in sorted(sizes, reverse=True) if falling else sizes:
        counts, more = _append(counts, new)
        written += more
    assert sum(counts) == sum(sizes)
    if counts:
        assert len(counts) <= math.log2(sum(counts)) + 1
        assert written <= sum(counts) * (math.log(sum(counts), 1.5) + 1)


def test_a_segment_beyond_the_cap_is_never_rewritten():
    assert merge_count([101, 1], 500, cap=100) == 1
    assert merge_count([100, 1], 500, cap=100) == 2
    assert merge_count([1_000_001], 10**9) == 0
    assert merge_count([], 5) == 0
