"""Model cards: plain values in, YAML out, and nothing in YAML that is more than data."""

from __future__ import annotations

import datetime as dt
import enum
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from holdfast.registry.curation.cards import MAX_BYTES, MAX_DEPTH, check_card, read_card, write_card
from holdfast.registry.errors import InvalidInput, UnsupportedValue
from tests.support.sameness import assert_same
from tests.support.strategies import examples

CARD = {
    "description": "Bayesian Expectation Transformer for sentiment analysis",
    "dataset": "IMDB",
    "training_date": "2025-10-25T00:00:00",
    "intended_use": "Sentiment classification with uncertainty",
    "performance": {"accuracy": 0.9234},
}
#: A folder of cards (*.yaml) that another program wrote by PyYAML's `dump`, to try them, too.
CARDS = os.environ.get("HOLDFAST_TEST_CARDS")


@pytest.fixture
def read(tmp_path):
    def read(text):
        path = tmp_path / "card.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_card(path)

    return read


def test_a_card_is_written_in_block_style_with_its_keys_sorted():
    assert write_card(CARD) == (
        "dataset: IMDB\n"
        "description: Bayesian Expectation Transformer for sentiment analysis\n"
        "intended_use: Sentiment classification with uncertainty\n"
        "performance:\n"
        "  accuracy: 0.9234\n"
        "training_date: '2025-10-25T00:00:00'\n"
    )


@pytest.mark.skipif(not CARDS, reason="HOLDFAST_TEST_CARDS names no folder")
def test_cards_of_another_program():
    paths = list(Path(str(CARDS)).glob("*.yaml"))
    assert paths
    for path in paths:
        card = read_card(path)
        check_card(card, list(CARD))
        assert write_card(card) == path.read_text()


odd = st.sampled_from("\x85\u2028\u2029\ufeff\x00\x7f\n\t\r' \"#:-%é\U0001f600")
texts = st.text(st.characters(exclude_categories=["Cs"]) | odd, max_size=90)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(texts, plain, max_size=5))
def test_what_is_written_is_read(read, card):
    assert_same(read(write_card(card)), _sorted(card))


def _sorted(value):
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "text", ["é", "日本語", "a: b", "- x", "1", "no", "1:30", "2026-01-02", "~"]
)
def test_text_stays_text(read, text):
    assert_same(read(write_card({text: text})), {text: text})


def test_letters_of_all_languages_stand_as_they_are():
    assert write_card({"é": "日本語"}) == "é: 日本語\n"


def test_dates_become_strings(read):
    dates = {"a": dt.date(2026, 1, 2), "b": dt.datetime(2026, 1, 2, 3, 4, tzinfo=dt.UTC)}
    expected = {"a": "2026-01-02", "b": "2026-01-02T03:04:00+00:00"}
    assert read_card(dates) == expected
    assert read("a: 2026-01-02\nb: 2026-01-02T03:04:00Z\n") == expected


class Word(enum.StrEnum):
    A = "a"


def test_subclasses_and_tuples_become_plain():
    card = read_card({"loss": np.float64(0.5), "kind": Word.A, "tags": ("x", "y")})
    assert card == {"loss": 0.5, "kind": "a", "tags": ["x", "y"]}
    assert [type(card["loss"]), type(card["kind"])] == [float, str]


def test_a_card_is_a_copy_and_shares_nothing():
    tags = ["x"]
    card = read_card({"a": tags, "b": tags})
    tags.append("y")
    assert card == {"a": ["x"], "b": ["x"]}
    assert write_card({"a": tags, "b": tags}) == "a:\n- x\n- y\nb:\n- x\n- y\n"


def test_yaml_is_imported_at_first_use():
    code = "import sys\nfrom holdfast.registry.curation.cards import read_card\n"
    code += "read_card({}); sys.exit('yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Refusals


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.float32(1), "float32"),
        (torch.ones(()), "Tensor"),
        (np.ones(2), "ndarray"),
        ({1}, "set"),
        (b"x", "bytes"),
        (1j, "complex"),
        (dt.time(), "time"),
    ],
)
def test_values_that_are_not_plain_are_named(value, found):
    for use in (read_card, write_card):
        with pytest.raises(UnsupportedValue, match=r"card\['p'\]\[1\]: .*found " + found):
            use({"p": [0, value]})


@pytest.mark.parametrize("card", [{"p": {1: 2}}, {"p": {None: 2}}])
def test_keys_that_are_not_strings(card):
    with pytest.raises(InvalidInput, match=r"card\['p'\]: a key of a card is not a string"):
        write_card(card)


@pytest.mark.parametrize("card", [{"a": "\ud800"}, {"\ud800": 1}])
def test_lone_surrogates(card):
    with pytest.raises(UnsupportedValue, match="lone surrogate"):
        read_card(card)


@pytest.mark.parametrize("source", [5, None, [("a", 1)]])
def test_what_is_no_source(source):
    with pytest.raises(InvalidInput, match="not a card; expected a mapping or the path"):
        read_card(source)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: !!python/object/apply:os.system [true]", r"line 1: a card has a tag; found tag:yaml"),
        ("a: 1\nb: !!str 2", "line 2: a card has a tag"),
        ("a: ! 2", "a card has a tag; found !"),
        ("a: !x [1]", "a card has a tag"),
        ("a: &x [1]\nb: *x", "line 1: a card has an anchor or alias"),
        ("a: &x 1", "anchor"),
        ("a: *x", "alias"),
        ("a: 1\nb: 2\na: 3", "line 3: a card has a key twice; found 'a'"),
        ("a: [{b: 1, b: 2}]", "a key twice"),
        ("a:\n  1: x", "line 2: a key of a card is not a string; found '1'"),
        ("no: x", "a key of a card is not a string"),
        ("<<: {a: 1}", "a key of a card is not a string"),
        ("? [a]\n: 1", "a key of a card is not a string"),
        ("a: 12:30:45", "a number to base 60; found '12:30:45'. Quote it"),
        ("a: 1:30.5", "a number to base 60"),
        ("a: [", "a card is not YAML"),
        ("a: 2025-13-45", "a card is not YAML; found month"),
        ("a: " + "9" * 5000, "a card is not YAML; found Exceeds"),
        ("a: 1\n---\nb: 2", "a card is not YAML; found expected a single document"),
        ("a: \x07", "a card is not YAML"),
        ("", "a card is not a mapping.*found NoneType"),
        ("- a", "a card is not a mapping.*found list"),
        (b"a: \xff", "a card is not UTF-8"),
        (b"a: x # " + b"#" * MAX_BYTES, f"too long; expected at most {MAX_BYTES} bytes"),
        ("a: " + "[" * 10**6, f"nests too deeply; expected at most {MAX_DEPTH} levels"),
        ("- " * 10**5, "nests too deeply"),
    ],
)
def test_yaml_that_is_refused(read, text, said):
    with pytest.raises(InvalidInput, match=r"card\.yaml.*" + said):
        read(text)


def test_the_longest_and_deepest_card(read):
    text = "a: " + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    card = read(text + " #" + "#" * (MAX_BYTES - len(text) - 2))
    assert read(write_card(card)) == card
    with pytest.raises(InvalidInput, match="nests too deeply"):
        write_card({"a": [card["a"]]})
    with pytest.raises(InvalidInput, match="too long"):
        write_card({"a": "x" * MAX_BYTES})


def test_a_card_that_holds_itself():
    card: dict = {}
    card["a"] = card
    with pytest.raises(InvalidInput, match="nests too deeply"):
        write_card(card)


def test_an_integer_that_yaml_cannot_hold():
    with pytest.raises(UnsupportedValue, match="cannot be written as YAML"):
        write_card({"a": 10**5000})


@pytest.mark.parametrize("name", ["missing.yaml", "", "a\0b", "\ud800"])
def test_files_that_cannot_be_read(tmp_path, name):
    with pytest.raises(InvalidInput, match="cannot read the card"):
        read_card(f"{tmp_path}/{name}")


# Required fields


def test_a_complete_card():
    check_card(CARD | {"epochs": 0, "final": False}, [*CARD, "epochs", "final"])
    check_card({}, [])


def test_missing_and_empty_fields_are_all_named():
    card = {"a": 1, "b": "", "c": " \n", "d": None, "e": [], "f": {}}
    with pytest.raises(InvalidInput, match=r"missing: x, y; empty: b, c, d, e, f\.") as caught:
        check_card(card, [*"abcdef", "x", "y"])
    assert caught.value.expected == "a, b, c, d, e, f, x, y"
    for required, said in ((["x"], "found missing: x"), (["b"], "found empty: b")):
        with pytest.raises(InvalidInput, match=said):
            check_card(card, required)
