"""Whether a training resumes exactly, and what is named when it does not."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast import Registry
from holdfast.errors import InvalidInput

Train = Callable[[Registry, int], None]


def training(
    *, keeps: tuple[str, ...] = ("model", "optimizer", "rng", "loader", "step"), seeds: bool = True
) -> Train:
    """Return a small torch training with dropout that saves, and restores, some of its parts."""

    def train(reg: Registry, stop: int) -> None:
        if seeds:
            random.seed(1)
            np.random.seed(2)
            torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
        run = reg.run("training", create=True)
        restored, first, position = run.restore(), 0, 0
        if restored is not None:
            state = restored.state
            first = restored.checkpoint.step
            model.load_state_dict(state["model"])
            if "optimizer" in state:
                optimizer.load_state_dict(state["optimizer"])
            position = state.get("loader", {"position": 0})["position"]
            if "rng" in state:
                holdfast.rng.restore(state["rng"])
        for step in range(first + 1, stop + 1):
            batch = order[position : position + 4].float()
            position += 4
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
            if step == stop:
                whole = {
                    "model": model,
                    "optimizer": optimizer,
                    "rng": holdfast.rng.capture(),
                    "loader": {"position": position},
                    "step": step,
                }
                run.save({name: whole[name] for name in keeps}, step=step)

    return train


def test_an_exact_resume_is_told_so() -> None:
    found = holdfast.verify_resume(training(), steps=6)
    assert found.ok
    assert (found.resumed_at, found.difference, found.first, found.causes) == (3, None, None, ())


@pytest.mark.parametrize(
    ("missing", "cause"),
    [
        ("rng", "the state has no random number generators: save holdfast.rng.capture()"),
        ("optimizer", "the state has no optimizer state: save optimizer.state_dict()"),
        ("loader", "the state has no position in the data: save the state_dict()"),
    ],
)
def test_a_missing_part_is_named(missing: str, cause: str) -> None:
    keeps = tuple(
        name for name in ("model", "optimizer", "rng", "loader", "step") if name != missing
    )
    found = holdfast.verify_resume(training(keeps=keeps), steps=6)
    assert not found.ok
    assert found.is_deterministic
    assert found.first == "model/0.weight"
    assert found.causes[0].startswith(cause)


def test_a_part_that_is_saved_and_not_restored_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdfast.rng, "restore", lambda state: None)
    # `verify_resume` itself uses another name for the function.
    found = holdfast.verify_resume(training(), steps=6)
    assert not found.ok
    assert "random number generators differ (rng/torch.cpu): not restored" in found.causes[0]


def test_a_training_without_seeds_is_not_blamed_on_the_resume() -> None:
    found = holdfast.verify_resume(training(seeds=False), steps=4, resume_at=1)
    assert not found.ok
    assert found.is_deterministic is False
    assert len(found.causes) == 1
    assert found.causes[0].startswith("two straight trainings differ as well")


def test_an_unseeded_generator_does_not_hide_what_the_resume_forgets() -> None:
    def train(reg: Registry, stop: int) -> None:
        torch.manual_seed(3)  # `random` and NumPy are captured, and never seeded
        run = reg.run("one", create=True)
        restored = run.restore()
        weights, first = torch.zeros(3), 0
        if restored is not None:
            weights, first = restored.state["w"], restored.checkpoint.step
        for _ in range(first, stop):
            weights = weights + torch.rand(3)
        run.save({"w": weights, "rng": holdfast.rng.capture()}, step=stop)

    found = holdfast.verify_resume(train, steps=4)
    assert (found.ok, found.is_deterministic, found.first) == (False, False, "w")
    assert found.difference is not None
    assert not [one.path for one in found.difference.values if "rng/python" in one.path]
    assert "random number generators differ (rng/torch.cpu): not restored" in found.causes[0]
    assert "two straight trainings differ elsewhere (rng/python" in found.causes[-1]


def test_generators_that_live_on_in_this_process_do_not_hide_that_none_were_saved() -> None:
    def train(reg: Registry, stop: int) -> None:
        run = reg.run("one", create=True)
        restored = run.restore()
        if restored is None:
            random.seed(1)
        weights, first = (0.0, 0) if restored is None else restored.state["w"]
        for _ in range(first, stop):
            weights += random.random()
        run.save({"w": (weights, stop)}, step=stop)

    found = holdfast.verify_resume(train, steps=4)
    assert not found.ok
    assert found.causes[0].startswith("the state has no random number generators")


@pytest.mark.parametrize(("name", "ok"), [("eval_runtime", True), ("loss", False)])
def test_times_that_a_clock_measured_do_not_count(name: str, ok: bool) -> None:
    clock = iter(range(9))

    def train(reg: Registry, stop: int) -> None:
        run = reg.run("one", create=True)
        run.restore()
        run.save({"w": stop, "trainer": {"log_history": [{name: next(clock)}]}}, step=stop)

    found = holdfast.verify_resume(train, steps=4)
    assert found.ok is ok
    assert found.straight != found.resumed


def test_what_is_kept_outside_of_the_state_is_named() -> None:
    def train(reg: Registry, stop: int) -> None:
        run = reg.run("one", create=True)
        restored = run.restore()
        weights = np.zeros(3) if restored is None else restored.state["w"]
        first = 0 if restored is None else restored.checkpoint.step
        for number, _ in enumerate(range(first, stop)):  # a counter that begins again
            weights = weights + number
        full = {"w": weights, "rng": 0, "optimizer": 0, "loader": 0, "scheduler": 0}
        run.save(full, step=stop)

    found = holdfast.verify_resume(train, steps=4)
    assert (found.first, found.ok) == ("w", False)
    assert found.causes[-1].startswith("something outside the state")
    assert found.causes[0].startswith("a part of the state is not loaded back (w): ")
    assert len(found.causes) == 2


def test_the_generators_of_the_caller_are_as_they_were() -> None:
    before = holdfast.rng.capture()
    holdfast.verify_resume(training(), steps=2)
    after = holdfast.rng.capture()
    assert all(torch.equal(one, after[name]) for name, one in before.items())


def saves(*steps: int, names: tuple[str, ...] = ("run",)) -> Train:
    given = iter(steps)

    def train(reg: Registry, stop: int) -> None:
        for name in names:
            reg.run(name, create=True).exchange.push({"w": 1}, step=next(given))

    return train


@pytest.mark.parametrize(
    ("train", "found"),
    [
        (lambda reg, stop: None, "found nothing"),
        (lambda reg, stop: reg.run("x", create=True), "found nothing"),
        (saves(5), "found step 5"),
        (saves(4, 4, names=("a", "b")), "found 2 runs"),
    ],
)
def test_a_training_that_ignores_what_it_is_given_is_an_error(train: Any, found: str) -> None:
    with pytest.raises(InvalidInput, match=found):
        holdfast.verify_resume(train, steps=4)


@pytest.mark.parametrize("given", [{"steps": 1}, {"steps": 4, "resume_at": 4}, {"steps": "x"}])
def test_steps_that_leave_no_room_for_a_resume(given: Any) -> None:
    with pytest.raises(InvalidInput):
        holdfast.verify_resume(training(), **given)


def test_nothing_is_left_behind(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch's compiler, which its optimizers import, makes a folder at its first import.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiler")))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    holdfast.verify_resume(training(), steps=2)
    with pytest.raises(InvalidInput):
        holdfast.verify_resume(saves(5), steps=4)
    assert list(tmp_path.iterdir()) == []


# Programs

PROGRAM = """
import os, random, sys
import numpy as np
import holdfast

run = holdfast.open().run(create=True)
restored = run.restore()
weights, first = np.zeros(5), 0
random.seed(1)
np.random.seed(1)
if restored is not None:
    weights, first = restored.state["w"], restored.checkpoint.step
    if "exact" in sys.argv:
        holdfast.rng.restore(restored.state["rng"])
with run.checkpointer(every_steps=100) as checkpointer:
    for step in range(first + 1, 10_000):
        weights = weights + random.random()
        checkpointer.step(step, {"w": weights, "rng": holdfast.rng.capture(), "step": step})
"""
HOLDFAST = [sys.executable, "-m", "holdfast.registry.cli"]


def verify(tmp_path: Path, *words: str, options: tuple[str, ...] = ()) -> Any:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    command = [*HOLDFAST, "verify-resume", "--steps", "6", *options, "--"]
    return subprocess.run(
        [*command, sys.executable, str(program), *words],
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_program_that_forgets_its_generators_is_found(tmp_path: Path) -> None:
    done = verify(tmp_path, options=("--at", "2"))
    assert done.returncode == 1, done.stderr
    assert "NOT exact at step 6, resumed at step 2" in done.stdout
    assert "first difference: w" in done.stdout
    assert "random number generators differ (rng/python" in done.stdout


def test_a_real_registry_and_its_journal_are_never_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, journal = tmp_path / "real", tmp_path / "journal"
    holdfast.init(real, skip_race_probe=True).create_run("train").exchange.push({"w": 0}, step=1)
    monkeypatch.setenv("HOLDFAST_JOURNAL", str(journal))
    program = tmp_path / "careless.py"
    program.write_text(
        f"import holdfast\nrun = holdfast.open({str(real)!r}).run('train', create=True)\n"
        "run.restore()\nrun.save({'w': 1}, step=2)\n"
    )
    words = [*HOLDFAST, "verify-resume", "--steps", "2", "--", sys.executable, str(program)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 3
    assert "is opened read-only: verify-resume" in done.stderr
    assert "ReadOnlyStore" in done.stderr
    assert [ck.step for ck in holdfast.open(real).run("train").checkpoints()] == [1]
    # A program with a checkpointer needs no change.
    done = verify(tmp_path, "exact", "{stop}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("exact at step 6, resumed at step 3: ")
    assert done.stderr.count("training to step") == 3
    assert not journal.exists()


def test_a_program_that_cannot_be_started_or_saves_nothing_is_an_error() -> None:
    for words, status, message in [
        (["./no-such-program"], 3, "cannot be started"),
        ([sys.executable, "-c", "import sys; sys.exit(4)"], 3, "ended with exit status 4"),
    ]:
        done = subprocess.run(
            [*HOLDFAST, "verify-resume", "--steps", "2", "--", *words],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == status
        assert message in done.stderr
