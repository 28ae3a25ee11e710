"""One save as a commit: its states, its preconditions, and its actions.

The checkpoint, the evictions that it causes, its entry in the pool and its entries in streams are
in one slot, so they become visible together or not at all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from holdfast.backends.escape import printable
from holdfast.registry.curation import PER_SAVE, PlacedThinnings, place_thinnings
from holdfast.registry.curation.pool import (
    candidate_of,
    find_entry,
    pool_rules,
    promotion,
    rating_of,
)
from holdfast.registry.curation.streams import PlannedAppend, plan_append
from holdfast.registry.errors import Conflict, Hint, IncompatibleState
from holdfast.registry.history import (
    PlacedState,
    WriterToken,
    check_not_dropped,
    choose_tier,
    ended_holds,
    format_time,
    has_policies,
    may_thin,
    own_time_ms,
    plan_retention,
    store_time_ms,
)
from holdfast.registry.history.actions import Action, AddCheckpoint, ReportMetrics, SetStatus
from holdfast.registry.history.replay import CheckpointRecord, NeedsHistory, RunManifest
from holdfast.registry.objects import Component
from holdfast.registry.saving.earlier_steps import EarlierSteps
from holdfast.registry.saving.save_request import PlannedSave, SaveRequest, without_landed
from holdfast.registry.spec import inference_parts
from holdfast.registry.values import Digest, float_to_hex
from holdfast.registry.writing import (
    NewCommit,
    Stale,
    StateWriter,
    Written,
    after_commit,
    cut_state,
)

_LOGGER = logging.getLogger("holdfast")

#: Writes a state of a save: called with its name ("" for the state itself, or that of a companion),
#: the states that it can be stored against, and the patterns of watched tensors.
WriteState = Callable[[str, Sequence[PlacedState], Sequence[str]], Written]


@dataclass(frozen=True, slots=True)
class WrittenSave:
    """A save whose states are on the store."""

    main: Written  # the state
    companions: Mapping[str, Written]  # the companions by name
    model: Written | None = None  # the model for the pool, cut out of the state
    appends: Sequence[PlannedAppend] = ()  # the new segments of streams
    failed: Sequence[SaveRequest] = ()  # failed saves whose entries the segments have
    repeats: bool = False  # whether the run had the same state at this step: it wrote nothing else

    @property
    def digest(self) -> Digest:
        """The id of the state."""
        return self.main.state.manifest.digest

    @property
    def components(self) -> Mapping[str, Component]:
        """The components of the state."""
        return self.main.state.manifest.components

    @property
    def states(self) -> list[Written]:
        """Every state that the commit names."""
        if self.repeats:
            return [self.main]  # companions were committed with the first save
        model = [] if self.model is None else [self.model]
        segments = [append.written for append in self.appends]
        return [self.main, *self.companions.values(), *model, *segments]


class SaveCommit(NewCommit):
    """The commit of a save."""

    #: The save, once its states are written; replaced if they are written again.
    written: WrittenSave

    def __init__(
        self,
        writer: StateWriter,
        writer_token: WriterToken,
        save: PlannedSave,
        earlier: EarlierSteps,
        *,
        write_state: WriteState | None = None,
        failed: Sequence[SaveRequest] = (),
    ) -> None:
        self._writer = writer
        self._writer_token = writer_token
        self._save = save
        self._request = save.request
        self._earlier = earlier
        self._write_state = write_state or self._write_here
        self._failed = failed
        self._replanned = False
        self.checkpoint_n = -1  # commit number of the checkpoint, once the commit has landed
        #: The phases whose evictions were decided without a best checkpoint.
        self.unrated: Mapping[str, str] = {}
        self._thinned = PlacedThinnings()

    def check(self, run: RunManifest) -> None:
        """Refuse a save into a run that was dropped or completed, or that another trainer has."""
        self._writer_token.recognize(run)
        self._writer_token.check_allowed(run, takes_over=self._request.takes_over)
        if self._request.takes_over:
            self._writer_token.warn_of_owner(run)

    def write_states(self) -> Sequence[Written]:
        """Write all states that the commit names."""
        writer, run = self._writer, self._writer.log.run
        bases = writer.choose_bases(self._writer_token.base_order(run))
        main = self._write_state("", bases, run.spec.finite)
        if self._request.takes_over:
            self.check_changes(main, run, bases)
        if self._same_step(run) is not None:
            # The known checkpoint may have been evicted since this handle read the log.
            run = writer.log.refresh()
            check_not_dropped(run)
        companions = {
            name: self._write_state(name, writer.choose_bases(_companions(run, name)), ())
            for name in self._save.companions
        }
        return self.write_others(main, companions, run)

    def write_others(
        self, main: Written, companions: Mapping[str, Written], run: RunManifest
    ) -> Sequence[Written]:
        """Write the states that are made of a state and its companions; return all states."""
        writer, known = self._writer, self._same_step(run)
        self._thinned = PlacedThinnings()  # those of an earlier attempt do not count
        if known is not None and known.manifest == main.state.manifest.digest:
            self.written = WrittenSave(main, companions, repeats=True)
            return self.written.states
        model = self._cut_model(main, run)
        claimed = self._claimed(run)
        failed = without_landed(self._failed, lambda one: self._has_landed(one, run))
        # The second attempt does not merge segments, so other writers cannot invalidate them.
        appends = [
            plan_append(writer, claimed, name, entries, merge=not self._replanned)
            for name, entries in self._request.after(failed).streams.items()
            if entries
        ]
        self._replanned = True
        self.written = WrittenSave(main, companions, model, appends, failed)
        if may_thin(run.spec) and known is None:
            saved = after_commit(claimed, [self._addition(claimed)])
            plan = plan_retention(saved, int(time.time() * 1000))
            self._thinned = place_thinnings(writer, saved, plan, PER_SAVE)
        return [*self.written.states, *self._thinned.states]

    def _write_here(
        self, name: str, bases: Sequence[PlacedState], watched: Sequence[str]
    ) -> Written:
        state = self._save.companions[name] if name else self._save.narrowed()
        return self._writer.write(state, bases, self._request.storing, watched)

    def _has_landed(self, request: SaveRequest, run: RunManifest) -> bool:
        return bool(run.at_step(self._save.phase, request.step))

    def check_changes(self, main: Written, run: RunManifest, bases: Sequence[PlacedState]) -> None:
        """Compare the state with earlier steps: those of this handle, and the newest checkpoint."""
        phase, step = self._save.phase, self._request.step
        is_behind = self._writer_token.is_behind
        newest = next((one for one in run.newest_first(phase) if not is_behind(one)), None)
        if newest is not None:
            for base in bases:
                if base.manifest.digest == newest.manifest:
                    self._earlier.remember(phase, newest.step, base.manifest.components)
        components = main.state.manifest.components
        self._earlier.check(phase, step, components, run.spec.must_change, self._where)

    def actions(self, run: RunManifest) -> Sequence[Action]:
        """Return the actions of the commit for a run."""
        claims = self._claim(run)
        known = self._same_step(run)
        digest = self.written.digest
        if known is not None:
            if known.manifest != digest:
                if self._request.takes_over:
                    self._writer_token.check_alone(run)
                raise self._step_taken(known, digest)
            self._check_companions(known)
            if self._thinned.states:
                raise Stale
            self.checkpoint_n = known.n
            return [*claims, *_new_metrics(known, self._save.metrics)]
        if self.written.repeats or any(self._has_landed(one, run) for one in self.written.failed):
            # The checkpoint that it repeats was evicted meanwhile, or one came that seemed lost.
            raise Stale
        self._check_continues(run)
        claimed = after_commit(run, claims)
        self._check_phase(claimed)
        self.checkpoint_n = run.commits
        if self._request.takes_over:
            self._writer_token.attempt(run.commits, digest)
        actions = [*claims, *(append.action(claimed) for append in self.written.appends)]
        actions.append(self._addition(claimed))
        actions += self.holds_over(run)
        saved = after_commit(run, actions)
        actions += self._promotion(saved)
        if has_policies(run.spec):
            plan = plan_retention(saved, int(time.time() * 1000))
            self.unrated = plan.unrated
            actions += [*plan.actions(), *self._thinned.actions(saved, plan)]
        return actions

    def warn_of_nonfinite(self) -> None:
        """Warn of a checkpoint that is held back."""
        nonfinite = self.written.main.nonfinite
        if nonfinite and not self._request.allow_nonfinite:
            _LOGGER.warning(
                "%s: step %d is recorded and held back: NaN or infinity in %s",
                self._writer.log.run_id,
                self._request.step,
                printable(", ".join(nonfinite)),
            )

    def holds_over(self, run: RunManifest) -> Sequence[Action]:
        """Return the actions that remove the holds whose time is over, so that retention goes on.

        The store is asked for its time only when by this machine's clock one is over.
        """
        if not has_policies(run.spec) or not ended_holds(run, own_time_ms):
            return ()
        return ended_holds(run, partial(store_time_ms, self._writer.store, self._writer.log))

    def _claim(self, run: RunManifest) -> list[Action]:
        if self._request.takes_over:
            return self._writer_token.claim(run)
        trains = self._request.follows is not None and run.status != "running"
        return [SetStatus(status="running")] if trains else []

    def _claimed(self, run: RunManifest) -> RunManifest:
        """Return the run as it is once this trainer has taken it over."""
        try:
            return after_commit(run, self._claim(run))
        except NeedsHistory:
            # Not `log.recall()`: any refresh, also while appends are planned, makes it compact.
            run = self._writer.log.history()
            return after_commit(run, self._claim(run))

    def _same_step(self, run: RunManifest) -> CheckpointRecord | None:
        """Return the checkpoint of this step on the current line of training."""
        for checkpoint in run.at_step(self._save.phase, self._request.step):
            if not (self._request.takes_over and self._writer_token.is_behind(checkpoint)):
                return checkpoint
        return None

    def _check_companions(self, known: CheckpointRecord) -> None:
        """Refuse a repeated save that has other companions than the first."""
        for name, digest in self._given.items():
            if known.companions.get(name) != digest:
                before = known.companions.get(name)
                raise Conflict(
                    "the step was saved with another companion",
                    where=f"{self._where}, companion {name}",
                    expected=before.short if before else "none",
                    found=digest.short,
                    hint="Pass a companion with the first save of a step.",
                )

    def _check_continues(self, run: RunManifest) -> None:
        """Refuse a training that does not go on from the newest checkpoint of the run."""
        self._check_follows(run)
        newest = run.latest(self._save.phase)
        begins = self._request.takes_over and self._writer_token.begins
        if begins and newest is not None and self._request.step < newest.step:
            self._writer_token.check_alone(run)
            raise Conflict(
                "the run already has later steps, and this trainer restored nothing",
                where=self._where,
                expected=f"a step after {newest.step}",
                hint=Hint(
                    "Call `run.restore()` first, or create another run.",
                    "Give a later step, or another run.",
                ),
            )

    def _check_follows(self, run: RunManifest) -> None:
        """Refuse a push whose program has not seen the newest checkpoint."""
        asked, found = self._request.follows, next(run.newest_first(), None)
        if asked is None or asked == (-1 if found is None else found.step):
            return
        raise Conflict(
            "another process has continued this run",
            where=self._where,
            expected="no checkpoint yet" if asked < 0 else f"step {asked} as the newest",
            found="no checkpoint" if found is None else f"step {found.step}",
            hint="Stop this one. Started again, it continues from the newest checkpoint.",
        )

    def _check_phase(self, run: RunManifest) -> None:
        """Refuse a save in an earlier phase, or in a phase that needs a transition first."""
        phase, before = self._save.phase, run.phase
        order = [one.name for one in run.spec.phases]
        if before == phase or phase not in order:
            return
        if before is None and not self._request.takes_over:
            return  # a push may begin in any phase
        if before in order and order.index(phase) < order.index(before):
            raise Conflict(
                "this phase is over",
                where=self._where,
                expected=f"phase {before} or a later one",
                hint=Hint(
                    "To go back, call `run.restore(at=...)` with a checkpoint of that phase.",
                    "Use another run.",
                ),
            )
        declared = any(one.to_phase == phase for one in run.spec.transitions)
        if declared and run.entered(phase) is None:
            raise Conflict(
                "the run's preset declares a transition into this phase",
                where=self._where,
                expected="a transition first, which checks and records the change",
                hint=Hint(
                    f"Call run.phases.transition({phase!r}) first.",
                    "The training program makes it.",
                ),
            )

    def _addition(self, run: RunManifest) -> AddCheckpoint:
        save, request = self._save, self._request
        phase = run.spec.phase(save.phase)
        tier = request.tier or choose_tier(run, phase, save.metrics, save.counters)
        manifest, nonfinite = self.written.main.state.manifest, self.written.main.nonfinite
        held_back = bool(nonfinite) and not request.allow_nonfinite
        return AddCheckpoint(
            manifest=manifest.digest,
            phase=save.phase,
            step=request.step,
            metrics=dict(save.metrics),
            meta=request.meta,
            size_bytes=manifest.nbytes,
            tier=tier,
            companions=self._all_companions(run) or None,
            commit_keys=save.commit_keys,
            nonfinite=nonfinite or None,
            held_back=held_back or None,
        )

    @property
    def _given(self) -> dict[str, Digest]:
        return {name: one.state.manifest.digest for name, one in self.written.companions.items()}

    def _all_companions(self, run: RunManifest) -> dict[str, Digest]:
        """Return the given companions, and for the other declared ones the newest known ones."""
        found = self._given
        entered = run.entered(self._save.phase)
        for name in run.spec.phase(self._save.phase).companions:
            if name in found:
                continue
            known = next(_companions(run, name, self._save.phase), None)
            if known is None and entered is not None:
                known = entered.companions.get(name)
            if known is None:
                raise IncompatibleState(
                    "a checkpoint of this phase needs a companion, and none is known",
                    where=self._where,
                    expected=name,
                    hint=Hint(
                        f"Pass companions={{{name!r}: state}} once; later saves use it too.",
                        "A training program gives it once; later saves use it too.",
                    ),
                )
            found[name] = known
        return found

    def _cut_model(self, main: Written, run: RunManifest) -> Written | None:
        """Make the model for the pool, if the phase promotes on save."""
        rules, spec = pool_rules(run), run.spec
        if (
            not self._request.promotes
            or not rules.promote_on_save
            or rules.phase != self._save.phase
            or main.nonfinite
        ):
            return None
        writer, state = self._writer, main.state
        names = inference_parts(spec, state.manifest.components, where=self._where)
        return cut_state(writer.store, writer.objects, state, names)

    def _promotion(self, run: RunManifest) -> list[Action]:
        model = self.written.model
        if model is None:
            return []
        candidate = candidate_of(run.record(self.checkpoint_n), model.state.manifest.digest)
        if find_entry(run, candidate) is not None:
            return []
        return promotion(run, candidate, rating_of(run, self._save.metrics))

    @property
    def _where(self) -> str:
        run_id = self._writer.log.run_id
        return f"{run_id}: phase {self._save.phase}, step {self._request.step}"

    def _step_taken(self, known: CheckpointRecord, digest: Digest) -> Conflict:
        return Conflict(
            "the step has another state already",
            where=self._where,
            expected=f"the state of {known.manifest.short}, saved at {format_time(known.time_ms)}",
            found=digest.short,
            hint=Hint(
                "To continue from an earlier checkpoint, call `run.restore()` first; it "
                "supersedes the later ones. Otherwise use another step, phase or run.",
                "Use another step, phase or run.",
            )
            if self._request.takes_over
            else "Use another step, phase or run, or `holdfast push FILE RUN --artifact NAME`.",
        )


def _companions(run: RunManifest, name: str, phase: str | None = None) -> Iterator[Digest]:
    """Yield the companions of a name of kept checkpoints, newest first."""
    found = (record.companions.get(name) for record in run.newest_first(phase))
    return (digest for digest in found if digest is not None)


def _new_metrics(known: CheckpointRecord, given: Mapping[str, float]) -> list[Action]:
    """Return the action for the metrics of a repeated save that its checkpoint does not have."""
    metrics = {
        name: value
        for name, value in given.items()
        if name not in known.metrics
        or float_to_hex(known.metrics[name]) != float_to_hex(value)  # NaN equals NaN here
    }
    return [ReportMetrics(checkpoint=known.n, metrics=metrics)] if metrics else []
