"""The actions of a promotion: the entry, its rating, and the entries that it replaces. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain

from holdfast.registry.errors import InvalidInput
from holdfast.registry.history.actions import Action, EvictEntries, Promote
from holdfast.registry.history.replay import CheckpointRecord, Forgotten, PoolRecord, RunManifest
from holdfast.registry.pool.ratings import DEFAULT, Rating, inherited
from holdfast.registry.spec import Pool
from holdfast.registry.values.digest import Digest


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that is to enter the pool.

    Attributes:
        manifest: Id of its inference-only state.
        phase: Phase of its source.
        step: Step of its source.
        checkpoint: Commit number of its source.
        gate: The gate of its source, if it is one.
        frozen: Whether it is never evicted and never rated again.
    """

    manifest: Digest
    phase: str
    step: int
    checkpoint: int | None
    gate: str | None = None
    frozen: bool = False


def pool_rules(run: RunManifest) -> Pool:
    """Return the rules of a run's pool."""
    return run.spec.pool or _undeclared()


@cache
def _undeclared() -> Pool:
    """Return the rules of a pool without a preset; made late to keep `import holdfast` light."""
    return Pool(phase="any", size=20)


def promotion(run: RunManifest, candidate: Candidate, rating: Rating) -> list[Action]:
    """Return the actions that add a model to the pool and evict the oldest entries of a full one.

    The rating is inherited. Its uncertainty is raised to a third of the default (document of Hydra,
    Rating integration), unless the entry is frozen.
    """
    entered = rating if candidate.frozen else inherited(rating)
    promote = Promote(
        version=run.next_version,
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
    leaving = playing[: max(0, len(playing) + 1 - size)]
    if not leaving:
        return [promote]
    versions = tuple(entry.version for entry in leaving)
    return [promote, EvictEntries(versions=versions, reason=f"oldest of more than {size}")]


def rating_of(run: RunManifest, metrics: Mapping[str, float]) -> Rating:
    """Return the rating of the training model: from these metrics, else from the newest with one.

    A value that is no rating (NaN, an uncertainty of 0) is ignored, so that no save fails for it.
    Superseded checkpoints are ignored too; evicted ones count.

    Raises:
        Forgotten: It needs the record of an evicted checkpoint, and the run is compact.
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
            raise Forgotten  # its metrics are no rating, and earlier ones are not known
        if not record.superseded:
            yield record.metrics
    if gone is not None:
        yield gone.metrics
        raise Forgotten


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
