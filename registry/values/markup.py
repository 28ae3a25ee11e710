"""Objects as HTML for notebooks: a heading, facts and short tables, every text escaped.

Names, metrics and reasons come from anybody who can write to a store: they are shown as text. The
rows of a table and the length of a text are bounded, so the HTML stays small. It has no script,
asks for nothing over the network, and takes its colours from the page.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from holdfast.backends.escape import printable, shortened
from holdfast.registry.values.amounts import number

#: The most rows of a table, and characters of a text, that are shown.
MOST_ROWS = 10
_MOST_TEXT = 160
_MOST_ERROR = 600
_RED = '<b style="color:#d33">'
_NOT_FINITE = re.compile(r"= (nan|-?inf)\b")
_LEFT = ' style="text-align:left"'


@dataclass(frozen=True, slots=True)
class Rows:
    """A table, of which the first rows are shown."""

    heads: Sequence[str]  # names of the columns
    rows: Iterable[Sequence[object]]  # its rows; numbers are aligned to the right
    count: int  # how many rows there are; more than are shown is said below the table
    noun: str  # the rows in a word, in the plural


def safely(kind: str, describe: Callable[[], str]) -> str:
    """Return a description; if it fails, the error in its place. This never raises."""
    try:
        return describe()
    except Exception as error:  # a notebook shows a damaged object, too
        return _wrapped(f"<p><b>{text(kind)}</b> cannot be shown</p>{problem(error)}")


def describe(
    kind: str, name: str, facts: Mapping[str, object], *parts: Rows | BaseException
) -> str:
    """Return the HTML of an object."""
    heading = f"<p><b>{text(kind)}</b> <code>{text(name)}</code></p>"
    known = [(fact, value) for fact, value in facts.items() if value not in (None, "", {})]
    body = "".join(
        f"<tr><th{_LEFT}>{text(fact)}</th><td{_LEFT}>{text(value)}</td></tr>"
        for fact, value in known
    )
    table = f"<table><tbody>{body}</tbody></table>" if body else ""
    return _wrapped(heading + table + "".join(map(_part, parts)))


def text(value: object, most: int = _MOST_TEXT) -> str:
    """Return a value as HTML text: shortened, control characters and markup escaped.

    Floats, and numbers by name, are red where they are NaN or infinite.
    """
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{name} = {number(one)}" for name, one in value.items())
        return _NOT_FINITE.sub(rf"= {_RED}\1</b>", html.escape(shortened(printable(pairs), most)))
    if isinstance(value, float):
        return number(value) if math.isfinite(value) else f"{_RED}{number(value)}</b>"
    return html.escape(shortened(printable(value), most))


def problem(error: BaseException) -> str:
    """Return an error as HTML."""
    return f"<p>{text(type(error).__name__)}: {text(error, _MOST_ERROR)}</p>"


def _part(part: Rows | BaseException) -> str:
    if isinstance(part, BaseException):
        return problem(part)
    rows = list(islice(part.rows, MOST_ROWS))
    if not rows:
        return ""
    heads = "".join(f"<th{_LEFT}>{text(head)}</th>" for head in part.heads)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    left = part.count - len(rows)
    more = f"<p>... and {left:,} more {text(part.noun)}</p>" if left > 0 else ""
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{more}"


def _cell(value: object) -> str:
    if value is None:
        return "<td></td>"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"<td>{value}</td>"
    return f"<td{_LEFT}>{text(value)}</td>"


def _wrapped(content: str) -> str:
    return f'<div class="holdfast">{content}</div>'
