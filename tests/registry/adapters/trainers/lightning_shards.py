"""A training with Lightning whose ranks have parts of the model; it runs in child processes."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.distributed import TorchGroup
from holdfast.errors import InvalidInput, RankFailed
from holdfast.lightning import HoldfastCheckpoint, HoldfastIO
from holdfast.registry.history.state_reader import StateReader
from tests.registry.adapters.trainers.lightning_training import trainer

DEADLINE_S = 30.0


class CpuFSDP(FSDPStrategy):
    """FSDP1 on the CPU, which Lightning refuses for its own class."""

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        if any(isinstance(one, FullyShardedDataParallel) for one in model.modules()):
            return model  # by the fit before
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


class Net(pl.LightningModule):
    """Two groups of parameters in another order than the module's, a buffer, an uneven layer."""

    def __init__(self, strike: int | None = None, sends: int = signal.SIGKILL) -> None:
        super().__init__()
        self.strike, self.sends = strike, sends
        pl.seed_everything(1)
        self.net = torch.nn.Sequential(torch.nn.Linear(5, 301), torch.nn.Linear(301, 1))
        self.register_buffer("scale", torch.full((3,), 0.5))
        self.is_sharded = False

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not self.is_sharded:
            self.is_sharded = True
            for layer in self.net:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == self.strike:
            os.kill(os.getpid(), self.sends)
        loss = (self.net(batch[0]) * self.scale.mean()).square().mean()
        self.log("loss", loss)
        self.log("rank", float(dist.get_rank()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).square().mean())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["clock"] = {"s": time.monotonic(), "rank": torch.tensor(dist.get_rank())}

    def configure_optimizers(self) -> Any:
        first, second = self.net
        groups = [{"params": second.parameters(), "lr": 0.1}, {"params": first.parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def strategy(kind: str, size: int) -> Any:
    match kind:
        case "fsdp":
            return CpuFSDP(auto_wrap_policy={torch.nn.Linear})
        case "fsdp2":
            return ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
    return "ddp" if size > 1 else "auto"


def loader() -> DataLoader[Any]:
    """Every rank gets the same batches, so that any number of ranks trains the same."""
    return DataLoader(TensorDataset(torch.arange(80.0).reshape(16, 5) / 80), 4)


class Dying(TorchGroup):
    """A group whose rank 1 dies in its second save, while the ranks exchange bytes."""

    exchanges = 0

    def exchange(self, *given: Any) -> dict[int, memoryview]:
        self.exchanges += 1
        if self.rank == 1 and self.exchanges == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().exchange(*given)


def fit(url: str, name: str, kind: str, strike: int | None) -> None:
    """Train as one of some ranks, from what is there; 4 steps an epoch, 2 epochs."""
    dist.init_process_group("gloo")
    with holdfast.open(url) as reg:
        run = reg.run(name, create=True, group=TorchGroup(deadline_s=DEADLINE_S))
        told: list[holdfast.Checkpoint] = []
        with pytest.raises(InvalidInput, match="on rank 0 alone"):
            HoldfastIO(run)
        net = Net(strike)
        training = _fit(
            HoldfastCheckpoint(run, every_n_train_steps=4, on_save=told.append), net, kind
        )
        assert bool(told) == (dist.get_rank() == 0)
        if kind != "fsdp":  # whose state is a copy
            _check_validation(training, net, run)


def fit_until_asked(url: str, name: str, kind: str, strike: int | None) -> None:
    """Train under a checkpointer; only rank 1 gets SIGTERM."""
    dist.init_process_group("gloo")
    with holdfast.open(url) as reg:
        run = reg.run(name, create=True, group=TorchGroup(deadline_s=DEADLINE_S))
        with run.checkpointer(every_steps=100) as checkpointer:
            saver = HoldfastCheckpoint(run, every_n_epochs=9, checkpointer=checkpointer)
            _fit(saver, Net(strike if dist.get_rank() == 1 else None, signal.SIGTERM), kind)


def fit_until_a_rank_dies(url: str, name: str, kind: str) -> None:
    """Train until rank 1 dies in the middle of a save; the other one ends with an error."""
    dist.init_process_group("gloo")
    with holdfast.open(url) as reg:
        run = reg.run(name, create=True, group=Dying(deadline_s=5))
        with pytest.raises(RankFailed, match="rank 1"):
            _fit(HoldfastCheckpoint(run, every_n_train_steps=4), Net(), kind)
        assert [one.step for one in run.checkpoints()] == [4]
    os._exit(3)  # the process group is broken


def _check_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a rank reads a whole weight or moment, past the ranks' own way to load."""
    read = StateReader.read

    def checked(self: StateReader, manifest: Any, targets: Any) -> None:
        assert not [entry.shape for entry, _ in targets if 301 in entry.shape]
        read(self, manifest, targets)

    monkeypatch.setattr(StateReader, "read", checked)


def _fit(saver: HoldfastCheckpoint, net: Net, kind: str) -> pl.Trainer:
    if kind in ("fsdp", "fsdp2"):
        _check_reads(pytest.MonkeyPatch())
    pl.seed_everything(1)
    size = dist.get_world_size()
    options = {"strategy": strategy(kind, size), "devices": size, "use_distributed_sampler": False}
    training = trainer(saver, **options)
    training.fit_loop.max_epochs = 2
    training.fit(net, loader(), ckpt_path=saver.resume())
    return training


def _check_validation(training: pl.Trainer, net: Net, run: holdfast.Run) -> None:
    """Load the newest checkpoint to validate it."""
    latest = run.latest()
    assert latest is not None
    parts = [_local(one) for one in net.state_dict().values()]
    wanted = [one.clone() for one in parts]
    for one in parts:
        one.zero_()
    training.validate(net, loader(), ckpt_path=f"holdfast://{latest.ref}", verbose=False)
    assert all(map(torch.equal, map(_local, net.state_dict().values()), wanted))


def _local(parameter: Any) -> torch.Tensor:
    return getattr(parameter, "_local_tensor", parameter).detach()
