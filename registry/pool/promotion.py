"""What a promotion says: the entry, its rating, and the entries that have to go for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from registry.actions import Action, EvictEntries, Promote
from registry.digest import Digest
from registry.pool.ratings import DEFAULT, Rating, inherited
from registry.spec import Pool
from registry.state import CheckpointRecord, PoolRecord, RunManifest

#: What a run without a declared pool has.
UNDECLARED = Pool(phase="any", size=20)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that is to enter the pool.

    Attributes:
        manifest: Id of its inference-only state.
        phase: Phase of its source.
        step: Step of its source.
        checkpoint: Commit number of its source.
        gate: Gate that it is cut from.
        frozen: Whether it is never evicted and never rated again.
    """

    manifest: Digest
    phase: str
    step: int
    checkpoint: int | None
    gate: str | None = None
    frozen: bool = False


def pool_rules(state: RunManifest) -> Pool:
    """Return the rules of a run's pool."""
    return state.spec.pool or UNDECLARED


def promotion(state: RunManifest, candidate: Candidate, rating: Rating) -> list[Action]:
    """Return the actions that let a model into the pool, oldest entries out for it.

    The rating is inherited; its uncertainty is raised to a third of the default
    (seeds/hydra.md, Rating integration), unless the entry is frozen: then it stays as it is.
    """
    entered = rating if candidate.frozen else inherited(rating)
    promote = Promote(
        version=state.next_version,
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
    size = pool_rules(state).size
    playing = [entry for entry in state.roster() if not entry.frozen]
    leaving = playing[: max(0, len(playing) + 1 - size)]
    if not leaving:
        return [promote]
    versions = tuple(entry.version for entry in leaving)
    return [promote, EvictEntries(versions=versions, reason=f"oldest of more than {size}")]


def rating_of(state: RunManifest, metrics: Mapping[str, float]) -> Rating:
    """Return a checkpoint's rating: by its metrics, else by the newest that has them."""
    rules = pool_rules(state)
    for known in (metrics, *(record.metrics for record in reversed(state.live()))):
        if rules.mu in known and rules.sigma in known:
            return Rating(known[rules.mu], known[rules.sigma])
    return DEFAULT


def find_entry(state: RunManifest, candidate: Candidate) -> PoolRecord | None:
    """Return the playing entry that was cut from the same source already."""
    for entry in state.roster():
        same_source = (entry.checkpoint, entry.gate) == (candidate.checkpoint, candidate.gate)
        if same_source and entry.manifest == candidate.manifest:
            return entry
    return None


def candidate_of(record: CheckpointRecord, manifest: Digest) -> Candidate:
    """Return a checkpoint as a candidate."""
    return Candidate(manifest, record.phase, record.step, record.n)
