"""Trainings with the HF Trainer and Accelerate whose ranks have parts of the model."""

from __future__ import annotations

import os
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

import holdfast
from holdfast.distributed import TorchGroup, load_into
from holdfast.errors import IncompatibleState
from holdfast.registry.adapters.saving import load_around
from holdfast.transformers import HoldfastCallback
from tests.registry.adapters.trainers.transformers_training import Struck

DEADLINE_S = 30.0
_begin = AcceleratorState.__init__


def _with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
    """Let Accelerate shard on the CPU, which it does for devices alone."""
    _begin(self, *args, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is not None:
        self.fsdp_plugin = fsdp_plugin
    if vars(self).get("fsdp_plugin") is not None:
        self.distributed_type = DistributedType.FSDP


def model() -> GPT2LMHeadModel:
    set_seed(1)
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=33, n_positions=8)
    config.bos_token_id = config.eos_token_id = 0
    config.tie_word_embeddings = False
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def _with_adapter(plain: GPT2LMHeadModel) -> Any:
    set_seed(2)
    return peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=["c_attn"]))


def data() -> list[dict[str, torch.Tensor]]:
    """Rows that are all alike, so that any number of ranks trains the same."""
    row = torch.arange(8)
    return [{"input_ids": row, "labels": row}] * 64


def train(
    url: str, name: str, folder: str, shards: bool, strike: int | None, adapter: bool = False
) -> None:
    """Train as one of some ranks to step 6, from what is there."""
    AcceleratorState.__init__ = _with_fsdp
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    options: dict[str, Any] = {}
    if shards:
        options = {"fsdp": "full_shard", "fsdp_config": {"version": 2}}
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        max_steps=6,
        per_device_train_batch_size=2,
        save_strategy="steps",
        save_steps=2,
        logging_steps=2,
        max_grad_norm=0.0,
        **options,
    )
    with holdfast.open(url) as reg:
        run = reg.run(name, create=True, group=TorchGroup(deadline_s=DEADLINE_S))
        told: list[holdfast.Checkpoint] = []
        saver = HoldfastCallback(run, on_save=told.append)
        net = _with_adapter(model()) if adapter else model()
        training = Struck(net, arguments, train_dataset=data(), callbacks=[saver])
        training.strike = strike
        training.train(resume_from_checkpoint=saver.resume(training))
        assert bool(told) == (rank == 0)


def _plain() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(5, 301), torch.nn.Linear(301, 1))
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def _step(net: Any, optimizer: Any, step: int) -> None:
    net(torch.full((2, 5), step / 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def loop(url: str, name: str) -> None:
    """Train by Accelerate with FSDP2, resume, and train the same without."""
    AcceleratorState.__init__ = _with_fsdp
    dist.init_process_group("gloo")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    group = TorchGroup(deadline_s=DEADLINE_S)
    with holdfast.open(url) as reg:
        net, optimizer = accelerator.prepare(*_plain())
        run = reg.run(name, create=True, group=group)
        for step in (1, 2, 3):
            _step(net, optimizer, step)
            run.save({"model": net, "optimizer": optimizer}, step=step)
        net, optimizer = accelerator.prepare(*_plain())
        get_optimizer_state_dict(net, optimizer.optimizer)  # makes the moments
        run = reg.run("resumed", create=True, group=group)
        load_into(
            reg.checkpoint(f"{name}/main/step2"),
            {"model": net, "optimizer": optimizer},
            group=group,
        )
        _step(net, optimizer, 3)
        run.save({"model": net, "optimizer": optimizer}, step=3)
        other = {"model": {**net.state_dict(), "head": torch.ones(3)}}
        with pytest.raises(IncompatibleState, match=r"model/head is not in the checkpoint"):
            load_around(run, run.checkpoints()[-1], other, trains=True)
        if accelerator.is_main_process:
            net, optimizer = _plain()
            run = reg.run("alone", create=True)
            for step in (1, 2, 3):
                _step(net, optimizer, step)
                run.save({"model": net, "optimizer": optimizer}, step=step)
        dist.barrier()
