"""Seals: a collection passes over runs in which nothing happens, and takes their keys from notes.

Rules S1 to S3, G2' and G4' of docs/spec.md, section 13; docs/collection-proof.md proves them.
Writers put a marker before they write behind a seal (`RunLog.announce`). A run without a marker and
with a note of its newest seal is *quiet*.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter

from holdfast.registry.errors import IntegrityError, Malformed
from holdfast.registry.history import RunLog, Slots
from holdfast.registry.history.actions import Line, Mark, Seal
from holdfast.registry.history.replay import RunManifest, Slot
from holdfast.registry.objects import ACTIVE, RUNS, marker_key, parse_marker
from holdfast.registry.store import DAY_S, RUNS_AT_ONCE, Store, in_batches
from holdfast.registry.store.heads import Head
from holdfast.registry.upkeep.live import Needs, held_place, with_way_out
from holdfast.registry.upkeep.run_notes import Notes, RunNote
from holdfast.registry.values import Digest

#: Of the quiet runs the log of one in this number is looked at each day.
_SAMPLED = 30
_LOGGER = logging.getLogger("holdfast")


class QuietRuns:
    """The quiet runs of a registry, as one collection finds them.

    In doubt a run is not quiet: then it is marked and read, which is always right.
    """

    def __init__(
        self, store: Store, notes: Notes, needs: Needs, seen: Mapping[str, Head], grace_s: float
    ) -> None:
        self._store, self._notes, self._needs, self._seen = store, notes, needs, seen
        self._grace_s = grace_s
        self._markers: dict[str, list[int]] = {}  # the numbers of the markers of each run
        self._finished: dict[str, int] = {}  # seals whose notes stand, and whose markers may go
        self.runs = set[str]()  # the quiet runs

    def find(
        self, given_up: Collection[str], take: Callable[[set[bytes]], object], *, all_active: bool
    ) -> frozenset[str]:
        """Find the quiet runs, and let `take` have what each needs; return all names of runs."""
        names, self._markers, quiet = self._list()
        if not all_active:
            notes = [quiet[name] for name in sorted(quiet.keys() - given_up)]
            pool = self._store.pools.bulk
            found = in_batches(pool, self._needs_of, notes, at_once=RUNS_AT_ONCE)
            for note, needed in zip(notes, found, strict=True):
                if needed is not None:
                    take(needed)
                    self.runs.add(note.seen.run)
        return names

    def still(self) -> set[str]:
        """Return the runs that are still quiet after the epoch (G2', G4')."""
        return self.runs & self._list()[2].keys() if self.runs else self.runs

    def check(self, log: RunLog) -> None:
        """Raise if a run that was quiet when the collection began has lost its log since."""
        if log.run_id in self.runs:
            note = self._notes.by_run[log.run_id]
            note.check(log.run.next_slot, note.seen.digest)

    def is_sealed(self, log: RunLog, note: RunNote | None) -> bool:
        """Return whether a note of the newest seal stands, and nobody has announced a commit.

        Nor has anybody put one: of a copy of the store a marker may be lost.
        """
        sealed, newest = log.run.sealed_at, log.newest_commit
        is_noted = note is not None and note.seen.sealed == sealed and note.is_sealed(self._grace_s)
        if sealed is None or newest is None or newest.number > sealed or not is_noted:
            return False
        numbers = self._markers.get(log.run_id, ())
        if any(number <= sealed for number in numbers):
            self._finished[log.run_id] = sealed
        return not any(number > sealed for number in numbers)

    def remove_markers(self, sealed: Mapping[str, int]) -> None:
        """Remove the markers of runs up to their seals, of which notes stand (S3)."""
        tables = {self._notes.by_run[name].where for name in self._finished}
        if tables:
            self._store.backend.make_durable(sorted(tables))
        keys = [
            marker_key(run_id, number)
            for run_id, slot in {**self._finished, **sealed}.items()
            for number in self._markers.get(run_id, ())
            if number <= slot
        ]
        for error in self._store.backend.delete_many(keys).values() if keys else ():
            raise error

    def _list(self) -> tuple[frozenset[str], dict[str, list[int]], dict[str, RunNote]]:
        """List the markers, then the runs, then the notes that are newer; find the quiet runs."""
        markers: dict[str, list[int]] = {}
        is_sure = self._notes.is_whole
        for info in self._store.backend.list(ACTIVE):
            try:
                run_id, number = parse_marker(info.key)
            except Malformed:
                is_sure = False  # `verify` reports it
            else:
                markers.setdefault(run_id, []).append(number)
        listed = self._store.backend.list(RUNS, delimiter=True)
        names = frozenset(info.key.removeprefix(RUNS).rstrip("/") for info in listed)
        newer = self._notes.newer(self._store)
        if not is_sure or newer is None:
            return names, markers, {}
        known = self._notes.by_run
        quiet = {
            name: known[name]
            for name in names & known.keys() - markers.keys() - newer
            if known[name].is_sealed(self._grace_s)
        }
        return names, markers, quiet

    def _needs_of(self, note: RunNote) -> set[bytes] | None:
        """Return the objects that a quiet run needs by its note; `None` if it has to be read."""
        seen = note.seen
        try:
            run, packs, _ = note.replay()
            places = [held_place(run, manifest) for manifest in run.held]
        except (IntegrityError, ValueError) as error:
            _LOGGER.warning("a note of a collection is not used: %s", error)
            return None
        head = self._seen.get(seen.run)
        if head is not None and head.commits > run.commits:
            return None
        keys = [one.placement_key for one in places]
        known = packs.keys() >= set(keys)
        if not known or not all(map(self._needs.learn, places, (packs[key] for key in keys))):
            return None
        is_sampled = (
            zlib.crc32(seen.run.encode()) % _SAMPLED == int(time.time() // DAY_S) % _SAMPLED
        )
        return None if is_sampled and self._has_grown(note) else self._needs.of(run)

    def _has_grown(self, note: RunNote) -> bool:
        """Return whether a log goes on behind its note; raise if it is another log."""
        slots = Slots(self._store, note.seen.run)
        commit, last = slots.get(note.seen.slot), slots.get(note.seen.slots - 1)
        try:
            note.check(note.seen.slots if last else 0, Digest.of(commit.data) if commit else None)
        except IntegrityError as error:
            raise with_way_out(error, note.seen.run, "collects for the others") from None
        further = slots.get(note.seen.slots)
        return further is not None and not has_only_seals([further])


def has_only_seals(recent: Sequence[Slot]) -> bool:
    """Return whether the slots within the grace have only marks and seals: nothing happened."""
    return all(isinstance(line, Mark | Seal) for slot in recent for _, line in slot.lines)


def seal(log: RunLog, base: RunManifest, epoch: int) -> int | None:
    """Seal a run behind what was replayed of it (S1): `base`, before the slots within the grace.

    Return the slot of the seal, which may be another collector's; `None` if the run has moved on.
    """
    facts = attrgetter("commits", "places", "dropped", "freed_at")

    def is_same(run: RunManifest) -> bool:
        return bool(facts(run) == facts(base))

    def is_done(run: RunManifest) -> bool:
        return run.sealed_at is not None and run.sealed_at >= base.next_slot

    def compose(run: RunManifest) -> list[Line] | None:
        if is_done(run) or not is_same(run):
            return None
        return [*([Mark(epoch=epoch)] if run.epoch < epoch else []), Seal()]

    run = log.append(compose, caches=False, announces=False)
    return run.sealed_at if is_done(run) and is_same(run) else None
