"""Checking a registry: its structure, and with `deep` every byte of it.

Structure: logs dense, chained and legal; every checkpoint placed; every object that a checkpoint
needs there and of the right size. Deep: every object read once and hashed, and every placement held
against the tables of the packs that it names. Nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from registry import canonical
from registry.actions import Place
from registry.digest import Digest
from registry.epochs import Epochs
from registry.errors import Malformed, RegistryError, UnsupportedFormat
from registry.framing import split_lines
from registry.keys import (
    CONFIG,
    EPOCHS,
    RUNS,
    ObjectKey,
    parse_number,
    snapshot_prefix,
    snapshot_slot,
)
from registry.loading import index_chunks, read_lists, verify_pack_chunks
from registry.log import REPLAY_VERSION, RunLog, list_runs
from registry.manifest import Manifest
from registry.pack import PackEntry, open_pack
from registry.placement import Placement
from registry.pools import abandon
from registry.state import RunManifest, advance
from registry.store import Store, missing, read_config

#: Packs held in memory at once.
_IN_FLIGHT = 4
_MEND = (
    "Copy the file from a mirror to the same key. Without one: move it away, and save the same "
    "state again into a new run."
)

Severity = Literal["error", "note"]
#: Called with the number of bytes checked so far.
Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        kind: `config`, `log`, `epoch`, `manifest`, `placement`, `pack`, `missing`, `snapshot` or
            `unknown-file`.
        where: The key or run concerned.
        message: What is wrong.
        affects: Refs of the checkpoints that cannot be loaded because of it.
        advice: What to do.
        severity: A `note` costs no checkpoint: a cache, an orphan, a foreign file.
    """

    kind: str
    where: str
    message: str
    affects: tuple[str, ...] = ()
    advice: str = ""
    severity: Severity = "error"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification found.

    Attributes:
        findings: In the order in which they were met.
        runs: Runs looked at.
        checkpoints: Checkpoints looked at, superseded ones included, evicted ones not.
        objects: Objects under packs/, manifests/ and placements/.
        bytes_checked: Bytes that were read and hashed.
    """

    findings: tuple[Finding, ...]
    runs: int
    checkpoints: int
    objects: int
    bytes_checked: int

    @property
    def ok(self) -> bool:
        """Whether every checkpoint is whole, as far as was looked."""
        return all(finding.severity == "note" for finding in self.findings)


def verify(store: Store, *, deep: bool = False, progress: Progress | None = None) -> VerifyReport:
    """Check a registry.

    Args:
        store: The registry's objects.
        deep: Read and hash every byte, instead of names and sizes only.
        progress: Told of bytes checked.
    """
    return _Verification(store, progress).run(deep=deep)


class _Verification:
    """One pass over a registry.

    Faults are kept by key and told at the end, when it is known which checkpoints need what.
    """

    def __init__(self, store: Store, progress: Progress | None) -> None:
        self._store = store
        self._progress = progress
        self._findings: list[Finding] = []
        self._bytes = 0
        self._checkpoints = 0
        self._sizes: dict[ObjectKey, int] = {}
        self._needed_by: dict[ObjectKey, dict[str, None]] = {}
        self._faults: dict[ObjectKey, str] = {}
        self._manifests: dict[ObjectKey, Manifest] = {}
        self._placements: dict[ObjectKey, Placement] = {}
        self._chunks: dict[ObjectKey, dict[Digest, PackEntry]] = {}

    def run(self, *, deep: bool) -> VerifyReport:
        self._check_config()
        self._check_epochs()
        self._list_files()
        runs = list_runs(self._store)
        for run_id in runs:
            self._check_run(run_id)
        if deep:
            self._check_bytes()
        self._tell_faults()
        return VerifyReport(
            tuple(self._findings), len(runs), self._checkpoints, len(self._sizes), self._bytes
        )

    def _count(self, size_bytes: int) -> None:
        self._bytes += size_bytes
        if self._progress is not None:
            self._progress(self._bytes)

    # Files that are not objects

    def _check_config(self) -> None:
        try:
            read_config(self._store.backend)
        except RegistryError as error:
            advice = "Restore registry.json from a backup; nothing else holds the registry's id."
            self._findings.append(Finding("config", CONFIG, str(error), advice=advice))

    def _check_epochs(self) -> None:
        epochs = Epochs(self._store)
        try:
            for epoch in range(1, epochs.observe() + 1):
                epochs.entry(epoch)
        except UnsupportedFormat as error:
            advice = "Upgrade Holdfast before you write to this registry."
            self._findings.append(
                Finding("epoch", EPOCHS, str(error), advice=advice, severity="note")
            )
        except RegistryError as error:
            advice = "Restore the entry from a backup; nothing can be written or collected before."
            self._findings.append(Finding("epoch", EPOCHS, str(error), advice=advice))

    def _list_files(self) -> None:
        """Note the size of every object; name files that are none of a registry's."""
        for info in self._store.backend.list():
            try:
                if info.key.startswith(RUNS):
                    self._list_run_file(info.key)
                elif info.key.startswith(EPOCHS):
                    parse_number(info.key)
                elif info.key != CONFIG:
                    self._sizes[ObjectKey.parse(info.key)] = info.size_bytes
            except Malformed as error:
                advice = "Holdfast did not write it; remove it if nobody needs it."
                self._findings.append(
                    Finding("unknown-file", info.key, str(error), advice=advice, severity="note")
                )

    def _list_run_file(self, key: str) -> None:
        parts = key.split("/")
        if len(parts) != 4 or parts[2] not in ("log", "snapshots"):
            raise Malformed("not a file of a run", where=repr(key))
        parse_number(key)
        if parts[2] == "snapshots":
            self._check_snapshot(key)

    def _check_snapshot(self, key: str) -> None:
        try:
            data = self._store.backend.get(key)
            header, body = split_lines(data, where=key)
            self._count(len(data))
            if _is_of_another_replay(header, where=key):
                return
            state = RunManifest.decode(body, where=key)
            if (snapshot_prefix(state.run_id), state.next_slot) != (
                key.removesuffix(key.rpartition("/")[2]),
                snapshot_slot(key) + 1,
            ):
                raise Malformed("a snapshot of another run or slot", where=key)
        except (RegistryError, ValueError) as error:
            advice = "A cache, ignored on reading; it may be deleted."
            self._findings.append(
                Finding("snapshot", key, str(error), advice=advice, severity="note")
            )

    # Runs and what they need

    def _check_run(self, run_id: str) -> None:
        state = RunManifest(run_id=run_id)
        try:
            # Slot by slot, so that what stands before a damaged one is still checked.
            for slot in RunLog(self._store, run_id).slots():
                self._count(len(slot.data))
                state = advance(state, [slot])
        except RegistryError as error:
            affected = (f"{run_id} from slot {state.next_slot} on",)
            self._findings.append(Finding("log", run_id, error.summary, affected, _MEND))
        self._checkpoints += sum(record.evicted is None for record in state.checkpoints)
        for digest, holders in state.holders().items():
            refs = tuple(f"{run_id}/{holder}" for holder in holders)
            place = state.by_manifest.get(digest)
            if place is None:
                self._findings.append(
                    Finding("missing", refs[0], "the log gives no place for it", refs, _MEND)
                )
            else:
                self._check_placed(refs, place)

    def _check_placed(self, refs: tuple[str, ...], place: Place) -> None:
        manifest = self._manifest(place.manifest_key, refs)
        placement = self._placement(place.placement_key, refs)
        if placement is None:
            return
        for pack in placement.packs:
            found = self._need(pack.key, refs)
            if found is not None and found != pack.size_bytes:
                self._faults.setdefault(
                    pack.key, f"{pack.key}: expected {pack.size_bytes} bytes; found {found}"
                )
        if placement.manifest != place.manifest:
            self._faults.setdefault(place.placement_key, "another checkpoint's placement")
        # Lists are opened with the bytes; here only what the manifest names itself.
        elif manifest is not None and len(placement.rows) < len(manifest.direct_chunks):
            self._faults.setdefault(
                place.placement_key, "the placement does not cover its manifest"
            )

    def _need(self, key: ObjectKey, refs: tuple[str, ...]) -> int | None:
        """Note who needs an object; return its size, or `None` where it is gone."""
        self._needed_by.setdefault(key, {}).update(dict.fromkeys(refs))
        if key not in self._sizes:
            self._faults.setdefault(key, missing(key).summary)
        return self._sizes.get(key)

    def _manifest(self, key: ObjectKey, refs: tuple[str, ...]) -> Manifest | None:
        # Read past the handle's cache: what counts is what lies on the store.
        if self._need(key, refs) is not None and key not in self._manifests:
            with self._faults_of(key):
                self._manifests[key] = Manifest.decode(self._read(key), key.digest, where=str(key))
        return self._manifests.get(key)

    def _placement(self, key: ObjectKey, refs: tuple[str, ...]) -> Placement | None:
        if self._need(key, refs) is not None and key not in self._placements:
            with self._faults_of(key):
                self._placements[key] = Placement.decode(
                    self._read(key), key.digest, where=str(key)
                )
        return self._placements.get(key)

    def _read(self, key: ObjectKey) -> bytes:
        data = self._store.read(key)
        self._count(len(data))
        return data

    @contextmanager
    def _faults_of(self, key: ObjectKey) -> Iterator[None]:
        try:
            yield
        except RegistryError as error:
            self._faults.setdefault(key, error.summary)

    # Bytes

    def _check_bytes(self) -> None:
        """Read and hash every object that was not read yet, whether something needs it or not."""
        read = self._manifests.keys() | self._placements.keys()
        waiting = iter([key for key in self._sizes if key not in read])
        while batch := list(islice(waiting, _IN_FLIGHT)):
            jobs = [(key, self._store.pools.bulk.submit(self._check_object, key)) for key in batch]
            try:
                for key, job in jobs:
                    with self._faults_of(key):
                        job.result()
                        self._count(self._sizes[key])
            finally:
                abandon([job for _, job in jobs])
        manifests = {manifest.digest: manifest for manifest in self._manifests.values()}
        for key, placement in self._placements.items():
            with self._faults_of(key):
                self._check_rows(placement, manifests)

    def _check_object(self, key: ObjectKey) -> None:
        data = self._store.read(key)
        if key.kind == "manifests":
            Manifest.decode(data, key.digest, where=str(key))
        elif key.kind == "placements":
            Placement.decode(data, key.digest, where=str(key))
        else:
            table = open_pack(data, key.digest, where=str(key))
            verify_pack_chunks(data, table, key)
            self._chunks[key] = {entry.digest: entry for entry in table.entries}

    def _check_rows(self, placement: Placement, manifests: Mapping[Digest, Manifest]) -> None:
        """Hold each row of a placement against the table of the pack that it names."""
        manifest = manifests.get(placement.manifest)
        if manifest is None or any(pack.key not in self._chunks for pack in placement.packs):
            return  # told already, by the manifest or the pack
        lists = read_lists(self._store, manifest, placement)
        for digest, row in index_chunks(manifest, placement, lists).items():
            entry = self._chunks[placement.packs[row.pack].key].get(digest)
            if entry is None or (entry.offset, entry.stored_bytes) != (
                row.offset,
                row.stored_bytes,
            ):
                raise Malformed(
                    "a placement names a chunk where its pack has another",
                    where=f"placement {placement.digest.short}",
                    expected=digest.short,
                )

    def _tell_faults(self) -> None:
        for key, message in self._faults.items():
            refs = tuple(self._needed_by.get(key, ()))
            gone = key not in self._sizes
            advice = _MEND if refs else "Nothing needs it; collection will remove it."
            self._findings.append(
                Finding(
                    "missing" if gone else key.kind.removesuffix("s"),
                    str(key),
                    message,
                    refs,
                    advice,
                    "error" if refs else "note",
                )
            )


def _is_of_another_replay(header: bytes, *, where: str) -> bool:
    """Return whether a snapshot is another version's, which this one ignores by design."""
    said = canonical.decode(header, where=where)
    if not isinstance(said, dict) or said.get("format") != "holdfast.snapshot/1":
        raise Malformed("not a snapshot", where=where, found=header[:80].decode("utf-8", "replace"))
    return said.get("replay") != REPLAY_VERSION
