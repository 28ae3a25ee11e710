"""Files of safetensors: `{"model": {name: tensor}}`, and the file's own metadata where it has some.

The header is checked here rule by rule, since a hostile one is to be named and not merely refused;
the tensors are read by the library. Files are written here: the library's own output differs from
call to call as soon as there are two metadata keys, and lacks some element types.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from registry import pytree
from registry.checkpoint import Checkpoint
from registry.dtypes import ITEM_SIZES
from registry.errors import IncompatibleState, InvalidInput
from registry.formats.source import read_exactly, stable
from registry.formats.state_file import FileState, WrittenFile
from registry.formats.target import new_file
from registry.pytree import ArrayLeaf, FlatComponent

COMPONENT = "model"
METADATA = "metadata"
#: The library's own bound on the header, in bytes.
MAX_HEADER_BYTES = 100_000_000
_MAX_AXES = 64

#: The format's names of element types -> ours.
_DTYPES = {
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
_NAMES = {ours: theirs for theirs, ours in _DTYPES.items()}


# Reading


def read(path: Path) -> FileState:
    """Read a file whole.

    Raises:
        InvalidInput: It breaks a rule of the format; the message names the rule.
        IncompatibleState: A library that reads it is not installed.
    """
    with stable(path) as file:
        size = os.fstat(file.fileno()).st_size
        header, data_bytes = _header(file, size, path)
        metadata = header.pop("__metadata__", None)
        _check_entries(header, data_bytes, path)
        tensors = _tensors(path)
    state: dict[str, Any] = {COMPONENT: tensors}
    if metadata is not None:
        state[METADATA] = metadata
    return FileState(state, "safetensors", size)


def _header(file: BinaryIO, size: int, path: Path) -> tuple[dict[str, Any], int]:
    """Return the header and the number of bytes behind it."""
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
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        _broken(path, "the header is not JSON of unique keys", "a JSON object", error)
    if not isinstance(header, dict):
        _broken(path, "the header is no object", "a JSON object", type(header).__name__)
    return header, size - 8 - length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(k for k in keys if keys.count(k) > 1)!r} stands twice")
    return found


def _check_entries(header: Mapping[str, Any], data_bytes: int, path: Path) -> None:
    """Check that the tensors lie one after another, from the header's end to the file's."""
    spans = sorted((_span(name, entry, path), name) for name, entry in header.items())
    end = 0
    for (start, stop), name in spans:
        if start != end:
            what = "overlaps another tensor" if start < end else "leaves a hole before it"
            _broken(path, f"tensor {name!r} {what}", f"data from offset {end}", start)
        end = stop
    if end != data_bytes:
        _broken(path, "the tensors do not end with the file", f"{data_bytes} bytes", end)


def _span(name: str, entry: Any, path: Path) -> tuple[int, int]:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, stop], **rest}:
            pass
        case _:
            _broken(path, f"bad entry of tensor {name!r}", "dtype, shape, data_offsets", entry)
    if rest:
        _broken(path, f"unknown fields of tensor {name!r}", "no more", ", ".join(map(str, rest)))
    if dtype not in _DTYPES:
        raise InvalidInput(
            f"tensor {name!r} has an element type that cannot be stored",
            where=path,
            expected=", ".join(_DTYPES),
            found=dtype,
            hint=_HINT,
        )
    numbers = [*shape, start, stop]
    if len(shape) > _MAX_AXES or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
        _broken(path, f"bad numbers of tensor {name!r}", "whole numbers from 0 to 2^63", numbers)
    nbytes = ITEM_SIZES[_DTYPES[dtype]]
    for axis in shape:
        nbytes *= axis
    if nbytes != stop - start:
        _broken(path, f"the shape of tensor {name!r} does not fit its data", nbytes, stop - start)
    return start, stop


def _tensors(path: Path) -> dict[str, Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise _not_installed(path, error) from error
    try:
        with safe_open(path, framework="pt") as file:
            # The library's tensors are views of a mapping of the file.
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except ImportError as error:
        raise _not_installed(path, error) from error
    except (SafetensorError, KeyError, ValueError, RuntimeError, AttributeError) as error:
        _broken(path, "the safetensors library refuses it", None, error)


_HINT = "To keep its bytes as they are, push it under a name that ends otherwise, such as .bin."


def _not_installed(path: Path, error: ImportError) -> IncompatibleState:
    return IncompatibleState(
        "a library that reads safetensors is not installed",
        where=path,
        found=error,
        hint="Install the extras: pip install 'holdfast[safetensors,torch]'.",
    )


def _broken(path: Path, what: str, expected: object, found: object) -> NoReturn:
    text = str(found)
    raise InvalidInput(
        f"not a sound safetensors file: {what}",
        where=path,
        expected=expected,
        found=text if len(text) <= 200 else f"{text[:200]}...",
        hint=_HINT,
    )


# Writing


def write(
    path: Path, checkpoint: Checkpoint, *, only: Iterable[str] | None, force: bool
) -> WrittenFile:
    """Write one component of a checkpoint; equal components give equal files.

    Raises:
        IncompatibleState: More than tensors by name was asked for; the message names the path.
    """
    wanted = _choose(checkpoint, only)
    state = pytree.flatten(checkpoint.load(only=wanted))
    leaves: dict[str, ArrayLeaf] = {}
    metadata: dict[str, str] = {}
    for part in state.components:
        if part.name == METADATA and len(wanted) > 1 and not part.leaves:
            metadata = _metadata(part)
        else:
            leaves |= _flat(part, path)
    head = _encode_header(leaves, metadata)
    size = len(head) + sum(leaf.nbytes for leaf in leaves.values())
    with new_file(path, size, force=force) as file:
        file.write(head)
        for _, leaf in _in_order(leaves):
            file.write(leaf.buffer())
    return WrittenFile(path, "safetensors", size)


def _choose(checkpoint: Checkpoint, only: Iterable[str] | None) -> list[str]:
    """Return the components to load, told from the manifest alone."""
    parts = checkpoint.manifest.components
    wanted = list(parts if only is None else only)
    bare = [name for name in wanted if name in parts and _is_bare(parts[name].skeleton)]
    if len(bare) == len(wanted) or len([name for name in wanted if name != METADATA]) == 1:
        return wanted
    raise IncompatibleState(
        "a safetensors file holds the tensors of one component",
        where=checkpoint.ref,
        found=", ".join(wanted) or "none",
        hint="Choose one, such as `--only model`, or pull to a .pt file.",
    )


def _is_bare(skeleton: object) -> bool:
    return isinstance(skeleton, dict) and set(skeleton) <= {"t", "n"}


def _flat(part: FlatComponent, path: Path) -> dict[str, ArrayLeaf]:
    if part.is_bare:
        return {part.name: part.leaves[0]}
    skeleton: Any = part.skeleton
    match skeleton:
        case {"d": pairs} | {"od": pairs} | {"sd": [pairs, *_]}:
            return {name: _leaf(part, name, node, path) for name, node in pairs}
    raise _unfit(path, part.name, "the component is not a dict of tensors")


def _leaf(part: FlatComponent, name: Any, node: Any, path: Path) -> ArrayLeaf:
    place = f"{part.name}/{name}"
    match node:
        case {"t": int(index)} | {"n": int(index)} if isinstance(name, str):
            leaf = part.leaves[index]
            if leaf.dtype in _NAMES and name != "__metadata__":
                return leaf
            raise _unfit(path, place, f"{leaf.dtype} has no place in safetensors")
        case {"d": _} | {"od": _} | {"sd": _}:
            raise _unfit(path, place, "dicts inside the component cannot be kept")
    raise _unfit(path, place, "only tensors by name can be kept, and this is none")


def _unfit(path: Path, place: str, what: str) -> IncompatibleState:
    return IncompatibleState(
        what,
        where=place,
        expected=f"what fits into {path.name}",
        hint="Pull to a .pt file, or load it in Python: registry.open(URL).checkpoint(REF).load().",
    )


def _metadata(part: FlatComponent) -> dict[str, str]:
    value = pytree.unflatten_component(part.skeleton, ())
    if not isinstance(value, dict) or not all(
        isinstance(text, str) for pair in value.items() for text in pair
    ):
        raise IncompatibleState(
            "the metadata of a safetensors file is text by name",
            where=METADATA,
            hint="Leave it out with `--only`.",
        )
    return value


def _encode_header(leaves: Mapping[str, ArrayLeaf], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, leaf in _in_order(leaves):
        start, end = end, end + leaf.nbytes
        entry = {"dtype": _NAMES[leaf.dtype], "shape": leaf.shape, "data_offsets": [start, end]}
        header[name] = entry
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _in_order(leaves: Mapping[str, ArrayLeaf]) -> Iterator[tuple[str, ArrayLeaf]]:
    """Yield tensors as the library orders them: widest elements first, so that all are aligned."""
    yield from sorted(leaves.items(), key=lambda item: (-ITEM_SIZES[item[1].dtype], item[0]))
