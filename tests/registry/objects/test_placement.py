"""A placement says where the chunks of one manifest lie; it names every pack that is needed."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.registry.errors import Damaged, Malformed, UnsupportedFormat
from holdfast.registry.objects.framing import wrap_frame
from holdfast.registry.objects.keys import ObjectKey
from holdfast.registry.objects.placement import NO_BASE, ChunkRow, PackRef, Placement, Rows
from holdfast.registry.values import canonical
from holdfast.registry.values.digest import Digest, Digests
from tests.support.strategies import digests, pack_keys, quick

refs = st.builds(PackRef, pack_keys, st.integers(2**33, 2**40))


@st.composite
def placements(draw):
    packs = tuple(draw(st.lists(refs, min_size=1, max_size=3)))
    count = draw(st.integers(0, 5))
    row = st.builds(
        ChunkRow,
        st.integers(0, len(packs) - 1),
        st.integers(0, 2**32),
        st.integers(1, 2**32 - 1),
        st.just(0),
        st.just(NO_BASE),
    )
    rows = tuple(draw(row) for _ in range(count))
    extra = Digests(draw(st.lists(digests, max_size=count)))
    return Placement(draw(digests), packs, Rows(rows), extra)


@quick
@given(placements())
def test_a_placement_comes_back(placement):
    read = Placement.decode(placement.encode(), placement.digest, where="x")
    assert read == placement
    assert read.digest == placement.digest


MANIFEST, PACK = Digest.of(b"m"), Digest.of(b"p")
REF = PackRef(ObjectKey("packs", PACK, 4), 100)
ROWS = (ChunkRow(0, 0, 60), ChunkRow(0, 60, 40))
PLACEMENT = Placement(MANIFEST, (REF,), Rows(ROWS))


def test_the_content_is_a_line_and_five_columns():
    line, _, columns = PLACEMENT.content.partition(b"\n")
    assert canonical.decode(line, where="x") == {
        "format": "holdfast.placement/1",
        "manifest": MANIFEST.hex(),
        "packs": [[PACK.hex(), 4, 100]],
        "rows": 2,
        "extra": [],
    }
    assert columns == struct.pack("<2I2Q2I2B2I", 0, 0, 0, 60, 60, 40, 0, 0, NO_BASE, NO_BASE)
    assert PLACEMENT.digest == Digest.of(PLACEMENT.content)


def test_rows_follow_the_chunks_of_the_manifest_and_then_the_extra_ones():
    one, two = Digest.of(b"1"), Digest.of(b"2")
    places = PLACEMENT.index({one: 60, two: 40})
    assert [places.digest(places.row(digest)) for digest in (one, two)] == [one, two]
    assert [PLACEMENT.rows[places.row(digest)] for digest in (one, two)] == list(ROWS)
    with_extra = Placement(MANIFEST, (REF,), Rows(ROWS), Digests([two]))
    places = with_extra.index({one: 60})
    assert [places.digest(0), places.digest(1)] == [one, two]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_placement_covers_its_manifest(count):
    chunks = {Digest.of(bytes([i])): 1 for i in range(count)}
    with pytest.raises(Malformed, match=rf"does not cover.*expected {count} rows; found 2"):
        PLACEMENT.index(chunks)


# Foreign bytes

HEADER = canonical.decode(PLACEMENT.content.partition(b"\n")[0], where="x")
COLUMNS = PLACEMENT.content.partition(b"\n")[2]


def _decode(header=HEADER, columns=COLUMNS, spelt=bytes):
    content = spelt(canonical.encode(header)) + b"\n" + columns
    return Placement.decode(wrap_frame(content), Digest.of(content), where="the/key")


def _row(pack=0, offset=0, stored=60, codec=0, base=NO_BASE):
    return {
        "header": HEADER | {"rows": 1},
        "columns": struct.pack("<IQIBI", pack, offset, stored, codec, base),
    }


def test_what_is_broken_below_is_legal_before():
    assert _decode() == PLACEMENT
    assert len(_decode(**_row()).rows) == 1


BROKEN = {
    "unknown key": {"header": HEADER | {"more": 1}},
    "missing key": {"header": {k: v for k, v in HEADER.items() if k != "extra"}},
    "packs no list": {"header": HEADER | {"packs": 5}},
    "pack no triple": {"header": HEADER | {"packs": [[PACK.hex(), 4]]}},
    "pack digest malformed": {"header": HEADER | {"packs": [["ab", 4, 100]]}},
    "size no number": {"header": HEADER | {"packs": [[PACK.hex(), 4, "100"]]}},
    "manifest malformed": {"header": HEADER | {"manifest": "ab"}},
    "extra malformed": {"header": HEADER | {"extra": ["ab"]}},
    "too few rows": {"header": HEADER | {"rows": 1}},
    "too many rows": {"header": HEADER | {"rows": 3}},
    "rows a flag": {"header": HEADER | {"rows": True}},
    "columns cut": {"columns": COLUMNS[:-1]},
    "columns too long": {"columns": COLUMNS + b"\0"},
    "pack out of range": _row(pack=1),
    "beyond its pack": _row(offset=41),
    "codec unknown": _row(codec=255),
    "base out of range": _row(codec=1, base=1),
    "base far out of range": _row(codec=1, base=500),
    "not canonical": {"spelt": lambda line: line.replace(b",", b", ", 1)},
}


@pytest.mark.parametrize("parts", BROKEN.values(), ids=BROKEN.keys())
def test_each_rule_of_the_format_has_its_error(parts):
    with pytest.raises(Malformed, match="the/key"):
        _decode(**parts)


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param({"header": HEADER | {"packs": [[5, 4, 100]]}}, id="digest no string"),
        pytest.param({"header": HEADER | {"manifest": 5}}, id="manifest no string"),
        pytest.param(
            {"header": HEADER | {"packs": [[PACK.hex(), "4", 100]]}}, id="generation text"
        ),
        pytest.param({"header": HEADER | {"packs": [[PACK.hex(), -4, 100]]}}, id="generation < 0"),
        pytest.param({"header": HEADER | {"packs": [[PACK.hex(), None, 100]]}}, id="no generation"),
        pytest.param(_row(stored=0), id="a chunk of no bytes"),
        pytest.param(_row(base=0), id="a raw chunk with a base"),
    ],
)
def test_values_out_of_their_range_are_refused(parts):
    with pytest.raises(Malformed):
        _decode(**parts)


@pytest.mark.parametrize("header", [HEADER | {"format": "holdfast.placement/3"}, [], 5])
def test_another_format_says_so(header):
    with pytest.raises(UnsupportedFormat, match=r"expected holdfast\.placement/1; found"):
        _decode(header)


def test_another_placement_is_refused():
    with pytest.raises(Malformed, match=r"another placement; expected.*found"):
        Placement.decode(PLACEMENT.encode(), MANIFEST, where="x")


def test_a_flipped_bit_is_damage():
    data = bytearray(PLACEMENT.encode())
    data[10] ^= 4
    with pytest.raises(Damaged):
        Placement.decode(bytes(data), PLACEMENT.digest, where="x")
