"""An index of safetensors: `model.safetensors.index.json`, which names the shard of each tensor.

The shards are in the folder of the index. Each must hold exactly the tensors that the index gives
it, so nothing is missing, left over, or there twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from holdfast.registry.errors import InvalidInput, RegistryError
from holdfast.registry.formats.safetensors_header import Header, file_problems, header_of, read_file
from holdfast.registry.formats.source import check_room, stable, unsound
from holdfast.registry.formats.state_file import problem
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
        found = json.loads(data, object_pairs_hook=_unique)
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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


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
