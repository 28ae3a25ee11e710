"""Step files of ANDREA, `step_NNNNNN.bin`: step, weights, and both moments of Adam.

The file is `int32 step, int32 n, float32 weights[n], float32 m[n], float32 v[n]`, little-endian. It
has no magic, names, shapes or checksum; its size must be exactly 8 + 12 n. It is read as
`{"step": ..., "weights": ..., "m": ..., "v": ...}` with flat tensors. A table of parameters, which
only the program that trains knows, makes dicts of tensors by name out of them.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Final

from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.formats.content import Content, with_torch
from holdfast.registry.formats.source import check_path, json_value, limited, read_exactly, stable
from holdfast.registry.formats.state_file import (
    FileReport,
    FileState,
    TensorHeader,
    WrittenFile,
    problem,
)
from holdfast.registry.formats.target import new_file
from holdfast.registry.pytree import FlatComponent
from holdfast.registry.pytree import allocate_bytes as allocate

FORMAT: Final = "andrea"
#: The three arrays, in the order of the file.
PARTS: Final = ("weights", "m", "v")
_HEAD: Final = struct.Struct("<ii")
_MOST: Final = 2**31 - 1
_NAME: Final = re.compile(r"step_(\d{6,})\.bin", re.ASCII)
_TABLE_BYTES: Final = 64 * 2**20
_MAX_AXES: Final = 64

#: Shapes by name, in the order of the model's parameters.
Table = Mapping[str, tuple[int, ...]]


def detect(path: Path) -> bool:
    """Return whether the size of a file is that which its header asks for."""
    with stable(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return False
    step, count = _HEAD.unpack(head)
    is_named = _NAME.fullmatch(path.name) is not None
    return bool(step >= 0 and count >= 0 and size == 8 + 12 * count and (count or is_named))


def read(path: Path, table: Table | None = None) -> FileState:
    """Read a file."""
    with stable(path) as file:
        step, count, size = _head(file, path)
        if table is not None:
            _check_table(table, count, path)
        parts = {name: _part(file, path, count, table) for name in PARTS}
    return FileState({"step": step, **parts}, FORMAT, size)


def load(
    path: str | os.PathLike[str],
    table: Table | str | os.PathLike[str] | None = None,
    *,
    portable: bool = False,
    max_bytes: int | None = None,
) -> FileState:
    """Read a step file, with the names and shapes of its parameters.

    Args:
        path: The file.
        table: Shapes by name, in the order of the model's parameters, or a JSON file of them. With
            it each of `weights`, `m` and `v` is a dict of tensors; without it, a flat tensor.
        portable: As for `holdfast.formats.read`.
        max_bytes: As for `holdfast.formats.read`.

    Raises:
        InvalidInput: The size of the file does not fit its header, or the table does not fit it.
    """
    shapes = read_table(Path(table)) if isinstance(table, str | os.PathLike) else table
    with limited(max_bytes):
        check_path(Path(path))
        found = read(Path(path), shapes)
    return found if portable else replace(found, state=with_torch(found.state))


def read_table(path: str | os.PathLike[str]) -> Table:
    """Read a table of parameters: a JSON object of shapes by name, or a list of name and shape.

    Args:
        path: The file.

    Raises:
        InvalidInput: It is neither.
    """
    path = Path(path)
    with stable(path) as file:
        data = file.read(_TABLE_BYTES + 1)
    if len(data) > _TABLE_BYTES:
        raise InvalidInput("the table is too large", where=path, expected=f"{_TABLE_BYTES} bytes")
    found = json_value(data, path)
    pairs = found.items() if isinstance(found, dict) else _pairs(found, path)
    table: dict[str, tuple[int, ...]] = {}
    for name, shape in pairs:
        is_shape = isinstance(shape, list) and len(shape) <= _MAX_AXES
        is_shape = is_shape and all(type(n) is int and 0 <= n <= _MOST for n in shape)
        if not isinstance(name, str) or not is_shape or name in table:
            raise InvalidInput(
                "not a table of parameters",
                where=f"{path}: {str(name)[:100]}",
                expected=f"each name once, with a list of at most {_MAX_AXES} lengths",
            )
        table[name] = tuple(shape)
    return table


def _pairs(found: Any, path: Path) -> list[tuple[Any, Any]]:
    if isinstance(found, list):
        if all(isinstance(row, list) and len(row) == 2 for row in found):
            return [(row[0], row[1]) for row in found]
        if all(isinstance(row, dict) and {"name", "shape"} <= row.keys() for row in found):
            return [(row["name"], row["shape"]) for row in found]
    raise InvalidInput(
        "not a table of parameters",
        where=path,
        expected='{"name": [lengths], ...}, or a list of names and shapes',
    )


def inspect(path: Path) -> FileReport:
    """Read the header of a file."""
    with stable(path) as file:
        step, count, size = _head(file, path)
    tensors = {name: TensorHeader("float32", (count,)) for name in sorted(PARTS)}
    return FileReport(FORMAT, size, tensors, {"step": step, "n_params": count})


def validate(path: Path) -> list[str]:
    """Return the problems of a file; another step in its name than in its header is one."""
    try:
        report = inspect(path)
    except InvalidInput as error:
        return [problem(error)]
    named = _NAME.fullmatch(path.name)
    step = (report.metadata or {})["step"]
    if named is not None and int(named[1]) != step:
        return [f"{path}: its name says step {int(named[1])}, its header step {step}, which counts"]
    return []


def _head(file: BinaryIO, path: Path) -> tuple[int, int, int]:
    """Return step, number of parameters, and size of a file."""
    size = os.fstat(file.fileno()).st_size
    if size < _HEAD.size:
        raise InvalidInput(
            "not a step file: it is shorter than its header", where=path, found=f"{size} bytes"
        )
    head = bytearray(_HEAD.size)
    read_exactly(file, memoryview(head), path)
    step, count = _HEAD.unpack(head)
    if step < 0 or count < 0 or size != 8 + 12 * count:
        _, swapped = struct.unpack(">ii", head)
        raise InvalidInput(
            "not a step file: its size does not fit its header",
            where=path,
            expected=f"8 + 12 x {count} = {8 + 12 * count} bytes, step {step} from 0",
            found=f"{size} bytes",
            hint="Its header would fit in big-endian order; convert it."
            if size == 8 + 12 * swapped
            else "It was cut off, or it is another file.",
        )
    return step, count, size


def _check_table(table: Table, count: int, path: Path) -> None:
    total = sum(math.prod(shape) for shape in table.values())
    if total != count:
        raise InvalidInput(
            "the table of parameters does not fit the file",
            where=path,
            expected=f"shapes with {count} elements",
            found=f"{total} elements in {len(table)} parameters",
        )


def _part(file: BinaryIO, path: Path, count: int, table: Table | None) -> Any:
    shapes = (table or {"": (count,)}).items()
    made = {name: allocate("float32", shape) for name, shape in shapes}
    for _, data in made.values():
        read_exactly(file, data, path)
    tensors = {name: tensor for name, (tensor, _) in made.items()}
    return tensors if table is not None else tensors[""]


# Writing


def write(
    path: Path,
    content: Content,
    *,
    metadata: Mapping[str, Any] | None,  # noqa: ARG001 - the format keeps none
    force: bool,
) -> WrittenFile:
    """Write a state with `step`, `weights`, `m` and `v`; equal states give equal files."""
    flat = content.outline(content.parts)
    kept: dict[str, Any] = dict(content.skeletons)
    if sorted(kept) != sorted((*PARTS, "step")):
        raise _unfit(content, "a step file holds step, weights, m and v", ", ".join(kept))
    step = kept["step"]
    if type(step) is not int or not 0 <= step <= _MOST:
        raise _unfit(content, "a step file has a step of 31 bits", repr(step)[:50])
    parts = {part.name: part for part in flat.components}
    layouts = [_layout(parts[name], content) for name in PARTS]
    if any(layout != layouts[0] for layout in layouts):
        raise _unfit(content, "weights and moments have different names or shapes", None)
    count = sum(math.prod(shape) for _, shape in layouts[0])
    if count > _MOST:
        raise _unfit(content, "a step file counts parameters by 31 bits", str(count))
    with new_file(path, 8 + 12 * count, force=force) as file:
        file.write(_HEAD.pack(step, count))
        for part in content.stream(leaf.path for name in PARTS for leaf in parts[name].leaves):
            file.write(part)
    return WrittenFile(path, FORMAT, 8 + 12 * count)


def _layout(part: FlatComponent, content: Content) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of a component's tensors, in their order."""
    skeleton: Any = part.skeleton
    pairs: Any = [["", skeleton]]
    if not part.is_bare:
        match skeleton:
            case {"d": found} | {"od": found} | {"sd": [found, *_]}:
                pairs = found
            case _:
                raise _unfit(content, "a part is neither a tensor nor a dict of tensors", part.name)
    names = []
    for at, (name, node) in enumerate(pairs):
        if node not in ({"t": at}, {"n": at}) or not isinstance(name, str):
            raise _unfit(content, "a part is neither a tensor nor a dict of tensors", part.name)
        leaf = part.leaves[at]
        if leaf.dtype != "float32":
            raise _unfit(content, "a step file holds float32 only", f"{leaf.dtype} at {leaf.path}")
        names.append((name, leaf.shape))
    return names


def _unfit(content: Content, message: str, found: object) -> IncompatibleState:
    return IncompatibleState(
        message,
        where=content.where,
        found=found,
        hint="Pull to a .pt file, or choose components with `--only`.",
    )
