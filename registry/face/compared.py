"""Which runs of two registries were equal at their last sync: notes of this machine.

They only save requests: without them, or if they cannot be read, a sync compares every run whole.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from holdfast.registry.errors import RegistryError
from holdfast.registry.history import LogEnd, RunLog, Seals, list_runs
from holdfast.registry.objects import unwrap_frame, wrap_frame
from holdfast.registry.store import Store
from holdfast.registry.store.heads import MAX_FILE_BYTES
from holdfast.registry.values import DigestField, Field, InvalidRecord, Record

_LOGGER = logging.getLogger("holdfast")


class _Header(Record):
    """The first line of the file: the two registries."""

    format: Literal["holdfast.compared/1"] = "holdfast.compared/1"
    source: str
    destination: str


class Equal(Record):
    """A run of which the destination had all commits, and how its two logs ended then."""

    source: LogEnd
    destination: LogEnd
    commits: Annotated[int, Field(ge=1)]  # of the source
    head: DigestField  # digest of the last one


class Compared:
    """The runs that an earlier sync of two registries has compared."""

    def __init__(self, source: Store, destination: Store) -> None:
        self._stores = source, destination
        self._header = _Header(source=source.config.id, destination=destination.config.id)
        self._equal = self._read()
        self._seals: list[Seals] = []
        #: What is known of the runs that may have changed since.
        self.before: dict[str, Equal] = {}

    def still_equal(self, names: Sequence[str]) -> set[str]:
        """Return the runs that nobody has committed to since, on both sides.

        A few listings tell it of the sealed runs; the logs of others are asked one by one.
        """
        asked = [self._equal.pop(one) for one in names if one in self._equal]
        if any(one.destination.sealed is not None for one in asked):
            there = set(list_runs(self._stores[1]))  # its log may not be asked
            asked = [one for one in asked if one.destination.run in there]
        sides = [one.source for one in asked], [one.destination for one in asked]
        for store, ends in zip(self._stores, sides, strict=True):
            self._seals.append(Seals(store, ends, len(names)))
        still = (seals.still(ends) for seals, ends in zip(self._seals, sides, strict=True))
        for one, source, destination in zip(asked, *still, strict=True):
            if source is None or destination is None:
                self.before[one.source.run] = one
            else:
                self._equal[source.run] = one.changed(source=source, destination=destination)
        return self._equal.keys() & set(names)

    def note(self, source: RunLog, destination: RunLog) -> None:
        """Note a run that was copied, with its logs as they were read or put."""
        ends = [
            log.end(seals.newest)
            for log, seals in zip((source, destination), self._seals, strict=True)
        ]
        if None not in ends:
            self._equal[source.run_id] = Equal.unchecked(
                source=ends[0],
                destination=ends[1],
                commits=source.run.commits,
                head=source.run.head,
            )

    def commits_of(self, name: str) -> int:
        """Return how many commits both have of a run that is equal; 0 of any other run."""
        return self._equal[name].commits if name in self._equal else 0

    def keep(self, known: Iterable[str]) -> None:
        """Keep what is known of these runs for the next sync."""
        heads, known = self._stores[1].heads, set(known)
        lines = [self._header, *(one for name, one in self._equal.items() if name in known)]
        data = wrap_frame("\n".join(json.dumps(line.to_json()) for line in lines).encode())
        if heads is not None and len(data) <= MAX_FILE_BYTES:
            heads.keep(".synced", data)

    def _read(self) -> dict[str, Equal]:
        heads = self._stores[1].heads
        data = None if heads is None else heads.kept(".synced")
        if data is None:
            return {}
        try:
            first, *lines = unwrap_frame(data, where=".synced").split(b"\n")
            if _Header.of(json.loads(first)) != self._header:
                return {}
            found = [Equal.of(json.loads(line)) for line in lines]
            return {one.source.run: one for one in found if one.source.run == one.destination.run}
        except (RegistryError, InvalidRecord, ValueError, RecursionError) as error:
            _LOGGER.debug("what an earlier sync compared is not used: %s", error)
            return {}
