"""Semantic versions: text there and back, precedence as semver.org has it, names of releases."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.registry.errors import InvalidInput
from holdfast.registry.values.semver import SemVer, release_version
from tests.support.strategies import quick

#: From the list that semver.org gives for its regular expression.
VALID = [
    *("0.0.4", "1.2.3", "10.20.30", "1.1.2-prerelease+meta", "1.1.2+meta"),
    *("1.1.2+meta-valid", "1.0.0-alpha", "1.0.0-beta", "1.0.0-alpha.beta", "1.0.0-alpha.beta.1"),
    *(
        "1.0.0-alpha.1",
        "1.0.0-alpha0.valid",
        "1.0.0-alpha.0valid",
        "1.0.0-alpha-a.b-c-somethinglong+build.1-aef.1-its-okay",
        "1.0.0-rc.1+build.1",
    ),
    *("2.0.0-rc.1+build.123", "1.2.3-beta", "10.2.3-DEV-SNAPSHOT", "1.2.3-SNAPSHOT-123", "1.0.0"),
    *("2.0.0", "1.1.7", "2.0.0+build.1848", "2.0.1-alpha.1227", "1.0.0-alpha+beta"),
    *(
        "1.2.3----RC-SNAPSHOT.12.9.1--.12+788",
        "1.2.3----R-S.12.9.1--.12+meta",
        "1.2.3----RC-SNAPSHOT.12.9.1--.12",
        "1.0.0+0.build.1-rc.10000aaa-kk-0.1",
        "99999999999999999999999.999999999999999999.99999999999999999",
    ),
    "1.0.0-0A.is.legal",
]
INVALID = [
    *("1", "1.2", "1.2.3-0123", "1.2.3-0123.0123", "1.1.2+.123"),
    *("+invalid", "-invalid", "-invalid+invalid", "-invalid.01", "alpha"),
    *("alpha.beta", "alpha.beta.1", "alpha.1", "alpha+beta", "alpha_beta"),
    *("alpha.", "alpha..", "beta", "1.0.0-alpha_beta", "-alpha."),
    *("1.0.0-alpha..", "1.0.0-alpha..1", "1.0.0-alpha...1", "01.1.1", "1.01.1"),
    *(
        "1.1.01",
        "1.2.3.DEV",
        "1.2-SNAPSHOT",
        "1.2.31.2.3----RC-SNAPSHOT.12.09.1--..12+788",
        "1.2-RC-SNAPSHOT",
    ),
    *("-1.0.3-gamma+b7718", "+justmeta", "9.8.7+meta+meta", "9.8.7-whatever+meta+meta", "v1.0.0"),
    *("1.0.0-", "1.0.0+", "١.0.0", "1.0.0-é"),
]


@pytest.mark.parametrize("text", VALID)
def test_versions(text):
    version = SemVer.parse(text)
    assert str(version) == text
    assert SemVer.parse(str(version)) == version


@pytest.mark.parametrize(
    "text",
    [
        *INVALID,
        "",
        "1.0.0\n",
        " 1.0.0",
        "1.0.0-" + "a" * 300,
        "1.0." + "9" * 5000,
        1,
        None,
        b"1.0.0",
    ],
)
def test_what_is_no_version(text):
    with pytest.raises(InvalidInput, match=r"not a semantic version; expected MAJOR\.MINOR\.PATCH"):
        SemVer.parse(text)


def test_a_leading_v_is_pointed_out():
    with pytest.raises(InvalidInput, match="Leave out the 'v'"):
        SemVer.parse("v1.0.0")


@pytest.mark.parametrize(
    "parts",
    [
        (-1, 0, 0),
        (1.0, 0, 0),
        ("1", 0, 0),
        (True, 0, 0),
        (1, 0, 0, "01"),
        (1, 0, 0, "a+b"),
        (1, 0, 0, "a", "b+c"),
        (1, 0, 0, None),
        (1, 0, 0, "a_b"),
        (1, 0, 0, "a" * 300),
    ],
)
def test_parts_that_make_no_version(parts):
    with pytest.raises(InvalidInput, match="not a semantic version"):
        SemVer(*parts)


def test_parts():
    version = SemVer.parse("1.2.3-rc.1+linux.7")
    assert (version.major, version.minor, version.patch) == (1, 2, 3)
    assert (version.prerelease, version.build) == ("rc.1", "linux.7")
    assert version == SemVer(1, 2, 3, "rc.1", "linux.7")


#: Rule 11 of semver.org, with its own examples.
ASCENDING = [
    *("0.9.9", "1.0.0-0", "1.0.0-2", "1.0.0-11", "1.0.0--1"),
    *("1.0.0-A", "1.0.0-a", "1.0.0-alpha", "1.0.0-alpha.1", "1.0.0-alpha.beta"),
    *("1.0.0-beta", "1.0.0-beta.2", "1.0.0-beta.11", "1.0.0-rc.1", "1.0.0"),
    *("1.0.1-a", "1.0.1", "1.2.0", "1.10.0", "2.0.0"),
    *("2.1.0", "2.1.1", "10.0.0"),
]


def test_precedence():
    for lower, higher in itertools.combinations(map(SemVer.parse, ASCENDING), 2):
        assert lower < higher
        assert higher > lower
        assert lower <= higher
        assert not lower >= higher
        assert lower != higher


def test_build_metadata_is_not_compared():
    a, b = SemVer.parse("1.0.0+a"), SemVer.parse("1.0.0+b")
    assert a == b
    assert hash(a) == hash(b)
    assert not a < b
    assert a <= b
    assert [str(a), str(b)] == ["1.0.0+a", "1.0.0+b"]


def test_other_types_are_not_compared():
    assert SemVer(1, 0, 0) != "1.0.0"
    with pytest.raises(TypeError):
        assert SemVer(1, 0, 0) < "2.0.0"


@quick
@given(st.lists(st.sampled_from(VALID), min_size=3, max_size=3))
def test_the_order_is_total(texts):
    a, b, c = sorted(map(SemVer.parse, texts))
    assert a <= b <= c
    assert a <= c
    assert (a < b) + (a == b) + (a > b) == 1


@pytest.mark.parametrize("text", ["1.0.0", "2.0.0-rc.1", "0.0.0-" + "a" * 58])
def test_names_of_releases(text):
    assert str(release_version(text)) == text


def test_a_release_has_no_build_metadata():
    with pytest.raises(InvalidInput, match=r"1\.0\.0\+a: .*no build metadata; expected 1\.0\.0\."):
        release_version("1.0.0+a")


def test_a_release_has_a_short_name():
    with pytest.raises(InvalidInput, match="too long; expected at most 64 characters; found 65"):
        release_version("0.0.0-" + "a" * 59)
    with pytest.raises(InvalidInput, match="not a semantic version"):
        release_version("1.0")
