"""A digest is a SHA-256 and nothing else, in exactly two spellings."""

from __future__ import annotations

import hashlib
import pickle

import pytest
from hypothesis import given

from holdfast.registry.errors import InvalidInput
from holdfast.registry.values.digest import Digest, Digests
from tests.support.strategies import digests, quick

PLAIN = hashlib.sha256(b"abc").hexdigest()


@quick
@given(digests)
def test_both_spellings_are_read_back(digest):
    assert Digest.parse(str(digest)) == digest
    assert Digest.parse(digest.hex()) == digest
    assert str(digest) == f"sha256:{digest.hex()}"
    assert type(Digest.parse(digest.hex())) is Digest


@pytest.mark.parametrize("data", [b"abc", bytearray(b"abc"), memoryview(b"abc")])
def test_of_hashes_any_buffer(data):
    assert Digest.of(data).hex() == PLAIN


def test_short_is_twelve_digits_and_so_is_the_repr():
    digest = Digest.of(b"abc")
    assert digest.short == PLAIN[:12]
    assert repr(digest) == f"Digest({PLAIN[:12]})"


@pytest.mark.parametrize(
    "text",
    [
        "",
        PLAIN[:-1],
        PLAIN + "0",
        PLAIN.upper(),
        "g" + PLAIN[1:],
        PLAIN + "\n",
        " " + PLAIN,
        "sha256:" + PLAIN.upper(),
        "sha256:",
        "٣" + PLAIN[1:],
    ],
)
def test_a_malformed_digest_is_refused(text):
    with pytest.raises(InvalidInput, match=r"malformed digest.*64 lower-case.*characters"):
        Digest.parse(text)


@pytest.mark.parametrize("text", ["md5:" + PLAIN, "SHA256:" + PLAIN, "sha256:sha256:" + PLAIN, ":"])
def test_another_algorithm_is_refused(text):
    with pytest.raises(InvalidInput, match=r"unknown hash algorithm.*expected sha256"):
        Digest.parse(text)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_other_lengths_are_no_digest(size):
    with pytest.raises(InvalidInput, match=f"expected 32 bytes; found {size} bytes"):
        Digest(bytes(size))


def test_a_digest_survives_pickling_between_processes():
    digest = Digest.of(b"x")
    again = pickle.loads(pickle.dumps(digest))
    assert again == digest
    assert type(again) is Digest


def test_digests_in_one_block_are_a_sequence_of_them():
    one, two, three = (Digest.of(data) for data in (b"1", b"2", b"3"))
    packed = Digests([one, two, three])
    assert list(packed) == [packed[0], packed[1], packed[-1]] == [one, two, three]
    assert list(packed[1:]) == [two, three]
    assert packed == Digests(iter([one, two, three]))
    assert packed != Digests([one, two])
    for number in (3, -4):
        with pytest.raises(IndexError):
            packed[number]
