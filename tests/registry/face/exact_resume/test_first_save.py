"""The first save after a resume tells what can be proven to differ, and nothing else."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import holdfast
from holdfast import rng
from holdfast.registry.face.first_save import check_after
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
        checks = {n: check_after(states[at], at, "run/x") for n in range(at + 1, STEPS + 1)}

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
    check_after(state, 1, "run/x")({**state, "w": 2.0}, 2)
    check_after(state, 1, "run/x")({"w": 2.0}, 2)
    assert not caplog.messages
    check_after(state, 1, "run/x")({"w": 2.0, "rng": rng.capture()}, 2)
    assert "at rng were not restored" in caplog.text


def test_batches_that_were_never_loaded_are_told(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(101)
    first, again = (rng.Batches(DataLoader(torch.zeros(4))) for _ in range(2))
    state = {"batches": first.state_dict()}
    torch.rand(1)
    check_after(state, 1, "run/x")({"batches": again}, 2)
    assert "at batches/rng were not restored" in caplog.text
    again.load_state_dict(state["batches"])
    caplog.clear()
    check_after(state, 1, "run/x")({"batches": again}, 2)
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
