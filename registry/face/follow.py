"""Followers of a run: `run.follow`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from holdfast.registry.face.options import Polling, shows_options
from holdfast.registry.saving import RunHandle

if TYPE_CHECKING:
    from holdfast.registry.loading.following import Following, Patience, Watch

#: The defaults of `Polling`.
_POLLING: dict[str, Any] = {
    "poll_s": 1.0,
    "longest_poll_s": 30.0,
    "timeout_s": None,
    "follow": True,
}


class RunFollow:
    """Follow a run while it trains: take its checkpoints as they come, or keep a model current."""

    def __init__(self, handle: RunHandle) -> None:
        self._handle = handle

    @shows_options(Polling, **_POLLING)
    def checkpoints(
        self,
        phase: int | str | None = None,
        *,
        group: str = "default",
        hold_s: float = 3600,
        follower: str | None = None,
        **polling: Unpack[Polling],
    ) -> Watch:
        """Follow the run: each checkpoint goes to one follower of a group, in log order.

        A checkpoint is claimed before the loop gets it, and acknowledged when the loop asks for the
        next one. If an exception or `break` ends the loop, the last one is given out again when its
        hold is over: at least once, never lost. Before a `break`, call `acknowledge()` on the
        returned object if it is done. Superseded, evicted and held back (not finite) checkpoints
        are left out.

        The loop ends when the run is completed, failed or dropped and the group has done all of its
        checkpoints. Waiting costs one request for each poll.

        Args:
            phase: Only checkpoints of this phase.
            group: Followers that share the checkpoints; every other group gets all of them again.
            hold_s: Seconds for which no other follower of the group gets the checkpoint, and
                retention keeps it.
            poll_s: Seconds between looks at the log; twice as long after each look that finds
                nothing new.
            longest_poll_s: The longest time between two looks.
            timeout_s: End the loop after this many seconds without a checkpoint. Default: never.
            follow: Whether to wait for more; `False` ends after the checkpoints that exist now.
            follower: A name that outlives this process, such as a job's id: started again under it,
                a follower continues with the checkpoint that it held. One at a time may use a name.
                Default: random.

        Raises:
            InvalidInput: The run has no such phase, or a name or a time is not legal.
        """
        from holdfast.registry.loading.following import Watch

        patience, follow = _patience(polling)
        return Watch(
            self._handle.committer,
            phase,
            group=group,
            hold_s=hold_s,
            patience=patience,
            follow=follow,
            follower=follower,
        )

    @shows_options(Polling, **_POLLING)
    def into(
        self,
        model: object,
        *,
        component: str | None = None,
        phase: int | str | None = None,
        strict: bool = True,
        latest_only: bool = True,
        rehash: bool | None = None,
        **polling: Unpack[Polling],
    ) -> Following:
        """Keep a model at the run's newest weights: `for ck in run.follow.into(model): ...`.

        The loop gets each checkpoint when its weights are in the model, in the same memory. Only
        chunks that differ from those in the model are fetched; of a chunk that is stored as a delta
        only the delta. All are verified before the first is copied, so an error leaves the model as
        it was, unless a device fails during the copies. The changed chunks take host memory.

        Followers do not share checkpoints: each one gets the newest, and the right to read is
        enough. Waiting costs one request for each poll. After an error the same object can be used
        again. In a loop of your own, call `poll()` on it: it takes newer weights, if there are any,
        without waiting. Its two halves are `fetch()`, which a thread may call while the model is in
        use, and `swap()`, which copies; the program must not write to the model meanwhile.

        The next checkpoint overwrites everything that the program wrote to the model: afterwards
        the model equals the checkpoint, bit for bit. To ensure that, each step hashes the chunks
        that it does not replace, and the results of deltas; whole tensors if torch has counted a
        write, or cannot count (NumPy arrays, tensors made in inference mode). A program that never
        bypasses torch's counter (through `.data` or foreign kernels) may skip that with
        `rehash=False`.

        Args:
            model: An object with `state_dict()`, or a dict of tensors or arrays, on any device.
            component: The component that the model is. Default: the model's top-level keys are
                components. Other components are not read.
            phase: Only checkpoints of this phase.
            strict: Whether a path that only one side has is an error.
            latest_only: Take the newest checkpoint only: the one that `latest` gives, also after a
                rewind. `False`: every kept checkpoint, in log order, but for thinned ones that lack
                weights of the model.
            rehash: Which weights without counted writes to hash before each checkpoint: by default
                those that it does not replace; all (`True`), or none (`False`).
            poll_s: As for `checkpoints`, like the next three.
            longest_poll_s: The longest time between two looks.
            timeout_s: End the loop after this many seconds without a checkpoint. Default: never.
            follow: Whether to wait for more.

        Raises:
            InvalidInput: The run has no such phase, or a time is not legal. By the loop:
            IncompatibleState: The weights do not fit the model, nothing of it is in the checkpoint,
                or its tensors overlap in memory or cannot be written to.
            NotFound: There is no such component.
            IntegrityError: Something is damaged or gone.
        """
        from holdfast.registry.loading.following import Following

        patience, follow = _patience(polling)
        return Following(
            self._handle.committer,
            model,
            component=component,
            phase=phase,
            strict=strict,
            latest_only=latest_only,
            rehash=rehash,
            patience=patience,
            follow=follow,
        )


def _patience(polling: Polling) -> tuple[Patience, bool]:
    """Return the waits of a loop, and whether it waits at all."""
    from holdfast.registry.loading.following import Patience

    times: dict[str, Any] = {**polling}
    follow = times.pop("follow", True)
    return Patience(**times), follow
