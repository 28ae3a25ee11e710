"""Carry out a plan for saving, round by round: send pieces to the owners of their chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from holdfast.registry.collective.group import Group
from holdfast.registry.collective.plan import Part
from holdfast.registry.collective.structure import Ints

#: Returns the bytes of this rank's box of a tensor, with an axis for those of an element, and the
#: begin of the box.
Memory = Callable[[int], tuple[Any, Ints]]


def complete_chunks(
    group: Group, links: str, part: Part, items: list[int], memory: Memory
) -> Iterator[tuple[int, Ints, memoryview]]:
    """Yield each chunk that this rank owns, with a copy of its bytes; every rank must go through.

    They come round by round, each with its number in the part, whose order is another one.

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
        for number in np.flatnonzero(part.chunks[:, 3] == now).tolist():
            chunk = part.chunks[number]
            tensor, low, high = int(chunk[0]), chunk[4 : 4 + axes], chunk[4 + axes :]
            item = items[tensor]
            data = np.empty((*(high - low), item), np.uint8)
            for take in takes[cuts[number] : cuts[number + 1]]:
                source, begin, end = int(take[1]), take[3 : 3 + axes], take[3 + axes :]
                if source == group.rank:
                    box, offset = memory(tensor)
                    piece = box[within(begin - offset, end - offset)]
                else:
                    shape = (*(end - begin), item)
                    size = int(np.prod(shape))
                    start = used[source]
                    used[source] = start + size
                    flat = np.frombuffer(arrived[source][start : start + size], np.uint8)
                    piece = flat.reshape(shape)
                data[within(begin - low, end - low)] = piece
            yield number, chunk, view_of(data)


def _exchange(
    group: Group, links: str, part: Part, now: int, items: list[int], memory: Memory
) -> dict[int, memoryview]:
    axes = (part.gives.shape[1] - 3) // 2
    outgoing: dict[int, list[Any]] = {}
    for give in part.gives[part.gives[:, 2] == now]:
        tensor, begin, end = int(give[0]), give[3 : 3 + axes], give[3 + axes :]
        box, offset = memory(tensor)
        piece = np.ascontiguousarray(box[within(begin - offset, end - offset)])
        outgoing.setdefault(int(give[1]), []).append(piece.reshape(-1))
    incoming: dict[int, int] = {}
    takes = part.takes[(part.takes[:, 2] == now) & (part.takes[:, 1] != group.rank)]
    for take in takes:
        size = int((take[3 + axes :] - take[3 : 3 + axes]).prod())
        size *= items[int(part.chunks[int(take[0]), 0])]
        incoming[int(take[1])] = incoming.get(int(take[1]), 0) + size
    joined = {rank: view_of(np.concatenate(some)) for rank, some in outgoing.items()}
    return group.exchange(links, joined, incoming)


def within(begin: Ints, end: Ints) -> tuple[slice, ...]:
    """Return the slices of a box."""
    return tuple(slice(int(a), int(b)) for a, b in zip(begin, end, strict=True))


def view_of(data: Any) -> memoryview:
    """Return the bytes of a contiguous array."""
    return memoryview(data.reshape(-1))
