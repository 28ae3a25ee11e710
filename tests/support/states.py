"""Small states to save, and whether two states are the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from holdfast import Checkpoint, Registry, Run


def small_state(i: int = 0) -> dict[str, Any]:
    """Return a state of two components, a few kB each, other ones for every `i`."""
    return {
        "model": {"w": np.arange(600, dtype=np.float32) + i, "b": np.full(100, 0.5 + i)},
        "optimizer": {"m": np.arange(900, dtype=np.int32) * 3 + i, "lr": 0.1, "step": i},
    }


def same(a: Any, b: Any) -> bool:
    """Return whether two states are equal, types included; they may hold arrays and tensors."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if hasattr(a, "is_contiguous"):
        return bool((a.dtype, a.shape) == (b.dtype, b.shape)) and _bits(a) == _bits(b)
    return bool(a == b)


def _bits(tensor: Any) -> bytes:
    import torch  # takes seconds, and few states have tensors

    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def make_state(step: int) -> dict[str, Any]:
    """Return the state of a step: half of the model stays, the rest changes from step to step."""
    fresh = np.random.default_rng(step)
    return {
        "model": {
            "embedding": np.arange(300, dtype=np.float32).reshape(30, 10),
            "head": fresh.standard_normal((10, 12)).astype(np.float32),
            "scale": np.array([step, 1.5], np.float32),  # small enough to lie in the manifest
        },
        "optimizer": {"moments": fresh.standard_normal(40), "groups": [{"lr": 0.1 / (step + 1)}]},
        "step": step,
    }


def entries(start: int, stop: int) -> list[dict[str, Any]]:
    """Return entries of a stream, one for each step."""
    return [{"step": step, "loss": 1 / (1 + step)} for step in range(start, stop)]


def save_small(run: Run, *steps: int, **options: Any) -> list[Checkpoint]:
    """Save the small state of each step; return the checkpoints."""
    return [run.save(small_state(step), step=step, **options) for step in steps]


def run_by(reg: Registry, folder: Path, preset: str, name: str = "declared") -> Run:
    """Create a run by the text of a preset; the folder is for its file."""
    (folder / "preset.toml").write_text(preset)
    return reg.create_run(name, preset=str(folder / "preset.toml"))


def filled(shape: Sequence[int], name: str) -> Any:
    """Return a tensor of a type of torch with random bits."""
    import torch  # takes seconds, and few states have tensors

    dtype = getattr(torch, name)
    count = math.prod(shape) * dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype)
    data = np.random.default_rng(count).integers(0, 2 if name == "bool" else 256, count, "u1")
    return torch.from_numpy(data).view(dtype).reshape(shape)
