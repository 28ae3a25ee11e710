"""The JSON of a region or pathway: plain values, in which a tensor is a reference into the file.

Lists and tuples are one, and keys that are not strings become strings: the format is made so.
Dataclasses and other objects are kept as the dicts that stand for them; nothing is imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

from holdfast.registry import pytree
from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.formats.source import json_object
from holdfast.registry.formats.thalia.framing import Body
from holdfast.registry.formats.thalia.tensors import DTYPES, TensorHead, encode, read_head
from holdfast.registry.pytree import Trail

_TENSOR: Final = "tensor"
_MAX_DEPTH: Final = 200


def read_json(body: Body, offset: int, length: int, what: str) -> dict[str, Any]:
    """Read a JSON object."""
    return json_object(body.read(offset, length, what), f"{body.where}: {what}")


def references(value: Any, path: Trail, depth: int = 0) -> Iterator[tuple[Trail, dict[str, Any]]]:
    """Yield the path and the reference of each tensor in the JSON of a region."""
    if depth > _MAX_DEPTH:
        raise InvalidInput("nested too deeply", where=str(path)[:200])
    if _is_reference(value):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, dict | list):
                yield from references(item, path / key, depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, dict | list):
                yield from references(item, path / index, depth + 1)


def _is_reference(value: Any) -> bool:
    return isinstance(value, dict) and value.get("_type") == _TENSOR and "_offset" in value


def head_of(body: Body, reference: dict[str, Any], where: Trail) -> TensorHead:
    """Return the header of a referenced tensor."""
    offset, length = reference["_offset"], reference.get("_bytes")
    if type(offset) is not int or offset < 0:
        raise InvalidInput("not the offset of a tensor", where=f"{body.where}: {where}")
    head = read_head(body, offset, where)
    if length is not None and length != head.end - offset:
        raise InvalidInput(
            "a tensor has another length than its reference says",
            where=f"{body.where}: {where}",
            expected=length,
            found=head.end - offset,
        )
    return head


def filled(value: Any, path: Trail, tensor: Callable[[dict[str, Any], Trail], Any]) -> Any:
    """Return the JSON of a region with each reference replaced by its tensor."""
    if _is_reference(value):
        return tensor(value, path)
    if isinstance(value, dict):
        return {key: filled(item, path / key, tensor) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, path / index, tensor) for index, item in enumerate(value)]
    return value


def dump(value: Any) -> bytes:
    """Return JSON as the programs of Thalia write it."""
    return json.dumps(value, indent=2).encode()


class RegionWriter:
    """Writes the tensors of regions, and returns their JSON."""

    def __init__(self, put: Callable[[Any], Any], at: int, *, sparse: bool = True) -> None:
        self._put = put
        self._sparse = sparse
        self.at = at  # position behind all that was put

    def put(self, data: Any) -> None:
        """Write bytes."""
        self._put(data)
        self.at += memoryview(data).nbytes

    def region(self, value: Any, path: Trail) -> tuple[int, int]:
        """Write a region; return position and length of its JSON."""
        data = dump(self.plain(value, path))
        start = self.at
        self.put(data)
        return start, len(data)

    def plain(self, value: Any, path: Trail) -> Any:
        """Return a value as JSON, whose tensors are written."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, dict):
            return self._dict(value, path)
        if isinstance(value, list):
            return [self.plain(item, path / index) for index, item in enumerate(value)]
        if isinstance(value, pytree.TensorBytes):
            return self._tensor(value.dtype, value.shape, value.data, path)
        if type(value).__name__ == "device":
            return {"_type": "torch.device", "_value": str(value)}
        raise IncompatibleState(
            "a .thalia file has no form for this value",
            where=path,
            found=type(value).__name__,
            hint="Pull to a .pt file, or choose components with `--only`.",
        )

    def _dict(self, value: dict[Any, Any], path: Trail) -> dict[str, Any]:
        if value.get("_type") == _TENSOR and "_offset" in value:
            raise IncompatibleState("a dict looks like a reference to a tensor", where=path)
        for key in value:
            if not isinstance(key, str):
                raise IncompatibleState(
                    "a key of a dict is no string, and a .thalia file has no others",
                    where=path,
                    found=repr(key)[:100],
                )
        return {key: self.plain(item, path / key) for key, item in value.items()}

    def _tensor(
        self, dtype: str, shape: tuple[int, ...], data: memoryview, path: Trail
    ) -> dict[str, Any]:
        if dtype not in DTYPES:
            raise IncompatibleState(
                "a .thalia file has no such element type",
                where=path,
                expected=", ".join(DTYPES),
                found=dtype,
            )
        start = self.at
        length = encode(dtype, shape, data, self.put, sparse=self._sparse)
        return {"_type": _TENSOR, "_offset": start, "_bytes": length}
