"""Summaries of runs that this machine keeps, so that a listing reads only the runs that changed.

A summary is whatever a listing has made of an open run, as JSON. It is used if the log still ends
with the slot that it ended with, or, if the caller allows that, while it is young. It is a cache
beside the heads that were seen: without it a listing takes longer. Nothing else is decided by it.
Specified in docs/spec.md, section 35.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from holdfast.registry.errors import RegistryError
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.seals import Seals
from holdfast.registry.history.slots import LogEnd
from holdfast.registry.history.snapshots import REPLAY_VERSION
from holdfast.registry.objects import unwrap_frame, wrap_frame
from holdfast.registry.store import Store
from holdfast.registry.store.heads import MAX_FILE_BYTES, Heads
from holdfast.registry.values import Field, InvalidRecord, Record

_LOGGER = logging.getLogger("holdfast")


class _Header(Record):
    """The first line of the file: what the summaries are made of."""

    format: Literal["holdfast.summaries/1"] = "holdfast.summaries/1"
    registry: str
    form: Annotated[int, Field(ge=1)]  # what a listing makes of a run
    replay: int  # version of the replay


class _Summary(LogEnd):
    """A summary, and the newest slot of the log that it was made of."""

    read_ms: int  # when the run was asked last, by this machine's clock
    content: Any


@dataclass(frozen=True, slots=True)
class Made:
    """A run as a listing shows it."""

    content: Any  # JSON; floats may be NaN or infinite
    log: RunLog | None = None  # the open log; `None`: it is not kept


class Summaries:
    """The summaries of one kind of listing."""

    def __init__(
        self, store: Store, heads: Heads | None, kind: Literal["rows", "fields", "times"], form: int
    ) -> None:
        """Keep them beside `heads`, if there are any.

        Give another `form` whenever the listing makes something else of the same run.
        """
        self._store = store
        self._heads = heads
        self._suffix = f".{kind}"
        self._header = _Header(registry=store.config.id, form=form, replay=REPLAY_VERSION)
        #: Of the runs that the last listing did not ask, the oldest: when it was asked, by this
        #: machine's clock. `None` if it asked all.
        self.oldest_ms: int | None = None
        self.unasked = 0  # how many runs that were

    def read(
        self,
        names: Sequence[str],
        make: Callable[[str, RunLog | None], Made],
        *,
        max_age_s: float = 0,
    ) -> dict[str, Any]:
        """Return the content for each run, in this order; `make(name, log)` describes one.

        Three listings tell of the sealed runs that they did not change. Of each other run that has
        a summary one listing is asked, unless the summary is at most `max_age_s` old. Of many runs
        without one the sealed ones are given to `make` as their notes tell them; it opens others.
        """
        now_ms, kept = int(time.time() * 1000), self._kept()
        known = [kept[name] for name in names if name in kept]
        young = [one for one in known if 0 <= now_ms - one.read_ms <= max_age_s * 1000 > 0]
        self.oldest_ms = min((one.read_ms for one in young), default=None)
        self.unasked = len(young)
        found = {one.run: one for one in young}
        asked = [one for one in known if one.run not in found]
        unknown = [name for name in names if name not in kept]
        seals = Seals(self._store, asked, len(names) - len(young), len(unknown))
        for one in seals.still(asked):
            if one is not None:
                found[one.run] = one.changed(read_ms=now_ms)
        made = seals.noted(unknown, lambda log: make(log.run_id, log))
        rest = [name for name in names if name not in found and name not in made]
        made |= zip(rest, self._store.pools.bulk.map(make, rest, [None] * len(rest)), strict=True)
        if len(young) < len(names) or kept.keys() != found.keys():
            self._keep(names, found, made, now_ms, seals.newest)
        return {
            name: found[name].content if name in found else made[name].content for name in names
        }

    def _kept(self) -> dict[str, _Summary]:
        data = None if self._heads is None else self._heads.kept(self._suffix)
        if data is None:
            return {}
        try:
            first, *lines = unwrap_frame(data, where=self._suffix).split(b"\n")
            if _Header.of(json.loads(first)) != self._header:
                return {}
            return {one.run: one for one in (_Summary.of(json.loads(line)) for line in lines)}
        except (RegistryError, InvalidRecord, ValueError, RecursionError) as error:
            _LOGGER.debug("the summaries of %s are not used: %s", self._store.backend.url, error)
            return {}

    def _keep(
        self,
        names: Iterable[str],
        found: dict[str, _Summary],
        made: dict[str, Made],
        now_ms: int,
        notes: int | None,
    ) -> None:
        if self._heads is None:
            return
        lines = [json.dumps(self._header.to_json())]
        for name in names:
            one = found.get(name) or _summary(made[name], now_ms, notes)
            if one is not None:
                try:
                    lines.append(json.dumps(one.to_json()))
                except (TypeError, ValueError, RecursionError):  # it is made each time
                    _LOGGER.debug("no summary of %s is kept", name)
        data = wrap_frame("\n".join(lines).encode())
        if len(data) <= MAX_FILE_BYTES:
            self._heads.keep(self._suffix, data)


def _summary(made: Made, now_ms: int, notes: int | None) -> _Summary | None:
    end = None if made.log is None else made.log.end(notes)
    if end is None:
        return None
    return _Summary.unchecked(**end.shared(LogEnd), read_ms=now_ms, content=made.content)
