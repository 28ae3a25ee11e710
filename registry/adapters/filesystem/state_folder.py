"""The files of one stored state, each made when it is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from holdfast.registry import pytree
from holdfast.registry.adapters.filesystem.session import File, Folder, Literal, is_name
from holdfast.registry.curation import Release
from holdfast.registry.curation.pool import PoolEntry
from holdfast.registry.errors import IncompatibleState, NoSuchPath
from holdfast.registry.formats import OPAQUE, encode_header, named_tensors, opaque_name
from holdfast.registry.history import json_ready
from holdfast.registry.loading import Checkpoint, Chunks, Joined, Stored, tensors_by_path
from holdfast.registry.loading.zarr import (
    DOCUMENT,
    ArrayLayout,
    ZarrLayout,
    is_position,
    native_types,
)
from holdfast.registry.objects import RecentChunks, TensorEntry


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
        digest = self.chunks.digests(entry)[self.number]
        raw_bytes = self.array.raw_bytes(self.number)
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
        tensors, others = named_tensors(name, part.skeleton, part.tensors)
        if others:
            raise NoSuchPath(
                "a safetensors file holds tensors by name, and this component is something else",
                where=f"{self._stored.ref}/{name}{SAFETENSORS}",
                hint="`state.zarr` shows every tensor; `holdfast pull` writes other files.",
            )
        head, order = encode_header(tensors, {})
        return Joined([head, *order], self._chunks)

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
            hint = "`holdfast.open(URL).stored(REF).load()` gives the whole state."
            raise _no_file(parts, f"{self._stored.ref}/{TORCH}", hint) from parts
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
            raise _no_file(layout, layout.where) from layout
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


def _no_file(why: IncompatibleState, where: str | None, hint: str | None = None) -> NoSuchPath:
    """Return the error for a file that cannot be made of this state."""
    return NoSuchPath(
        why.what, where=where, expected=why.expected, found=why.found, hint=why.hints or hint
    )


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
