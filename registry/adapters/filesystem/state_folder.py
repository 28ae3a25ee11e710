"""The files of one stored state, each made when it is asked for."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, cast

from holdfast.registry import pytree
from holdfast.registry.adapters.filesystem.session import File, Folder, Literal, is_name
from holdfast.registry.curation import Release
from holdfast.registry.curation.pool import PoolEntry
from holdfast.registry.errors import IncompatibleState, MissingObject, NoSuchPath
from holdfast.registry.formats import OPAQUE, encode_header, opaque_name
from holdfast.registry.formats import SAFETENSORS_NAMES as NAMES
from holdfast.registry.history import json_ready
from holdfast.registry.loading import Checkpoint, Stored, tensors_by_path
from holdfast.registry.loading.zarr import (
    DOCUMENT,
    ArrayLayout,
    ZarrLayout,
    is_position,
    native_types,
)
from holdfast.registry.objects import Component, RecentChunks, TensorEntry
from holdfast.registry.store import Source
from holdfast.registry.values import Digest


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of one stored state, and a cache of the last ones read."""

    ref: str  # the state, for messages
    source: Source
    recent: RecentChunks  # the chunks that were read last, of any state

    def digests(self, entry: TensorEntry) -> Sequence[Digest]:
        """Return the digests of a tensor's chunks, in the order of its grid."""
        try:
            return self.source.chunk_digests(entry)
        except FileNotFoundError as error:
            raise self._missing(error) from error

    def read(self, wanted: dict[Digest, memoryview]) -> None:
        """Fill memory with chunks, every byte verified."""
        try:
            self.source.read_chunks(wanted)
        except FileNotFoundError as error:
            raise self._missing(error) from error

    def get(self, digest: Digest, raw_bytes: int, padded_bytes: int) -> memoryview:
        """Return a chunk and keep it, filled up with zeros to a length."""

        def load() -> memoryview:
            chunk = memoryview(bytearray(padded_bytes))
            self.read({digest: chunk[:raw_bytes]})
            return chunk.toreadonly()

        return self.recent.get((digest, padded_bytes), load)

    def _missing(self, error: OSError) -> MissingObject:
        # For fsspec "not found" means that a file is absent; readers of Zarr then show fill values.
        return MissingObject("an object of this state is missing", where=self.ref, found=error)


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a chunk that a range covers."""

    digest: Digest  # the chunk
    size: int  # its length
    start: int  # first byte within it
    stop: int  # byte after the last


@dataclass(frozen=True)
class Joined:
    """A file made of known bytes and of tensors, one behind the other."""

    parts: Sequence[bytes | TensorEntry]  # the bytes and the tensors
    chunks: Chunks  # the chunks of the tensors
    _ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        lengths = (len(part) if isinstance(part, bytes) else part.nbytes for part in self.parts)
        object.__setattr__(self, "_ends", list(accumulate(lengths)))

    @property
    def size(self) -> int:
        """Its length in bytes."""
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> bytes:
        """Return a range, every byte verified; whole chunks are read straight into the result."""
        result = bytearray(max(0, stop - start))
        rest = memoryview(result)
        whole: dict[Digest, memoryview] = {}
        copies: list[tuple[memoryview, memoryview]] = []
        for piece in self._pieces(start, stop):
            size = len(piece) if isinstance(piece, bytes) else piece.stop - piece.start
            target, rest = rest[:size], rest[size:]
            if isinstance(piece, bytes):
                target[:] = piece
            elif size < piece.size:
                chunk = self.chunks.get(piece.digest, piece.size, piece.size)
                target[:] = chunk[piece.start : piece.stop]
            elif (kept := self.chunks.recent.peek((piece.digest, size))) is not None:
                target[:] = kept
            elif piece.digest in whole:
                copies.append((target, whole[piece.digest]))
            else:
                whole[piece.digest] = target
        if whole:
            self.chunks.read(whole)
        for target, same in copies:
            target[:] = same
        return bytes(result)

    def _pieces(self, start: int, stop: int) -> Iterator[bytes | _Piece]:
        at = bisect_right(self._ends, start)
        while start < stop:
            part, end = self.parts[at], self._ends[at]
            known = part if isinstance(part, bytes) else part.inline
            begin = end - (part.nbytes if isinstance(part, TensorEntry) else len(part))
            until = min(stop, end)
            if known is not None:
                yield known[start - begin : until - begin]
            elif isinstance(part, TensorEntry):
                yield from self._cut(part, start - begin, until - begin)
            start, at = until, at + 1

    def _cut(self, entry: TensorEntry, start: int, stop: int) -> Iterator[_Piece]:
        """Yield the parts of a tensor's chunks that a range of its bytes covers."""
        grid = entry.grid
        run_bytes = (grid.chunks_per_run - 1) * grid.chunk_bytes + grid.tail_bytes
        digests = self.chunks.digests(entry)
        while start < stop:
            run, within = divmod(start, run_bytes)
            number, offset = divmod(within, grid.chunk_bytes)
            is_last = number == grid.chunks_per_run - 1
            size = grid.tail_bytes if is_last else grid.chunk_bytes
            until = min(offset + stop - start, size)
            yield _Piece(digests[run * grid.chunks_per_run + number], size, offset, until)
            start += until - offset


@dataclass(frozen=True, slots=True)
class ZarrChunk:
    """A chunk of the Zarr view as a file."""

    array: ArrayLayout
    number: int  # its number in the array
    chunks: Chunks  # the chunks of the state

    @property
    def size(self) -> int:
        """Its length in bytes, zeros at its end included."""
        return self.array.chunk_bytes

    def read(self, start: int, stop: int) -> bytes:
        """Return a range of it; the chunk is read and verified as a whole."""
        entry = self.array.entry
        if entry.inline is not None:
            return entry.inline[start:stop]
        digest, raw_bytes = (
            self.chunks.digests(entry)[self.number],
            self.array.raw_bytes(self.number),
        )
        return bytes(self.chunks.get(digest, raw_bytes, self.size)[start:stop])


META = "meta.json"
TORCH = "state.pt"
ZARR = "state.zarr"
COMPANIONS = "companions"
SAFETENSORS = ".safetensors"
_FIXED = frozenset({META, TORCH, ZARR, OPAQUE, COMPANIONS})
#: The most bytes of long strings and bytes that are loaded into the pickle of `state.pt`.
_PICKLED_BYTES = 64 * 2**20


def is_file_name(step: str) -> bool:
    """Return whether a step below a state is the name of a file, not of a metric."""
    return step in _FIXED or step.endswith(SAFETENSORS)


class StateFolder:
    """The files of one stored state."""

    def __init__(
        self, stored: Stored, recent: RecentChunks, companion: Callable[[str], Folder | None]
    ) -> None:
        self._stored = stored
        self._companion = companion
        self._chunks = Chunks(stored.ref, stored.handle.reader, recent)

    @property
    def folder(self) -> Folder:
        """The folder of the files."""
        return Folder(self._names, self._get, state_id=str(self._stored.digest))

    def _names(self) -> Iterator[str]:
        parts = self._stored.manifest.components
        optional = [TORCH, ZARR, OPAQUE, *(name + SAFETENSORS for name in parts), COMPANIONS]
        yield META
        for name in optional:
            try:
                found = self._get(name)
            except NoSuchPath:
                continue
            if found is not None:
                yield name

    def _get(self, name: str) -> File | Folder | None:
        match name:
            case "meta.json":
                return self._meta
            case "state.pt":
                return self._torch
            case "state.zarr":
                return self._zarr
            case "file":
                return self._opaque
            case "companions":
                return self._companions
        return self._safetensors(name.removesuffix(SAFETENSORS)) if is_file_name(name) else None

    @cached_property
    def _meta(self) -> Literal:
        return Literal(describe(self._stored))

    @property
    def _companions(self) -> Folder | None:
        if not isinstance(self._stored, Checkpoint) or not self._stored.companions:
            return None
        names = list(self._stored.companions)
        return Folder(lambda: names, self._companion, has_folders_only=True)

    @property
    def _opaque(self) -> Folder | None:
        name = opaque_name(self._stored)
        if name is None or not is_name(name):
            return None
        (tensor,) = self._stored.manifest.components[OPAQUE].tensors
        return Folder.of({name: Joined([tensor], self._chunks)})

    # safetensors

    def _safetensors(self, name: str) -> Joined | None:
        part = self._stored.manifest.components.get(name)
        if part is None or "/" in name or "\0" in name:
            return None
        tensors = _tensors_by_name(name, part)
        if tensors is None:
            raise NoSuchPath(
                "a safetensors file holds tensors by name, and this component is something else",
                where=f"{self._stored.ref}/{name}{SAFETENSORS}",
                hint="`state.zarr` shows every tensor; `holdfast pull` writes other files.",
            )
        head, order = encode_header(cast("Any", tensors), {})
        return Joined([head, *cast("Sequence[TensorEntry]", order)], self._chunks)

    # torch

    @cached_property
    def _torch_parts(self) -> list[bytes | TensorEntry] | IncompatibleState:
        try:
            from holdfast.registry.adapters.filesystem.torch_archive import archive_parts
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            return IncompatibleState("torch is not installed", hint="pip install torch.")
        try:
            return archive_parts(self._stored.ref, *self._pickled())
        except IncompatibleState as error:
            return error

    @property
    def _torch(self) -> Joined:
        parts = self._torch_parts
        if isinstance(parts, IncompatibleState):
            raise NoSuchPath(
                parts.what,
                where=f"{self._stored.ref}/{TORCH}",
                expected=parts.expected,
                found=parts.found,
                hint=parts.hints
                or "`holdfast.open(URL).stored(REF).load()` gives the whole state.",
            ) from parts
        return Joined(parts, self._chunks)

    def _pickled(self) -> tuple[list[TensorEntry], Callable[[Sequence[object]], Any]]:
        """Return the tensors, and a function that returns the state with others in their places."""
        manifest, ref = self._stored.manifest, self._stored.ref
        tensors: list[TensorEntry] = []
        texts = []
        places: dict[str, list[object]] = {}
        for name, part in manifest.components.items():
            kinds = pytree.portable_kinds(part.skeleton)
            odd = {*kinds.values()} - {"tensor", "bytes", "str"}
            # An adapter could compute values from the contents of tensors.
            if odd or pytree.has_tags(part.skeleton, {"ad"}):
                raise IncompatibleState(
                    "a torch file of this state could only be loaded by running code",
                    where=f"{ref}: {name}",
                    expected="tensors and plain values",
                    found=", ".join(sorted(odd)) or "values of an adapter",
                )
            places[name] = []
            for index, entry in enumerate(part.tensors):
                if kinds[index] == "tensor":
                    places[name].append(len(tensors))
                    tensors.append(entry)
                else:
                    value, memory = pytree.allocate(entry.dtype, entry.shape, kinds[index])
                    places[name].append(value)
                    texts.append((entry, memory))
        if sum(entry.nbytes for entry, _ in texts) > _PICKLED_BYTES:
            raise IncompatibleState(
                "the strings and bytes of this state are too long for a torch file",
                where=ref,
                expected=f"at most {_PICKLED_BYTES} bytes",
            )
        if texts:
            self._stored.handle.reader.read(manifest, texts)

        def build(arrays: Sequence[object]) -> Any:
            filled = {
                name: [arrays[one] if isinstance(one, int) else one for one in some]
                for name, some in places.items()
            }
            return self._stored.handle.rebuild(filled)

        return tensors, build

    # Zarr

    @cached_property
    def _layout(self) -> ZarrLayout | IncompatibleState:
        stored = self._stored
        tensors = tensors_by_path(stored.manifest.components)
        try:
            return ZarrLayout(stored.ref, stored.digest, tensors, native=native_types())
        except IncompatibleState as error:
            return error

    @property
    def _zarr(self) -> Folder:
        layout = self._layout
        if isinstance(layout, IncompatibleState):
            raise NoSuchPath(
                layout.what,
                where=layout.where,
                expected=layout.expected,
                found=layout.found,
                hint=layout.hints,
            ) from layout
        return self._zarr_folder(layout, "")

    def _zarr_folder(self, layout: ZarrLayout, path: str) -> Folder:
        def get(name: str) -> File | Folder | None:
            key = f"{path}/{name}" if path else name
            if key in layout.documents:
                return Literal(layout.documents[key])
            found = layout.find(key)
            if found is not None:
                return ZarrChunk(*found, self._chunks)
            return self._zarr_folder(layout, key) if _is_zarr_folder(layout, key) else None

        return Folder(lambda: layout.names(path), get)


def _is_zarr_folder(layout: ZarrLayout, path: str) -> bool:
    if f"{path}/{DOCUMENT}" in layout.documents:
        return True
    steps = path.split("/")
    position: list[int] = []
    while steps and is_position(steps[-1]):
        position.insert(0, int(steps.pop()))
    if not steps or steps.pop() != "c":
        return False
    array = layout.arrays.get("/".join(steps))
    if array is None or not array.entry.grid.count or len(position) >= len(array.counts):
        return False
    return all(at < count for at, count in zip(position, array.counts, strict=False))


def _tensors_by_name(name: str, part: Component) -> dict[str, TensorEntry] | None:
    """Return the tensors of a component as a safetensors file holds them; None if it cannot."""
    skeleton: Any = part.skeleton
    match skeleton:
        case {"t": 0} | {"n": 0}:
            pairs = [[name, skeleton]]
        case {"d": pairs} | {"od": pairs} | {"sd": [pairs, *_]}:
            pass
        case _:
            return None
    found = {}
    for key, node in pairs:
        match node:
            case {"t": int(index)} | {"n": int(index)} if isinstance(key, str):
                found[key] = part.tensors[index]
            case _:
                return None
    if "__metadata__" in found or any(one.dtype not in NAMES for one in found.values()):
        return None
    return found


def describe(stored: Stored) -> bytes:
    """Return a stored state as one JSON object on one line."""
    fields = {
        "ref": stored.ref,
        "id": str(stored.digest),
        "run": stored.run_id,
        **_record(stored),
        "size_bytes": stored.manifest.nbytes,
        "components": {
            name: {
                "digest": str(part.digest),
                "tensors": len(part.tensors),
                "size_bytes": part.nbytes,
            }
            for name, part in stored.manifest.components.items()
        },
    }
    return json.dumps(json_ready(fields), allow_nan=False).encode() + b"\n"


def _record(stored: Stored) -> dict[str, Any]:
    match stored:
        case Checkpoint():
            return {
                "phase": stored.phase,
                "step": stored.step,
                "created": stored.created.isoformat(timespec="milliseconds"),
                "superseded": stored.superseded,
                "metrics": stored.metrics,
                "meta": _meta(stored),
            }
        case Release():
            return {
                "version": stored.version,
                "published": stored.published.isoformat(timespec="milliseconds"),
                "metrics": stored.metrics,
            }
        case PoolEntry():
            return {
                "version": stored.version,
                "phase": stored.phase,
                "step": stored.step,
                "promoted": stored.promoted.isoformat(timespec="milliseconds"),
                "metrics": {"mu": stored.mu, "sigma": stored.sigma},
                "games": stored.games,
                "wins": stored.wins,
            }
    return {}


def _meta(checkpoint: Checkpoint) -> Any:
    try:
        return checkpoint.meta
    except IncompatibleState:  # only another program can rebuild it
        return checkpoint.handle.newest_record().meta
