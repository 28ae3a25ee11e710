"""One checkpoint, release, artifact or entry of a pool. Tensors are read where the URL asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.registry.comparing import Histogram, TensorStats, histogram, stats_of
from holdfast.registry.curation import Release, checkpoint_marks
from holdfast.registry.errors import InvalidInput, RegistryError, StoreUnavailable
from holdfast.registry.face import find_in_run, is_digest, pull_command, python_lines
from holdfast.registry.history import actions, decode_or_keep, parent_ref
from holdfast.registry.history.replay import CheckpointRecord, Note, RunManifest
from holdfast.registry.loading import Checkpoint, FileInfo, Stored, tensors_by_path
from holdfast.registry.objects import TensorEntry
from holdfast.registry.ui.charts import Chart
from holdfast.registry.ui.pages.contents import Contents, contents_of, histogram_chart, treemap
from holdfast.registry.ui.pages.view import Asked, Shown, Trouble, View, tried
from holdfast.registry.ui.source import Source
from holdfast.registry.upkeep import Damage
from holdfast.registry.values import Digest

#: Maximum number of characters of a card to show.
CARD_SHOWN = 20_000
FILES_SHOWN = 500
#: Newest slots in which the publication of a release is looked for.
_PUBLISHED = 256
#: Marks that are not names; the page shows them in words.
_STATES = ("superseded", "evicted", "held back")


@dataclass(frozen=True, slots=True)
class Provenance:
    """The origin of a run, by its first commit."""

    created_ms: int  # when the run was created, by its author's clock
    preset: str  # name of its preset; empty without one
    seed: str
    input_hash: str | None  # the hash of the input data
    parent: str | None  # name of the checkpoint that the run was forked from, as `RUN/PHASE/stepN`
    parent_ref: str | None  # a ref that finds it, as `RUN/ID`
    environment: tuple[tuple[str, str], ...]  # git commit, versions, device and host
    config: Any  # the configuration; `None` without one


@dataclass(frozen=True, slots=True)
class StateView:
    """A stored state."""

    ref: str
    run: str
    kind: str  # `checkpoint`, `release`, `artifact`, `pool entry` or `companion`
    id: Digest
    record: CheckpointRecord | None  # its record in the log; `None` if it is no checkpoint
    names: tuple[str, ...]  # the names that point at it: `latest`, `best`, `gates/NAME`, ..
    metrics: Mapping[str, float]
    #: Ref of the checkpoint behind a pin or an entry, if the run keeps it.
    made_from: str | None
    previous: str | None  # ref of the kept checkpoint before it; `None` if there is none
    contents: Contents | None  # its components and tensors; `None` if its manifest is damaged
    companions: Mapping[str, Stored]  # the states that were saved with it, by name
    #: The files of a folder that was pushed; the first `FILES_SHOWN`.
    files: tuple[tuple[str, FileInfo], ...]
    file_count: int  # number of these files
    note: Note | None  # what somebody wrote about it
    meta: Any  # the plain values that were saved with it; `None` without any
    card: str  # the model card of a release, as YAML; empty without one
    provenance: Provenance | None  # the origin of the run
    pull: str  # a command that writes it to a file
    load: str  # lines of Python that load it
    troubles: tuple[Trouble, ...]  # parts that could not be read
    #: When a release was published, and by whom: a claim, empty if its commit was not read.
    published: tuple[int, str] | None = None


def state_view(source: Source, ref: str) -> StateView:
    """Return a stored state: the log of its run and its manifest are read, and no tensors.

    A card, and the list of files of a pushed folder, are states or components of their own, which
    are read too. The result reports damage below the log.
    """
    stored = find(source, ref)
    run = stored.handle.log.run
    troubles: list[Trouble] = []
    record = stored.handle.newest_record() if isinstance(stored, Checkpoint) else None
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
            *Damage.of(source.registry.handle.store).marks(stored.run_id, record),
            *_names(run, record),
        ),
        metrics=stored.metrics if isinstance(stored, Checkpoint | Release) else {},
        made_from=None if record is not None else _made_from(source, stored),
        previous=None if record is None else _previous(source, stored, record),
        contents=contents,
        companions=stored.companions if isinstance(stored, Checkpoint) else {},
        files=tuple((files or {}).items())[:FILES_SHOWN],
        file_count=len(files or {}),
        note=None if record is None else run.note(record.n),
        meta=None if record is None else decode_or_keep(record.meta),
        card=(card or "")[:CARD_SHOWN],
        provenance=_provenance(run, record),
        pull=pull_command(source.place, stored, is_whole=contents is not None),
        load=python_lines(source.place, stored),
        troubles=tuple(dict.fromkeys(troubles)),
        published=_published(source, stored) if isinstance(stored, Release) else None,
    )


def _published(source: Source, release: Release) -> tuple[int, str]:
    commits = source.chronicle(release.run_id, most=_PUBLISHED).commits[::-1]
    by = (
        commit.author
        for commit in commits
        for one in commit.actions
        if isinstance(one, actions.SetPin) and (one.kind, one.name) == ("release", release.version)
    )
    return release.record.time_ms, next(by, "")


def _names(run: RunManifest, record: CheckpointRecord) -> Iterator[str]:
    """Yield the names that point at a checkpoint, or at a state made from it."""
    marks = checkpoint_marks(run).get(record.n, [])
    yield from (mark for mark in marks if mark not in _STATES)
    yield from sorted(
        pin.ref for pin in run.pins if pin.checkpoint == record.n and pin.ref not in marks
    )


def _previous(source: Source, stored: Stored, record: CheckpointRecord) -> str | None:
    log = stored.handle.log
    before = [one for one in log.run.live() if one.n < record.n]
    return Checkpoint(source.registry.handle.store, log, before[-1]).ref if before else None


def _made_from(source: Source, stored: Stored) -> str | None:
    log, n = stored.handle.log, source_of(stored)
    record = None if n is None else log.run.by_n.get(n)
    return None if record is None else Checkpoint(source.registry.handle.store, log, record).ref


def _kind(stored: Stored) -> str:
    kinds = {"artifacts": "artifact", "releases": "release", "pool": "pool entry"}
    segments = stored.ref.split("/")
    if "companions" in segments:
        return "companion"
    return "checkpoint" if isinstance(stored, Checkpoint) else kinds.get(segments[1], "state")


def _provenance(run: RunManifest, record: CheckpointRecord | None) -> Provenance | None:
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
        decode_or_keep(run.config if record is None else run.config_at(record.n)),
    )


#: Number of checkpoints, before and after together, whose chunks are compared.
NEIGHBOURS = 8


@dataclass(frozen=True, slots=True)
class Shared:
    """Bytes that a checkpoint shares with another one of its run."""

    ref: str  # the other checkpoint
    shared_bytes: int  # bytes of this checkpoint's tensors in common chunks
    components: tuple[str, ...]  # the components that are equal in both
    damage: str | None = None  # why it could not be compared


@dataclass(frozen=True, slots=True)
class Sharing:
    """Bytes that a checkpoint shares with its neighbours in the log."""

    others: tuple[Shared, ...]  # the neighbours, oldest first
    size_bytes: int  # bytes of the checkpoint's tensors
    not_compared: int  # number of kept checkpoints that were not compared


def sharing(source: Source, ref: str, *, neighbours: int = NEIGHBOURS) -> Sharing:
    """Compare the chunks of a state with those of the nearest checkpoints of its run.

    One manifest is read for each; a list of digests only where the lists of two tensors differ.
    """
    stored = find(source, ref)
    log = stored.handle.log
    kept = [one for one in log.run.checkpoints if one.evicted is None]
    n = stored.handle.n if isinstance(stored, Checkpoint) else source_of(stored)
    others = [one for one in kept if one.n != n or one.manifest != stored.digest]
    near = sorted(others, key=lambda one: abs(one.n - (log.run.commits if n is None else n)))
    chosen = sorted(near[:neighbours], key=lambda one: one.n)
    mine = tensors_by_path(stored.manifest.components)

    def compare(record: CheckpointRecord) -> Shared:
        other = Checkpoint(source.registry.handle.store, log, record)
        try:
            equal = [n for n, d in stored.components.items() if other.components.get(n) == d]
            return Shared(other.ref, _shared_bytes(stored, mine, other), tuple(equal))
        except StoreUnavailable:
            raise
        except RegistryError as error:
            return Shared(other.ref, 0, (), error.summary)

    found = tuple(source.registry.handle.store.pools.small.map(compare, chosen))
    return Sharing(found, stored.manifest.nbytes, len(others) - len(chosen))


def _shared_bytes(stored: Stored, mine: Mapping[str, TensorEntry], other: Stored) -> int:
    theirs = tensors_by_path(other.manifest.components).values()
    lists = {one.chunk_list for one in theirs if one.chunk_list is not None}
    unknown = [one for one in mine.values() if one.chunk_list and one.chunk_list not in lists]
    inline = {one.content for one in theirs if one.inline is not None}
    chunks = {digest for one in theirs for digest in one.chunks}
    if unknown:
        chunks |= {d for one in theirs for d in other.handle.reader.chunk_digests(one)}
    shared = 0
    for entry in mine.values():
        if entry.inline is not None:
            shared += entry.nbytes * (entry.content in inline)
        elif entry.chunk_list in lists:
            shared += entry.nbytes
        else:
            digests = stored.handle.reader.chunk_digests(entry)
            sizes = zip(digests, entry.grid.sizes(), strict=True)
            shared += sum(size for digest, size in sizes if digest in chunks)
    return shared


# Values of tensors, within a budget of bytes: statistics of many, the histogram of one.


#: Maximum bytes of tensors that one request reads.
BUDGET_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of tensors, within the budget."""

    #: The statistics of the tensors that were read, in the order of the state.
    tensors: tuple[TensorStats, ...]
    read_bytes: int
    left: int  # number of tensors beyond the budget
    left_bytes: int


def statistics(source: Source, ref: str, *, budget_bytes: int = BUDGET_BYTES) -> Statistics:
    """Read tensors in their order until the budget is spent, and return their statistics."""
    stored = find(source, ref)
    chosen, left, spent = [], [], 0
    for path, entry in tensors_by_path(stored.manifest.components).items():
        nbytes = 0 if entry.inline is not None else entry.nbytes
        if spent + nbytes <= budget_bytes:
            chosen.append(path)
            spent += nbytes
        else:
            left.append(entry.nbytes)
    found = stats_of(stored.handle, chosen)
    return Statistics(found.tensors, spent, len(left), sum(left))


#: Default budget of a page for reading tensors, in MiB, and the budgets that a URL may ask for.
BUDGET_MIB, MOST_MIB = 64, 1024


@dataclass(frozen=True, slots=True)
class CheckpointPage:
    """Page of a stored state."""

    state: StateView
    treemap: Chart | None  # its tensors by bytes; `None` if its manifest is damaged
    statistics: Statistics | None  # the statistics of its tensors, if the URL asks
    by_path: Mapping[str, TensorStats]  # the same by path
    histogram: Histogram | None  # the histogram of one tensor, if the URL asks
    values: Chart | None  # the same as a chart; `None` if no element is finite
    sharing: Sharing | None  # bytes shared with its neighbours, if the URL asks
    budget_mib: int  # the budget for reading tensors


def _ask(source: Source, asked: Asked) -> Shown:
    ref, path = asked.text("ref"), asked.text("tensor")
    budget_mib = asked.number("budget", BUDGET_MIB, least=4, most=MOST_MIB)
    budget_bytes = budget_mib * 2**20
    state = state_view(source, ref)
    troubles = list(state.troubles)
    is_whole = state.contents is not None
    found = read = shared = None
    if is_whole and asked.text("stats"):
        found = tried(lambda: statistics(source, ref, budget_bytes=budget_bytes), troubles)
    if is_whole and path:
        read = tried(
            lambda: histogram(find(source, ref).handle, path, budget_bytes=budget_bytes), troubles
        )
    if is_whole and asked.text("shared"):
        shared = tried(lambda: sharing(source, ref), troubles)
    page = CheckpointPage(
        state,
        None if state.contents is None else treemap(state.contents),
        found,
        {} if found is None else {one.path: one for one in found.tensors},
        read,
        histogram_chart(read) if read is not None and read.counts else None,
        shared,
        budget_mib,
    )
    return Shown(state.ref, page, tuple(troubles), run=state.run)


def _parts(source: Source, runs: Sequence[str]) -> Iterable[Asked]:
    for run in source.runs(runs).runs.values():
        latest = run.manifest.latest()
        best = run.manifest.best(run.manifest.monitors[0]) if run.manifest.monitors else None
        for record in {one.n: one for one in (best, latest) if one is not None}.values():
            yield Asked(path={"ref": run.history.checkpoint(record.n).ref})


def find(source: Source, ref: str) -> Stored:
    """Return exactly the stored state that a ref names; an id alone is searched in all runs."""
    name, _, path = ref.partition("/")
    if not path and is_digest(name):
        return source.registry.stored(ref)
    handle = source.run(name).handle
    return find_in_run(handle.store, handle.log, path)


def find_checkpoint(source: Source, ref: str) -> Checkpoint:
    """Return the checkpoint that a ref names, as `find` does."""
    found = find(source, ref)
    if not isinstance(found, Checkpoint):
        raise InvalidInput(
            "this is a stored state and no checkpoint",
            where=found.ref,
            expected="a checkpoint, such as RUN/latest",
        )
    return found


def source_of(stored: Stored) -> int | None:
    """Return the commit of the checkpoint that a release, artifact or entry was made from."""
    found = getattr(stored, "checkpoint", None)
    return found if isinstance(found, int) else None


VIEW = View(
    "checkpoint", "Checkpoint", "/checkpoints/{ref:path}", "checkpoint.html", _ask, parts=_parts
)
