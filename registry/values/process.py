"""This process: the machine that it runs on, and its rank in a distributed job."""

from __future__ import annotations

import os
import socket

from holdfast.registry.errors import Conflict


def host_name() -> str:
    """Return this machine's name; one that holds bytes that are no characters loses those."""
    return socket.gethostname().encode(errors="replace").decode()


def require_first_rank() -> None:
    """Refuse to write from any rank but 0 of a distributed job.

    Raises:
        Conflict: `WORLD_SIZE` is above 1 and `RANK` is not 0.
    """
    rank = os.environ.get("RANK", "0")
    if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1") and rank not in ("", "0"):
        raise Conflict(
            "only rank 0 may save a run",
            where=f"RANK={rank}",
            hint="Guard the call: `if rank == 0: run.save(...)`. Every rank may load.",
        )
