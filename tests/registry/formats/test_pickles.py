"""The interpreter of pickles: plain values come out as Python's own; nothing is looked up."""

from __future__ import annotations

import os
import pickle
import random
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.registry.errors import InvalidInput, UnsupportedValue
from holdfast.registry.formats.pickles import Keys, Known, read_pickle
from holdfast.registry.values.parse_limits import Budget
from tests.support.foreign import Calls
from tests.support.strategies import quick


def _bytes(data: Any) -> bytes:
    return data.encode("latin-1") if isinstance(data, str) else data


KEYS_OF = Keys(Budget("x", most=2**60))
#: How older protocols make what protocol 5 has opcodes for.
BUILTINS = {
    "bytes": Known(call=bytes),
    "bytearray": Known(call=lambda data=b"", _="": bytearray(_bytes(data))),
    "set": Known(call=KEYS_OF.set_of),
    "frozenset": Known(call=frozenset),
}
NAMES = {
    "collections.OrderedDict": Known(call=KEYS_OF.ordered_dict, build=lambda value, _: value),
    "_codecs.encode": Known(call=lambda text, _: text.encode("latin-1")),
    **{f"builtins.{name}": known for name, known in BUILTINS.items()},
    **{f"__builtin__.{name}": known for name, known in BUILTINS.items()},
}

KEYS = st.one_of(
    st.text(max_size=5), st.integers(), st.booleans(), st.none(), st.binary(max_size=3)
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**2000), max_value=2**2000),
    st.floats(allow_nan=False),
    st.text(max_size=300),
    st.binary(max_size=300),
    st.builds(bytearray, st.binary(max_size=9)),
    st.sets(KEYS, max_size=4),
    st.frozensets(KEYS, max_size=4),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.tuples(inner),
        st.tuples(inner, inner, inner, inner),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
    ),
)


def typed(value: Any) -> Any:
    """Return a value with the types of its parts: 1 equals True, an OrderedDict equals a dict."""
    if isinstance(value, dict):
        parts: Any = [(typed(key), typed(item)) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        parts = [typed(item) for item in value]
    elif isinstance(value, set | frozenset):
        parts = {(type(item), item) for item in value}
    else:
        parts = value
    return type(value), parts


@quick
@given(VALUES, st.integers(2, 5), st.binary(max_size=5))
def test_plain_values_are_those_of_python(value: Any, protocol: int, after: bytes) -> None:
    data = pickle.dumps(value, protocol)
    found, length = read_pickle(data + after, NAMES, where="test")
    assert typed(found) == typed(value)
    assert length == len(data)


def test_shared_values_are_shared() -> None:
    part = [1, 2]
    found, _ = read_pickle(pickle.dumps([part, part]), {}, where="test")
    assert found[0] is found[1]


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_call_is_refused_and_not_made(tmp_path: Path, protocol: int) -> None:
    data = pickle.dumps({"model": Calls(os.mkdir, str(tmp_path / "made"))}, protocol)
    with pytest.raises(UnsupportedValue, match=r"names (posix|nt)\.mkdir"):
        read_pickle(data, NAMES, where="evil.pt")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"\x80\x02ccollections\nOrderedDict\n)R}b.", None),  # attributes of one that takes them
        (b"\x80\x02]}b.", UnsupportedValue),  # attributes of a list
        (b"\x80\x02K\x01)R.", UnsupportedValue),  # a call of a number
        (b"\x80\x02ccollections\nOrderedDict\nK\x01R.", UnsupportedValue),  # no tuple of arguments
        (b"(lp0\n.", InvalidInput),  # protocol 0
        (b"\x80\x02(cos\nsystem\no.", UnsupportedValue),
        (b"\x80\x02}].", InvalidInput),  # two values at the end
        (b"\x80\x02", InvalidInput),  # no end
        (b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"x.", InvalidInput),  # a length that lies
        (b"\x80\x02e.", InvalidInput),  # no mark
        (b"\x80\x02K\x01Q.", InvalidInput),  # a persistent id where there is none
        (b"\x80\x02}]K\x01s.", InvalidInput),  # a list as a key
        (b"\x80\x02h\x00.", InvalidInput),  # a memo that is not there
        (b"\x80\x02\x82\x01.", InvalidInput),  # the registry of extensions
        (b"\x80\x02}" + b")" + b"\x85" * 300_000 + b"K\x01s.", InvalidInput),  # a deep key
        # A deep key in the pairs of a call.
        (
            b"\x80\x02ccollections\nOrderedDict\n])" + b"\x85" * 20 + b"K\x01\x86a\x85R.",
            InvalidInput,
        ),
    ],
)
def test_bad_pickles(data: bytes, fault: type[Exception] | None) -> None:
    if fault is None:
        assert read_pickle(data, NAMES, where="test")[0] == OrderedDict()
        return
    with pytest.raises(fault):
        read_pickle(data, NAMES, where="test")


def test_damaged_pickles_give_values_or_typed_errors() -> None:
    value = {"a": [1, 2.5, None, ("x", b"y")], "b": OrderedDict({"c": {1, 2}}), 3: "z" * 300}
    sound = pickle.dumps(value, 4)
    chance = random.Random(7)
    refused = 0
    for _ in range(3000):
        data = bytearray(sound)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            read_pickle(bytes(data[: chance.randint(1, len(data))]), NAMES, where="test")
        except InvalidInput:
            refused += 1
    assert refused > 1000
