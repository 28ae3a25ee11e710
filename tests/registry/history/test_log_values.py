"""Values of the log: every type and bit survives, and what else is given is refused at the edge."""

from __future__ import annotations

import json
import math
from datetime import date
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from holdfast.registry.errors import InvalidInput, UnsupportedValue
from holdfast.registry.history.log_values import (
    check_metrics,
    check_name,
    check_phase,
    check_step,
    decode_plain,
    encode_plain,
    format_time,
    json_ready,
    moment,
    plain_digest,
)
from holdfast.registry.values import canonical
from holdfast.registry.values.digest import Digest


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        2**70,
        -0.0,
        1e-320,
        "ä",
        b"\0",
        (1, [2]),
        {"a": {3: None}},
        {1, 2},
        date(2026, 1, 2),
    ],
)
def test_a_plain_value_comes_back(value):
    read = decode_plain(canonical.decode(canonical.encode(encode_plain(value, "x")), where="x"))
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [np.ones(3)]}, "meta/a/0"),
        ({"w": torch.ones(3)}, "meta/w"),
        ("x" * 10**6, "meta"),
    ],
)
def test_an_array_is_refused_and_named(value, path):
    with pytest.raises(
        UnsupportedValue, match=rf"{path}: meta holds an array.*Keep it in the state"
    ):
        encode_plain(value, "meta")


def test_what_cannot_be_stored_is_refused_by_its_path():
    with pytest.raises(UnsupportedValue, match=r"state\['config'\]\['f'\]"):
        encode_plain({"f": lambda: 0}, "config")


def test_the_hash_of_a_config_is_that_of_its_encoding():
    encoded = encode_plain({"a": 1}, "config")
    assert plain_digest(encoded) == Digest.of(canonical.encode(encoded))
    assert plain_digest(encoded) != plain_digest(encode_plain({"a": 1.0}, "config"))


@pytest.mark.parametrize(
    "value", [1, 0.5, np.float32(0.5), np.int64(2), torch.tensor(0.5), Decimal(1), Fraction(1, 2)]
)
def test_a_number_of_any_library_is_a_metric(value):
    found = check_metrics({"m": value})
    assert found == {"m": float(value)}
    assert type(found["m"]) is float


def test_nan_and_infinities_are_metrics():
    found = check_metrics({"a": math.nan, "b": math.inf})
    assert math.isnan(found["a"])
    assert found["b"] == math.inf
    assert check_metrics(None) == {}


@pytest.mark.parametrize("value", ["1", b"1", True, None, [1], 1j, torch.ones(2), np.ones(2)])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(InvalidInput, match=r"loss: a metric is not a number.*found"):
        check_metrics({"loss": value})


@pytest.mark.parametrize("name", ["", 5, None, b"loss"])
def test_a_metrics_name_is_a_string(name):
    with pytest.raises(InvalidInput, match=r"not a name of a metric; expected .*; found"):
        check_metrics({name: 1.0})


@pytest.mark.parametrize("step", [0, 1, 2**53, np.int64(7), np.uint8(7), torch.tensor(5)])
def test_a_step_is_a_whole_number(step):
    assert check_step(step) == int(step)
    assert type(check_step(step)) is int


@pytest.mark.parametrize(
    ("phase", "stored"), [(0, "0"), (12, "12"), ("12", "12"), ("bc", "bc"), ("a.b-c_d", "a.b-c_d")]
)
def test_a_phase_is_a_number_or_a_name(phase, stored):
    assert check_phase(phase) == stored


@pytest.mark.parametrize(
    "phase", [-1, True, 1.0, None, "", "a/b", "01", "-", "x" * 65, "a b", "a\n", "..", np.ones(1)]
)
def test_what_is_no_phase_is_refused(phase):
    with pytest.raises(InvalidInput, match="phase"):
        check_phase(phase)


@pytest.mark.parametrize("phase", ["latest", "best", "tags", "phase2", "deadbeef"])
def test_a_phase_that_reads_as_another_ref_is_refused(phase):
    with pytest.raises(InvalidInput, match="would be read as another ref"):
        check_phase(phase)


@pytest.mark.parametrize("name", ["a", "A.b-c_9", "9", "x" * 64])
def test_a_legal_name_is_returned(name):
    assert check_name(name, "a tag") == name


@pytest.mark.parametrize("name", ["", ".a", "-a", "a/b", "x" * 65, "ä", "a\n", 5, None])
def test_an_illegal_name_is_refused(name):
    with pytest.raises(InvalidInput, match=r"not a legal name for a tag.*1 to 64 of"):
        check_name(name, "a tag")


def test_times_are_shown_in_utc_to_the_second():
    assert format_time(0) == "1970-01-01 00:00:00Z"
    assert format_time(1_767_225_599_999) == "2025-12-31 23:59:59Z"


def test_json_for_people():
    value = {
        1: (1, 2.5),
        "nan": math.nan,
        "set": {3},
        "deep": [{"x": -math.inf}],
        "d": date(2026, 1, 2),
    }
    assert json_ready(value) == {
        "1": [1, 2.5],
        "nan": "nan",
        "set": [3],
        "deep": [{"x": "-inf"}],
        "d": "2026-01-02",
    }


# What only looks like a number or a name


def test_a_metric_beyond_a_double_is_refused():
    with pytest.raises(InvalidInput):
        check_metrics({"m": 10**400})


def test_metrics_are_a_mapping():
    with pytest.raises(InvalidInput):
        check_metrics([1.0])


def test_a_metrics_name_is_whole():
    with pytest.raises(InvalidInput):
        check_metrics({"\ud800": 1.0})


def test_a_phase_of_other_digits_is_refused():
    with pytest.raises(InvalidInput):
        check_phase("²")


def test_a_phase_number_is_short_enough_for_a_name():
    with pytest.raises(InvalidInput):
        check_phase(10**64)


@pytest.mark.parametrize(
    ("time_ms", "text", "held"),
    [
        (0, "1970-01-01 00:00:00Z", "1970-01-01T00:00:00+00:00"),
        (1_700_000_000_123, "2023-11-14 22:13:20Z", "2023-11-14T22:13:20.123000+00:00"),
        (-1, "1969-12-31 23:59:59Z", "1969-12-31T23:59:59.999000+00:00"),
        (253402300799999, "9999-12-31 23:59:59Z", "9999-12-31T23:59:59.999000+00:00"),
        (253402300800000, "253402300800000 ms", "9999-12-31T23:59:59.999000+00:00"),
        (2**53, "9007199254740992 ms", "9999-12-31T23:59:59.999000+00:00"),
        (-(2**53), "-9007199254740992 ms", "0001-01-01T00:00:00+00:00"),
    ],
)
def test_any_time_of_the_log_can_be_told(time_ms, text, held):
    assert format_time(time_ms) == text
    assert moment(time_ms).isoformat() == held


def test_integers_of_any_length_become_json():
    huge = 10**5000
    value = {huge: [huge, -huge, 2**2048 - 1, (huge,), {huge}, Fraction(huge, 3), range(huge)]}
    made = json.loads(json.dumps(json_ready(value)))
    ((key, (first, second, third, *_)),) = made.items()
    assert int(first, 16) == huge
    assert int(second, 16) == -huge
    assert third == 2**2048 - 1
    assert key.startswith("0x")


def test_an_argument_of_any_length_is_refused_by_a_typed_error():
    for check in (check_step, check_phase, lambda value: check_name(value, "x")):
        with pytest.raises(InvalidInput, match="0x"):
            check(10**5000)
