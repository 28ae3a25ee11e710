"""The part of a run that decides what is kept: gates, artifacts, tags, evictions and their undoing.

None of it needs the writer token, so any handle may do it beside the one that trains.
"""

from __future__ import annotations

from holdfast.registry.history.actions import Evict
from holdfast.registry.history.retention import RetentionPlan
from holdfast.registry.loading.checkpoint import Checkpoint
from holdfast.registry.loading.stored import Stored
from holdfast.registry.names import pins, pruning
from holdfast.registry.run_view import RunView
from holdfast.registry.spec import Retention


class CuratedRun(RunView):
    """A run whose checkpoints can be named, evicted and brought back."""

    # Names

    def tag(self, name: str, checkpoint: Checkpoint) -> None:
        """Point a movable name at a checkpoint of this run; `RUN/tags/NAME` finds it.

        Raises:
            InvalidInput: The checkpoint is another run's, or the name is not legal.
            Conflict: The checkpoint was evicted.
        """
        pins.set_tag(self._committer, name, checkpoint)

    def set_gate(self, name: str, checkpoint: Checkpoint | None = None) -> Checkpoint:
        """Make a checkpoint a gate: immutable, never evicted; `RUN/gates/NAME` finds it.

        Args:
            name: The gate's name, one of the preset's where it declares any.
            checkpoint: The checkpoint; the best one of the gate's phase without it.

        Raises:
            Conflict: The gate is set to another checkpoint, and that one is sound: only a gate
                that fails verification may be replaced.
            InvalidInput: The preset declares gates and not this one, or the checkpoint is another
                run's or not of the gate's phase.
            NotFound: No checkpoint is given, and the phase has no best one.
        """
        return pins.set_gate(self._committer, name, checkpoint)

    def add_artifact(self, name: str, state: object) -> Stored:
        """Save a state beside the checkpoints for good; `RUN/artifacts/NAME` finds it.

        Args:
            name: Given once; adding the same state again changes nothing.
            state: As for `save`.

        Raises:
            Conflict: The name holds another state.
            UnsupportedValue: Something in the state cannot be stored.
        """
        return pins.add_artifact(self._committer, name, state)

    # Evicting

    def prune(self, retention: Retention | None = None, *, dry_run: bool = False) -> RetentionPlan:
        """Evict the checkpoints that retention does not keep; saves do it by themselves.

        Args:
            retention: A policy in place of the preset's.
            dry_run: Only plan.

        Returns:
            The checkpoints that stay and those that go, each with its reasons.

        Raises:
            InvalidInput: The run has no policy, and none is given; or the best are to be kept, and
                no monitor says which those are.
            Conflict: The run was dropped.
        """
        return pruning.prune(self._committer, retention, dry_run=dry_run)

    def undo(self, *checkpoints: Checkpoint) -> list[Checkpoint]:
        """Bring evicted checkpoints back, those of the last eviction where none are named.

        Args:
            *checkpoints: Of this run, from `evicted`.

        Returns:
            The checkpoints. Retention lets them alone from here on.

        Raises:
            NotFound: One of them is not evicted, or nothing is.
            Conflict: Another checkpoint holds its step now.
            MissingObject: Collection has removed what it held, or a mirror never had it.
        """
        chosen = [pins.own(self._committer, one, "undo") for one in checkpoints]
        back = pruning.undo(self._committer, chosen or self._last_evicted())
        return [self._checkpoint(record) for record in back]

    def _last_evicted(self) -> list[int]:
        said = [a for commit in self.history() for a in commit.actions if isinstance(a, Evict)]
        return pruning.last_evicted(self._log.history(), said)
