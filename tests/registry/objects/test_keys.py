"""Keys are written and parsed in one place, and every key has one spelling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.base import check_key
from holdfast.registry.errors import Malformed
from holdfast.registry.objects.keys import (
    ObjectKey,
    check_run_id,
    epoch_key,
    parse_number,
    slot_key,
    snapshot_key,
    snapshot_slot,
    stem,
)
from holdfast.registry.values.digest import Digest
from tests.support.strategies import object_keys, quick

PLAIN = Digest.of(b"x").hex()
KEY = f"packs/{PLAIN[:2]}/{PLAIN}.7"


@quick
@given(object_keys)
def test_the_key_of_an_object_comes_back(key):
    assert ObjectKey.parse(str(key)) == key
    assert str(key).startswith(stem(key.kind, key.digest))
    assert check_key(str(key))


def test_a_key_is_kind_first_byte_digest_and_generation():
    assert str(ObjectKey("packs", Digest.of(b"x"), 7)) == KEY


@pytest.mark.parametrize(
    "key",
    [
        "",
        KEY + " ",
        KEY + "\n",
        KEY.replace("packs", "pack"),
        f"packs/{PLAIN[:2]}/{PLAIN}",
        f"packs/{PLAIN[:2]}/{PLAIN}.",
        f"packs/{PLAIN[:2]}/{PLAIN}.07",
        f"packs/{PLAIN[:2]}/{PLAIN}.-1",
        f"packs/{PLAIN[:2]}/{PLAIN}.1.bak",
        f"packs/{PLAIN[:2]}/{PLAIN.upper()}.1",
        f"packs/{PLAIN[:2]}/{PLAIN[:-1]}.1",
        f"packs/{PLAIN[2:4]}/{PLAIN}.1",
        f"/packs/{PLAIN[:2]}/{PLAIN}.1",
    ],
)
def test_what_is_not_the_key_of_an_object_is_refused(key):
    with pytest.raises(Malformed, match="not the key of an object"):
        ObjectKey.parse(key)


slots = st.integers(0, 10**20 - 1)


@quick
@given(slots, slots)
def test_slots_and_epochs_sort_by_number_and_snapshots_backwards(a, b):
    assert parse_number(slot_key("r", a)) == a
    assert parse_number(epoch_key(a)) == a
    assert snapshot_slot(snapshot_key("r", a)) == a
    assert (slot_key("r", a) < slot_key("r", b)) == (a < b)
    assert (epoch_key(a) < epoch_key(b)) == (a < b)
    assert (snapshot_key("r", a) < snapshot_key("r", b)) == (a > b)


def test_the_layout_of_a_run():
    assert slot_key("r", 12) == "runs/r/log/00000000000000000012"
    assert snapshot_key("r", 12) == "runs/r/snapshots/99999999999999999987"
    assert epoch_key(3) == "epochs/00000000000000000003"


@pytest.mark.parametrize(
    "name", ["1", "0" * 19, "0" * 21, "0" * 19 + "x", "٠" * 20, "-" + "0" * 19]
)
def test_what_does_not_end_with_twenty_digits_has_no_number(name):
    with pytest.raises(Malformed, match=r"not a numbered key.*20 digits"):
        parse_number(f"runs/r/log/{name}")


@pytest.mark.parametrize(
    "run_id", ["a", "A9", "20260101_120000_a1b2c3d4", "x" * 128, "console", "com10", "a.b-c_d"]
)
def test_a_legal_run_id_is_returned(run_id):
    assert check_run_id(run_id) == run_id
    assert check_key(slot_key(run_id, 0))
