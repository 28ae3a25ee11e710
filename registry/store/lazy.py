"""Lazy tensors: an index fetches only the chunks that it touches.

Owns the arithmetic between an index, the grid and the chunks. Each chunk is verified as a whole
before any byte of it is used. A chunk that an index selects completely and in order is read
straight into the result; the others are read into a buffer of bounded size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from types import EllipsisType
from typing import Any, NamedTuple, Protocol, SupportsIndex

from holdfast.registry import pytree
from holdfast.registry.errors import IncompatibleState, InvalidInput, OutOfRange
from holdfast.registry.objects import TensorEntry
from holdfast.registry.values import Digest, collector_paused, item_size

#: The most bytes of chunks in that buffer.
_HELD_BYTES = 64 * 2**20

Index = SupportsIndex | slice | EllipsisType


class Source(Protocol):
    """The source of a lazy tensor's chunks: first ask for the digests, then read chunks."""

    def chunk_digests(self, entry: TensorEntry) -> Sequence[Digest]:
        """Return the digests of a tensor's chunks, in the order of its grid."""

    def index(self) -> None:
        """Find the chunks whose digests were asked for, before several threads read them."""

    def read_chunks(self, wanted: Mapping[Digest, memoryview]) -> None:
        """Fill memory with chunks, every byte verified."""


class LazyTensor:
    """A tensor of a checkpoint that is read when it is indexed.

    Attributes:
        ref: The ref of the state, and the path in it.
        shape: Axis lengths.
        nbytes: Size in bytes.
    """

    def __init__(self, ref: str, entry: TensorEntry, kind: str, source: Source) -> None:
        self._entry = entry
        self._kind = kind
        self._source = source
        self.ref = ref
        self.shape = entry.shape
        self.nbytes = entry.nbytes

    def __repr__(self) -> str:
        return f"<LazyTensor {self.ref} {self._entry.dtype}{list(self.shape)}>"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without axes has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        """Yield the parts along the first axis; whole chunks of rows are read at once."""
        if not self.shape:
            raise TypeError("a tensor without axes cannot be iterated over")
        grid = self._entry.grid
        rows = max(grid.rows, 1) if grid.axis == 0 else 1
        for start in range(0, self.shape[0], rows):
            yield from self[start : start + rows]

    def __contains__(self, value: object) -> bool:
        """Return whether some element equals a value."""
        return value in self[...] if not self.shape else any(value in part for part in self)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """Its element type: torch's or NumPy's, as it was saved."""
        return pytree.allocate(self._entry.dtype, (0,), self._kind)[0].dtype  # type: ignore[attr-defined]

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Any:
        """Return a part as a new tensor, or as a new array if an array was saved."""
        picks = _picks(index, self.shape, self.ref)
        ranges = [pick if isinstance(pick, range) else range(pick, pick + 1) for pick in picks]
        kept = tuple(len(pick) for pick in picks if isinstance(pick, range))
        try:
            result, view = pytree.allocate(self._entry.dtype, kept, self._kind)
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError
            raise IncompatibleState(
                "this part of the tensor does not fit into memory", where=self.ref, found=error
            ) from error
        if view.nbytes:
            with collector_paused(view.nbytes):  # a codec may have to be imported
                _Reading(self._entry, ranges, view, self._source).run()
        return result

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the whole as a NumPy array, for `numpy.asarray`."""
        import numpy as np  # `import holdfast` stays light

        if copy is False:
            raise ValueError("a lazy tensor cannot be an array without a copy")
        return np.asarray(self[...], dtype=dtype)


class _ChunkPart(NamedTuple):
    """The part of one chunk that an index selects."""

    digest: Digest  # the chunk
    shape: tuple[int, ...]  # its rows and the axes after them
    inside: tuple[slice, ...]  # the selection within the chunk
    outside: tuple[slice | int, ...]  # its position in the result
    whole: bool  # whether it is the whole chunk, in order


class _Reading:
    """The reading of one index."""

    def __init__(
        self, entry: TensorEntry, ranges: Sequence[range], view: memoryview, source: Source
    ) -> None:
        import numpy as np  # `import holdfast` stays light

        self._np = np
        self._entry = entry
        self._ranges = ranges
        self._source = source
        self._item = np.dtype(f"V{item_size(entry.dtype)}")
        self._result = np.frombuffer(view, self._item).reshape([len(r) for r in ranges])

    def run(self) -> None:
        if self._entry.inline is not None:
            stored = self._np.frombuffer(self._entry.inline, self._item)
            cut = tuple(map(_as_slice, self._ranges))
            self._result[...] = stored.reshape(self._entry.shape)[cut]
            return
        held: list[tuple[_ChunkPart, Any]] = []
        size = 0
        for part in self._parts():
            target = self._result[part.outside] if part.whole else None
            if target is None:
                target = self._np.empty(part.shape, self._item)
                size += target.nbytes
            held.append((part, target))
            if size >= _HELD_BYTES:
                self._settle(held)
                held, size = [], 0
        self._settle(held)

    def _settle(self, held: Sequence[tuple[_ChunkPart, Any]]) -> None:
        wanted: dict[Digest, memoryview] = {}
        first: dict[Digest, Any] = {}
        for part, target in held:
            if part.digest not in first:
                first[part.digest] = target
                wanted[part.digest] = memoryview(target.reshape(-1).view("u1"))
        self._source.read_chunks(wanted)
        for part, target in held:
            chunk = first[part.digest]
            if chunk is not target or not part.whole:
                self._result[part.outside] = chunk.reshape(part.shape)[part.inside]

    def _parts(self) -> Iterator[_ChunkPart]:
        grid, shape = self._entry.grid, self._entry.shape
        digests = self._source.chunk_digests(self._entry)
        axis, rows = grid.axis, grid.rows
        before, cut, after = self._ranges[:axis], self._ranges[axis], self._ranges[axis + 1 :]
        trailing = tuple(map(_as_slice, after))
        whole = tuple(map(range, shape[axis + 1 :]))
        for position in product(*(range(len(taken)) for taken in before)):
            run = 0
            for taken, length, at in zip(before, shape, position, strict=False):
                run = run * length + taken[at]
            for number, start, stop in _by_chunk(cut, rows):
                count = min(rows, shape[axis] - number * rows)
                inside = cut[start:stop]
                local = range(
                    inside.start - number * rows, inside.stop - number * rows, inside.step
                )
                yield _ChunkPart(
                    digests[run * grid.chunks_per_run + number],
                    (count, *shape[axis + 1 :]),
                    (_as_slice(local), *trailing),
                    (*position, slice(start, stop)),
                    tuple(after) == whole and local == range(count),
                )


def _by_chunk(taken: range, rows: int) -> Iterator[tuple[int, int, int]]:
    """Yield the chunks along the cut axis that hold some of these rows.

    Each comes with its first position within `taken` and the position after its last.
    """
    at = 0
    while at < len(taken):
        number = taken[at] // rows
        # The last row of this chunk in the direction of the range.
        edge = (number + 1) * rows - 1 if taken.step > 0 else number * rows
        count = (edge - taken[at]) // taken.step + 1
        yield number, at, min(at + count, len(taken))
        at += count


def _as_slice(taken: range) -> slice:
    """Return the slice that selects the same as a range of non-negative numbers."""
    stop = taken.stop if taken.stop >= 0 else None
    return slice(taken.start, stop, taken.step)


def _picks(index: Any, shape: tuple[int, ...], ref: str) -> list[range | int]:
    """Return the range that an index selects of each axis, or an integer, which drops the axis."""
    given = list(index) if isinstance(index, tuple) else [index]
    ellipses = [at for at, one in enumerate(given) if one is Ellipsis]
    if len(ellipses) > 1:
        raise InvalidInput("an index can have only one ellipsis", where=ref, found=len(ellipses))
    missing = len(shape) - (len(given) - len(ellipses))
    if missing < 0:
        raise OutOfRange(
            "more indices than axes", where=ref, expected=f"at most {len(shape)}", found=len(given)
        )
    at = ellipses[0] if ellipses else len(given)
    given[at : at + len(ellipses)] = [slice(None)] * missing
    return [_pick(one, length, ref) for one, length in zip(given, shape, strict=True)]


def _pick(one: Any, length: int, ref: str) -> range | int:
    if isinstance(one, slice):
        try:
            return range(length)[one]
        except (TypeError, ValueError) as error:
            raise InvalidInput(
                "not a slice of whole numbers with a step other than 0", where=ref, found=one
            ) from error
    if isinstance(one, bool) or not isinstance(one, SupportsIndex) or hasattr(one, "__len__"):
        raise InvalidInput(
            "a lazy tensor is indexed by integers, slices and '...'",
            where=ref,
            found=type(one).__name__,
            hint="Read a part first, then index that: ck[path][...][mask].",
        )
    number = one.__index__()
    if not -length <= number < length:
        raise OutOfRange(
            "an index is out of range",
            where=ref,
            expected=f"{-length} to {length - 1}" if length else "none: the axis is empty",
            found=number,
        )
    return number % length
