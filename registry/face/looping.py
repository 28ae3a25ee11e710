"""The part of a run that saves a training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.face import rooms
from holdfast.registry.face.resuming import ResumableRun
from holdfast.registry.objects.codecs import Compression
from holdfast.registry.saving import Busy, OnError
from holdfast.registry.spec import Monitor, WhenAsked
from holdfast.registry.spec.precision import PrecisionPolicy

if TYPE_CHECKING:
    from holdfast.registry.face.rooms import Checkpointer, NoticeSource, Ranks


class LoopingRun(ResumableRun):
    """A run whose trainer can be a loop with a checkpointer."""

    def checkpointer(
        self,
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        on_best: bool | Monitor = False,
        background: bool = True,
        busy: Busy = "wait",
        save_at_end: bool = True,
        notice: NoticeSource | None = None,
        exits: bool = True,
        exit_code: int | None = None,
        sigint_exit_code: int | None = None,
        sigusr1: WhenAsked | None = None,
        deadline_s: float | None = None,
        ranks: Ranks | None = None,
        barrier_s: float = 1800.0,
        on_error: OnError = "raise",
        give_up_after: int = 3,
        phase: int | str | None = None,
        compression: Compression | None = None,
        keyframe_every: int | None = None,
        precision: PrecisionPolicy | None = None,
        allow_lossy_optimizer: bool = False,
        allow_nonfinite: bool = False,
    ) -> Checkpointer:
        """Return what saves a training loop: `with run.checkpointer(every_steps=100) as it: ...`.

        At the end of each step the loop calls `it.step(step, state, metrics)`, which saves if it is
        time. SIGTERM and SIGINT wait for that call: it saves the state, sets the run to
        `interrupted`, and raises SystemExit (`docs/training.md`). On a handle with a `group` every
        rank has a checkpointer and all save together, when rank 0 says so and with its arguments.

        Args:
            every_steps: Save at each multiple of this step.
            every_s: Save when the last save began this many seconds ago. Default of both: the
                cadence of the preset's phase; without one only the other reasons save.
            on_best: Save also if the metric of the run's first monitor, or of this monitor, is
                the best so far.
            background: Save in the background: training waits only while the state is copied to
                host memory. `False`: training waits until the checkpoint is durable.
            busy: As for `save_async`; saves for another reason than the cadence always wait.
            save_at_end: Save the last step at the end of the block.
            notice: A notice of preemption: the path of a file that will exist, or a function that
                returns something true. It is asked at most once a second, and counts as SIGTERM.
            exits: Raise SystemExit after a request to stop. `False`: only set `.stopped`.
            exit_code: Exit status after SIGTERM. Default: the preset's, or 143.
            sigint_exit_code: Exit status after SIGINT. Default: the preset's, or 130.
            sigusr1: Whether SIGUSR1 saves after the current step (`now`) or at the next multiple of
                `every_steps` (`at_cadence`). Default: the preset's, or `now`.
            deadline_s: Seconds after a request to stop after which the process ends with what is
                durable. Default: the preset's, or 25.
            ranks: The processes of the training: an object with `rank` and `highest(value)`.
                Default: those of torch.distributed if it is initialized.
            barrier_s: Seconds after which waiting for the other ranks of torch.distributed is an
                error.
            on_error: As for `save_async`, for saves by the cadence and of the best; others raise
                the error.
            give_up_after: As for `save_async`.
            phase: As for `save`, like all below.
            compression: How new chunks are stored.
            keyframe_every: How often a chunk is stored whole.
            precision: Which tensors are stored in fewer bits.
            allow_lossy_optimizer: Apply `precision` to optimizer state too.
            allow_nonfinite: Let NaN and infinity become latest.

        Raises:
            InvalidInput: An argument is wrong; with a `group` also `precision`, another `busy` than
                `wait`, and `ranks` that are not those of the group.
        """
        save = {
            "phase": phase,
            "compression": compression,
            "keyframe_every": keyframe_every,
            "precision": precision,
            "allow_lossy_optimizer": allow_lossy_optimizer,
            "allow_nonfinite": allow_nonfinite,
        }
        options = rooms.LoopOptions(
            every_steps=every_steps,
            every_s=every_s,
            on_best=on_best,
            background=background,
            busy=busy,
            save_at_end=save_at_end,
            notice=notice,
            exits=exits,
            exit_code=exit_code,
            sigint_exit_code=sigint_exit_code,
            sigusr1=sigusr1,
            deadline_s=deadline_s,
            ranks=ranks,
            barrier_s=barrier_s,
            on_error=on_error,
            give_up_after=give_up_after,
            save=save,
            group=self.group,
        )
        return rooms.Checkpointer(self._trainer, options)
