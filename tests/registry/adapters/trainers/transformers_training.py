"""A small training with the HF Trainer, and what is checked inside; it runs in a child process."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

import holdfast
from holdfast.errors import Conflict, IncompatibleState, InvalidInput, UnsupportedValue
from holdfast.transformers import HoldfastCallback, export
from tests.support.commands import invoke

#: Six steps an epoch.
SAMPLES, EPOCHS = 48, 2


class Struck(Trainer):
    """A trainer whose process sends itself a signal before the step `strike`."""

    strike: int | None = None
    sends: int = signal.SIGKILL

    def training_step(self, *given: Any, **options: Any) -> torch.Tensor:
        if self.state.global_step == self.strike:
            os.kill(os.getpid(), self.sends)
        return super().training_step(*given, **options)


#: A metric of several classes, which is no number.
ARRAY = np.ones(2)


def model(adapter: bool) -> Any:
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=8)
    config.bos_token_id = config.eos_token_id = 0
    plain = GPT2LMHeadModel(config)
    if not adapter:
        return plain
    return peft.get_peft_model(
        plain, peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["c_attn"])
    )


def data() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 32, (SAMPLES, 8))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(saver: Any, folder: str, adapter: bool = False, **options: Any) -> Struck:
    set_seed(1)
    samples = data()
    arguments: dict[str, Any] = {
        "output_dir": folder,
        "num_train_epochs": EPOCHS,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "steps",
        "save_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "logging_steps": 2,
        "metric_for_best_model": "loss",
        "restore_callback_states_from_checkpoint": True,
        **options,
    }
    # It counts every evaluation but the first, and never stops.
    stopping = EarlyStoppingCallback(early_stopping_patience=50, early_stopping_threshold=1e9)
    return Struck(
        model(adapter),
        TrainingArguments(**arguments),
        train_dataset=samples,
        eval_dataset=samples[:8],
        callbacks=[saver, stopping],
        compute_metrics=lambda _: {"one": 1.0, "classes": [0.5], "by": {"a": 1}, "all": ARRAY},
    )


def train(
    url: str, name: str, folder: str, adapter: bool, strike: int | None, options: dict[str, Any]
) -> None:
    """Train to the end, or until the process is killed; resume what is there."""
    with holdfast.open(url) as reg, reg.run(name, create=True) as run:
        told: list[holdfast.Checkpoint] = []
        saver = HoldfastCallback(run, background=True, on_save=told.append)
        training = trainer(saver, folder, adapter, **options)
        training.strike = strike
        training.train(resume_from_checkpoint=saver.resume(training))
        assert not list(Path(folder).glob("*"))
        assert run.checkpoints()[len(run.checkpoints()) - len(told) :] == told


def ignore_data(url: str, folder: str) -> None:
    """A resume that skips no batches is told within an epoch, and only there."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(handler)
    with holdfast.open(url) as reg, reg.run("ignores", create=True) as run:
        for steps, skips in ((6, True), (9, False), (10, True), (11, False)):
            saver = HoldfastCallback(run)
            options = {"max_steps": steps, "save_steps": 1, "ignore_data_skip": not skips}
            training = trainer(saver, folder, **options)
            training.train(resume_from_checkpoint=saver.resume(training))
    (told,) = [one for one in said if "bit for bit" in one]
    assert "with ignore_data_skip=True it began the epoch again, at step 10" in told


def train_with_checkpointer(
    url: str, name: str, folder: str, strike: int | None, exits: bool = True
) -> None:
    """Train under a checkpointer, and get SIGTERM in a step."""
    with (
        holdfast.open(url) as reg,
        reg.run(name, create=True) as run,
        run.checkpointer(every_steps=5, stopping=holdfast.Stopping(exits=exits)) as checkpointer,
    ):
        told: list[holdfast.Checkpoint] = []
        saver = HoldfastCallback(run, checkpointer=checkpointer, on_save=told.append)
        training = trainer(saver, folder, save_strategy="no")
        training.strike, training.sends = strike, signal.SIGTERM
        try:
            ref = f"{name}/latest" if run.checkpoints() else None
            training.train(resume_from_checkpoint=saver.resume(training, ref))
            # Before the block ends, which saves the last step; only the straight training does it.
            torch.rand(3 if name == "straight" else 0)
        finally:
            assert run.checkpoints()[len(run.checkpoints()) - len(told) :] == told


def refuse(url: str, folder: str) -> None:
    """Typed errors, and nothing is saved."""
    with holdfast.open(url) as reg:
        run = reg.create_run("refused")
        saver = HoldfastCallback(run)
        training = trainer(saver, folder)
        with pytest.raises(InvalidInput, match=r"saver\.resume\(trainer\)"):
            training.train()
        assert saver.resume(training) is None
        run.status = "completed"
        training.strike = 0  # the first step would kill the process
        with pytest.raises(Conflict, match=r"completed.*run.status = 'running'"):
            training.train()
        run.status = "running"
        with pytest.raises(InvalidInput, match="another run"):
            saver.resume(training, "other/latest")
        training.args.load_best_model_at_end = True
        with pytest.raises(
            InvalidInput, match=r"end with its last model.*run\.best\(\)\.load_into"
        ):
            training.train()
        training.args.save_strategy = training.args.save_strategy.__class__.BEST
        with pytest.raises(InvalidInput, match="the run decides which checkpoint is best"):
            training.train()
        training.is_fsdp_enabled = True
        with pytest.raises(InvalidInput, match=r"this sharded training is not supported.*FSDP1"):
            saver.resume(training)
        loader = training.get_train_dataloader()  # prepared by Accelerate
        with pytest.raises(UnsupportedValue, match=r"state\['data'\].*use_stateful_dataloader"):
            run.save({"data": loader}, step=1)
        assert run.checkpoints() == []


def write_and_read(url: str, ref: str, adapter_ref: str, folder: str) -> None:
    """What `export` writes is what `from_pretrained` reads."""
    with holdfast.open(url) as reg:
        saved = reg.checkpoint(ref)
        made = export(saved, Path(folder) / "full", card={"license": "apache-2.0"})
        found = AutoModelForCausalLM.from_pretrained(made).state_dict()
        wanted = saved.load(only="model")["model"]
        assert wanted.keys() == found.keys()
        assert all(torch.equal(value, found[name]) for name, value in wanted.items())
        card = (made / "README.md").read_text()
        assert card.startswith("---\nlibrary_name: transformers\nlicense: apache-2.0\n---\n")
        assert saved.ref in card
        assert str(saved.digest) in card
        with pytest.raises(InvalidInput, match="a new or empty folder"):
            export(saved, made)
        releases = reg.run(saved.run_id).releases
        releases.publish("1.0.0", saved, only="model", card={"license": "mit", "tags": ["a"]})
        released = f"{saved.run_id}/releases/1.0.0"
        made = export(reg.stored(released), Path(folder) / "released", card={"tags": ["b"]})
        card = (made / "README.md").read_text()
        assert card.startswith("---\nlibrary_name: transformers\nlicense: mit\ntags:\n- b\n---\n")
        assert "| version | 1.0.0 |" in card
        for name in (released, ref):
            pulled = Path(folder) / f"pulled-{name == ref}"
            done = invoke("pull", name, "--to", str(pulled), "--format", "hf", "--registry", url)
            assert done.exit_code == 0, done.output
            found = AutoModelForCausalLM.from_pretrained(pulled).state_dict()
            assert all(torch.equal(value, found[name]) for name, value in wanted.items())
        assert "license: mit" in (Path(folder) / "pulled-False" / "README.md").read_text()
        bare = reg.create_run("bare").save({"model": {"w": torch.zeros(2)}}, step=1)
        with pytest.raises(IncompatibleState, match="configs"):
            export(bare, Path(folder) / "bare")
        adapted = reg.checkpoint(adapter_ref)
        assert set(adapted.components) & {"model", "adapter"} == {"adapter"}
        made = export(adapted, Path(folder) / "adapter")
        set_seed(1)
        loaded = peft.PeftModel.from_pretrained(model(adapter=False), made)
        weights = peft.get_peft_model_state_dict(loaded)
        wanted = adapted.load(only="adapter")["adapter"]
        assert all(torch.equal(value, weights[name]) for name, value in wanted.items())
