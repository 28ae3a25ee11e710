"""The slots of one run as files: list them, fetch several at once, put one if it is absent.

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
from holdfast.registry.objects import log_prefix, parse_number, slot_key
from holdfast.registry.store import Store, gaps

#: Slots that are fetched at once.
AHEAD = 512
_UNKNOWN_RETRIES = 8
#: Slots that may prove the seen head and are fetched before they are needed.
_PROOFS_AT_ONCE = 64
#: Seconds after which an unknown outcome becomes an error.
_UNKNOWN_S = 60.0
_LONGEST_PAUSE_S = 1.0


class Slots:
    """The slots of one run."""

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
        """Return the numbers of the slots from `start` to the head: one listing."""
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
                hint="Somebody deleted a slot; restore it from a backup of this store. Do not take "
                "it from a mirror, whose slots differ.",
            )
        return range(start, listed[-1] + 1 if listed else start)

    def fetch(self, numbers: Sequence[int]) -> Iterator[Slot]:
        """Yield listed slots, fetched in parallel, up to a damaged one."""
        for start in range(0, len(numbers), AHEAD):
            batch = numbers[start : start + AHEAD]
            for number, slot in zip(
                batch, self._store.pools.small.map(self.get, batch), strict=True
            ):
                if slot is None:
                    raise Malformed("a listed slot is absent", where=slot_key(self._run_id, number))
                yield slot

    def prove(self, numbers: Sequence[int]) -> Iterator[Slot]:
        """Return slots that may prove the seen head; fetching the first ones starts at once.

        More than one is needed only if nothing was committed after the snapshot that was seen.
        """
        small = self._store.pools.small
        started = [small.submit(self.get, number) for number in numbers[:_PROOFS_AT_ONCE]]

        def proofs() -> Iterator[Slot]:
            yield from (slot for slot in (one.result() for one in started) if slot is not None)
            for start in range(_PROOFS_AT_ONCE, len(numbers), _PROOFS_AT_ONCE):
                yield from self.fetch(numbers[start : start + _PROOFS_AT_ONCE])

        return proofs()

    def put(self, slot: Slot) -> bool:
        """Put a slot unless one of its number exists; return whether the existing one is ours.

        After a lost answer the slot is read, to learn whether it is ours.
        """
        key = slot_key(self._run_id, slot.number)
        until = time.monotonic() + _UNKNOWN_S
        for attempt in range(_UNKNOWN_RETRIES):
            try:
                if self._store.backend.put_if_absent(key, slot.data):
                    return True
                return self._store.backend.get(key) == slot.data
            except ObjectNotFound:
                pass  # it exists and yet is absent: the store is not settled yet; try again
            except StoreUnavailable:
                # Each call has its own retries already; do not ask a silent store for hours.
                if attempt == _UNKNOWN_RETRIES - 1 or time.monotonic() > until:
                    raise
            pause(0.02, attempt)
        raise StoreUnavailable(
            "unknown whether the commit landed",
            where=key,
            hint=f"`holdfast log {self._run_id}` shows it; saving again is safe in both cases.",
        )


def pause(first_s: float, attempt: int) -> None:
    """Wait for a random time of at most `first_s`, doubled with each attempt up to a bound."""
    time.sleep(random.uniform(0, min(_LONGEST_PAUSE_S, first_s * 2 ** min(attempt, 9))))
