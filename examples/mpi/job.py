"""Ranks of MPI that save one checkpoint together: a group over mpi4py, and a job that uses it.

    mpiexec -n 4 python examples/mpi/job.py ./registry

The group needs nothing of torch. Copy it, and change what your cluster needs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import holdfast
from holdfast.distributed import LinksBroken, PerRank


class MpiGroup:
    """All ranks of a communicator; see `holdfast.distributed.Group` for what each method does."""

    def __init__(self, deadline_s: float = 600.0) -> None:
        self._comm = MPI.COMM_WORLD.Dup()  # so that no message meets those of the program
        self.rank, self.size, self.deadline_s = self._comm.rank, self._comm.size, deadline_s
        self._sent: list[tuple[Any, bytes]] = []
        self._here: dict[tuple[int, str], bytes] = {}
        self._turns: dict[str, int] = {}

    def send(self, to: Sequence[int], name: str, data: bytes) -> None:
        """Send a message, and keep it until it is delivered."""
        self._sent = [one for one in self._sent if not one[0].Test()]
        message = b"".join([name.encode(), b"\n", data])
        for rank in to:
            self._sent.append((self._comm.Isend([message, MPI.BYTE], rank), message))

    def receive(self, name: str, senders: Sequence[int], timeout_s: float) -> dict[int, bytes]:
        """Return the messages of a name that are there in time."""
        return self._wait(name, senders, timeout_s, "")

    def forget(self, name: str) -> None:
        """Do nothing: a message is with its receiver."""

    def exchange(
        self, links: str, outgoing: Mapping[int, Any], incoming: Mapping[int, int]
    ) -> dict[int, memoryview]:
        """Send bytes as messages, and wait for those of the others."""
        turn = self._turns[links] = self._turns.get(links, 0) + 1
        name = f"{links}#{turn}"
        for rank, data in outgoing.items():
            self.send([rank], name, bytes(data))
        found = self._wait(name, list(incoming), self.deadline_s, links)
        if len(found) < len(incoming):
            raise LinksBroken(name)
        return {rank: memoryview(data) for rank, data in found.items()}

    def break_links(self, links: str) -> None:
        """Let nobody wait for bytes of this rank."""
        self.send([one for one in range(self.size) if one != self.rank], f"{links}!", b"")

    def close(self) -> None:
        """Do nothing: MPI ends with the program."""

    def _wait(
        self, name: str, senders: Sequence[int], timeout_s: float, links: str
    ) -> dict[int, bytes]:
        until = time.monotonic() + timeout_s
        while True:
            self._take_in()
            there = [one for one in senders if (one, name) in self._here]
            is_broken = any((one, f"{links}!") in self._here for one in range(self.size))
            if len(there) == len(senders) or is_broken or time.monotonic() > until:
                return {one: self._here.pop((one, name)) for one in there}
            time.sleep(0.001)

    def _take_in(self) -> None:
        status = MPI.Status()
        while self._comm.Iprobe(status=status):
            message = bytearray(status.Get_count(MPI.BYTE))
            self._comm.Recv([message, MPI.BYTE], status.source)
            name, _, data = bytes(message).partition(b"\n")
            self._here[status.source, name.decode()] = data


def main() -> None:
    """Continue from the newest checkpoint, if there is one, and save the next one together."""
    group = MpiGroup()
    if group.rank == 0 and not Path(sys.argv[1]).exists():
        holdfast.init(sys.argv[1]).close()
    MPI.COMM_WORLD.Barrier()
    with holdfast.open(sys.argv[1]) as reg:
        run = reg.run("mpi", create=True, group=group)
        state = {"weights": np.zeros((1000, 1000)), "noise": PerRank(group.rank)}
        found = run.restore_into({"weights": state["weights"]}, strict=False)
        step = 1 if found is None else found.step + 1
        state["weights"] += step
        saved = run.save(state, step=step)
        print(f"rank {group.rank} of {group.size}: {saved.ref} {saved.digest.short}", flush=True)


if __name__ == "__main__":
    main()
