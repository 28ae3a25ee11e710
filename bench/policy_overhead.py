"""Which share of its iterations a training of Cobre's kind spends on saves.

Each iteration adds cuts to the pool of every stage. As Cobre asks, all ranks wait while rank 0
saves; here the loop itself waits. A plain write of the same bytes with fsync is done beside each
save. The share depends on how long an iteration takes, which is the user's own figure: the last
lines say from which length of an iteration on a save costs less than 5 % of the time.

    python bench/policy_overhead.py --stages 60 --dimension 1000 --saves 12 --dir /var/tmp
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import holdfast

#: The bound of Cobre's document.
SHARE = 0.05


class Pool:
    """The cuts of all stages, in arrays of full capacity as the solver keeps them."""

    def __init__(self, stages: int, dimension: int, capacity: int, seed: int = 1) -> None:
        self._chance = np.random.default_rng(seed)
        self._coefficients = [np.zeros((capacity, dimension)) for _ in range(stages)]
        self._intercepts = [np.zeros(capacity) for _ in range(stages)]
        self._count = 0

    def grow(self, cuts: int) -> None:
        """Add cuts to each stage."""
        rows = slice(self._count, self._count + cuts)
        for coefficients, intercepts in zip(self._coefficients, self._intercepts, strict=True):
            coefficients[rows] = self._chance.normal(size=coefficients[rows].shape)
            intercepts[rows] = self._chance.normal(size=cuts)
        self._count += cuts

    def state(self, iteration: int) -> dict[str, Any]:
        """Return the populated part, as Cobre stores it."""
        cuts = {
            f"stage_{number:03d}": {
                "coefficients": coefficients[: self._count],
                "intercept": intercepts[: self._count],
            }
            for number, (coefficients, intercepts) in enumerate(
                zip(self._coefficients, self._intercepts, strict=True)
            )
        }
        return {"cuts": cuts, "completed_iterations": iteration}


def plain_write(state: dict[str, Any], path: Path) -> float:
    """Return the seconds of writing all arrays to one file."""
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for stage in state["cuts"].values():
            for array in stage.values():
                file.write(array)
        os.fsync(file.fileno())
    return time.perf_counter() - began


def main() -> None:
    """Measure, and print one line a save and the sums."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stages", type=int, default=60)
    parser.add_argument("--dimension", type=int, default=1000)
    parser.add_argument("--cuts", type=int, default=50, help="new cuts of a stage between saves")
    parser.add_argument("--saves", type=int, default=12)
    parser.add_argument("--every", type=int, default=10, help="iterations between saves")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    given = parser.parse_args()
    pool = Pool(given.stages, given.dimension, given.cuts * given.saves)
    ratios, seconds = [], []
    with tempfile.TemporaryDirectory(dir=given.dir) as name:
        folder = Path(name)
        with holdfast.init(folder / "registry", skip_race_probe=True) as registry:
            run = registry.create_run("policy")
            print("save  state MB  new MB  holdfast s  plain write s  ratio")
            for number in range(1, given.saves + 1):
                pool.grow(given.cuts)
                state = pool.state(number * given.every)
                nbytes = sum(
                    array.nbytes for one in state["cuts"].values() for array in one.values()
                )
                wrote_s = plain_write(state, folder / f"plain{number % 2}")
                began = time.perf_counter()
                run.save(state, step=number * given.every)
                seconds.append(time.perf_counter() - began)
                ratios.append(seconds[-1] / wrote_s)
                print(
                    f"{number:4}  {nbytes / 1e6:8.0f}  {nbytes / number / 1e6:6.0f}  "
                    f"{seconds[-1]:10.2f}  {wrote_s:13.2f}  {ratios[-1]:5.2f}"
                )
    longest = max(seconds)
    print(f"median ratio to a plain write: {statistics.median(ratios):.2f}")
    print(
        f"below {SHARE:.0%} if an iteration takes at least "
        f"{longest / SHARE / given.every:.2f} s, with a save each {given.every} iterations "
        f"(the longest save took {longest:.2f} s)"
    )


if __name__ == "__main__":
    main()
