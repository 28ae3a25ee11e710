"""What each process says it does, and what the rest of the storm hears of it.

Every process has a file of its own, in which it writes a line with one system call, so that a
SIGKILL can tear the last line of a file and nothing else. A line that says that something is done
is written after the call that did it has returned: it is an acknowledgement.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: A line: `did`, and what there is to say of it.
Event = dict[str, Any]

_EVICTED = "evicted.hints"
_HINT_BYTES = 4


class Journal:
    """The file of one process."""

    def __init__(self, folder: str, name: str) -> None:
        self._fd = _open(Path(folder) / f"{name}.journal")
        self._hints = Path(folder) / _EVICTED
        self._evicted = _open(self._hints)

    def say(self, did: str, **what: Any) -> None:
        """Write a line."""
        os.write(self._fd, json.dumps({"did": did, **what}).encode() + b"\n")

    def hint(self, seeds: list[int]) -> None:
        """Tell all pushers what was just evicted."""
        os.write(self._evicted, b"".join(b"%3d\n" % seed for seed in seeds))

    def hinted(self, newest: int) -> list[int]:
        """Return the seeds of what was evicted last, by anybody."""
        with self._hints.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size // _HINT_BYTES - newest) * _HINT_BYTES)
            return [int(word) for word in file.read().split() if word.isdigit()]


class Tail:
    """The file of one process, read as it grows."""

    def __init__(self, folder: str, name: str) -> None:
        self._path = Path(folder) / f"{name}.journal"
        self._read = 0

    def new(self) -> Iterator[Event]:
        """Yield every whole line that was not yielded before."""
        if not self._path.exists() or self._path.stat().st_size == self._read:
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole, line_feed, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(line_feed)
        for line in whole.splitlines():
            yield json.loads(line)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
