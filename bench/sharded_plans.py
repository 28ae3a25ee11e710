"""How a collective save grows: the plan alone, without ranks and without tensors.

    python bench/sharded_plans.py [RANKS ...]

A GPT of 1.3 or 70 billion parameters in bfloat16 with two moments in float32, sharded by rows as
FSDP2 does it.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from holdfast.registry.collective.plan import Plan, make_plan
from holdfast.registry.collective.structure import Ints, Structure

MODELS = {"1.3 B": (24, 2048, 50257), "70 B": (80, 8192, 128256)}


COLUMNS = (
    *("model", "ranks", "chunks", "pieces", "exchanged", "most owned / mean", "rounds"),
    *("plan, s", "part of a rank, ms"),
)


def shapes(layers: int, width: int, words: int) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters."""
    block = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    return [(words, width), *(one for _ in range(layers) for one in [*block, (width,), (width,)])]


def structure(model: str) -> Structure:
    """Return the tensors of a state: the model, then both moments of each parameter."""
    found = shapes(*MODELS[model])
    return Structure(("bfloat16",) * len(found) + ("float32",) * 2 * len(found), tuple(found * 3))


def by_rows(of: Structure, ranks: int) -> list[Ints]:
    """Return the layouts of all ranks: each has some rows of every tensor."""
    rows = np.array([of.padded(shape, 1) for shape in of.shapes])
    first = of.axes - np.array([len(shape) for shape in of.shapes])
    numbers = np.arange(len(rows))
    lengths = rows[numbers, first]
    share = -(-lengths // ranks)
    made = []
    for rank in range(ranks):
        offset, extent = np.zeros_like(rows), rows.copy()
        begin = np.minimum(rank * share, lengths)
        offset[numbers, first] = begin
        extent[numbers, first] = np.minimum(begin + share, lengths) - begin
        made.append(np.column_stack([numbers, offset, extent]).astype(np.int64))
    return made


def owned_bytes(plan: Plan) -> Ints:
    """Return the bytes that each rank stores."""
    sizes = np.concatenate(
        [
            np.prod(np.subtract(*reversed(plan.structure.chunk_boxes(t, np.arange(n)))), axis=1)
            * (2 if plan.structure.dtypes[t] == "bfloat16" else 4)
            for t, n in enumerate(np.diff(plan.structure.first))
        ]
    )
    return np.bincount(plan.owner, sizes, minlength=plan.ranks).astype(np.int64)


def main() -> None:
    ranks = [int(one) for one in sys.argv[1:]] or [8, 64, 512]
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for model in MODELS:
        of = structure(model)
        for number in ranks:
            layouts = by_rows(of, number)
            began = time.perf_counter()
            plan = make_plan(of, layouts)
            made = time.perf_counter()
            plan.part(0)
            first = time.perf_counter()
            plan.part(number // 2)
            part_s = time.perf_counter() - first
            owned = owned_bytes(plan)
            print(
                f"| {model} | {number} | {len(plan.owner):,} | {len(plan.pieces):,} "
                f"| {plan.moved_bytes / owned.sum():.0%} | {owned.max() / owned.mean():.2f} "
                f"| {plan.rounds} | {made - began:.2f} | {part_s * 1000:.1f} |"
            )


if __name__ == "__main__":
    main()
