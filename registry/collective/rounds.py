"""Carry out a plan, round by round: send pieces to the owners of chunks, or back from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from holdfast.registry.collective.group import Group
from holdfast.registry.collective.plan import Part
from holdfast.registry.collective.structure import Ints

#: Chunks of which nothing travels are read in batches of about this size.
_BATCH_BYTES = 64 * 2**20
#: Returns the bytes of this rank's box of a tensor, with an axis for those of an element, and the
#: begin of the box.
Memory = Callable[[int], tuple[Any, Ints]]


def complete_chunks(
    group: Group, links: str, part: Part, items: list[int], memory: Memory
) -> Iterator[tuple[Ints, memoryview]]:
    """Yield each chunk that this rank owns, with a copy of its bytes; every rank must go through.

    Args:
        group: The ranks.
        links: The name of their connections.
        part: This rank's part of the plan.
        items: Bytes of an element of each tensor.
        memory: Gives the memory of a tensor.

    Raises:
        LinksBroken: Another rank is dead or late, or has failed.
    """
    axes = (part.chunks.shape[1] - 4) // 2
    for now in range(max(part.rounds, 1)):
        arrived: dict[int, memoryview] = {}
        takes = part.takes[part.takes[:, 2] == now]
        if now < part.rounds:
            arrived = _exchange(group, links, part, now, items, memory)
        used = dict.fromkeys(arrived, 0)
        cuts = np.searchsorted(takes[:, 0], np.arange(len(part.chunks) + 1))
        for number in np.flatnonzero(part.chunks[:, 3] == now):
            chunk = part.chunks[number]
            tensor, low, high = int(chunk[0]), chunk[4 : 4 + axes], chunk[4 + axes :]
            item = items[tensor]
            data = np.empty((*(high - low), item), np.uint8)
            for take in takes[cuts[number] : cuts[number + 1]]:
                source, begin, end = int(take[1]), take[3 : 3 + axes], take[3 + axes :]
                if source == group.rank:
                    box, offset = memory(tensor)
                    piece = box[_within(begin - offset, end - offset)]
                else:
                    shape = (*(end - begin), item)
                    size = int(np.prod(shape))
                    start = used[source]
                    used[source] = start + size
                    flat = np.frombuffer(arrived[source][start : start + size], np.uint8)
                    piece = flat.reshape(shape)
                data[_within(begin - low, end - low)] = piece
            yield chunk, _view(data)


def spread_chunks(
    group: Group,
    links: str,
    part: Part,
    items: list[int],
    memory: Memory,
    read: Callable[[Sequence[int]], Mapping[int, Any]],
) -> None:
    """Send the pieces of each chunk that this rank owns to the ranks that have them; the way back.

    Args:
        group: The ranks.
        links: The name of their connections.
        part: This rank's part of a plan for loading.
        items: Bytes of an element of each tensor.
        memory: Gives the memory of a tensor, which is filled.
        read: Returns the bytes of owned chunks by their number in the part.

    Raises:
        LinksBroken: Another rank is dead or late, or has failed.
    """
    axes = (part.chunks.shape[1] - 4) // 2
    for now in range(max(part.rounds, 1)):
        takes = part.takes[part.takes[:, 2] == now]
        away = np.unique(takes[takes[:, 1] != group.rank, 0]).tolist()
        shared = read(away) if away else {}
        if now < part.rounds:
            _send_back(group, links, part, now, items, memory, takes, shared)
        for batch, known in _batches(part, now, away, items, read, shared):
            for take in takes[(takes[:, 1] == group.rank) & np.isin(takes[:, 0], batch)]:
                number, begin, end = int(take[0]), take[3 : 3 + axes], take[3 + axes :]
                box, offset = memory(int(part.chunks[number, 0]))
                piece = _piece(part, number, items, known[number], begin, end)
                box[_within(begin - offset, end - offset)] = piece


def _batches(
    part: Part,
    now: int,
    away: list[int],
    items: list[int],
    read: Callable[[Sequence[int]], Mapping[int, Any]],
    shared: Mapping[int, Any],
) -> Iterator[tuple[list[int], Mapping[int, Any]]]:
    """Yield the owned chunks of a round with their bytes, some at a time."""
    yield away, shared
    axes = (part.chunks.shape[1] - 4) // 2
    batch: list[int] = []
    size = 0
    for number in np.setdiff1d(np.flatnonzero(part.chunks[:, 3] == now), away).tolist():
        chunk = part.chunks[number]
        nbytes = int((chunk[4 + axes :] - chunk[4 : 4 + axes]).prod()) * items[int(chunk[0])]
        if batch and size + nbytes > _BATCH_BYTES:
            yield batch, read(batch)
            batch, size = [], 0
        batch.append(number)
        size += nbytes
    if batch:
        yield batch, read(batch)


def _send_back(
    group: Group,
    links: str,
    part: Part,
    now: int,
    items: list[int],
    memory: Memory,
    takes: Ints,
    shared: Mapping[int, Any],
) -> None:
    axes = (part.gives.shape[1] - 3) // 2
    outgoing: dict[int, list[Any]] = {}
    for take in takes[takes[:, 1] != group.rank]:
        number, begin, end = int(take[0]), take[3 : 3 + axes], take[3 + axes :]
        piece = _piece(part, number, items, shared[number], begin, end)
        outgoing.setdefault(int(take[1]), []).append(np.ascontiguousarray(piece).reshape(-1))
    gives = part.gives[part.gives[:, 2] == now]
    sizes = (gives[:, 3 + axes :] - gives[:, 3 : 3 + axes]).prod(axis=1)
    incoming: dict[int, int] = {}
    for give, volume in zip(gives, sizes.tolist(), strict=True):
        nbytes = volume * items[int(give[0])]
        incoming[int(give[1])] = incoming.get(int(give[1]), 0) + nbytes
    joined = {rank: _view(np.concatenate(some)) for rank, some in outgoing.items()}
    arrived = group.exchange(links, joined, incoming)
    used = dict.fromkeys(arrived, 0)
    for give in gives:
        tensor, source = int(give[0]), int(give[1])
        begin, end = give[3 : 3 + axes], give[3 + axes :]
        box, offset = memory(tensor)
        shape = (*(end - begin), items[tensor])
        start = used[source]
        used[source] = start + int(np.prod(shape))
        flat = np.frombuffer(arrived[source][start : used[source]], np.uint8)
        box[_within(begin - offset, end - offset)] = flat.reshape(shape)


def _piece(part: Part, number: int, items: list[int], data: Any, begin: Ints, end: Ints) -> Any:
    axes = (part.chunks.shape[1] - 4) // 2
    chunk = part.chunks[number]
    low, high = chunk[4 : 4 + axes], chunk[4 + axes :]
    whole = data.reshape(*(high - low), items[int(chunk[0])])
    return whole[_within(begin - low, end - low)]


def _exchange(
    group: Group, links: str, part: Part, now: int, items: list[int], memory: Memory
) -> dict[int, memoryview]:
    axes = (part.gives.shape[1] - 3) // 2
    outgoing: dict[int, list[Any]] = {}
    for give in part.gives[part.gives[:, 2] == now]:
        tensor, begin, end = int(give[0]), give[3 : 3 + axes], give[3 + axes :]
        box, offset = memory(tensor)
        piece = np.ascontiguousarray(box[_within(begin - offset, end - offset)])
        outgoing.setdefault(int(give[1]), []).append(piece.reshape(-1))
    incoming: dict[int, int] = {}
    takes = part.takes[(part.takes[:, 2] == now) & (part.takes[:, 1] != group.rank)]
    for take in takes:
        size = int((take[3 + axes :] - take[3 : 3 + axes]).prod())
        size *= items[int(part.chunks[int(take[0]), 0])]
        incoming[int(take[1])] = incoming.get(int(take[1]), 0) + size
    joined = {rank: _view(np.concatenate(some)) for rank, some in outgoing.items()}
    return group.exchange(links, joined, incoming)


def _within(begin: Ints, end: Ints) -> tuple[slice, ...]:
    return tuple(slice(int(a), int(b)) for a, b in zip(begin, end, strict=True))


def _view(data: Any) -> memoryview:
    return memoryview(data.reshape(-1))
