"""The ranks of torch.distributed."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


class TorchRanks:
    """The ranks of torch.distributed, in a separate gloo group.

    The group works on the CPU, so it waits for no kernel; its time limit ends no group of the
    training.

    Attributes:
        rank: The rank of this process.
    """

    def __init__(self, barrier_s: float) -> None:
        self.rank: int = dist.get_rank()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=barrier_s))

    def highest(self, value: int) -> int:
        """Return the highest value of all ranks."""
        found = torch.tensor(value, dtype=torch.int64, device="cpu")
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return int(found)

    def close(self) -> None:
        """End the group."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)
