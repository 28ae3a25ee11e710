"""What long chains of deltas cost: seconds of saves and loads, by how many saves went before.

The Hydra workload, one save after another, every trainable tensor moved between two. Each save goes
to all contenders in a new random order, and is timed beside hashing and writing the same bytes;
loads, of the newest checkpoint into memory that is there, beside reading and hashing them. Files
are in the page cache. A save with deltas reads the checkpoint before, through all of its chain
unless a cache of chunks has it, as a load by the same trainer does then.

    python chains.py [--saves N] [--scale S] [--dir FOLDER]
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from peers import hashed_read, hashed_write, plain_write
from rich.console import Console
from rich.table import Table
from workloads import blank, flatten, hydra, size_bytes

import holdfast
from holdfast.registry.store.chunk_cache import ChunkCache

YARDSTICK = "hash and write"
#: Options of `registry.init`, and whether the trainer keeps a cache of chunks.
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "raw": ({}, False),
    "zstd": ({"compression": "zstd"}, False),
    "deltas, 8": ({"compression": "zstd", "keyframe_every": 8}, False),
    "deltas, 32": ({"compression": "zstd", "keyframe_every": 32}, False),
    "deltas, 32, cached": ({"compression": "zstd", "keyframe_every": 32}, True),
}
#: Saves that came before: the rows of the tables.
BINS = ((1, 4), (5, 8), (9, 16), (17, 24), (25, 32))

Seconds = dict[str, list[float]]


class _Trainer:
    """A run of its own in a registry of its own."""

    def __init__(self, folder: Path, options: dict[str, Any], *, is_cached: bool) -> None:
        folder.mkdir()
        cache = ChunkCache(folder / "cache") if is_cached else None
        holdfast.init(folder / "registry", **options).close()
        self._open = holdfast.open(folder / "registry", cache=cache)
        self._run = self._open.create_run("run", seed=0)

    def save(self, state: Any) -> None:
        self._run.save(state, step=state["global_step"])

    def load(self, into: Any) -> None:
        checkpoint = self._run.latest()
        assert checkpoint is not None
        checkpoint.load_into(into)

    def close(self) -> None:
        self._open.close()


def measure(saves: int, scale: float, folder: Path) -> tuple[Seconds, Seconds, int]:
    """Save and load a history in every way; return the seconds of each, and a state's size."""
    training, into = hydra(scale), blank("hydra", scale)
    trainers = {
        name: _Trainer(folder / name, options, is_cached=is_cached)
        for name, (options, is_cached) in WAYS.items()
    }
    saving: Seconds = {name: [] for name in (YARDSTICK, *WAYS)}
    loading: Seconds = {name: [] for name in (YARDSTICK, *WAYS)}
    plain, file = folder / "plain", folder / "file"
    order = random.Random(0)
    for number in range(saves):
        state = training.next_save() if number else training.state()
        tensors = flatten(state)
        plain.mkdir()
        plain_write(tensors, file)
        _time_all(
            saving,
            order,
            {name: partial(trainer.save, state) for name, trainer in trainers.items()}
            | {YARDSTICK: partial(hashed_write, tensors, plain)},
        )
        _time_all(
            loading,
            order,
            {name: partial(trainer.load, into) for name, trainer in trainers.items()}
            | {YARDSTICK: partial(hashed_read, file, flatten(into))},
        )
        shutil.rmtree(plain)
        file.unlink()
    for trainer in trainers.values():
        trainer.close()
    return saving, loading, size_bytes(tensors)


def _time_all(
    seconds: Seconds, order: random.Random, acts: Mapping[str, Callable[[], object]]
) -> None:
    for name in order.sample(list(acts), len(acts)):
        begun = time.perf_counter()
        acts[name]()
        seconds[name].append(time.perf_counter() - begun)


def _print(title: str, seconds: Seconds) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("saves before")
    table.add_column(f"{YARDSTICK}, s", justify="right")
    for name in WAYS:
        table.add_column(name, justify="right")
    for first, last in BINS:
        plain = seconds[YARDSTICK][first : last + 1]
        if not plain:
            break
        ratios = (
            median(one / by for one, by in zip(seconds[name][first : last + 1], plain, strict=True))
            for name in WAYS
        )
        cells = [f"{ratio:.2f}" for ratio in ratios]
        table.add_row(f"{first} to {last}", f"{median(plain):.2f}", *cells)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what chains of deltas cost.")
    parser.add_argument("--saves", type=int, default=33)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--dir", type=Path, help="default: the temp folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=options.dir) as folder:
        saving, loading, nbytes = measure(options.saves, options.scale, Path(folder))
    _print(f"A save of {nbytes / 1e6:.0f} MB / hashing and writing it", saving)
    _print("A load / reading and hashing the file", loading)


if __name__ == "__main__":
    main()
