"""Reads of the store that rank 0 makes for all ranks: the log of a run, the objects of a state.

A log is a message. The objects of a state go down a binary tree, block by block, so that no rank
sends them to more than two others. Each rank checks what it is told as it checks what it reads:
commits by their chain, objects by their SHA-256.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from holdfast.backends import Buffer
from holdfast.backends.memory import MemoryBackend
from holdfast.registry.errors import IncompatibleState
from holdfast.registry.history import RunLog, StateReader
from holdfast.registry.history.replay import PartedRun, Slot
from holdfast.registry.objects import Manifest, TensorEntry, slot_key
from holdfast.registry.saving.collective.group import Group
from holdfast.registry.saving.collective.talk import Calls, Talk, join, split
from holdfast.registry.store import Store

#: A larger copy of a log is read by each rank: messages pass through one process.
_COPY_BYTES = 2**20
#: Bytes of a state's objects that a rank passes on at a time.
_BLOCK_BYTES = 4 * 2**20

# The log of a run


def open_together(group: Group, store: Store, run_id: str, read: Callable[[], RunLog]) -> RunLog:
    """Open a run on every rank: rank 0 reads it, and tells the others, the first time."""
    calls = Calls(group, f"{store.config.id}/{run_id}/log")
    # A rank may open a run once more than the others: it waits for nobody.
    if calls.made or group.size == 1:
        return read()

    def act(talk: Talk) -> RunLog:
        copy = MemoryBackend()
        if group.rank:
            header, columns = talk.listen("opening the run")
            for key, data in zip(header["keys"], columns, strict=True):
                copy.put(key, bytes(data))
            log = RunLog(store, run_id)
            # This rank may be late, and its machine may have seen more since.
            if (
                not log.open_copy(copy, is_durable=False)
                or log.tail.slot is None
                or log.run.next_slot < log.seen.slots
                or log.run.commits < log.seen.commits
            ):
                return read()
            log.is_copy = False  # rank 0 has read it
            log.check_head(log.fetch(log.seen.skipped(log.tail.slot.number)))
            return log
        log = read()
        if not isinstance(log.run, PartedRun):  # a whole one takes all of its parts
            log.keep_copy(copy)
        files = {info.key: copy.get(info.key) for info in copy.list()}
        if sum(map(len, files.values())) > _COPY_BYTES:
            files.clear()
        talk.order({"failure": None, "keys": [*files]}, *files.values())
        return log

    return calls.make(act)


def tell_slot(log: RunLog) -> tuple[dict[str, Any], bytes]:
    """Return the newest slot of a log, as parts of a message."""
    slot = log.tail.slot
    assert slot is not None  # the caller has read or put one
    return {"slot": slot.number}, slot.data


def hear_slot(log: RunLog, header: Mapping[str, Any], columns: Iterable[memoryview]) -> None:
    """Read a log to its head, by the slot that rank 0 told if that is the next one."""
    [data] = columns
    where = slot_key(log.run_id, header["slot"])
    log.hear(Slot.decode(header["slot"], bytes(data), where=where))


# The objects of a state


def tell_state(
    calls: Calls,
    talk: Talk,
    reader: StateReader,
    subject: str,
    wanted: Callable[[Manifest], Iterable[TensorEntry]],
) -> None:
    """Have rank 0 read a state's manifest, placement and digest lists; every rank keeps them.

    `subject` says what this rank loads: it must be equal on all.
    """
    group = calls.group
    talk.is_about(subject)
    said = join({"subject": subject})
    if group.rank:
        talk.report(said)
        size = talk.listen("leading the load")[0]["bytes"]
        told = _passed_on(calls, talk, bytearray(size))
        reader.keep(*split(bytes(told)))
        return
    for rank, (header, _) in enumerate(talk.gather(said, "beginning a load")):
        if header["subject"] != subject:
            if talk.has_left(rank):  # that rank has made a load that this rank has missed
                talk.go_on(header["subject"])
            raise IncompatibleState(
                "the ranks load different checkpoints, or into different tensors",
                where=f"rank {rank}",
                hint="Give every rank the same checkpoint and a target of the same paths.",
            )
    if group.size > 1:
        names, given = reader.give(wanted)
        told = bytearray(join(names, *given))
        talk.order({"failure": None, "bytes": len(told)})
        _passed_on(calls, talk, told)


def _passed_on(calls: Calls, talk: Talk, held: bytearray) -> bytearray:
    """Fill memory of one size on every rank with the bytes of rank 0."""
    group, links, view = calls.group, calls.links, memoryview(held)
    children = [one for one in (2 * group.rank + 1, 2 * group.rank + 2) if one < group.size]
    depth, deepest = ((one.bit_length() - 1) for one in (group.rank + 1, group.size))
    blocks = [view[at : at + _BLOCK_BYTES] for at in range(0, len(view), _BLOCK_BYTES)]

    def pass_on() -> None:
        # A block goes one level down in each turn, and the next block follows it.
        for turn in range(len(blocks) + deepest - 1):
            given, taken = turn - depth, turn - depth + 1
            outgoing: dict[int, Buffer] = {}
            if 0 <= given < len(blocks):
                outgoing = dict.fromkeys(children, blocks[given])
            incoming: dict[int, int] = {}
            if group.rank and 0 <= taken < len(blocks):
                incoming = {(group.rank - 1) // 2: len(blocks[taken])}
            for data in group.exchange(links, outgoing, incoming).values():
                blocks[taken][:] = data

    calls.linked(talk, "telling the objects of the state", pass_on)
    return held
