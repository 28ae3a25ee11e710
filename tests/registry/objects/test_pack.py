"""A pack: every byte of it is covered by its name, and any pack can be checked alone."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.registry.errors import Damaged, Malformed, RegistryError, UnsupportedFormat
from holdfast.registry.objects.keys import ObjectKey
from holdfast.registry.objects.pack import (
    TRAILER_BYTES,
    PackTable,
    open_pack,
    parse_trailer,
    trailer,
)
from holdfast.registry.store.fetching import verify_pack_chunks
from holdfast.registry.values import canonical
from holdfast.registry.values.digest import Digest
from tests.support.strategies import quick

chunks = st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=6)


def _table_of(parts: list[bytes]) -> PackTable:
    return PackTable.of_raw([*map(Digest.of, parts)], [*map(len, parts)])


def _pack(parts: list[bytes]) -> tuple[bytes, Digest]:
    table = _table_of(parts).encode()
    return b"".join([*parts, table, trailer(table)]), Digest.of(table)


@quick
@given(chunks)
def test_a_pack_comes_back(parts):
    data, name = _pack(parts)
    table = open_pack(data, name, where="x")
    assert [data[e.offset : e.offset + e.stored_bytes] for e in table] == parts
    assert [e.digest for e in table] == [Digest.of(part) for part in parts]
    assert all((e.codec, e.base, e.stored_digest) == ("raw", None, None) for e in table)
    verify_pack_chunks(data, table, ObjectKey("packs", name, 0))


@quick
@given(chunks)
def test_a_table_comes_back(parts):
    table = _table_of(parts)
    assert PackTable.decode(table.encode(), where="x") == table


def test_chunks_are_found_by_where_they_begin():
    table = _table_of([b"abc", b"de", b"fghi"])
    found = {offset: table.at(offset) for offset in range(12)}
    assert {offset for offset, entry in found.items() if entry is not None} == {0, 3, 5}
    assert found[3] == table[1] == table[-2]
    assert found[3].digest == Digest.of(b"de")
    for number in (3, -4):
        with pytest.raises(IndexError):
            table[number]
    assert table != _table_of([b"abc", b"de"])
    assert table != _table_of([b"abc", b"de", b"fghj"])


def test_every_flipped_bit_and_every_cut_is_noticed():
    data, name = _pack([b"abc" * 5, b"defg"])
    key = ObjectKey("packs", name, 0)

    def check(damaged: bytes) -> None:
        verify_pack_chunks(damaged, open_pack(damaged, name, where="x"), key)

    check(data)
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RegistryError) as caught:
            check(bytes(damaged))
        assert isinstance(caught.value, (Damaged, Malformed))
    for other in [*(data[:end] for end in range(len(data))), data + b"x", b"x" + data]:
        with pytest.raises((Damaged, Malformed)):
            check(other)


def test_the_layout_is_chunks_table_length_digest_magic():
    data, name = _pack([b"abc"])
    length, digest, magic = struct.unpack("<Q32s8s", data[-TRAILER_BYTES:])
    assert magic == b"HFPACK1\n"
    assert digest == name == Digest.of(data[3 : 3 + length])
    assert len(data) == 3 + length + TRAILER_BYTES == 3 + length + 48
    assert data[:3] == b"abc"


def test_the_pack_of_another_name_is_refused():
    data, _ = _pack([b"abc"])
    with pytest.raises(Damaged, match="x: damaged pack: table of contents; expected"):
        open_pack(data, Digest.of(b"other"), where="x")


@pytest.mark.parametrize("length", [0, 10, 2**63])
def test_a_trailer_fits_its_file(length):
    data = struct.pack("<Q32s8s", length, bytes(32), b"HFPACK1\n")
    with pytest.raises(Damaged, match=r"not a trailer.*found"):
        parse_trailer(data, 50, where="x")


def test_a_trailer_has_its_magic():
    with pytest.raises(Damaged, match="not a trailer"):
        parse_trailer(struct.pack("<Q32s8s", 1, bytes(32), b"HFPACK2\n"), 50, where="x")


DIGEST = Digest.of(b"c").hex()
ROW = [DIGEST, 5, 5, "raw", None, None]


def _table(*rows, **more):
    return canonical.encode({"format": "holdfast.pack/1", "chunks": list(rows), **more})


def test_the_row_that_is_broken_below_is_legal_before():
    assert len(PackTable.decode(_table(ROW), where="x")) == 1


BROKEN = {
    "unknown key": _table(ROW, more=1),
    "chunks no list": canonical.encode({"format": "holdfast.pack/1", "chunks": 5}),
    "chunks in a dict": canonical.encode({"format": "holdfast.pack/1", "chunks": {}}),
    "no chunks": canonical.encode({"format": "holdfast.pack/1"}),
    "row too short": _table(ROW[:-1]),
    "row too long": _table([*ROW, None]),
    "row no list": _table(5),
    "length zero": _table([DIGEST, 0, 0, "raw", None, None]),
    "length negative": _table([DIGEST, -5, -5, "raw", None, None]),
    "length a flag": _table([DIGEST, True, True, "raw", None, None]),
    "length a string": _table([DIGEST, "5", "5", "raw", None, None]),
    "raw of another length": _table([DIGEST, 5, 6, "raw", None, None]),
    "raw with a base": _table([DIGEST, 5, 5, "raw", DIGEST, None]),
    "raw with a stored digest": _table([DIGEST, 5, 5, "raw", None, DIGEST]),
    "digest malformed": _table(["ab", 5, 5, "raw", None, None]),
    "codec unknown": _table([DIGEST, 5, 5, "python", None, None]),
    "codec no string": _table([DIGEST, 5, 5, [], None, None]),
    "lengths beyond 2^64 together": _table(*[[DIGEST, 2**53, 2**53, "raw", None, None]] * 2050),
}


@pytest.mark.parametrize("table", BROKEN.values(), ids=BROKEN.keys())
def test_each_rule_of_the_format_has_its_error(table):
    with pytest.raises(Malformed, match="the/key"):
        PackTable.decode(table, where="the/key")


def test_a_digest_that_is_no_string_is_malformed():
    with pytest.raises(Malformed):
        PackTable.decode(_table([5, 5, 5, "raw", None, None]), where="x")


@pytest.mark.parametrize("body", [{"format": "holdfast.pack/2", "chunks": []}, [], 5])
def test_another_format_says_so(body):
    with pytest.raises(UnsupportedFormat, match=r"expected holdfast\.pack/1; found"):
        PackTable.decode(canonical.encode(body), where="x")


def test_chunks_fill_the_pack():
    table = PackTable.of_raw([Digest.of(b"abc")], [3]).encode()
    for body in (b"", b"ab", b"abcd"):
        with pytest.raises((Malformed, Damaged), match="do not fill the pack"):
            open_pack(body + table + trailer(table), Digest.of(table), where="x")
