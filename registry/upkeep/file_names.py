"""Check the names of a registry's files: find foreign files, lost epochs and symbolic links.

A file with an unknown name stops collection, because it might name objects; so does an object put
under an epoch that is not there. The log of epochs is checked here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from holdfast.backends.escape import quoted
from holdfast.backends.local.walk import TEMPORARY
from holdfast.registry.errors import IntegrityError, Malformed, RegistryError, UnsupportedFormat
from holdfast.registry.history import CondemnedNames, EpochHeader, Epochs, SweepTable
from holdfast.registry.objects import (
    ACTIVE,
    CONFIG,
    EPOCHS,
    FOLDERS,
    KINDS,
    NOTES,
    PARTS,
    RUNS,
    SIGNATURES,
    ObjectKey,
    SignatureKey,
    epoch_key,
    is_probe,
    is_run_id,
    parse_marker,
    parse_number,
    parse_part,
    snapshot_slot,
)
from holdfast.registry.store import Store, check_writer_version, gaps, read_config
from holdfast.registry.upkeep.findings import Finding, Listed, Severity
from holdfast.registry.upkeep.shelf import Shelf
from holdfast.registry.values import Digest

#: The most lost epochs that are reported one by one.
_GAPS_REPORTED = 16
_FOREIGN = "Holdfast did not write it: move it away if nobody needs it."
_BLOCKS = "Nothing is collected while it is there. " + _FOREIGN
_STOPS = "Nothing can be written or collected while it is there. " + _FOREIGN
_LINK = "a symbolic link, which writing and deleting do not follow"
_LINK_STOPS = "It stops writing and collecting: replace it by the file or folder that it names."
_LINK_LEFT = "Move it away if nobody needs it."
_RESTORE_PART = "Restore it from a backup of this registry; nothing can be collected before."
_FROZEN = "`holdfast freeze --off` allows writing again."
_RESTORE_EPOCH = (
    "Restore the entry from a backup of this registry; nothing can be written or collected before."
)


@dataclass(slots=True)
class Names:
    """The names of a registry's files."""

    sizes: Shelf[int] = field(default_factory=Shelf)  # every object by its key: its size in bytes
    parts: dict[Digest, int] = field(default_factory=dict)  # the same for parts of sweeps
    #: Slots of the snapshots of each run.
    snapshots: dict[str, list[int]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)  # findings about foreign files and links
    epoch: int = 0  # the highest epoch
    #: The logs that an earlier verification read.
    logs: dict[str, Listed] = field(default_factory=dict)

    def list_links(self, store: Store) -> None:
        """Report symbolic links. Reading follows them, so damage behind one is found as usual."""
        for link in store.backend.links():
            stops = link == TEMPORARY or f"{link}/".startswith(FOLDERS)
            advice = _LINK_STOPS if stops else _LINK_LEFT
            severity: Severity = "error" if stops else "note"
            self.findings.append(Finding("link", link, _LINK, (), advice, severity))

    def list_runs(self, store: Store, known: Mapping[str, int]) -> None:
        """List the files of runs. Before the logs are read: a snapshot is put after its slot.

        `known` are the numbers of slots that an earlier verification has read.
        """
        for info in store.backend.list(RUNS):
            parts = info.key.split("/")
            try:
                number = _number_in_run(info.key, parts)
            except Malformed as error:
                in_log = len(parts) > 3 and parts[2] == "log"
                self._foreign(info.key, error, _STOPS if in_log else _BLOCKS)
                continue
            if parts[2] == "snapshots":
                self.snapshots.setdefault(parts[1], []).append(number)
            elif parts[1] in known:
                log = self.logs.setdefault(parts[1], Listed())
                if number < known[parts[1]]:
                    log.slots += 1
                    log.size_bytes += info.size_bytes
                    log.modified_ms = max(log.modified_ms, int(info.modified_s * 1000))
                else:
                    log.further += 1

    def list_objects(self, store: Store) -> None:
        """List the other files. After the logs are read: their objects are there by then."""
        self.sizes.take(self._objects(store))

    def _objects(self, store: Store) -> Iterator[tuple[str, int]]:
        """Yield the objects with their sizes; note the other files."""
        for info in store.backend.list():
            if info.key.startswith((RUNS, EPOCHS)) or info.key == CONFIG:
                continue
            try:
                if info.key.startswith(NOTES):
                    parse_number(info.key)
                elif info.key.startswith(ACTIVE):
                    parse_marker(info.key)
                elif info.key.startswith(PARTS):
                    self.parts[parse_part(info.key)] = info.size_bytes
                elif info.key.startswith(SIGNATURES):
                    SignatureKey.parse(info.key)  # `signing` reads those of trusted keys
                else:
                    ObjectKey.parse(info.key)
                    yield info.key, info.size_bytes
            except Malformed as error:
                among = info.key.startswith(tuple(f"{kind}/" for kind in KINDS))
                probe = "Left behind by `init` or `doctor`; it may be deleted."
                left = probe if is_probe(info.key) else _FOREIGN
                self._foreign(info.key, error, _BLOCKS if among else left)

    def _foreign(self, key: str, error: Malformed, advice: str) -> None:
        self.findings.append(
            Finding("unknown-file", key, error.summary, advice=advice, severity="note")
        )

    def check_epochs(self, store: Store, marked: Mapping[str, int], *, deep: bool) -> list[Finding]:
        """Check the log of epochs, and the names in it.

        After the objects: an epoch is put before its first object.
        """
        findings: list[Finding] = []
        numbers: list[int] = []
        for info in store.backend.list(EPOCHS):
            try:
                numbers.append(parse_number(info.key))
            except Malformed as error:
                self._foreign(info.key, error, _STOPS)
                findings.append(_epoch(EPOCHS, f"{info.key}: not the name of an epoch", _STOPS))
        highest = self.epoch = max(numbers, default=0)
        lost = islice(gaps(store.backend, numbers, epoch_key, 1), _GAPS_REPORTED)
        findings += [_epoch(epoch_key(epoch), "the log of epochs has a gap") for epoch in lost]
        findings += self._entry_findings(store, numbers, deep=deep)
        return findings + self._beyond(highest, marked)

    def _beyond(self, highest: int, marked: Mapping[str, int]) -> list[Finding]:
        """Report objects and marks that could only be written after an epoch that is gone."""
        runs = [run for run, epoch in marked.items() if epoch > highest]
        late = (key for key in self.sizes if int(key.rpartition(".")[2]) > highest)
        keys = list(map(ObjectKey.parse, late))
        if not runs and not keys:
            return []
        last = max([marked[run] for run in runs] + [key.generation for key in keys])
        proof = [f"{len(keys)} objects, such as {min(keys)}"] if keys else []
        proof += [f"marks in {', '.join(sorted(runs))}"] if runs else []
        advice = (
            f"Restore the entries up to {epoch_key(last)} from a backup of this registry. Until "
            "then let nobody write: objects that those epochs condemned may be named again."
        )
        message = (
            f"the log of epochs ends at {highest}, but epoch {last} existed: {'; '.join(proof)}"
        )
        return [_epoch(epoch_key(highest + 1), message, advice)]

    def _entry_findings(self, store: Store, numbers: Iterable[int], *, deep: bool) -> list[Finding]:
        """Check every entry. Each is read by a new `Epochs`, so that none stays in memory."""

        def header(epoch: int) -> EpochHeader | RegistryError:
            try:
                return Epochs(store).header(epoch)
            except (IntegrityError, UnsupportedFormat) as error:
                return error

        findings, least, tables = [], 1, dict[SweepTable, int]()
        moved_to: str | None = None
        for epoch, found in zip(numbers, store.pools.small.map(header, numbers), strict=True):
            where = epoch_key(epoch)
            if isinstance(found, RegistryError):
                findings.append(_epoch(where, found.summary))
                continue
            for table in found.tables or ():
                tables.setdefault(table, epoch)
            if found.min_writer < least:
                message = (
                    f"it admits writers of version {found.min_writer}, but an earlier epoch does "
                    "not"
                )
                findings.append(
                    _epoch(where, message, "Upgrade every writer; an old one may harm.")
                )
            least, moved_to = max(least, found.min_writer), found.moved_to
        if moved_to is not None:
            message = "the registry is frozen: nobody may write to it"
            message += f"; it has moved to {moved_to}" if moved_to else ""
            findings.append(Finding("epoch", EPOCHS, message, advice=_FROZEN, severity="note"))
        try:
            check_writer_version(least, where=EPOCHS)
        except UnsupportedFormat as error:
            advice = "Upgrade Holdfast before you write to this registry."
            findings.append(Finding("epoch", EPOCHS, error.summary, advice=advice, severity="note"))
        names = CondemnedNames(store)
        for table, epoch in tables.items():
            try:
                names.check(table, self.parts, deep=deep)
            except IntegrityError as error:
                findings.append(_epoch(epoch_key(epoch), str(error), _RESTORE_PART))
        return findings


def _number_in_run(key: str, parts: list[str]) -> int:
    if len(parts) != 4 or parts[2] not in ("log", "snapshots") or not is_run_id(parts[1]):
        raise Malformed("not a file of a run", where=quoted(key))
    return snapshot_slot(key) if parts[2] == "snapshots" else parse_number(key)


def _epoch(where: str, message: str, advice: str = _RESTORE_EPOCH) -> Finding:
    return Finding("epoch", where, message, advice=advice)


def check_config(store: Store) -> list[Finding]:
    """Check `registry.json`."""
    try:
        read_config(store.backend)
    except RegistryError as error:
        advice = "Restore registry.json from a backup; nothing else holds the registry's id."
        return [Finding("config", CONFIG, str(error), advice=advice)]
    return []
