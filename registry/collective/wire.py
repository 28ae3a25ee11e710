"""Messages between ranks: a line of JSON, then columns of bytes. Errors cross as their parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from holdfast.backends import Buffer
from holdfast.registry import errors
from holdfast.registry.errors import RankFailed, RegistryError

_CLASSES: dict[str, type[RegistryError]] = {name: getattr(errors, name) for name in errors.__all__}
_PARTS = ("expected", "found", "hint")


def join(header: dict[str, Any], *columns: Buffer) -> bytes:
    """Return a message."""
    line = json.dumps([header, [len(column) for column in columns]]).encode()
    return b"".join([line, b"\n", *columns])


def split(data: bytes) -> tuple[dict[str, Any], list[memoryview]]:
    """Return the header and the columns of a message."""
    line, _, _ = data.partition(b"\n")
    header, lengths = json.loads(line)
    columns, start, view = [], len(line) + 1, memoryview(data)
    for length in lengths:
        columns.append(view[start : start + length])
        start += length
    return header, columns


def describe(error: BaseException, rank: int) -> dict[str, Any]:
    """Return an error of a rank as JSON; one that came from another rank keeps that rank."""
    if not isinstance(error, RegistryError):
        return {"class": "", "rank": rank, "what": f"{type(error).__name__}: {error}"}
    parts = {name: getattr(error, name) for name in ("what", "where", *_PARTS)}
    name = type(error).__name__
    known = name if _CLASSES.get(name) is type(error) else ""
    return {"class": known, "rank": getattr(error, "rank", rank), **parts}


def rebuild(failure: dict[str, Any]) -> RegistryError:
    """Return the error of another rank: of its own class if it is ours, else `RankFailed`."""
    place = f"rank {failure['rank']}"
    where = failure.get("where")
    if failure["class"] in ("", RankFailed.__name__):
        kind: type[RegistryError] = RankFailed
    else:
        kind = _CLASSES[failure["class"]]
    if where is None or not where.startswith(place):
        where = place if where is None else f"{place}: {where}"
    made = kind(failure["what"], where=where, **{part: failure.get(part) for part in _PARTS})
    made.rank = failure["rank"]  # type: ignore[attr-defined]
    return made


def broken(error: BaseException, rank: int) -> bytes:
    """Return the report of a rank that only lost its connections."""
    return join({"failure": {**describe(error, rank), "is_broken": True}})


def lost(ranks: Sequence[int], deadline_s: float, doing: str) -> RankFailed:
    """Return the error for ranks that were not heard of in time."""
    named = ", ".join(map(str, ranks[:8])) + (
        f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    )
    made = RankFailed(
        f"no word from rank {named}" if len(ranks) == 1 else f"no word from ranks {named}",
        where=f"rank {named}",
        found=f"dead, or later than {deadline_s:g} s, while {doing}",
        hint="Nothing was committed. Look at the log of that rank; then save again, or requeue.",
    )
    made.rank = ranks[0]
    return made
