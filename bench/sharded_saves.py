"""Save and load an FSDP2 state on several ranks of this machine: Holdfast and torch's own DCP.

    python bench/sharded_saves.py [RANKS] [MEGABYTES]

Both in one run, on a folder of /dev/shm where there is one. Every round changes the state. The
numbers are the fastest of five rounds, as seen by rank 0.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast
from holdfast.distributed import TorchGroup, load_into

ROUNDS = 5


def state_of(rank: int, size: int, megabytes: int) -> dict[str, Any]:
    """Return rows of twelve tensors, for each a moment."""
    mesh = init_device_mesh("cpu", (size,))
    rows = megabytes * 2**20 // (24 * 4 * 1024) // size
    made = {}
    for name in ("model", "moments"):
        made[name] = {
            f"layer{n}": DTensor.from_local(torch.randn(rows, 1024), mesh, [Shard(0)])
            for n in range(12)
        }
    return made


def change(state: dict[str, Any]) -> None:
    for part in state.values():
        for one in part.values():
            one.to_local().add_(1)


def fastest(rounds: list[float]) -> str:
    return f"{min(rounds) * 1000:.0f}"


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    dist.barrier()
    began = time.perf_counter()
    made = act()
    return time.perf_counter() - began, made


def work(rank: int, size: int, megabytes: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    meeting = "tcp://127.0.0.1:29611"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    state = state_of(rank, size, megabytes)
    group = TorchGroup()
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    with holdfast.open(f"{folder}/reg") as reg:
        run = reg.run("run", create=True, group=group)
        background = dist.new_group(backend="gloo")
        parts = [one.to_local() for part in state.values() for one in part.values()]
        kept = [torch.empty_like(one) for one in parts]
        for turn in range(ROUNDS):
            change(state)
            copied = zip(kept, parts, strict=True)
            taken, _ = timed(lambda: [to.copy_(one) for to, one in copied])
            seconds["a copy into kept memory"].append(taken)
            taken, saved = timed(lambda: run.save(state, step=2 * turn))
            seconds["save"].append(taken)
            change(state)
            taken, pending = timed(lambda: run.save_async(state, step=2 * turn + 1))
            seconds["save_async blocks"].append(taken)
            pending.wait()
            seconds["load_into"].append(timed(lambda: load_into(saved, state, group=group))[0])
            target = f"{folder}/dcp{turn}"
            writer = dcp.FileSystemWriter(target, sync_files=True)
            seconds["dcp.save"].append(timed(lambda: dcp.save(state, storage_writer=writer))[0])
            change(state)
            taken, future = timed(
                lambda: dcp.async_save(state, checkpoint_id=f"{target}a", process_group=background)
            )
            seconds["dcp.async_save blocks"].append(taken)
            future.result()
            seconds["dcp.load"].append(timed(lambda: dcp.load(state, checkpoint_id=target))[0])
    if rank == 0:
        print(f"{size} ranks, {megabytes} MB, ms:")
        for name, rounds in seconds.items():
            print(f"  {name:24} {fastest(rounds)}")
    dist.destroy_process_group()


def main() -> None:
    given = [int(one) for one in sys.argv[1:]]
    size, megabytes = [*given, *(2, 168)[len(given) :]]
    where = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = tempfile.mkdtemp(dir=where)
    try:
        holdfast.init(f"{folder}/reg").close()
        mp.spawn(work, (size, megabytes, folder), nprocs=size)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
