"""Take the folder of a system into a run: each file once, verified, in its order.

A checkpoint's meta has the name and the digest of its file, so a second import, or one after a
kill, takes in only new files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import Any, Final, Literal

from holdfast.registry import formats
from holdfast.registry.curation import MAX_BYTES, Artifacts, Gates, Releases, parse_card
from holdfast.registry.curation.pool import EntryImport
from holdfast.registry.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    RegistryError,
    UnsupportedFormat,
)
from holdfast.registry.formats import stable, within
from holdfast.registry.history import phase_segment
from holdfast.registry.history.actions import Action, EnterPhase
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.layouts.contents import IMPORT, RunContents, noted_files
from holdfast.registry.layouts.histories import Histories
from holdfast.registry.layouts.made import Made, digest, digest_of
from holdfast.registry.layouts.scanning import SIDECAR, Scan, identity, metrics_of, verified_digest
from holdfast.registry.layouts.table import Found, Reading, layout_named
from holdfast.registry.loading import Checkpoint, Stored
from holdfast.registry.saving import LocalSaver, SaveRequest, plan_save, take_apart
from holdfast.registry.values import check_json, max_record_bytes
from holdfast.registry.writing import Committer

Outcome = Literal["imported", "there already", "refused", "passed over"]
_LATE: Final = (
    "it came after its checkpoint was imported, and companions are saved with their checkpoint; "
    "keep it by `holdfast push FILE RUN --artifact NAME` and move it out of the folder, or import "
    "the folder into another run"
)
#: Files of these names belong to other programs; reports skip them.
_BESIDE: Final = (SIDECAR, ".meta.json", ".meta")


@dataclass(frozen=True, slots=True)
class ImportedFile:
    """Outcome of one file of an import."""

    path: str  # name of the file, relative to the folder
    #: `imported` (in a dry run: would be), `there already`, `refused` or `passed over`.
    outcome: Outcome
    #: What it is: `checkpoint`, `companion` of one, `gate`, `pool` (a model of it), `artifact`,
    #: `release`, `card` of one, `stream`; empty if unknown.
    kind: str = ""
    ref: str = ""  # ref of its state, in a dry run of the state to be; empty if nothing is saved
    why: str = ""  # reason for `refused` or `passed over`
    warnings: tuple[str, ...] = ()  # oddities of the file


class Importer:
    """An import of a folder into a run."""

    def __init__(
        self,
        committer: Committer,
        root: Path,
        name: str,
        *,
        options: Mapping[str, Any] | None = None,
        dry_run: bool = False,
    ) -> None:
        self._committer, self._name = committer, name
        self.root, self.layout = root, layout_named(name)
        self._options, self._dry_run = options or {}, dry_run
        self._saver = LocalSaver(committer)
        self._known: dict[tuple[str, str], int] | None = None
        self._own: dict[str, str] = {}  # digests of files that a checkout of this run has made
        self._step = 0
        self.histories = Histories(
            committer, root, name, self._history, stepped=self.layout.STEPPED, dry_run=dry_run
        )

    def once(self) -> list[ImportedFile]:
        """Import all files that are there now."""
        scan, found = self.find()
        done = [report for one in found for report in self.take(one)]
        while gone := self.histories.take_gone():
            again = [report for one in found if one.path in gone for report in self.take(one)]
            done += [report for report in again if report.outcome == "imported"]
        return [*done, *unknown(scan, found)]

    def find(self) -> tuple[Scan, list[Found]]:
        """Scan the folder; return the scan, and the files with a meaning, in their order."""
        with within(self.root):
            scan = Scan(self.root)
            self._own = self._checked_out()
            found = list(self.layout.find(scan.files))
            order = [one for one in found if one.kind != "gate"]
            for gate in (one for one in found if one.kind == "gate"):
                order.insert(self._place_of(gate, order), gate)
            self.histories.look(order)
        return scan, order

    def _place_of(self, gate: Found, order: list[Found]) -> int:
        """Return the position of a gate in the order: it may be its checkpoint's only file."""
        try:
            reading = self.layout.reading(gate, self.root / gate.path, self._options)
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
            "pool": self._pool,
            "artifact": self._artifact,
            "release": self._release,
            "latest release": self._latest_release,
            "stream": self._stream,
        }
        try:
            with within(self.root):
                own = self._own.get(found.path) if found.kind != "pool" else None
                if own is not None and self._digest(found.path)[0] == own:
                    return self._checked_out_before(found)
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
        beside = {}
        with self._unchanged(found.path, *found.companions.values()):
            sha256, warnings = self._digest(found.path)
            known = self._imported().get((found.path, sha256))
            if known is not None and not self.histories.comes_back(found, known):
                return self._known_checkpoint(found, known)
            if why := self.histories.left_behind(found):
                return [ImportedFile(found.path, "passed over", found.kind, why=why)]
            options = {**self._options, "like": self._like}
            reading = self.layout.reading(found, self.root / found.path, options)
            for name, path in found.companions.items():
                beside[path], more = self._digest(path)
                warnings += more
                companions[name] = self._state(path, found)
        is_replaced = any(path == found.path for path, _ in self._imported())
        went_back = self.histories.go_back(found.path, reading.step or 0, is_replaced=is_replaced)
        ref, _ = self._save(found, reading, sha256, companions, beside)
        warned = (*warnings, *reading.warnings, *went_back)
        return [
            ImportedFile(found.path, "imported", found.kind, ref, warnings=warned),
            *(ImportedFile(path, "imported", "companion", ref) for path in beside),
        ]

    @cached_property
    def _like(self) -> Checkpoint | None:
        """The newest checkpoint of the run when the import began."""
        return RunContents(self._committer).latest()

    def _checked_out(self) -> dict[str, str]:
        """Return the digests, by name, of files and folders that a checkout made of this run."""
        made = Made(self.root, self._run_id, self._name).read()
        if not made:
            return {}
        run = self._committer.log.history()
        states = {pin.manifest.hex() for pin in run.pins}
        for record in run.by_n.values():
            states |= {one.hex() for one in (record.manifest, *record.companions.values())}
        own = {
            path: one.sha256 for path, one in made.items() if states & {*str(one.key).split(":")}
        }
        folders: dict[str, dict[str, str]] = {}
        for folder, slash, name in (path.partition("/") for path in own):
            if slash:
                folders.setdefault(folder, {})[name] = own[f"{folder}/{name}"]
        return own | {folder: digest_of(files) for folder, files in folders.items()}

    def _checked_out_before(self, found: Found) -> list[ImportedFile]:
        """Report a file of a checkout of this run, and files that were put beside it since."""
        reports = self._beside(found, lambda _, path: path in self._own)
        if found.beside:
            reports.append(ImportedFile(found.beside, "there already", "companion"))
        return [ImportedFile(found.path, "there already", found.kind), *reports]

    def _known_checkpoint(self, found: Found, n: int) -> list[ImportedFile]:
        """Report a checkpoint that was imported before, and companions that came too late."""
        log = self._committer.log
        record = log.knowing(n).by_n[n]
        ref = Checkpoint(self._committer.store, log, record).ref
        first = ImportedFile(found.path, "there already", found.kind, ref)
        return [first, *self._beside(found, lambda name, _: name in record.companions, ref)]

    def _beside(
        self, found: Found, is_there: Callable[[str, str], bool], ref: str = ""
    ) -> list[ImportedFile]:
        return [
            ImportedFile(path, "there already", "companion", ref)
            if is_there(name, path)
            else ImportedFile(path, "refused", "companion", why=_LATE)
            for name, path in found.companions.items()
        ]

    @property
    def _run_id(self) -> str:
        return self._committer.log.run_id

    def _save(
        self,
        found: Found,
        reading: Reading,
        sha256: str,
        companions: Mapping[str, object],
        beside: Mapping[str, str],
    ) -> tuple[str, Checkpoint | None]:
        """Save a state; return its ref, and the checkpoint if this is no dry run."""
        run = self._committer.log.run
        phase = reading.phase or found.phase
        step = self._next_step() if reading.step is None else reading.step
        self._step = max(self._step, step)
        tiers = {tier.name for tier in run.spec.phase(phase or "").tiers}
        noted: dict[str, object] = {"layout": self._name, "file": found.path, "sha256": sha256}
        noted |= {**found.noted, **reading.noted, **({"companions": beside} if beside else {})}
        streams, metrics = self.histories.due(found.path, step)
        given = metrics_of(reading.state) if reading.metrics is None else reading.metrics
        request = replace(
            SaveRequest.of(
                step,
                takes_over=False,
                phase=phase,
                metrics={**metrics, **given},
                meta={**reading.meta, IMPORT: noted},
                tier=found.tier if found.tier in tiers else None,
                companions=companions,
                streams=streams,
            ),
            promotes=False,  # the folder has the models of its pool
        )
        if self._dry_run:
            planned = phase_segment(plan_save(take_apart(reading.state, request), run).phase)
            return f"{self._run_id}/{planned}/step{step:08d}", None
        if phase is not None:
            self._enter(phase)
        saved = self._saver.pipeline.save(reading.state, request)
        for one in ((found.path, sha256), *beside.items()):
            self._imported()[one] = saved.handle.n
        self.histories.took(streams)
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
                noted = noted_files(record, self._name).items()
                self._known |= dict.fromkeys(noted, record.n)
        return self._known

    # Names

    def _named(
        self, found: Found, ref: str, warnings: Sequence[str] = (), *, is_there: bool
    ) -> ImportedFile:
        """Report a file that became a state with a name."""
        outcome: Outcome = "there already" if is_there else "imported"
        path = f"{self._run_id}/{ref}"
        return ImportedFile(found.path, outcome, found.kind, path, warnings=tuple(warnings))

    def _gate(self, found: Found) -> ImportedFile:
        with self._unchanged(found.path):
            sha256, warnings = self._digest(found.path)
            reading = self.layout.reading(found, self.root / found.path, self._options)
        is_there = self._committer.log.refresh().pin("gate", found.name) is not None
        _, saved = self._save(found, reading, sha256, {}, {})
        if saved is not None:
            Gates(self._committer).set(found.name, saved)
        return self._named(found, f"gates/{found.name}", warnings, is_there=is_there)

    def _pool(self, found: Found) -> ImportedFile:
        """Take an entry of the pool in, or the games that it has played since."""
        with self._unchanged(found.path, *([found.beside] if found.beside else [])):
            warnings = self._digest(found.path)[1]
            about = {"about": self._json(found.beside)} if found.beside else {}
            reading = self.layout.reading(found, self.root / found.path, about)
        entry = reading.entry
        assert entry is not None  # the layout gives one for each file of this kind
        is_there = entry.version < self._committer.log.refresh().next_version
        if not self._dry_run:
            flat = take_apart(reading.state, SaveRequest.of(0, takes_over=False)).state
            self._committer.commit(EntryImport(self._committer.writer, flat, entry))
        warnings += reading.warnings
        return self._named(found, f"pool/v{entry.version:04d}", warnings, is_there=is_there)

    def _artifact(self, found: Found) -> ImportedFile:
        with self._unchanged(found.path):
            warnings = self._digest(found.path)[1]
            state = self._state(found.path, found)
        held = Artifacts(self._committer).list()
        name = self._continued(found, held, state) if found.grows else found.name
        if not self._dry_run:
            Artifacts(self._committer).set(name, state)
        return self._named(found, f"artifacts/{name}", warnings, is_there=name in held)

    def _continued(self, found: Found, held: Mapping[str, Stored], state: Any) -> str:
        """Return the artifact of an append-only file: that of its bytes, or a further one."""
        file = Path(found.path).name
        earlier = [one for one in held if formats.opaque_name(held[one]) == file]
        if earlier:
            before = bytes(held[earlier[-1]].load()[formats.OPAQUE]["bytes"])
            now = bytes(state[formats.OPAQUE]["bytes"])
            if before == now:
                return earlier[-1]
            if not now.startswith(before):
                raise Conflict(
                    "a file that is only appended to does not continue what was taken in",
                    where=found.path,
                    expected=f"{len(before)} bytes as before, and more",
                    hint="Give the new file another name, or import the folder into another run.",
                )
        numbered = (f"{found.name}.{number}" for number in count(2))
        return next(one for one in (found.name, *islice(numbered, len(held))) if one not in held)

    def _release(self, found: Found) -> ImportedFile:
        is_there = self._committer.log.refresh().pin("release", found.name) is not None
        with self._unchanged(found.path):
            warnings = self._digest(found.path)[1]
            state = self._state(found.path, found)
            card = self._card(found.beside, state)
        if not self._dry_run:
            source = RunContents(self._committer).latest()
            if source is None:
                raise InvalidInput(
                    "a release needs a checkpoint of its run",
                    where=found.path,
                    hint="Import a folder that has checkpoints too.",
                )
            Releases(self._committer).publish(
                found.name, source, card=card, metrics=metrics_of(state), state=state
            )
        return self._named(found, f"releases/{found.name}", warnings, is_there=is_there)

    def _card(self, path: str | None, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the card of a release; a text in a state is no path of a card."""
        if path is not None:
            with stable(self.root / path) as file:
                return parse_card(file.read(MAX_BYTES + 1), path)
        card = state.get("model_card")
        if not isinstance(card, Mapping | None):
            raise InvalidInput("a card in a state is a dict", where="model_card", found=type(card))
        return card

    def _latest_release(self, found: Found) -> ImportedFile:
        is_there = self._committer.log.refresh().release == found.name
        if not is_there and not self._dry_run:
            Releases(self._committer).rollback(found.name, f"{found.path} points to it")
        return self._named(found, "releases/latest", is_there=is_there)

    # Streams

    def _stream(self, found: Found) -> ImportedFile:
        is_new, why = self.histories.late(found, self._step)
        ref = "" if why and not is_new else f"{self._run_id}: stream {found.name}"
        outcome: Outcome = "imported" if is_new else "there already"
        return ImportedFile(found.path, outcome, found.kind, ref, why)

    def _history(self, found: Found) -> Any:
        with self._unchanged(found.path):
            return self._json(found.path, lines=found.format == "jsonl")

    def _json(self, path: str, *, lines: bool = False) -> Any:
        with stable(self.root / path) as file:
            data = file.read(max_record_bytes() + 1)
        if not lines:
            return formats.json_value(data, path)
        check_json(data, where=path, kind=InvalidInput)
        return [formats.json_value(line, path) for line in data.splitlines() if line.strip()]

    # Files

    def _state(self, path: str, found: Found) -> Any:
        """Read a file of the format of another one; its content decides if that has none."""
        return formats.read(self.root / path, format=found.format or None, portable=True).state

    def _digest(self, path: str) -> tuple[str, list[str]]:
        file = self.root / path
        if file.is_dir():
            return digest(file), []
        return verified_digest(file, wants_sidecar=self.layout.SIDECARS)

    @contextmanager
    def _unchanged(self, *paths: str) -> Iterator[None]:
        """Refuse files that change while they are read."""
        before = [identity(self.root / path) for path in paths]
        yield
        if before != [identity(self.root / path) for path in paths]:
            raise InvalidInput("the file changed while it was read", where=paths[0])


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
