"""IAM's answer to a request, as far as the policies of this project go.

Deny beats Allow, and what nothing allows is denied. Of the condition operators only those that the
policies use are known; another one is an error, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Call:
    """What a request asks for: the action, on what, and the values of condition keys."""

    action: str
    resource: str
    context: Mapping[str, str] = field(default_factory=dict)


def allowed(documents: Iterable[Mapping[str, Any]], call: Call) -> bool:
    """Return whether these policies together allow a call."""
    effects = {
        statement["Effect"]
        for document in documents
        for statement in document["Statement"]
        if _concerns(statement, call)
    }
    return effects == {"Allow"}


def _concerns(statement: Mapping[str, Any], call: Call) -> bool:
    known = {"Sid", "Effect", "Action", "Resource", "Condition", "Principal"}
    if not set(statement) <= known or statement.get("Principal", "*") != "*":
        raise NotImplementedError(statement)
    return (
        any(_like(pattern, call.action) for pattern in statement["Action"])
        and any(_like(pattern, call.resource) for pattern in statement["Resource"])
        and all(
            _holds(operator, call.context.get(key), wanted)
            for operator, keys in statement.get("Condition", {}).items()
            for key, wanted in keys.items()
        )
    )


def _holds(operator: str, value: str | None, wanted: Any) -> bool:
    if operator == "Null":
        return (value is None) == {"true": True, "false": False}[wanted]
    if operator == "Bool":
        return value == wanted
    if operator == "StringNotEquals":
        return value not in wanted  # also where the key is absent
    if operator == "StringLike":
        return value is not None and any(_like(pattern, value) for pattern in wanted)
    raise NotImplementedError(operator)


def _like(pattern: str, value: str) -> bool:
    return _compiled(pattern).fullmatch(value) is not None


@cache  # each request is held against them all
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = (".*" if c == "*" else "." if c == "?" else re.escape(c) for c in pattern)
    return re.compile("".join(parts), re.S)
