"""Read the files of a trace."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The end of a call that never ended.
NEVER = 2**63


@dataclass(frozen=True)
class Call:
    """A call of a program to its store.

    Attributes:
        client: The process, and its store.
        method: Of the backend.
        key: The key, or the prefix of a listing.
        begin: Nanoseconds of the machine's monotonic clock.
        end: The same; `NEVER` for a call that did not end.
        answer: True and False of a put, the digest of what was read, `absent`, the keys of a
            listing, the name of an error; `None` if there was none.
        digest: Of the bytes that were put.
        body: The bytes, where they were kept.
        after: Where a listing begins.
    """

    client: str
    method: str
    key: str
    begin: int
    end: int
    answer: Any = None
    digest: str | None = None
    body: bytes | None = None
    after: str = ""

    @property
    def may_have_put(self) -> bool:
        """Whether it may have put its bytes: it was not refused."""
        return self.method.startswith("put") and self.answer is not False

    @property
    def has_put(self) -> bool:
        """Whether it has said so."""
        return self.method.startswith("put") and self.answer is True


def read(folder: Path) -> list[Call]:
    """Return all calls of a trace, in the order in which they began."""
    calls = []
    for path in sorted(folder.glob("*.trace")):
        begun: dict[int, dict[str, Any]] = {}
        whole, _, _ = path.read_bytes().rpartition(b"\n")  # a kill may have torn the last line
        for line in whole.splitlines():
            told = json.loads(line)
            number = told.pop("call", None)
            if number is None:
                calls.append(Call(**told))
            elif "begin" in told:
                body = told.pop("body", None)
                told["body"] = None if body is None else base64.b64decode(body)
                begun[number] = {**told, "end": NEVER}
            else:
                calls.append(Call(**{**begun.pop(number), **told}))
        calls += [Call(**told) for told in begun.values()]
    return sorted(calls, key=lambda call: (call.begin, call.end))
