"""Merges: a new checkpoint from averages and parts of others, committed like a push.

This module finds the sources, writes the meta of the merge and commits it.
`holdfast.registry.merging.merge_plan` decides what may be merged, and
`holdfast.registry.merging.mixing` computes the bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.backends.escape import printable, quoted
from holdfast.registry.errors import Conflict, InvalidInput, NotFound
from holdfast.registry.history.actions import Action
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.log_values import encode_plain
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.history.state_reader import PlacedState, StateReader
from holdfast.registry.history.writer_token import WriterToken, check_not_dropped
from holdfast.registry.loading.checkpoint import Checkpoint
from holdfast.registry.loading.stored import Stored, commit_keys
from holdfast.registry.merging.arguments import (
    check_average,
    check_pick,
    check_sources,
    check_weights,
    shown,
)
from holdfast.registry.merging.merge_plan import MergeInput, MergePlan, plan_merge
from holdfast.registry.merging.mixing import Mixing
from holdfast.registry.pytree import FlatState
from holdfast.registry.storage.codecs import COMPRESSIONS
from holdfast.registry.storage.manifest import Component
from holdfast.registry.training.earlier_steps import EarlierSteps
from holdfast.registry.training.save_commit import SaveCommit
from holdfast.registry.training.save_request import PreparedSave, SaveRequest, prepare_save
from holdfast.registry.writing.change import Stale
from holdfast.registry.writing.committer import Committer
from holdfast.registry.writing.placing import Written

#: The key of a checkpoint's meta that names the sources of a merge.
MERGE = "merge"

_LOGGER = logging.getLogger("holdfast")


def merge(
    committer: Committer,
    sources: Iterable[Stored],
    request: SaveRequest,
    average: str | Iterable[str] | None,
    weights: Sequence[float] | None,
    pick: Mapping[str, Stored] | None,
    meta: Mapping[str, object] | None,
) -> Checkpoint:
    """Make a checkpoint of a run from stored states of its registry; see `Run.merge`."""
    wanted = _Wanted(committer, sources, average, weights, pick)
    own = _own_meta(meta)
    wanted.check_held()
    plan = wanted.plan()
    request.meta = encode_plain({**own, MERGE: wanted.provenance(plan)}, "meta")
    save = prepare_save(plan.state, request, committer.log.run)
    commit = _MergeCommit(committer, save, wanted, plan)
    committer.commit(commit)
    made = committer.log.knowing(commit.outcome).by_n[commit.outcome]
    return Checkpoint(committer.store, committer.log, made)


class _Wanted:
    """The checked arguments of a merge, and the states as this registry has them."""

    def __init__(
        self,
        committer: Committer,
        sources: Iterable[Stored],
        average: str | Iterable[str] | None,
        weights: Sequence[float] | None,
        pick: Mapping[str, Stored] | None,
    ) -> None:
        self._committer = committer
        self._logs: dict[str, RunLog] = {committer.log.run_id: committer.log}
        given = check_sources(sources)
        self.average = check_average(average)
        self.weights = check_weights(weights, len(given))
        self.count = len(given)
        self.given = [*given]
        self.pick: dict[str, int] = {}
        for name, of in check_pick(pick).items():
            if of not in self.given:
                self.given.append(of)
            self.pick[name] = self.given.index(of)
        self.stored = [self._find(one) for one in self.given]

    def plan(self) -> MergePlan:
        inputs = [
            MergeInput(given.ref, stored.manifest.kind, _parts(given, stored))
            for given, stored in zip(self.given, self.stored, strict=True)
        ]
        return plan_merge(inputs, self.count, self.average, self.pick)

    def provenance(self, plan: MergePlan) -> dict[str, Any]:
        """Return the record of the merge for the checkpoint's meta."""
        record: dict[str, Any] = {"sources": [_name(one) for one in self.given[: self.count]]}
        if plan.averages:
            record["weights"] = list(self.weights)
        if self.average:
            record["average"] = self.average
        if self.pick:
            record["pick"] = {name: _name(self.given[of]) for name, of in self.pick.items()}
        return record

    def check_held(self) -> None:
        """Check that every source is held now.

        Raises:
            Conflict: One was evicted, or its run dropped.
            NotFound: This registry never held it.
        """
        for log in self._logs.values():
            log.refresh()
        for given in self.given:
            run = self._logs[given.run_id].run
            if given.digest in run.held:
                continue
            if self._logs[given.run_id].place_of(given.digest) is None:
                raise self._unknown(given, f"a run of {run.commits} commits")
            check_not_dropped(run)
            raise Conflict(
                "a merge needs states that their runs hold",
                where=given.ref,
                found="evicted from its run",
                hint="`holdfast undo` brings an evicted checkpoint back until it is collected.",
            )

    def _find(self, given: object) -> StateReader:
        """Return the same state in this registry, whichever registry the given one is from."""
        if not isinstance(given, Stored):
            raise InvalidInput("a merge is made of checkpoints", found=shown(given))
        log = self._logs.get(given.run_id)
        if log is None:
            log = self._logs[given.run_id] = RunLog(self._committer.store, given.run_id)
            log.open()
        if not log.run.commits:
            raise self._unknown(given, "no such run")
        return StateReader(self._committer.store, log, given.digest, given.ref)

    def _unknown(self, given: Stored, found: str) -> NotFound:
        return NotFound(
            "this state is not in the registry that is to hold the merge",
            where=f"{self._committer.store.backend.url}: {given.ref}",
            expected=given.digest.short,
            found=found,
            hint="Bring its run here with `holdfast sync` first.",
        )


class _MergeCommit(SaveCommit):
    """A merge under way: a save whose state is made of stored ones."""

    def __init__(
        self, committer: Committer, save: PreparedSave, wanted: _Wanted, plan: MergePlan
    ) -> None:
        # It takes nothing over, so it is compared with no step.
        super().__init__(committer, WriterToken(committer.log.run_id), save, EarlierSteps())
        self._wanted = wanted
        self._tensors = plan.tensors
        self._is_written = False

    def write_states(self) -> Sequence[Written]:
        """Put the objects of the commit on the store."""
        self._is_written = False
        self._wanted.check_held()
        return super().write_states()

    def actions(self, run: RunManifest) -> Sequence[Action]:
        """Return the actions of the commit for the run."""
        if not self._is_written:
            raise Stale  # a source was gone before all of it was read; `write_states` raises
        return super().actions(run)

    def _write(
        self, state: FlatState, bases: Sequence[PlacedState], watched: Sequence[str] = ()
    ) -> Written:
        committer = self._committer
        # Chunks of states that the run holds need no check while it holds them.
        first = [one.digest for one in self._wanted.stored]
        near = committer.choose_bases([*first, *(base.manifest.digest for base in bases)])
        mixed = Mixing(
            committer.store,
            committer.writer,
            self._wanted.stored,
            self._wanted.weights,
            state,
            self._tensors,
            watched,
            allow_nonfinite=self._request.allow_nonfinite,
        ).store(near, self._codec())
        self._is_written = True
        if mixed.nonfinite and not self._request.allow_nonfinite:
            _LOGGER.warning(
                "%s: step %d is recorded and held back: NaN or infinity in %s",
                committer.log.run_id,
                self._request.step,
                printable(", ".join(mixed.nonfinite)),
            )
        return replace(mixed.written, nonfinite=mixed.nonfinite)

    def _codec(self) -> str:
        config = self._committer.store.config
        every = config.keyframe_every or 1
        chosen = self._request.compression or config.compression
        return COMPRESSIONS[chosen or ("none" if every == 1 else "zstd")]


def _parts(given: Stored, stored: StateReader) -> dict[str, Component]:
    """Return the components of a state, keys that its commit keeps included."""
    parts = dict(stored.manifest.components)
    kept = commit_keys(given)
    if kept is None:
        return parts
    plain = dict(kept.values["d"])
    parts |= {name: Component.build(value, ()) for name, value in plain.items()}
    return {name: parts[name] for name in kept.order}


def _name(one: Stored) -> dict[str, str]:
    return {"ref": one.ref, "id": str(one.digest)}


def _own_meta(meta: object) -> dict[str, Any]:
    """Return the meta that the caller gives.

    Raises:
        InvalidInput: It is no dict, or has the key of the merge's own record.
    """
    if meta is None:
        return {}
    if not isinstance(meta, Mapping) or MERGE in meta:
        raise InvalidInput(
            "the meta of a merge also records its sources",
            where="meta",
            expected=f"a dict without the key {MERGE!r}",
            found=quoted(meta)[:80],
        )
    return dict(meta)
