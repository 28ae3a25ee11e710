"""Files of safetensors: `{"model": {name: tensor}}`, and the file's own metadata if it has some.

The file may also be the index of a model in shards, `model.safetensors.index.json`, which names the
shard of each tensor. The shards are in the folder of the index. Each must hold exactly the tensors
that the index gives it, so nothing is missing, left over, or there twice.

`holdfast.registry.formats.safetensors_header` checks the header, so that a refusal names the broken
rule. Bytes go from file to store and back without becoming tensors, so neither torch nor the
library of safetensors is needed. That library's own output differs from call to call if there are
two metadata keys, and lacks some element types.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from holdfast.registry import pytree
from holdfast.registry.errors import IncompatibleState, InvalidInput, RegistryError
from holdfast.registry.formats.content import Content, NamedTensors
from holdfast.registry.formats.safetensors_header import (
    NAMES,
    Header,
    encode_header,
    file_problems,
    header_of,
    looks_like_header,
    read_file,
)
from holdfast.registry.formats.source import check_room, stable, unique_keys, unsound
from holdfast.registry.formats.state_file import (
    FileReport,
    FileState,
    TensorHeader,
    WrittenFile,
    problem,
    problems,
)
from holdfast.registry.formats.target import new_file
from holdfast.registry.values import abridged, check_json

SUFFIX: Final = ".safetensors.index.json"
#: The key of the names must be this near the begin for a file to be taken for an index.
_HEAD_BYTES: Final = 4096
#: The longest index, in bytes: that of the longest header.
_MAX_BYTES: Final = 100_000_000
_MAX_SHARDS: Final = 10_000
_broken = partial(unsound, "safetensors index")


@dataclass(frozen=True, slots=True)
class Index:
    """An index that keeps the rules."""

    shards: Mapping[Path, frozenset[str]]  # names of tensors by shard, sorted
    size_bytes: int  # size of the index itself


def looks_like_index(path: Path) -> bool:
    """Return whether a file begins like an index."""
    with stable(path) as file:
        head = file.read(_HEAD_BYTES)
    return head.lstrip()[:1] == b"{" and b'"weight_map"' in head


def read_index(path: Path) -> Index:
    """Read an index."""
    with stable(path) as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        _broken(path, "it is too long", f"at most {_MAX_BYTES} bytes", None)
    check_json(data, where=path, kind=InvalidInput)
    try:
        found = json.loads(data, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        _broken(path, "not JSON of unique keys", "a JSON object", error)
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict) or not names:
        _broken(path, "no weight_map", "names of tensors, each with its file", None)
    shards: dict[str, set[str]] = {}
    for name, shard in names.items():
        if not isinstance(shard, str) or not _is_file_name(shard):
            _broken(path, f"the shard of {name[:80]!r} is no file name", "a .safetensors", shard)
        shards.setdefault(shard, set()).add(name)
    if len(shards) > _MAX_SHARDS:
        _broken(path, "too many shards", f"at most {_MAX_SHARDS}", len(shards))
    return Index(
        {path.with_name(shard): frozenset(shards[shard]) for shard in sorted(shards)}, len(data)
    )


def _is_file_name(text: str) -> bool:
    return text.endswith(".safetensors") and not {"/", "\\", "\0"} & set(text) and text[0] != "."


def headers(path: Path) -> tuple[dict[Path, Header], int]:
    """Return the checked headers of the shards of an index, and the size of all files."""
    index = read_index(path)
    found, total = {}, index.size_bytes
    for shard, names in index.shards.items():
        found[shard], size = header_of(shard)
        _check(path, shard, found[shard], names)
        total += size
    _metadata(path, found)
    return found, total


def read_shards(path: Path) -> tuple[dict[str, object], dict[str, str] | None, int]:
    """Read all tensors of an index: return them by name, the shards' metadata, and the size."""
    shards, total = headers(path)
    check_room(total, path)
    tensors: dict[str, object] = {}
    for shard in shards:
        found, header, _ = read_file(shard)
        _check(path, shard, header, frozenset(one[0] for one in shards[shard].tensors))
        tensors |= found
    return tensors, _metadata(path, shards), total


def index_problems(path: Path) -> list[str]:
    """Return every problem of an index and its shards."""
    try:
        index = read_index(path)
    except InvalidInput as error:
        return [problem(error)]
    found = []
    for shard, names in index.shards.items():
        try:
            _check(path, shard, header_of(shard)[0], names)
        except RegistryError as error:
            found += file_problems(shard) or [problem(error)]
    return found


def _check(path: Path, shard: Path, header: Header, names: frozenset[str]) -> None:
    held = {name for name, _, _ in header.tensors}
    for some, fault in (
        (names - held, "the index names a tensor that its shard lacks"),
        (held - names, "a shard holds a tensor that the index does not give it"),
    ):
        if some:
            _broken(f"{path}: {shard.name}", fault, None, abridged(sorted(some), ", ", most=5))


def _metadata(path: Path, shards: Mapping[Path, Header]) -> dict[str, str] | None:
    """Return the metadata of the shards, which is the same in all."""
    some = [header.metadata for header in shards.values()]
    if any(one != some[0] for one in some):
        _broken(path, "the shards have different metadata", some[0], None)
    return some[0]


FORMAT: Final = "safetensors"
COMPONENT = "model"
METADATA = "metadata"


# Reading


def detect(path: Path) -> bool:
    """Return whether a file begins with a header of this format, or is an index of shards."""
    with stable(path) as file:
        is_file = looks_like_header(file.read(9), os.fstat(file.fileno()).st_size)
    return is_file or looks_like_index(path)


def read(path: Path) -> FileState:
    """Read a file, or all shards of an index as one component."""
    if _is_index(path):
        tensors, metadata, size = read_shards(path)
    else:
        tensors, header, size = read_file(path)
        metadata = header.metadata
    state: dict[str, Any] = {COMPONENT: dict(sorted(tensors.items()))}
    if metadata is not None:
        state[METADATA] = metadata
    return FileState(state, FORMAT, size, metadata)


def validate(path: Path) -> list[str]:
    """Return every rule that a file breaks, or an index and its shards."""
    return (index_problems(path) if _is_index(path) else file_problems(path)) or problems(
        read, path
    )


def inspect(path: Path) -> FileReport:
    """Read the header of a file, or of each shard of an index."""
    if _is_index(path):
        shards, size = headers(path)
        found = list(shards.values())
    else:
        header, size = header_of(path)
        found = [header]
    tensors = {
        f"{COMPONENT}/{name}": TensorHeader(dtype, shape)
        for name, dtype, shape in sorted(one for header in found for one in header.tensors)
    }
    return FileReport(FORMAT, size, tensors, found[0].metadata)


def _is_index(path: Path) -> bool:
    return path.name.endswith(SUFFIX) or looks_like_index(path)


# Writing


def write(
    path: Path, content: Content, *, metadata: Mapping[str, Any] | None, force: bool
) -> WrittenFile:
    """Write one component of a state; equal components give equal files."""
    if path.name.endswith(SUFFIX):
        raise IncompatibleState(
            "an index of shards is not written",
            where=path,
            expected="a path that ends with .safetensors, or a folder of format hf",
        )
    fitting = NamedTensors(FORMAT, path.name, NAMES, aside=METADATA)
    leaves, aside = fitting.of(content)
    if "__metadata__" in leaves:
        raise fitting.unfit("__metadata__", "safetensors has this name for its own metadata")
    kept = {} if aside is None else pytree.unflatten_component(aside.skeleton, ())
    if metadata is not None and aside is not None and kept != metadata:
        raise InvalidInput(
            "the state has other metadata", where=METADATA, expected=kept, found=metadata
        )
    head, order = encode_header(leaves, _checked(metadata or kept))
    size = len(head) + sum(leaf.nbytes for leaf in leaves.values())
    with new_file(path, size, force=force) as file:
        file.write(head)
        for part in content.stream(leaf.path for leaf in order):
            file.write(part)
    return WrittenFile(path, FORMAT, size)


def _checked(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(
        isinstance(text, str) for pair in metadata.items() for text in pair
    ):
        raise IncompatibleState(
            "the metadata of a safetensors file can only be strings by name",
            where=METADATA,
            hint="Leave it out with `--only`.",
        )
    return metadata
