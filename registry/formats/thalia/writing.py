"""Write a state as a file, byte for byte as the programs of Thalia would."""

from __future__ import annotations

import datetime as dt
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import numpy as np
import zstandard

from holdfast.registry import pytree
from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.formats.content import Content, portable
from holdfast.registry.formats.source import sha256_of
from holdfast.registry.formats.state_file import WrittenFile
from holdfast.registry.formats.target import new_file
from holdfast.registry.formats.thalia.container import ASIDE, FORMAT
from holdfast.registry.formats.thalia.framing import HEADER_BYTES, Entry, Header, lz4_frame, path_of
from holdfast.registry.formats.thalia.tensors import RegionWriter, as_bytes, dump, mapped
from holdfast.registry.loading import Checkpoint
from holdfast.registry.pytree import Adapted, Trail

#: The keys that the programs of Thalia write behind those of the caller, in their order, each with
#: what it holds if nobody gives it; statistics follow.
_DEFAULTS: Final[Mapping[str, Any]] = {
    "timestamp": "1970-01-01T00:00:00",
    "thalia_version": "0.2.0",
    "checkpoint_format_version": "0.1.0",
    "pytorch_version": "",
    "device": "cpu",
    "training_steps": 0,
    "config": {},
    "theta": {},
    "scheduler": {},
    "trial_state": {},
    "growth_history": [],
    "precision_policy": "fp32",
}
_SUMS: Final = "precision_stats"
_STATISTICS: Final = {
    "float32": "fp32",
    "float16": "fp16",
    "float64": "fp64",
    "int32": "int",
    "int64": "int",
    "bool": "other",
}
#: Keys of metadata that are no meta of a checkpoint: parts of the state, or about the file alone.
NO_META: Final = (*ASIDE, _SUMS, "delta_info", "import")
#: The key under which the trainer of Thalia keeps the stage: the phase of a checkpoint.
STAGE: Final = "current_stage"
_ZSTD_LEVEL: Final = 3
_PIECE: Final = 2**20


@dataclass(frozen=True, slots=True)
class Options:
    """How a file is written."""

    #: `zstd`, `lz4` or `none`; without it the name of the file decides.
    compression: Literal["zstd", "lz4", "none"] | None = None
    level: int | None = None  # level of the compression: 1 to 22 for zstd, 1 to 12 for lz4
    precision: str | None = None  # the policy that converted the state, by name
    #: Version of the format: 0.1, or 0.2 of the document, which adds nothing.
    version: tuple[int, int] = (0, 1)
    sparse: bool = True  # whether tensors of zeros become sparse

    def compressor(self, path: Path) -> Callable[[BinaryIO, BinaryIO], None] | None:
        """Return the function that compresses a file, or nothing."""
        by_name = {".zst": "zstd", ".lz4": "lz4"}.get(path.suffix.lower(), "none")
        kind = self.compression or by_name
        if kind not in ("zstd", "lz4", "none"):
            raise InvalidInput(
                "no such compression", expected="zstd, lz4 or none", found=repr(kind)
            )
        levels = range(1, 13 if kind == "lz4" else 23)
        if self.level is not None and (self.level not in levels or kind == "none"):
            raise InvalidInput(
                "not a level of the compression",
                expected=f"{levels[0]} to {levels[-1]}, with zstd or lz4",
                found=f"{self.level} with {kind}",
            )
        if kind == "none":
            return None
        return partial(_to_zstd if kind == "zstd" else _to_lz4, level=self.level)


def write(
    path: Path,
    state: Mapping[str, Any],
    *,
    metadata: Mapping[str, Any] | None,
    force: bool,
    options: Options,
) -> WrittenFile:
    """Write a file; equal states with equal metadata give equal files."""
    check_components(state)
    merged = merged_metadata(state, metadata, options.precision)
    if options.version != (0, 1):
        merged["checkpoint_format_version"] = "{}.{}.0".format(*options.version)
    compress = options.compressor(path)
    size = sum(
        nbytes for kind in ("regions", "pathways") for _, nbytes in _tensors(state.get(kind))
    )
    with new_file(path, size, force=force) as file:
        if compress is None:
            _write_body(file, state, merged, options)
        else:
            with tempfile.TemporaryFile() as plain:
                _write_body(plain, state, merged, options)
                plain.seek(0)
                compress(plain, file)
        file.seek(0)
        file.write(sha256_of(file))
        size = file.tell()
    return WrittenFile(path, FORMAT, size)


def merged_metadata(
    state: Mapping[str, Any], metadata: Mapping[str, Any] | None, precision: str | None
) -> dict[str, Any]:
    """Return the metadata of the state and of the caller, with what the file keeps of the state."""
    merged = {**state.get("metadata", {}), **(metadata or {})}
    merged |= {key: state[key] for key in ASIDE if key in state}
    if precision is not None:
        merged["precision_policy"] = precision
    return merged


def described(content: Content) -> dict[str, Any]:
    """Return the metadata that the file of a checkpoint has: its meta, stage, metrics and time."""
    stored = content.stored
    if not isinstance(stored, Checkpoint):
        return {}
    meta = stored.meta
    given = meta if isinstance(meta, dict) else {} if meta is None else {"custom": meta}
    found = {key: one for key, one in _jsonable(given).items() if key not in NO_META}
    if stored.phase != "main":  # the phase of runs that have none
        found[STAGE] = stored.phase
    if stored.metrics:
        found["metrics"] = stored.metrics
    return {"timestamp": stored.created.replace(tzinfo=None).isoformat(), **found}


class ClassEncoder(pytree.Encoder):
    """Takes a dataclass that has no adapter apart, under the name of its class."""

    __slots__ = ()

    def adapted(self, value: Any) -> Adapted | None:
        """Return the fields of a dataclass, or the plain value of an adapter."""
        kind, found = type(value), super().adapted(value)
        if found is not None or kind is type or not is_dataclass(value):
            return found
        given = {one.name: getattr(value, one.name) for one in fields(value)}
        return Adapted(f"{kind.__module__}.{kind.__qualname__}", given)


def _jsonable(value: Any) -> Any:
    """Return a plain value as JSON has it; a value that JSON has not is its text."""
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_jsonable(item) for item in value]
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


def plain(content: Content) -> dict[str, Any]:
    """Return a state as plain values with tensors as bytes."""

    def as_tensor(leaf: Any, _: Trail) -> Any:
        return as_bytes(leaf) if isinstance(leaf, np.ndarray) else leaf

    # Arrays become tensors: the format has one kind of them.
    return {
        name: mapped(value, Trail(name), as_tensor) for name, value in portable(content).items()
    }


def check_components(state: Mapping[str, Any]) -> None:
    """Refuse a state that is not a brain."""
    known = ("regions", "pathways", "metadata", *ASIDE)
    for name in state:
        if name not in known:
            raise IncompatibleState(
                "a .thalia file has no place for a component",
                where=name,
                expected=", ".join(known),
                hint="Choose others with `--only`, or pull to a .pt file.",
            )
    for name in ("regions", "pathways", "metadata"):
        if not isinstance(state.get(name, {}), dict):
            raise IncompatibleState("not a dict", where=name, found=type(state[name]).__name__)
    for kind in ("regions", "pathways"):
        for name, part in state.get(kind, {}).items():
            if not isinstance(part, dict | Adapted):
                raise IncompatibleState("not a dict", where=f"{kind}/{name}", found=type(part))
    if not state.get("regions") and not state.get("pathways"):
        raise IncompatibleState("a .thalia file needs at least one region", where="regions")


def _write_body(
    file: BinaryIO, state: Mapping[str, Any], metadata: Mapping[str, Any], options: Options
) -> None:
    """Write everything but the checksum; the header last, since it has sums over all regions."""
    text = dump(_ordered(metadata, state))
    file.write(bytes(HEADER_BYTES))
    file.write(text)
    writer = RegionWriter(file.write, HEADER_BYTES + len(text), sparse=options.sparse)
    entries = []
    for kind in ("regions", "pathways"):
        for name, value in state.get(kind, {}).items():
            entry = Entry(str(name), kind == "pathways", 0, 0)
            offset, length = writer.region(value, Trail(path_of(entry)))
            entries.append(Entry(entry.name, entry.is_pathway, offset, length))
    index = b"".join(entry.pack() for entry in entries)
    header = Header(
        major=options.version[0],
        minor=options.version[1],
        timestamp=_seconds(metadata.get("timestamp")),
        metadata_length=len(text),
        index_offset=writer.at,
        index_length=len(index),
        total_neurons=sum(_membrane(region) for region in state.get("regions", {}).values()),
        total_synapses=sum(_weights(region) for region in state.get("regions", {}).values()),
        training_steps=count(metadata.get("training_steps")),
        num_regions=len(entries),
    )
    file.write(index)
    file.seek(0)
    file.write(header.pack())
    file.seek(0, 2)


def _ordered(metadata: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a file: keys of the caller, then those that every file has."""
    own = {key: value for key, value in metadata.items() if key not in (*_DEFAULTS, _SUMS)}
    known = {key: metadata.get(key, value) for key, value in _DEFAULTS.items()}
    return kept({**own, **known, _SUMS: _statistics(state)})


def kept(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata as a file keeps it."""
    return dict(RegionWriter(_refuse, 0).plain(dict(metadata), Trail("metadata")))


def _refuse(data: Any) -> None:
    raise IncompatibleState(
        "the metadata of a .thalia file holds no tensors", where="metadata", found=len(data)
    )


def _statistics(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return count and bytes of the tensors by kind of number."""
    counts = {name: [0.0, 0.0] for name in ("fp32", "fp16", "fp64", "int", "other")}
    for kind in ("regions", "pathways"):
        for dtype, nbytes in _tensors(state.get(kind, {})):
            counted = counts[_STATISTICS.get(dtype, "other")]
            counted[0] += 1
            counted[1] += nbytes
    total = sum(nbytes for _, nbytes in counts.values())
    found: dict[str, Any] = {
        name: {
            "count": count,
            "bytes": nbytes,
            "mb": nbytes / 2**20,
            "percent": nbytes / total * 100 if total else 0.0,
        }
        for name, (count, nbytes) in counts.items()
    }
    found["total_mb"] = total / 2**20
    return found


def _tensors(value: Any) -> list[tuple[str, int]]:
    if isinstance(value, pytree.TensorBytes):
        return [(value.dtype, value.data.nbytes)]
    if isinstance(value, Adapted):
        return _tensors(value.plain)
    items = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple):
        return [found for item in items for found in _tensors(item)]
    return []


def _membrane(region: Any) -> int:
    state = region.get("neuron_state") if isinstance(region, dict) else None
    state = state.plain if isinstance(state, Adapted) else state
    return _elements(state.get("membrane")) if isinstance(state, dict) else 0


def _weights(region: Any) -> int:
    weights = region.get("weights") if isinstance(region, dict) else None
    return sum(map(_elements, weights.values())) if isinstance(weights, dict) else 0


def _elements(value: Any) -> int:
    if isinstance(value, pytree.TensorBytes):
        return math.prod(value.shape)
    return 0


def count(value: Any) -> int:
    """Return a number of steps as the header has it; 0 for anything else."""
    return value if type(value) is int and 0 <= value < 2**64 else 0


def _seconds(timestamp: Any) -> int:
    """Return the time of the metadata in seconds; it is UTC and names no zone."""
    try:
        moment = dt.datetime.fromisoformat(timestamp)
    except (TypeError, ValueError):
        return 0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=dt.UTC)
    return max(0, int(moment.timestamp()))


def _to_zstd(plain: BinaryIO, file: BinaryIO, *, level: int | None) -> None:
    size = plain.seek(0, 2)
    plain.seek(0)
    compressor = zstandard.ZstdCompressor(level=level or _ZSTD_LEVEL)
    compressor.copy_stream(plain, file, size=size)


def _to_lz4(plain: BinaryIO, file: BinaryIO, *, level: int | None) -> None:
    compressor = lz4_frame().LZ4FrameCompressor(compression_level=level or 0)
    file.write(compressor.begin())
    while piece := plain.read(_PIECE):
        file.write(compressor.compress(piece))
    file.write(compressor.flush())
