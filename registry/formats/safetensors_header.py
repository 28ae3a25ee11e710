"""The header of a safetensors file: check it rule by rule, and write it always in the same way."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.formats.digesting import taken
from holdfast.registry.formats.source import (
    KEEP,
    check_room,
    read_exactly,
    stable,
    unique_keys,
    unsound,
)
from holdfast.registry.formats.state_file import RAISED, Faults
from holdfast.registry.objects import TensorEntry
from holdfast.registry.pytree import ArrayLeaf
from holdfast.registry.values import ITEM_SIZES, check_json

#: The library's own bound on the header, in bytes.
MAX_HEADER_BYTES = 100_000_000
_MAX_AXES = 64

#: The format's names of element types -> ours.
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
NAMES = {ours: theirs for theirs, ours in DTYPES.items()}
_broken = partial(unsound, "safetensors")
_Leaf = TypeVar("_Leaf", ArrayLeaf, TensorEntry)


@dataclass(frozen=True, slots=True)
class Header:
    """A header that keeps every rule."""

    metadata: dict[str, str] | None  # the file's own metadata, if there is any
    #: Name, element type and shape of each tensor, in the order of their bytes, which follow one
    #: another from the header's end to the file's.
    tensors: Sequence[tuple[str, str, tuple[int, ...]]]


def read_header(file: BinaryIO, size: int, path: Path) -> Header:
    """Check the header of a file of `size` bytes, and return it; the file is then at its data."""
    header = _checked(file, size, path, RAISED)
    assert header is not None  # mypy does not see it
    return header


def _checked(file: BinaryIO, size: int, path: Path, faults: Faults) -> Header | None:
    """Return the header, if no fault of its entries was found."""
    header, data_bytes = _parse(file, size, path)
    metadata = _metadata(header.pop("__metadata__", None), path)
    order = _check_entries(header, data_bytes, path, faults)
    if faults:
        return None
    entries = [(name, header[name]) for name in order]
    tensors = [(name, DTYPES[one["dtype"]], tuple(one["shape"])) for name, one in entries]
    return Header(metadata, tensors)


def looks_like_header(head: bytes, size: int) -> bool:
    """Return whether the first nine bytes of a file of `size` bytes begin a header."""
    length = int.from_bytes(head[:8], "little")
    return head[8:] == b"{" and 2 <= length <= min(size - 8, MAX_HEADER_BYTES)


def _metadata(found: Any, path: Path) -> dict[str, str] | None:
    if found is not None and not (
        isinstance(found, dict) and all(isinstance(text, str) for text in found.values())
    ):
        _broken(path, "its metadata is not text by name", "an object of strings", found)
    return found


def _parse(file: BinaryIO, size: int, path: Path) -> tuple[dict[str, Any], int]:
    """Return the header and the number of bytes after it."""
    if size < 8:
        _broken(path, "shorter than the length of a header", "8 bytes or more", f"{size} bytes")
    head = bytearray(8)
    read_exactly(file, memoryview(head), path)
    (length,) = struct.unpack("<Q", head)
    if length > MAX_HEADER_BYTES:
        _broken(path, "the header is too long", f"at most {MAX_HEADER_BYTES} bytes", length)
    if length > size - 8:
        _broken(path, "the header is longer than the file", f"at most {size - 8} bytes", length)
    text = bytearray(length)
    read_exactly(file, memoryview(text), path)
    check_json(text, where=path, kind=InvalidInput)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        _broken(path, "the header is not JSON of unique keys", "a JSON object", error)
    if not isinstance(header, dict):
        _broken(path, "the header is no object", "a JSON object", type(header).__name__)
    return header, size - 8 - length


def _check_entries(
    header: Mapping[str, Any], data_bytes: int, path: Path, faults: Faults
) -> list[str]:
    """Check that the tensors fill the data without gaps; return their names in that order."""
    spans = []
    for name, entry in header.items():
        with faults:
            spans.append((_span(name, entry, path), name))
    if faults:
        return []  # holes would follow from them
    spans.sort()
    end = 0
    for (start, stop), name in spans:
        if start != end:
            fault = "overlaps another tensor" if start < end else "leaves a hole before it"
            with faults:
                _broken(path, f"tensor {name!r} {fault}", f"data from offset {end}", start)
        end = max(end, stop)
    if end != data_bytes:
        with faults:
            _broken(path, "the tensors do not end with the file", f"{data_bytes} bytes", end)
    return [name for _, name in spans]


def _span(name: str, entry: Any, path: Path) -> tuple[int, int]:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, stop], **rest}:
            pass
        case _:
            _broken(path, f"bad entry of tensor {name!r}", "dtype, shape, data_offsets", entry)
    if rest:
        _broken(path, f"unknown fields of tensor {name!r}", "no more", ", ".join(map(str, rest)))
    if dtype not in DTYPES:
        raise InvalidInput(
            f"tensor {name!r} has an element type that cannot be stored",
            where=path,
            expected=", ".join(DTYPES),
            found=dtype,
            hint=KEEP,
        )
    numbers = [*shape, start, stop]
    if len(shape) > _MAX_AXES or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
        _broken(path, f"bad numbers of tensor {name!r}", "whole numbers from 0 to 2^63", numbers)
    nbytes = ITEM_SIZES[DTYPES[dtype]]
    for axis in shape:
        nbytes *= axis
    if nbytes != stop - start:
        _broken(path, f"the shape of tensor {name!r} does not fit its data", nbytes, stop - start)
    return start, stop


def named_tensors(
    name: str, skeleton: Any, tensors: Sequence[TensorEntry]
) -> tuple[dict[str, TensorEntry], list[str]]:
    """Return the tensors that a file can hold, by name, and the names of all other values."""
    match skeleton:
        case {"t": int()} | {"n": int()}:
            pairs = [[name, skeleton]]
        case {"d": pairs} | {"od": pairs} | {"sd": [pairs, *_]}:
            pass
        case _:
            return {}, [name]
    found, others = {}, []
    for key, node in pairs:
        match node:
            case {"t": int(index)} | {"n": int(index)} if (
                isinstance(key, str) and key != "__metadata__" and tensors[index].dtype in NAMES
            ):
                found[key] = tensors[index]
            case _:
                others.append(str(key))
    return found, others


def encode_header(
    leaves: Mapping[str, _Leaf], metadata: Mapping[str, str]
) -> tuple[bytes, Sequence[_Leaf]]:
    """Return the header of these tensors, and the tensors in the order of the file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    # The library's order: widest elements first, so that all are aligned.
    order = sorted(leaves.items(), key=lambda item: (-ITEM_SIZES[item[1].dtype], item[0]))
    for name, leaf in order:
        start, end = end, end + leaf.nbytes
        entry = {"dtype": NAMES[leaf.dtype], "shape": leaf.shape, "data_offsets": [start, end]}
        header[name] = entry
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, [leaf for _, leaf in order]


def header_of(path: Path) -> tuple[Header, int]:
    """Return the header of a file, and the size of the file."""
    with stable(path) as file:
        size = os.fstat(file.fileno()).st_size
        return read_header(file, size, path), size


def file_problems(path: Path) -> list[str]:
    """Return every rule of the format that a file breaks, each a line of text."""
    faults = Faults()
    with faults, stable(path) as file:
        _checked(file, os.fstat(file.fileno()).st_size, path, faults)
    return faults.lines


def read_file(path: Path) -> tuple[dict[str, object], Header, int]:
    """Read a file: return its tensors, its header and its size."""
    with stable(path) as file:
        size = os.fstat(file.fileno()).st_size
        header = read_header(file, size, path)
        check_room(size, path)
        tensors: dict[str, object] = {}
        for name, dtype, shape in header.tensors:
            try:
                tensors[name] = taken(dtype, shape, partial(read_exactly, file, path=path))
            except InvalidInput:
                raise
            except (MemoryError, ValueError) as error:
                raise IncompatibleState(
                    "a tensor does not fit into memory", where=f"{path}: {name}", found=error
                ) from error
    return tensors, header, size
