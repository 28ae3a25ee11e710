"""A file proves its own bytes: any flipped bit and any cut is noticed."""

from __future__ import annotations

import hashlib

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends import limits
from holdfast.registry.errors import BeyondLimit, Damaged, Malformed
from holdfast.registry.objects.framing import join_lines, split_lines, unwrap_frame, wrap_frame
from tests.support.strategies import quick

lines = st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line), min_size=1)


@quick
@given(lines)
def test_lines_come_back(some):
    assert split_lines(join_lines(some), where="x") == some


@quick
@given(st.binary(max_size=2000))
def test_a_frame_comes_back(content):
    assert unwrap_frame(wrap_frame(content), where="x") == content


def test_the_closing_line_is_the_digest_of_all_before_it():
    assert join_lines([b"{}", b"[]"]) == (
        b"{}\n[]\n" + hashlib.sha256(b"{}\n[]\n").hexdigest().encode() + b"\n"
    )


def test_a_frame_is_followed_by_its_digest():
    data = wrap_frame(b"content")
    assert data[-32:] == hashlib.sha256(data[:-32]).digest()


FILES = [
    (join_lines([b'{"a":1}', b"[]"]), split_lines),
    (wrap_frame(b"some content of a manifest"), unwrap_frame),
]


@pytest.mark.parametrize(("data", "read"), FILES)
def test_every_flipped_bit_is_noticed(data, read):
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged, match="the/key: damaged file"):
            read(bytes(damaged), where="the/key")


@pytest.mark.parametrize(("data", "read"), FILES)
def test_every_cut_and_every_addition_is_noticed(data, read):
    for end in range(len(data)):
        with pytest.raises(Damaged):
            read(data[:end], where="x")
    for more in (b"\n", b"x", data):
        with pytest.raises(Damaged):
            read(data + more, where="x")


def test_a_file_of_no_lines_is_damaged():
    with pytest.raises(Damaged):
        split_lines(join_lines([]), where="x")


def _closed(frame: bytes) -> bytes:
    return frame + hashlib.sha256(frame).digest()


@pytest.mark.parametrize(
    "frame",
    [b"", b"not zstd", wrap_frame(b"x" * 100)[:-40], b"\x28\xb5\x2f\xfd"],
)
def test_what_is_no_frame_is_malformed(frame):
    with pytest.raises(Malformed, match="not a zstd frame"):
        unwrap_frame(_closed(frame), where="x")


def test_a_frame_that_unpacks_to_too_much_is_refused_before_memory_is_taken(monkeypatch):
    data = wrap_frame(bytes(1001))
    monkeypatch.setenv(limits.VARIABLE, "1000")
    with pytest.raises(BeyondLimit, match="expected at most 1000 bytes; found about 1001 bytes"):
        unwrap_frame(data, where="x")


def test_a_frame_that_does_not_say_its_size_is_refused():
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 100)
    with pytest.raises(Malformed, match="does not state its size"):
        unwrap_frame(_closed(frame), where="x")


def test_a_frame_with_something_behind_it_is_refused():
    with pytest.raises(Malformed):
        unwrap_frame(_closed(wrap_frame(b"content")[:-32] + b"hidden"), where="x")
