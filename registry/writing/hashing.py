"""Copy the chunks of a state, hash them, and find NaN and infinity in them by their bits.

A program may write to its tensors while they are saved. So each chunk is read once from the
program's memory, into a block of ours (`holdfast.registry.store.blocks`). Everything else uses
the copy: hashing, the search for NaN, encoding, sending and retries. So stored bytes always match
their digest, whatever the program does; the parts of a state may be of different moments.

Groups of chunks are hashed in the thread pool, a few groups before they are packed, as long as
there are free blocks. Where the store lets a pack be written before its name is known, a group of
several blocks comes in parts of one block.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from ctypes import addressof, c_char
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from holdfast.backends import Buffer
from holdfast.backends.base import Unfinished
from holdfast.registry.objects import grid
from holdfast.registry.pytree import ArrayLeaf
from holdfast.registry.store import BLOCK_BYTES, Lease, together
from holdfast.registry.values import Digest, collector_paused

#: Dtype -> (bytes of a word, mask, pattern). A word is not finite if its bits under the mask are
#: the pattern. The mask is the exponent, or all bits if one NaN is the only such value.
_NOT_FINITE = {
    "float8_e5m2": (1, 0x7C, 0x7C),
    "float8_e5m2fnuz": (1, 0xFF, 0x80),
    "float8_e4m3fn": (1, 0x7F, 0x7F),
    "float8_e4m3fnuz": (1, 0xFF, 0x80),
    "float8_e8m0fnu": (1, 0xFF, 0xFF),
    "float16": (2, 0x7C00, 0x7C00),
    "bfloat16": (2, 0x7F80, 0x7F80),
    "float32": (4, 0x7F80_0000, 0x7F80_0000),
    "float64": (8, 0x7FF0_0000_0000_0000, 0x7FF0_0000_0000_0000),
    "complex32": (2, 0x7C00, 0x7C00),
    "complex64": (4, 0x7F80_0000, 0x7F80_0000),
    "complex128": (8, 0x7FF0_0000_0000_0000, 0x7FF0_0000_0000_0000),
}
#: Words in one step: few enough that the masked copy stays in the processor's cache.
_BLOCK = 2**16
#: The most paths that a checkpoint lists.
NAMED_AT_MOST = 8


def is_watched(leaf: ArrayLeaf, patterns: Sequence[str]) -> bool:
    """Return whether a tensor is checked for NaN and infinity."""
    return leaf.dtype in _NOT_FINITE and any(fnmatchcase(leaf.path, p) for p in patterns)


def is_finite(data: Buffer, dtype: str) -> bool:
    """Return whether elements hold neither NaN nor infinity."""
    import numpy as np  # here, since `import holdfast` stays light

    if dtype not in _NOT_FINITE:
        return True
    size, mask, pattern = _NOT_FINITE[dtype]
    words = np.frombuffer(data, dtype=f"<u{size}")
    bits, wrong = words.dtype.type(mask), words.dtype.type(pattern)
    return not any(
        ((words[start : start + _BLOCK] & bits) == wrong).any()
        for start in range(0, len(words), _BLOCK)
    )


#: A copy is hashed in steps that fit into the processor's cache.
_STEP_BYTES = 256 * 1024
#: The view of a tensor of at most this size would cost more than its copy.
_SMALL_BYTES = 4 * 1024
#: Groups that are hashed before the present one is packed.
_GROUPS_AHEAD = 3
#: The same for parts of groups: with two more, and eight packs of one block, 16 blocks are in use.
_PARTS_AHEAD = 6
#: Chunks begin at multiples of this in a block, so that elements of every type are aligned.
_ALIGNMENT = 64


_NOTHING = memoryview(b"")


@dataclass(slots=True, eq=False)
class Piece:
    """One chunk of a tensor that is being saved."""

    leaf: ArrayLeaf  # the tensor
    number: int  # the number of the chunk in the tensor's grid
    start: int  # its start in the tensor's bytes
    stop: int  # its end
    is_known: bool  # whether a base has a component of this name
    is_watched: bool = False  # whether it is checked for NaN and infinity
    digest: Digest = field(init=False)  # its id, once it is hashed
    view: memoryview = _NOTHING  # its bytes, until they are packed; none if it is stored already
    is_finite: bool = True  # whether it holds neither NaN nor infinity


def pieces_of(leaf: ArrayLeaf, *, is_known: bool) -> list[Piece]:
    """Return the chunks of a tensor."""
    cut = grid(leaf.dtype, leaf.shape)
    if cut.count == 1:
        return [Piece(leaf, 0, 0, cut.nbytes, is_known)]
    leaf.buffer()  # a copy from another device is made once here, not in every thread
    pieces, start = [], 0
    for number, size in enumerate(cut.sizes()):
        pieces.append(Piece(leaf, number, start, start + size, is_known))
        start += size
    return pieces


@dataclass(slots=True, eq=False)
class GrowingPack:
    """A pack that is written while its chunks are hashed."""

    file: Unfinished  # where its parts are written, one after another
    written: dict[Digest, int] = field(default_factory=dict)  # the length of each chunk so far
    await_part: Callable[[], object] = bool  # waits until the newest part is written


@dataclass(slots=True, eq=False)
class Group:
    """Hashed chunks that may share a pack, or a part of them."""

    pieces: list[Piece]  # the chunks
    is_known: bool  # whether a base has the components of all chunks of the pack
    pack: GrowingPack | None = None  # of a part: its pack
    is_last: bool = True  # whether the pack ends with it
    blocks: list[memoryview] = field(default_factory=list)  # the blocks that hold copies of them

    def release(self) -> None:
        """Release the bytes after packing, and copies from other devices."""
        for piece in self.pieces:
            piece.view = _NOTHING
            if piece.stop == piece.leaf.nbytes:
                piece.leaf.release()


class Hashing:
    """The hashing of one state."""

    def __init__(
        self,
        submit: Callable[..., Future[None]],
        lease: Lease,
        stored: Collection[Digest],
        begin: Callable[[int], Unfinished | None],
    ) -> None:
        self._begin = begin
        self._submit = submit
        self._lease = lease
        self._stored = stored

    def groups(self, groups: Iterable[list[Piece]]) -> Iterator[Group]:
        """Yield hashed groups, or parts of them, in order, while a few more are being hashed."""
        ahead: deque[tuple[Group, list[Future[None]]]] = deque()
        waiting = iter(groups)
        while True:
            with collector_paused():
                pieces = next(waiting, None)
                batches = list(_batches(pieces or ()))
            if pieces is None:
                break
            for group, jobs in self._parts(pieces, batches):
                # Send hashed groups first: they have the blocks that this one needs.
                blocks = sum(any(not one.leaf.is_ours for one in batch) for batch in jobs)
                while not self._lease.reserve(blocks, wait=not ahead):
                    yield _await(*ahead.popleft())
                ahead.append((group, [self._submit(self._hash, batch, group) for batch in jobs]))
                if len(ahead) > (_PARTS_AHEAD if group.pack else _GROUPS_AHEAD):
                    yield _await(*ahead.popleft())
        while ahead:
            yield _await(*ahead.popleft())

    def _parts(
        self, pieces: list[Piece], batches: list[list[Piece]]
    ) -> Iterator[tuple[Group, list[list[Piece]]]]:
        """Yield a group with its jobs: whole, or in parts if it can be written so."""
        is_known = all(piece.is_known for piece in pieces)
        size_bytes = sum(piece.stop - piece.start for piece in pieces)
        if len(batches) == 1 or (file := self._begin(size_bytes)) is None:
            yield Group(pieces, is_known), batches
            return
        pack = GrowingPack(file)
        for batch in batches:
            yield Group(batch, is_known, pack, batch is batches[-1]), [batch]

    @collector_paused()
    def _hash(self, batch: Sequence[Piece], group: Group) -> None:
        block: memoryview | None = None
        used = address = 0
        for piece in batch:
            leaf, size = piece.leaf, piece.stop - piece.start
            if leaf.is_ours:
                data = _bytes_of(piece)
                piece.digest = Digest.of(data)
            else:
                block = block or self._lease.take()
                address = address or addressof(c_char.from_buffer(block))
                data = block[used : used + size]
                if size <= _SMALL_BYTES and size == leaf.nbytes:
                    leaf.copy_to(data, address + used)  # without a view of the tensor
                    piece.digest = Digest.of(data)
                else:
                    piece.digest = copy_and_hash(_bytes_of(piece), data)
            if piece.is_watched:
                piece.is_finite = is_finite(data, leaf.dtype)
            if piece.digest not in self._stored:
                piece.view = data
                used += 0 if leaf.is_ours else _room(size)
        if block is not None and used:
            group.blocks.append(block)
        elif block is not None:
            self._lease.give([block])


def copy_and_hash(source: memoryview, target: memoryview) -> Digest:
    """Copy bytes that may change meanwhile; return the digest of the copy."""
    if len(source) <= _STEP_BYTES:
        target[:] = source
        return Digest.of(target)
    import numpy as np  # here, since `import holdfast` stays light

    # Unlike assignment to a slice, this lets other threads run.
    from_, to = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    hashed = hashlib.sha256()
    for start in range(0, len(source), _STEP_BYTES):
        stop = start + _STEP_BYTES
        np.copyto(to[start:stop], from_[start:stop])
        hashed.update(target[start:stop])
    return Digest(hashed.digest())


def in_use(blocks: Iterable[memoryview], kept: Iterable[Buffer]) -> list[memoryview]:
    """Return the blocks that contain some of these buffers."""
    owners = {id(one.obj) for one in kept if isinstance(one, memoryview)}
    return [block for block in blocks if id(block.obj) in owners]


def _bytes_of(piece: Piece) -> memoryview:
    view = piece.leaf.buffer()
    if piece.stop - piece.start != len(view):
        view = view[piece.start : piece.stop]
    return view


def _room(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Cut a batch into jobs: large enough for a thread, and no larger than a block."""
    return together(pieces, lambda one: _room(one.stop - one.start), BLOCK_BYTES)


def _await(group: Group, jobs: Sequence[Future[None]]) -> Group:
    for job in jobs:
        job.result()
    return group
