"""Records are frozen, closed and have one byte string."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import pytest

from holdfast.registry.errors import Malformed
from holdfast.registry.history.actions import Place, ReportMetrics
from holdfast.registry.values import canonical, records
from holdfast.registry.values.digest import Digest
from holdfast.registry.values.records import Record, Tagged

DIGEST = Digest.of(b"x")
PLACE = Place(manifest=DIGEST, manifest_generation=3, placement=DIGEST, placement_generation=0)


def test_a_record_is_frozen():
    with pytest.raises(AttributeError, match="frozen"):
        PLACE.manifest_generation = 4


def test_digests_stand_as_plain_hexadecimal_digits():
    assert PLACE.to_json()["manifest"] == DIGEST.hex()
    assert Place.decode(PLACE.encode(), where="x") == PLACE


@pytest.mark.parametrize("value", [0.1, -0.0, math.inf, -math.inf, 5e-324])
def test_floats_stand_as_the_digits_of_their_bits(value):
    record = ReportMetrics(checkpoint=1, metrics={"m": value})
    assert record.to_json()["metrics"] == {"m": canonical.float_to_hex(value)}
    read = ReportMetrics.decode(record.encode(), where="x").metrics["m"]
    assert canonical.float_to_hex(read) == canonical.float_to_hex(value)


def test_nan_survives():
    record = ReportMetrics(checkpoint=1, metrics={"m": math.nan})
    assert math.isnan(ReportMetrics.decode(record.encode(), where="x").metrics["m"])


def _with(**changes):
    return canonical.encode({**PLACE.to_json(), **changes})


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (_with(more=1), "more"),
        (_with(manifest="ab"), "manifest"),
        (_with(manifest=5), "manifest"),
        (_with(manifest=DIGEST.hex().upper()), "manifest"),
        (_with(manifest_generation=-1), "manifest_generation"),
        (_with(manifest_generation="3"), "manifest_generation"),
        (_with(manifest_generation=True), "manifest_generation"),
        (_with(kind="mark"), "kind"),
        (b"[]", "record"),
    ],
)
def test_what_is_not_the_record_is_refused_with_the_field_named(line, named):
    with pytest.raises(Malformed, match=rf"where: not a place of this format.*{named}"):
        Place.decode(line, where="where")


def test_a_digest_has_one_spelling_in_json():
    with pytest.raises(Malformed):
        Place.decode(_with(manifest=str(DIGEST)), where="x")


def test_a_float_with_blanks_is_malformed():
    line = canonical.encode(
        {"action": "checkpoint.report", "checkpoint": 1, "metrics": {"m": "3ff0 00000000 00"}}
    )
    with pytest.raises(Malformed):
        ReportMetrics.decode(line, where="x")


def test_absent_optional_fields_are_left_out():
    from holdfast.registry.history.actions import Rewind

    assert Rewind().encode() == b'{"action":"run.rewind"}'
    assert Rewind.decode(b'{"action":"run.rewind"}', where="x").to is None


class Part(Record):
    kind: Literal["part"] = "part"
    sizes: tuple[int, ...] = ()


class Other(Record):
    kind: Literal["other"] = "other"


class Neither(Record):
    kind: Literal["neither"] = "neither"


class Whole(Record):
    parts: tuple[Annotated[Part | Other | Neither, Tagged("kind")], ...] = ()
    one: Part | None = None


@pytest.mark.parametrize("whole", [Whole(parts=(Part(sizes=(1, 2)),)), Whole(one=Part())])
def test_a_record_within_a_record_comes_back(whole):
    assert Whole.decode(whole.encode(), where="x") == whole
    assert Whole.of(whole.to_json()) == whole


def test_validators_are_built_for_a_record_that_is_met_and_for_no_other():
    whole = canonical.encode({"parts": [Other().to_json()]})
    assert Whole.decode(whole, where="x").parts == (Other(),)
    assert Other in records._VALIDATORS
    assert Neither not in records._VALIDATORS


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"parts": [{"kind": "part"}, {"kind": "part", "sizes": ["1"]}]}, r"parts\.1\.sizes\.0"),
        ({"parts": [{"kind": "part", "more": 1}]}, r"parts\.0\.more"),
        ({"parts": [{"kind": "later"}]}, r"parts\.0: .*'later'"),
        ({"parts": [{"kind": ["part"]}]}, r"parts\.0"),
        ({"parts": [{}]}, r"parts\.0"),
        ({"parts": [5]}, r"parts\.0.*an object"),
        ({"one": {"kind": "other"}}, r"one\.kind"),
        ({"one": []}, "one.*object"),
    ],
)
def test_a_record_within_a_record_is_refused_with_the_field_named(body, named):
    with pytest.raises(Malformed, match=named):
        Whole.decode(canonical.encode(body), where="x")
