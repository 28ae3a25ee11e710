"""How the training of a run begins, comes back and pivots: the checks and their order.

`holdfast.registry.saving.restoring` finds the checkpoint, `holdfast.registry.deriving.transitions`
carries out the tables of a preset; it is imported if they have something to do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from holdfast.registry.curation import pins
from holdfast.registry.errors import Conflict, InvalidInput, NotFound
from holdfast.registry.history import check_not_dropped
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.loading import Checkpoint, Stored, load_to_train
from holdfast.registry.saving import Restored, RunHandle, check_source, restore_newest

if TYPE_CHECKING:
    from holdfast.registry.deriving.transitions import (
        Initialise,
        Mode,
        Sources,
        Started,
        Transitioned,
    )

_LOGGER = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True)
class Resuming:
    """The part of `Run` that training begins and continues with; its methods are those of `Run`."""

    run: RunHandle
    compared: frozenset[str]  # what the caller gave to be compared with the run, and is equal

    def restore(
        self,
        at: Checkpoint | None,
        sources: Sources | None,
        map_location: object,
        check: Callable[[Checkpoint], None] | None = None,
    ) -> Restored | None:
        """Load a checkpoint that `check` accepts, and continue the run from there."""
        handle, run = self.run, self._read()
        if run.status == "completed":
            _LOGGER.warning(
                "%s: the run is completed and refuses saves; to train it further, call "
                "`run.set_status('running')`",
                run.run_id,
            )
        if at is None:
            restored = restore_newest(handle, map_location, check)
            if restored is None:
                return None
        else:
            at = self._checked(at, "run.restore")
            if check is not None:
                check(at)
            loaded = load_to_train(at, map_location)
            handle.line.resume_at(at)
            restored = Restored(loaded, at, ())
        if restored.pivot is not None:
            from holdfast.registry.deriving.transitions import pivoted

            changed = pivoted(self.run.committer, restored.checkpoint, restored.state, None)
            restored = replace(restored, state=changed.state)
        if sources is None and not run.spec.sources:
            return restored
        from holdfast.registry.deriving.transitions import find_stale

        stale = find_stale(self.run, restored.checkpoint, restored.state, sources)
        return replace(restored, stale=stale)

    def restore_into(
        self, target: object, at: Checkpoint | None, component: str | None, *, strict: bool
    ) -> Checkpoint | None:
        """Fill the tensors of a model, and continue the run from there."""
        handle, run = self.run, self._read()
        if at is None:
            kept = (one for one in handle.line.newest_first() if not one.record.held_back)
            newest = next(kept, None)
        else:
            newest = self._checked(at, "run.restore_into")
        if newest is None:
            return None
        # A pivot waits until the registry has every save, so none is after one that it has not.
        is_carried = newest.durable_in == "registry"
        if at is None and is_carried and run.pivots_after(newest.n):
            raise Conflict(
                "a pivot came after the newest checkpoint, and changes more than tensors",
                where=newest.ref,
                hint="Call `run.restore()`, which applies it.",
            )
        if handle.ranks is None:
            newest.load_into(target, component=component, strict=strict)
        else:
            handle.ranks.fill(newest, target, component, strict=strict)
        handle.line.resume_at(newest)
        return newest

    def _read(self) -> RunManifest:
        """Read the run, and check that it can be resumed."""
        self.run.saver.pipeline.settle()
        run = self.run.line.refresh()
        check_not_dropped(run)
        self.run.own.asks()
        missing = [name for name in run.spec.must_match or () if name not in self.compared]
        if missing and run.has_checkpoints:
            raise InvalidInput(
                "the run's preset demands that a resume is given what the run was created with",
                where=run.run_id,
                expected=", ".join(f"{name}=..." for name in missing),
                hint="Pass it to `registry.run`, which compares it.",
            )
        return run

    def _checked(self, at: Checkpoint, what: str) -> Checkpoint:
        """Return a checkpoint that the caller names, as this handle has it."""
        store, log = self.run.store, self.run.log
        if isinstance(at, Checkpoint) and at.run_id == log.run_id:
            n = pins.own(self.run.committer, at, what)
            at = Checkpoint(store, log, log.knowing(n).by_n[n])
        check_source(log.run_id, at)
        return at

    def start(
        self,
        mode: Mode,
        source: Stored | None,
        expected: Mapping[str, object] | None,
        carry: str | Iterable[str],
        sources: Sources | None,
        initialise: Initialise | None,
        map_location: object,
    ) -> Started:
        """Start training in a mode, after every check."""
        from holdfast.registry.deriving.transitions import (
            Started,
            check_expected,
            check_given,
            check_mode,
            start_fresh,
            start_warm,
        )

        spec = self.run.log.run.spec
        check_mode(mode)
        self.run.own.asks()
        if (carry or initialise) and mode != "warm_start":
            raise InvalidInput("`carry` and `initialise` belong to mode warm_start", found=mode)
        self.run.saver.pipeline.settle()
        if mode == "fresh":
            if source is not None:
                raise InvalidInput("mode fresh starts from nothing", where="source")
            return start_fresh(self.run)
        if mode == "warm_start":
            if isinstance(source, Stored):
                check_expected(spec, source, expected)
            return start_warm(self.run, source, carry, initialise, map_location)
        check_given(spec.sources or (), sources)
        at = None if source is None else cast("Checkpoint", source)  # `check_source` refuses others
        restored = self.restore(
            at, sources, map_location, lambda one: check_expected(spec, one, expected)
        )
        if restored is None:
            raise NotFound(
                "the run has no checkpoint to resume from",
                where=self.run.log.run_id,
                hint="Start it in mode fresh or warm_start.",
            )
        return Started(
            "resume", restored.state, restored.checkpoint, {}, (), restored.report, restored.stale
        )

    def pivot(self, name: str, initialise: Initialise | None, map_location: object) -> Transitioned:
        """Change the policy of training, or continue after the pivot of this name."""
        from holdfast.registry.deriving.transitions import Transitioned, pivot, pivoted

        self.run.own.asks()
        found = pivot(self.run, name, initialise, map_location)
        if found is not None:
            return found
        restored = restore_newest(self.run, map_location)
        assert restored is not None  # a run that pivoted has a checkpoint
        if restored.pivot is None:
            return Transitioned(restored.state, {}, {}, restored.checkpoint, ())
        return pivoted(self.run.committer, restored.checkpoint, restored.state, initialise)
