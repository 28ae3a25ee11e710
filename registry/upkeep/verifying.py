"""Check a registry: its structure, and with `deep` every byte of it.

Structure: every log is complete, chained and legal; every state that a run holds has a place; every
object that a place needs is there and has the right size; no file stops collection. Deep: every
object is read once and hashed, and every placement is compared with the tables of its packs. An
encoded chunk is checked against the digest of its stored bytes; with `decode` it is also decoded.
Nothing is changed here. The registry may be in use: a state that is evicted, collected or moved
during the check is no finding.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import filterfalse, groupby
from operator import attrgetter

from holdfast.registry.errors import ObjectNotFound, RegistryError
from holdfast.registry.history import list_runs
from holdfast.registry.history.actions import Place
from holdfast.registry.objects import KINDS, RUNS, ObjectKey, open_pack
from holdfast.registry.store import Outcome, Progress, Store, Workers, verify_pack_chunks
from holdfast.registry.upkeep.data_pass import (
    DataPass,
    PassNotes,
    check_sample,
    check_small,
    fault_of,
)
from holdfast.registry.upkeep.file_names import Names, check_config
from holdfast.registry.upkeep.findings import (
    DataRead,
    Finding,
    Need,
    Needs,
    Severity,
    VerifyReport,
    read_differently,
)
from holdfast.registry.upkeep.head_check import HeadCheck, NoteCheck
from holdfast.registry.upkeep.histories import Asked, History, NeededStates, read_history
from holdfast.registry.upkeep.placement_checks import (
    HELD_BYTES,
    Checked,
    DecodePass,
    Fault,
    PacksOf,
    PlaceCheck,
    WhichRows,
    check_pack,
    condemned_by,
    place_name,
)
from holdfast.registry.upkeep.shards import Shard
from holdfast.registry.upkeep.shelf import Shelf
from holdfast.registry.upkeep.signature_check import Keys, SignatureCheck
from holdfast.registry.upkeep.verify_notes import KeptFinding, LastCheck, known_damage
from holdfast.registry.values import Digest

#: Times that the check repeats places that others moved meanwhile.
_ROUNDS = 3
#: Memory that an unpacked and parsed manifest or placement takes, as a multiple of its file.
_PARSED = 8
_MEND = (
    "Run `holdfast repair --from MIRROR`. Without a mirror: move the file away, and save the same "
    "state again into a new run."
)
_WRONG_WITHIN = (
    "Its writer stored wrong bytes, and mirrors have the same: `repair` cannot help. Save the "
    "same states again into a new run."
)
_GIVEN_UP = "Somebody gave the run up, and collections pass over it: leave its folder in place."
_ORPHAN = "Nothing needs it; `gc` will delete it. Run `gc` before the same state is saved again."


def verify(
    store: Store,
    *,
    deep: bool = False,
    sample: float | None = None,
    resume: str | os.PathLike[str] | None = None,
    decode: bool = False,
    heads: str | os.PathLike[str] | None = None,
    write_heads: str | os.PathLike[str] | None = None,
    since_last: bool = False,
    shard: str | None = None,
    signed: Keys | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check a registry; see `Registry.verify`."""
    part = Shard.parse(shard)
    check = HeadCheck(store, heads, None if signed is None else SignatureCheck(store, signed))
    with closing(LastCheck(store)) if since_last else nullcontext() as last:
        verification = Verification(store, progress, check, executor, last, part)
        if deep or decode or sample is not None or resume is not None:
            verification.read_data(sample, resume, decode=decode)
        report = verification.check()
    if write_heads is not None and report.ok:
        verification.write_heads(write_heads)
    return report


class Verification:
    """One verification: the data once, if asked for, then the structure, any number of times."""

    def __init__(
        self,
        store: Store,
        progress: Progress | None = None,
        heads: HeadCheck | None = None,
        executor: Executor | None = None,
        last: LastCheck | None = None,
        shard: Shard | None = None,
    ) -> None:
        self._store, self._last = store, last
        self._shard = shard or Shard()
        self._workers = Workers(executor, store)
        self._head_check = heads or HeadCheck(store)
        self._progress = progress
        self._bytes = 0
        self._packs = DataPass(store, self._workers, self._count, self._shard)
        self._data: DataRead | None = None
        self._decoding: DecodePass | None = None
        self._is_whole = False
        self._notes: PassNotes | None = None
        self._resume_note: list[Finding] = []
        self._begin()

    def _begin(self) -> None:
        self._names = Names()
        self._findings: list[Finding] = []
        self._needed = NeededStates()
        self._checkpoints = self._unchanged = 0
        self._marked: dict[str, int] = {}
        self._again: set[ObjectKey] = set()
        self._seen = Shelf[int]()  # the places that were looked at
        self._known = PacksOf()
        self._unfit: dict[Place, str] = {}
        self._covers = Shelf[str]()  # the components in the placements of thinned states
        self.faults: dict[ObjectKey, Fault] = {}

    def read_data(
        self,
        sample: float | None = None,
        resume: str | os.PathLike[str] | None = None,
        *,
        decode: bool = False,
    ) -> None:
        """Read and hash the packs, or a share of them; `check` reports on them later."""
        check_sample(sample)
        self._notes = notes = None if resume is None else PassNotes(resume, self._store.config.id)
        if notes is not None and notes.ignored is not None:
            advice = "Everything is read again."
            self._resume_note = [Finding("resume", str(resume), notes.ignored, (), advice, "note")]
        self._decoding = DecodePass(self._store) if decode else None
        self._data = self._packs.read(sample, notes)
        self._is_whole = self._data.packs == self._data.packs_read + self._data.packs_noted

    def check(self) -> VerifyReport:
        """Check the structure; report on it and on the data that was read."""
        self._begin()
        config = [*self._resume_note, *check_config(self._store)]
        # The order is safe beside writers and collectors: a snapshot is put after its slot, a
        # commit after its objects, an object after its epoch.
        self._note_check = NoteCheck(self._store)
        self._names.list_links(self._store)
        self._names.list_runs(self._store, self._last.slots if self._last else {})
        runs = list_runs(self._store)
        runs = runs if self._last is None else self._last.in_parts(runs)
        self._read(runs, self._report_history, self._last)
        self._names.list_objects(self._store)
        epochs = self._names.check_epochs(self._store, self._marked, deep=self._data is not None)
        epochs += self._head_check.check_registry(runs, self._names.epoch)
        epochs += self._note_check.check_registry(runs)
        self._read_again()
        self._check_places(
            (place, need.run_id)
            for place, need in self._needed.places(runs)
            if place_name(place) not in self._seen
        )
        if self._is_whole:
            self._check_unneeded()
        damaged = self._packs.faults
        places = self._needed.places() if damaged else ()
        named = (pack for place, _ in places for pack in self._known.of(place))
        sizes = {pack.key: pack.size_bytes for pack in named if pack.key in damaged}
        for key, message in damaged.items():
            self.faults.setdefault(key, Fault(message, size_bytes=sizes.get(key)))
        self._confirm()
        if self._data is not None and self._decoding is not None:
            self._data = replace(self._data, chunks_decoded=self._decoding.chunks)
        if self._notes is not None and self._is_whole:
            self._notes.finish()  # not earlier: a check that fails must not cost the reading
        if self._last is not None:
            self._last.keep(lambda run: self._needed.places([run]), self._whole_objects)
        found = (config, epochs, self._names.findings, self._findings, self._object_findings())
        order = attrgetter("where", "kind", "message")
        standing = filterfalse(self._looks_for, known_damage(self._store))
        return VerifyReport(
            tuple(self._told(one) for part in found for one in sorted(part, key=order)),
            len(runs),
            self._checkpoints,
            len(self._names.sizes),
            self._bytes,
            self._data,
            tuple(Finding(**one.shared(KeptFinding)) for one in standing),
            self._unchanged,
            tuple(self._head_check.vouched),
        )

    def _told(self, finding: Finding) -> Finding:
        """Return a finding, as a note if it is of a run that an operator gave up."""
        where, is_file = finding.where, finding.where.startswith(RUNS)
        run_id = where.removeprefix(RUNS).partition("/")[0] if is_file else where
        if not self._note_check.forgotten.get(run_id):
            return finding
        return replace(finding, affects=(), advice=_GIVEN_UP, severity="note")

    def _looks_for(self, known: KeptFinding) -> bool:
        """Return whether this verification would find damage that an earlier one has found."""
        if known.needs == "structure":  # logs have no shards
            return self._shard.is_all or known.where.partition("/")[0] not in KINDS
        if known.needs == "decode" and self._decoding is None:
            return False
        key = ObjectKey.parse(known.where)
        is_looked_at = key.kind != "packs" and self._is_whole
        if self._shard.is_all and (known.where not in self._names.sizes or is_looked_at):
            return True
        return key in self._packs.whole or key in self._packs.faults

    def needs(self) -> dict[ObjectKey, list[Need]]:
        """Return the states that need an object with a fault, by object."""
        found: dict[ObjectKey, list[Need]] = {}
        for place, need in self._needed.places() if self.faults else ():
            for key in self.faults.keys() & set(self._keys_of(place)):
                found.setdefault(key, []).append(need)
        return found

    def unplaced(self) -> list[Need]:
        """Return the states that a run holds and gives no place, or a wrong one."""
        runs = sorted(self._needed.unplaced)
        unplaced = [need for need in self._needed.of(runs) if need.place is None]
        places = self._needed.places() if self._unfit else ()
        return unplaced + [need for place, need in places if place in self._unfit]

    def whole_places(self, manifests: Collection[Digest]) -> dict[Digest, list[Place]]:
        """Return the undamaged places of states in all runs."""
        found: dict[Digest, list[Place]] = {manifest: [] for manifest in manifests}
        for place, _ in self._needed.places() if manifests else ():
            known = found.get(place.manifest)
            if known is not None and place not in known and not self._is_suspect(place):
                known.append(place)
        return found

    def _is_suspect(self, place: Place) -> bool:
        keys = self._keys_of(place) if self.faults else ()
        return place in self._unfit or not self.faults.keys().isdisjoint(keys)

    def _whole_objects(self, place: Place) -> dict[str, int] | None:
        """Return the objects of a state without faults, with sizes; `None` if it may have some."""
        is_thinned = place_name(place) in self._covers
        if is_thinned or place not in self._known or self._is_suspect(place):
            return None
        return {str(key): self._names.sizes.get(str(key)) or -1 for key in self._keys_of(place)}

    def write_heads(self, path: str | os.PathLike[str]) -> None:
        """Write the heads of the runs that were checked to a file."""
        self._head_check.write(path, self._names.epoch)

    def forget(self, keys: Iterable[ObjectKey]) -> None:
        """Forget the faults of packs that have been replaced."""
        for key in keys:
            self._packs.faults.pop(key, None)
            self._packs.whole.add(key)

    def _count(self, size_bytes: int) -> None:
        self._bytes += size_bytes
        if self._progress is not None:
            self._progress(self._bytes)

    # Runs, and the places of their states

    def _read(
        self,
        run_ids: Iterable[str],
        report: Callable[[History], object],
        last: LastCheck | None = None,
    ) -> None:
        def take(asked: Asked, done: Outcome[History]) -> None:
            history = done.result()
            if self._note_check.forgotten.get(asked.run_id):
                history = replace(history, needs=(), checkpoints=0)  # collections free them
            self._count(history.size_bytes)
            self._marked[asked.run_id] = history.epoch
            self._needed.take(history)
            self._unchanged += asked.base is not None and not history.size_bytes
            report(history)

        def asked(one: str) -> Asked:
            snapshots, log = tuple(self._names.snapshots.get(one, ())), self._names.logs.get(one)
            commits, slot = self._head_check.commits_of(one), self._note_check.slot_of(one)
            base = None if last is None else last.base(one, log, snapshots, commits)
            return Asked(one, snapshots, commits, slot, base, last is not None)

        self._workers.each(read_history, map(asked, run_ids), take)

    def _report_history(self, history: History) -> None:
        self._findings += [*history.findings, *self._head_check.check(history)]
        self._findings += self._note_check.check(history)
        self._checkpoints += history.checkpoints
        if self._last is not None and history.kept is not None:
            self._last.take(*history.kept)

    def _keys_of(self, place: Place) -> tuple[ObjectKey, ...]:
        packs = self._known.of(place)
        return (place.manifest_key, place.placement_key, *(pack.key for pack in packs))

    def _check_places(self, places: Iterable[tuple[Place, str]]) -> None:
        """Check placed states, each with a run that has it; read each manifest once."""
        due = Shelf[bytes]()  # in the order of their names: those of one manifest are together
        last = None if self._is_whole or self._decoding is not None else self._last
        read = set(map(str, self._packs.whole | self._packs.faults.keys()))  # they are compared
        for place, run_id in places:
            self._seen[place_name(place)] = 1
            # Of a damaged pack all states that need it are found.
            if not self._packs.faults and not self._shard.has(place.manifest_key):
                continue
            found = last.objects_of(run_id, place, self._names.sizes) if last else None
            if found is not None and read.isdisjoint(found):
                self._known.keep(place, found)
            else:
                due[place_name(place)] = place.encode()

        rows: WhichRows = "all" if self._is_whole else "none" if self._data is None else "read"
        check = PlaceCheck(rows, self._packs.tables, self._decoding)
        # Only this process knows which packs a sample has read, and which chunks were decoded.
        is_here = rows == "read" or self._decoding is not None
        workers = Workers(None, self._store) if is_here else self._workers
        sorted_ = (Place.parse(due.get(name) or b"", where=name) for name in due)
        groups = (list(of) for _, of in groupby(sorted_, key=lambda place: place.manifest_key))
        workers.each(check, groups, self._take_places, size_of=self._held_by)
        for place, need in self._needed.places() if len(self._covers) else ():
            covers, wanted = self._covers.get(place_name(place)), need.parts
            if covers is not None and (wanted is None or not set(wanted) <= {*json.loads(covers)}):
                self._unfit[place] = (
                    f"{place.placement_key}: covers only {', '.join(json.loads(covers))}, and "
                    f"run {need.run_id} holds {', '.join(wanted or ('the whole state',))}"
                )

    def _take_places(self, _: Sequence[Place], done: Outcome[Checked]) -> None:
        checked = done.result()
        self._count(checked.size_bytes)
        self._unfit |= checked.unfit
        covers = ((place_name(one), json.dumps(names)) for one, names in checked.covers.items())
        self._covers.take(covers)
        for key, fault in checked.faults.items():
            self.faults.setdefault(key, fault)
        for place, packs in checked.packs.items():
            self._known.keep(place, {str(key): size for key, size in packs})
            found = {pack.key: check_pack(pack, self._size_of(pack.key)) for pack in packs}
            lacking = {key: fault for key, fault in found.items() if fault is not None}
            for key, fault in lacking.items():
                self.faults.setdefault(key, fault)
            # Of a pack that is damaged there is a finding already.
            is_whole = not lacking and self._packs.faults.keys().isdisjoint(found)
            if is_whole and place in checked.rows:
                rows = checked.rows[place]
                for key, fault in rows.faults.items():
                    self.faults.setdefault(key, fault)
                if rows.unfit is not None:
                    self._unfit[place] = rows.unfit

    def _held_by(self, places: Sequence[Place]) -> int:
        """Return about how many bytes of memory the check of one manifest's places takes."""
        files = (places[0].manifest_key, *(place.placement_key for place in places))
        parsed = sum(map(self._listed, files)) * _PARSED
        return parsed + (HELD_BYTES if self._decoding is not None else 0)

    def _listed(self, key: ObjectKey) -> int:
        """Return the size of an object by the listing, in bytes; 0 without one."""
        return self._names.sizes.get(str(key)) or 0

    def _size_of(self, key: ObjectKey) -> int | None:
        size = self._names.sizes.get(str(key))
        if size is not None and key not in self._again:
            return size
        try:  # put, deleted or repaired after the objects were listed
            return self._store.backend.stat(str(key)).size_bytes
        except ObjectNotFound:
            return None

    def _check_unneeded(self) -> None:
        """Hash the manifests and placements that no run needs: a later save may use them."""
        needed = Shelf[int]()
        needed.take(
            (key, 1) for place, _ in self._needed.places() for key in place_name(place).split()
        )
        small = (k for k in self._names.sizes if not k.startswith("packs/") and k not in needed)
        rest = filter(self._shard.has, map(ObjectKey.parse, small))

        def take(key: ObjectKey, done: Outcome[int]) -> None:
            if isinstance(done.error, ObjectNotFound):
                return  # collected meanwhile
            fault = fault_of(done.error)
            self._count(self._listed(key) if fault is not None else done.result())
            if fault is not None:
                self.faults[key] = Fault(fault)

        self._workers.each(check_small, rest, take, size_of=lambda key: self._listed(key) * _PARSED)

    def _is_there(self, key: ObjectKey) -> bool:
        self._again.add(key)
        return self._size_of(key) is not None

    # Check again: the registry may be in use

    def _confirm(self) -> None:
        """Check places with faults again, after reading the logs of their runs to the end.

        A collector deletes only objects that no run needs, so a state that is still held at the
        same place must be whole. A state that was evicted or moved meanwhile is no finding.
        """
        for _ in range(_ROUNDS):
            runs, suspects = set(self._needed.unplaced), set[Place]()
            for place, need in self._needed.places() if self.faults or self._unfit else ():
                if self._is_suspect(place):
                    suspects.add(place)
                    runs.add(need.run_id)
            if not runs:
                break
            self._read(sorted(runs), lambda _: None)  # the logs are in the findings already
            held: dict[Place, str] = {}
            for place, need in self._needed.places():
                if place in suspects or place_name(place) not in self._seen:
                    held.setdefault(place, need.run_id)
            for place in suspects:
                self._unfit.pop(place, None)
                for key in self._keys_of(place):
                    self._again.add(key)
                    if key not in self._packs.faults:
                        self.faults.pop(key, None)
            self._check_places(held.items())
            if held.keys() <= suspects:
                break

    def _read_again(self) -> None:
        """Read damaged packs a second time: they may be repaired or collected by now."""
        for key in list(self._packs.faults):
            try:
                data = self._store.backend.get(str(key))
                verify_pack_chunks(data, open_pack(data, key.digest, where=str(key)), key)
            except ObjectNotFound:
                del self._packs.faults[key]  # if it is needed, `_check_places` finds it missing
            except RegistryError as error:
                fault_of(error)
            else:
                del self._packs.faults[key]
                self._findings.append(read_differently(key))

    # Findings

    def _object_findings(self) -> Iterator[Finding]:
        unfit: dict[Place, tuple[str, ...]] = {}
        for need in self.unplaced():
            if need.place is None:
                message = "the log gives no place for it"
                yield Finding("missing", need.refs[0], message, need.refs, _MEND)
            else:
                unfit[need.place] = unfit.get(need.place, ()) + need.refs
        for place, refs in unfit.items():
            yield Finding(
                "placement",
                str(place.placement_key),
                self._unfit[place],
                refs,
                _MEND,
                needs="structure" if self._data is None else "deep",
            )
        needing = self.needs()
        for key, fault in self.faults.items():
            refs = tuple(ref for need in needing.get(key, ()) for ref in need.refs)
            if fault.is_gone and refs:
                message = fault.message + condemned_by(self._store, key)
                yield Finding("missing", str(key), message, refs, _MEND)
            elif not fault.is_gone and (refs or self._is_there(key)):
                severity: Severity = "error" if refs else "note"
                kind = key.kind.removesuffix("s")
                advice = _MEND if refs else _ORPHAN
                if fault.is_within:
                    advice = _WRONG_WITHIN
                read: Needs = "deep" if key in self._packs.faults else "structure"
                needs: Needs = "decode" if fault.is_within else read
                yield Finding(kind, str(key), fault.message, refs, advice, severity, needs)
