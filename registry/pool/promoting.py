"""The commit of one promotion: cut the model, check the rules, and add it to the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.registry.history.actions import Action
from holdfast.registry.history.replay import CheckpointRecord, PoolRecord, RunManifest
from holdfast.registry.loading.stored import Stored
from holdfast.registry.names.pins import sound
from holdfast.registry.pool.promotion import (
    Candidate,
    find_entry,
    own_rating,
    promotion,
    rating_of,
)
from holdfast.registry.pool.ratings import DEFAULT, Rating
from holdfast.registry.spec.requirements import inference_parts
from holdfast.registry.storage.manifest import Manifest
from holdfast.registry.values.digest import Digest
from holdfast.registry.writing.change import NewCommit, Stale
from holdfast.registry.writing.committer import Committer
from holdfast.registry.writing.placing import Written


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a model.

    Attributes:
        checkpoint: The checkpoint.
        gate: The name of its gate, where it enters the pool as one.
    """

    checkpoint: CheckpointRecord
    gate: str | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """The options of a promotion.

    Attributes:
        frozen: Whether the entry is never evicted and never rated again.
        mu: Its estimated skill; inherited without it.
        sigma: The uncertainty of the skill; inherited without it.

    Raises:
        InvalidInput: A number is no rating.
    """

    frozen: bool = False
    mu: float | None = None
    sigma: float | None = None

    def __post_init__(self) -> None:
        self.over(DEFAULT)

    def over(self, inherited: Rating) -> Rating:
        """Return the inherited rating, with the given numbers in place of its own."""
        mu = inherited.mu if self.mu is None else self.mu
        return Rating(mu, inherited.sigma if self.sigma is None else self.sigma)


class PromotionCommit(NewCommit):
    """The commit of a promotion.

    Args:
        committer: The committer of the run.
        source: Finds the source in the run, or raises.
        terms: The options.

    Attributes:
        version: Version of the entry, once the commit has landed.
    """

    def __init__(
        self, committer: Committer, source: Callable[[RunManifest], Source], terms: Terms
    ) -> None:
        self._committer = committer
        self._source = source
        self._terms = terms
        self._cut_of: Digest | None = None
        self._model: Digest
        self._is_cut = False
        self.version = -1

    def write_states(self) -> Sequence[Written]:
        """Write the manifest of the model, unless it plays or the run holds it already."""
        committer, run = self._committer, self._committer.log.run
        source = self._source(run)
        self._cut_of = None
        if self._playing(run, source) is not None:
            return ()
        record = _sound(run, source.checkpoint)
        where = f"{run.run_id}/{record.manifest.short}"
        whole = Stored(committer.store, committer.log, record.manifest, record.manifest.short)
        parts = whole.manifest.components
        names = inference_parts(run.spec, parts, where=where)
        model = Manifest(whole.manifest.kind, {name: parts[name] for name in names})
        self._cut_of, self._model = record.manifest, model.digest
        self._is_cut = self._model not in run.held
        return [committer.cut(record.manifest, names)] if self._is_cut else []

    def actions(self, run: RunManifest) -> Sequence[Action] | None:
        """Return the actions that add the model, unless an equal entry plays."""
        source = self._source(run)
        playing = self._playing(run, source)
        if playing is not None:
            self.version = playing.version
            return None
        record = _sound(run, source.checkpoint)
        if record.manifest != self._cut_of or not (self._is_cut or self._model in run.held):
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

    def _playing(self, run: RunManifest, source: Source) -> PoolRecord | None:
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


def _sound(run: RunManifest, record: CheckpointRecord) -> CheckpointRecord:
    return sound(run, record.n, f"{run.run_id}/{record.manifest.short}")
