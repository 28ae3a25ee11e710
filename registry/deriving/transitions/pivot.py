"""Pivot: change the policy of training within its phase, by the preset's table, in one commit.

The commit is a named `phase.enter` from the phase to itself, with the archived streams. A state
that is restored after it has the same changes, until the next save.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from holdfast.registry.deriving.transitions.execution import Transitioned, archive_label, recorded
from holdfast.registry.deriving.transitions.rows import Initialise, Table
from holdfast.registry.errors import NotFound
from holdfast.registry.history import check_name, encode_plain, warn_of_secrets
from holdfast.registry.history.actions import Action, ArchiveStream, EnterPhase
from holdfast.registry.history.replay import CheckpointRecord, PhaseRecord, RunManifest
from holdfast.registry.loading import Checkpoint, load_to_train
from holdfast.registry.saving import RunHandle
from holdfast.registry.spec import Pivot, pivot_child
from holdfast.registry.values import require_first_rank
from holdfast.registry.writing import Committer, NewCommit, Stale, StateWriter, Written

_LOGGER = logging.getLogger("holdfast")


def pivot(
    handle: RunHandle, policy: Policy, initialise: Initialise | None, map_location: object
) -> Transitioned | None:
    """Pivot, unless the run did so under this name; then return `None`. See `RunPhases.pivot`."""
    require_first_rank()
    check_name(policy.name, "a pivot")
    handle.log.refresh()
    commit = _PivotCommit(handle.committer.writer, policy, initialise, map_location)
    handle.saver.commit(commit)
    return commit.outcome


class Policy:
    """Name, configuration and notes of a pivot."""

    def __init__(self, name: str, config: object, meta: object) -> None:
        self.name = name
        self.config = None if config is None else encode_plain(config, "config")
        self.meta = None if meta is None else encode_plain(meta, "meta")
        warn_of_secrets(config, stacklevel=4)

    def check_known(self, run: RunManifest, known: PhaseRecord) -> None:
        """Warn if the run pivoted under this name to another configuration."""
        if self.config is not None and known.config != self.config:
            _LOGGER.warning(
                "%s: it pivoted to %s before, with another configuration, which stays",
                run.run_id,
                self.name,
            )


def pivoted(
    committer: Committer, checkpoint: Checkpoint, state: Any, initialise: Initialise | None
) -> Transitioned:
    """Return a state as the last pivot changes it."""
    run = committer.log.run
    ordinal = _pivots_in(run, checkpoint.handle.record.phase)
    return _changed(run, checkpoint, state, initialise, ordinal)


def _pivots_in(run: RunManifest, phase: str) -> int:
    return sum(one.to_phase == phase for one in run.pivots)


class _PivotCommit(NewCommit):
    """The commit of a pivot.

    Its source is the newest checkpoint after the trainer has taken the run over, which only
    `actions` sees. So the first `write_states` loads nothing, and `actions` raises `Stale`.
    """

    def __init__(
        self, writer: StateWriter, policy: Policy, initialise: Initialise | None, device: object
    ) -> None:
        self._writer = writer
        self._policy, self._name = policy, policy.name
        self._initialise = initialise
        self._map_location = device
        self._source: int | None = None
        self._ordinal = 0
        #: The result; `None` if the run pivoted under this name before.
        self.outcome: Transitioned | None = None

    def write_states(self) -> Sequence[Written]:
        """Load the source and change it; the commit names no new state."""
        if self._source is not None and self.outcome is None:
            log, run = self._writer.log, self._writer.log.run
            record = log.knowing(self._source).by_n[self._source]
            checkpoint = Checkpoint(self._writer.store, log, record)
            state = load_to_train(checkpoint, self._map_location)
            self.outcome = _changed(run, checkpoint, state, self._initialise, self._ordinal)
        return ()

    def actions(self, run: RunManifest) -> Sequence[Action] | None:
        """Return the actions; `None` if the run pivoted under this name before."""
        known = next((one for one in run.pivots if one.name == self._name), None)
        if known is not None:
            self._policy.check_known(run, known)
            self.outcome = None
            return None
        source = _source(run, self._name)
        if source.n != self._source or self.outcome is None:
            self._source, self.outcome = source.n, None
            self._ordinal = _pivots_in(run, source.phase) + 1
            raise Stale
        enter = EnterPhase(
            from_phase=source.phase,
            to_phase=source.phase,
            source="latest",
            manifest=source.manifest,
            rows=recorded(self.outcome.report),
            name=self._name,
            config=self._policy.config,
            meta=self._policy.meta,
        )
        return [enter, *_archives(run, self._name)]


def _source(run: RunManifest, name: str) -> CheckpointRecord:
    found = None if run.phase is None else run.latest(run.phase)
    if found is None:
        raise NotFound(
            "there is no checkpoint to pivot from",
            where=f"{run.run_id}: pivot {name}",
            expected=f"a checkpoint of phase {run.phase}" if run.phase else "a checkpoint",
            hint="Save the state of training first.",
        )
    return found


def _archives(run: RunManifest, name: str) -> list[ArchiveStream]:
    rules = run.spec.pivot or Pivot()
    return [
        ArchiveStream(stream=stream.name, label=archive_label(stream, name))
        for stream in run.streams
        if stream.count
        and stream.lifetime == "resettable"
        and (rules.archives is None or stream.name in rules.archives)
    ]


def _changed(
    run: RunManifest,
    checkpoint: Checkpoint,
    state: Any,
    initialise: Initialise | None,
    ordinal: int,
) -> Transitioned:
    """Carry out the rows of the preset's pivot."""
    table = Table((run.spec.pivot or Pivot()).rows, (), state, rest="carry")
    hint = "Nothing was changed. The run's preset declares the pivot."
    table.check("the pivot", checkpoint.ref, hint)
    phase = checkpoint.handle.record.phase
    return Transitioned(
        state=table.carry_out(initialise or {}).state,
        companions={},
        seeds={
            name: pivot_child(run.spec, run.seed, phase, index or 0, ordinal)
            for name, index in table.reseeded.items()
        },
        checkpoint=checkpoint,
        report=table.applied,
    )
