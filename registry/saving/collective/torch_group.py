"""The ranks of torch.distributed: messages in the store of the job, bytes over gloo.

A rank connects to the ranks with which it exchanges bytes, and to its parent and two children in a
binary tree: gloo makes a connection at its first use. PyTorch before 2.8 cannot do that; there each
rank connects to all others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from holdfast.registry.saving.collective.group import DEADLINE_S, LinksBroken
from holdfast.registry.values import seconds


class TorchRanks:
    """The ranks of torch.distributed, in a separate gloo group.

    The group works on the CPU, so it waits for no kernel; its time limit ends no group of the
    training.
    """

    def __init__(self, barrier_s: float) -> None:
        self.rank: int = dist.get_rank()  # the rank of this process
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


#: A rank's message to the others before it connects to them.
_HERE = b"here"
_GONE = b"gone"
#: A store that does not answer for this time counts as lost.
_ANSWER_S = 10.0

_T = TypeVar("_T")


class _Links:
    """The connections of one name."""

    def __init__(self, gloo: Any) -> None:
        self.gloo = gloo  # gloo's group
        self.turns = 0  # exchanges so far; the number is part of each message
        self.met: set[int] = set()  # ranks with which bytes were exchanged
        self._kept: list[torch.Tensor] = []  # gloo does not keep all that it is given

    def await_tree(self, children: Sequence[int], parents: Sequence[int]) -> list[list[Any]]:
        """Begin to receive the words of the ranks beside this one in the tree."""
        self._kept.clear()
        tag = 2 * self.turns
        return [
            [self.gloo.recv([self._memory(1)], rank, tag) for rank in ranks]
            for ranks in (children, parents)
        ]

    def tell(self, ranks: Sequence[int]) -> list[Any]:
        """Tell ranks beside this one in the tree that those behind it have come."""
        return [self.gloo.send([self._memory(1)], rank, 2 * self.turns) for rank in ranks]

    def begin(self, outgoing: Mapping[int, Buffer], parts: Mapping[int, torch.Tensor]) -> list[Any]:
        """Begin to exchange bytes."""
        tag = 2 * self.turns + 1
        begun = [self.gloo.recv([part], rank, tag) for rank, part in parts.items()]
        for rank, data in outgoing.items():
            _view(copy := self._memory(len(data)))[:] = data
            begun.append(self.gloo.send([copy], rank, tag))
        self.met |= {*outgoing, *parts}
        return begun

    def _memory(self, size: int) -> torch.Tensor:
        self._kept.append(_empty(size))
        return self._kept[-1]


class TorchGroup:
    """All ranks of torch.distributed, as a group separate from the training's process groups.

    Make the group on every rank; make several groups in the same order. Messages are keys of
    the store that `init_process_group` made, through a separate connection. Bytes travel over gloo,
    on the CPU, through connections to the ranks that have parts of the same chunks. These are made
    at the first use and again after a failure. So a rank that dies or is late breaks no process
    group of the training.

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
        self.deadline_s = seconds(deadline_s, "deadline_s", what="not a deadline")
        self.rank: int = dist.get_rank()
        self.size: int = dist.get_world_size()
        store: Any = _get_default_store()
        # Every rank makes its groups in the same order, so a group has the same number everywhere.
        number = store.add(f"holdfast/groups/{self.rank}", 1)
        self._place, self._training = f"holdfast/{number}", store
        self._own = local()
        self._unanswered: Future[Any] | None = None
        self._links: dict[str, _Links] = {}

    def _asked(self, act: Callable[[Any], _T], limit_s: float) -> _T:
        """Ask the store over this thread's own connection: a wait blocks all calls of a connection.

        So a save in the background blocks neither a load nor the training's own calls. Some calls
        of the store never end if its host is lost, so another thread makes them. A store that is
        silent is asked again once it has answered: its host was only stopped.
        """
        late = self._unanswered
        if late is not None and (not late.done() or late.exception() is not None):
            raise RuntimeError("the store of the job is gone")
        mine = self._own.__dict__

        def ask() -> _T:
            if "store" not in mine:
                mine["store"] = PrefixStore(self._place, self._training.clone())
            return act(mine["store"])

        answer = _in_thread(ask, "holdfast-messages")
        try:
            return answer.result(limit_s)
        except TimeoutError as error:
            self._unanswered = answer
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
        """Exchange bytes with other ranks, once all ranks have come, along a binary tree."""
        until_s = time.monotonic() + self.deadline_s
        parts = {rank: _empty(size) for rank, size in incoming.items() if size}
        outgoing = {rank: data for rank, data in outgoing.items() if len(data)}
        try:
            made = self._connected(links)
            made.turns += 1
            up, down = _connecting(
                lambda: made.await_tree(self._children, self._parents), made.turns == 1, until_s
            )
            # If a rank is dead or late, those beside it in the tree abort, and so all others.
            _wait(up, until_s)
            _wait([*made.tell(self._parents), *down], until_s)
            _wait(made.tell(self._children), until_s)
            is_new = not made.met.issuperset({*outgoing, *parts})
            _wait(_connecting(lambda: made.begin(outgoing, parts), is_new, until_s), until_s)
        except RuntimeError as error:
            self._disconnect(links)
            raise LinksBroken(str(error)) from error
        return {rank: _view(part) for rank, part in parts.items()}

    @property
    def _children(self) -> list[int]:
        return [one for one in (2 * self.rank + 1, 2 * self.rank + 2) if one < self.size]

    @property
    def _parents(self) -> list[int]:
        return [(self.rank - 1) // 2] if self.rank else []

    def _connected(self, links: str) -> _Links:
        if links not in self._links:
            devices = _lazy_devices()
            if not devices:  # gloo connects to all ranks as it is made
                self._meet(links)
            gloo = self._asked(
                lambda store: self._gloo(PrefixStore(f"links/{links}", store), devices),
                self.deadline_s + self._answer_s,
            )
            self._links[links] = _Links(gloo)
            if devices:  # gloo has told its address: nobody waits for that of a dead rank
                self._meet(links)
        return self._links[links]

    def _meet(self, links: str) -> None:
        """Wait until all ranks are about to connect; a failed rank sends a failure instead."""
        until_s = time.monotonic() + self.deadline_s
        self._hear(f"{links}/here", self._children, until_s)
        self.send([], f"{links}/here", _HERE)
        self._hear(f"{links}/all", self._parents, until_s)
        self.send([], f"{links}/all", _HERE)

    def _hear(self, name: str, ranks: Sequence[int], until_s: float) -> None:
        found = self.receive(name, ranks, until_s - time.monotonic()) if ranks else {}
        absent = [rank for rank in ranks if found.get(rank) != _HERE]
        if absent:
            raise LinksBroken(f"rank {', '.join(map(str, absent))} did not connect")

    def _gloo(self, store: PrefixStore, devices: list[Any]) -> Any:
        """Return gloo's group of all ranks."""
        make: Any = dist.ProcessGroupGloo
        limit = timedelta(seconds=self.deadline_s)
        if not devices:
            return make(store, self.rank, self.size, limit)
        options = make._Options()
        options._devices, options._timeout = devices, limit
        return make(store, self.rank, self.size, options)

    def _disconnect(self, links: str) -> None:
        ended = self._links.pop(links, None)
        if ended is not None:
            ending = [ended.gloo]
            ended.gloo = None
            ending[0].abort()
            # Releasing the group's memory waits some 20 ms for its threads.
            try:
                Thread(target=ending.clear, name="holdfast-disconnect").start()
            except RuntimeError:  # the system gives no thread, and a save may be committed already
                ending.clear()

    def break_links(self, links: str) -> None:
        """End connections: the other side of each gets an error."""
        self._disconnect(links)
        keys = [f"{links}/{name}/{self.rank}" for name in ("here", "all")]
        self._tell(lambda store: [store.set(key, _GONE) for key in keys], self._answer_s)

    def close(self) -> None:
        """End the connections."""
        for links in list(self._links):
            self._disconnect(links)


def _lazy_devices() -> list[Any]:
    """Return gloo's devices, which connect at the first use; none if PyTorch is too old for it."""
    make: Any = dist.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    try:
        if not names:
            return [make.create_default_device(lazy_init=True)]
        return [make.create_device(interface=name, lazy_init=True) for name in names]
    except TypeError:
        return []


def _connecting(act: Callable[[], _T], is_new: bool, until_s: float) -> _T:
    """Let gloo make new connections in another thread: it tries for long to reach a dead rank."""
    if not is_new:
        return act()
    try:
        limit_s = max(until_s - time.monotonic(), 0.001)
        return _in_thread(act, "holdfast-connect").result(limit_s)
    except TimeoutError as error:
        raise RuntimeError("a rank does not connect") from error


def _in_thread(act: Callable[[], _T], name: str) -> Future[_T]:
    """Begin an act in a thread of its own; return its result to come."""
    answer = Future[_T]()

    def run() -> None:
        try:
            answer.set_result(act())
        except BaseException as error:
            answer.set_exception(error)

    try:
        Thread(target=run, name=name, daemon=True).start()
    except RuntimeError:  # the system gives no thread
        run()
    return answer


def _wait(works: Iterable[Any], until_s: float) -> None:
    for one in works:
        one.wait(timedelta(seconds=max(until_s - time.monotonic(), 0.001)))


def _empty(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def _received(store: Any, keys: dict[int, str], timeout_s: float) -> dict[int, bytes]:
    if not keys:
        return {}
    try:
        store.wait([*keys.values()], timedelta(seconds=max(timeout_s, 0.001)))
    except RuntimeError:  # some are missing, or the store is gone
        keys = dict(_present(store, [*keys.items()]))
    if not store.has_extended_api():
        return {one: store.get(key) for one, key in keys.items()}
    return dict(zip(keys, map(bytes, store.multi_get([*keys.values()])), strict=True))


def _present(store: Any, keys: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the keys that exist; a few missing ones among many are found by few requests."""
    if not keys or store.check([key for _, key in keys]):
        return keys
    middle = len(keys) // 2
    return [] if not middle else _present(store, keys[:middle]) + _present(store, keys[middle:])


def _view(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)
