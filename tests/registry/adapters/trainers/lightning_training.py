"""A small training with Lightning, and what is checked inside of it; it runs in a child process."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.backends.errors import StoreUnavailable
from holdfast.errors import Conflict, InvalidInput, NotFound, UnsupportedValue
from holdfast.lightning import HoldfastCheckpoint, HoldfastIO
from holdfast.registry.adapters.lightning_io import is_sharding
from holdfast.registry.face.factory import open_on
from holdfast.registry.saving.journal.background import BackgroundCarrier
from tests.support.faults import Gate
from tests.support.stores import new_backend

#: Four batches an epoch.
SAMPLES, BATCH, EPOCHS = 32, 8, 4


class Net(pl.LightningModule):
    """Its dropout, its validation and its loaders draw random numbers.

    Args:
        strike: At this step the process sends itself a signal.
        sends: The signal.
    """

    def __init__(self, strike: int | None = None, sends: int = signal.SIGKILL) -> None:
        super().__init__()
        self.strike, self.sends = strike, sends
        layers = torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)
        self.layers = torch.nn.Sequential(*layers)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == self.strike:
            os.kill(os.getpid(), self.sends)
        loss = (self.layers(batch[0]) ** 2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", (self.layers(batch[0]) ** 2).mean() + torch.rand(1).item())

    def on_validation_epoch_end(self) -> None:
        self.log("score", [3.0, 1.0, 2.0, 0.0][self.current_epoch])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def trainer(*callbacks: Any, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )


def data(loader: type[DataLoader[Any]]) -> Any:
    samples = TensorDataset(torch.randn(SAMPLES, 4))
    return loader(samples, BATCH, shuffle=True), DataLoader(samples, BATCH, shuffle=True)


def data_loader() -> Any:
    """Return a loader whose position is saved."""
    return data(StatefulDataLoader)[0]


def fit(url: str, name: str, stateful: bool, strike: int | None, cadence: dict[str, Any]) -> None:
    """Train to the end, or until the process is killed; resume what is there."""
    pl.seed_everything(1)
    with holdfast.open(url) as reg, reg.run(name, create=True) as run:
        told: list[holdfast.Checkpoint] = []
        saver = HoldfastCheckpoint(run, on_save=told.append, **cadence)
        loaders = data(StatefulDataLoader if stateful else DataLoader)
        trainer(saver).fit(Net(strike), *loaders, ckpt_path=saver.resume())
        assert run.checkpoints()[len(run.checkpoints()) - len(told) :] == told


def fit_until_sigterm(url: str, name: str) -> None:
    pl.seed_everything(1)
    with holdfast.open(url) as reg, reg.run(name, create=True) as run:
        saver = HoldfastCheckpoint(run, every_n_epochs=1)
        trainer(saver).fit(Net(6, signal.SIGTERM), *data(StatefulDataLoader))


def fit_from_latest(url: str, name: str) -> None:
    """Continue by a ref, as `ckpt_path` takes it."""
    with holdfast.open(url) as reg, reg.run(name) as run:
        saver = HoldfastCheckpoint(run)
        loaders = data(StatefulDataLoader)
        trainer(saver).fit(Net(), *loaders, ckpt_path=f"holdfast://{name}/latest")


def fit_ddp(url: str, name: str, strike: int | None) -> None:
    """Train as one of two ranks, each with generators of its own."""
    pl.seed_everything(1 + int(os.environ["RANK"]))
    with holdfast.open(url) as reg:
        run = reg.run(name, create=True)
        saver = HoldfastCheckpoint(run, every_n_epochs=1)
        _fit_ranks(saver, Net(strike))


def fit_ddp_with(
    url: str, name: str, strike: int | None, kind: str, every: int, log: str | None = None
) -> None:
    """Train as one of two ranks, with a loader that has a position; four batches an epoch.

    Args:
        url: The registry.
        name: The run.
        strike: The step at which the process is killed.
        kind: `own` for a distributed sampler of the loader's own, else Lightning puts one in.
        every: Number of steps between two saves, or 0 to save after epochs.
        log: File for what is warned of.
    """
    rank = int(os.environ["RANK"])
    pl.seed_everything(1 + rank)
    if log is not None:
        logging.getLogger("holdfast").addHandler(logging.FileHandler(f"{log}.{rank}"))
    data = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))
    own: dict[str, Any] = {"sampler": DistributedSampler(data, 2, rank, seed=3)}
    options = own if kind == "own" else {"shuffle": True}
    if kind == "generator":
        loader: Any = DataLoader(data, 4, generator=torch.Generator().manual_seed(5), **options)
    else:
        loader = StatefulDataLoader(data, 4, **options)
    with holdfast.open(url) as reg:
        run = reg.run(name, create=True)
        saver = HoldfastCheckpoint(run, every_n_train_steps=every or None)
        training = trainer(saver, strategy="ddp", devices=2, use_distributed_sampler=kind != "own")
        training.fit(Net(strike), loader, ckpt_path=saver.resume())


def fit_with_a_generator(url: str, name: str, strike: int | None) -> None:
    """Train with a plain loader that has a generator of its own; save after epochs."""
    pl.seed_everything(1)
    own = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(SAMPLES, 4))
    with holdfast.open(url) as reg:
        saver = HoldfastCheckpoint(reg.run(name, create=True))
        loader = DataLoader(data, BATCH, shuffle=True, generator=own)
        trainer(saver).fit(Net(strike), loader, ckpt_path=saver.resume())


def ways_out(url: str, name: str, pulled: str) -> None:
    """Lightning's own loaders read a pulled checkpoint, and find the best one of the callback."""
    with holdfast.open(url) as reg:
        best = reg.checkpoint(f"{name}/best")
        wanted = best.load(only="model")["model"]

        def check(net: Net) -> None:
            assert all(torch.equal(one, wanted[key]) for key, one in net.state_dict().items())

        check(Net.load_from_checkpoint(pulled))
        loader = data(DataLoader)[0]
        for callbacks, path in (([], pulled), ([HoldfastCheckpoint(reg.run(name))], "best")):
            net = Net()
            trainer(*callbacks).validate(net, loader, ckpt_path=path, verbose=False)
            check(net)
        trainer(enable_checkpointing=False).fit(net := Net(), loader, ckpt_path=pulled)
        assert net.trainer.global_step == SAMPLES // BATCH * EPOCHS
        empty = HoldfastCheckpoint(reg.run("empty", create=True))
        assert empty.best_model_path == ""


def fit_ddp_with_checkpointer(url: str, name: str, strike: int | None) -> None:
    """Train as one of two ranks under a checkpointer; only rank 1 gets SIGTERM."""
    rank = int(os.environ["RANK"])
    pl.seed_everything(1 + rank)
    net = Net(strike if rank == 1 else None, signal.SIGTERM)
    with holdfast.open(url) as reg:
        run = reg.run(name, create=True)
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
        with run.checkpointer(every_steps=4) as checkpointer:
            _fit_ranks(HoldfastCheckpoint(run, every_n_epochs=9, checkpointer=checkpointer), net)


def _fit_ranks(saver: HoldfastCheckpoint, net: Net) -> None:
    samples = TensorDataset(torch.arange(64.0).reshape(16, 4) / 64)
    training = trainer(saver, strategy="ddp", devices=2)
    training.fit(net, DataLoader(samples, 4, shuffle=True), ckpt_path=saver.resume())


def keep_model_checkpoint(url: str, folder: str) -> None:
    """Lightning's own callback with the plugin: what it saves, names again, removes and loads."""
    with holdfast.open(url) as reg:
        run = reg.create_run("own")
        keeper = ModelCheckpoint(folder, monitor="score", save_top_k=1, save_last=True)
        training = trainer(keeper, plugins=[HoldfastIO(run)])
        training.fit(Net(), *data(DataLoader))
        assert not Path(folder).exists()
        (best,) = run.checkpoints()  # each epoch but the third was better than those before it
        assert (best.step, best.metrics) == (16, {"score": 0.0})
        assert [ck.step for ck in run.retention.evicted()] == [4, 8]
        assert all("ModelCheckpoint" in str(ck.eviction()) for ck in run.retention.evicted())
        assert run.manifest.tags == {"lightning-last": best.handle.n}
        again = HoldfastIO(run)  # as a new process makes it
        for path in (keeper.best_model_path, keeper.last_model_path):
            loaded = again.load_checkpoint(path)
            assert (loaded["global_step"], "state_dict" in loaded) == (16, True)


def share_names(url: str) -> None:
    """Two names of one checkpoint, as `save_top_k=2, save_last=True` or two callbacks have them."""
    with holdfast.open(url) as reg:
        run = reg.create_run("shared")
        io = HoldfastIO(run)
        io.trains = False  # a load looks only
        for step, names in ((1, ["best-1", "last"]), (2, ["last"]), (3, ["best-3", "last"])):
            for name in names:
                io.save_checkpoint({"global_step": step, "state_dict": {}}, f"{name}.ckpt")
        io.save_checkpoint({"global_step": 4, "state_dict": {}}, "last.ckpt")
        found = {name: io.load_checkpoint(f"{name}.ckpt") for name in ("best-1", "best-3", "last")}
        assert [found[name]["global_step"] for name in ("best-1", "best-3", "last")] == [1, 3, 4]
        assert [ck.step for ck in run.retention.evicted()] == [2]
        for name in ("a", "b"):
            io.save_checkpoint({"global_step": 5, "state_dict": {}}, f"{name}.ckpt")
        io.save_checkpoint({"global_step": 6, "state_dict": {}}, "c.ckpt")
        io.remove_checkpoint("b.ckpt")
        assert io.load_checkpoint("a.ckpt")["global_step"] == 5
        assert "lightning-b" not in run.refresh().manifest.tags
        io.save_checkpoint({"global_step": 7, "state_dict": {}}, "d.ckpt")
        io.remove_checkpoint("a.ckpt")
        assert [ck.step for ck in run.retention.evicted()] == [2, 5]
        ours, theirs = (
            {"monitor": name, "current_score": 0.5, "best_k_models": {path: score}}
            for name, path, score in (("ours", "e.ckpt", 0.25), ("theirs", "f.ckpt", 0.75))
        )
        chosen = {"state_dict": {}, "callbacks": {"a": ours, "b": theirs}}
        for step, name, found in (
            (8, "e", {"ours": 0.25}),
            (8, "f", {"ours": 0.25, "theirs": 0.75}),
            (9, "g", {}),
        ):
            io.save_checkpoint({**chosen, "global_step": step}, f"{name}.ckpt")
            assert run.refresh().latest().metrics == found
        less: dict[str, Any] = {"global_step": 10, "state_dict": {}}
        io.save_checkpoint(less, "weights.ckpt")
        with pytest.raises(
            Conflict, match=r"full\.ckpt.*with less.*optimizer_states.*weights_only"
        ):
            io.save_checkpoint({**less, "optimizer_states": []}, "full.ckpt")
        with pytest.raises(InvalidInput, match=r"no global_step.*run\.save"):
            io.save_checkpoint({"model": {}}, "fabric.ckpt")


def tell_names_apart(url: str) -> None:
    """Tags differ for equal names in two folders and for long names; a new save moves its tag."""
    long = "a-name-of-an-experiment-that-is-far-too-long-to-be-a-tag-of-a-run-"
    with holdfast.open(url) as reg:
        run = reg.create_run("apart")
        io = HoldfastIO(run)
        io.trains = False  # a load looks only

        def save(step: int, *names: str) -> None:
            for name in names:
                io.save_checkpoint({"global_step": step, "state_dict": {}}, f"{name}.ckpt")

        def load(name: str) -> int:
            return int(io.load_checkpoint(f"{name}.ckpt")["global_step"])

        save(1, "A/best", f"A/{long}1")
        save(2, "A/last", "B/best", f"A/{long}2")
        save(3, "B/new", "B/last", "A/last")
        assert [load(f"A/{long}{step}") for step in (1, 2)] == [1, 2]
        assert [load(name) for name in ("A/best", "B/best", "A/last", "B/last")] == [1, 2, 3, 3]
        save(4, "B/last")
        assert [load(name) for name in ("A/best", "A/last", "B/last")] == [1, 3, 4]
        save(5, "A/best")
        io.remove_checkpoint(f"A/{long}1.ckpt")
        assert [load(name) for name in ("A/best", "A/last", "B/last", "B/new")] == [5, 3, 4, 3]
        save(6, "A/7")
        assert [ck.step for ck in run.retention.evicted()] == [1]  # the last save evicted it


def overwrite_in_background() -> None:
    """A checkpoint stays until the save that overwrites it has ended; a failed save leaves it."""
    gate = Gate(new_backend())
    gate.open.set()
    run = open_on(gate).create_run("behind")
    io = HoldfastIO(run, background=True)

    def save(step: int, name: str) -> None:
        state = {"global_step": step, "state_dict": {"w": torch.full((9999,), float(step))}}
        io.save_checkpoint(state, f"{name}.ckpt")

    save(1, "last")
    save(2, "best")
    save(3, "other")
    io.teardown()
    gate.error = StoreUnavailable("away")
    save(4, "last")
    with pytest.raises(StoreUnavailable, match="away"):
        io.teardown()
    gate.error = None
    io.teardown()
    assert run.retention.evicted() == []
    save(5, "last")
    io.teardown()
    assert [ck.step for ck in run.retention.evicted()] == [1]


def resume_from_journal(url: str) -> None:
    """A checkpoint that the registry does not have yet."""
    BackgroundCarrier.wake = lambda self: None  # type: ignore[method-assign]
    for step in (1, 2):
        with holdfast.open(url) as reg:
            run = reg.run("waiting", create=True)
            io = HoldfastIO(run)
            path = io.resume()
            assert (path is None) == (step == 1)
            if path is not None:
                assert io.load_checkpoint(path)["global_step"] == 1
            io.save_checkpoint({"global_step": step, "state_dict": {}}, f"{step}.ckpt")


def refuse(url: str) -> None:
    """Typed errors, and nothing is saved."""
    with holdfast.open(url) as reg:
        run = reg.create_run("refused")
        saver = HoldfastCheckpoint(run)
        assert saver.resume() is None

        def fit_from(path: str) -> None:
            trainer(saver).fit(Net(0), *data(DataLoader), ckpt_path=path)

        cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
            (InvalidInput, "at least 1", lambda: HoldfastCheckpoint(run, every_n_epochs=0)),
            (NotFound, "none yet", lambda: saver.io.load_checkpoint("holdfast://refused/latest")),
            (NotFound, "no checkpoint of", lambda: HoldfastIO(run).load_checkpoint("last.ckpt")),
            (InvalidInput, "another run", lambda: saver.io.load_checkpoint("holdfast://x/latest")),
            (
                NotFound,
                r"no such file.*holdfast://refused/latest",
                lambda: fit_from("refused/latest"),
            ),
        ]
        for kind, text, call in cases:
            with pytest.raises(kind, match=text):
                call()
        run.status = "completed"
        with pytest.raises(Conflict, match=r"completed.*run.status = 'running'"):
            trainer(saver).fit(Net(0), *data(DataLoader))  # the first step would kill the process
        run.status = "running"
        sharded = pytest.MonkeyPatch()
        training = trainer(saver)
        kind = type(training.strategy)
        sharded.setattr(kind, "restore_checkpoint_after_setup", property(lambda _: True))
        with pytest.raises(InvalidInput, match="this sharded strategy is not supported"):
            training.fit(Net(), *data(DataLoader))
        sharded.undo()
        with pytest.raises(InvalidInput, match=r"do not save together.*ModelParallelStrategy"):
            is_sharding(ModelParallelStrategy(), run)
        net = Net()
        net.save_hyperparameters({"activation": torch.nn.functional.relu})
        with pytest.raises(UnsupportedValue, match=r"\['hyper_parameters'\]\['activation'\]"):
            trainer(HoldfastCheckpoint(run)).fit(net, *data(DataLoader))
        assert run.checkpoints() == []


def load_to_test(url: str, name: str) -> None:
    """Loading a ref to validate does not continue the run from there."""
    with holdfast.open(url) as reg:
        run = reg.run(name)
        first, *_, latest = run.checkpoints()
        saver, net = HoldfastCheckpoint(run), Net()
        loader = data(DataLoader)[0]
        trainer(saver).validate(net, loader, ckpt_path=f"holdfast://{first.ref}", verbose=False)
        wanted = first.load(only="model")["model"]
        assert all(torch.equal(value, wanted[key]) for key, value in net.state_dict().items())
        run.status = "running"
        run.save({"more": 1}, step=latest.step + 1)
        assert run.checkpoints()[-2] == latest  # it would be superseded, had the first been resumed
