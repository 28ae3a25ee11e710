"""Take the folder of a system into a run: each file once, verified, in its order.

A checkpoint's meta has the name and the digest of its file, so a second import, or one after a
kill, takes in only new files.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from holdfast.registry import formats
from holdfast.registry.curation import MAX_BYTES, Artifacts, Gates, Releases, parse_card
from holdfast.registry.curation.streams import Stream
from holdfast.registry.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    RegistryError,
    UnsupportedFormat,
)
from holdfast.registry.formats import stable, walk, within
from holdfast.registry.history import decode_plain, phase_segment
from holdfast.registry.history.actions import Action, EnterPhase
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.layouts.contents import IMPORT, RunContents
from holdfast.registry.layouts.made import digest
from holdfast.registry.layouts.scanning import SIDECAR, Scan, identity, verified_digest
from holdfast.registry.layouts.table import Found, Layout, Reading
from holdfast.registry.layouts.torch_files import metrics_of
from holdfast.registry.loading import Checkpoint
from holdfast.registry.saving import LocalSaver, SaveRequest, plan_save, take_apart
from holdfast.registry.values import check_json, max_record_bytes
from holdfast.registry.writing import Committer

Outcome = Literal["imported", "there already", "refused", "passed over"]
_LATE: Final = (
    "it came after its checkpoint was imported, and companions are saved with their checkpoint; to "
    "have both, import the folder into another run"
)
#: Files of these names belong to other programs; reports skip them.
_BESIDE: Final = (SIDECAR, ".meta.json", ".meta")


@dataclass(frozen=True, slots=True)
class ImportedFile:
    """Outcome of one file of an import.

    Attributes:
        path: Name of the file, relative to the folder.
        outcome: `imported` (in a dry run: would be), `there already`, `refused` or `passed over`.
        kind: What it is: `checkpoint`, `companion` of one, `gate`, `artifact`, `release`, `card` of
            one, `stream`; empty if unknown.
        ref: Ref of its state, in a dry run of the state to be; empty if nothing is saved.
        why: Reason for `refused` or `passed over`.
        warnings: Oddities of the file.
    """

    path: str
    outcome: Outcome
    kind: str = ""
    ref: str = ""
    why: str = ""
    warnings: tuple[str, ...] = ()


class Importer:
    """An import of a folder into a run."""

    def __init__(
        self,
        committer: Committer,
        root: Path,
        layout: Layout,
        name: str,
        *,
        options: Mapping[str, Any] | None = None,
        dry_run: bool = False,
    ) -> None:
        self._committer, self._root, self._layout, self._name = committer, root, layout, name
        self._options, self._dry_run = options or {}, dry_run
        self._saver = LocalSaver(committer)
        self._known: dict[tuple[str, str], int] | None = None
        self._step = 0

    def once(self) -> list[ImportedFile]:
        """Import all files that are there now."""
        scan, found = self.find()
        done = [report for one in found for report in self.take(one)]
        return [*done, *unknown(scan, found)]

    def find(self) -> tuple[Scan, list[Found]]:
        """Scan the folder; return the scan, and the files with a meaning, in their order."""
        with within(self._root):
            scan = Scan(self._root)
            found = list(self._layout.find(scan.files))
            order = [one for one in found if one.kind != "gate"]
            for gate in (one for one in found if one.kind == "gate"):
                order.insert(self._place_of(gate, order), gate)
        return scan, order

    def _place_of(self, gate: Found, order: list[Found]) -> int:
        """Return the position of a gate in the order: it may be its checkpoint's only file."""
        try:
            reading = self._layout.reading(gate, self._root / gate.path, self._options)
        except (RegistryError, OSError):
            return len(order)  # the import refuses it later
        at = reading.phase or "", reading.step or 0
        earlier = [
            index
            for index, one in enumerate(order)
            if one.kind in ("checkpoint", "gate") and (one.phase or "", one.step or 0) <= at
        ]
        return earlier[-1] + 1 if earlier else 0

    def take(self, found: Found) -> list[ImportedFile]:
        """Import one file with the files that belong to it; return a report for each."""
        acts: dict[str, Callable[[Found], ImportedFile]] = {
            "gate": self._gate,
            "artifact": self._artifact,
            "release": self._release,
            "latest release": self._latest_release,
            "stream": self._stream,
        }
        try:
            with within(self._root):
                if found.kind == "checkpoint":
                    return self._checkpoint(found)
                report = acts[found.kind](found)
        except (InvalidInput, Conflict, NotFound, UnsupportedFormat) as error:
            why = " ".join(str(error).split())
            return [ImportedFile(found.path, "refused", found.kind, why=why)]
        except OSError as error:
            return [ImportedFile(found.path, "refused", found.kind, why=str(error))]
        if found.kind == "release" and found.beside is not None:
            return [report, ImportedFile(found.beside, report.outcome, "card", report.ref)]
        return [report]

    # Checkpoints

    def _checkpoint(self, found: Found) -> list[ImportedFile]:
        companions: dict[str, object] = {}
        with self._unchanged(found.path, *found.companions.values()):
            sha256, warnings = self._digest(found.path)
            known = self._imported().get((found.path, sha256))
            if known is not None:
                return self._known_checkpoint(found, known)
            reading = self._layout.reading(found, self._root / found.path, self._options)
            for name, path in found.companions.items():
                warnings += self._digest(path)[1]
                file = self._root / path
                companions[name] = formats.read(file, format=found.format, portable=True).state
        ref, _ = self._save(found, reading, sha256, companions)
        warned = (*warnings, *reading.warnings)
        more = [
            ImportedFile(path, "imported", "companion", ref) for path in found.companions.values()
        ]
        return [ImportedFile(found.path, "imported", found.kind, ref, warnings=warned), *more]

    def _known_checkpoint(self, found: Found, n: int) -> list[ImportedFile]:
        """Report a checkpoint that was imported before, and companions that came too late."""
        ref, saved = self._ref_of(n), self._committer.log.knowing(n).by_n[n].companions
        return [
            ImportedFile(found.path, "there already", found.kind, ref),
            *(
                ImportedFile(path, "there already", "companion", ref)
                if name in saved
                else ImportedFile(path, "refused", "companion", why=_LATE)
                for name, path in found.companions.items()
            ),
        ]

    @property
    def _run_id(self) -> str:
        return self._committer.log.run_id

    def _save(
        self, found: Found, reading: Reading, sha256: str, companions: Mapping[str, object]
    ) -> tuple[str, Checkpoint | None]:
        """Save a state; return its ref, and the checkpoint if this is no dry run."""
        run = self._committer.log.run
        phase = reading.phase or found.phase
        step = self._next_step() if reading.step is None else reading.step
        self._step = max(self._step, step)
        tiers = {tier.name for tier in run.spec.phase(phase or "").tiers}
        noted = {"layout": self._name, "file": found.path, "sha256": sha256, **found.noted}
        request = SaveRequest.of(
            step,
            takes_over=False,
            phase=phase,
            metrics=metrics_of(reading.state),
            meta={IMPORT: noted},
            tier=found.tier if found.tier in tiers else None,
            companions=companions,
        )
        if self._dry_run:
            planned = phase_segment(plan_save(take_apart(reading.state, request), run).phase)
            return f"{self._run_id}/{planned}/step{step:08d}", None
        if phase is not None:
            self._enter(phase)
        saved = self._saver.pipeline.save(reading.state, request)
        self._imported()[found.path, sha256] = saved.handle.n
        return saved.ref, saved

    def _next_step(self) -> int:
        """Return the step after all steps of the run."""
        records = self._committer.log.history().by_n.values()
        return max([self._step, *(record.step for record in records)]) + 1

    def _enter(self, phase: str) -> None:
        """Record that the run has entered a phase; the changes of its transition are unknown."""

        def compose(run: RunManifest) -> list[Action] | None:
            before = run.phase
            declared = any(one.to_phase == phase for one in run.spec.transitions)
            newest = run.latest(None)
            if before in (None, phase) or not declared or run.entered(phase) or newest is None:
                return None
            assert before is not None  # mypy does not see it in the tuple
            gate = next((pin for pin in run.pins_of("gate") if pin.checkpoint == newest.n), None)
            source = Checkpoint(self._committer.store, self._committer.log, newest).ref
            ref = gate.ref if gate else source.partition("/")[2]
            return [
                EnterPhase(from_phase=before, to_phase=phase, source=ref, manifest=newest.manifest)
            ]

        self._committer.commit(compose)

    def _imported(self) -> dict[tuple[str, str], int]:
        """Return the commits of the run's checkpoints, evicted ones too, by file and digest."""
        if self._known is None:
            self._known = {}
            for record in self._committer.log.history().by_n.values():
                meta = decode_plain(record.meta)
                noted = meta.get(IMPORT) if isinstance(meta, dict) else None
                if isinstance(noted, dict) and noted.get("layout") == self._name:
                    key = str(noted.get("file")), str(noted.get("sha256"))
                    self._known[key] = record.n
        return self._known

    def _ref_of(self, n: int) -> str:
        log = self._committer.log
        return Checkpoint(self._committer.store, log, log.knowing(n).by_n[n]).ref

    # Names

    def _gate(self, found: Found) -> ImportedFile:
        with self._unchanged(found.path):
            sha256, warnings = self._digest(found.path)
            reading = self._layout.reading(found, self._root / found.path, self._options)
        is_set = self._committer.log.refresh().pin("gate", found.name) is not None
        _, saved = self._save(found, reading, sha256, {})
        ref = f"{self._run_id}/gates/{found.name}"
        if saved is not None:
            Gates(self._committer).set(found.name, saved)
        outcome: Outcome = "there already" if is_set else "imported"
        return ImportedFile(found.path, outcome, found.kind, ref, warnings=tuple(warnings))

    def _artifact(self, found: Found) -> ImportedFile:
        is_there = self._committer.log.refresh().pin("artifact", found.name) is not None
        with self._unchanged(found.path):
            warnings = self._digest(found.path)[1]
            state = formats.read(self._root / found.path, format=found.format, portable=True).state
            if found.beside is not None and isinstance(state, dict):
                state = {**state, "meta": self._json(found.beside)}
        if self._dry_run:
            planned = f"{self._run_id}/artifacts/{found.name}"
            return ImportedFile(
                found.path, "imported", found.kind, planned, warnings=tuple(warnings)
            )
        added = Artifacts(self._committer).set(found.name, state)
        outcome: Outcome = "there already" if is_there else "imported"
        return ImportedFile(found.path, outcome, found.kind, added.ref, warnings=tuple(warnings))

    def _release(self, found: Found) -> ImportedFile:
        is_there = self._committer.log.refresh().pin("release", found.name) is not None
        with self._unchanged(found.path):
            warnings = self._digest(found.path)[1]
            state: Any = formats.read(
                self._root / found.path, format=found.format, portable=True
            ).state
            card = self._card(found.beside, state)
        if self._dry_run:
            planned = f"{self._run_id}/releases/{found.name}"
            return ImportedFile(
                found.path, "imported", found.kind, planned, warnings=tuple(warnings)
            )
        source = RunContents(self._committer).latest()
        if source is None:
            raise InvalidInput(
                "a release needs a checkpoint of its run",
                where=found.path,
                hint="Import a folder that has checkpoints too.",
            )
        made = Releases(self._committer).publish(
            found.name, source, card=card, metrics=metrics_of(state), state=state
        )
        outcome: Outcome = "there already" if is_there else "imported"
        return ImportedFile(found.path, outcome, found.kind, made.ref, warnings=tuple(warnings))

    def _card(self, path: str | None, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the card of a release; a text in a state is no path of a card."""
        if path is not None:
            with stable(self._root / path) as file:
                return parse_card(file.read(MAX_BYTES + 1), path)
        card = state.get("model_card")
        if not isinstance(card, Mapping | None):
            raise InvalidInput("a card in a state is a dict", where="model_card", found=type(card))
        return card

    def _latest_release(self, found: Found) -> ImportedFile:
        is_there = self._committer.log.refresh().release == found.name
        if not is_there and not self._dry_run:
            Releases(self._committer).rollback(found.name, f"{found.path} points to it")
        outcome: Outcome = "there already" if is_there else "imported"
        ref = f"{self._run_id}/releases/latest"
        return ImportedFile(found.path, outcome, found.kind, ref)

    # Streams

    def _stream(self, found: Found) -> ImportedFile:
        with self._unchanged(found.path):
            value = self._json(found.path, lines=found.format == "jsonl")
        stream = Stream(self._committer, found.name)
        held = stream.read() if stream.count else []
        entries = self._entries(value, held, found.path)
        new = entries[len(held) :] if entries[: len(held)] == held else entries
        ref = f"{self._run_id}: stream {found.name}"
        if not new:
            return ImportedFile(found.path, "there already", found.kind, ref)
        if new is entries and held:
            if stream.lifetime != "resettable":
                raise Conflict(
                    "the file does not continue the stream, which is kept for ever",
                    where=found.path,
                    expected=f"{len(held)} entries as before, and more",
                    found=f"{len(entries)} entries",
                )
            if not self._dry_run:
                stream.archive(f"import-{len(stream.archives) + 1}")
        if not self._dry_run:
            stream.append(new)
        return ImportedFile(found.path, "imported", found.kind, ref)

    def _entries(self, value: Any, held: list[Any], where: str) -> list[Any]:
        """Return the entries of a file; a file with one object holds only the newest entry."""
        if isinstance(value, list):
            return value
        if not isinstance(value, dict):
            raise InvalidInput("neither a list nor an object of JSON", where=where)
        newest = {key: item for key, item in held[-1].items() if key != "step"} if held else None
        if newest == value:
            return held
        return [*held, {**value, "step": value.get("step", self._newest_step())}]

    def _newest_step(self) -> int:
        latest = RunContents(self._committer).latest()
        return self._step if latest is None else latest.step

    def _json(self, path: str, *, lines: bool = False) -> Any:
        with stable(self._root / path) as file:
            data = file.read(max_record_bytes() + 1)
        check_json(data, where=path, kind=InvalidInput)
        try:
            if lines:
                return [json.loads(line) for line in data.splitlines() if line.strip()]
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise InvalidInput("not JSON", where=path, found=error) from error

    # Files

    def _digest(self, path: str) -> tuple[str, list[str]]:
        file = self._root / path
        if file.is_dir():
            return folder_digest(file), []
        return verified_digest(file, wants_sidecar=self._layout.SIDECARS)

    @contextmanager
    def _unchanged(self, *paths: str) -> Iterator[None]:
        """Refuse files that change while they are read."""
        before = [identity(self._root / path) for path in paths]
        yield
        if before != [identity(self._root / path) for path in paths]:
            raise InvalidInput("the file changed while it was read", where=paths[0])


def folder_digest(folder: Path) -> str:
    """Return a digest of the names and the bytes of a folder's files, in hex."""
    hashed = hashlib.sha256()
    names = [name.split("/") for name, seen in walk(folder) if stat.S_ISREG(seen.st_mode)]
    for name in map("/".join, sorted(names)):
        hashed.update(f"{name}\n{digest(folder / name)}\n".encode())
    return hashed.hexdigest()


def unknown(scan: Scan, found: list[Found]) -> list[ImportedFile]:
    """Return the files of a folder without a meaning, or with refused names."""
    meant = {one.path for one in found} | {one.beside for one in found}
    meant |= {path for one in found for path in one.companions.values()}
    folders = tuple(f"{one.path}/" for one in found)
    refused = [ImportedFile(name, "refused", why=why) for name, why in scan.refused.items()]
    others = [
        ImportedFile(name, "passed over", why="the layout has no such file")
        for name, target in scan.files.items()
        if target is None
        and name not in meant
        and not name.endswith(_BESIDE)
        and not name.startswith(folders or "\n")
    ]
    return [*refused, *others]
