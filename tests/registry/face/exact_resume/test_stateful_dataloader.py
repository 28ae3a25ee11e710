"""The position of a dataloader: torchdata's StatefulDataLoader as a part of a state."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import rng
from tests.support.sameness import assert_same

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchdata 0.11 calls a deprecated function of torch
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")


def loader(workers: int, generator: torch.Generator) -> Any:
    return torchdata.StatefulDataLoader(
        torch.arange(40),
        batch_size=3,
        shuffle=True,
        num_workers=workers,
        generator=generator,
    )


@pytest.mark.filterwarnings("ignore")  # of forks in a process with threads
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_continues_with_the_batch_after_the_checkpoint(
    tmp_path: Path, workers: int
) -> None:
    own = torch.Generator().manual_seed(3)
    straight = loader(workers, own)
    batches = iter(straight)
    for _ in range(5):
        next(batches)
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        # The loader itself is in the state: its `state_dict()` is stored.
        state = {"loader": straight, "rng": rng.capture({"loader": own})}
        saved = reg.create_run("run").save(state, step=5)
        assert_same(saved.load()["loader"], straight.state_dict())
        rest = [batch.tolist() for batch in batches]
        following = [[one.tolist() for one in straight] for _ in range(2)]

        torch.manual_seed(99)  # as in another process
        own = torch.Generator().manual_seed(4)
        resumed = loader(workers, own)
        resumed.load_state_dict(saved.load()["loader"])
        batches = iter(resumed)  # it draws from the generators, so they are restored after it
        rng.restore(saved.load()["rng"], {"loader": own})
        assert [batch.tolist() for batch in batches] == rest
        assert len(rest) == 9
        assert [[one.tolist() for one in resumed] for _ in range(2)] == following
