"""Filters of runs as people type them: `lr < 1e-3 and status=failed and name~vit`.

    filter = both { "or" both }
    both   = one { "and" one }
    one    = "not" one | "(" filter ")" | FIELD SIGN VALUE
    SIGN   = one of: =  ==  !=  <  <=  >  >=  ~  !~

A value has quotes only where it holds spaces or signs. Numbers are compared as numbers, times as
times, and `~` looks for a part of a text in any case. Of a field with several values, such as
labels, one has to fit, and for `!=` and `!~` all. No comparison fits a field that a row lacks,
so `not a=1` also finds the rows without `a`; `a=none` finds those alone.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple, NoReturn

from holdfast.registry.errors import InvalidInput
from holdfast.registry.values.amounts import near

#: Characters of a filter, and how deep parentheses and `not` may nest.
_MOST_CHARACTERS = 1000
_MOST_DEEP = 20
_TOKEN = re.compile(
    r"(?P<sign>==|!=|<=|>=|!~|[=<>~])|(?P<paren>[()])"
    r"|(?P<quoted>\"[^\"]*\"|'[^']*')|(?P<word>[^\s()=<>!~\"']+)|(?P<other>\S)"
)
_ORDERS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

#: A row: what each of its fields holds.
Row = Mapping[str, object]
_Test = Callable[[Row], bool]


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter that was understood."""

    text: str  # as it was typed
    fields: Mapping[str, int]  # each field that it names, and the character where it first stands
    test: _Test  # whether a row fits

    @classmethod
    def parse(cls, text: str) -> Filter:
        """Understand a filter; every row fits an empty one."""
        if len(text) > _MOST_CHARACTERS:
            raise InvalidInput(
                "a filter is too long",
                expected=f"at most {_MOST_CHARACTERS} characters",
                found=len(text),
            )
        parser = _Parser(text)
        return cls(text, parser.fields, parser.whole())

    def of(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows that fit, in their order."""
        kept = list(rows)
        known = {name for row in kept for name in row}
        for name, at in self.fields.items():
            if kept and name not in known:
                raise InvalidInput(
                    "a filter names a field that no run has",
                    where=f"character {at} of {self.text!r}",
                    found=name,
                    hint=near(name, known) or f"There are: {', '.join(sorted(known))}.",
                )
        return [row for row in kept if self.test(row)]


class _Token(NamedTuple):
    kind: str  # a group of `_TOKEN`, or `end`
    text: str
    at: int  # its first character, counted from 1


class _Parser:
    """Reads a filter from left to right, and looks one token ahead."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [
            _Token(one.lastgroup or "", one[0], one.start() + 1) for one in _TOKEN.finditer(text)
        ]
        self._tokens.append(_Token("end", "the end", len(text) + 1))
        self.fields: dict[str, int] = {}

    def whole(self) -> _Test:
        test = (lambda row: True) if self._next.kind == "end" else self._either(0)  # noqa: ARG005
        if self._next.kind != "end":
            self._refuse("`and`, `or` or the end")
        return test

    @property
    def _next(self) -> _Token:
        return self._tokens[0]

    def _refuse(self, expected: str) -> NoReturn:
        raise InvalidInput(
            "this is no filter",
            where=f"character {self._next.at} of {self._text!r}",
            expected=expected,
            found=self._next.text,
            hint="A filter is such as: lr < 1e-3 and status=failed and name~vit",
        )

    def _takes(self, kind: str, text: str) -> bool:
        """Return whether the next token is this one, and if so go past it."""
        is_next = self._next.kind == kind and self._next.text.lower() == text
        if is_next:
            self._tokens.pop(0)
        return is_next

    def _either(self, deep: int) -> _Test:
        tests = [self._both(deep)]
        while self._takes("word", "or"):
            tests.append(self._both(deep))
        return lambda row: any(test(row) for test in tests)

    def _both(self, deep: int) -> _Test:
        tests = [self._one(deep)]
        while self._takes("word", "and"):
            tests.append(self._one(deep))
        return lambda row: all(test(row) for test in tests)

    def _one(self, deep: int) -> _Test:
        if deep > _MOST_DEEP:
            self._refuse(f"at most {_MOST_DEEP} levels of parentheses and `not`")
        if self._takes("word", "not"):
            test = self._one(deep + 1)
            return lambda row: not test(row)
        if self._takes("paren", "("):
            test = self._either(deep + 1)
            if not self._takes("paren", ")"):
                self._refuse("`)`")
            return test
        return self._comparison()

    def _comparison(self) -> _Test:
        at = self._next.at
        name = self._take("a field", "word", "quoted")
        sign = self._take("one of = != < <= > >= ~ !~", "sign")
        is_word, value = self._next.kind == "word", self._next
        wanted = self._take("a value", "word", "quoted")
        self.fields.setdefault(name, at)
        if is_word and wanted == "none" and sign in ("=", "==", "!="):
            return lambda row: (row.get(name) is None) == (sign != "!=")
        if sign in _ORDERS and _number(wanted) is None and _moment(wanted) is None:
            self._tokens.insert(0, value)
            self._refuse("a number or a date after < and >")
        return lambda row: _fits(row.get(name), sign, wanted)

    def _take(self, expected: str, *kinds: str) -> str:
        """Return the text of the next token, without quotes, and go past it."""
        if self._next.kind not in kinds:
            self._refuse(expected)
        token = self._tokens.pop(0)
        return token.text[1:-1] if token.kind == "quoted" else token.text


def _fits(found: object, sign: str, wanted: str) -> bool:
    """Return whether a field that holds `found` fits a comparison."""
    if found is None:
        return False
    if isinstance(found, tuple | list):
        return (all if sign[0] == "!" else any)(_fits(one, sign, wanted) for one in found)
    if sign in ("~", "!~"):
        return (wanted.casefold() in str(found).casefold()) == (sign == "~")
    if sign in _ORDERS:
        number, other = _ordered(found, wanted)
        return number is not None and other is not None and _ORDERS[sign](number, other)
    return _equals(found, wanted) == (sign != "!=")


def _equals(found: object, wanted: str) -> bool:
    if isinstance(found, str):
        return found == wanted
    if isinstance(found, bool):
        return str(found).lower() == wanted.lower()
    number, other = _ordered(found, wanted)
    return number == other if number is not None and other is not None else str(found) == wanted


def _ordered(found: object, wanted: str) -> tuple[float | None, float | None]:
    """Return both as numbers, a time as its seconds; `None` for what is neither."""
    if isinstance(found, datetime):
        return found.timestamp(), _moment(wanted)
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return found if is_number else None, _number(wanted)  # type: ignore[return-value]


def _number(text: str) -> float | None:
    try:
        return int(text) if text.lstrip("+-").isdecimal() else float(text)
    except ValueError:
        return None


def _moment(text: str) -> float | None:
    """Return the seconds of a date or time in ISO 8601, in UTC where it names no zone."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
