"""One checkpoint, release, artifact or entry of a pool: what it is, what is in it, how to get it.

The first view reads the run's log and the manifest. Data is read only by `statistics` and
`distribution`, within a budget of bytes, and by `sharing`, which reads manifests of neighbours.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import nlargest
from typing import Any

from holdfast.registry.comparing.histograms import Histogram, histogram
from holdfast.registry.comparing.stats import TensorStats, stats_of
from holdfast.registry.errors import RegistryError, StoreUnavailable
from holdfast.registry.formats.content import OPAQUE
from holdfast.registry.history.log_values import decode_or_keep
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.loading.checkpoint import Checkpoint, parent_ref
from holdfast.registry.loading.files import FileInfo, is_tree
from holdfast.registry.loading.fit import tensors_by_path
from holdfast.registry.loading.stored import Stored, log_of, reader_of
from holdfast.registry.names.marks import checkpoint_marks
from holdfast.registry.names.releases import Release
from holdfast.registry.pytree import leaf_kinds
from holdfast.registry.storage.manifest import TensorEntry
from holdfast.registry.ui.queries.states import find
from holdfast.registry.ui.queries.trouble import Trouble, tried
from holdfast.registry.ui.source import Source
from holdfast.registry.values.digest import Digest

#: The largest tensors that are shown one by one; the others of a component are shown together.
TENSORS_SHOWN = 1000
#: The most characters of a card that are shown.
CARD_SHOWN = 20_000
FILES_SHOWN = 500
#: The checkpoints before and after one that its chunks are compared with, together.
NEIGHBOURS = 8
#: Marks that are no names; the page says them in words.
_STATES = ("superseded", "evicted", "held back")
#: Bytes of tensors that one request may read.
BUDGET_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A tensor.

    Attributes:
        path: Component and keys joined with `/`.
        dtype: Name of its element type.
        shape: Axis lengths.
        nbytes: Size in bytes.
        original: Its wider element type before it lost precision; `None` if it lost none.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    original: str | None


@dataclass(frozen=True, slots=True)
class ComponentRow:
    """A component.

    Attributes:
        name: Its name.
        digest: Its digest.
        tensors: Number of its tensors.
        nbytes: Their bytes.
        others: Number of tensors that are too small to be shown one by one.
        other_bytes: Their bytes.
    """

    name: str
    digest: Digest
    tensors: int
    nbytes: int
    others: int
    other_bytes: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What a manifest says of a state.

    Attributes:
        components: Its components, in order.
        tensors: The largest tensors, in the order of the state.
        nbytes: Bytes of all its tensors.
    """

    components: tuple[ComponentRow, ...]
    tensors: tuple[TensorRow, ...]
    nbytes: int


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


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of tensors, as far as the budget went.

    Attributes:
        tensors: The statistics of those that were read, in the order of the state.
        read_bytes: Their bytes.
        left: Number of tensors that the budget did not reach.
        left_bytes: Their bytes.
        budget_bytes: The budget.
    """

    tensors: tuple[TensorStats, ...]
    read_bytes: int
    left: int
    left_bytes: int
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class Shared:
    """What a checkpoint shares with another one of its run.

    Attributes:
        ref: The other one.
        id: Its id.
        step: Its step.
        phase: Its phase.
        shared_bytes: Bytes of this checkpoint's tensors whose chunks the other one has too.
        components: The components that are equal in both.
        damage: Why it could not be compared.
    """

    ref: str
    id: Digest
    step: int
    phase: str
    shared_bytes: int
    components: tuple[str, ...]
    damage: str | None = None


@dataclass(frozen=True, slots=True)
class Sharing:
    """What a checkpoint shares with its neighbours in the log.

    Attributes:
        others: The neighbours, oldest first.
        size_bytes: Bytes of the checkpoint's tensors.
        not_compared: Number of kept checkpoints of the run that were not looked at.
    """

    others: tuple[Shared, ...]
    size_bytes: int
    not_compared: int


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
    contents = tried(lambda: _contents(stored), troubles)
    files = None if contents is None else tried(stored.files, troubles)
    card = tried(stored.card_yaml, troubles) if isinstance(stored, Release) else None
    return StateView(
        ref=stored.ref,
        run=stored.run_id,
        kind=_kind(stored),
        id=stored.digest,
        record=record,
        names=() if record is None else tuple(_names(run, record)),
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


def statistics(source: Source, ref: str, *, budget_bytes: int = BUDGET_BYTES) -> Statistics:
    """Read tensors in their order until the budget is spent, and return their statistics.

    Raises:
        NotFound: The ref names nothing.
        IntegrityError: Something is damaged or gone.
    """
    stored = find(source, ref)
    chosen, left, spent = [], [], 0
    for path, entry in tensors_by_path(stored.manifest.components).items():
        nbytes = 0 if entry.inline is not None else entry.nbytes
        if spent + nbytes <= budget_bytes:
            chosen.append(path)
            spent += nbytes
        else:
            left.append(entry.nbytes)
    found = stats_of(stored, chosen)
    return Statistics(found.tensors, spent, len(left), sum(left), budget_bytes)


def distribution(
    source: Source, ref: str, path: str, *, budget_bytes: int = BUDGET_BYTES
) -> Histogram:
    """Return the histogram of one tensor; read at most the budget, spread over the tensor.

    Raises:
        NotFound: The ref or the path names nothing.
        IntegrityError: Something is damaged or gone.
    """
    return histogram(find(source, ref), path, budget_bytes=budget_bytes)


def sharing(source: Source, ref: str, *, neighbours: int = NEIGHBOURS) -> Sharing:
    """Compare the chunks of a state with those of the nearest checkpoints of its run.

    One manifest is read for each; a list of digests only where the lists of two tensors differ.

    Args:
        source: The registry.
        ref: The state.
        neighbours: The most checkpoints to look at.

    Raises:
        NotFound: The ref names nothing.
        IntegrityError: The manifest of the state is damaged or gone.
    """
    stored = find(source, ref)
    log = log_of(stored)
    kept = [one for one in log.run.checkpoints if one.evicted is None]
    n = stored.n if isinstance(stored, Checkpoint) else _source_of(stored)
    others = [one for one in kept if one.n != n or one.manifest != stored.digest]
    near = sorted(others, key=lambda one: abs(one.n - (log.run.commits if n is None else n)))
    chosen = sorted(near[:neighbours], key=lambda one: one.n)
    mine = tensors_by_path(stored.manifest.components)

    def compare(record: CheckpointRecord) -> Shared:
        other = Checkpoint(source.registry.store, log, record)
        values = other.ref, record.manifest, record.step, record.phase
        try:
            equal = [n for n, d in stored.components.items() if other.components.get(n) == d]
            return Shared(*values, _shared_bytes(stored, mine, other), tuple(equal))
        except StoreUnavailable:
            raise
        except RegistryError as error:
            return Shared(*values, 0, (), error.summary)

    found = tuple(source.registry.store.pools.small.map(compare, chosen))
    return Sharing(found, stored.manifest.nbytes, len(others) - len(chosen))


def _contents(stored: Stored) -> Contents:
    parts = stored.manifest.components
    found = {name: tensors_by_path({name: part}) for name, part in parts.items()}
    every = [one for paths in found.values() for one in paths.items()]
    largest = nlargest(TENSORS_SHOWN, every, key=lambda one: one[1].nbytes)
    shown = {path for path, _ in largest}
    rows = []
    for name, part in parts.items():
        others = [entry.nbytes for path, entry in found[name].items() if path not in shown]
        counts = len(found[name]), part.nbytes, len(others), sum(others)
        rows.append(ComponentRow(name, part.digest, *counts))
    tensors = tuple(
        TensorRow(path, entry.dtype, entry.shape, entry.nbytes, entry.original)
        for path, entry in every
        if path in shown
    )
    return Contents(tuple(rows), tensors, stored.manifest.nbytes)


def _shared_bytes(stored: Stored, mine: Mapping[str, TensorEntry], other: Stored) -> int:
    theirs = tensors_by_path(other.manifest.components).values()
    lists = {one.chunk_list for one in theirs if one.chunk_list is not None}
    unknown = [one for one in mine.values() if one.chunk_list and one.chunk_list not in lists]
    inline = {one.content for one in theirs if one.inline is not None}
    chunks = {digest for one in theirs for digest in one.chunks}
    if unknown:
        chunks |= {d for one in theirs for d in reader_of(other).chunk_digests(one)}
    shared = 0
    for entry in mine.values():
        if entry.inline is not None:
            shared += entry.nbytes * (entry.content in inline)
        elif entry.chunk_list in lists:
            shared += entry.nbytes
        else:
            digests = reader_of(stored).chunk_digests(entry)
            sizes = zip(digests, entry.grid.sizes(), strict=True)
            shared += sum(size for digest, size in sizes if digest in chunks)
    return shared


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
    log, n = log_of(stored), _source_of(stored)
    record = None if n is None else log.run.by_n.get(n)
    return None if record is None else Checkpoint(source.registry.store, log, record).ref


def _source_of(stored: Stored) -> int | None:
    found = getattr(stored, "checkpoint", None)
    return found if isinstance(found, int) else None


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
