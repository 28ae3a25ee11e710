"""The part of a run that decides what is kept: gates, artifacts, tags, evictions and undo.

Folders of other systems come in and go out here too.

None of it needs the writer token, so any handle may do it while another one trains.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from holdfast.registry.curation import pins, pruning
from holdfast.registry.face import rooms
from holdfast.registry.face.view import RunView
from holdfast.registry.history import RetentionPlan
from holdfast.registry.history.actions import Evict
from holdfast.registry.loading import Checkpoint, Stored
from holdfast.registry.spec import Retention

if TYPE_CHECKING:
    from holdfast.registry.face.rooms import CheckoutReport, ImportedFile


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

    # Folders of other systems

    def checkout(
        self, root: str | os.PathLike[str], *, layout: str | None = None
    ) -> CheckoutReport:
        """Write the run as the folder of a system, or bring such a folder up to date.

        Files have the names and formats of the system, links are relative and replaced atomically,
        and every file is whole or absent. What an earlier checkout has made and the run has no
        longer is removed; files that it has not made, or that were changed, are left alone. No file
        shares memory with the registry: a folder may be edited.

        Args:
            root: The folder; it is made if it does not exist.
            layout: `hydra`, `adr004`, `andrea`, `thalia`, `cobre` or `hf`. Default: that of the
                run's preset.

        Returns:
            The names of files that were written, kept, removed and left alone.

        Raises:
            InvalidInput: There is no such layout, or a name cannot be that of a file.
            IncompatibleState: A state does not fit the formats of the layout.
            Conflict: The folder is a checkout of something else, or another checkout is running.
            IntegrityError: An object is damaged.
            StoreFull: The disk is full.
        """
        return rooms.check_out_as(self._committer, root, layout)

    def import_tree(
        self,
        root: str | os.PathLike[str],
        *,
        layout: str | None = None,
        table: str | os.PathLike[str] | None = None,
        dry_run: bool = False,
    ) -> list[ImportedFile]:
        """Take the folder of a system into this run: each file once, verified, in its order.

        A file whose `.sha256` file says something else is refused, and so is one that breaks its
        format; the others are taken in. A second import takes in only what is new.

        Args:
            root: The folder.
            layout: As for `checkout`.
            table: For `andrea`: a JSON file with the names and shapes of the parameters.
            dry_run: Read and check everything, and commit nothing.

        Returns:
            A report for each file, in the order in which they were taken in.

        Raises:
            InvalidInput: There is no such folder or layout, or two names in the folder would be one
                file on some systems.
            StorageError: The registry or the folder failed; what was taken in before stays.
        """
        return rooms.import_from(self._committer, root, layout, table, dry_run=dry_run)

    def watch_folder(
        self,
        root: str | os.PathLike[str],
        *,
        layout: str | None = None,
        table: str | os.PathLike[str] | None = None,
        quiet_s: float = 10.0,
        poll_s: float = 1.0,
        longest_poll_s: float = 10.0,
        timeout_s: float | None = None,
    ) -> Iterator[ImportedFile]:
        """Follow a folder into which a program writes: yield each file once it was taken in.

        A file is taken in when it is complete: its content or size says so by the rules of the
        layout, or it was quiet for a while. After a restart, files that were taken in are not taken
        in again.

        Args:
            root: The folder.
            layout: As for `checkout`.
            table: As for `import_tree`.
            quiet_s: Seconds without a change after which a file counts as complete if its content
                cannot tell.
            poll_s: Seconds between looks at the folder; twice as long after each look that finds
                nothing new.
            longest_poll_s: The longest time between two looks.
            timeout_s: End after this many seconds without a new file. Default: never.

        Raises:
            InvalidInput: As for `import_tree`, or a time is not legal.
            StorageError: The registry or the folder failed.
        """
        return rooms.watch_folder(
            self._committer,
            root,
            layout,
            table,
            quiet_s=quiet_s,
            poll_s=poll_s,
            longest_poll_s=longest_poll_s,
            timeout_s=timeout_s,
        )

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
        self._committer.await_earlier()  # those saves may evict
        back = pruning.undo(self._committer, chosen or self._last_evicted())
        return [self._checkpoint(record) for record in back]

    def _last_evicted(self) -> list[int]:
        said = [a for commit in self.history() for a in commit.actions if isinstance(a, Evict)]
        self._log.refresh()  # those commits may be newer than what this handle has read
        return pruning.last_evicted(self._log.history(), said)
