"""Samples of streams for the pages: the newest ones, and pictures for browsers that ask."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from holdfast.registry.curation.streams import kind_of
from holdfast.registry.values import Digest

#: How many samples of a stream are shown, the newest, and how many characters of a text.
SHOWN, _MOST_TEXT = 24, 10_000
#: Bytes of pictures that a server keeps for browsers that ask for them.
_KEPT_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Sample:
    """A text or a picture of an entry."""

    step: int
    key: str
    text: str = ""
    picture: str = ""  # the name by which the server has it
    problem: str = ""  # why it is not shown


class Pictures:
    """The pictures that were shown last, by the digests of their bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        self._size = 0

    def keep(self, kind: str, data: bytes) -> str:
        """Keep a picture, and return its name."""
        name = Digest.of(data).hex()
        with self._lock:
            if name not in self._kept:
                self._size += len(data)
            self._kept[name] = kind, data
            self._kept.move_to_end(name)
            while self._size > _KEPT_BYTES:
                self._size -= len(self._kept.popitem(last=False)[1][1])
        return name

    def get(self, name: str) -> tuple[str, bytes] | None:
        """Return the kind and the bytes of a picture; `None` if it is not kept any more."""
        with self._lock:
            return self._kept.get(name)


def samples_of(entries: Sequence[Mapping[str, Any]], pictures: Pictures) -> Iterator[Sample]:
    """Yield the newest texts and pictures of a stream, the newest first."""
    found = (
        (entry["step"], key, value)
        for entry in reversed(entries)
        for key, value in entry.items()
        if isinstance(value, str | bytes)
    )
    for step, key, value in islice(found, SHOWN):
        if isinstance(value, str):
            cut = " ..." if len(value) > _MOST_TEXT else ""
            yield Sample(step, key, text=value[:_MOST_TEXT] + cut)
            continue
        kind, problem = kind_of(value)
        name = "" if problem else pictures.keep(kind, value)
        yield Sample(step, key, picture=name, problem=problem)
