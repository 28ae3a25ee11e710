"""Canonical JSON: every value has one spelling, and no other is read."""

from __future__ import annotations

import json
import math
import struct

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from holdfast.registry.errors import InvalidInput, Malformed
from holdfast.registry.values import canonical
from tests.support.strategies import json_values, quick, texts


@quick
@given(json_values)
def test_a_value_comes_back(value):
    assert canonical.decode(canonical.encode(value), where="x") == value


@quick
@given(json_values)
def test_the_bytes_are_json_without_white_space_and_with_sorted_keys(value):
    data = canonical.encode(value)
    assert json.loads(data) == value
    assert data == json.dumps(
        json.loads(data), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    ).encode("utf-8")


@quick
@given(st.dictionaries(texts, st.integers(0, 9), min_size=2), st.randoms())
def test_the_order_of_keys_does_not_matter_to_the_encoder(value, random):
    keys = list(value)
    random.shuffle(keys)
    assert canonical.encode({key: value[key] for key in keys}) == canonical.encode(value)


@quick
@given(json_values, st.data())
def test_any_other_spelling_of_a_value_is_refused(value, data):
    spelled = canonical.encode(value)
    other = data.draw(
        st.sampled_from(
            [
                json.dumps(value, sort_keys=True, ensure_ascii=False),
                json.dumps(value, sort_keys=True, separators=(",", ":")),
                json.dumps(value, separators=(",", ":"), ensure_ascii=False),
                json.dumps(value, sort_keys=True, separators=(",", ":"), indent=1),
                spelled.decode() + "\n",
                " " + spelled.decode(),
                "\ufeff" + spelled.decode(),
            ]
        )
    ).encode()
    assume(other != spelled)
    with pytest.raises(Malformed, match="x: not canonical JSON"):
        canonical.decode(other, where="x")


@quick
@given(json_values, st.integers(0, 10**6), st.binary(min_size=1, max_size=2))
def test_changed_bytes_are_refused_or_are_the_canonical_bytes_of_what_they_say(value, at, noise):
    data = bytearray(canonical.encode(value))
    at %= len(data)
    data[at : at + 1] = noise
    try:
        read = canonical.decode(bytes(data), where="x")
    except Malformed:
        return
    assert canonical.encode(read) == data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1.0",
        b"1e5",
        b"-0",
        b"00",
        b"+1",
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b'{"a":1,"a":1}',
        b'{"a":1,"a":2}',
        b'{"b":1,"a":2}',
        b'["\\u0041"]',
        b'["\\/"]',
        b'"\\ud800"',
        b'"\xed\xa0\x80"',
        b'"\xff"',
        b"[1,]",
        b"[1][2]",
        b"9007199254740993",
        b"-9007199254740993",
        b"1" * 5000,
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
    ],
)
def test_what_is_not_canonical_is_refused(data):
    with pytest.raises(Malformed) as caught:
        canonical.decode(data, where="runs/r/log/0")
    assert caught.value.where == "runs/r/log/0"


@pytest.mark.parametrize("value", [2**53, -(2**53), 0, -1])
def test_integers_up_to_two_to_the_53rd_are_exact(value):
    assert canonical.decode(canonical.encode([value]), where="x") == [value]


@pytest.mark.parametrize("value", ["\ud800", {"\udfff": 1}, math.nan, math.inf, b"x", {1, 2}])
def test_what_is_not_json_cannot_be_encoded(value):
    with pytest.raises(InvalidInput, match="not expressible as canonical JSON"):
        canonical.encode(value)


def test_what_nests_too_deeply_cannot_be_encoded():
    value: list = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(InvalidInput):
        canonical.encode(value)


def test_keys_are_sorted_by_code_point():
    assert canonical.encode({"\U00010000": 1, "\uffff": 2, "a": 3}) == (
        b'{"a":3,"\xef\xbf\xbf":2,"\xf0\x90\x80\x80":1}'
    )


# Floats


@quick
@given(st.binary(min_size=8, max_size=8))
@example(bytes.fromhex("7ff0000000000001"))
@example(bytes.fromhex("fff8000000000123"))
@example(bytes.fromhex("8000000000000000"))
def test_a_float_keeps_every_bit(bits):
    text = canonical.float_to_hex(struct.unpack(">d", bits)[0])
    assert text == bits.hex()
    assert struct.pack(">d", canonical.float_from_hex(text)) == bits


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3ff",
        "3FF0000000000000",
        "3ff00000000000000",
        "0x3ff00000000000",
        "3ff000000000000g",
        "3ff0 00000000 00",
    ],
)
def test_other_spellings_of_a_float_are_refused(text):
    with pytest.raises(ValueError, match=r"."):
        canonical.float_from_hex(text)
