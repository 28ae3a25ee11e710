"""The processes of one training run, which act on a request together."""

from __future__ import annotations

import importlib
import sys
from typing import Protocol

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput
from holdfast.registry.saving.collective.group import Group

#: The module that needs torch.
_TORCH_RANKS = "holdfast.registry.saving.loop.torch_ranks"


class Ranks(Protocol):
    """The processes of one training run, seen from this process.

    With mpi4py: `rank` is `comm.Get_rank()`, and `highest(value)` returns
    `comm.allreduce(value, op=MPI.MAX)`.

    Attributes:
        rank: The number of this process, from 0; rank 0 saves.
    """

    @property
    def rank(self) -> int:
        """The number of this process."""

    def highest(self, value: int) -> int:
        """Return the highest value of all processes; each calls this at the same point."""


class Alone:
    """A training run of one process."""

    rank = 0

    def highest(self, value: int) -> int:
        """Return the value."""
        return value


_ALONE = Alone()


def ranks_here(given: Ranks | None, barrier_s: float, group: Group | None = None) -> Ranks:
    """Return the given ranks, or those of torch.distributed if it is initialized."""
    found = _found(given, barrier_s)
    if group is not None and (found.rank != group.rank or (group.size > 1 and found is _ALONE)):
        raise InvalidInput(
            "the ranks of the checkpointer are not those of the run's group",
            where="ranks",
            expected=f"rank {group.rank} of {group.size}",
            found=f"rank {found.rank}" if found is not _ALONE else "one process",
            hint="Pass `Stopping(ranks=...)`: an object with `rank` and `highest(value)` over the "
            "same ranks.",
        )
    return found


def _found(given: Ranks | None, barrier_s: float) -> Ranks:
    if given is not None:
        if not isinstance(getattr(given, "rank", None), int) or not hasattr(given, "highest"):
            raise InvalidInput(
                "not the ranks of a training",
                where="ranks",
                expected="an object with `rank` and `highest(value)`",
                found=quoted(given),
            )
        return given
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return _ALONE
    if distributed.get_world_size() == 1:
        return _ALONE
    found: Ranks = importlib.import_module(_TORCH_RANKS).TorchRanks(barrier_s)
    return found
