"""Shipping weights from a trainer to a worker that has the ones before, as RL does by thousands.

A trainer keeps bf16 weights of fp32 masters in a local folder, save after save. Of each save a
worker takes what it needs and ends with the new weights in its tensors; every contender's tensors
are held against the trainer's. Bytes are what a worker far away would have to be sent: for Holdfast
what its backend read (log, manifest and tables included), for the peers the size of the files that
are new. Seconds are the worker's, on the clock and of the processor, without a network and with
all files in the page cache. After `--keyframe-every` saves Holdfast stores chunks whole once.

    live     Holdfast, `run.follow.into(model)`: the model itself is the base of deltas
    trusting the same with `rehash=False`: what stays as it is is not hashed
    cached   Holdfast, `load_into` with a chunk cache that holds the checkpoint before
    whole    Holdfast, `load_into` with nothing at hand, as for a worker that starts
    file     a safetensors file, read whole
    patch    the same file by `zstd --patch-from` the one before, applied
    icechunk a Zarr array per tensor, Blosc-compressed, one commit a save

How much changes is set by the size of an update, which each element gets with a random sign, as
AdamW's are: most are lost in rounding to bf16. `100 %` gives every element another value,
`1 tensor` those of one tensor.

    python follow.py [--mb 256] [--rounds N] [--keyframe-every N] [--dir FOLDER]
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from peers import safetensors_load
from presence import is_here
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

import holdfast
from holdfast.backends.local.backend import LocalBackend
from holdfast.backends.wrappers import Metered
from holdfast.registry.face.factory import open_on
from holdfast.registry.store.chunk_cache import ChunkCache

TENSORS = 64
#: Spread of the weights, and the updates that change about 1 % and 10 % of them.
SPREAD = 0.02
UPDATES = {"1 %": 2.5e-7, "10 %": 2.7e-6, "100 %": 0.0, "1 tensor": -1.0}
OURS = ("live", "trusting", "cached", "whole")
PATCH, ICECHUNK = "patch", "icechunk"

Tensors = dict[str, torch.Tensor]


class Trainer:
    """Masters in float32 and what they are rounded to."""

    def __init__(self, mb: int) -> None:
        self._random = torch.Generator().manual_seed(0x484F)
        rows = max(1, mb * 2**20 // TENSORS // 4096)
        self._masters = {
            f"layers.{number}.weight": self._noise((rows, 2048)) * SPREAD
            for number in range(TENSORS)
        }
        self.weights: Tensors = {}
        self._round()

    @property
    def size_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights.values())

    def step(self, update: float) -> float:
        """Train on; return the share of elements that changed."""
        before = self.weights
        masters = list(self._masters.values())
        if update < 0:
            masters, update = masters[:1], 0.0
        for master in masters:
            noise = self._noise(master.shape)
            if update:
                master.add_(noise.sign_(), alpha=update)
            else:
                master.mul_(0.9).add_(noise, alpha=0.4 * SPREAD)
        self._round()
        changed = sum(int((before[name] != new).sum()) for name, new in self.weights.items())
        return changed / sum(weight.numel() for weight in self.weights.values())

    def _noise(self, shape: Any) -> torch.Tensor:
        return torch.randn(shape, generator=self._random)

    def _round(self) -> None:
        self.weights = {name: master.bfloat16() for name, master in self._masters.items()}


class Shelf:
    """The folder between the trainer and the worker: every contender's files, and its worker."""

    def __init__(self, folder: Path, trainer: Trainer, keyframe_every: int) -> None:
        self._folder = folder
        self._trainer = trainer
        here = {
            PATCH: is_here(PATCH, program="zstd"),
            ICECHUNK: is_here(ICECHUNK, "icechunk"),
        }
        self.names = [*OURS, "file", *(name for name in here if here[name])]
        self.models = {name: _empty(trainer.weights) for name in self.names}
        kept = holdfast.init(folder / "registry", compression="zstd", keyframe_every=keyframe_every)
        self._run = kept.create_run("run")
        self._meters = {name: Metered(LocalBackend(folder / "registry")) for name in OURS}
        cache = ChunkCache(folder / "cache")
        self._runs = {
            name: open_on(meter, cache=cache if name == "cached" else None).run("run")
            for name, meter in self._meters.items()
        }
        self._following = {
            name: self._runs[name].follow.into(self.models[name], component="model", rehash=rehash)
            for name, rehash in (("live", None), ("trusting", False))
        }
        self._saves = 0
        self._icechunk = _Icechunk(folder / ICECHUNK) if here[ICECHUNK] else None
        self._peer_bytes: dict[str, int] = {}

    @property
    def acts(self) -> dict[str, Callable[[], object]]:
        """How each worker takes the newest save."""
        return {
            **{name: following.poll for name, following in self._following.items()},
            "cached": lambda: self._load("cached"),
            "whole": lambda: self._load("whole"),
            "file": lambda: safetensors_load(self._file(0), self.models["file"]),
            PATCH: self._apply,
            ICECHUNK: lambda: self._icechunk.read(self.models[ICECHUNK]),
        }

    def save(self) -> None:
        """Keep the trainer's weights in every way."""
        weights = self._trainer.weights
        self._saves += 1
        self._run.save({"model": weights}, step=self._saves)
        self._file(2).unlink(missing_ok=True)
        save_file(weights, self._file(0))
        self._peer_bytes["file"] = self._file(0).stat().st_size
        if self._saves > 1 and PATCH in self.names:
            _zstd("-1", f"--patch-from={self._file(1)}", self._file(0), "-o", self._patch)
            self._peer_bytes[PATCH] = self._patch.stat().st_size
        if self._icechunk is not None:
            before = _bytes_in(self._folder / ICECHUNK)
            self._icechunk.write(weights)
            self._peer_bytes[ICECHUNK] = _bytes_in(self._folder / ICECHUNK) - before

    def measure(self, name: str) -> tuple[float, float, int]:
        """Let a worker take the newest save; return seconds, CPU seconds and what it was sent."""
        meter = self._meters.get(name)
        before = meter.snapshot().read_bytes if meter else 0
        begun, begun_cpu = time.perf_counter(), _cpu_s()
        self.acts[name]()
        seconds, cpu_s = time.perf_counter() - begun, _cpu_s() - begun_cpu
        wrong = [
            path
            for path, weight in self._trainer.weights.items()
            if not torch.equal(self.models[name][path], weight)
        ]
        if wrong:
            raise SystemExit(f"{name} did not bring the weights: {wrong[:3]}")
        sent = meter.snapshot().read_bytes - before if meter else self._peer_bytes[name]
        return seconds, cpu_s, sent

    def _load(self, name: str) -> None:
        newest = self._runs[name].latest()
        assert newest is not None
        newest.load_into(self.models[name], component="model")

    def _apply(self) -> None:
        made = self._folder / "patched"
        _zstd("-d", f"--patch-from={self._file(1)}", self._patch, "-o", made)
        safetensors_load(made, self.models[PATCH])

    @property
    def _patch(self) -> Path:
        return self._folder / "patch.zst"

    def _file(self, age: int) -> Path:
        return self._folder / f"{self._saves - age}.safetensors"


class _Icechunk:
    """A repository with an array for each tensor, bf16 as its bits."""

    def __init__(self, folder: Path) -> None:
        import icechunk

        folder.mkdir()
        storage = icechunk.local_filesystem_storage(str(folder))
        self._repository = icechunk.Repository.create(storage)

    def write(self, weights: Tensors) -> None:
        import zarr
        from zarr.codecs import BloscCodec

        session = self._repository.writable_session("main")
        group = zarr.open_group(session.store, mode="a")
        for name, weight in weights.items():
            bits = _bits(weight)
            if name not in group:
                codec = BloscCodec(cname="zstd", clevel=1, shuffle="shuffle")
                group.create_array(
                    name, shape=bits.shape, dtype=bits.dtype, chunks=bits.shape, compressors=codec
                )
            group[name][...] = bits
        session.commit("save")

    def read(self, into: Tensors) -> None:
        import zarr

        group = zarr.open_group(self._repository.readonly_session("main").store, mode="r")
        for name, tensor in into.items():
            _bits(tensor)[...] = group[name][...]


def _cpu_s() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _bits(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.int16).numpy().view(np.uint16)


def _empty(weights: Tensors) -> Tensors:
    return {name: torch.zeros_like(weight) for name, weight in weights.items()}


def _zstd(*args: object) -> None:
    subprocess.run(["zstd", "-q", "-f", "-T0", "--long=30", *map(str, args)], check=True)


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def compare(label: str, options: argparse.Namespace, console: Console) -> None:
    """Measure one size of updates and print its table."""
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        trainer = Trainer(options.mb)
        shelf = Shelf(Path(folder), trainer, options.keyframe_every)
        shelf.save()
        order = random.Random(0)
        figures: dict[str, list[tuple[float, float, int]]] = {name: [] for name in shelf.names}
        for name in shelf.names:
            if name != PATCH:
                shelf.measure(name)
        shares = []
        for _ in range(options.rounds):
            shares.append(trainer.step(UPDATES[label]))
            shelf.save()
            for name in order.sample(shelf.names, len(shelf.names)):
                figures[name].append(shelf.measure(name))
        raw = trainer.size_bytes
        table = Table(
            title=f"{raw / 1e6:.0f} MB of bf16, {mean(shares):.1%} of elements change, "
            f"{options.rounds} saves, keyframe every {options.keyframe_every}"
        )
        for column in ("worker", "sent / raw", "mean", "median s", "CPU s", "s / file's"):
            table.add_column(column, justify="left" if column == "worker" else "right")
        yardstick = [seconds for seconds, *_ in figures["file"]]
        for name, found in figures.items():
            seconds, cpu_s, sent = zip(*found, strict=True)
            ratios = [own / other for own, other in zip(seconds, yardstick, strict=True)]
            table.add_row(
                name,
                f"{median(sent) / raw:.4f}",
                f"{mean(sent) / raw:.4f}",
                f"{median(seconds):.3f}",
                f"{median(cpu_s):.3f}",
                f"{median(ratios):.2f}",
            )
        console.print(table)
        shutil.rmtree(Path(folder) / "registry")


def main() -> None:
    """Measure every size of updates."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--keyframe-every", type=int, default=8)
    parser.add_argument("--updates", nargs="*", choices=list(UPDATES), default=list(UPDATES))
    parser.add_argument("--dir", type=Path, help="on the disk to be measured")
    options = parser.parse_args()
    for label in options.updates:
        compare(label, options, Console())


if __name__ == "__main__":
    main()
