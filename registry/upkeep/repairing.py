"""Restore missing and damaged objects from a mirror.

An object is put back under its own key, from any copy with the same digest: another generation
here, or any generation at the mirror. Where there is no copy, because the mirror packs the same
state in another way, the state is adopted: its objects are put under keys of this registry, and the
run's log gives it a new place. Every byte is verified before it is written.

Logs, epochs and `registry.json` are not rebuilt, because a mirror has others: its slots name its
own objects, and its epochs condemn its own keys. Only a backup brings them back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.backends.location import parse
from holdfast.registry.errors import (
    Conflict,
    IntegrityError,
    InvalidInput,
    Malformed,
    ObjectNotFound,
    RegistryError,
    UnsupportedFormat,
)
from holdfast.registry.history import Epochs, RunLog, list_runs, placed_state
from holdfast.registry.history.actions import Action, Place
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.objects import ObjectKey, PackRef, stem, thinned
from holdfast.registry.store import Outcome, Progress, Store, Workers
from holdfast.registry.upkeep.data_pass import Tables, check_object, check_rows, fault_of
from holdfast.registry.upkeep.findings import Finding, Need, VerifyReport
from holdfast.registry.upkeep.verify_notes import note_verify
from holdfast.registry.upkeep.verifying import Verification
from holdfast.registry.values import Digest
from holdfast.registry.writing import Committer, Composed, StateWriter, Written, adopt

#: Rounds of verify and mend: a placement must be whole again before the faults of its packs show.
_ROUNDS = 4
_OWN = {
    "log": "a log is this registry's own: a mirror's slots name the mirror's objects",
    "epoch": "the epochs are this registry's own: they list the objects condemned here",
    "config": "registry.json is this registry's own: nothing else holds its id",
    "snapshot": "a snapshot is a cache; it is written again, not restored",
}


@dataclass(frozen=True, slots=True)
class Mended:
    """An object or a state that is whole again, or would be."""

    where: str  # the key of the object that was put back, or the ref of the state that was adopted
    #: `restored` under its own key, or `adopted` with a new place in the log.
    how: Literal["restored", "adopted"]
    source: str  # where the bytes came from
    affects: tuple[str, ...]  # refs that can be loaded again
    size_bytes: int  # bytes that were written; of an adopted state, only those of packs


@dataclass(frozen=True, slots=True)
class Left:
    """Something that was not mended."""

    where: str  # the key, run or ref concerned
    message: str
    reason: str  # why it was not mended
    affects: tuple[str, ...]  # refs that cannot be loaded because of it
    advice: str  # what to do


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The report of a repair, or in a dry run of a plan.

    Attributes:
        found: The verification that it began with.
        mended: Objects and states that are whole again.
        left: Faults that remain.
        dry_run: Whether nothing was written.
    """

    found: VerifyReport
    mended: tuple[Mended, ...]
    left: tuple[Left, ...]
    dry_run: bool

    @property
    def ok(self) -> bool:
        """Whether everything is whole now, as far as this repair checked."""
        return not self.left

    @property
    def bytes_written(self) -> int:
        """Bytes of objects that were put back or adopted."""
        return sum(one.size_bytes for one in self.mended)


def repair(
    store: Store,
    mirror: Store,
    *,
    deep: bool = True,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RepairReport:
    """Verify a registry, and mend it from a mirror; see `Registry.repair`."""
    if _is_same(store.backend.url, mirror.backend.url):
        raise InvalidInput("a registry cannot be its own mirror", where=store.backend.url)
    with suppress(IntegrityError):  # the verification reports it; no state can be adopted then
        Epochs(store).observe()
    verification = Verification(store, progress)
    if deep:
        verification.read_data()
    found = last = verification.check()
    job = _Repair(store, mirror, verification, dry_run=dry_run)
    for _ in range(_ROUNDS):
        if not job.mend() or dry_run:
            break
        last = verification.check()
    note_verify(store, last)
    return RepairReport(found, tuple(job.mended), tuple(job.left(last)), dry_run)


def _is_same(here: str, there: str) -> bool:
    if here == there:
        return True
    places = [parse(url) for url in (here, there)]
    if any(place.scheme != "file" for place in places):
        return False
    return Path(places[0].path).samefile(places[1].path)


class _Repair:
    """Mends the faults of one verification."""

    def __init__(
        self, store: Store, mirror: Store, verification: Verification, *, dry_run: bool
    ) -> None:
        self._store = store
        self._mirror = mirror
        self._verification = verification
        self._dry_run = dry_run
        self._reasons: dict[str, str] = {}
        self._sound: set[ObjectKey] = set()
        self.mended: list[Mended] = []

    def mend(self) -> bool:
        """Mend every fault that can be mended; return whether there was one."""
        before = len(self.mended)
        self._sound.clear()
        needs = self._verification.needs()
        broken = [key for key in sorted(self._verification.faults) if key in needs]
        rest = self._restore(broken, needs)
        jobs: dict[Need, list[ObjectKey]] = {need: [] for need in self._verification.unplaced()}
        for key in rest:
            for need in needs[key]:
                jobs.setdefault(need, []).append(key)
        sources = self._sources({need.manifest for need in jobs})
        for need, keys in jobs.items():
            self._adopt_from(need, sources[need.manifest], keys)
        return len(self.mended) > before

    def left(self, last: VerifyReport) -> Iterator[Left]:
        """Yield the faults that are still in a later report, each with the reason."""
        mended = {ref for one in self.mended for ref in one.affects}
        for finding in last.findings:
            if finding.severity == "note":
                continue
            if self._dry_run and mended.issuperset(finding.affects or [finding.where]):
                continue
            yield _left(finding, self._reasons.get(finding.where))

    # The same bytes under the same key

    def _restore(
        self, keys: Sequence[ObjectKey], needs: dict[ObjectKey, list[Need]]
    ) -> list[ObjectKey]:
        """Put objects back under their own keys; return the keys for which that is impossible.

        No sweep deletes a key that a run needs, now or later: a sweep that condemned it spared it
        when the run was marked (docs/spec.md, section 13). So the same key may be put again, and no
        deletion that is under way can hit it. If the state is evicted before the object is put, the
        object is an orphan like any other.
        """
        faults = self._verification.faults

        def size_of(key: ObjectKey) -> int:
            return faults[key].size_bytes or 0

        def take(key: ObjectKey, done: Outcome[tuple[str, int] | str]) -> None:
            found = done.result()
            if isinstance(found, str):
                self._reasons[str(key)] = found
                rest.append(key)
                return
            source, size_bytes = found
            affects = tuple(ref for need in needs[key] for ref in need.refs)
            self.mended.append(Mended(str(key), "restored", source, affects, size_bytes))
            self._verification.forget([key])
            self._sound.add(key)

        rest: list[ObjectKey] = []
        Workers(None, self._store).each(self._restore_one, keys, take, size_of=size_of)
        self.mended.sort(key=lambda one: one.where)
        return sorted(rest)

    def _restore_one(self, here: Store, key: ObjectKey) -> tuple[str, int] | str:
        """Put one object back; return where it came from and its size, or why it was not."""
        fault = self._verification.faults[key]
        reasons = []
        for store, copy in self._copies(key):
            try:
                data = store.backend.get(str(copy))
                check_object(data, copy)
            except ObjectNotFound:
                continue  # collected meanwhile
            except RegistryError as error:
                reasons.append(f"{store.backend.url}: {fault_of(error)}")
                continue
            if fault.size_bytes in (None, len(data)):
                if not self._dry_run:
                    here.backend.put(str(key), data)
                return f"{store.backend.url}: {copy}", len(data)
        return "; ".join(reasons) or f"{self._mirror.backend.url} holds no object of this digest"

    def _copies(self, key: ObjectKey) -> Iterator[tuple[Store, ObjectKey]]:
        for store in (self._store, self._mirror):
            for info in store.backend.list(stem(key.kind, key.digest)):
                with suppress(Malformed):  # a foreign file
                    copy = ObjectKey.parse(info.key)
                    if store is not self._store or copy != key:
                        yield store, copy

    # The same state in other objects

    def _sources(self, manifests: set[Digest]) -> dict[Digest, list[tuple[Store, Place]]]:
        """Return the places of states that may be whole: here, and at the mirror."""
        found = {
            manifest: [(self._store, place) for place in places]
            for manifest, places in self._verification.whole_places(manifests).items()
        }
        for run_id in list_runs(self._mirror) if manifests else ():
            try:
                log = RunLog(self._mirror, run_id)
                placed = log.open().by_manifest
                if not manifests <= placed.keys() and log.run.evicted_count:
                    placed = log.history().by_manifest  # evicted ones may still be there
            except (IntegrityError, UnsupportedFormat):
                continue  # its other runs may still help
            for manifest in manifests & placed.keys():
                if (self._mirror, placed[manifest]) not in found[manifest]:
                    found[manifest].append((self._mirror, placed[manifest]))
        return found

    def _adopt_from(
        self, need: Need, sources: Sequence[tuple[Store, Place]], keys: Iterable[ObjectKey]
    ) -> None:
        reasons = []
        for source, place in sources:
            try:
                size_bytes = self._adopt(need, source, place)
            except (IntegrityError, UnsupportedFormat, Conflict) as error:
                reasons.append(f"{source.backend.url}: {error.summary}")
                continue
            origin = f"{source.backend.url}: {place.manifest_key}"
            self.mended.append(Mended(need.refs[0], "adopted", origin, need.refs, size_bytes))
            return
        reason = "; ".join(reasons) or f"{self._mirror.backend.url} has no such state in any run"
        names = {need.refs[0], *map(str, keys)}
        if need.place is not None and not keys:
            names.add(str(need.place.placement_key))
        for name in names:
            before = self._reasons.get(name, "")
            if reason not in before:
                self._reasons[name] = f"{before}; {reason}" if before else reason

    def _adopt(self, need: Need, source: Store, place: Place) -> int:
        """Put a state under keys of this registry, and commit its new place; return the bytes sent.

        Rules W1 to W5 hold as for every commit that names objects
        (`holdfast.registry.writing.object_writer`). Damaged keys are made suspect first, so that
        the writer does not use them again.
        """
        _check_source(source, place)
        log = RunLog(self._store, need.run_id)
        held = source.placement(place.placement_key).components
        wanted = log.open().thinned.get(need.manifest, ())
        if held is not None and not (wanted and set(wanted) <= set(held)):
            raise thinned(held, f"{source.backend.url}: {place.manifest_key}", wanted)
        committer = Committer(StateWriter(self._store, log))
        writer = committer.writer.objects
        writer.suspect |= self._verification.faults.keys() - self._sound
        if self._dry_run:
            return _check_packs(source, place, committer)
        sent: list[int] = []
        used: set[ObjectKey] = set()

        def count(pack: PackRef, was_sent: bool) -> None:
            sent.append(pack.size_bytes * was_sent)

        def plan() -> list[Written]:
            (adopted,), chosen = adopt(source, self._store, writer, [place], count)
            used.update(chosen.keys)
            return [Written(placed_state(self._store, adopted), chosen, 0)]

        def compose(run: RunManifest) -> Sequence[Action] | None:
            # Evicted, moved or mended meanwhile: there is nothing to do any more.
            is_same = run.by_manifest.get(need.manifest) == need.place
            return [] if is_same and need.manifest in run.held else None

        committer.commit(Composed(compose, plan, on_dropped=True))
        self._sound |= used
        self._verification.forget(used)
        return sum(sent)


def _check_source(source: Store, place: Place) -> None:
    """Check that a placement at the source agrees with its packs."""
    manifest, placement = source.manifest(place.manifest_key), source.placement(place.placement_key)
    check_rows(source, Tables(), manifest, placement)


def _check_packs(source: Store, place: Place, committer: Committer) -> int:
    """Check the packs that an adoption would send; return their bytes."""
    sent = 0
    for pack in source.placement(place.placement_key).packs:
        if committer.writer.objects.usable("packs", pack.key.digest, pack.size_bytes) is None:
            check_object(source.read(pack.key), pack.key)
            sent += pack.size_bytes
    return sent


def _left(finding: Finding, reason: str | None) -> Left:
    reason = reason or _OWN.get(finding.kind, "no object of a mirror can mend it")
    return Left(finding.where, finding.message, reason, finding.affects, finding.advice)
