"""The first save after a resume tells what can be proven to differ, and nothing else."""

from __future__ import annotations

import gc
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import holdfast
from holdfast import rng
from holdfast.registry.face.first_save import FirstSaves
from tests.registry.saving.collective.fleet import Fleet

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchdata 0.11 calls a deprecated function of torch
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("integrations")]
EPOCH, STEPS = 6, 15
SOAKED = [(True, None, 1), (True, 3, 1), (True, 3, 3), (False, None, 2), (False, None, 3)]


@pytest.fixture(autouse=True)
def left_as_found() -> Iterator[None]:
    before = rng.capture()
    yield
    rng.restore(before)


def loader_of(shuffle: bool, seed: int | None) -> Any:
    torch.manual_seed(7)  # a sampler without a generator draws its seed when it is made
    own = None if seed is None else torch.Generator().manual_seed(seed)
    data = torch.randn(4 * EPOCH, 4, generator=torch.Generator().manual_seed(1))
    return torchdata.StatefulDataLoader(data, batch_size=4, shuffle=shuffle, generator=own)


def train(
    how: str, loader: Any, restored: Any, saves: Any, *, begins_at: int = 0, batches_a_step: int = 1
) -> torch.Tensor:
    """Train on with dropout; `how` is the order of lines in a resume; `saves` gets the states."""
    torch.manual_seed(sum(how.encode()))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step, taken, begun = begins_at, 0, None
    if restored is not None:
        torch.manual_seed(9)
        model.load_state_dict(restored["model"])
        if how != "loader forgotten":
            loader.load_state_dict(restored["loader"])
        if how == "generators first":
            rng.restore(restored["rng"])
        begun = iter(loader)
        if how in ("loader first", "loader forgotten"):
            rng.restore(restored["rng"])
    while step < STEPS:
        for batch in loader if begun is None else begun:
            model(batch).square().mean().backward()
            taken += 1
            if taken % batches_a_step:
                continue
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            saves(step, {"model": model, "loader": loader, "rng": rng.capture()})
            if step == STEPS:
                break
        begun = None
    return torch.cat([one.detach().flatten() for one in model.parameters()])


@pytest.mark.parametrize(
    ("how", "save", "said"),
    [
        ("loader first", "save", None),
        ("generators first", "save_async", "it began behind holdfast.rng.restore()"),
        (
            "generators forgotten",
            "checkpointer",
            "the generators of run/main/step00000004 at rng were not restored",
        ),
        (
            "loader forgotten",
            "save",
            "it is at batch 1 after 1 steps, and began at its first batch",
        ),
    ],
)
def test_a_resume_to_other_weights_is_told_without_batches(
    tmp_path: Path, how: str, save: str, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "holdfast")
    straight = train(how, loader_of(True, None), None, lambda *_: None)
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        run = reg.create_run("run")

        def first(step: int, state: Any) -> None:
            if step == 4:
                run.save(state, step=step)

        train(how, loader_of(True, None), None, first)
        run = reg.run("run")
        restored = run.restore()
        assert restored is not None
        with run.checkpointer(every_steps=5) as checkpointer:

            def again(step: int, state: Any) -> None:
                if save == "checkpointer":
                    checkpointer.step(step, state)
                elif step == 5:
                    getattr(run, save)(state, step=step)

            weights = train(how, loader_of(True, None), restored.state, again, begins_at=4)
    assert torch.equal(weights, straight) is (said is None)
    found = [one for one in caplog.messages if "not bit for bit" in one]
    assert len(found) == (said is not None), caplog.messages
    assert said is None or said in found[0]


@pytest.mark.parametrize(
    ("shuffle", "seed", "batches_a_step"),
    [
        (True, None, 2),
        (False, None, 1),
        *(pytest.param(*one, marks=pytest.mark.soak) for one in SOAKED),
    ],
)
def test_right_programs_hear_nothing_wherever_they_are_saved(
    caplog: pytest.LogCaptureFixture, shuffle: bool, seed: int | None, batches_a_step: int
) -> None:
    """Each step is resumed from, and each later one is the first that is saved."""
    caplog.set_level(logging.WARNING, "holdfast")
    states: dict[int, Any] = {}

    def keep(step: int, state: Any) -> None:
        states[step] = state | {"loader": state["loader"].state_dict()}
        states[step]["model"] = {n: one.clone() for n, one in state["model"].state_dict().items()}

    train("", loader_of(shuffle, seed), None, keep, batches_a_step=batches_a_step)
    for at in range(1, STEPS):
        checks = {n: FirstSaves(states[at], at, "run/x") for n in range(at + 1, STEPS + 1)}

        def compare(step: int, state: Any, checks: Any = checks) -> None:
            checks[step](state, step)

        train(
            "loader first",
            loader_of(shuffle, seed),
            states[at],
            compare,
            begins_at=at,
            batches_a_step=batches_a_step,
        )
        assert not caplog.messages, at


def test_generators_that_are_carried_along_are_no_mistake(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(102)
    state = {"w": 1.0, "rng": rng.capture()}
    torch.rand(1)
    FirstSaves(state, 1, "run/x")({**state, "w": 2.0}, 2)
    FirstSaves(state, 1, "run/x")({"w": 2.0}, 2)
    assert not caplog.messages
    FirstSaves(state, 1, "run/x")({"w": 2.0, "rng": rng.capture()}, 2)
    assert "at rng were not restored" in caplog.text


def test_batches_that_were_never_loaded_are_told(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(101)
    first, again = (rng.Batches(DataLoader(torch.zeros(4))) for _ in range(2))
    state = {"batches": first.state_dict()}
    torch.rand(1)
    FirstSaves(state, 1, "run/x")({"batches": again}, 2)
    assert "at batches/rng were not restored" in caplog.text
    again.load_state_dict(state["batches"])
    caplog.clear()
    FirstSaves(state, 1, "run/x")({"batches": again}, 2)
    assert not caplog.messages


class Forgetful(torchdata.StatefulDataLoader):
    """A loader that starts anew, as a framework's that loses the position."""

    def load_state_dict(self, state: Any) -> None:
        pass


def test_batches_say_that_their_loader_is_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    def three(loader: Any, state: Any = None) -> Any:
        batches = rng.Batches(loader)
        if state is not None:
            batches.load_state_dict(state)
        begun = iter(batches)
        for _ in range(3):
            next(begun)
        return batches.state_dict()

    saved = three(loader_of(True, None))
    three(loader_of(True, None), saved)
    assert not caplog.messages
    three(Forgetful(torch.randn(24, 4), batch_size=4, shuffle=True), saved)
    assert "it says that it is at batch 3, and is at 6" in caplog.text


class Program:
    """A training of `end` steps in which each batch is a step; `saves` gets the states."""

    def __init__(self, saves: Callable[[int, Any], None], end: int) -> None:
        self.saves, self.end, self.step = saves, end, 0
        self.loader: Any = DataLoader(data_of(), batch_size=4, shuffle=True)
        self.made = [model_of()]

    def restore(self, at: int, state: Any) -> None:
        torch.manual_seed(9)
        self.step = at
        self.made = [model_of()]
        rng.restore(state["rng"])

    def train(self, _: torch.Tensor) -> None:
        self.step += 1
        torch.nn.functional.dropout(torch.ones(8))

    def save(self) -> None:
        self.saves(self.step, {"model": self.made[-1].state_dict(), "rng": rng.capture()})

    def run(self) -> None:
        while self.step < self.end:
            for batch in self.loader:
                self.train(batch)
                if self.step % 2 == 0:
                    self.save()


class Early(Program):
    """Epochs end before the loader does, at a save."""

    def run(self) -> None:
        while self.step < self.end:
            for batch in islice(self.loader, 4):
                self.train(batch)
                if self.step % 4 == 0:
                    self.save()


class Left(Program):
    """Epochs are left at a save."""

    def run(self) -> None:
        while self.step < self.end:
            for number, batch in enumerate(self.loader):
                self.train(batch)
                if number == 3:
                    self.save()
                    break


class Skips(Program):
    """A resume takes the batches before its step, and throws them away."""

    def run(self) -> None:
        skipped = self.step % EPOCH
        while self.step < self.end:
            for number, batch in enumerate(self.loader):
                if number >= skipped:
                    self.train(batch)
                    self.save()
            skipped = 0


class Accelerated(Program):
    """Accelerate skips the batches before the step."""

    def run(self) -> None:
        loader = accelerated(self.loader)
        skipped, begun = self.step % EPOCH, loader
        if skipped:
            begun = pytest.importorskip("accelerate").skip_first_batches(loader, skipped)
        while self.step < self.end:
            for batch in begun:
                self.train(batch)
                self.save()
            begun = loader


class Grows(Program):
    """A model that grows at each third step."""

    def train(self, batch: torch.Tensor) -> None:
        if self.step % 3 == 0:
            self.made[0].append(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
        super().train(batch)

    def run(self) -> None:
        while self.step < self.end:
            for batch in self.loader:
                self.train(batch)
            self.save()


class Makes(Grows):
    """A model that is made for each epoch."""

    def train(self, batch: torch.Tensor) -> None:
        if self.step % EPOCH == 0:
            self.made = [model_of()]
        Program.train(self, batch)


class Again(Grows):
    """A training that restores its generators once more, behind a model."""

    train = Program.train

    def restore(self, at: int, state: Any) -> None:
        super().restore(at, state)
        self.made = [model_of()]
        rng.restore(state["rng"])


class Zeros(torch.nn.Module):
    """A layer that is made without random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))


class Empty(Again):
    """A model that is made without random numbers."""

    def restore(self, at: int, state: Any) -> None:
        Program.restore(self, at, state)
        self.made = [torch.nn.Sequential(Zeros(), Zeros())]


class Counts(Grows):
    """A module whose buffer counts the steps, as torch's `AveragedModel` does."""

    def __init__(self, saves: Callable[[int, Any], None], end: int) -> None:
        super().__init__(saves, end)
        self.counter: Any = torch.nn.Module()
        self.counter.register_buffer("count", torch.zeros(()))

    def train(self, batch: torch.Tensor) -> None:
        self.counter.count += 1  # which sets the attribute anew
        Program.train(self, batch)

    def save(self) -> None:
        self.saves(self.step, {"counter": self.counter.state_dict(), "rng": rng.capture()})


class Accumulates(Program):
    """Two batches a step."""

    def run(self) -> None:
        while self.step < self.end:
            for number, batch in enumerate(self.loader):
                if number % 2:
                    self.train(batch)
                    if self.step in (3, 5, 9, 13):
                        self.save()


class Late(Again):
    """A training that makes its model behind the generators."""

    def restore(self, at: int, state: Any) -> None:
        Program.restore(self, at, state)
        self.made = [model_of()]


class AcceleratedAnew(Accelerated):
    """A resume with Accelerate that skips nothing."""

    def run(self) -> None:
        self.loader = accelerated(self.loader)
        Program.run(self)


class Ahead(Program):
    """A loader of Accelerate's that keeps its position, and draws at its first batch."""

    def __init__(self, saves: Callable[[int, Any], None], end: int) -> None:
        super().__init__(saves, end)
        self.loader = accelerated(self.loader, use_stateful_dataloader=True)

    def run(self) -> None:
        while self.step < self.end:
            for batch in self.loader:
                self.train(batch)
                if self.step % EPOCH in (1, 2, 4, 5):
                    loader = self.loader.state_dict()
                    self.saves(self.step, {"rng": rng.capture(), "loader": loader})

    def restore(self, at: int, state: Any) -> None:
        gc.collect()  # an iterator of an earlier program
        self.loader.load_state_dict(state["loader"])
        super().restore(at, state)


class Behind(Ahead):
    """The same, with its generators restored behind the first batch."""

    def restore(self, at: int, state: Any) -> None:
        super().restore(at, state)
        self.restored: Any = state

    def train(self, batch: torch.Tensor) -> None:
        if hasattr(self, "restored"):
            rng.restore(self.restored["rng"])
            del self.restored
        super().train(batch)


def model_of() -> Any:
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
    )


def data_of() -> torch.Tensor:
    return torch.randn(4 * EPOCH, 4, generator=torch.Generator().manual_seed(1))


def accelerated(loader: Any, **options: Any) -> Any:
    accelerate = pytest.importorskip("accelerate")
    settings = accelerate.DataLoaderConfiguration(use_seedable_sampler=True, **options)
    return accelerate.Accelerator(cpu=True, dataloader_config=settings).prepare(loader)


WITHIN = "was saved within an epoch of a DataLoader whose position is in no state"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Early, None),
        (Left, None),
        (Skips, None),
        (Accelerated, None),
        (Grows, None),
        (Makes, None),
        (Again, None),
        (Empty, None),
        (Counts, None),
        (Accumulates, None),
        (Behind, None),
        (Ahead, "it began behind holdfast.rng.restore()"),
        (Late, "the model at model was made behind holdfast.rng.restore()"),
        (Program, WITHIN),
        (AcceleratedAnew, WITHIN),
    ],
)
def test_what_two_saves_prove(
    kind: type[Program], said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Each save is resumed from; right programs hear nothing, wrong ones where they are wrong."""
    caplog.set_level(logging.WARNING, "holdfast")
    states: dict[int, Any] = {}
    torch.manual_seed(1000 + len(kind.__name__))
    kind(states.__setitem__, 3 * EPOCH).run()
    for at, state in states.items():
        compare = FirstSaves(state, at, "run/x")
        left = [True]

        def save(step: int, state: Any, compare: Any = compare, left: list[bool] = left) -> None:
            left[0] = left[0] and not compare(state, step)

        again = kind(save, at + 2 * EPOCH)
        again.restore(at, state)
        again.run()
        found = [one for one in caplog.messages if said is not None and said in one]
        # Behind the last batch but one, Accelerate's next save is in another epoch.
        is_right = said is None or (said == WITHIN and at % EPOCH == 0) or at % EPOCH == 5
        assert (len(found), len(caplog.messages)) == ((0, 0) if is_right else (1, 1)), at
        caplog.clear()


def train_ranks(rank: int, size: int, url: str, how: str, stop: int) -> tuple[Any, list[str]]:
    """Train with dropout to a step, hang at one if it is negative."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(handler)
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    sampler = DistributedSampler(data_of(), size, rank) if size > 1 else None
    kind = DataLoader if how == "plain" else torchdata.StatefulDataLoader
    loader = kind(data_of(), batch_size=2, sampler=sampler, shuffle=sampler is None)
    torch.manual_seed(10 + rank)
    batches: Any = loader if how in ("plain", "forgotten") else rng.Batches(loader)
    each: Any = holdfast.distributed.PerRank if size > 1 else lambda part: part
    own: Any = (lambda part: part[rank]) if size > 1 else (lambda part: part)
    try:
        with holdfast.open(url) as reg:
            group = holdfast.distributed.TorchGroup(deadline_s=60) if size > 1 else None
            run, step = reg.run(how, create=True, group=group), 0
            if how in ("forgotten", "filled"):
                if found := run.restore_into({"model": model}, strict=False):
                    step = found.step
                    if how == "filled":
                        batches.load_state_dict(own(found.load(only="batches")["batches"]))
            elif restored := run.restore():
                step = restored.checkpoint.step
                model.load_state_dict(restored.state["model"])
                if how == "plain":
                    rng.restore(own(restored.state["rng"]))
                else:
                    batches.load_state_dict(own(restored.state["batches"]))
                    torch.rand(3)  # what comes between does not matter
            trained = DistributedDataParallel(model) if size > 1 else model
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            while step < abs(stop):
                for batch in batches:
                    trained(batch).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    step += 1
                    if step % 2 == 0:
                        key = "rng" if batches is loader else "batches"
                        part = rng.capture() if batches is loader else batches
                        run.save({"model": model, key: each(part)}, step=step)
                    if step == -stop:
                        time.sleep(60)
                    if step == stop:
                        break
        return [one.tolist() for one in model.parameters()], [one for one in said if "bit" in one]
    finally:
        logging.getLogger("holdfast").removeHandler(handler)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_ranks_that_are_killed_behind_a_save_continue_or_are_told(
    tmp_path: Path, size: int
) -> None:
    reg, fleet = holdfast.init(tmp_path / f"reg{size}"), Fleet()
    straight = holdfast.init(tmp_path / f"straight{size}")
    try:
        for how, said in {
            "batches": None,
            "filled": None,
            "plain": WITHIN,
            "forgotten": "the generators of forgotten/main/step00000004 at rng were not restored",
        }.items():
            fleet.begin(size, train_ranks, reg.url, how, -5)
            give_up = time.monotonic() + 300
            while how not in reg.run_names() or getattr(reg.run(how).latest(), "step", 0) < 4:
                assert time.monotonic() < give_up
                time.sleep(0.05)
            for rank in range(size):
                fleet.kill(rank)
            fleet.end(size)
            expected = fleet.run(size, train_ranks, straight.url, how, 10)
            for (weights, heard), (unbroken, _) in zip(
                fleet.run(size, train_ranks, reg.url, how, 10), expected, strict=True
            ):
                assert (weights == unbroken) is (said is None), how
                assert len(heard) == (said is not None), heard
                assert said is None or said in heard[0]
    finally:
        fleet.close()


def resumed(rank: int, size: int, url: str, forgets: int) -> tuple[list[float], list[str]]:
    """Train with dropout on every rank, and resume; one rank forgets its generators."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(handler)

    def draw() -> float:
        return float(torch.nn.functional.dropout(torch.ones(64)).sum())

    try:
        with holdfast.open(url) as reg:
            group = holdfast.distributed.TorchGroup(deadline_s=60)
            run = reg.run(f"run{forgets}", create=True, group=group)
            torch.manual_seed(100 + 10 * forgets + rank)  # a state that no other case restored
            run.save({"rng": holdfast.distributed.PerRank(rng.capture())}, step=1)
            straight = draw()
            torch.manual_seed(9)
            run = reg.run(f"run{forgets}", group=group)
            restored = run.restore()
            assert restored is not None
            if rank != forgets:
                rng.restore(restored.state["rng"][rank])
            drawn = draw()
            run.save({"rng": holdfast.distributed.PerRank(rng.capture())}, step=2)
        return [straight, drawn], [one for one in said if "bit for bit" in one]
    finally:
        logging.getLogger("holdfast").removeHandler(handler)


def test_each_of_two_ranks_hears_of_its_own_generators(tmp_path: Path) -> None:
    reg, fleet = holdfast.init(tmp_path / "reg"), Fleet()
    try:
        for forgets in (2, 1):
            for rank, ((straight, drawn), said) in enumerate(
                fleet.run(2, resumed, reg.url, forgets)
            ):
                assert (straight == drawn) is (rank != forgets)
                assert len(said) == (rank == forgets), said
    finally:
        fleet.close()
