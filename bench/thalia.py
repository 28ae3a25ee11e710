"""The targets of Thalia's document for a brain of a million neurons: save, load, size and check.

Each way of keeping the brain saves it, loads it and checks every byte of it, in a random order in
each round. It prints two tables of medians for docs/figures.md, one for a brain of which all
synapses exist, one for a sparse brain, whose regions have fewer than a tenth of them, as in the
document. It takes 4 GB of memory, 4 GB of disk and some minutes:

    NUMPY_MADVISE_HUGEPAGE=0 python bench/thalia.py --rounds 3 --dir /var/tmp

With `--columns` it measures instead what growth by inputs costs: a region of 64 MiB learns, is
saved after each stretch of learning, and gets 64 more inputs once.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

import holdfast
from holdfast import Storing, formats
from holdfast.registry.formats import thalia

REGIONS = 10
Act = Callable[[], object]


def brain(neurons: int, synapses: int, connected: float) -> dict[str, Any]:
    """Return a brain: float32 weights of normal distribution, and a state for each neuron."""
    torch.manual_seed(0)
    each = neurons // REGIONS

    def weights() -> torch.Tensor:
        made = torch.randn(each, synapses)
        return made if connected == 1 else made.mul_(torch.rand(each, synapses) < connected).abs_()

    return {
        "regions": {
            f"region_{number}": {
                "weights": {"feedforward": weights()},
                "neuron_state": {
                    "spikes": torch.rand(each) < 0.05,
                    "membrane": torch.randn(each),
                },
                "learning_state": {"bcm_threshold": torch.rand(each)},
            }
            for number in range(REGIONS)
        },
        "pathways": {},
        "config": {"neurons": neurons},
        "training_steps": 1000,
    }


@dataclass(frozen=True)
class Way:
    """A way of keeping a brain.

    Attributes:
        save: Writes it; durable or not as the way is.
        load: Reads all of it.
        check: Reads and checks every byte.
        size: Returns its bytes.
    """

    save: Act
    load: Act
    check: Act
    size: Callable[[], int]


def torch_file(path: Path, state: dict[str, Any]) -> Way:
    """Return `torch.save`, with the SHA-256 that a sidecar would have."""

    def check() -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return Way(
        lambda: torch.save(state, path),
        lambda: torch.load(path, weights_only=True),
        check,
        lambda: path.stat().st_size,
    )


def thalia_file(path: Path, state: dict[str, Any], **options: Any) -> Way:
    """Return a file of Thalia's format."""

    def check() -> None:
        problems = formats.validate(path)
        assert problems == [], problems

    return Way(
        lambda: thalia.save(path, state, force=True, **options),
        lambda: thalia.load(path),
        check,
        lambda: path.stat().st_size,
    )


def registry(
    folder: Path, state: dict[str, Any], precision: str, compression: Literal["none", "zstd"]
) -> Way:
    """Return a run by the preset `thalia`, whose saves are durable and whose loads are verified."""

    def save() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        with holdfast.init(str(folder), compression=compression) as reg:
            reg.create_run("brain", preset="thalia").save(
                state, step=1, storing=Storing(precision=precision)
            )

    def load() -> None:
        with holdfast.open(str(folder), read_only=True) as reg:
            found = reg.run("brain").latest()
            assert found is not None
            found.load()

    def check() -> None:
        with holdfast.open(str(folder), read_only=True) as reg:
            assert reg.verify(deep=True).ok

    def size() -> int:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    return Way(save, load, check, size)


def timed(act: Act) -> float:
    """Return the seconds that something takes."""
    gc.collect()
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def ways(folder: Path, state: dict[str, Any]) -> dict[str, Way]:
    """Return every way of keeping a brain, by the name of its row."""
    return {
        ".pt": torch_file(folder / "brain.pt", state),
        ".thalia": thalia_file(folder / "brain.thalia", state),
        ".thalia, fp16": thalia_file(folder / "half.thalia", state, precision="fp16"),
        ".thalia.lz4": thalia_file(folder / "brain.thalia.lz4", state),
        ".thalia.zst, fp16": thalia_file(folder / "h.thalia.zst", state, precision="fp16"),
        "registry": registry(folder / "registry", state, "fp32", "none"),
        "registry, zstd": registry(folder / "zstd", state, "fp32", "zstd"),
        "registry, fp16": registry(folder / "half", state, "fp16", "none"),
    }


def measure(state: dict[str, Any], rounds: int, folder: Path | None) -> None:
    """Measure every way of keeping a brain, and print a line of the table for each."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        kept = ways(Path(name), state)
        times: dict[tuple[str, str], list[float]] = {}
        sizes = {}
        for _ in range(rounds):
            for label, way in random.sample(list(kept.items()), len(kept)):
                for act in ("save", "load", "check"):
                    times.setdefault((label, act), []).append(timed(getattr(way, act)))
                sizes[label] = way.size()
    print(f"| {'kept as':17} | save, s | load, s | check, s |   MB | of `.pt` |")
    print(f"|{'-' * 19}|--------:|--------:|---------:|-----:|---------:|")
    for label, size in ((label, sizes[label]) for label in kept):
        save, load, check = (median(times[label, act]) for act in ("save", "load", "check"))
        print(
            f"| {label:17} | {save:7.2f} | {load:7.2f} | {check:8.2f} | {size / 1e6:4.0f} "
            f"| {size / sizes['.pt']:8.0%} |"
        )
    print("| target            |     < 5 |    < 10 |      < 1 |      |   < 50 % |", flush=True)


@dataclass
class Growing:
    """A run of one region: its weights, and the bytes that each save adds.

    Attributes:
        folder: The registry.
        apart: Whether new inputs get a matrix of their own.
    """

    folder: Path
    apart: bool
    added: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.registry = holdfast.init(str(self.folder), compression="zstd", keyframe_every=8)
        self.run = self.registry.create_run("grows", preset="thalia")

    def save(self, weights: torch.Tensor, inputs: int) -> None:
        """Save a region that had `inputs` inputs in the beginning."""
        parts = weights.split([inputs, weights.shape[1] - inputs], 1)
        named = {f"source_{n}": part.contiguous() for n, part in enumerate(parts) if part.numel()}
        region = {"weights": named if self.apart else {"feedforward": weights}}
        before = self.size
        state = {"regions": {"cortex": region}, "pathways": {}, "config": {}}
        self.run.save(state, step=len(self.added) + 1)
        self.added.append(self.size - before)

    @property
    def size(self) -> int:
        """Bytes of the registry."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


def nothing(weights: torch.Tensor) -> None:
    """Nothing."""


def one_in_a_hundred(weights: torch.Tensor) -> None:
    """1 % of the weights change, anywhere."""
    weights[torch.rand_like(weights) < 0.01] += 0.01


def active_neurons(weights: torch.Tensor) -> None:
    """All weights of 10 % of the neurons change, as by a rule with traces."""
    weights[torch.rand(len(weights)) < 0.1] += 0.01 * torch.rand(weights.shape[1])


def every_weight(weights: torch.Tensor) -> None:
    """Every weight changes a little, as by gradients."""
    weights += 1e-3 * torch.randn_like(weights)


def columns(folder: Path | None, rows: int = 8192, inputs: int = 2048, new: int = 64) -> None:
    """Print what a usual save adds, and what the save at which inputs are added does."""
    print("| between two saves | a usual save, MB | 64 new inputs, MB | in their own matrix, MB |")
    print("|-------------------|-----------------:|------------------:|------------------------:|")
    for learn in (nothing, one_in_a_hundred, active_neurons, every_weight):
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory(dir=folder) as name:
            grown = [Growing(Path(name, str(apart)), apart) for apart in (False, True)]
            weights = torch.randn(rows, inputs)
            for step in range(6):
                if step == 4:
                    weights = torch.cat([weights, torch.zeros(rows, new)], 1)
                if step:
                    learn(weights)
                for one in grown:
                    one.save(weights.clone(), inputs)
            for one in grown:
                one.registry.close()
        usual = median(grown[0].added[1:4])
        at = [one.added[4] for one in grown]
        about = (learn.__doc__ or "").rstrip(".")
        figures = " | ".join(f"{size / 1e6:.1f}" for size in (usual, *at))
        print(f"| {about} | {figures} |", flush=True)


def main() -> None:
    """Measure a dense and a sparse brain, or growth."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--neurons", type=int, default=1_000_000)
    parser.add_argument("--synapses", type=int, default=200, help="of each neuron")
    parser.add_argument(
        "--connected", type=float, nargs="+", default=[1.0, 0.08], help="shares that exist"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dir", type=Path, help="where the files are written; not in memory")
    parser.add_argument("--columns", action="store_true", help="measure growth by inputs")
    given = parser.parse_args()
    if given.columns:
        columns(given.dir)
        return
    nbytes = given.neurons * (4 * given.synapses + 9)
    for share in given.connected:
        print(
            f"\n{given.neurons:,} neurons, {nbytes / 1e6:,.0f} MB in memory, {share:.0%} of the "
            f"synapses exist; load {os.getloadavg()[0]:.1f}\n"
        )
        measure(brain(given.neurons, given.synapses, share), given.rounds, given.dir)


if __name__ == "__main__":
    main()
