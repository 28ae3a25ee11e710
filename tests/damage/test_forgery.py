"""Records that whoever writes to a store can seal: every hash fits, and what is said is wrong.

Nothing may come of it but a typed error or an answer: no other run is hidden, `restore` goes on to
the next checkpoint, and `verify` reports checkpoints that cannot be loaded.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from holdfast.registry.errors import IntegrityError, Malformed
from holdfast.registry.objects.framing import wrap_frame
from tests.damage.forging import (
    FORGED,
    Place,
    forged,
    healthy,
    newest_checkpoint,
    places,
    sealed,
    taken_apart,
    without_snapshots,
)
from tests.damage.looking import URL, Looks, quietly, store

_ANSI = "\x1b[31mred\u202e\n\rx"
_NAN, _INF, _MINUS_INF, _LARGEST = (
    *("7ff8000000000000", "7ff0000000000000"),
    *("fff0000000000000", "7fefffffffffffff"),
)
_INTEGERS = (0, -1, 1, 2**31, 2**53, -(2**53), 253402300800000, 2**53 + 1)
_TEXTS = ("", "x" * 10_000, _ANSI, "..", "a/b", "\ud800", "\xe9\0")

#: A field, and what is put there (`...` takes it away), in every run of the tests.
DAILY: tuple[tuple[str, Any], ...] = (
    ("slots/commit/time_ms", 2**53),
    ("slots/commit/author", _ANSI),
    ("slots/commit/actions/run.create/config/d/*/*/*", "1"),
    ("slots/commit/actions/checkpoint.add/metrics/loss", _NAN),
    ("slots/commit/actions/checkpoint.add/commit_keys/order", ["model", "data"]),
    ("slots/commit/actions/checkpoint.add/meta/d/*/*/i", "f" * 9000),
    ("slots/commit/actions/watch.claim/until_ms", 2**53),
    ("snapshots/*/pins/tag/checkpoint", 0),
    ("manifests/components/*/*/tensors/*/dtype", "complex32"),
    ("manifests/components/*/*/skeleton/d/-/-/coo/-", [5, 2**53]),
    ("placements/packs", []),
    ("epochs/*/min_writer", 2**53),
)


def test_what_is_sealed_again_is_what_it_was() -> None:
    assert sealed(taken_apart(healthy())) == healthy()


def test_a_healthy_registry_answers_everything() -> None:
    looks = Looks()
    with quietly():
        looks.at(healthy(), "healthy")
    assert looks.faults == []
    assert looks.refused == 2  # an id and a name that there is not


def test_forged_fields(record_property: Any) -> None:
    looks, known = Looks(is_brief=True), {place.name: place for place in places()}
    with quietly():
        for name, value in DAILY:
            files = forged(known[name], value)
            # A snapshot would hide what the log says, or the log is as it was.
            kept = files if name.startswith("snapshots") else without_snapshots(files)
            looks.at(kept, f"{name}={value!r:.40}")
    assert looks.faults == []
    assert looks.refused > len(DAILY)
    print(f"daily: {len(DAILY)} cases: {looks.refused} refused, {looks.answered} answered")
    record_property("looks", looks.refused + looks.answered)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "part", ["config", "slots", "snapshots", "manifests", "placements", "epochs"]
)
def test_every_field_forged_in_every_way(part: str) -> None:
    looks, cases = Looks(), 0
    with quietly():
        for place in places():
            if place.name.startswith(part):
                for value in _values(place):
                    files = forged(place, value)
                    if random.Random(cases).random() < 0.5:
                        files = without_snapshots(files)
                    looks.at(files, f"{place.name}={value!r:.40}")
                    cases += 1
    print(f"{part}: {cases} cases: {looks.refused} refused, {looks.answered} answered")
    assert looks.faults == []


def _values(place: Place) -> Iterator[Any]:
    """Yield what is put in place of a field: its own kind in excess, other kinds, nothing."""
    old = place.value
    made: tuple[Any, ...]
    match old:
        case bool():
            made = (not old, None, 1)
        case int():
            made = (*_INTEGERS, None, "1", [])
        case str() if re.fullmatch(r"[0-9a-f]{64}", old):
            made = ("0" * 64, "", *_TEXTS[1:3], 0)
        case str() if re.fullmatch(r"[0-9a-f]{16}", old):
            made = (_NAN, _INF, _MINUS_INF, _LARGEST, "", 1)
        case str():
            made = (*_TEXTS, None, 0, [])
        case list():
            made = ([], old + old, old[::-1], old[:-1], None, {}, [[]], [2**53] * len(old), 0)
        case dict():
            made = ({}, None, [], {**old, "zz": 1}, dict.fromkeys(old))
        case _:
            made = (0,)
    for value in (*made, ...):
        if value is ... or value != old or type(value) is not type(old):
            yield value


# Checkpoints that cannot be loaded: `restore` goes on, `verify` reports them


def _overflows(parts: dict[str, Any]) -> None:
    _entry(parts, "model", 3)["shape"] = [2**53, 2**53, 0]


def _of_numpy_overflows(parts: dict[str, Any]) -> None:
    parts["bare"]["tensors"] = [{"dtype": "float32", "shape": [2**52, 2**10, 0], "data": ""}]


def _names_too_few(parts: dict[str, Any]) -> None:
    parts["model"]["skeleton"]["d"].pop(0)


def _names_none(parts: dict[str, Any]) -> None:
    parts["model"]["skeleton"] = {"d": []}


def _names_too_many(parts: dict[str, Any]) -> None:
    parts["model"]["skeleton"]["d"].append(["more", {"t": len(parts["model"]["tensors"])}])


def _names_one_twice(parts: dict[str, Any]) -> None:
    parts["model"]["skeleton"]["d"][1][1] = {"t": 0}


def _text_of_floats(parts: dict[str, Any]) -> None:
    parts["model"]["skeleton"]["d"][0][1] = {"S": 0}


def _times_of_floats(parts: dict[str, Any]) -> None:
    parts["data"]["skeleton"]["d"][0][1] = {"nt": [0, "datetime64[D]"]}


def _value_misspelled(parts: dict[str, Any]) -> None:
    parts["data"]["skeleton"]["d"][-1][1] = {"i": "0x1"}


def _unknown_tag(parts: dict[str, Any]) -> None:
    parts["data"]["skeleton"]["d"][-1][1] = {_ANSI: 1}


def _entry(parts: dict[str, Any], name: str, index: int) -> dict[str, Any]:
    entry: dict[str, Any] = parts[name]["tensors"][index]
    return entry


@pytest.mark.parametrize(
    "forge",
    [
        _overflows,
        _of_numpy_overflows,
        _names_too_few,
        _names_none,
        _names_too_many,
        _names_one_twice,
        _text_of_floats,
        _times_of_floats,
        _value_misspelled,
        _unknown_tag,
    ],
)
def test_a_state_that_cannot_be_put_together(forge: Any) -> None:
    records = taken_apart(healthy())
    forge(newest_checkpoint(records))
    store(sealed(records))
    with quietly(), holdfast.open(URL) as opened:
        run = opened.run(FORGED)
        forged_one = run.latest()
        assert forged_one is not None
        assert forged_one.step == 3
        with pytest.raises(Malformed) as caught:
            forged_one.load()
        assert str(caught.value).isprintable()
        report = opened.verify()
        assert not report.ok
        key = str(forged_one.handle.reader.place.manifest_key)
        (finding,) = [one for one in report.findings if one.where == key]
        assert forged_one.ref in finding.affects
        restored = run.restore()
        assert restored is not None
        assert restored.checkpoint.step == 2
        assert [one.digest for one in restored.report] == [forged_one.digest]


def test_values_of_the_log_that_cannot_be_rebuilt() -> None:
    known = {place.name: place for place in places()}
    cases = (("run.create/config/d/*/*/f", FORGED), ("checkpoint.add/meta/d/*/*/i", ""))
    for name, affected in cases:
        files = without_snapshots(forged(known[f"slots/commit/actions/{name}"], "0"))
        store(files)
        with quietly(), holdfast.open(URL) as opened:
            (finding,) = opened.verify().findings
        assert finding.severity == "error"
        assert finding.where == FORGED
        assert affected in finding.affects or not affected


def test_keys_of_the_commit_that_do_not_fit_the_manifest() -> None:
    known = {place.name: place for place in places()}
    place = known["slots/commit/actions/checkpoint.add/commit_keys/order"]
    for order in (place.value[:-1], [*place.value, "more"], [*place.value, place.value[0]]):
        store(without_snapshots(forged(place, order)))
        with quietly(), holdfast.open(URL) as opened:
            first = opened.run(FORGED).history.checkpoint(1)
            with pytest.raises(Malformed, match="do not fit the manifest"):
                first.load()


def test_a_list_of_digests_that_is_claimed_takes_no_memory(monkeypatch: Any) -> None:
    """The claim is held against what the pack holds before the tensor is made."""
    records = taken_apart(healthy())
    parts = newest_checkpoint(records)
    chunk = _entry(parts, "model", 0)["chunks"][0]
    parts["model"]["tensors"][0] = {"dtype": "float32", "shape": [2**40], "list": chunk}
    allocate = "holdfast.registry.loading.destinations.allocate"
    monkeypatch.setattr(allocate, lambda *_: pytest.fail("memory was taken"))
    store(sealed(records))
    with quietly(), holdfast.open(URL) as opened:
        newest = opened.run(FORGED).latest()
        assert newest is not None
        with pytest.raises(IntegrityError):
            newest.load()


def test_a_frame_of_something_else_is_typed() -> None:
    files = healthy()
    key = next(key for key in files if key.startswith("manifests/"))
    store(files | {key: wrap_frame(_ANSI.encode())})
    with quietly(), holdfast.open(URL) as opened:
        assert not opened.verify().ok
