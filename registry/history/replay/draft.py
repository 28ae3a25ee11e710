"""A mutable run, into which slots are folded.

A table is copied when it is first written to, and lookups are carried over from the run before. So
the cost of a commit is its changes and a few copies of flat tables; it does not grow with history.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from math import isnan
from typing import Any

from holdfast.registry.errors import Malformed
from holdfast.registry.history.actions import Place
from holdfast.registry.history.replay.evicted import EvictedDraft, NeedsHistory
from holdfast.registry.history.replay.run_manifest import RunManifest
from holdfast.registry.history.replay.run_parts import (
    CheckpointRecord,
    ClaimRecord,
    GroupRecord,
    Hold,
    PhaseRecord,
    Pin,
    PoolRecord,
    StreamRecord,
    rating_metrics,
    rating_of,
    stays_by_phase,
)
from holdfast.registry.spec import Monitor
from holdfast.registry.values import Digest

#: Lookups of a run whose values are a field of it, with that field.
_FIELDS = {"by_n": "checkpoints", "by_manifest": "places", "by_pin": "pins", "by_version": "pool"}
_LOOKUPS = (*_FIELDS, "pinned", "uses", "by_step", "by_class", "asked", "spec")
#: With more changes than this the best are computed again.
_FEW = 64


class GroupDraft:
    """A mutable group of followers."""

    def __init__(self, group: GroupRecord) -> None:
        self.name = group.name
        self.done = set(group.done)
        self.claims: dict[int, ClaimRecord] = {one.checkpoint: one for one in group.claims}

    def freeze(self) -> GroupRecord:
        """Return the frozen record."""
        return GroupRecord.unchecked(
            name=self.name, done=tuple(sorted(self.done)), claims=tuple(self.claims.values())
        )


class Draft:
    """A mutable run."""

    def __init__(self, run: RunManifest) -> None:
        run = run.whole()
        self.base = run  # the run before
        self.fields: dict[str, Any] = {}  # simple fields that have changed
        self.where = ""  # the present slot, for messages
        self.time_ms = 0  # the time of the present commit
        self.author = ""  # its author
        self.next_slot = run.next_slot
        self.commits = run.commits
        self.head = run.head
        self.created = run.created
        self.phase = run.phase
        self.next_version = run.next_version
        self.phases: list[PhaseRecord] = list(run.phases)
        self.streams: dict[str, StreamRecord] = {s.name: s for s in run.streams}
        self.epoch = run.epoch
        #: The evicted checkpoints and entries of a compact run.
        self.gone = None if run.gone is None else EvictedDraft(run.gone)
        self._tables: dict[str, dict[Any, Any]] = {}
        self._groups: dict[str, GroupDraft] = {}
        self._line: list[int] | None = None
        self._changed: set[int] = set()
        self._touched: set[Digest] = set()
        self._claimed: set[Digest] = set()
        self._restarted = False

    def require(self, holds: bool, rule: str) -> None:
        """Refuse a history that breaks a rule."""
        if not holds:
            raise Malformed(
                "the history is not legal",
                where=self.where,
                found=rule,
                hint="Run `holdfast verify`; do not write to this run until it is repaired.",
            )

    def now(self, field: str) -> Any:
        """Return a simple field as it is now."""
        return self.fields.get(field, getattr(self.base, field))

    @property
    def _holds_nothing(self) -> bool:
        is_hidden = self.now("hidden_at") is not None and self.now("freed_at") is None
        return self.now("dropped") is not None and not is_hidden

    # Tables, each copied before its first change

    def _read(self, name: str) -> dict[Any, Any]:
        found = self._tables.get(name)
        return getattr(self.base, name) if found is None else found

    def _write(self, name: str) -> dict[Any, Any]:
        found = self._tables.get(name)
        if found is None:
            found = self._tables[name] = dict(getattr(self.base, name))
        return found

    @property
    def pins(self) -> dict[tuple[str, str], Pin]:
        """Pins by kind and name, to read."""
        return self._read("by_pin")

    @property
    def pool(self) -> dict[int, PoolRecord]:
        """Entries of the pool by version, to read."""
        return self._read("by_version")

    # Checkpoints

    def checkpoint(self, n: int) -> CheckpointRecord:
        """Return the checkpoint that commit `n` added."""
        found: CheckpointRecord | None = self._read("by_n").get(n)
        if found is None:
            if self.is_forgotten(n):
                raise NeedsHistory
            self.require(False, f"checkpoint of commit {n}, which added none")
        assert found is not None  # otherwise `require` has raised
        return found

    @property
    def rating_metrics(self) -> tuple[str, str]:
        """The names of the metrics that are the mu and sigma of a rating."""
        return rating_metrics(self.created)

    def is_forgotten(self, n: int) -> bool:
        """Return whether a checkpoint was evicted and this run does not have its record."""
        return self.gone is not None and self.gone.has(n)

    def add(self, record: CheckpointRecord) -> None:
        """Add a checkpoint."""
        self.require(record.n not in self._read("by_n"), "two checkpoints in one commit")
        self._write("by_n")[record.n] = record
        self._hold((record.manifest, *record.companions.values()))
        self._note(record)
        if self._line is not None:
            self._line.append(record.n)

    def change(self, n: int, **fields: object) -> None:
        """Change fields of a checkpoint's record."""
        table = self._write("by_n")
        before: CheckpointRecord = table[n]
        after = table[n] = before.changed(**fields)
        self._changed.add(n)
        if fields.keys() != {"metrics"}:
            self._note(before, is_there=False)
            self._note(after)

    def evict(self, record: CheckpointRecord, reason: str) -> None:
        """Evict a kept checkpoint."""
        self._release((record.manifest, *record.companions.values()))
        if self.gone is None:
            self.change(record.n, evicted=reason, recovered=False)
            return
        self._note(record, is_there=False)
        del self._write("by_n")[record.n]
        self.gone.add(record.n, (record.phase, record.tier), superseded=record.superseded)
        rating = rating_of(record, self.rating_metrics)
        if rating is not None:
            self.gone.rate(rating.n, rating.metrics)
        for group in self.base.groups:
            if group.name in self._groups or group.knows(record.n):
                self.group(group.name)
        for open_group in self._groups.values():
            open_group.done.discard(record.n)
            open_group.claims.pop(record.n, None)

    def recover(self, record: CheckpointRecord) -> None:
        """Recover an evicted checkpoint."""
        self.change(record.n, evicted=None, recovered=True)
        self._hold((record.manifest, *record.companions.values()))

    def supersede(self, kept: int) -> None:
        """Supersede the checkpoints of commits after one, and the phases entered after it."""
        known = self._read("by_n")
        if self._line is None:
            self._line = [n for n, one in known.items() if not one.superseded]
        while self._line and self._line[-1] > kept:
            record = known.get(self._line.pop())
            if record is not None:
                self.change(record.n, superseded=True)
                known = self._read("by_n")
        if self.gone is not None:
            self.gone.rewind(kept)
        for position, phase in enumerate(self.phases):
            if phase.n > kept and not phase.superseded:
                self.phases[position] = phase.changed(superseded=True)
                self._restarted = self._restarted or phase.stays
                self._release(phase.companions.values())

    def _note(self, record: CheckpointRecord, *, is_there: bool = True) -> None:
        """Update the lookups of kept checkpoints that the run before has made."""
        self._changed.add(record.n)
        if record.evicted is not None:
            return
        made = self.base.__dict__
        if "by_class" in made:
            of = record.phase, record.tier, record.superseded
            _note_number(self._write("by_class"), of, record.n, is_there=is_there)
        if "by_step" in made and not record.superseded:
            step = record.phase, record.step
            _note_number(self._write("by_step"), step, record.n, is_there=is_there)

    def _bests(self) -> dict[tuple[Monitor, str | None], tuple[float, int] | None]:
        """Return the best checkpoints that are known without looking at every checkpoint."""
        known, found = self._read("by_n"), {}
        since = {name: records[-1].n for name, records in stays_by_phase(self.phases).items()}
        # A copy: another thread may ask the run before for another best.
        for (monitor, phase), best in list(self.base.bests.items()):
            if best is not None and best[1] in self._changed:
                continue  # it was evicted or superseded, or has another value
            for n in self._changed:
                record = known.get(n)
                if record is None or not record.is_rated_in(phase):
                    continue
                if n <= since.get(record.phase, -1):
                    continue
                rank = record.rank(monitor)
                if not isnan(rank) and (best is None or (rank, n) < best):
                    best = rank, n
            found[monitor, phase] = best
        return found

    # Everything else that is held

    def is_pinned(self, n: int) -> bool:
        """Return whether a gate or a tag names a checkpoint."""
        return n in self._read("pinned")

    def set_pin(self, pin: Pin) -> None:
        """Set a pin; it replaces one of its kind and name."""
        before = self.pins.get((pin.kind, pin.name))
        self._write("by_pin")[pin.kind, pin.name] = pin
        self._hold(_named(pin))
        if before is not None:
            self._release(_named(before))
        if pin.kind in ("gate", "tag"):
            pinned = self._write("pinned")
            if before is not None and before.checkpoint is not None:
                _count_down(pinned, before.checkpoint)
            if pin.checkpoint is not None:
                pinned[pin.checkpoint] = pinned.get(pin.checkpoint, 0) + 1

    def remove_tag(self, name: str) -> None:
        """Remove a tag."""
        before = self._write("by_pin").pop(("tag", name))
        self._release(_named(before))
        if before.checkpoint is not None:
            _count_down(self._write("pinned"), before.checkpoint)

    def hold(self, checkpoint: int | None) -> Hold | None:
        """Return the hold on a checkpoint, or on the whole run."""
        holds: tuple[Hold, ...] = self.now("holds") or ()
        return next((one for one in holds if one.checkpoint == checkpoint), None)

    def replace_hold(self, checkpoint: int | None, hold: Hold | None) -> None:
        """Set the hold on a checkpoint or on the run, or remove it."""
        others = [one for one in self.now("holds") or () if one.checkpoint != checkpoint]
        self.fields["holds"] = (*others, *([hold] if hold else [])) or None

    def require_free(self, n: int | None, act: str) -> None:
        """Refuse an act on a checkpoint that is held, or on the run while anything is held."""
        held = self.now("holds") if n is None else self.hold(n) or self.hold(None)
        self.require(not held, f"{'the run' if n is None else f'checkpoint {n}'} is {act}, held")

    def enter(self, phase: PhaseRecord) -> None:
        """Enter a phase, or the present one again."""
        self.phases.append(phase)
        self._restarted = self._restarted or phase.stays
        self._hold(phase.companions.values())

    def set_entry(self, entry: PoolRecord) -> None:
        """Add or change a playing entry of the pool."""
        if entry.version not in self.pool:
            self._hold((entry.manifest,))
        self._write("by_version")[entry.version] = entry

    def evict_entry(self, entry: PoolRecord, reason: str) -> None:
        """Evict an entry of the pool."""
        self._release((entry.manifest,))
        if self.gone is None:
            changed = entry.changed(evicted=reason)
            self._write("by_version")[entry.version] = changed
        else:
            del self._write("by_version")[entry.version]
            self.gone.add_version(entry.version)

    def set_stream(self, stream: StreamRecord) -> None:
        """Replace a stream; archives are only added to it, never removed."""
        before = self.streams.get(stream.name)
        segments, archives = (before.segments, before.archives) if before else ((), ())
        self.streams[stream.name] = stream
        archived = [s for one in stream.archives[len(archives) :] for s in one.segments]
        self._hold(segment.manifest for segment in (*stream.segments, *archived))
        self._release(segment.manifest for segment in segments)

    def group(self, name: str) -> GroupDraft:
        """Return a mutable group of followers."""
        if name not in self._groups:
            self._groups[name] = GroupDraft(self.base.group(name))
        return self._groups[name]

    # Places

    def place(self, place: Place) -> None:
        """Set the place of a manifest."""
        table = self._write("by_manifest")
        if self._holds_nothing or place.manifest not in self._read("uses"):
            # It was not needed until now. A compact run did not have it, so it comes last.
            table.pop(place.manifest, None)
        table[place.manifest] = place
        self._touched.add(place.manifest)

    def come_back(self) -> None:
        """Take a drop back; what held nothing until now needs a place for everything again."""
        if self._holds_nothing:
            self._claimed.update(self._read("uses"))
        self.fields |= {"dropped": None, "hidden_at": None, "freed_at": None}
        self._restarted = True  # a dropped run has no best

    def _hold(self, manifests: Iterable[Digest]) -> None:
        uses = self._write("uses")
        for manifest in manifests:
            before = uses.get(manifest, 0)
            uses[manifest] = before + 1
            if not before:
                self._claimed.add(manifest)

    def _release(self, manifests: Iterable[Digest]) -> None:
        uses = self._write("uses")
        for manifest in manifests:
            if _count_down(uses, manifest):
                self._touched.add(manifest)

    def end_slot(self, *, is_placed: bool) -> None:
        """Drop the places of unneeded manifests from a compact run."""
        if self.gone is None:
            return
        uses, places = self._read("uses"), self._read("by_manifest")
        if self._holds_nothing:
            self._tables["by_manifest"] = {}
            self._touched.clear()
            self._claimed.clear()
            return
        if is_placed and any(one in uses and one not in places for one in self._claimed):
            raise NeedsHistory
        for manifest in self._touched:
            if manifest not in uses and manifest in places:
                places = self._write("by_manifest")
                del places[manifest]
        self._touched.clear()
        self._claimed.clear()

    def freeze(self) -> RunManifest:
        """Return the frozen run."""
        base = self.base
        fields = self.fields | {
            "next_slot": self.next_slot,
            "commits": self.commits,
            "head": self.head,
            "created": self.created,
            "phase": self.phase,
            "phases": tuple(self.phases),
            "next_version": self.next_version,
            "streams": tuple(self.streams.values()),
            "epoch": self.epoch,
            "gone": None if self.gone is None else self.gone.freeze(),
        }
        for lookup, field in _FIELDS.items():
            if lookup in self._tables:
                fields[field] = tuple(self._tables[lookup].values())
        if self._groups:
            groups = {group.name: group for group in base.groups}
            groups |= {name: group.freeze() for name, group in self._groups.items()}
            fields["groups"] = tuple(groups.values())
        run = base.changed(**fields)
        for lookup in _LOOKUPS:
            found = self._tables.get(lookup, base.__dict__.get(lookup))
            is_same = lookup != "spec" or self.created is base.created
            if found is not None and is_same:
                run.__dict__[lookup] = found
        if "bests" in base.__dict__ and len(self._changed) <= _FEW and not self._restarted:
            run.__dict__["bests"] = self._bests()
        return run


def _note_number(table: dict[Any, tuple[int, ...]], key: object, n: int, *, is_there: bool) -> None:
    """Add a number to an ascending list of a table, or remove it."""
    numbers = list(table.get(key, ()))
    at = bisect_left(numbers, n)
    numbers[at : at + (not is_there)] = [n] * is_there
    if numbers:
        table[key] = tuple(numbers)
    else:
        del table[key]


def _named(pin: Pin) -> tuple[Digest, ...]:
    return (pin.manifest,) if pin.card is None else (pin.manifest, pin.card)


def _count_down(counts: dict[Any, int], key: object) -> bool:
    """Subtract one from a count; return whether it is now zero."""
    counts[key] -= 1
    if counts[key]:
        return False
    del counts[key]
    return True
