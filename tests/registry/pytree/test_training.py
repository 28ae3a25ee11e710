"""Real training states come back, and training goes on from them bit for bit."""

from __future__ import annotations

import copy
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedulers

from tests.support.sameness import assert_same, through

OPTIMIZERS = [
    cls
    for cls in vars(optim).values()
    if isinstance(cls, type) and issubclass(cls, optim.Optimizer) and cls is not optim.Optimizer
]


def net_of(cls=None):
    torch.manual_seed(0)
    if cls is optim.SparseAdam:
        return nn.Embedding(5, 3, sparse=True)
    if cls is getattr(optim, "Muon", None):  # since torch 2.9
        return nn.Linear(4, 3, bias=False)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.PReLU())


def step(net, optimizer):
    def closure():
        optimizer.zero_grad()
        is_table = isinstance(net, nn.Embedding)
        batch = torch.arange(5) if is_table else torch.arange(20.0).view(5, 4) / 10
        loss = (net(batch) ** 2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__name__)
def test_every_optimizer_goes_on_bit_for_bit(cls):
    net = net_of(cls)
    optimizer = cls(net.parameters(), lr=0.01)
    for _ in range(2):
        step(net, optimizer)
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    loaded = through(copy.deepcopy(state))
    assert_same(state, loaded)

    other = net_of(cls)
    restarted = cls(other.parameters(), lr=0.5)
    other.load_state_dict(loaded["model"])
    restarted.load_state_dict(loaded["optimizer"])
    step(net, optimizer)
    step(other, restarted)
    assert_same(net.state_dict(), other.state_dict())
    assert_same(optimizer.state_dict(), restarted.state_dict())


class Warmup:
    """A callable object: its attributes are its state."""

    def __init__(self, steps):
        self.steps = steps

    def __call__(self, epoch):
        return min(1.0, (epoch + 1) / self.steps)


SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LambdaLR object": lambda o: schedulers.LambdaLR(o, Warmup(5)),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3]),
    "ConstantLR": schedulers.ConstantLR,
    "LinearLR": schedulers.LinearLR,
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": schedulers.PolynomialLR,
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.001, 0.1),
    "CyclicLR exp": lambda o: schedulers.CyclicLR(o, 0.001, 0.1, mode="exp_range", gamma=0.9),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.9)], o
    ),
    "SWALR": lambda o: optim.swa_utils.SWALR(o, swa_lr=0.05),
}


def test_every_scheduler_class_is_covered():
    known = {
        name
        for name, cls in vars(schedulers).items()
        if isinstance(cls, type) and issubclass(cls, schedulers.LRScheduler) and name[0] != "_"
    }
    assert known - {"LRScheduler"} <= {name.split()[0] for name in SCHEDULERS}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on_bit_for_bit(name):
    def start():
        net = net_of()
        optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        return net, optimizer, SCHEDULERS[name](optimizer)

    def go(optimizer, scheduler):
        optimizer.step()
        if isinstance(scheduler, schedulers.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
        return [group["lr"] for group in optimizer.param_groups]

    _, optimizer, scheduler = start()
    if callable(scheduler.state_dict().get("anneal_func")):
        pytest.skip("SWALR of this torch keeps a function in its state")
    for _ in range(3):
        go(optimizer, scheduler)
    state = {"optimizer": optimizer, "scheduler": scheduler}
    loaded = through(state)
    assert_same(scheduler.state_dict(), loaded["scheduler"])
    _, optimizer2, scheduler2 = start()
    optimizer2.load_state_dict(loaded["optimizer"])
    scheduler2.load_state_dict(loaded["scheduler"])
    for _ in range(4):
        assert go(optimizer, scheduler) == go(optimizer2, scheduler2)


def test_grad_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    loaded = through({"scaler": scaler})["scaler"]
    assert_same(scaler.state_dict(), loaded)
    torch.amp.GradScaler("cpu").load_state_dict(loaded)


def test_averaged_model():
    net = net_of()
    average = optim.swa_utils.AveragedModel(
        net, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn()
    )
    average.update_parameters(net)
    loaded = through({"ema": average})["ema"]
    assert_same(average.state_dict(), loaded)
    assert loaded["n_averaged"].shape == ()
    fresh = optim.swa_utils.AveragedModel(net_of())
    fresh.load_state_dict(loaded)
    assert_same(average.state_dict(), fresh.state_dict())


class Extra(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.tensor(3))
        self.narrow = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.scratch = nn.Buffer(torch.zeros(2), persistent=False)

    def get_extra_state(self):
        return {"vocabulary": ["a", "b"], 3: (1.5, None)}

    def set_extra_state(self, state):
        assert_same(state, self.get_extra_state())


def test_buffers_and_extra_state():
    net = nn.ModuleDict(
        {"extra": Extra(), "rnn": nn.LSTM(2, 2), "head": nn.MultiheadAttention(4, 2)}
    )
    loaded = through({"model": net})["model"]
    assert_same(net.state_dict(), loaded)
    net.load_state_dict(loaded)


def test_parameters_come_back_as_tensors():
    parameter = nn.Parameter(torch.ones(2))
    loaded = through({"x": parameter, "y": [parameter]})
    assert type(loaded["x"]) is type(loaded["y"][0]) is torch.Tensor
    assert not loaded["x"].requires_grad


# Random states


def test_python_random():
    source = random.Random(5)
    source.gauss(0, 1)
    loaded = through({"rng": source.getstate()})["rng"]
    other = random.Random()
    other.setstate(loaded)
    assert [source.random(), source.gauss(0, 1)] == [other.random(), other.gauss(0, 1)]


@pytest.mark.parametrize("legacy", [True, False])
def test_numpy_legacy(legacy):
    source = np.random.RandomState(5)
    source.normal()
    loaded = through({"rng": source.get_state(legacy=legacy)})["rng"]
    assert_same(source.get_state(legacy=legacy), loaded)
    other = np.random.RandomState()
    other.set_state(loaded)
    assert source.normal(size=9).tobytes() == other.normal(size=9).tobytes()


@pytest.mark.parametrize("name", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_numpy_generators(name):
    source = np.random.Generator(getattr(np.random, name)(5))
    source.integers(10, dtype=np.int32)
    loaded = through({"rng": source.bit_generator.state})["rng"]
    assert_same(source.bit_generator.state, loaded)
    other = np.random.Generator(getattr(np.random, name)())
    other.bit_generator.state = loaded
    assert source.normal(size=9).tobytes() == other.normal(size=9).tobytes()


def test_torch_generators():
    source = torch.Generator().manual_seed(5)
    torch.randn(3, generator=source)
    loaded = through({"rng": source.get_state(), "global": torch.get_rng_state()})
    other = torch.Generator()
    other.set_state(loaded["rng"])
    assert torch.equal(torch.randn(9, generator=source), torch.randn(9, generator=other))
    first = torch.randn(9)
    torch.set_rng_state(loaded["global"])
    assert torch.equal(first, torch.randn(9))


def test_loading_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"x": torch.eye(2).to_sparse_csr(), "y": torch.zeros(2, dtype=torch.complex32)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        through(state)
    assert caught == []
