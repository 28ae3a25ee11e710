"""A run of a registry in memory, and the file system over it, every call to the store counted."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec
import numpy as np
import pytest
import torch

from holdfast.backends.wrappers import Metered
from holdfast.filesystem import HoldfastFileSystem
from holdfast.registry.adapters.filesystem import session
from holdfast.registry.face.factory import open_on
from holdfast.registry.face.registry import Registry
from holdfast.registry.spec.policies import Monitor

URL = "memory://files"


@pytest.fixture
def meter(backend) -> Metered:
    """The store as the file system sees it."""
    return Metered(backend)


@pytest.fixture
def fs(meter, monkeypatch) -> Iterator[HoldfastFileSystem]:
    """The instance that libraries get for `holdfast://` with `registry=URL`."""
    opened: list[Registry] = []

    def open_counted(url, **options) -> Registry:
        assert url == URL
        assert options["read_only"]
        opened.append(open_on(meter))
        return opened[-1]

    monkeypatch.setattr(session, "open_registry", open_counted)
    fsspec.register_implementation("holdfast", HoldfastFileSystem, clobber=True)
    HoldfastFileSystem.clear_instance_cache()
    yield fsspec.filesystem("holdfast", registry=URL)
    HoldfastFileSystem.clear_instance_cache()
    for registry in opened:
        registry.close()


@pytest.fixture
def run(reg):
    monitors = [Monitor(metric="loss", mode="min"), Monitor(metric="accuracy", mode="max")]
    return reg.create_run("run", seed=1, monitor=monitors)


def weights(seed: int = 0) -> dict[str, object]:
    """Tensors of several types and sizes: without axes, empty, of one chunk and of many."""
    random = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(41, 25, generator=random),
        "cube": torch.randn(3, 21, 10, generator=random),
        "half": torch.randn(7, 33, generator=random).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "again": torch.zeros(300, dtype=torch.int16),
        "zeros": torch.zeros(300, dtype=torch.int16),
        "array": np.arange(100, dtype=np.uint32),
    }


def plain(seed: int = 0) -> dict[str, object]:
    """A state that fits into a torch file."""
    model = {name: one for name, one in weights(seed).items() if isinstance(one, torch.Tensor)}
    optimizer = {"state": {0: {"exp_avg": torch.ones(9)}}, "lr": 0.1, "betas": (0.9, 0.999)}
    return {"model": model, "optimizer": optimizer, "note": "x" * 70_000, "step": 3}
