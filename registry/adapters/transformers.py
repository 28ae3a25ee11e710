"""The HF Trainer: a callback that saves and resumes a run.

```python
saver = HoldfastCallback(run)
trainer = Trainer(model, args, train_dataset=data, callbacks=[saver])
trainer.train(resume_from_checkpoint=saver.resume(trainer))
```
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from holdfast.registry.adapters.saving import (
    OnSave,
    StepSaver,
    capture_ranks,
    check_group,
    checkpoint_of,
    load_around,
    prepare_moments,
    restore_rank,
)
from holdfast.registry.errors import InvalidInput
from holdfast.registry.face import Run
from holdfast.registry.layouts import CONFIGS, METADATA, hub_folder
from holdfast.registry.loading import Checkpoint
from holdfast.registry.saving.loop import Checkpointer

__all__ = ["HoldfastCallback"]

_LOGGER = logging.getLogger("holdfast")


class HoldfastCallback(TrainerCallback):
    """Saves a run from the HF `Trainer`, and resumes it bit for bit.

    `TrainingArguments` decide when: `save_strategy` (`steps` or `epoch`) and `save_steps`. The
    Trainer writes no folder of its own. A checkpoint holds `model` (or, of a PEFT model, only
    `adapter`), `optimizer`, `scheduler`, `scaler` if there is one, the generators of every rank
    (`rng`), the Trainer's state (`trainer`) and what `export` needs. Which checkpoints are kept and
    which one is best is up to the run (`Retention`, `Monitor`).

    A step is saved when the next one begins: after its evaluation, after its metrics are known, and
    after other callbacks and schedulers have seen them.

    A checkpointer (`with run.checkpointer() as it`) adds its own cadence and reacts to signals;
    without one SIGTERM ends the process at once. Then what is due here is saved in the foreground,
    and `background` has no effect: give the checkpointer the cadence, with `save_strategy="no"`.

    Args:
        run: The run. Every rank opens it; rank 0 saves, or with a `group` every rank its part.
            FSDP2 needs the group.
        background: Whether a save returns when the state has been copied (`Run.save_async`).
        on_save: Called with each checkpoint once it is durable, such as `holdfast.wandb.log`.
        checkpointer: Of the run; the block around the training has entered it.
    """

    def __init__(
        self,
        run: Run,
        *,
        background: bool = False,
        on_save: OnSave | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self._run = run
        self._saver = StepSaver(
            run, background=background, on_save=on_save, checkpointer=checkpointer
        )
        self._trainer: Any = None
        self._is_due = False
        self._loaded: dict[str, Any] = {}
        self._folder: Path | None = None
        self._found: Checkpoint | None = None

    def resume(self, trainer: Trainer, ref: str | None = None) -> str | None:
        """Prepare a trainer to continue the run; call it before each `train`.

        The weights and the Trainer's state go into a temporary folder in `output_dir`, for the
        Trainer to read; it is removed when training begins. Everything else is loaded directly, and
        where all ranks save, the weights too.

        Args:
            trainer: The trainer that has this callback.
            ref: A checkpoint of the run. Default: the newest that is whole, or with a `group` the
                newest, which is verified when the weights are loaded.

        Returns:
            The folder, for `train(resume_from_checkpoint=...)`; `None` before the first save.

        Raises:
            InvalidInput: The trainer shards the model, and not with FSDP2 and a run with `group`;
                or the ref names another run.
            NotFound: The ref names nothing.
            RestoreFailed: Every checkpoint is damaged.
        """
        self._check(trainer)
        self._trainer = trainer
        at = None if ref is None else checkpoint_of(self._run, ref)
        found = self._restore(at) if self._run.handle.ranks is None else self._agree(at)
        if found is None:
            return None
        self._saver.resume_at(found.step)
        self._folder = Path(trainer.args.output_dir) / f"holdfast-resume-{found.digest.short}"
        with trainer.args.main_process_first(local=True, desc="resume"):
            if trainer.args.local_process_index == 0:
                self._write_folder(found)
        return str(self._folder)

    def _check(self, trainer: Any) -> None:
        """Refuse a trainer that shards the model in a way that is not supported."""
        if trainer.is_deepspeed_enabled or (
            trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2
        ):
            raise InvalidInput(
                "this sharded training is not supported",
                where="TrainingArguments",
                expected="FSDP2 (fsdp_config={'version': 2}), or ranks that hold the whole model",
                found="FSDP1" if trainer.is_fsdp_enabled else "DeepSpeed",
            )
        if trainer.is_fsdp_enabled:
            check_group(self._run, "TrainingArguments", "FSDP2")

    def _restore(self, at: Checkpoint | None) -> Checkpoint | None:
        restored = self._run.restore(at=at)
        if restored is None:
            return None
        state = restored.state
        self._loaded = {name: state[name] for name in state if name not in hub_folder.WEIGHTS}
        return restored.checkpoint

    def _agree(self, at: Checkpoint | None) -> Checkpoint | None:
        """Find the checkpoint that all ranks load, once the trainer has sharded the model."""
        self._found = self._run.restore_into({}, at, strict=False)
        if self._found is not None:
            self._trainer._load_from_checkpoint = lambda *_: None  # the folder has no weights
        return self._found

    def _write_folder(self, found: Checkpoint) -> None:
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._found is None:
            hub_folder.write_model(found, self._folder)
        trainer = self._loaded.get("trainer") or found.load(only="trainer")["trainer"]
        (self._folder / "trainer_state.json").write_text(json.dumps(trainer, default=_plain))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Load optimizer and scheduler, which the trainer has made by now."""
        if self._trainer is None:
            raise InvalidInput(
                "the callback does not know its trainer",
                where="HoldfastCallback",
                expected="trainer.train(resume_from_checkpoint=saver.resume(trainer))",
            )
        if args.save_strategy == SaveStrategy.BEST:
            raise InvalidInput(
                "the run decides which checkpoint is best, not the trainer",
                where="TrainingArguments(save_strategy=...)",
                expected="'steps' or 'epoch', and a run with Monitor and Retention(best=1)",
                found="best",
            )
        if args.load_best_model_at_end:
            raise InvalidInput(
                "the trainer would end with its last model: it has no folder of the best one",
                where="TrainingArguments(load_best_model_at_end=...)",
                expected="False",
                found="True",
                hint="After the training: run.best().load_into(model, component='model').",
            )
        if state.global_step < state.max_steps:
            self._saver.begin()
        if self._found is not None:
            self._loaded = self._fill(self._found, given)
            self._found = None
        if self._loaded:
            given["optimizer"].load_state_dict(self._loaded["optimizer"])
            given["lr_scheduler"].load_state_dict(self._loaded["scheduler"])
            if "scaler" in self._loaded:
                self._trainer.accelerator.scaler.load_state_dict(self._loaded["scaler"])
            self._loaded = {"rng": self._loaded["rng"]}
        if not args.auto_find_batch_size:  # which may read the folder again
            self._remove_folder(args)

    def _fill(self, found: Checkpoint, given: Mapping[str, Any]) -> dict[str, Any]:
        """Load weights and moments into each rank's part of them; return the state."""
        del self._trainer._load_from_checkpoint
        model, optimizer = given["model"], given["optimizer"]
        prepare_moments(model, optimizer.optimizer)
        parts = model_parts(model)
        weights = {name: parts[name] for name in hub_folder.WEIGHTS if name in parts}
        target = {**weights, "optimizer": optimizer.state_dict()}
        return load_around(self._run, found, target, trains=True)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """End the step before. After an epoch restore the generators, before data is shuffled."""
        if state.epoch is None or state.epoch % 1 == 0:
            self._restore_generators()
        self._end_step(state, given)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """End the step before. Within an epoch, restore the generators after skipped batches."""
        if self._loaded and args.ignore_data_skip:
            _LOGGER.warning(
                "this resume is not bit for bit: with ignore_data_skip=True it began the epoch "
                "again, at step %d",
                state.global_step,
            )
        self._restore_generators()
        self._end_step(state, given)
        control.should_training_stop |= self._saver.stopped

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> TrainerControl:
        """Take over a save that the trainer is about to make."""
        self._is_due |= control.should_save
        control.should_save = False
        return control

    on_epoch_end = on_step_end

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """End the last step, and wait for the saves under way."""
        self._end_step(state, given)
        self._saver.end()
        self._remove_folder(args)

    def _restore_generators(self) -> None:
        if self._loaded:
            restore_rank(self._loaded["rng"])
            self._loaded = {}

    def _end_step(self, state: TrainerState, given: Mapping[str, Any]) -> None:
        is_due, self._is_due = self._is_due, False
        # The summary of the whole training is no part of its last step.
        history = [one for one in state.log_history if "train_runtime" not in one]
        logged = [one for one in history if one.get("step") == state.global_step]
        # Some compute lists or dicts of metrics by class: those are only in `trainer`.
        numbers = {
            name: float(value)
            for one in logged
            for name, value in one.items()
            if name != "step" and (isinstance(value, Real) or getattr(value, "shape", None) == ())
        }
        self._saver.end_step(
            state.global_step,
            lambda: self._parts(dataclasses.replace(state, log_history=history), given),
            numbers,
            due=is_due,
            first=state.is_world_process_zero,
        )

    def _parts(self, state: TrainerState, given: Mapping[str, Any]) -> dict[str, Any]:
        self._trainer.store_flos()
        stateful = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        exported = [one for one in stateful if isinstance(one, ExportableState)]
        flos = self._trainer.state.total_flos
        now = dataclasses.replace(state, stateful_callbacks=exported, total_flos=flos)
        parts = {
            **model_parts(given["model"]),
            "optimizer": given["optimizer"].state_dict(),
            "scheduler": given["lr_scheduler"].state_dict(),
            "rng": capture_ranks(),
            # As it comes back: a resumed trainer reads it from a file of JSON.
            "trainer": json.loads(json.dumps(dataclasses.asdict(now), default=_plain)),
        }
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        return parts if scaler is None else {**parts, "scaler": scaler.state_dict()}

    def _remove_folder(self, args: TrainingArguments) -> None:
        if self._folder is not None and args.local_process_index == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None


def model_parts(model: Any) -> dict[str, Any]:
    """Return the components of a model: weights, configurations, and metadata of their file."""
    parts = {METADATA: {"format": "pt"}}
    if hasattr(model, "peft_config"):
        from peft import get_peft_model_state_dict  # only a PEFT model needs it

        name, *others = model.active_adapters
        if others:
            raise InvalidInput("several adapters are active", found=", ".join([name, *others]))
        config = model.peft_config[name].to_dict()
        files = {"adapter_config.json": {**config, "inference_mode": True}}
        weights = {"adapter": dict(get_peft_model_state_dict(model, adapter_name=name))}
    else:
        kinds = {"config.json": "config", "generation_config.json": "generation_config"}
        found = {file: getattr(model, kind, None) for file, kind in kinds.items()}
        files = {file: one.to_dict() for file, one in found.items() if one is not None}
        weights = {"model": model.state_dict()}
    plain = json.loads(json.dumps(files, default=_plain, sort_keys=True))
    return {**weights, **parts, CONFIGS: plain}


def _plain(value: Any) -> Any:
    """Return a value that JSON does not have as one that it has."""
    if hasattr(value, "tolist"):  # an array or a tensor that a program has logged
        return value.tolist()
    return sorted(value) if isinstance(value, set) else str(value)
