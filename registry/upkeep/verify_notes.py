"""The last verification of a registry on this machine, kept beside the heads that were seen.

Damage stays known until a verification that looks for it does not find it: one that reads less
says nothing of it. `LastCheck` keeps what was found whole, for a verification of what is new.

It is a convenience for people, and proves nothing. `holdfast push` writes the objects again that it
calls damaged, if it has their content. Where heads are not remembered, neither is this.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from itertools import accumulate
from os import SEEK_END
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Literal

from holdfast.backends.escape import printable, shortened
from holdfast.registry.errors import Malformed, RegistryError
from holdfast.registry.history import PARTED_SLOT, REPLAY_VERSION, kept_ref
from holdfast.registry.history.actions import Place
from holdfast.registry.history.replay import PART_NAMES, CheckpointRecord, RunManifest
from holdfast.registry.objects import ObjectKey, join_lines, split_lines, unwrap_frame, wrap_frame
from holdfast.registry.store import Store
from holdfast.registry.store.heads import MAX_FILE_BYTES
from holdfast.registry.values import DigestField, Field, InvalidRecord, Record, empty

if TYPE_CHECKING:  # who only asks for damage needs no report
    from holdfast.registry.upkeep.findings import Finding, Listed, VerifyReport
    from holdfast.registry.upkeep.shelf import Shelf

_LOGGER = logging.getLogger("holdfast")
#: Findings that are kept, characters of each of their texts, and refs that each affects.
_KEPT, _LONGEST, _REFS = 100, 500, 1000
_SUFFIX, _CHECKED = ".verified", ".checked"
#: In this many verifications with `since_last` everything is read again, an equal part by each.
_AGAIN_WITHIN = 30
#: Parts are added from this number of runs in each; of more in one, what fits is kept.
_RUNS_A_PART, _MOST_PARTS = 64, 4096
_PART_BYTES = MAX_FILE_BYTES

#: What was read: names and sizes, a share of the packs, every byte, or every chunk decoded too.
Depth = Literal["structure", "sample", "deep", "decode"]
_Count = Annotated[int, Field(ge=0)]


class KeptFinding(Record):
    """A finding of the last verification, shortened."""

    kind: str
    where: str
    message: str
    advice: str
    severity: Literal["error", "note"]
    affects: tuple[str, ...] = ()
    needs: Literal["structure", "deep", "decode"] = "structure"


class LastVerify(Record):
    """The last verification of a registry."""

    format: Literal["holdfast.verified/1"] = "holdfast.verified/1"
    registry: str
    time_ms: int  # when it ended, by this machine's clock
    depth: Depth  # how much it read
    runs: _Count
    checkpoints: _Count
    objects: _Count
    bytes_checked: _Count  # bytes that were read and hashed
    errors: _Count
    notes: _Count
    findings: tuple[KeptFinding, ...] = ()  # the first of them, errors first
    #: Errors that earlier verifications found, and that no later one has looked for.
    standing: tuple[KeptFinding, ...] = ()
    depths: dict[Depth, int] = empty()  # when a verification of each depth ended last

    @property
    def damage(self) -> tuple[KeptFinding, ...]:
        """The errors that are known, whichever verification found them."""
        return (*(one for one in self.findings if one.severity == "error"), *self.standing)


def note_verify(store: Store, report: VerifyReport, *, is_part: bool = False) -> None:
    """Keep the result of a verification on this machine; a failure to write is no error.

    `is_part` says that it checked one shard only.
    """
    if store.heads is None:
        return
    errors = [one for one in report.findings if one.severity == "error"]
    notes = [one for one in report.findings if one.severity != "error"]
    before, time_ms = last_verify(store), int(time.time() * 1000)
    depth = _depth(report, is_part=is_part)
    found = LastVerify(
        registry=store.config.id,
        time_ms=time_ms,
        depth=depth,
        runs=report.runs,
        checkpoints=report.checkpoints,
        objects=report.objects,
        bytes_checked=report.bytes_checked,
        errors=len(errors),
        notes=len(notes),
        findings=tuple(map(_shortened, [*errors, *notes][:_KEPT])),
        standing=tuple(map(_shortened, report.standing[:_KEPT])),
        depths={**(before.depths if before else {}), **({} if is_part else {depth: time_ms})},
    )
    store.heads.keep(_SUFFIX, join_lines([found.encode()]))


def last_verify(store: Store) -> LastVerify | None:
    """Return the last verification of this registry on this machine; `None` if there is none."""
    data = None if store.heads is None else store.heads.kept(_SUFFIX)
    if data is None:
        return None
    try:
        (line, *_) = split_lines(data, where=_SUFFIX)
        found = LastVerify.parse(line, where=_SUFFIX)
    except RegistryError as error:
        _LOGGER.debug("the last verification of %s cannot be read: %s", store.backend.url, error)
        return None
    return found if found.registry == store.config.id else None


def known_damage(store: Store) -> list[KeptFinding]:
    """Return the errors that verifications on this machine found, and none since found gone."""
    last = last_verify(store)
    return list(last.damage) if last else []


def damaged_keys(store: Store) -> set[ObjectKey]:
    """Return the keys of the damaged objects that this machine knows of."""
    found = set()
    for one in known_damage(store):
        with suppress(Malformed):  # an error that is not about an object
            found.add(ObjectKey.parse(one.where))
    return found


# What a verification with `since_last` found whole


class _Part(Record):
    """The first line of a part."""

    format: Literal["holdfast.checked/3"] = "holdfast.checked/3"
    registry: str
    replay: int  # version of the replay


class _Header(_Part):
    """The file that names the parts."""

    turn: _Count  # verifications since the first one, which read everything
    parts: Annotated[int, Field(ge=1, le=_MOST_PARTS)]
    slots: dict[str, int]  # how many slots of each run were read


class Checked(Record):
    """A run without faults: how its log ended when it was read, and its states without faults."""

    run: str
    slots: _Count  # number of its slots
    size_bytes: _Count  # of all of them
    modified_ms: int  # the newest time of one of them, by the store's clock
    commits: _Count  # number of its commits
    commit: _Count  # the newest slot with a commit
    digest: DigestField  # digest of that slot
    snapshots: tuple[int, ...]  # the slots of its snapshots
    #: The objects of each state with their sizes in bytes, by the key of its placement.
    states: dict[str, dict[str, int]] = empty()


@dataclass(frozen=True, slots=True)
class Base:
    """A run as the last verification read it, for a replay to begin with."""

    seen: Checked
    held: bytes  # the compact run
    is_unchanged: bool  # whether its log has no further slots

    def replay(self) -> RunManifest:
        """Return the run."""
        run = RunManifest.decode(self.held, where=_CHECKED)
        if (run.run_id, run.next_slot) != (self.seen.run, self.seen.slots):
            raise Malformed("another run or slot", where=_CHECKED)
        return run


class LastCheck:
    """The runs and states that the last verification with `since_last` found without faults.

    A run or state of which damage is known is never among them. They are kept in parts by the names
    of runs: one part is in memory at a time, and what is taken for the next waits in a file.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._first = _Part(registry=store.config.id, replay=REPLAY_VERSION)
        self._at = -1  # the part in memory
        self._known: dict[str, tuple[Checked, bytes]] = {}
        self._taken: dict[str, tuple[int, int, int]] = {}  # slots, and where in the file
        self._file: FileIO | None = None  # made when something is taken
        self._header = self._read_header()
        damage = known_damage(store)
        self._doubted = {one.where for one in damage} | set(Damage.of(store).refs)
        self._damaged = set(map(str, damaged_keys(store)))

    def close(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            if self._file is not None:
                self._file.close()

    @property
    def slots(self) -> Mapping[str, int]:
        """How many slots of each run were read."""
        return {} if self._header is None else self._header.slots

    def in_parts(self, run_ids: Iterable[str]) -> list[str]:
        """Return runs in an order that needs each part once."""
        parts = 1 if self._header is None else self._header.parts
        return sorted(run_ids, key=lambda run_id: _part_of(run_id, parts))

    def base(
        self,
        run_id: str,
        listed: Listed | None,
        snapshots: Collection[int],
        commits: Collection[int],
    ) -> Base | None:
        """Return the start of a replay, if the slots that were read are as they were.

        `commits` are the numbers of commits after which a link of the history is wanted.
        """
        seen, held = self._noted(run_id)
        if seen is None or listed is None or min(commits, default=seen.commits) < seen.commits:
            return None
        if run_id in self._doubted or self._is_due(run_id):
            return None
        log = (listed.slots, listed.size_bytes, listed.modified_ms)
        # A part has the name of an old snapshot, and may be new.
        least = PART_NAMES if max(snapshots, default=0) >= PARTED_SLOT else 0
        older = {slot for slot in snapshots if least <= slot < seen.slots}
        if log != (seen.slots, seen.size_bytes, seen.modified_ms) or older - {*seen.snapshots}:
            return None
        return Base(seen, held, listed.further == 0)

    def objects_of(self, run_id: str, place: Place, sizes: Shelf[int]) -> Mapping[str, int] | None:
        """Return the objects of a state that a run holds, with sizes, if they are as they were."""
        seen, name = self._noted(run_id)[0], str(place.placement_key)
        if seen is None or run_id in self._doubted or self._is_due(name):
            return None
        found = seen.states.get(name, {})
        if str(place.manifest_key) not in found or not self._damaged.isdisjoint(found):
            return None
        return found if all(sizes.get(key) == size for key, size in found.items()) else None

    def take(self, seen: Checked, held: bytes) -> None:
        """Take a run without faults, for the next verification, if this machine has the space."""
        line = b"\n".join((seen.encode(), held))
        try:
            if self._store.heads is not None:
                self._file = self._file or TemporaryFile(buffering=0)  # noqa: SIM115
                at = self._file.seek(0, SEEK_END)
                if self._file.write(line) == len(line):
                    self._taken[seen.run] = seen.slots, at, len(line)
        except OSError as error:
            _LOGGER.debug("not remembered for the next verification: %s", error)

    def keep(
        self,
        held: Callable[[str], Iterable[tuple[Place, object]]],
        objects_of: Callable[[Place], dict[str, int] | None],
    ) -> None:
        """Keep the runs, with the states that each holds and that are without faults.

        `held` gives the places of a run; `objects_of` the objects of such a state with their sizes.
        """
        if self._store.heads is None:
            return
        parts = 1
        while parts < _MOST_PARTS and len(self._taken) > parts * _RUNS_A_PART:
            parts *= 2
        runs: dict[int, list[str]] = {}
        for run_id in sorted(self._taken):
            runs.setdefault(_part_of(run_id, parts), []).append(run_id)
        for part, run_ids in runs.items():
            data, size_bytes = [self._first.encode()], 0
            for run_id in run_ids:
                _, start, length = self._taken[run_id]
                assert self._file is not None  # something was taken
                self._file.seek(start)
                seen, _, run = self._file.read(length).partition(b"\n")
                found = ((str(one.placement_key), objects_of(one)) for one, _ in held(run_id))
                states = {name: objects for name, objects in found if objects}
                line = Checked.decode(seen, where=_CHECKED).changed(states=states).encode()
                size_bytes += len(line) + len(run)
                if size_bytes <= _PART_BYTES:
                    data += [line, run]
            content = b"\n".join(data)
            if content != self._content(part):
                self._store.heads.keep(_name(part), wrap_frame(content))
        turn = 0 if self._header is None else self._header.turn + 1
        slots = {run_id: taken[0] for run_id, taken in self._taken.items()}
        header = _Header(**self._first.shared(_Part), turn=turn, parts=parts, slots=slots)
        self._store.heads.keep(_CHECKED, wrap_frame(header.encode()))

    def _noted(self, run_id: str) -> tuple[Checked, bytes] | tuple[None, bytes]:
        """Return what is known of a run; reads its part, unless it was the last one read."""
        if self._header is None:
            return None, b""
        part = _part_of(run_id, self._header.parts)
        if part != self._at:
            self._at, self._known = part, {}
            try:
                _, *lines = (self._content(part) or b"").split(b"\n")
                for line, held in zip(lines[::2], lines[1::2], strict=True):
                    seen = Checked.decode(line, where=_CHECKED)
                    self._known[seen.run] = seen, held
            except (RegistryError, InvalidRecord, ValueError) as error:
                _LOGGER.debug("an earlier verification is not used: %s", error)
                self._known = {}
        return self._known.get(run_id, (None, b""))

    def _content(self, part: int) -> bytes | None:
        """Return the content of a part; `None` if there is none of this registry and version."""
        data = None if self._store.heads is None else self._store.heads.kept(_name(part))
        try:
            content = b"" if data is None else unwrap_frame(data, where=_CHECKED)
        except RegistryError as error:
            _LOGGER.debug("an earlier verification is not used: %s", error)
            return None
        return content if content.partition(b"\n")[0] == self._first.encode() else None

    def _read_header(self) -> _Header | None:
        data = None if self._store.heads is None else self._store.heads.kept(_CHECKED)
        last = last_verify(self._store)
        if data is None or (last is not None and last.errors > _KEPT):
            return None  # not all that is damaged is known by name
        try:
            header = _Header.decode(unwrap_frame(data, where=_CHECKED), where=_CHECKED)
        except (RegistryError, InvalidRecord, ValueError) as error:
            _LOGGER.debug("an earlier verification is not used: %s", error)
            return None
        return header if header.shared(_Part) == self._first.shared(_Part) else None

    def _is_due(self, name: str) -> bool:
        """Return whether a run or a placement is read again in this turn."""
        turn = 0 if self._header is None else self._header.turn
        return zlib.crc32(name.encode()) % _AGAIN_WITHIN == turn % _AGAIN_WITHIN


def _part_of(run_id: str, parts: int) -> int:
    return zlib.crc32(run_id.encode()) % parts


def _name(part: int) -> str:
    return f"{_CHECKED}-{part}"


@dataclass(frozen=True, slots=True)
class Damage:
    """The refs that known damage affects, by run."""

    refs: Mapping[str, Sequence[str]]  # the refs within each run
    names: Mapping[str, Collection[str]]  # the same refs, with all names of which they are parts

    @classmethod
    def of(cls, store: Store) -> Damage:
        """Return the damage that this machine knows of; reads a local file."""
        found: dict[str, dict[str, None]] = {}
        for ref in (ref for one in known_damage(store) for ref in one.affects):
            run_id, _, within = ref.partition(" ")[0].partition("/")
            found.setdefault(run_id, {})[within] = None
        names = {
            run_id: {part for one in refs for part in accumulate(one.split("/"), "{}/{}".format)}
            for run_id, refs in found.items()
        }
        return cls({run_id: list(refs) for run_id, refs in found.items()}, names)

    def in_run(self, run_id: str) -> Sequence[str]:
        """Return the refs of a run that are affected, without the run's name."""
        return self.refs.get(run_id, ())

    def marks(self, run_id: str, record: CheckpointRecord) -> list[str]:
        """Return `damaged` as a mark of a checkpoint, if it or its companions are affected."""
        return ["damaged"] if kept_ref(record) in self.names.get(run_id, ()) else []


def _depth(report: VerifyReport, *, is_part: bool) -> Depth:
    data = report.data
    if data is None:
        return "structure"
    if is_part or data.packs_read + data.packs_noted < data.packs:
        return "sample"
    return "deep" if data.chunks_decoded is None else "decode"


def _shortened(finding: Finding) -> KeptFinding:
    texts = (finding.kind, finding.where, finding.message, finding.advice)
    kind, where, message, advice = (shortened(printable(text), _LONGEST) for text in texts)
    return KeptFinding(
        kind=kind,
        where=where,
        message=message,
        advice=advice,
        severity=finding.severity,
        affects=finding.affects[:_REFS],
        needs=finding.needs,
    )
