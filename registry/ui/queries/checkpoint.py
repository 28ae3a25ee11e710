"""One checkpoint, release, artifact or entry of a pool: what it is, what is in it, how to get it.

It reads the run's log and the manifest. `tensor_values` reads data, and `sharing` the manifests of
neighbours.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.registry.formats.content import OPAQUE
from holdfast.registry.history.log_values import decode_or_keep
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.history.step_names import parent_ref
from holdfast.registry.loading.checkpoint import Checkpoint
from holdfast.registry.loading.files import FileInfo, is_tree
from holdfast.registry.loading.stored import Stored, log_of
from holdfast.registry.maintenance.last_verify import Damage
from holdfast.registry.names.marks import checkpoint_marks
from holdfast.registry.names.releases import Release
from holdfast.registry.pytree import leaf_kinds
from holdfast.registry.ui.queries.contents import Contents, contents_of
from holdfast.registry.ui.queries.states import find, source_of
from holdfast.registry.ui.queries.trouble import Trouble, tried
from holdfast.registry.ui.source import Source
from holdfast.registry.values.digest import Digest

#: The most characters of a card that are shown.
CARD_SHOWN = 20_000
FILES_SHOWN = 500
#: Marks that are no names; the page says them in words.
_STATES = ("superseded", "evicted", "held back")


@dataclass(frozen=True, slots=True)
class Companion:
    """A state that was saved with the checkpoint."""

    name: str
    ref: str
    id: Digest


@dataclass(frozen=True, slots=True)
class Provenance:
    """The origin of a run, as its first commit tells it.

    Attributes:
        created_ms: When the run was created, by its author's clock.
        preset: Name of its preset; empty without one.
        seed: The master seed.
        input_hash: What identifies the input data.
        parent: Name of the checkpoint that the run was forked from, as `RUN/PHASE/stepN`.
        parent_ref: A ref that finds it, as `RUN/ID`.
        environment: Git commit, versions, device and host.
        config: The configuration; `None` without one.
    """

    created_ms: int
    preset: str
    seed: str
    input_hash: str | None
    parent: str | None
    parent_ref: str | None
    environment: tuple[tuple[str, str], ...]
    config: Any


@dataclass(frozen=True, slots=True)
class StateView:
    """A stored state.

    Attributes:
        ref: Its ref.
        run: Its run.
        kind: `checkpoint`, `release`, `artifact`, `pool entry` or `companion`.
        id: Its id.
        record: Its record in the log; `None` if it is no checkpoint.
        names: The names that point at it: `latest`, `best`, `gates/NAME`, ...
        metrics: Its metrics.
        made_from: Ref of the checkpoint that it was made from, if it is none and the run keeps it.
        previous: Ref of the kept checkpoint before it; `None` if there is none.
        contents: Its components and tensors; `None` if its manifest is damaged.
        companions: The states that were saved with it.
        files: The files of a folder that was pushed; the first `FILES_SHOWN`.
        file_count: Number of these files.
        meta: The plain values that were saved with it; `None` without any.
        card: The model card of a release, as YAML; empty without one.
        provenance: The origin of the run.
        pull: A command that writes it to a file.
        load: Lines of Python that load it.
        troubles: What could not be read.
    """

    ref: str
    run: str
    kind: str
    id: Digest
    record: CheckpointRecord | None
    names: tuple[str, ...]
    metrics: Mapping[str, float]
    made_from: str | None
    previous: str | None
    contents: Contents | None
    companions: tuple[Companion, ...]
    files: tuple[tuple[str, FileInfo], ...]
    file_count: int
    meta: Any
    card: str
    provenance: Provenance | None
    pull: str
    load: str
    troubles: tuple[Trouble, ...]


def state_view(source: Source, ref: str) -> StateView:
    """Return a stored state: the log of its run and its manifest are read, and no tensors.

    A card, and the list of files of a pushed folder, are states or components of their own, which
    are read too. Damage of what is below the log is said in the result.

    Raises:
        NotFound: The ref names nothing.
        IntegrityError: The log of its run is damaged.
    """
    stored = find(source, ref)
    run = log_of(stored).run
    troubles: list[Trouble] = []
    record = stored.record if isinstance(stored, Checkpoint) else None
    contents = tried(lambda: contents_of(stored), troubles)
    files = None if contents is None else tried(stored.files, troubles)
    card = tried(stored.card_yaml, troubles) if isinstance(stored, Release) else None
    return StateView(
        ref=stored.ref,
        run=stored.run_id,
        kind=_kind(stored),
        id=stored.digest,
        record=record,
        names=()
        if record is None
        else (
            *Damage.of(source.registry.store).marks(stored.run_id, record),
            *_names(run, record),
        ),
        metrics=stored.metrics if isinstance(stored, Checkpoint | Release) else {},
        made_from=None if record is not None else _made_from(source, stored),
        previous=None if record is None else _previous(source, stored, record),
        contents=contents,
        companions=_companions(stored),
        files=tuple((files or {}).items())[:FILES_SHOWN],
        file_count=len(files or {}),
        meta=None if record is None else decode_or_keep(record.meta),
        card=(card or "")[:CARD_SHOWN],
        provenance=_provenance(run),
        pull=_pull(source.registry.url, stored, contents),
        load=_load(source.registry.url, stored),
        troubles=tuple(dict.fromkeys(troubles)),
    )


def _names(run: RunManifest, record: CheckpointRecord) -> Iterator[str]:
    """Yield the names that point at a checkpoint, or at a state that was made from it."""
    marks = checkpoint_marks(run).get(record.n, [])
    yield from (mark for mark in marks if mark not in _STATES)
    yield from sorted(
        pin.ref for pin in run.pins if pin.checkpoint == record.n and pin.ref not in marks
    )


def _previous(source: Source, stored: Stored, record: CheckpointRecord) -> str | None:
    log = log_of(stored)
    before = [one for one in log.run.live() if one.n < record.n]
    return Checkpoint(source.registry.store, log, before[-1]).ref if before else None


def _made_from(source: Source, stored: Stored) -> str | None:
    log, n = log_of(stored), source_of(stored)
    record = None if n is None else log.run.by_n.get(n)
    return None if record is None else Checkpoint(source.registry.store, log, record).ref


def _kind(stored: Stored) -> str:
    kinds = {"artifacts": "artifact", "releases": "release", "pool": "pool entry"}
    segments = stored.ref.split("/")
    if "companions" in segments:
        return "companion"
    return "checkpoint" if isinstance(stored, Checkpoint) else kinds.get(segments[1], "state")


def _companions(stored: Stored) -> tuple[Companion, ...]:
    if not isinstance(stored, Checkpoint):
        return ()
    return tuple(
        Companion(name, other.ref, other.digest) for name, other in stored.companions.items()
    )


def _provenance(run: RunManifest) -> Provenance | None:
    created = run.created
    if created is None:
        return None
    parent = created.parent
    return Provenance(
        run.created_ms,
        run.spec.name or "",
        f"0x{created.seed}",
        created.input_hash,
        None if parent is None else parent_ref(parent),
        None if parent is None else f"{parent.run}/{parent.checkpoint.short}",
        tuple(sorted(created.environment.items())),
        decode_or_keep(created.config),
    )


def _pull(url: str, stored: Stored, contents: Contents | None) -> str:
    """Return a command that writes a file which can hold the state."""
    target = stored.ref.replace("/", "-") + ("" if contents is None else _extension(stored))
    lines = ["holdfast", "pull", stored.ref], ["--to", target], ["-r", url]
    return " \\\n  ".join(map(shlex.join, lines))


def _extension(stored: Stored) -> str:
    parts = stored.manifest.components
    if is_tree(parts) or set(parts) == {OPAQUE}:
        return ""
    kinds = {kind for part in parts.values() for kind in leaf_kinds(part.skeleton).values()}
    return ".zarr" if "numpy" in kinds else ".pt"  # arrays of NumPy need code in a `.pt`


def _load(url: str, stored: Stored) -> str:
    call = "checkpoint" if isinstance(stored, Checkpoint) else "stored"
    opened = f"reg = holdfast.open({url!a})"
    return f"import holdfast\n\n{opened}\nstate = reg.{call}({stored.ref!a}).load()"
