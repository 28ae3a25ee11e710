"""How the training of a run comes back, and how a `with run:` block ends: checks and their order.

`holdfast.registry.saving.restoring` finds the checkpoint, `holdfast.registry.deriving.transitions`
carries out the tables of a preset; it is imported if they have something to do.
`holdfast.registry.face.first_save` compares the next saves; it is imported by a restore.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from holdfast.registry.curation import pins
from holdfast.registry.errors import Conflict, InvalidInput, RegistryError
from holdfast.registry.history import check_not_dropped
from holdfast.registry.history.actions import RunStatus
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.loading import Checkpoint, load_to_train
from holdfast.registry.saving import Restored, RunHandle, check_source, restore_newest
from holdfast.registry.spec import RunSpec

if TYPE_CHECKING:
    from holdfast.registry.deriving.transitions import Sources

_LOGGER = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True)
class Resuming:
    """How a run is restored; `Run` and `RunPhases` use it."""

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
        if check is None and run.spec.must_match:
            from holdfast.registry.deriving.transitions import check_expected, of_another_run

            def check(one: Checkpoint) -> None:
                check_expected(RunSpec(), one, None, of_another_run(run, one))

        if run.status == "completed":
            _LOGGER.warning(
                "%s: the run is completed and refuses saves; to train it further, call "
                "`run.status = 'running'`",
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
            handle.training.resume_at(at)
            restored = Restored(loaded, at, ())
        if restored.pivot is not None:
            from holdfast.registry.deriving.transitions import pivoted

            changed = pivoted(self.run.committer, restored.checkpoint, restored.state, None)
            restored = replace(restored, state=changed.state)
        self._compare_saves(restored.checkpoint, restored.state)
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
            kept = (
                one
                for one in handle.training.newest_first()
                if not one.handle.newest_record().held_back
            )
            newest = next(kept, None)
        else:
            newest = self._checked(at, "run.restore_into")
        if newest is None:
            return None
        # A pivot waits until the registry has every save, so none is after one that it has not.
        is_carried = newest.durable_in == "registry"
        if at is None and is_carried and run.pivots_after(newest.handle.n):
            raise Conflict(
                "a pivot came after the newest checkpoint, and changes more than tensors",
                where=newest.ref,
                hint="Call `run.restore()`, which applies it.",
            )
        if handle.ranks is None:
            newest.load_into(target, component=component, strict=strict)
        else:
            handle.ranks.fill(newest, target, component, strict=strict)
        handle.training.resume_at(newest)
        self._compare_saves(newest, lambda path: newest.load(only=path))
        return newest

    def _compare_saves(self, at: Checkpoint, restored: object) -> None:
        """Have the first saves compared with what was restored."""
        from holdfast.registry.face.first_save import FirstSaves

        self.run.ownership.at_first_saves = FirstSaves(restored, at.step, at.ref)

    def _read(self) -> RunManifest:
        """Read the run, and check that it can be resumed."""
        self.run.saver.pipeline.settle()
        run = self.run.training.refresh()
        check_not_dropped(run)
        self.run.ownership.asks()
        missing = [name for name in run.spec.must_match or () if name not in self.compared]
        if missing and run.has_checkpoints:
            raise InvalidInput(
                "the run's preset demands that a resume is given what the run was created with",
                where=run.run_id,
                expected=", ".join(f"{name}=..." for name in missing),
                hint="Pass it to `registry.run`, or to `run.phases.start`, which compare it.",
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


def leave_block(handle: RunHandle, error: BaseException | None) -> None:
    """Finish the running save at the end of a `with run:` block, and set the run's status."""
    if error is None:
        try:
            handle.saver.pipeline.settle()
        except BaseException as failed:
            handle.saver.leave("failed", failed)
            raise
        handle.saver.leave("completed")
        return
    # The caller's own error must be raised; an error of the store is only logged.
    try:
        handle.saver.pipeline.settle()
    except RegistryError as said:
        _LOGGER.error("%s: the running save failed: %s", handle.log.run_id, said)
    is_failure = isinstance(error, Exception)
    left: RunStatus = "failed" if is_failure else "interrupted"
    try:
        handle.saver.leave(left, error if is_failure else None)
    except RegistryError as said:
        _LOGGER.warning("%s: the status could not be set to %s: %s", handle.log.run_id, left, said)
