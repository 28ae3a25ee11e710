"""The program at the top of docs/training.md trains, is stopped, and continues."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.stores import new_backend

PAGE = (Path(__file__).parents[4] / "docs" / "training.md").read_text()
(PROGRAM, *_) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def train(reg: Any, stop_at: int | None) -> list[int]:
    """Run the program; return its steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    taken: list[int] = []

    def train_step(step: int) -> float:
        taken.append(step)
        optimizer.zero_grad()
        loss = model(torch.full((4,), step / 300)).pow(2).sum()
        loss.backward()
        optimizer.step()
        if step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss.item()

    exec(PROGRAM, {"reg": reg, "model": model, "optimizer": optimizer, "train_step": train_step})
    return taken


def test_it_stops_and_continues_bit_for_bit(reg, backend, open_registry):
    with pytest.raises(SystemExit):
        train(reg, stop_at=150)
    run = reg.run("digits")
    assert ([one.step for one in run.checkpoints()], run.status) == ([100, 150], "interrupted")
    assert train(open_registry(backend), stop_at=None) == list(range(151, 301))
    assert run.refresh().status == "completed"
    other = open_registry(new_backend())
    assert train(other, stop_at=None) == list(range(1, 301))
    assert run.latest().digest == other.run("digits").latest().digest
