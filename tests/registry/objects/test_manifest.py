"""A manifest says what a state is; its digest is the checkpoint's id."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.registry.errors import Damaged, Malformed, UnsupportedFormat
from holdfast.registry.objects.chunking import INLINE_BYTES, grid
from holdfast.registry.objects.framing import unwrap_frame, wrap_frame
from holdfast.registry.objects.manifest import Component, Manifest
from holdfast.registry.objects.tensor_entry import (
    NARROW_DTYPES,
    ORIGINAL_DTYPES,
    NarrowedDtype,
    TensorEntry,
    check_list,
)
from holdfast.registry.values import canonical
from holdfast.registry.values.digest import Digest
from tests.support.stores import small_grid
from tests.support.strategies import digests, dtypes, json_values, quick, shapes, texts


@st.composite
def entries(draw):
    dtype, shape = draw(dtypes), draw(shapes)
    cut = grid(dtype, shape)
    original = None
    if dtype in NARROW_DTYPES:
        original = draw(st.none() | st.sampled_from(sorted(ORIGINAL_DTYPES)))
    if cut.nbytes <= INLINE_BYTES:
        data = draw(st.binary(min_size=cut.nbytes, max_size=cut.nbytes))
        return TensorEntry(dtype, shape, inline=data, original=original)
    chunks = tuple(draw(digests) for _ in range(cut.count))
    return TensorEntry(dtype, shape, chunks=chunks, original=original)


components = st.builds(Component.build, json_values, st.lists(entries(), max_size=3))
manifests = st.builds(
    Manifest, st.sampled_from(["dict", "odict"]), st.dictionaries(texts, components, max_size=3)
)


@quick
@given(manifests)
def test_a_manifest_comes_back(manifest):
    read = Manifest.decode(manifest.encode(), manifest.digest, where="x")
    assert read == manifest
    assert list(read.components) == list(manifest.components)
    assert read.digest == manifest.digest
    assert read.encode() == manifest.encode()


def test_the_id_is_that_of_the_manifest_with_components_replaced_by_their_digests():
    part = Component.build({"d": []}, [])
    manifest = Manifest("dict", {"m": part})
    body = {"grid": "rows/1", "skeleton": {"d": []}, "tensors": []}
    assert part.digest == Digest.of(canonical.encode(body))
    named = {
        "format": "holdfast.checkpoint/1",
        "kind": "dict",
        "components": [["m", part.digest.hex()]],
    }
    assert manifest.digest == Digest.of(canonical.encode(named))


@pytest.mark.parametrize(
    "other",
    [
        Manifest("odict", {"a": Component.build(1, []), "b": Component.build(2, [])}),
        Manifest("dict", {"b": Component.build(2, []), "a": Component.build(1, [])}),
        Manifest("dict", {"a": Component.build(1, []), "c": Component.build(2, [])}),
        Manifest("dict", {"a": Component.build(1, []), "b": Component.build(3, [])}),
        Manifest("dict", {"a": Component.build(1, [])}),
    ],
)
def test_kind_order_names_and_content_make_the_id(other):
    assert (
        other.digest
        != Manifest("dict", {"a": Component.build(1, []), "b": Component.build(2, [])}).digest
    )


CHUNK = Digest.of(b"c")


def test_the_content_of_a_tensor_is_dtype_shape_and_bytes():
    contents = {
        TensorEntry("int8", (100,), chunks=(CHUNK,)).content,
        TensorEntry("uint8", (100,), chunks=(CHUNK,)).content,
        TensorEntry("int8", (10, 10), chunks=(CHUNK,)).content,
        TensorEntry("int8", (100,), chunks=(Digest.of(b"d"),)).content,
        TensorEntry("int8", (2,), inline=b"ab").content,
    }
    assert len(contents) == 5


def test_what_a_tensor_was_before_is_in_the_id_and_not_in_its_content():
    plain = TensorEntry("bfloat16", (100,), chunks=(CHUNK,))
    once = TensorEntry(NarrowedDtype("bfloat16", "float32"), (100,), chunks=(CHUNK,))
    assert (once.dtype, once.original) == ("bfloat16", "float32")
    assert type(once.dtype) is str
    assert once == TensorEntry("bfloat16", (100,), chunks=(CHUNK,), original="float32")
    assert "original" not in plain.to_json()
    assert once.to_json() == {**plain.to_json(), "original": "float32"}
    assert plain.content == once.content
    assert Component.build(0, [plain]).digest != Component.build(0, [once]).digest


def test_a_tensor_with_a_digest_list_keeps_what_it_was_before():
    entry = TensorEntry("float16", (250,), chunk_list=CHUNK, original="float64")
    with small_grid(100, list_threshold=2):
        manifest = Manifest("dict", {"m": Component.build(0, [entry])})
        read = Manifest.decode(manifest.encode(), manifest.digest, where="x")
    assert read.components["m"].tensors == (entry,)


def test_direct_chunks_are_distinct_and_in_order_with_their_raw_lengths():
    one, two, three = (Digest.of(bytes([i])) for i in range(3))
    with small_grid(100):
        parts = [
            TensorEntry("int8", (150,), chunks=(one, two)),
            TensorEntry("int8", (70,), chunks=(three,)),
            TensorEntry("int8", (100,), chunks=(one,)),
        ]
        manifest = Manifest("dict", {"m": Component.build(0, parts)})
        assert list(manifest.direct_chunks.items()) == [(one, 100), (two, 50), (three, 70)]
        assert manifest.all_chunks({}) == manifest.direct_chunks
        assert manifest.distinct_chunks({}) == [one, two, three]
        assert manifest.nbytes == 320


def test_lists_stand_among_the_direct_chunks_and_their_members_follow():
    one, two, three = (Digest.of(bytes([i])) for i in range(3))
    data = one + two + one
    with small_grid(100, list_threshold=2):
        parts = [
            TensorEntry("int8", (250,), chunk_list=Digest.of(data)),
            TensorEntry("int8", (100,), chunks=(three,)),
        ]
        manifest = Manifest("dict", {"m": Component.build(0, parts)})
        assert list(manifest.direct_chunks.items()) == [(Digest.of(data), 96), (three, 100)]
        assert list(manifest.all_chunks({Digest.of(data): data}).items()) == [
            (Digest.of(data), 96),
            (three, 100),
            (one, 100),
            (two, 100),
        ]
        assert manifest.distinct_chunks({Digest.of(data): data}) == [
            Digest.of(data),
            three,
            one,
            two,
        ]
        assert Manifest.decode(manifest.encode(), manifest.digest, where="x") == manifest


@pytest.mark.parametrize("size", [0, 63, 65, 96])
def test_a_digest_list_covers_its_tensor(size):
    with pytest.raises(Malformed, match=r"digest list does not cover.*64 bytes.*found"):
        check_list(bytes(size), 2, where="x")


def test_a_digest_list_is_read():
    listed = CHUNK + Digest.of(b"d")
    assert check_list(listed, 2, where="x") == listed


# Foreign bytes

DATA = base64.b64encode(b"abcd").decode()
INLINE = {"dtype": "float32", "shape": [1], "data": DATA}
CHUNKED = {"dtype": "int8", "shape": [10, 10], "chunks": [CHUNK.hex()]}
PART = {"grid": "rows/1", "skeleton": {"d": []}, "tensors": [INLINE, CHUNKED]}
BODY = {"format": "holdfast.checkpoint/1", "kind": "dict", "components": [["m", PART]]}


def _decode(body, expected=CHUNK):
    return Manifest.decode(wrap_frame(canonical.encode(body)), expected, where="the/key")


def _tensor(**changes):
    entry = {key: value for key, value in {**CHUNKED, **changes}.items() if value is not None}
    return BODY | {"components": [["m", PART | {"tensors": [entry]}]]}


def test_the_body_that_is_broken_below_is_legal_before():
    digest = Manifest(
        "dict",
        {
            "m": Component.build(
                {"d": []},
                [
                    TensorEntry("float32", (1,), inline=b"abcd"),
                    TensorEntry("int8", (10, 10), chunks=(CHUNK,)),
                ],
            )
        },
    ).digest
    assert _decode(BODY, digest).digest == digest


BROKEN = {
    "unknown key": BODY | {"more": 1},
    "missing key": {k: v for k, v in BODY.items() if k != "kind"},
    "unknown kind": BODY | {"kind": "list"},
    "components no list": BODY | {"components": 5},
    "component no pair": BODY | {"components": [["m"]]},
    "component twice": BODY | {"components": [["m", PART], ["m", PART]]},
    "name unhashable": BODY | {"components": [[[], PART]]},
    "component no object": BODY | {"components": [["m", None]]},
    "component with more": BODY | {"components": [["m", PART | {"more": 1}]]},
    "unknown grid": BODY | {"components": [["m", PART | {"grid": "rows/2"}]]},
    "tensors no list": BODY | {"components": [["m", PART | {"tensors": 5}]]},
    "tensor no object": BODY | {"components": [["m", PART | {"tensors": [5]}]]},
    "dtype unknown": _tensor(dtype="object"),
    "dtype no string": _tensor(dtype=[]),
    "shape negative": _tensor(shape=[-1, 100]),
    "shape of strings": _tensor(shape="99"),
    "shape with a flag": _tensor(shape=[True, 100]),
    "shape no list": _tensor(shape=100),
    "too many axes": _tensor(shape=[1] * 64 + [100]),
    "product beyond 2^63": _tensor(shape=[2**50, 2**50]),
    "too few chunks": _tensor(chunks=[]),
    "too many chunks": _tensor(chunks=[CHUNK.hex()] * 2),
    "chunk malformed": _tensor(chunks=["ab"]),
    "chunk no string": _tensor(chunks=[5]),
    "chunks for inline size": _tensor(shape=[1]),
    "inline too short": _tensor(chunks=None, data=DATA),
    "inline too long": _tensor(shape=[65], chunks=None, data=base64.b64encode(bytes(65)).decode()),
    "inline no base64": _tensor(shape=[4], chunks=None, data="????"),
    "inline no string": _tensor(shape=[4], chunks=None, data=5),
    "list for few chunks": _tensor(chunks=None, list=CHUNK.hex()),
    "list malformed": _tensor(shape=[2**31], chunks=None, list="ab"),
    "bytes twice": _tensor(data=DATA),
    "no bytes": _tensor(chunks=None),
    "unknown tensor key": _tensor(more=1),
    "original unknown": _tensor(dtype="bfloat16", original="object"),
    "original no string": _tensor(dtype="bfloat16", original=[]),
    "original null": BODY
    | {
        "components": [
            ["m", PART | {"tensors": [CHUNKED | {"dtype": "bfloat16", "original": None}]}]
        ]
    },
    "original not wider": _tensor(dtype="bfloat16", original="float16"),
    "original the same": _tensor(dtype="bfloat16", original="bfloat16"),
    "original no float": _tensor(dtype="bfloat16", original="int32"),
    "original of an integer": _tensor(original="float32"),
    "original of what was never narrowed": _tensor(dtype="float32", original="float64"),
    "original beyond 2^63": _tensor(
        dtype="bfloat16", shape=[2**30, 2**31], chunks=None, list=CHUNK.hex(), original="float64"
    ),
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN.keys())
def test_each_rule_of_the_format_has_its_error(body):
    with pytest.raises(Malformed, match="the/key: breaks the manifest format; found"):
        _decode(body)


@pytest.mark.parametrize("body", [BODY | {"format": "holdfast.checkpoint/2"}, [], 5])
def test_another_format_says_so(body):
    with pytest.raises(UnsupportedFormat, match=r"expected holdfast\.checkpoint/1; found"):
        _decode(body)


def test_the_manifest_of_another_checkpoint_is_refused():
    with pytest.raises(Malformed, match=r"another checkpoint's manifest.*expected.*found"):
        _decode(BODY)


def test_a_flipped_bit_is_damage():
    data = bytearray(wrap_frame(canonical.encode(BODY)))
    data[20] ^= 1
    with pytest.raises(Damaged):
        Manifest.decode(bytes(data), CHUNK, where="x")


def test_a_body_that_is_not_canonical_is_refused():
    manifest = Manifest("dict", {"model": Component.build({"d": []}, [])})
    content = unwrap_frame(manifest.encode(), where="x")
    assert Manifest.decode(wrap_frame(content), manifest.digest, where="x") == manifest
    for spelt in (content.replace(b",", b", ", 1), content.replace(b"model", b"m\\u006fdel")):
        with pytest.raises(Malformed, match="not canonical"):
            Manifest.decode(wrap_frame(spelt), manifest.digest, where="x")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(_tensor(chunks=[str(CHUNK)]), id="sha256: before a chunk"),
        pytest.param(
            _tensor(dtype="int8", shape=[1], chunks=None, data="YR=="), id="padding bits in base64"
        ),
    ],
)
def test_content_has_one_spelling(body):
    with pytest.raises(Malformed, match="breaks the manifest format"):
        _decode(body)


@quick
@given(manifests)
def test_the_file_is_a_frame_of_canonical_json(manifest):
    content = unwrap_frame(manifest.encode(), where="x")
    assert canonical.encode(canonical.decode(content, where="x")) == content


def test_a_name_that_is_no_text_is_malformed():
    body = canonical.encode(BODY).replace(b'["m",', b'["\\ud800",')
    with pytest.raises(Malformed, match="the/key"):
        Manifest.decode(wrap_frame(body), CHUNK, where="the/key")


@quick
@given(manifests, st.data())
def test_the_quick_reader_takes_what_is_canonical_and_nothing_else(manifest, data):
    content = unwrap_frame(manifest.encode(), where="x")
    assert Manifest._spelled(content, "x") == Manifest._parse(content, "x") == manifest
    assert Manifest._spelled(content.replace(b'],"format"', b',],"format"'), "x") is None
    at, until = sorted(data.draw(st.integers(0, len(content))) for _ in range(2))
    with_changes = data.draw(
        st.sampled_from([b'"', b",", b"]", b"}", b"0", b"A", b'","', b"\\", b""])
    )
    changed = content[:at] + with_changes + content[min(until, at + 2) :]
    quickly = Manifest._spelled(changed, "x")
    if quickly is not None:
        assert quickly == Manifest._parse(changed, "x")
        assert quickly.digest == Manifest._parse(changed, "x").digest
