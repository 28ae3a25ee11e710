"""The part of a run that decides what is kept: gates, artifacts, tags, evictions and undo.

None of it needs the writer token, so any handle may do it while another one trains.
"""

from __future__ import annotations

from holdfast.registry.history.actions import Evict
from holdfast.registry.history.retention import RetentionPlan
from holdfast.registry.loading.checkpoint import Checkpoint
from holdfast.registry.loading.stored import Stored
from holdfast.registry.names import pins, pruning
from holdfast.registry.runs.view import RunView
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
            name: The gate's name; one of the preset's, if it declares gates.
            checkpoint: The checkpoint. Default: the best one of the gate's phase.

        Raises:
            Conflict: The gate is set to another checkpoint, and that one is sound: only a gate
                that fails verification may be replaced.
            InvalidInput: The preset declares gates and not this one, or the checkpoint is another
                run's or not of the gate's phase.
            NotFound: No checkpoint is given, and the phase has no best one.
        """
        return pins.set_gate(self._committer, name, checkpoint)

    def add_artifact(self, name: str, state: object) -> Stored:
        """Save a state that the run keeps for ever; `RUN/artifacts/NAME` finds it.

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
        """Evict the checkpoints that retention does not keep; each save does it, too.

        Args:
            retention: A policy. Default: the preset's.
            dry_run: Only plan.

        Returns:
            The checkpoints that stay and those that go, each with its reasons.

        Raises:
            InvalidInput: The run has no policy, and none is given; or the policy keeps the best,
                and there is no monitor.
            Conflict: The run was dropped.
        """
        return pruning.prune(self._committer, retention, dry_run=dry_run)

    def evict(self, checkpoint: Checkpoint, reason: str) -> None:
        """Evict one checkpoint; `undo` brings it back until it is collected.

        Args:
            checkpoint: Of this run. It may be superseded, or one that was brought back before.
            reason: Why, for readers of the log.

        Raises:
            Conflict: It is protected (the newest of its phase, the best by a monitor, named by a
                gate or a tag, held by a follower), or it is evicted already.
            InvalidInput: It is another run's, or the reason is empty or cannot be stored.
        """
        pruning.evict(self._committer, checkpoint, reason)

    def undo(self, *checkpoints: Checkpoint) -> list[Checkpoint]:
        """Bring evicted checkpoints back: the given ones, or those of the last eviction.

        Args:
            *checkpoints: Of this run, from `evicted`.

        Returns:
            The checkpoints. Retention does not evict them again.

        Raises:
            NotFound: One of them is not evicted, or nothing is.
            Conflict: Another checkpoint holds its step now.
            MissingObject: Its objects were collected, or this mirror never had them.
        """
        chosen = [pins.own(self._committer, one, "undo") for one in checkpoints]
        back = pruning.undo(self._committer, chosen or self._last_evicted())
        return [self._checkpoint(record) for record in back]

    def _last_evicted(self) -> list[int]:
        said = [a for commit in self.history() for a in commit.actions if isinstance(a, Evict)]
        return pruning.last_evicted(self._log.history(), said)
