"""The ranks of torch.distributed: messages in the store of the job, bytes over gloo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from threading import Thread, local
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from holdfast.backends import Buffer
from holdfast.registry.errors import InvalidInput
from holdfast.registry.saving.collective.group import DEADLINE_S, LinksBroken, check_deadline

#: A rank's message to the others before it connects to them.
_HERE = b"here"
_GONE = b"gone"
#: A store that does not answer for this time counts as lost.
_ANSWER_S = 10.0

_T = TypeVar("_T")


class TorchGroup:
    """All ranks of torch.distributed, as a group separate from the training's process groups.

    Make the group on every rank; make several groups in the same order. Messages are keys of
    the store that `init_process_group` made, through a separate connection. Bytes travel over gloo,
    on the CPU, through connections that are made at the first use and again after a failure. So a
    rank that dies or is late breaks no process group of the training.

    Args:
        deadline_s: Seconds after which waiting for another rank is an error.

    Attributes:
        rank: The rank of this process.
        size: The number of ranks.
        deadline_s: Seconds after which waiting for another rank is an error.

    Raises:
        InvalidInput: torch.distributed is not initialized, or `deadline_s` is not above 0.
    """

    def __init__(self, *, deadline_s: float = DEADLINE_S) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidInput(
                "torch.distributed is not initialized",
                hint="Call torch.distributed.init_process_group() first.",
            )
        self.deadline_s = check_deadline(deadline_s)
        self.rank: int = dist.get_rank()
        self.size: int = dist.get_world_size()
        store: Any = _get_default_store()
        # Every rank makes its groups in the same order, so a group has the same number everywhere.
        number = store.add(f"holdfast/groups/{self.rank}", 1)
        self._place, self._training = f"holdfast/{number}", store
        self._own = local()
        self._is_gone = False
        self._gloo: dict[str, Any] = {}

    def _asked(self, act: Callable[[Any], _T], limit_s: float) -> _T:
        """Ask the store over this thread's own connection: a wait blocks all calls of a connection.

        So a save in the background blocks neither a load nor the training's own calls. Some calls
        of the store never end if its host is lost, so another thread makes them.
        """
        if self._is_gone:
            raise RuntimeError("the store of the job is gone")
        mine, answer = self._own.__dict__, Future[_T]()

        def ask() -> None:
            try:
                if "store" not in mine:
                    mine["store"] = PrefixStore(self._place, self._training.clone())
                answer.set_result(act(mine["store"]))
            except BaseException as error:
                answer.set_exception(error)

        try:
            Thread(target=ask, name="holdfast-messages", daemon=True).start()
        except RuntimeError:  # the system gives no thread
            ask()
        try:
            return answer.result(limit_s)
        except TimeoutError as error:
            self._is_gone = True
            raise RuntimeError(f"the store of the job is silent for {limit_s:g} s") from error

    def _tell(self, act: Callable[[Any], object], limit_s: float | None = None) -> None:
        """Ask for something that nobody needs if the store is gone with its job."""
        with suppress(RuntimeError):
            self._asked(act, self.deadline_s if limit_s is None else limit_s)

    def send(self, to: Sequence[int], name: str, data: bytes) -> None:  # noqa: ARG002
        """Send a message; if the store is gone, the next `receive` finds none."""
        self._tell(lambda store: store.set(f"{name}/{self.rank}", data))

    def receive(self, name: str, senders: Sequence[int], timeout_s: float) -> dict[int, bytes]:
        """Return the messages of a name that came in time."""
        keys = {one: f"{name}/{one}" for one in senders}
        try:
            return self._asked(
                lambda store: _received(store, keys, timeout_s), timeout_s + self._answer_s
            )
        except RuntimeError:  # the store is gone: rank 0 held it, and has exited
            return {}

    @property
    def _answer_s(self) -> float:
        return min(self.deadline_s, _ANSWER_S)

    def forget(self, name: str) -> None:
        """Drop a message."""
        self._tell(lambda store: store.delete_key(f"{name}/{self.rank}"))

    def exchange(
        self, links: str, outgoing: Mapping[int, Buffer], incoming: Mapping[int, int]
    ) -> dict[int, memoryview]:
        """Exchange bytes with the other ranks."""
        sending = [len(outgoing.get(rank, b"")) for rank in range(self.size)]
        arriving = [incoming.get(rank, 0) for rank in range(self.size)]
        data = torch.empty(sum(sending), dtype=torch.uint8, device="cpu")
        given, start = _view(data), 0
        for rank, size in enumerate(sending):
            if size:
                given[start : start + size] = outgoing[rank]
                start += size
        found = torch.empty(sum(arriving), dtype=torch.uint8, device="cpu")
        try:
            self._connected(links).alltoall_base(
                found, data, arriving, sending, timeout=timedelta(seconds=self.deadline_s)
            ).wait()
        except RuntimeError as error:
            self._disconnect(links)
            raise LinksBroken(str(error)) from error
        view, start = _view(found), 0
        parts = {}
        for rank, size in enumerate(arriving):
            if size:
                parts[rank] = view[start : start + size]
                start += size
        return parts

    def _connected(self, links: str) -> Any:
        if links not in self._gloo:
            self._meet(links)
            limit = timedelta(seconds=self.deadline_s)
            self._gloo[links] = self._asked(
                lambda store: dist.ProcessGroupGloo(
                    PrefixStore(f"links/{links}", store), self.rank, self.size, limit
                ),
                self.deadline_s + self._answer_s,
            )
        return self._gloo[links]

    def _meet(self, links: str) -> None:
        """Wait until all ranks are about to connect; a failed rank sends a failure instead."""
        self.send([], f"{links}/here", _HERE)
        found = self.receive(f"{links}/here", range(self.size), self.deadline_s)
        absent = [rank for rank in range(self.size) if found.get(rank) != _HERE]
        if absent:
            raise LinksBroken(f"rank {', '.join(map(str, absent))} did not connect")

    def _disconnect(self, links: str) -> None:
        ending = [self._gloo.pop(links, None)]
        if ending[0] is not None:
            ending[0].abort()
            # Releasing the group's memory waits some 20 ms for its threads.
            try:
                Thread(target=ending.clear, name="holdfast-disconnect").start()
            except RuntimeError:  # the system gives no thread, and a save may be committed already
                ending.clear()

    def break_links(self, links: str) -> None:
        """End connections: the other side of each gets an error."""
        self._disconnect(links)
        here = f"{links}/here/{self.rank}"
        self._tell(lambda store: store.set(here, _GONE), self._answer_s)  # also at the exit

    def close(self) -> None:
        """End the connections."""
        for links in list(self._gloo):
            self._disconnect(links)


def _received(store: Any, keys: dict[int, str], timeout_s: float) -> dict[int, bytes]:
    try:
        store.wait([*keys.values()], timedelta(seconds=max(timeout_s, 0.001)))
    except RuntimeError:  # some are missing, or the store is gone
        keys = {one: key for one, key in keys.items() if store.check([key])}
    if not store.has_extended_api():
        return {one: store.get(key) for one, key in keys.items()}
    return dict(zip(keys, map(bytes, store.multi_get([*keys.values()])), strict=True))


def _view(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)
