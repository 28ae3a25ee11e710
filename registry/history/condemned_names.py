"""The names that sweeps condemned, in files of which a writer reads only a few blocks.

Owns the format: a table names shards, a shard has an index and blocks of sorted records, and a
digest covers every part. `holdfast.registry.history.epochs` says which tables count. Specified in
docs/spec.md, section 10.
"""

from __future__ import annotations

import heapq
import operator
import struct
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from typing import Annotated, Protocol, TypeVar

from holdfast.backends import ByteRange, ObjectTruncated
from holdfast.registry.errors import Damaged, InvalidInput, Malformed, ObjectNotFound
from holdfast.registry.objects import RECORD_BYTES, ObjectKey, part_key, records_in
from holdfast.registry.store import Store
from holdfast.registry.values import Digest, DigestField, Field, ProcessLock, Record

#: A row of a table: the first bytes of a shard, the number of its records, digest of its index.
_SHARD = struct.Struct(">8sI32s")
#: A row of an index: the first bytes of a block, and its digest.
_BLOCK = struct.Struct(">8s32s")
#: Shards and blocks are found by the first bytes of a digest.
_PREFIX_BYTES = 8
_BLOCK_RECORDS = 400
_SHARD_RECORDS = 328 * _BLOCK_RECORDS
#: The most bytes of parts that a handle keeps.
_KEPT_BYTES = 2**20
#: A shard of which more blocks are needed is read whole.
_SINGLE_BLOCKS = 32
#: A table joins at most this many sweeps, or its square, its cube and so on.
_FAN_OUT = 8


class SweepTable(Record):
    """Names a table in the header of an epoch."""

    table: DigestField  # digest of its bytes
    sweeps: Annotated[int, Field(ge=1)]  # how many sweeps it joins
    last: Annotated[int, Field(ge=1)]  # the newest of them
    shards: Annotated[int, Field(ge=1)]
    keys: Annotated[int, Field(ge=1)]

    def part(self) -> _Part:
        """Return the bytes of the table."""
        return _Part(self.table, 0, self.shards * _SHARD.size, self.table)


@dataclass(frozen=True, slots=True)
class _Part:
    """Some bytes of a file, and their digest."""

    file: Digest  # its name
    start: int
    length: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class _Block:
    first: bytes
    part: _Part


@dataclass(frozen=True, slots=True)
class _Shard:
    """A file of an index and blocks, named by the digest of its index."""

    first: bytes
    records: int
    index: Digest

    @property
    def index_bytes(self) -> int:
        return -(-self.records // _BLOCK_RECORDS) * _BLOCK.size

    @property
    def size_bytes(self) -> int:
        return self.index_bytes + self.records * RECORD_BYTES

    def blocks(self, index: bytes) -> list[_Block]:
        """Return the blocks that an index names."""
        most = _BLOCK_RECORDS * RECORD_BYTES
        starts = range(self.index_bytes, self.size_bytes, most)
        return [
            _Block(
                first, _Part(self.index, start, min(most, self.size_bytes - start), Digest(digest))
            )
            for start, (first, digest) in zip(starts, _BLOCK.iter_unpack(index), strict=True)
        ]


class CondemnedNames:
    """Reads and puts tables of condemned names, and keeps at most 1 MiB of what it read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: OrderedDict[Digest, bytes] = OrderedDict()
        self.kept_bytes = 0  # bytes of the parts that it keeps
        self._lock = ProcessLock()

    def among(self, table: SweepTable, keys: Collection[ObjectKey]) -> set[ObjectKey]:
        """Return the keys among `keys` that a table has."""
        small, by_record = self._store.pools.small, {key.record: key for key in keys}
        asked = _spread(self._shards(table), by_record)
        blocks = [one for some in small.map(self._blocks_of, asked) for one in some]
        return {by_record[one] for some in small.map(self._found_in, blocks) for one in some}

    def put(self, keys: Iterable[ObjectKey], *, epoch: int) -> SweepTable:
        """Put the table of one sweep, and its shards; keys come in the order of their records."""
        return self._put_table((key.record for key in keys), sweeps=1, last=epoch)

    def join(
        self, tables: Sequence[SweepTable], sweeps: Mapping[int, Iterable[ObjectKey]]
    ) -> SweepTable:
        """Put one table that has the names of several, and of sweeps from before tables."""
        older = [sorted(key.record for key in keys) for keys in sweeps.values()]
        rows = heapq.merge(*map(self._records, tables), *older)
        return self._put_table(
            map(itemgetter(0), groupby(rows)),
            sweeps=sum(one.sweeps for one in tables) + len(sweeps),
            last=max([*(one.last for one in tables), *sweeps]),
        )

    def check(self, table: SweepTable, sizes: Mapping[Digest, int], *, deep: bool) -> None:
        """Raise if a part is absent, has another size than a listing says or, deep, is damaged."""
        for shard in self._shards(table):
            found = sizes.get(shard.index)
            if found != shard.size_bytes:
                what = "a part of a sweep is absent" if found is None else "a part is cut off"
                raise Malformed(what, where=part_key(shard.index), hint=_RESTORE)
        if deep:
            deque(self._records(table), maxlen=0)

    def _shards(self, table: SweepTable) -> list[_Shard]:
        rows = _SHARD.iter_unpack(self._read(table.part()))
        return [_Shard(first, records, Digest(index)) for first, records, index in rows]

    def _blocks_of(
        self, asked: tuple[_Shard, list[bytes]]
    ) -> list[tuple[_Part, list[bytes], bytes | None]]:
        """Return the blocks that answer for records of a shard, with their bytes if it is read."""
        shard, records = asked
        index = self._read(_Part(shard.index, 0, shard.index_bytes, shard.index))
        spread = _spread(shard.blocks(index), records)
        if len(spread) <= _SINGLE_BLOCKS:
            return [(block.part, some, None) for block, some in spread]
        data = self._get(shard.index, None)
        return [
            (block.part, some, data[block.part.start : block.part.start + block.part.length])
            for block, some in spread
        ]

    def _found_in(self, block: tuple[_Part, list[bytes], bytes | None]) -> list[bytes]:
        part, records, data = block
        data = self._read(part) if data is None else _checked(part, data)
        held = set(records_in(data))
        return [record for record in records if record in held]

    def _records(self, table: SweepTable) -> Iterator[bytes]:
        """Yield all records of a table in order."""
        for shard in self._shards(table):
            data = self._get(shard.index, None)
            index = _checked(_Part(shard.index, 0, shard.index_bytes, shard.index), data)
            for block in shard.blocks(index):
                yield from records_in(_checked(block.part, data[block.part.start :]))

    def _read(self, part: _Part) -> bytes:
        with self._lock.here():
            kept = self._kept.get(part.digest)
            if kept is not None:
                self._kept.move_to_end(part.digest)
                return kept
        end = part.start + part.length
        data = _checked(part, self._get(part.file, ByteRange(part.start, end)))
        with self._lock.here():
            if self._kept.setdefault(part.digest, data) is data:
                self.kept_bytes += len(data)
            while self.kept_bytes > _KEPT_BYTES:
                self.kept_bytes -= len(self._kept.popitem(last=False)[1])
        return data

    def _get(self, file: Digest, byte_range: ByteRange | None) -> bytes:
        where = part_key(file)
        try:
            return self._store.backend.get(where, byte_range)
        except ObjectNotFound as error:
            raise Malformed("a part of a sweep is absent", where=where, hint=_RESTORE) from error
        except ObjectTruncated as error:
            raise Damaged("a part of a sweep is cut off", where=where, hint=_RESTORE) from error

    def _put_table(self, records: Iterable[bytes], *, sweeps: int, last: int) -> SweepTable:
        rows, keys, waiting, last_of = [], 0, iter(records), b""
        while some := list(islice(waiting, _SHARD_RECORDS)):
            if any(map(operator.ge, [last_of, *some], some)):
                raise InvalidInput("the names of a sweep are not in the order of their records")
            last_of = some[-1]
            blocks = [
                b"".join(some[start : start + _BLOCK_RECORDS])
                for start in range(0, len(some), _BLOCK_RECORDS)
            ]
            heads = [_BLOCK.pack(block[:_PREFIX_BYTES], Digest.of(block)) for block in blocks]
            index = b"".join(heads)
            self._put(Digest.of(index), b"".join([index, *blocks]))
            rows.append(_SHARD.pack(some[0][:_PREFIX_BYTES], len(some), Digest.of(index)))
            keys += len(some)
        data = b"".join(rows)
        self._put(Digest.of(data), data)
        return SweepTable(
            table=Digest.of(data), sweeps=sweeps, last=last, shards=len(rows), keys=keys
        )

    def _put(self, digest: Digest, data: bytes) -> None:
        """Put a part, before the epoch that names it."""
        if not self._store.backend.put_if_absent(part_key(digest), data):
            # A collector that lost the race for its epoch has put it.
            _checked(_Part(digest, 0, len(data), Digest.of(data)), self._get(digest, None))
            self._store.backend.make_durable([part_key(digest)])


def due(tables: Sequence[SweepTable]) -> int:
    """Return how many of the newest tables are joined before the table of a new sweep is added.

    Of each size (up to 8 sweeps, up to 64, and so on) at most one table stays.
    """
    sweeps, count, bound = 0, 0, _FAN_OUT
    for table in reversed(tables):
        if count and table.sweeps > bound:
            break
        sweeps, count = sweeps + table.sweeps, count + 1
        while sweeps > bound:
            bound *= _FAN_OUT
    return count


_RESTORE = "Restore it from a backup of this registry."


class _HasFirst(Protocol):
    @property
    def first(self) -> bytes: ...


_PieceT = TypeVar("_PieceT", bound=_HasFirst)


def _spread(
    pieces: Sequence[_PieceT], records: Iterable[bytes]
) -> list[tuple[_PieceT, list[bytes]]]:
    """Return the pieces of a sorted row that may have some of the records, each with those."""
    firsts = [piece.first for piece in pieces]
    asked: dict[int, list[bytes]] = {}
    for record in records:
        prefix = record[:_PREFIX_BYTES]
        start = max(bisect_left(firsts, prefix) - 1, 0)
        for number in range(start, bisect_right(firsts, prefix)):
            asked.setdefault(number, []).append(record)
    return [(pieces[number], some) for number, some in sorted(asked.items())]


def _checked(part: _Part, data: bytes) -> bytes:
    """Return the bytes of a part from a longer read, if their digest is right."""
    found = data[: part.length]
    if Digest.of(found) != part.digest:
        raise Damaged(
            "damaged: a part of a sweep has another digest",
            where=part_key(part.file),
            expected=part.digest.short,
            found=Digest.of(found).short,
            hint=_RESTORE,
        )
    return found
