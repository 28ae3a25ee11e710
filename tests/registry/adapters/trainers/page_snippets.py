"""The snippets of docs/integrations, and the reader's own names for them; for a child process."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import torch

PAGES = Path(__file__).parents[4] / "docs" / "integrations"
_BLOCK = re.compile(r"^<!-- lines: ([^\n]*) -->\n```python\n(.*?)^```$", re.M | re.S)


def blocks(page: str) -> dict[str, str]:
    """Return the snippets of a page by their marks."""
    return dict(_BLOCK.findall((PAGES / page).read_text()))


def execute(page: str, folder: str, strike: int | None = None) -> None:
    """Run the snippets of a page in order, in a folder; in a plain loop be killed at a step."""
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
        from tests.registry.adapters.trainers import lightning_training

        return {"model": lightning_training.Net(), "loader": lightning_training.data_loader()}
    if page == "transformers.md":
        from tests.registry.adapters.trainers import transformers_training

        return {"model": transformers_training.model(False), "data": transformers_training.data()}
    if page == "jax.md":
        from tests.registry.adapters.trainers import jax_trees

        return jax_trees.readers_own(strike)
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


def two_ranks_with_accelerate(url: str, name: str, strike: int | None) -> None:
    """Train as one of two ranks, as docs/integrations/accelerate.md says; each has its dropout."""
    from accelerate import Accelerator, DataLoaderConfiguration

    import holdfast
    from holdfast.distributed import PerRank, TorchGroup

    own = _readers_own("accelerate.md", None)
    stateful = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
    accelerator = Accelerator(dataloader_config=stateful, cpu=True)
    prepared = accelerator.prepare(own["model"], own["optimizer"], own["loader"])
    model, optimizer, batches = *prepared[:2], holdfast.rng.Batches(prepared[2])
    torch.manual_seed(2 + accelerator.process_index)
    with holdfast.open(url) as reg:
        run, step = reg.run(name, create=True, group=TorchGroup()), 0
        if restored := run.restore():
            accelerator.unwrap_model(model).load_state_dict(restored.state["model"])
            optimizer.load_state_dict(restored.state["optimizer"])
            batches.load_state_dict(restored.state["batches"][accelerator.process_index])
            step = restored.checkpoint.step
        while step < 9:
            for batch in batches:
                if step == strike:
                    os.kill(os.getpid(), signal.SIGKILL)
                accelerator.backward((model(batch) ** 2).mean())
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step % 3 == 0:
                    state = {"model": accelerator.unwrap_model(model), "optimizer": optimizer}
                    run.save({**state, "batches": PerRank(batches)}, step=step)
        run.close()


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
