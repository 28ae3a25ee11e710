"""A replayed run at one slot of its log, and its queries."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from functools import cached_property
from math import isnan
from typing import Annotated, Any, Literal, Self

from holdfast.registry.errors import Hint, InvalidInput
from holdfast.registry.history.actions import CreateRun, Place, RunStatus
from holdfast.registry.history.log_values import decode_or_keep, kept_ref, merged_from
from holdfast.registry.history.replay.evicted import (
    EvictedNumbers,
    NeedsHistory,
    classes,
    pack_bits,
)
from holdfast.registry.history.replay.run_parts import (
    CheckpointRecord,
    GroupRecord,
    Hold,
    Note,
    PhaseRecord,
    Pin,
    PoolRecord,
    StreamRecord,
    WriterRecord,
    rating_metrics,
    rating_of,
    stays_by_phase,
)
from holdfast.registry.spec import Monitor, RunSpec
from holdfast.registry.values import Digest, DigestField, Field, PhaseName, Plain, Record

FORMAT: Literal["holdfast.run/1"] = "holdfast.run/1"
#: The phase of runs that declare none.
_DEFAULT_PHASE = "main"


class RunManifest(Record):
    """A replayed run at one slot of its log.

    There are two forms. A *complete* run has the records of all checkpoints and pool entries. A
    *compact* run has the records of the kept ones, only the numbers of the evicted ones, and no
    places of unneeded manifests. Readers and writers use the compact form;
    `holdfast.registry.history.RunLog.history` returns the complete one.
    """

    format: Literal["holdfast.run/1"] = FORMAT
    run_id: str  # the run
    next_slot: Annotated[int, Field(ge=0)] = 0  # the slot that the next write goes to
    commits: int = 0  # number of commits
    #: Digest of the last commit line; `None` before the first.
    head: DigestField | None = None
    #: The action that created the run; `None` before the first commit.
    created: CreateRun | None = None
    created_ms: int = 0  # time of that commit, by its author's clock
    status: RunStatus = "running"
    reason: str | None = None  # the exception that made it `failed`, if it is known
    #: The reason why the run was dropped; `None` if it was not.
    dropped: str | None = None
    #: The slot that hid it, if the drop can be taken back.
    hidden_at: Annotated[int, Field(ge=0)] | None = None
    #: The slot from which on it holds nothing, although it can be brought back.
    freed_at: Annotated[int, Field(ge=0)] | None = None
    #: The newest slot with a seal, if a collector ever sealed the run.
    sealed_at: Annotated[int, Field(ge=0)] | None = None
    writer: WriterRecord | None = None  # the trainer that may save
    #: The present phase of training; `None` before the first checkpoint.
    phase: PhaseName | None = None
    phases: tuple[PhaseRecord, ...] = ()  # phases that were entered by a transition, and pivots
    #: The kept checkpoints, superseded ones included, in log order; in a complete run also the
    #: evicted ones.
    checkpoints: tuple[CheckpointRecord, ...] = ()
    pins: tuple[Pin, ...] = ()  # gates, releases, artifacts and tags
    #: The holds that nobody has removed; `None` without one.
    holds: tuple[Hold, ...] | None = None
    notes: tuple[Note, ...] | None = None  # the notes; `None` without one
    #: The labels that replaced those of the creation; `None`: nobody replaced them.
    labels: tuple[str, ...] | None = None
    release: str | None = None  # the version that `releases/latest` names
    #: The entries of the opponent pool that play, by version; in a complete run all entries.
    pool: tuple[PoolRecord, ...] = ()
    next_version: int = 1  # version of the next entry
    matches: tuple[str, ...] = ()  # ids of the newest recorded matches
    streams: tuple[StreamRecord, ...] = ()
    groups: tuple[GroupRecord, ...] = ()  # groups of followers
    #: The place in this registry of each manifest that the run needs; in a complete run of all
    #: manifests.
    places: tuple[Place, ...] = ()
    epoch: int = 0  # highest epoch that has a mark in the log
    #: The evicted checkpoints and entries by number; `None` in a complete run.
    gone: EvictedNumbers | None = None

    #: Above 0 if records of earlier commits may be in parts of a snapshot.
    floor = 0

    @classmethod
    def empty(cls, run_id: str) -> Self:
        """Return a run before its first slot, which breaks no rule."""
        return cls.unchecked(run_id=run_id)

    def whole(self) -> "RunManifest":
        """Return the run with all its records: of a run in parts, those that were not read yet."""
        return self

    def compact(self) -> "RunManifest":
        """Return the run without evicted records and without places of unneeded manifests."""
        if self.gone is not None:
            return self
        members = ((one.n, (one.phase, one.tier), one.superseded) for one in self.evicted)
        metrics = rating_metrics(self.created)
        ratings = (rating_of(one, metrics) for one in reversed(self.evicted))
        evicted = EvictedNumbers.unchecked(
            checkpoints=tuple(classes(members)),
            versions=pack_bits(one.version for one in self.pool if one.evicted is not None),
            rating=next(filter(None, ratings), None),
        )
        kept = tuple(one for one in self.checkpoints if one.evicted is None)
        numbers = {one.n for one in kept}
        held = self.held
        return self.changed(
            gone=evicted,
            checkpoints=kept,
            pool=tuple(self.roster()),
            groups=tuple(group.restricted(numbers) for group in self.groups),
            places=tuple(place for place in self.places if place.manifest in held),
        )

    # Lookups. Replay carries them over from run to run (`holdfast.registry.history.replay.draft`).

    @cached_property
    def by_n(self) -> dict[int, CheckpointRecord]:
        """Checkpoints by the number of the commit that added them."""
        return {checkpoint.n: checkpoint for checkpoint in self.checkpoints}

    @cached_property
    def by_manifest(self) -> dict[Digest, Place]:
        """Places by manifest."""
        return {place.manifest: place for place in self.places}

    @cached_property
    def by_pin(self) -> dict[tuple[str, str], Pin]:
        """Pins by kind and name."""
        return {(pin.kind, pin.name): pin for pin in self.pins}

    @cached_property
    def by_version(self) -> dict[int, PoolRecord]:
        """Entries of the pool by version."""
        return {entry.version: entry for entry in self.pool}

    @cached_property
    def by_step(self) -> dict[tuple[str, int], tuple[int, ...]]:
        """Numbers of the live checkpoints by phase and step."""
        found: dict[tuple[str, int], tuple[int, ...]] = {}
        for one in self.checkpoints:
            if one.is_live:
                key = one.phase, one.step
                found[key] = (*found.get(key, ()), one.n)
        return found

    @cached_property
    def by_class(self) -> dict[tuple[str, str | None, bool], tuple[int, ...]]:
        """Numbers of the kept checkpoints by phase, tier and superseded or not, in log order."""
        found: dict[tuple[str, str | None, bool], list[int]] = {}
        for one in self.checkpoints:
            if one.evicted is None:
                found.setdefault((one.phase, one.tier, one.superseded), []).append(one.n)
        return {of: tuple(numbers) for of, numbers in found.items()}

    @cached_property
    def bests(self) -> dict[tuple[Monitor, str | None], tuple[float, int] | None]:
        """Rank and number of the best checkpoint by monitor and phase, once it was asked for."""
        return {}

    @cached_property
    def asked(self) -> set[tuple[Monitor, str | None]]:
        """The monitors and phases that `bests` was asked for, in any run of this replay."""
        return set()

    def prepare(self) -> None:
        """Make the lookups that saves use, so that replay carries them over.

        A save uses them only on the run after its own commit. If they were made there, each save
        would make them again.
        """
        _ = self.by_class, self.by_step
        for monitor, phase in list(self.asked):
            self.best(monitor, phase)

    @cached_property
    def pinned(self) -> dict[int, int]:
        """How many gates and tags name a checkpoint, by its number."""
        found: dict[int, int] = {}
        for pin in self.pins:
            if pin.checkpoint is not None and pin.kind in ("gate", "tag"):
                found[pin.checkpoint] = found.get(pin.checkpoint, 0) + 1
        return found

    @cached_property
    def uses(self) -> dict[Digest, int]:
        """How often each manifest is needed; of a dropped run as if it were not dropped."""
        found: dict[Digest, int] = {}
        for manifest, *_ in self._holdings():
            found[manifest] = found.get(manifest, 0) + 1
        return found

    @property
    def evicted(self) -> list[CheckpointRecord]:
        """The records of evicted checkpoints; a compact run has none."""
        return [one for one in self.checkpoints if one.evicted is not None]

    def hold(self, checkpoint: int | None) -> Hold | None:
        """Return the hold on a checkpoint, or on the whole run, if there is one."""
        return next((one for one in self.holds or () if one.checkpoint == checkpoint), None)

    def note(self, checkpoint: int | None) -> Note | None:
        """Return the note on a checkpoint, or on the whole run, if there is one."""
        return next((one for one in self.notes or () if one.checkpoint == checkpoint), None)

    @property
    def labels_now(self) -> tuple[str, ...]:
        """The labels of the run: the last ones, or those that it was created with."""
        first = None if self.created is None else self.created.labels
        return (first if self.labels is None else self.labels) or ()

    @property
    def evicted_count(self) -> int:
        """How many checkpoints were evicted."""
        return len(self.evicted) + (self.gone.count if self.gone else 0)

    @property
    def superseded_count(self) -> int:
        """How many checkpoints are superseded, evicted ones included."""
        known = sum(one.superseded for one in self.checkpoints)
        return known + (self.gone.superseded if self.gone else 0)

    @property
    def count(self) -> int:
        """How many checkpoints were ever saved."""
        return len(self.checkpoints) + (self.gone.count if self.gone else 0)

    @property
    def has_checkpoints(self) -> bool:
        """Whether a checkpoint was ever saved."""
        return bool(self.checkpoints) or bool(self.gone and self.gone.checkpoints)

    def record(self, n: int) -> CheckpointRecord:
        """Return the checkpoint that commit `n` added."""
        if n not in self.by_n and self.is_evicted(n):
            raise NeedsHistory
        return self.by_n[n]

    def is_evicted(self, n: int) -> bool:
        """Return whether commit `n` added a checkpoint that was evicted later."""
        if n in self.by_n:
            return self.by_n[n].evicted is not None
        return self.gone is not None and isinstance(n, int) and self.gone.has(n)

    def is_superseded(self, n: int) -> bool:
        """Return whether commit `n` added a checkpoint that is superseded."""
        if n in self.by_n:
            return self.by_n[n].superseded
        return self.gone is not None and self.gone.is_behind(n)

    def evicted_on_line(self, phase: str, tier: str | None) -> int:
        """Return the evicted checkpoints of the current line, as the bits of their numbers."""
        if self.gone is not None:
            return self.gone.on_line(phase, tier)
        of = phase, tier
        found = (one for one in self.evicted if not one.superseded and (one.phase, one.tier) == of)
        return pack_bits(one.n for one in found)

    def saved_in(self, phase: str) -> bool:
        """Return whether the current line has a checkpoint in a phase, kept or evicted."""
        evicted = self.gone.checkpoints if self.gone is not None else ()
        return any(one.phase == phase and one.line for one in evicted) or any(
            one.phase == phase and not one.superseded for one in self.checkpoints
        )

    @property
    def phases_saved(self) -> list[str]:
        """The phases in which a checkpoint was ever saved."""
        evicted = self.gone.checkpoints if self.gone is not None else ()
        known = [*(one.phase for one in evicted), *(one.phase for one in self.checkpoints)]
        return list(dict.fromkeys(known))

    @cached_property
    def spec(self) -> RunSpec:
        """The specification of the run; without a preset, only its monitors."""
        if self.created is None:
            return RunSpec()
        # Not checked again: a run of an older version may have two monitors of one metric.
        return self.created.spec or RunSpec.unchecked(monitors=self.created.monitors)

    @property
    def monitors(self) -> tuple[Monitor, ...]:
        """The metrics that decide `best` in the present phase."""
        return self.spec.phase(self.present_phase).monitors

    def monitor(self, phase: str | None = None) -> Monitor:
        """Return the monitor that decides `best`: the first of a phase, or of the present one."""
        known = self.monitors if phase is None else self.spec.phase(phase).monitors
        for monitor in known:
            return monitor
        raise InvalidInput(
            "the run has no monitor to decide which checkpoint is best",
            where=self.run_id,
            hint=Hint(
                "Create the run, or a fork, with monitor=Monitor(metric='loss', mode='min'), or "
                "pass one.",
                "Create the run, or a fork (`--from`), with `--monitor loss:min`, or another "
                "METRIC:min or METRIC:max.",
            ),
        )

    @property
    def present_phase(self) -> str:
        """The phase that training is in; before the first checkpoint the one that it begins in."""
        return self.phase or (self.spec.phases[0].name if self.spec.phases else _DEFAULT_PHASE)

    @property
    def seed(self) -> int:
        """The master seed."""
        assert self.created is not None  # a run has its commit 0
        return int(self.created.seed, 16)

    @property
    def tags(self) -> dict[str, int]:
        """Commit numbers of checkpoints by the tags that name them."""
        return {pin.name: pin.checkpoint or 0 for pin in self.pins if pin.kind == "tag"}

    def pin(self, kind: str, name: str) -> Pin | None:
        """Return the pin of a kind and name."""
        return self.by_pin.get((kind, name))

    def pins_of(self, kind: str) -> list[Pin]:
        """Return the pins of a kind, in the order in which they were set."""
        return [pin for pin in self.pins if pin.kind == kind]

    def stream(self, name: str) -> StreamRecord | None:
        """Return a stream by name."""
        return next((stream for stream in self.streams if stream.name == name), None)

    def group(self, name: str) -> GroupRecord:
        """Return a group of followers by name; an empty one before its first claim."""
        found = (group for group in self.groups if group.name == name)
        return next(found, GroupRecord(name=name))

    def roster(self) -> list[PoolRecord]:
        """Return the entries of the pool that play, oldest first."""
        return [entry for entry in self.pool if entry.evicted is None]

    def entered(self, phase: str) -> PhaseRecord | None:
        """Return the last transition into a phase on the current line of training."""
        for record in reversed(self.phases):
            if record.to_phase == phase and not record.superseded and not record.stays:
                return record
        return None

    @property
    def pivots(self) -> list[PhaseRecord]:
        """The pivots of the current line of training, in log order."""
        return [one for one in self.phases if one.name is not None and not one.superseded]

    @property
    def config(self) -> Plain:
        """The encoded configuration now; see `config_at`."""
        return self.config_at(self.commits)

    def config_at(self, n: int) -> Plain:
        """Return the encoded configuration at a commit: that of a pivot before it, or the first."""
        found = (one.config for one in reversed(self.pivots) if one.n <= n)
        given = (config for config in found if config is not None)
        return next(given, None if self.created is None else self.created.config)

    def pivots_after(self, n: int) -> list[PhaseRecord]:
        """Return the pivots after a checkpoint if it is the newest one of the line, else none."""
        newest = next(self.newest_first(), None)
        if newest is None or newest.n != n:
            return []
        return [one for one in self.pivots if one.n > n]

    def restarts(self) -> dict[str, list[PhaseRecord]]:
        """Return the pivots and warm starts of the current line by phase, in log order.

        From each of them on the best of the phase is found among its later checkpoints alone.
        """
        return stays_by_phase(self.phases)

    def live(self, phase: str | None = None) -> list[CheckpointRecord]:
        """Return the kept checkpoints of the current line of training, in log order."""
        return list(self.newest_first(phase))[::-1]

    def newest_first(self, phase: str | None = None) -> Iterator[CheckpointRecord]:
        """Yield the kept checkpoints of the current line of training, the newest first."""
        for one in reversed(self.checkpoints) if self.dropped is None else ():
            if one.is_live and phase in (None, one.phase):
                yield one

    def latest(self, phase: str | None = None) -> CheckpointRecord | None:
        """Return the last live checkpoint in log order whose weights are finite."""
        return next((one for one in self.newest_first(phase) if not one.held_back), None)

    def at_step(self, phase: str, step: int) -> list[CheckpointRecord]:
        """Return the live checkpoints of a step, the newest first."""
        found = self.by_step.get((phase, step), ()) if self.dropped is None else ()
        return [self.by_n[n] for n in reversed(found)]

    def best(self, monitor: Monitor, phase: str | None = None) -> CheckpointRecord | None:
        """Return the live checkpoint with the best value; NaN and missing values never win.

        Of equal values the first one counts, as in a tracker that waits for an improvement. If
        phases are declared, values of different phases are not compared: without `phase` it is the
        best of the present phase.
        """
        key = monitor, self._compared(phase)
        if key not in self.bests:
            self.asked.add(key)
            rated = self.rated(monitor, phase)
            self.bests[key] = min(rated)[:2] if rated else None
        found = self.bests[key]
        return None if found is None or self.dropped is not None else self.by_n[found[1]]

    def own_best(
        self, monitor: Monitor | None = None, phase: str | None = None
    ) -> CheckpointRecord | None:
        """Return the best checkpoint, by default by the first monitor, but for inherited ones."""
        monitor = monitor or next(iter(self.monitors), None)
        best = None if monitor is None else self.best(monitor, phase)
        parent = None if self.created is None else self.created.parent
        if monitor is None or parent is None or not best or best.manifest != parent.checkpoint:
            return best
        rated = [one for one in self.rated(monitor, phase) if one[2].manifest != parent.checkpoint]
        return min(rated)[2] if rated else None

    def _compared(self, phase: str | None) -> str | None:
        return self.phase if phase is None and self.spec.phases else phase

    def ranked(self, monitor: Monitor, phase: str | None = None) -> list[CheckpointRecord]:
        """Return the live checkpoints that have a value, best first."""
        return [found for *_, found in sorted(self.rated(monitor, phase))]

    def rated(
        self, monitor: Monitor, phase: str | None = None
    ) -> list[tuple[float, int, CheckpointRecord]]:
        """Return rank, number and record of each live checkpoint that has a value.

        Those from before the last pivot of their phase do not count.
        """
        since = {name: records[-1].n for name, records in self.restarts().items()}
        return [
            one
            for one in self._rated(monitor, self._compared(phase))
            if one[1] > since.get(one[2].phase, -1)
        ]

    def bests_before(self, monitor: Monitor, phase: str) -> Iterator[tuple[str, CheckpointRecord]]:
        """Yield the name of each pivot in a phase, with the checkpoint that was best until then."""
        since = -1
        for restart in self.restarts().get(phase, ()):
            until = [one for one in self._rated(monitor, phase) if since < one[1] < restart.n]
            since = restart.n
            if until:
                yield restart.name or "", min(until)[2]

    def _rated(
        self, monitor: Monitor, phase: str | None
    ) -> list[tuple[float, int, CheckpointRecord]]:
        rated = (
            (one.rank(monitor), one.n, one)
            for one in (self.checkpoints if self.dropped is None else ())
            if one.is_rated_in(phase)
        )
        return [one for one in rated if not isnan(one[0])]  # NaN has no order

    @property
    def shown_status(self) -> str:
        """Its status for people: `forked` or `merged` where nobody has trained it yet."""
        is_trained = self.writer is not None or self.status != "running"
        latest, parent = None if is_trained else self.latest(), self.created and self.created.parent
        if latest and parent:
            return "forked" if latest.manifest == parent.checkpoint else self.status
        return "merged" if latest and merged_from(decode_or_keep(latest.meta)) else self.status

    @property
    def is_hidden(self) -> bool:
        """Whether it was dropped and holds what it held: the drop can be taken back."""
        return self.hidden_at is not None and self.freed_at is None

    @property
    def holds_nothing(self) -> bool:
        """Whether it was dropped and released everything."""
        return self.dropped is not None and not self.is_hidden

    @property
    def is_dropped_for_good(self) -> bool:
        """Whether it was dropped for good: no commit may follow."""
        return self.dropped is not None and self.hidden_at is None

    @property
    def held(self) -> AbstractSet[Digest]:
        """Every manifest that the run needs.

        Any other manifest is unneeded: collection may delete it and the objects that only it uses,
        and a commit that names it again must first make sure that they still exist.
        """
        return frozenset() if self.holds_nothing else self.uses.keys()

    @cached_property
    def thinned(self) -> dict[Digest, tuple[str, ...]]:
        """The manifests of which the run holds only some components, with these.

        What needs a manifest whole counts, and of several thinned checkpoints the union.
        """
        named = (one for one in self.checkpoints if one.parts is not None and one.evicted is None)
        found: dict[Digest, dict[str, None]] = {}
        for one in named:
            found.setdefault(one.manifest, {}).update(dict.fromkeys(one.parts or ()))
        for manifest, *refs in self._holdings() if found else ():
            if manifest in found and self._needs_whole(refs[0] if len(refs) == 1 else None):
                del found[manifest]
        return {manifest: tuple(names) for manifest, names in found.items()}

    def holds_whole(self, manifest: Digest) -> bool:
        """Return whether the run holds all components of a state."""
        return manifest in self.held and manifest not in self.thinned

    def _needs_whole(self, holder: object) -> bool:
        """Return whether something holds its manifest whole: all but thinned checkpoints do."""
        if isinstance(holder, Pin) and holder.kind in ("gate", "tag"):
            holder = self.by_n.get(holder.checkpoint or 0)
        return not (isinstance(holder, CheckpointRecord) and holder.parts is not None)

    def holders(self) -> dict[Digest, tuple[str, ...]]:
        """Return the manifests in `held`, each with the refs within the run that need it."""
        found: dict[Digest, list[str]] = {}
        for manifest, *parts in () if self.holds_nothing else self._holdings():
            shown = map(_shown, parts)
            found.setdefault(manifest, []).append("/".join(shown))
        return {manifest: tuple(refs) for manifest, refs in found.items()}

    def _holdings(self) -> Iterator[tuple[Any, ...]]:
        """Yield every needed manifest, with the parts of a ref that needs it."""
        for checkpoint in self.checkpoints:
            if checkpoint.evicted is None:
                yield checkpoint.manifest, checkpoint
                for name, manifest in checkpoint.companions.items():
                    yield manifest, checkpoint, "companions", name
        for pin in self.pins:
            yield pin.manifest, pin
            if pin.card is not None:
                yield pin.card, pin.ref, "card"
        for entry in self.roster():
            yield entry.manifest, f"pool/v{entry.version:04d}"
        for stream in self.streams:
            for segment in stream.segments:
                yield segment.manifest, "streams", stream.name
            for archive in stream.archives:
                for segment in archive.segments:
                    yield segment.manifest, "streams", stream.name, archive.label
        for phase in self.phases:
            if not phase.superseded:
                for name, manifest in phase.companions.items():
                    yield manifest, "companions", name

    def is_placed(self, place: Place) -> bool:
        """Return whether a place is current and its manifest is needed: rule W2a."""
        current = self.by_manifest.get(place.manifest) == place
        return current and place.manifest in self.held


def _shown(part: CheckpointRecord | Pin | str) -> str:
    if isinstance(part, str):
        return part
    return part.ref if isinstance(part, Pin) else kept_ref(part)
