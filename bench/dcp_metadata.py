"""Size and cost of DCP's `.metadata` for the models of `sharded_plans.py` under FSDP2.

    python bench/dcp_metadata.py [RANKS ...]

DCP's own planner makes the metadata of the 1.3 B model; its FileSystemWriter adds a place for each
shard and pickles it. Bytes and seconds grow with the shards, so the largest measured case tells the
larger ones; those are marked with `~`. Seconds are of a processor.
"""

from __future__ import annotations

import gc
import pickle
import sys
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from architectures import ARCHITECTURES, Architecture
from memory import resident
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

MODEL = "1.3 B"


@dataclass(frozen=True)
class Cost:
    """What DCP needs for one layout.

    Attributes:
        shards: Parts of tensors.
        plan_s: Seconds of rank 0 for the global plan.
        size_mb: Megabytes of `.metadata`.
        load_s: Seconds to unpickle it, on every rank.
        memory_gb: Memory of it, once it is loaded.
    """

    shards: float
    plan_s: float
    size_mb: float
    load_s: float
    memory_gb: float

    def scaled(self, shards: int) -> Cost:
        by = shards / self.shards
        return Cost(
            shards, self.plan_s * by, self.size_mb * by, self.load_s * by, self.memory_gb * by
        )


def plans(of: Architecture, ranks: int) -> list[SavePlan]:
    """Return what `create_local_plan` makes of FSDP2's tensors on each rank."""
    structure = of.structure
    paths = [leaf.path.replace("/", ".") for part in of.flat.components for leaf in part.leaves]
    properties = [TensorProperties(dtype=getattr(torch, dtype)) for dtype in structure.dtypes]
    made = []
    for number, boxes in enumerate(of.layouts(ranks)):
        items = []
        for path, shape, like, at in zip(
            paths, structure.shapes, properties, boxes.of, strict=True
        ):
            low, extent = np.split(boxes.distinct[at], 2)
            low, extent = low[-len(shape) :].tolist(), extent[-len(shape) :].tolist()
            if not all(extent):
                continue
            chunk = ChunkStorageMetadata(torch.Size(low), torch.Size(extent))
            data = TensorWriteData(chunk, replace(like), torch.Size(shape))
            index = MetadataIndex(path, low)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        path = {f"{number}": (f"{number}",)}
        made.append(SavePlan(items, planner_data=path))
    return made


def measure(of: Architecture, ranks: int) -> Cost:
    """Make, pickle and load the metadata."""
    local = plans(of, ranks)
    began = time.process_time()
    final, metadata = DefaultSavePlanner().create_global_plan(local)
    plan_s = time.process_time() - began
    places = {
        item.index: _StorageInfo(f"__{rank}_0.distcp", number * 4096, 4096)
        for rank, plan in enumerate(final)
        for number, item in enumerate(plan.items)
    }
    data = pickle.dumps(replace(metadata, storage_data=places))
    shards = len(places)
    del local, final, metadata, places
    gc.collect()
    before = resident()
    began = time.process_time()
    found: Metadata = pickle.loads(data)
    load_s = time.process_time() - began
    memory = resident() - before
    assert len(found.storage_data) == shards
    return Cost(shards, plan_s, len(data) / 1e6, load_s, memory / 2**30)


def shards_of(of: Architecture, ranks: int) -> int:
    """Return how many parts FSDP2 cuts the tensors into."""
    lengths = np.array([shape[0] for shape in of.structure.shapes])
    share = -(-lengths // ranks)
    return int((-(-lengths // share)).sum())


def main() -> None:
    measured = [int(one) for one in sys.argv[1:]] or [8, 64, 256]
    print("| model | ranks | shards | plan, s | .metadata, MB | load, s | memory, GB |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    largest: Cost | None = None
    for ranks in measured:
        largest = measure(ARCHITECTURES[MODEL], ranks)
        _show(MODEL, ranks, largest, "")
    assert largest is not None
    for model, of in ARCHITECTURES.items():
        for ranks in (8, 64, 1024, 8192):
            if (model, ranks) not in [(MODEL, one) for one in measured]:
                _show(model, ranks, largest.scaled(shards_of(of, ranks)), "~ ")


def _show(model: str, ranks: int, cost: Cost, mark: str) -> None:
    cells = (
        f"{mark}{one:,.3g}" for one in (cost.plan_s, cost.size_mb, cost.load_s, cost.memory_gb)
    )
    print(f"| {model} | {ranks:,} | {cost.shards:,.0f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
