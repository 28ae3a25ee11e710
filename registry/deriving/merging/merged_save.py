"""Merges: a new checkpoint from averages and parts of others, committed like a push.

This module finds the sources, writes the meta of the merge and commits it.
`holdfast.registry.deriving.merging.merge_plan` decides what may be merged, and
`holdfast.registry.deriving.merging.mixing` computes the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.backends.escape import quoted
from holdfast.registry.deriving.merging.merge_plan import MergeInput, MergePlan, plan_merge
from holdfast.registry.deriving.merging.mixing import Mixing
from holdfast.registry.errors import Conflict, InvalidInput, NotFound
from holdfast.registry.history import (
    MERGE,
    PlacedState,
    RunLog,
    StateReader,
    WriterToken,
    check_not_dropped,
    encode_plain,
)
from holdfast.registry.history.actions import Action
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.loading import Checkpoint, Stored, find_checkpoint
from holdfast.registry.objects import Component
from holdfast.registry.pytree import clip
from holdfast.registry.saving import (
    EarlierSteps,
    PlannedSave,
    SaveCommit,
    SaveRequest,
    plan_save,
    take_apart,
)
from holdfast.registry.writing import Committer, Stale, StateWriter, Written, codec_and_distance

#: A chunk is computed from those of all sources at once, so their number bounds memory.
MAX_SOURCES = 32
#: The sum of weights may differ from 1 by this, because decimals are rounded.
_NEAR_ONE = 1e-9


def check_sources(sources: object) -> list[Any]:
    """Return the sources as a list; its items are checked later."""
    return [sources] if isinstance(sources, Stored) else _listed(sources, "sources", "checkpoints")


def check_average(average: object) -> list[str] | None:
    """Return the names of components and patterns to average."""
    if average is None:
        return None
    expected = "names of components, or patterns of paths"
    names = [average] if isinstance(average, str) else _listed(average, "average", expected)
    for name in names:
        if not isinstance(name, str) or not name:
            raise InvalidInput("not a name", where="average", expected=expected, found=clip(name))
    return names


def check_pick(pick: object) -> dict[str, Any]:
    """Return the picks by name; their states are checked later."""
    if pick is None:
        return {}
    if not isinstance(pick, Mapping) or not all(isinstance(name, str) and name for name in pick):
        raise InvalidInput(
            "`pick` is not a dict of names",
            where="pick",
            expected="a dict of names of components, or patterns of paths, to checkpoints",
            found=clip(pick),
        )
    return dict(pick)


def check_weights(weights: object, count: int) -> tuple[float, ...]:
    """Return the weight of each source: equal ones where none are given."""
    if not 1 <= count <= MAX_SOURCES:
        raise InvalidInput(
            "not a number of sources that a merge takes",
            expected=f"1 to {MAX_SOURCES}",
            found=count,
            hint="Merge some of them first, with weights to match." if count else "",
        )
    if weights is None:
        return (1 / count,) * count
    given = _listed(weights, "weights", f"{count} finite numbers")
    numbers = [_number(one) for one in given]
    if len(given) != count or not all(map(math.isfinite, numbers)):
        raise InvalidInput(
            "a merge needs one weight for each source",
            where="weights",
            expected=f"{count} finite numbers",
            found=clip(given),
        )
    total = math.fsum(numbers)
    if abs(total - 1) > _NEAR_ONE:
        shares = ", ".join(repr(one / total) for one in numbers) if total else ""
        raise InvalidInput(
            "the weights do not sum to 1",
            where="weights",
            expected="numbers whose sum is 1; negative ones are allowed",
            found=f"{', '.join(map(repr, numbers))}: {total!r}",
            hint=f"Divided by their sum they are {shares}." if shares else "",
        )
    return tuple(numbers)


def _listed(given: object, where: str, expected: str) -> list[Any]:
    if not isinstance(given, Iterable):
        raise InvalidInput(
            f"{where} of a merge is not a list",
            where=where,
            expected=expected,
            found=clip(given),
            hint="Give a list.",
        )
    return list(given)


def _number(one: object) -> float:
    """Return a finite number as it is, and anything else as NaN."""
    if not isinstance(one, int | float) or isinstance(one, bool):
        return math.nan
    try:
        return float(one)
    except OverflowError:  # an integer beyond all floats
        return math.nan


def merge(
    committer: Committer,
    sources: Iterable[Stored],
    request: SaveRequest,
    average: str | Iterable[str] | None,
    weights: Sequence[float] | None,
    pick: Mapping[str, Stored] | None,
    meta: Mapping[str, object] | None,
) -> Checkpoint:
    """Make a checkpoint of a run from stored states of its registry; see `RunExchange.merge`."""
    if request.storing.precision is not None:
        raise InvalidInput(
            "a merge stores its tensors in the types of its sources",
            where="storing",
            expected="no precision",
        )
    wanted = _Wanted(committer, sources, average, weights, pick)
    own = _own_meta(meta)
    wanted.check_held()
    plan = wanted.plan()
    said = encode_plain({**own, MERGE: wanted.provenance(plan)}, "meta")
    flat = take_apart(plan.state, replace(request, meta=said))
    save = plan_save(flat, committer.log.run)
    commit = _MergeCommit(committer.writer, save, wanted, plan)
    committer.commit(commit)
    commit.warn_of_nonfinite()
    return find_checkpoint(committer.store, committer.log, commit.checkpoint_n)


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
        """Check that every source is held now."""
        for log in self._logs.values():
            log.refresh()
        for given in self.given:
            run = self._logs[given.run_id].run
            if given.digest in run.held and run.dropped is None:
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
            raise InvalidInput("a merge is made of checkpoints", found=clip(given))
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
        self, writer: StateWriter, save: PlannedSave, wanted: _Wanted, plan: MergePlan
    ) -> None:
        # It takes nothing over, so it is compared with no step.
        token = WriterToken(writer.log.run_id)
        super().__init__(writer, token, save, EarlierSteps(), write_state=self._mixed)
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

    def _mixed(self, name: str, bases: Sequence[PlacedState], watched: Sequence[str]) -> Written:
        assert not name  # a merge has no companions
        writer = self._writer
        # Chunks of states that the run holds need no check while it holds them.
        first = [one.digest for one in self._wanted.stored]
        near = writer.choose_bases([*first, *(base.manifest.digest for base in bases)])
        codec, _ = codec_and_distance(self._request.storing, writer.store.config)
        written = Mixing(
            writer.store,
            writer.objects,
            self._wanted.stored,
            self._wanted.weights,
            self._save.state,
            self._tensors,
            watched,
            allow_nonfinite=self._request.allow_nonfinite,
        ).store(near, codec)
        self._is_written = True
        return written


def _parts(given: Stored, stored: StateReader) -> dict[str, Component]:
    """Return the components of a state, keys that its commit keeps included."""
    parts = dict(stored.manifest.components)
    kept = given.handle.commit_keys()
    if kept is None:
        return parts
    plain = dict(kept.values["d"])
    parts |= {name: Component.build(value, ()) for name, value in plain.items()}
    return {name: parts[name] for name in kept.order}


def _name(one: Stored) -> dict[str, str]:
    return {"ref": one.ref, "id": str(one.digest)}


def _own_meta(meta: object) -> dict[str, Any]:
    """Return the meta that the caller gives."""
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
