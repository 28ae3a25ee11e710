"""The README: its two commands exist, its seven lines resume, and each promise names its test."""

from __future__ import annotations

import contextlib
import re
import subprocess
from pathlib import Path

import pytest

import holdfast
from tests.support.pages import GUIDES, README, ROOT, blocks, readers_own, run_python

_TEXT = README.read_text(encoding="utf-8")


def test_the_first_two_commands_exist() -> None:
    first = blocks(README)[0]
    assert first.language == "sh"
    scripts = re.findall(r"^sh (\S+)", first.text, re.M)
    assert len(scripts) == 2
    for script in scripts:
        assert (ROOT / script).is_file()
        subprocess.run(["sh", "-n", str(ROOT / script)], check=True)


def test_it_is_read_in_five_minutes_and_leads_to_every_guide() -> None:
    assert len(_TEXT.split()) <= 1000
    for page in GUIDES:
        assert f"({page.relative_to(ROOT)})" in _TEXT


def test_its_seven_lines_train_and_continue(newcomer: Path) -> None:
    names = readers_own()
    with holdfast.init("checkpoints") as reg:
        _, program = (block for block in blocks(README) if block.language == "python")
        assert program.text.count("  # +") == 7
        run_python(README, program, names)
        first = reg.checkpoint("digits/latest")
        assert (first.step, len(reg.run("digits").checkpoints())) == (300, 3)
        before = {name: value.clone() for name, value in names["model"].state_dict().items()}
        # The same program again: it finds its end, and trains no step.
        names |= readers_own()
        run_python(README, program, names)
        assert reg.checkpoint("digits/latest").digest == first.digest
        after = names["model"].state_dict()
        assert all((before[name] == after[name]).all() for name in before)


def test_its_seven_lines_continue_a_model_with_dropout_bit_for_bit(newcomer: Path) -> None:
    torch = pytest.importorskip("torch")
    _, program = (block for block in blocks(README) if block.language == "python")

    def train(folder: str, stop: int | None) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2))
        optimizer = torch.optim.AdamW(model.parameters())

        def train_step(step: int) -> float:
            if step == stop:
                raise InterruptedError
            optimizer.zero_grad()
            loss = (model(torch.ones(4, 8)) ** 2).mean()
            loss.backward()
            optimizer.step()
            return float(loss.item())

        text = program.text.replace('"checkpoints"', f'"{folder}"')
        exec(text, {"model": model, "optimizer": optimizer, "train_step": train_step})

    found = []
    for folder, stops in (("straight", [None]), ("stopped", [150, None])):
        holdfast.init(folder).close()
        for seed, stop in enumerate(stops, 1):
            torch.manual_seed(seed)
            with contextlib.suppress(InterruptedError):
                train(folder, stop)
        with holdfast.open(folder) as reg:
            found.append(reg.checkpoint("digits/latest"))
    assert [one.step for one in found] == [300, 300]
    assert found[0].digest == found[1].digest


@pytest.mark.parametrize("number", range(1, 9))
def test_every_promise_names_its_test(number: int) -> None:
    (name,) = re.findall(rf"\(tests/promises/(test_promise_{number}_\w+\.py)\)", _TEXT)
    assert f"def {name.removesuffix('.py')}(" in (ROOT / "tests/promises" / name).read_text()
