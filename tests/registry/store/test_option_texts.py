"""Storage options as text: how values are read, and that no message repeats one."""

from __future__ import annotations

import pytest

from holdfast.errors import InvalidInput
from holdfast.registry.store.address import VARIABLE, Address, from_environment, from_pairs, merged
from tests.support.faults import everything_said

SECRET = "SECRET-that-nobody-may-see"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("profile=work", {"profile": "work"}),
        ("anon=true", {"anon": True}),
        ("expiry=60", {"expiry": 60}),
        ("ratio=0.5", {"ratio": 0.5}),
        ("a=null", {"a": None}),
        ('name="60"', {"name": "60"}),
        ("a=NaN", {"a": "NaN"}),
        ("a=True", {"a": "True"}),
        ("a=", {"a": ""}),
        ("a=b=c", {"a": "b=c"}),
        ("a={", {"a": "{"}),
        ('a={"b": 1, "b": 2}', {"a": '{"b": 1, "b": 2}'}),
        ('client_kwargs={"verify": false}', {"client_kwargs": {"verify": False}}),
        (
            "client_kwargs.endpoint_url=http://x:1",
            {"client_kwargs": {"endpoint_url": "http://x:1"}},
        ),
        (
            "config_kwargs.s3.addressing_style=path",
            {"config_kwargs": {"s3": {"addressing_style": "path"}}},
        ),
        # An access key may consist of digits.
        ("key=0123", {"key": "0123"}),
        ("secret=12345678", {"secret": "12345678"}),
        ("client_kwargs.aws_access_key_id=1e5", {"client_kwargs": {"aws_access_key_id": "1e5"}}),
    ],
)
def test_value(text: str, value: object) -> None:
    assert from_pairs([text], "--storage-option") == value


def test_options_of_one_name_are_joined() -> None:
    given = ["a.b=1", 'a={"c": 2}', "a.d.e=3"]
    assert from_pairs(given, "-o") == {"a": {"b": 1, "c": 2, "d": {"e": 3}}}
    assert merged({"a": {"b": 1, "c": 1}, "d": 1}, {"a": {"b": 2}}) == {
        "a": {"b": 2, "c": 1},
        "d": 1,
    }


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([SECRET], "-o, number 1"),
        (["a=1", f"={SECRET}"], "-o, number 2"),
        ([f"a..b={SECRET}"], "-o, number 1"),
        (["secret=1", f"secret={SECRET}"], "-o secret: .* given twice"),
        (["a=1", f"a.b={SECRET}"], "-o a.b: .* given twice"),
        (["a.b=1", f"a={SECRET}"], "-o a: .* given twice"),
        (["a.b=1", f'a={{"b": "{SECRET}"}}'], "-o a: .* given twice"),
    ],
)
def test_wrong_pair(texts: list[str], said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as caught:
        from_pairs(texts, "-o")
    assert SECRET not in everything_said(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'{{"secret": "{SECRET}", }}', "not JSON.*at character (39|41)"),
        (f"secret={SECRET}", "not JSON"),
        (f'["{SECRET}"]', "not a JSON object.*found list"),
        (f'{{"a": {{"k": 1, "k": "{SECRET}"}}}}', "not JSON.*the name 'k' twice"),
        (f'{{"a": NaN, "secret": "{SECRET}"}}', "not JSON.*found NaN, which is not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_wrong_variable(text: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(InvalidInput, match=f"{VARIABLE}: {said}") as caught:
        from_environment()
    assert SECRET not in everything_said(caught.value)


def test_environment_completes_what_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        VARIABLE, '{"key": "k", "client_kwargs": {"verify": false, "region_name": "r"}}'
    )
    address = Address.of_environment("s3://bucket", {"client_kwargs": {"verify": True}})
    assert address.storage_options == {
        "key": "k",
        "client_kwargs": {"verify": True, "region_name": "r"},
    }
    # They have no options: the variable is meant for another registry.
    for url in ("memory://x", "folder"):
        assert Address.of_environment(url).storage_options is None
    monkeypatch.setenv("OWN", '{"key": "own"}')
    assert Address.of_environment("s3://bucket", None, ["OWN", VARIABLE]).storage_options == {
        "key": "own"
    }
    monkeypatch.setenv("OWN", "{}")
    assert Address.of_environment("s3://bucket", None, ["OWN", VARIABLE]).storage_options is None
    assert "own" not in repr(address)
