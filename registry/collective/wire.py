"""Messages between ranks: a line of JSON, then columns of bytes. Errors cross as their parts.

Tables of integers cross as compressed columns.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import zstandard

from holdfast.backends import Buffer
from holdfast.registry import errors
from holdfast.registry.collective.structure import Ints
from holdfast.registry.errors import IncompatibleState, RankFailed, RegistryError

_CLASSES: dict[str, type[RegistryError]] = {name: getattr(errors, name) for name in errors.__all__}
_PARTS = ("expected", "found", "hint")
#: Before a table: rows, columns, and the number of its type.
_TABLE = "<IIB"
_TYPES = (np.dtype("<i4"), np.dtype("<i8"))


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


def pack_table(table: Ints) -> bytes:
    """Return a table of integers as bytes."""
    is_small = not table.size or (int(table.min()) >= -(2**31) and int(table.max()) < 2**31)
    columns = np.ascontiguousarray(table.T, _TYPES[not is_small])
    head = struct.pack(_TABLE, *table.shape, not is_small)
    return head + zstandard.ZstdCompressor(level=1).compress(columns.tobytes())


def unpack_table(data: Buffer) -> Ints:
    """Read what `pack_table` has made."""
    view = memoryview(data)
    rows, width, kind = struct.unpack_from(_TABLE, view)
    columns = zstandard.ZstdDecompressor().decompress(view[struct.calcsize(_TABLE) :])
    return np.frombuffer(columns, _TYPES[kind]).reshape(width, rows).T.astype(np.int64)


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


def unlinked(ranks: Sequence[int], found: str) -> RankFailed:
    """Return the error for ranks that are there, and have lost their connections.

    Args:
        ranks: Those ranks.
        found: What one of them found.
    """
    made = RankFailed(
        "the connections between the ranks broke",
        where=", ".join(f"rank {one}" for one in ranks),
        found=found,
        hint="Nothing was committed. Save again: new connections are made.",
    )
    made.rank = ranks[0]
    return made


def out_of_step(steps: Mapping[int, int], behind: Sequence[int]) -> IncompatibleState:
    """Return the error for ranks that save different steps.

    Args:
        steps: The step of each rank.
        behind: The ranks with a lower step than others.
    """
    highest = max(steps.values())
    ahead = [rank for rank, step in steps.items() if step == highest]
    return IncompatibleState(
        "the ranks are out of step: they save different steps",
        where=f"rank {behind[0]}",
        expected=f"step {highest}, as on rank {ahead[0]}",
        found=f"step {steps[behind[0]]}",
        hint=f"Nothing was committed. Rank {ahead[0]} may have missed a save by an error that the "
        "program caught: look at its log; the next save works again. Or the steps are wrong.",
    )
