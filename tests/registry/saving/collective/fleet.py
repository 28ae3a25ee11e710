"""Ranks that are processes, started once and used by many tests.

The fork server of all tests imports torch once; every rank is forked from it. The store of the job
is the test's own process, as it is torchrun's agent in a real job.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from tests.support.processes import address_of_server, servers, use_server

#: Longer than any case takes; a case that hangs fails then.
_LIMIT_S = 60.0


class Failed(Exception):
    """A rank raised an error.

    Attributes:
        error: Its class.
        text: Its message.
    """

    def __init__(self, error: str, text: str) -> None:
        super().__init__(error, text)
        self.error, self.text = error, text


class Fleet:
    """Up to four processes, which run one case after another."""

    def __init__(self) -> None:
        self._context = servers()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._cases = 0
        self._ranks: dict[int, tuple[Any, Connection]] = {}

    def begin(self, size: int, act: Callable[..., Any], *args: Any) -> None:
        """Begin a case: `act(rank, size, *args)` on every rank, with torch.distributed."""
        self._cases += 1
        for rank in range(size):
            if rank not in self._ranks or not self._ranks[rank][0].is_alive():
                mine, theirs = self._context.Pipe()
                given = (rank, self._store.port, theirs, address_of_server())
                process = self._context.Process(target=_serve, args=given, daemon=True)
                process.start()
                theirs.close()
                self._ranks[rank] = process, mine
            self._ranks[rank][1].send((self._cases, size, act, args, _environment()))

    def end(self, size: int) -> list[Any]:
        """Return what each rank returned, or the `Failed` that it raised; `None` if it died."""
        return [self._answer(rank) for rank in range(size)]

    def run(self, size: int, act: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a case that no rank fails."""
        self.begin(size, act, *args)
        found = self.end(size)
        for one in found:
            if isinstance(one, Failed):
                raise one
        return found

    def kill(self, rank: int) -> None:
        """Kill a rank at once; the next case starts another."""
        process, _ = self._ranks[rank]
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def _answer(self, rank: int) -> Any:
        process, pipe = self._ranks[rank]
        try:
            if not pipe.poll(5 * _LIMIT_S):  # a machine may be slow
                raise AssertionError(f"rank {rank} hangs")
            return pipe.recv()
        except (EOFError, ConnectionError):
            process.join()
            del self._ranks[rank]
            return None

    def close(self) -> None:
        """End all ranks."""
        for process, pipe in self._ranks.values():
            pipe.close()
            process.join(5)
            process.kill()


def _environment() -> dict[str, str]:
    """Return the settings of the test, which its ranks have too."""
    given = ("HOLDFAST", "XDG_STATE_HOME")
    return {name: value for name, value in os.environ.items() if name.startswith(given)}


def _serve(rank: int, port: int, pipe: Connection, server: str) -> None:
    import torch

    use_server(server)
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    while True:
        try:
            case, size, act, args, environment = pipe.recv()
        except (EOFError, OSError):
            return
        os.environ.update(environment)
        os.environ["WORLD_SIZE"] = str(size)
        try:
            dist.init_process_group(
                "gloo",
                store=PrefixStore(f"case{case}", store),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=_LIMIT_S),
            )
            answer = act(rank, size, *args)
        except BaseException as error:
            traceback.print_exc()
            answer = Failed(type(error).__name__, str(error))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(answer)


def keeps_a_store(telling: Connection) -> None:
    """Keep the store of a job, as torchrun's agent does; tell its port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    telling.send(store.port)
    time.sleep(600)


def saves_twice(rank: int, port: int, url: str, pipe: Connection) -> None:
    """Save as one of two ranks, and once more when told; tell the error."""
    import holdfast
    from holdfast.distributed import TorchGroup

    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=600))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        with holdfast.open(url) as reg:
            run = reg.run("run", create=True, group=TorchGroup(deadline_s=2))
            run.save_async({"x": 1}, step=1).wait()
            pipe.send("saved")
            pipe.recv()
            run.save_async({"x": 2}, step=2)
    except Exception as error:
        pipe.send(type(error).__name__)
