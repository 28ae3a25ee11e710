"""Lightning: a callback that saves and resumes a run.

```python
saver = HoldfastCheckpoint(run, every_n_train_steps=1000)
trainer = Trainer(callbacks=[saver])
trainer.fit(model, data, ckpt_path=saver.resume())
```
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from holdfast.backends.escape import quoted
from holdfast.registry.adapters import lightning_io
from holdfast.registry.adapters.lightning_io import SCHEME, HoldfastIO, components, from_components
from holdfast.registry.adapters.saving import OnSave, StepSaver, capture_ranks, restore_rank
from holdfast.registry.errors import InvalidInput
from holdfast.registry.face import Run, lost_within_an_epoch, own_generators
from holdfast.registry.saving.loop import Checkpointer
from holdfast.registry.spec import Signals

_LOGGER = logging.getLogger("holdfast")
_OWN_SAMPLER = (
    "Lightning puts its DistributedSamplerWrapper around a sampler that is not torch's. Give the "
    "loader `sampler=torch.utils.data.DistributedSampler(data)`, and the trainer "
    "`use_distributed_sampler=False`"
)
#: The component with the random generators.
_RNG = "rng"


class HoldfastCheckpoint(Checkpoint):
    """Saves a run from Lightning's `Trainer`, and resumes it bit for bit.

    A checkpoint holds what Lightning's own holds, with `model`, `optimizer` and `scheduler` as
    components, and the random generators of every rank (`rng`). The metrics are those of the
    trainer's `callback_metrics` that are of this step. Which checkpoints are kept and which one is
    best is up to the run (`Retention`, `Monitor`). With a `StatefulDataLoader` a resume within an
    epoch is bit-exact; with another loader save at the ends of epochs. The logger `holdfast` warns
    of a save within an epoch that cannot be continued exactly.

    After SIGTERM the last completed step is saved, and the exit status is 143, or the preset's. A
    checkpointer (`with run.checkpointer() as it`) adds its own cadence and reacts to all signals,
    on every rank. Then what is due here is saved in the foreground, and `background` has no effect:
    give the checkpointer the cadence.

    Args:
        run: The run. Every rank opens it; rank 0 saves, or with a `group` every rank its part.
            `FSDPStrategy` and `ModelParallelStrategy` need the group.
        every_n_train_steps: Number of optimizer steps between two saves.
        every_n_epochs: Number of epochs between two saves. Default: 1, if no other is given.
        background: Whether a save returns when the state has been copied (`Run.save_async`).
        on_save: Called with each checkpoint once it is durable, such as `holdfast.wandb.log`.
        checkpointer: Of the run; the block around the training has entered it.

    Attributes:
        io: The plugin that it gives to the trainer's strategy.
    """

    def __init__(
        self,
        run: Run,
        *,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        background: bool = False,
        on_save: OnSave | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        for name, value in (
            ("every_n_train_steps", every_n_train_steps),
            ("every_n_epochs", every_n_epochs),
        ):
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidInput(f"{name} must be at least 1", found=quoted(value))
        self._run = run
        self._shards = False
        self.io = HoldfastIO(run, files=TorchCheckpointIO())
        self.io.saver = self._saver = StepSaver(
            run, background=background, on_save=on_save, checkpointer=checkpointer
        )
        self._every_steps = every_n_train_steps
        self._every_epochs = every_n_epochs or (None if every_n_train_steps else 1)
        self._has_checkpointer = checkpointer is not None
        self._on_sigterm: Any = None
        self._is_due = self._has_warned = False
        self._epoch_ended = False
        #: Metrics, each with the step that it is of.
        self._logged: dict[str, tuple[Any, int]] = {}
        self._loaded: Mapping[str, Any] | None = None
        self._loader_states: list[Any] = []

    def resume(self) -> str | None:
        """Return the `ckpt_path` of the newest whole checkpoint, or `None` before the first save.

        With a `group` it is the newest one, which is read, and verified, when the trainer loads it.

        Raises:
            RestoreFailed: Every checkpoint is damaged.
        """
        return self.io.resume()

    @property
    def best_model_path(self) -> str:
        """The path for `ckpt_path="best"`: the run's best checkpoint, or its newest without one."""
        run = self._run.refresh()
        is_rated = bool(run.manifest.monitors) and run.best() is not None
        name = "best" if is_rated else "latest"
        return "" if run.latest() is None else f"{SCHEME}{run.id}/{name}"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the trainer load `holdfast://` paths."""
        strategy = trainer.strategy
        self._shards = lightning_io.is_sharding(strategy, self._run)
        self.io.trains = trainer.state.fn == TrainerFn.FITTING
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        if self._shards:
            self._load_refs(trainer)
        elif strategy.checkpoint_io is not self.io:
            self.io._files = strategy.checkpoint_io
            strategy.checkpoint_io = self.io

    def _load_refs(self, trainer: Trainer) -> None:
        """Load refs in place of a strategy that shards, and that asks no plugin."""
        strategy: Any = trainer.strategy
        files = type(strategy).load_checkpoint

        def load_checkpoint(checkpoint_path: Any, weights_only: bool | None = None) -> Any:
            found = self.io.found(checkpoint_path)
            if found is None:
                return files(strategy, checkpoint_path, weights_only=weights_only)
            if self.io.trains:
                self._saver.resume_at(found.step)
            return from_components(lightning_io.load(trainer, self._run, found))

        strategy.load_checkpoint = load_checkpoint

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the random generators of every rank."""
        ranks = capture_ranks(_generators(trainer))
        checkpoint[_RNG] = {"ranks": ranks, "epoch_ended": self._epoch_ended}
        if not self._epoch_ended:
            self._warn_within_an_epoch(trainer)
        if self._epoch_ended:  # Lightning counts batches, so it never asks for one too many
            for state in _loader_states(checkpoint):
                state["_iterator_finished"] = True

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the random generators until the training starts."""
        self._loaded = checkpoint.get(_RNG)
        self._loader_states = _loader_states(checkpoint)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the random generators, and the signals of the checkpointer.

        Lightning has made the iterator over the data by now, and that draws the seeds of sampler
        and workers. Training that was not interrupted makes one after each epoch; so after an epoch
        it is made again, behind the restored generators. Within an epoch it is only made again if a
        sampler goes by the number of the epoch, which it did not know yet.
        """
        self._saver.begin()
        if self._has_checkpointer:
            # Lightning's handler, which is new since `setup`, waits for other ranks within a step.
            signal.signal(signal.SIGTERM, self._on_sigterm)
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        fetcher, loader = trainer.fit_loop._data_fetcher, trainer.fit_loop._combined_loader
        again = loaded["epoch_ended"] or any(_goes_by_epochs(one) for one in _loaders(trainer))
        again = again and fetcher is not None and loader is not None
        if again:
            for one in loader.flattened:  # Lightning does it later, but the order is drawn here
                _set_sampler_epoch(one, trainer.fit_loop.epoch_progress.current.processed)
            loader._load_state_dicts(self._loader_states)  # Lightning does within an epoch only
            loader._state_dicts()  # makes the iterators, which set the samplers
        restore_rank(loaded["ranks"], _generators(trainer))
        if again:
            iter(fetcher)
        self._loader_states = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if a save is due, after validation or the end of the epoch if one follows."""
        step, every = trainer.global_step, self._every_steps
        if every and step % every == 0 and step != self._saver.step:
            self._is_due = True
        loop = trainer.fit_loop
        fetcher = loop._data_fetcher
        assert fetcher is not None  # it made the batch
        if not trainer.is_last_batch and not loop.epoch_loop._should_check_val_fx(fetcher):
            self._end_step(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make a save that was due before a validation within an epoch."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.is_last_batch:
            self._end_step(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save at the end of an epoch, if it is time."""
        every = self._every_epochs
        if every and (trainer.current_epoch + 1) % every == 0:
            self._is_due = True
        self._epoch_ended = True
        self._end_step(trainer)
        self._epoch_ended = False

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the saves under way."""
        self._saver.end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Save the last completed step after SIGTERM; the process does not end with status 0."""
        if isinstance(exception, SIGTERMException):
            exception.code = (self._run.manifest.spec.signals or Signals()).exit_code
        if isinstance(exception, SIGTERMException) and trainer.world_size == 1:
            self._is_due = True
            self._end_step(trainer)

    def _end_step(self, trainer: Trainer) -> None:
        is_due, self._is_due = self._is_due, False
        if trainer.fast_dev_run or trainer.sanity_checking:
            return
        self._saver.end_step(
            trainer.global_step,
            lambda: self._dump(trainer),
            self._metrics(trainer),
            due=is_due,
            first=trainer.is_global_zero,
        )
        trainer.should_stop |= self._saver.stopped

    def _metrics(self, trainer: Trainer) -> dict[str, float]:
        """Return the metrics of this step: Lightning keeps a value until the next validation."""
        before, self._logged, step = self._logged, {}, trainer.global_step
        for name, value in trainer.callback_metrics.items():
            known = before.get(name)
            is_old = known is not None and _place_of(known[0]) == _place_of(value)
            self._logged[name] = known if known is not None and is_old else (value, step)
        return {name: float(value) for name, (value, at) in self._logged.items() if at == step}

    def _warn_within_an_epoch(self, trainer: Trainer) -> None:
        for loader in _loaders(trainer):
            why = lost_within_an_epoch(loader)
            if why is not None and not self._has_warned:
                self._has_warned = True
                name, advice = type(loader).__name__, "Save at the ends of epochs"
                _LOGGER.warning(
                    "%s: a resume within an epoch is not bit for bit: %s. %s",
                    name,
                    why,
                    _OWN_SAMPLER if trainer.world_size > 1 else advice,
                )

    def _dump(self, trainer: Trainer) -> dict[str, Any]:
        sharded = lightning_io.own_parts(trainer.strategy) if self._shards else nullcontext()
        with sharded:
            return components(trainer._checkpoint_connector.dump_checkpoint(weights_only=False))


def _place_of(value: Any) -> int:
    """Return where a metric is in memory: each look may make a new tensor of it."""
    return int(value.data_ptr()) if hasattr(value, "data_ptr") else id(value)


def _loaders(trainer: Trainer) -> list[Any]:
    loader = trainer.fit_loop._combined_loader
    return [] if loader is None else loader.flattened


def _generators(trainer: Trainer) -> dict[str, Any]:
    """Return the generators of loaders whose own state does not have them."""
    loaders = [one for one in _loaders(trainer) if lost_within_an_epoch(one) is not None]
    return {
        f"{n}.{name}": own
        for n, one in enumerate(loaders)
        for name, own in own_generators(one).items()
    }


def _goes_by_epochs(loader: Any) -> bool:
    return hasattr(getattr(loader, "sampler", None), "set_epoch") and hasattr(loader, "state_dict")


def _loader_states(checkpoint: Mapping[str, Any]) -> list[Any]:
    """Return the states of the loaders that have one."""
    loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return loop.get("combined_loader", [])
