"""Save and load an FSDP2 state on several ranks of this machine: Holdfast and torch's own DCP.

    python bench/sharded_saves.py [RANKS] [MEGABYTES]

Both in one run, on a folder of /dev/shm where there is one. Every round changes the state. The
numbers are the fastest of five rounds, as seen by rank 0.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
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


def state_of(size: int, megabytes: int) -> dict[str, Any]:
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


def seconds_of(act: Callable[..., Any], *args: Any, **options: Any) -> tuple[float, Any]:
    dist.barrier()
    began = time.perf_counter()
    made = act(*args, **options)
    return time.perf_counter() - began, made


def one_round(
    run: holdfast.Run, group: TorchGroup, state: dict[str, Any], turn: int, folder: str, other: Any
) -> dict[str, float]:
    """Time each operation once; the state changes between saves."""
    found: dict[str, float] = {}
    parts = [one.to_local() for part in state.values() for one in part.values()]
    change(state)
    found["save"], saved = seconds_of(run.save, state, step=2 * turn)
    change(state)
    found["save_async blocks"], pending = seconds_of(run.save_async, state, step=2 * turn + 1)
    pending.wait()
    found["load_into"], _ = seconds_of(load_into, saved, state, group=group)
    target = f"{folder}/dcp{turn}"
    found["dcp.save"], _ = seconds_of(dcp.save, state, checkpoint_id=target)
    change(state)
    found["dcp.async_save blocks"], future = seconds_of(
        dcp.async_save, state, checkpoint_id=f"{target}a", process_group=other
    )
    future.result()
    found["dcp.load"], _ = seconds_of(dcp.load, state, checkpoint_id=target)
    kept = [torch.zeros_like(one) for one in parts]
    found["a copy into kept memory"], _ = seconds_of(copy, kept, parts)
    return found


def copy(kept: list[torch.Tensor], parts: list[torch.Tensor]) -> None:
    for to, one in zip(kept, parts, strict=True):
        to.copy_(one)


def work(rank: int, size: int, megabytes: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    meeting = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    state = state_of(size, megabytes)
    group, other = TorchGroup(), dist.new_group(backend="gloo")
    with holdfast.open(f"{folder}/reg") as reg:
        run = reg.run("run", create=True, group=group)
        rounds = [one_round(run, group, state, n, folder, other) for n in range(ROUNDS)]
    if rank == 0:
        print(f"{size} ranks, {megabytes} MB, ms:")
        for name in rounds[0]:
            print(f"  {name:24} {min(one[name] for one in rounds) * 1000:.0f}")
    dist.destroy_process_group()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        port: int = made.getsockname()[1]
        return port


def main() -> None:
    given = [int(one) for one in sys.argv[1:]]
    size, megabytes = [*given, *(2, 168)[len(given) :]]
    where = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = tempfile.mkdtemp(dir=where)
    try:
        holdfast.init(f"{folder}/reg").close()
        mp.spawn(work, (size, megabytes, folder, free_port()), nprocs=size)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
