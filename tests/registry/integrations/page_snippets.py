"""The snippets of docs/integrations, and the reader's own names for them; for a child process."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import torch

PAGES = Path(__file__).parents[3] / "docs" / "integrations"
_BLOCK = re.compile(r"^<!-- lines: ([^\n]*) -->\n```python\n(.*?)^```$", re.M | re.S)


def blocks(page: str) -> dict[str, str]:
    """Return the snippets of a page by their marks."""
    return dict(_BLOCK.findall((PAGES / page).read_text()))


def execute(page: str, folder: str, strike: int | None = None) -> None:
    """Run the snippets of a page in order, in a folder; in the plain loop be killed at a step."""
    os.chdir(folder)
    for kind in ("CACHE", "CONFIG", "DATA"):  # not the home of whoever runs the tests
        os.environ[f"WANDB_{kind}_DIR"] = str(Path(folder) / "wandb-own")
    names = _readers_own(page, strike)
    for text in blocks(page).values():
        exec(compile(text, page, "exec"), names)


def _readers_own(page: str, strike: int | None) -> dict[str, Any]:
    torch.manual_seed(1)
    random.seed(1)  # a fork seeds it otherwise
    if page == "lightning.md":
        from tests.registry.integrations import lightning_training

        return {"model": lightning_training.Net(), "loader": lightning_training.data_loader()}
    if page == "transformers.md":
        from tests.registry.integrations import transformers_training

        return {"model": transformers_training.model(False), "data": transformers_training.data()}
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    done = 0

    def train_step(batch: torch.Tensor) -> None:
        nonlocal done
        if done == strike:
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1
        optimizer.zero_grad()
        (model(batch) ** 2).mean().backward()
        optimizer.step()

    data = torch.randn(56, 4)
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    own = {"model": model, "optimizer": optimizer, "train_step": train_step}
    return {**own, "data": data, "loader": loader}


def log_without_a_run() -> None:
    """A typed error, not W&B's own."""
    import pytest

    import holdfast
    import holdfast.wandb
    from holdfast.errors import InvalidInput

    with holdfast.init("memory://no-run").run("r", create=True) as run:
        checkpoint = run.save({"x": 1}, step=1)
    with pytest.raises(InvalidInput, match="no W&B run"):
        holdfast.wandb.log(checkpoint)
