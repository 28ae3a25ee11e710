"""A loop over a loader: after a resume, batches and weights are those of an unbroken training."""

from __future__ import annotations

import copy
import logging
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

import holdfast
from holdfast.errors import IncompatibleState
from holdfast.registry.face.batches import lost_within_an_epoch
from holdfast.rng import Batches

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchdata 0.11 calls a deprecated function of torch
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")
accelerate = pytest.importorskip("accelerate", reason="needs accelerate")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("integrations")]
#: Three epochs of six batches, and one step more.
EPOCH, STEPS = 6, 19


class Samples(Dataset[torch.Tensor]):
    """Samples that are drawn upon, if they are."""

    def __init__(self, *, draws: bool) -> None:
        self.draws = draws
        self.data = torch.randn(8 * EPOCH, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(1).item() + random.random() + np.random.rand() if self.draws else 0.0
        return self.data[index] + noise


class Streamed(IterableDataset[torch.Tensor]):
    """Samples with a position of their own."""

    def __init__(self) -> None:
        self.at, self.data = 0, Samples(draws=False).data

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < len(self.data):
            self.at += 1
            yield self.data[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Own:
    """A loader that draws its order at its first batch, and can be told where to continue."""

    def __init__(self) -> None:
        self.seed, self.at, self.data = -1, 0, Samples(draws=False).data

    def __iter__(self) -> Iterator[torch.Tensor]:
        drawn = int(torch.randint(1000, ()))
        self.seed = drawn if self.seed < 0 else self.seed
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.seed))
        for one in order.split(8)[self.at :]:
            self.at += 1
            yield self.data[one]
        self.seed, self.at = -1, 0

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.at = state["seed"], state["at"]


def stateful(*, draws: bool = False, **options: Any) -> Any:
    if options.keys() <= {"num_workers", "persistent_workers", "generator"}:
        options["shuffle"] = True
    data = Samples(draws=draws)
    return torchdata.StatefulDataLoader(data, batch_size=8, **options)


def prepared(*, draws: bool = False, seedable: bool = True, **options: Any) -> Any:
    settings = accelerate.DataLoaderConfiguration(
        use_stateful_dataloader=True, use_seedable_sampler=seedable
    )
    loader = DataLoader(Samples(draws=draws), batch_size=8, shuffle=True, **options)
    return accelerate.Accelerator(cpu=True, dataloader_config=settings).prepare(loader)


def plain(*, draws: bool = False, **options: Any) -> Any:
    return DataLoader(Samples(draws=draws), batch_size=8, shuffle=True, **options)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS = {
    "stateful": stateful,
    "stateful, generator": lambda: stateful(generator=generator()),
    "stateful, draws": lambda: stateful(draws=True),
    "stateful, workers": lambda: stateful(num_workers=2),
    "stateful, persistent": lambda: stateful(num_workers=2, persistent_workers=True),
    "stateful, torch's sampler": lambda: stateful(sampler=RandomSampler(Samples(draws=False))),
    "streamed": lambda: torchdata.StatefulDataLoader(Streamed(), batch_size=8),
    "accelerate": prepared,
    "accelerate, workers": lambda: prepared(num_workers=2),
    "accelerate, draws": lambda: prepared(draws=True),
    "accelerate, not seedable": lambda: prepared(seedable=False),
    "plain": plain,
    "plain, generator": lambda: plain(generator=generator()),
    "plain, draws": lambda: plain(draws=True),
    "own": Own,
    "steps": lambda: range(EPOCH),
}
SLOW = {name for name in LOADERS if "workers" in name or "persistent" in name}
#: Where a training is saved and resumed: within an epoch, at the last batch of one, and after it.
WITHIN, LAST, AFTER = (1, 8), (12,), (-6,)


def train(name: str, state: Any = None) -> tuple[torch.Tensor, list[float], dict[int, Any]]:
    """Train on; return weights, batches, and the states by step (negative: after an epoch)."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    batches = Batches(LOADERS[name]())
    step, seen, states = 0, [], {}
    if state is not None:
        state = copy.deepcopy(state)
        batches.load_state_dict(state["batches"])  # before all that draws: the order is free
        torch.manual_seed(9)
        random.seed(9)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]

    def dump() -> Any:
        parts = {"model": model, "optimizer": optimizer, "batches": batches}
        found = {key: one.state_dict() for key, one in parts.items()} | {"step": step}
        # Nothing resumes from the states of a training that was itself resumed.
        return copy.deepcopy(found) if state is None else None

    while step < STEPS:
        for batch in batches:
            if isinstance(batch, int):  # a loop that draws its own batches
                batch = torch.rand(8, 4) + batch
            seen.append(batch.sum().item())
            (model(batch) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            states[step] = dump()
            if step == STEPS:
                break
        if step % EPOCH == 0:
            states[-step] = dump()
    return torch.cat([one.flatten() for one in model.parameters()]), seen, states


@pytest.fixture(autouse=True)
def left_as_found() -> Iterator[None]:
    before = holdfast.rng.capture()
    yield
    holdfast.rng.restore(before)


@pytest.mark.parametrize(
    ("name", "exact", "why"),
    [
        ("stateful", (*WITHIN, *LAST, *AFTER), None),
        ("stateful, generator", (*WITHIN, *LAST, *AFTER), None),
        ("stateful, draws", (*WITHIN, *LAST, *AFTER), None),
        ("stateful, workers", (8, 6, -6), None),
        pytest.param("stateful, persistent", (8, 6, -6), None, marks=pytest.mark.soak),
        ("streamed", (*WITHIN, *LAST, *AFTER), None),
        ("accelerate", (*WITHIN, *LAST, *AFTER), None),
        ("steps", (*WITHIN, *LAST, *AFTER), None),
        ("accelerate, workers", (1, 8, 6, -6), None),
        ("own", (*WITHIN, 5), "drew random numbers, and it begins there"),
        ("accelerate, draws", (*LAST, *AFTER), "drew random numbers, and it begins there"),
        ("accelerate, not seedable", (*LAST, *AFTER), "order of its RandomSampler"),
        ("stateful, torch's sampler", (*LAST, *AFTER), "order of its RandomSampler"),
        ("plain", (*LAST, *AFTER), "within an epoch"),
        ("plain, draws", (*LAST, *AFTER), "within an epoch"),
        ("plain, generator", AFTER, "within an epoch"),
    ],
)
def test_a_resumed_loop_is_bit_for_bit_or_says_that_it_is_not(
    name: str, exact: tuple[int, ...], why: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "holdfast")
    weights, seen, states = train(name)
    for at in exact:
        again, rest, _ = train(name, states[at])
        assert rest == seen[abs(at) :], at
        assert torch.equal(again, weights), at
    if why is None:
        assert not caplog.messages
        return
    train(name, states[3])
    assert any(why in one for one in caplog.messages), caplog.messages


def test_a_loop_that_goes_around_its_batches_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    _, _, states = train("stateful")
    loader = stateful()
    batches = Batches(loader)
    batches.load_state_dict(states[8]["batches"])
    assert batches.state_dict().keys() == states[8]["batches"].keys()
    assert not caplog.messages
    next(iter(loader))
    batches.state_dict()
    assert "did not iterate over its Batches" in caplog.text


def test_steps_are_counted_over_several_resumes_and_anew_for_each_epoch() -> None:
    def resumed(state: Any, taken: int) -> tuple[list[int], Any]:
        batches = Batches(range(5))
        if state is not None:
            batches.load_state_dict(state)
        found = []
        for step in batches:
            found.append(step)
            if len(found) == taken:
                break
        return found, batches.state_dict()

    first, state = resumed(None, 2)
    second, state = resumed(state, 2)
    rest, ended = resumed(state, 9)
    assert [first, second, rest] == [[0, 1], [2, 3], [4]]
    assert resumed(ended, 9)[0] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("state", [3, {}, {"rng": holdfast.rng.capture()}])
def test_a_state_of_another_kind_is_refused(state: Any) -> None:
    with pytest.raises(IncompatibleState, match="Batches"):
        Batches([1, 2]).load_state_dict(state)


@pytest.mark.parametrize(
    ("own", "ranks", "is_told"), [(False, 2, True), (True, 2, False), (False, 1, False)]
)
def test_accelerate_that_counts_the_batches_of_others_is_told(
    monkeypatch: pytest.MonkeyPatch, own: bool, ranks: int, is_told: bool
) -> None:
    """Before 1.13 the shard of a rank inherits the adjustment that only its dispatcher needs."""

    def adjust(self: object) -> None:
        pass

    adjust.__qualname__ = f"DataLoader{'Shard' if own else 'Adapter'}.adjust"
    made = {"__module__": "accelerate.data_loader", "adjust_state_dict_for_prefetch": adjust}
    loader = type("DataLoaderShard", (), made | {"state_dict": lambda _: {}})()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    assert bool(lost_within_an_epoch(loader)) is is_told
