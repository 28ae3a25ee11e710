"""The slots of one run as files: listed, fetched several at once, and put if absent.

`holdfast.registry.history.log` decides what a slot holds, and replays it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from functools import partial

from holdfast.backends import ObjectNotFound, StoreUnavailable
from holdfast.registry.errors import Malformed
from holdfast.registry.history.replay import Slot
from holdfast.registry.storage.keys import log_prefix, parse_number, slot_key
from holdfast.registry.storage.store import Store, gaps

#: Slots that are fetched ahead of whoever takes them.
AHEAD = 512
_UNKNOWN_RETRIES = 8
#: Seconds after which an outcome that is still unknown becomes an error.
_UNKNOWN_S = 60.0
_LONGEST_PAUSE_S = 1.0


class Slots:
    """The slots of one run.

    Args:
        store: The registry's objects.
        run_id: The run.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id

    def get(self, number: int) -> Slot | None:
        """Return a slot; `None` if it is absent."""
        key = slot_key(self._run_id, number)
        try:
            data = self._store.backend.get(key)
        except ObjectNotFound:
            return None
        return Slot.decode(number, data, where=key)

    def numbers(self, start: int = 0) -> range:
        """Return the numbers of the slots from `start` to the head: one listing.

        Raises:
            Malformed: One is absent between them.
        """
        backend = self._store.backend
        after = slot_key(self._run_id, start - 1) if start else ""
        infos = backend.list(log_prefix(self._run_id), start_after=after)
        listed = [parse_number(info.key) for info in infos]
        gap = next(gaps(backend, listed, partial(slot_key, self._run_id), start), None)
        if gap is not None:
            raise Malformed(
                "the log has a gap",
                where=self._run_id,
                expected=f"slot {gap}",
                found=f"slot {next(number for number in listed if number > gap)}",
                hint="A slot was deleted from outside; put it back from a backup of this store. "
                "A mirror's slots are its own.",
            )
        return range(start, listed[-1] + 1 if listed else start)

    def fetch(self, numbers: Sequence[int]) -> Iterator[Slot]:
        """Yield slots that were listed, fetched in parallel, up to a damaged one.

        Raises:
            Malformed: One of them is absent.
        """
        for start in range(0, len(numbers), AHEAD):
            batch = numbers[start : start + AHEAD]
            for number, slot in zip(
                batch, self._store.pools.small.map(self.get, batch), strict=True
            ):
                if slot is None:
                    raise Malformed("a listed slot is absent", where=slot_key(self._run_id, number))
                yield slot

    def put(self, slot: Slot) -> bool:
        """Put a slot if there is none of its number; return whether the one there is ours.

        After a lost answer only the slot can tell.

        Raises:
            StoreUnavailable: The store did not say whether the slot was put.
        """
        key = slot_key(self._run_id, slot.number)
        until = time.monotonic() + _UNKNOWN_S
        for attempt in range(_UNKNOWN_RETRIES):
            try:
                if self._store.backend.put_if_absent(key, slot.data):
                    return True
                return self._store.backend.get(key) == slot.data
            except ObjectNotFound:
                pass  # "exists" and then absent: a listing still settling; ask the same slot again.
            except StoreUnavailable:
                # The store has been patient already: a silent one must not be asked for hours.
                if attempt == _UNKNOWN_RETRIES - 1 or time.monotonic() > until:
                    raise
            pause(0.02, attempt)
        raise StoreUnavailable(
            "unknown whether the commit landed",
            where=key,
            hint=f"Run `holdfast log {self._run_id}` to see; saving again is safe either way.",
        )


def pause(first_s: float, attempt: int) -> None:
    """Wait for a random time, up to `first_s` at first and up to twice as long each time."""
    time.sleep(random.uniform(0, min(_LONGEST_PAUSE_S, first_s * 2 ** min(attempt, 9))))
