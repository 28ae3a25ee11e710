"""Foreign text in a message: it cannot move a cursor, hide itself, fill a screen or fail."""

from __future__ import annotations

import pickle
from fractions import Fraction
from typing import Any

import pytest

from holdfast.backends.errors import Hint, RegistryError
from holdfast.backends.escape import (
    MAX_DECIMAL_BITS,
    hexadecimal,
    printable,
    quoted,
    shortened,
    shown,
)

EVIL = "\x1b[2J\u202eevil\u2066\r\n\x9b31m\ud800\0"
TAMED = r"\x1b[2J\u202eevil\u2066\r\n\x9b31m\ud800\x00"
HUGE = 10**5000


def test_every_part_of_an_error_is_tamed() -> None:
    error = RegistryError(EVIL, where=EVIL, expected=EVIL, found=EVIL, hint=EVIL)
    # Its own words may have lines: a list of what was tried.
    assert error.what == TAMED.replace(r"\n", "\n")
    assert (error.where, error.expected, error.found, error.hint) == (TAMED,) * 4
    for text in (str(error), error.summary, repr(error), str(pickle.loads(pickle.dumps(error)))):
        assert all(char.isprintable() or char == "\n" for char in text)
    advised = RegistryError(EVIL, hint=Hint.of("Wait.", Hint(EVIL, f"cli {EVIL}"), None))
    for one in (advised, pickle.loads(pickle.dumps(advised))):
        assert (one.hint, one.cli_hint) == (f"Wait. {TAMED}", f"Wait. cli {TAMED}")
        assert (str(one).endswith(one.hint), one.cli_message.endswith(one.cli_hint)) == (True, True)
    again = RegistryError(error.what, where=error.where, found=error.found)
    assert (again.what, again.where, again.found) == (error.what, error.where, error.found)


def test_a_part_of_any_length_is_shortened() -> None:
    error = RegistryError("no such thing", found="x" * 10**6 + "end")
    assert len(str(error)) < 3000
    assert "1000003 characters" in str(error)
    assert str(error).endswith("end")
    assert shortened("short", 5) == "short"


@pytest.mark.parametrize("sign", [1, -1])
def test_integers_of_any_length(sign: int) -> None:
    assert int(hexadecimal(sign * HUGE), 16) == sign * HUGE
    assert shown(sign * HUGE).endswith(f"... ({HUGE.bit_length()} bits)")
    assert shown(sign * HUGE).startswith("0x" if sign > 0 else "-0x")
    longest = sign * (2**MAX_DECIMAL_BITS - 1)
    assert shown(longest) == printable(longest) == quoted(longest) == str(longest)


class _Odd:
    def __repr__(self) -> str:
        raise OSError("no")

    def __str__(self) -> str:
        return "odd"


@pytest.mark.parametrize(
    ("value", "text", "spelled"),
    [
        ([HUGE], "a list too long to show", "a list too long to show"),
        ({HUGE: 1}, "a dict too long to show", "a dict too long to show"),
        (Fraction(HUGE, 3), "a Fraction too long to show", "a Fraction too long to show"),
        (_Odd(), "odd", "odd"),
        (True, "True", "True"),
        ("a", "a", "'a'"),
    ],
    ids=["list", "dict", "fraction", "odd", "bool", "text"],
)
def test_values_that_hold_such_an_integer(value: Any, text: str, spelled: str) -> None:
    assert shown(value) == text
    assert quoted(value) == spelled
    assert RegistryError("x", found=value).found == text
