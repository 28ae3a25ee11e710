"""The actions of a promotion: the entry, its rating, and the entries that it replaces. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

from holdfast.registry.curation.pins import sound
from holdfast.registry.curation.pool.entries import find_record
from holdfast.registry.curation.pool.ratings import DEFAULT, Rating, inherited
from holdfast.registry.errors import Conflict, InvalidInput
from holdfast.registry.history.actions import Action, EvictEntries, Promote, Rated, RateMatch
from holdfast.registry.history.replay import CheckpointRecord, NeedsHistory, PoolRecord, RunManifest
from holdfast.registry.loading import StateHandle
from holdfast.registry.objects import Manifest
from holdfast.registry.pytree import FlatState
from holdfast.registry.spec import Pool, check_phase_is_declared, inference_parts
from holdfast.registry.values import Digest
from holdfast.registry.writing import NewCommit, Stale, StateWriter, Written, after_commit


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that is to enter the pool."""

    manifest: Digest  # id of its inference-only state
    phase: str  # phase of its source
    step: int  # step of its source
    checkpoint: int | None  # commit number of its source
    gate: str | None = None  # the gate of its source, if it is one
    frozen: bool = False  # whether it is never evicted and never rated again


def pool_rules(run: RunManifest) -> Pool:
    """Return the rules of a run's pool."""
    return run.spec.pool or _undeclared()


@cache
def _undeclared() -> Pool:
    """Return the rules of a pool without a preset; made late to keep `import holdfast` light."""
    return Pool(phase="any", size=20)


def promotion(
    run: RunManifest,
    candidate: Candidate,
    rating: Rating,
    *,
    version: int | None = None,
    promoted_ms: int | None = None,
) -> list[Action]:
    """Return the actions that add a model to the pool and evict the oldest entries of a full one.

    The rating is inherited. Its uncertainty is raised to a third of the default (document of Hydra,
    Rating integration), unless the entry is frozen. An import gives version and time.
    """
    entered = rating if candidate.frozen else inherited(rating)
    promote = Promote(
        version=run.next_version if version is None else version,
        promoted_ms=promoted_ms,
        manifest=candidate.manifest,
        checkpoint=candidate.checkpoint,
        gate=candidate.gate,
        phase=candidate.phase,
        step=candidate.step,
        mu=entered.mu,
        sigma=entered.sigma,
        frozen=candidate.frozen,
    )
    if candidate.frozen:
        return [promote]
    size = pool_rules(run).size
    playing = [entry for entry in run.roster() if not entry.frozen]
    leaving = playing[: max(0, len(playing) + 1 - size)] if run.hold(None) is None else ()
    if not leaving:
        return [promote]
    versions = tuple(entry.version for entry in leaving)
    return [promote, EvictEntries(versions=versions, reason=f"oldest of more than {size}")]


def rating_of(run: RunManifest, metrics: Mapping[str, float]) -> Rating:
    """Return the rating of the training model: from these metrics, else from the newest with one.

    A value that is no rating (NaN, an uncertainty of 0) is ignored, so that no save fails for it.
    Superseded checkpoints are ignored too; evicted ones count.
    """
    for known in chain((metrics,), _newest_metrics(run)):
        rating = own_rating(run, known)
        if rating is not None:
            return rating
    return DEFAULT


def _newest_metrics(run: RunManifest) -> Iterator[Mapping[str, float]]:
    """Yield the metrics of the checkpoints on the current line, the newest first."""
    gone = None if run.gone is None else run.gone.rating
    for record in reversed(run.checkpoints):
        if gone is not None and gone.n > record.n:
            yield gone.metrics
            raise NeedsHistory  # its metrics are no rating, and earlier ones are not known
        if not record.superseded:
            yield record.metrics
    if gone is not None:
        yield gone.metrics
        raise NeedsHistory


def own_rating(run: RunManifest, metrics: Mapping[str, float]) -> Rating | None:
    """Return the rating in these metrics, if there is one."""
    rules = pool_rules(run)
    if rules.mu not in metrics or rules.sigma not in metrics:
        return None
    try:
        return Rating(metrics[rules.mu], metrics[rules.sigma])
    except InvalidInput:
        return None


def find_entry(run: RunManifest, candidate: Candidate) -> PoolRecord | None:
    """Return the playing entry that equals this candidate.

    It has the same model of the same phase and step in the same role. The number of its checkpoint
    does not count: training that went back may save the same model at the same step again, and a
    fork inherits entries without their checkpoints.
    """
    for entry in reversed(run.roster()):
        if _identity(entry) == _identity(candidate):
            return entry
    return None


def _identity(one: PoolRecord | Candidate) -> tuple[object, ...]:
    return one.manifest, one.phase, one.step, one.gate, one.frozen


def candidate_of(record: CheckpointRecord, manifest: Digest) -> Candidate:
    """Return a checkpoint as a candidate."""
    return Candidate(manifest, record.phase, record.step, record.n)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The source of a model."""

    checkpoint: CheckpointRecord
    gate: str | None = None  # the name of its gate, where it enters the pool as one


@dataclass(frozen=True, slots=True)
class Terms:
    """The options of a promotion."""

    frozen: bool = False  # whether the entry is never evicted and never rated again
    mu: float | None = None  # its estimated skill; inherited without it
    sigma: float | None = None  # the uncertainty of the skill; inherited without it

    def __post_init__(self) -> None:
        self.over(DEFAULT)

    def over(self, inherited: Rating) -> Rating:
        """Return the inherited rating, with the given numbers in place of its own."""
        mu = inherited.mu if self.mu is None else self.mu
        return Rating(mu, inherited.sigma if self.sigma is None else self.sigma)


class PromotionCommit(NewCommit):
    """The commit of a promotion."""

    def __init__(
        self, writer: StateWriter, source: Callable[[RunManifest], ModelSource], terms: Terms
    ) -> None:
        self._writer = writer
        self._source = source
        self._terms = terms
        self._cut_of: Digest | None = None
        self._model: Digest
        self._is_cut = False
        self.version = -1  # version of the entry, once the commit has landed

    def write_states(self) -> Sequence[Written]:
        """Write the manifest of the model, unless it plays or the run holds it already."""
        writer, run = self._writer, self._writer.log.run
        source = self._source(run)
        self._cut_of = None
        if self._playing(run, source) is not None:
            return ()
        record = _sound(run, source.checkpoint)
        where = f"{run.run_id}/{record.manifest.short}"
        whole = StateHandle(writer.store, writer.log, record.manifest, record.manifest.short)
        parts = whole.manifest.components
        names = inference_parts(run.spec, parts, where=where)
        model = Manifest(whole.manifest.kind, {name: parts[name] for name in names})
        self._cut_of, self._model = record.manifest, model.digest
        self._is_cut = not run.holds_whole(self._model)
        return [writer.cut(record.manifest, names)] if self._is_cut else []

    def actions(self, run: RunManifest) -> Sequence[Action] | None:
        """Return the actions that add the model, unless an equal entry plays."""
        source = self._source(run)
        playing = self._playing(run, source)
        if playing is not None:
            self.version = playing.version
            return None
        record = _sound(run, source.checkpoint)
        if record.manifest != self._cut_of or not (self._is_cut or run.holds_whole(self._model)):
            raise Stale
        candidate = Candidate(
            manifest=self._model,
            phase=record.phase,
            step=record.step,
            checkpoint=record.n,
            gate=source.gate,
            frozen=self._terms.frozen,
        )
        known = find_entry(run, candidate)
        if known is not None:
            self.version = known.version
            return None
        self.version = run.next_version
        return promotion(run, candidate, self._rating(run, record))

    def _playing(self, run: RunManifest, source: ModelSource) -> PoolRecord | None:
        """Return the entry that plays already for this source in the same role."""
        wanted = (source.checkpoint.n, source.gate, self._terms.frozen)
        for entry in run.roster():
            if (entry.checkpoint, entry.gate, entry.frozen) == wanted:
                return entry
        return None

    def _rating(self, run: RunManifest, record: CheckpointRecord) -> Rating:
        # An anchor is not the model in training, so it does not inherit that model's rating.
        inherited = (
            own_rating(run, record.metrics) or DEFAULT
            if self._terms.frozen
            else rating_of(run, record.metrics)
        )
        return self._terms.over(inherited)


@dataclass(frozen=True, slots=True)
class ForeignEntry:
    """An entry of another program's pool."""

    version: int  # its number, which it keeps
    phase: str  # phase of its source
    step: int  # step of its source
    rating: Rating  # its rating now
    games: int  # games that it has played
    wins: int  # games that it has won
    promoted_ms: int | None  # when it was promoted


class EntryImport(NewCommit):
    """The commit that takes an entry of another program's pool in, or its newer rating."""

    def __init__(self, writer: StateWriter, state: FlatState, entry: ForeignEntry) -> None:
        self._writer, self._state, self._entry = writer, state, entry

    def write_states(self) -> Sequence[Written]:
        """Write the model; it shares the chunks of its checkpoint, if the run has that."""
        writer, entry = self._writer, self._entry
        run = writer.log.run
        near = [one.manifest for one in run.at_step(entry.phase, entry.step)]
        if entry.version in run.by_version:
            near.append(run.by_version[entry.version].manifest)
        model = writer.write(self._state, writer.choose_bases(near))
        self._model = model.state.manifest.digest
        return [model]

    def actions(self, run: RunManifest) -> Sequence[Action] | None:
        """Return the actions for a new entry, or for games that it has played since."""
        entry, model = self._entry, self._model
        known = find_record(run, entry.version)
        if known is not None:
            if known.manifest != model:
                raise self._taken(run, known.manifest.short)
            return self._played(known) or None
        check_phase_is_declared(run.spec, entry.phase)
        if entry.version < run.next_version:
            raise self._taken(run, f"the next version is {run.next_version}")
        n = next((one.n for one in run.at_step(entry.phase, entry.step)), None)
        gate = self._gate(run)
        candidate = Candidate(model, entry.phase, entry.step, n, gate, frozen=gate is not None)
        actions = promotion(
            run, candidate, entry.rating, version=entry.version, promoted_ms=entry.promoted_ms
        )
        return [*actions, *self._played(after_commit(run, actions).by_version[entry.version])]

    def _gate(self, run: RunManifest) -> str | None:
        """Return the gate of the entry's phase and step: its models are the frozen anchors."""
        for pin in run.pins_of("gate"):
            if pin.checkpoint is not None:
                record = run.record(pin.checkpoint)
                if (record.phase, record.step) == (self._entry.phase, self._entry.step):
                    return pin.name
        return None

    def _played(self, held: PoolRecord) -> list[Action]:
        entry = self._entry
        games = entry.games - held.games
        if games <= 0:
            return []
        mu, sigma = entry.rating.mu, entry.rating.sigma
        if held.frozen:
            mu, sigma = held.mu, held.sigma
        wins = max(0, entry.wins - held.wins)
        rated = Rated(version=entry.version, mu=mu, sigma=sigma, games=games, wins=wins)
        return [RateMatch(match=f"import/{entry.version}/{entry.games}", ratings=(rated,))]

    def _taken(self, run: RunManifest, found: str) -> Conflict:
        return Conflict(
            "the run's pool has given this version to another model",
            where=f"{run.run_id}/pool/v{self._entry.version:04d}",
            found=found,
            hint="Versions are never used twice: import the folder into another run.",
        )


def _sound(run: RunManifest, record: CheckpointRecord) -> CheckpointRecord:
    return sound(run, record.n, f"{run.run_id}/{record.manifest.short}")
