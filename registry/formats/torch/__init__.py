"""Files of `torch.save`. Nothing in them is run, and reading most of them needs no torch.

- `container`: the archive and the form before torch 1.6: where the pickle and the storages are.
- `names`: the closed list of names for the interpreter of pickles.
- `storages`: tensors as views of storages, which are read once, straight into their memory.

The file is not mapped, although its archive would allow it: `holdfast.registry.formats.source` says
why. A description reads no data of tensors.
"""

from __future__ import annotations

import copy
import io
import re
import zipfile
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final

from holdfast.registry import pytree
from holdfast.registry.errors import Hint, IncompatibleState, InvalidInput, UnsupportedValue
from holdfast.registry.formats.content import Content
from holdfast.registry.formats.pickles import Keys, Known, read_pickle
from holdfast.registry.formats.source import check_room, entries_of, stable
from holdfast.registry.formats.state_file import (
    Faults,
    FileReport,
    FileState,
    TensorHeader,
    WrittenFile,
    problems,
)
from holdfast.registry.formats.target import new_file
from holdfast.registry.formats.torch import container
from holdfast.registry.formats.torch.container import broken, torch_of
from holdfast.registry.formats.torch.names import Names
from holdfast.registry.formats.torch.storages import Sharing, Storage, Tensors, refuse_sharing
from holdfast.registry.pytree import TensorBytes, traversal
from holdfast.registry.values import ITEM_SIZES, Budget

FORMAT: Final = "torch"
#: The most values in a file, if each shared list counts everywhere it is used.
MAX_VALUES: Final = 20_000_000
#: Bytes of memory for a value where a shared one is taken apart.
_VALUE_BYTES: Final = 32
#: Lightning's name of a part, which a `.ckpt` has -> ours, which every tool of Holdfast knows.
LIGHTNING_NAMES: Final = {
    "state_dict": "model",
    "optimizer_states": "optimizer",
    "lr_schedulers": "scheduler",
}
LIGHTNING_VERSION: Final = "pytorch-lightning_version"
_OTHERS = "Write a .zarr, or one component of arrays as .npz, choose components"
_GLOBAL: Final = re.compile(
    r"GLOBAL ([\w.]+)|(?:unrecognized function|but got) (?:<\w+ ')?([\w.]+)"
)


def detect(path: Path) -> bool:
    """Return whether a file is of `torch.save`, in its archive or the form before 1.6."""
    with stable(path) as file:
        if container.is_one(file.read(64)):
            return True
        try:
            entries = entries_of(file, path)
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, InvalidInput):
            return False
    return any(one.filename.partition("/")[2] == "data.pkl" for one in entries)


def read(path: Path) -> FileState:
    """Read a file."""
    with stable(path) as file:
        opened = _opened(file, path)
        check_room(opened.size_bytes, path)
        state, _ = _state(opened, with_data=True)
    return FileState(state, FORMAT, opened.size_bytes)


def inspect(path: Path) -> FileReport:
    """Read the pickle of a file, but none of its tensors' data."""
    with stable(path) as file:
        opened = _opened(file, path)
        state, _ = _state(opened, with_data=False)
    leaves = pytree.flatten(state).leaves
    tensors = {leaf.path: TensorHeader(leaf.dtype, leaf.shape) for leaf in leaves}
    return FileReport(FORMAT, opened.size_bytes, tensors)


def validate(path: Path) -> list[str]:
    """Return the problems of the value, or of each of its storages."""
    faults = Faults()
    with faults, stable(path) as file:
        opened = replace(_opened(file, path), faults=faults)
        _, tensors = _state(opened, with_data=False)
        for key in filter(opened.extents.__contains__, tensors.sizes):
            with faults:
                opened.read(key)
    return faults.lines or problems(read, path)


def _opened(file: BinaryIO, path: Path) -> container.Container:
    size = file.seek(0, 2)
    file.seek(0)

    def scan(data: memoryview) -> tuple[Mapping[str, tuple[int, int]], int]:
        tensors = Tensors(None, Sharing(size, path), with_data=False, where=path)
        _, length = _unpickled(data, tensors, _keys(path), path)
        return tensors.sizes, length

    return container.opened(file, path, scan)


def _state(opened: container.Container, *, with_data: bool) -> tuple[dict[str, Any], Tensors]:
    """Return the dict in a file, and the maker of its tensors."""
    path = opened.path
    sharing, keys = Sharing(opened.size_bytes, path), _keys(path)
    tensors = Tensors(opened, sharing, with_data=with_data, where=path)
    state, _ = _unpickled(opened.pickle, tensors, keys, path)
    if not isinstance(state, dict):
        raise InvalidInput(
            "the file does not hold a dict",
            where=path,
            expected="a dict with string keys at the top",
            found="a tensor" if isinstance(state, TensorBytes) else type(state).__name__,
            hint="Save it as {'model': ...} instead.",
        )
    _check_extent(state, sharing, keys.budget, path)
    return state, tensors


def names_of_parts(
    keys: Keys, path: Path, size_bytes: int, dtypes: Container[str]
) -> dict[str, Known]:
    """Return the names of a pickle in a file, whose storages are files of `torch.save` within."""
    sharing = Sharing(size_bytes, path)

    def load(data: Any) -> tuple[Storage, Tensors]:
        if type(data) is not bytes:
            raise TypeError("not the bytes of a storage")
        opened = _opened(io.BytesIO(data), path)
        tensors = Tensors(opened, sharing, with_data=True, where=path)
        storage, _ = _unpickled(opened.pickle, tensors, keys, path)
        if not isinstance(storage, Storage):
            raise TypeError("not a storage")
        return storage, tensors

    def rebuild(part: tuple[Storage, Tensors], *arguments: Any) -> TensorBytes:
        storage, tensors = part
        made = tensors.tensor_v2(storage, *arguments)
        if made.dtype not in dtypes:
            raise ValueError("an element type that the file cannot have")
        keys.budget.take(made.data.nbytes)  # a storage that is shared counts for each tensor
        return made

    return {
        "collections.OrderedDict": Known(call=keys.ordered_dict),
        "torch._utils._rebuild_tensor_v2": Known(call=rebuild),
        "torch.storage._load_from_bytes": Known(call=load),
    }


def _keys(path: Path) -> Keys:
    return Keys(Budget(path, "unpickling it", InvalidInput))


def _unpickled(data: memoryview, tensors: Tensors, keys: Keys, path: Path) -> tuple[Any, int]:
    names = Names(tensors, keys, path)
    return read_pickle(data, names, where=path, persistent=tensors.storage, keys=keys)


def _check_extent(state: dict[Any, Any], sharing: Sharing, budget: Budget, path: Path) -> None:
    """Refuse a small file that would become a huge state."""
    try:
        values, nbytes = _extent(state, {}, path)
    except RecursionError as error:
        broken(path, "nested too deeply, or within itself", None, error)
    if values > MAX_VALUES:
        broken(path, "it holds too many values", f"at most {MAX_VALUES}", values)
    budget.take(values * _VALUE_BYTES)
    if nbytes > sharing.most:
        refuse_sharing(path, sharing.most, nbytes)


def _extent(value: Any, known: dict[int, tuple[int, int]], path: Path) -> tuple[int, int]:
    """Return the number of values and of tensor bytes; shared ones count everywhere they are."""
    if isinstance(value, TensorBytes):
        return 1, prod(value.shape) * ITEM_SIZES[value.dtype]
    if isinstance(value, Storage):
        raise UnsupportedValue(
            "the file holds a storage without a tensor, which cannot be stored",
            where=path,
            expected="tensors and plain values",
            hint="Save a tensor of it.",
        )
    if isinstance(value, dict):
        items: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        items = value
    else:
        return 1, getattr(value, "nbytes", 0) if type(value).__name__ == "ndarray" else 0
    if id(value) not in known:
        parts = [_extent(item, known, path) for item in items]
        known[id(value)] = 1 + sum(part[0] for part in parts), sum(part[1] for part in parts)
    return known[id(value)]


def write(path: Path, content: Content, *, metadata: None, force: bool) -> WrittenFile:  # noqa: ARG001
    """Write a state; equal states give equal files."""
    torch = torch_of(path)
    state = without_versions(content.load())
    if path.suffix == ".ckpt" and LIGHTNING_VERSION in state:
        names = {ours: theirs for theirs, ours in LIGHTNING_NAMES.items()}
        state = {names.get(name, name): value for name, value in state.items()}
    with new_file(path, content.size_bytes, force=force) as file:
        try:
            # To a file object, not a path: a path's name would end up in the bytes.
            torch.save(state, file)
        except (RuntimeError, TypeError, AttributeError) as error:
            # The archive's writer wraps errors of the system.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise _unfit(content, path, state, error) from error
        file.flush()
        size = file.tell()
        _check_loads(content, path, state, file)
    return WrittenFile(path, "torch", size)


def without_versions(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with plain strings in place of versions of torch.

    `torch.load(weights_only=True)` refuses a version. It is replaced in dicts, lists and tuples.
    """
    version = torch_of("torch").torch_version.TorchVersion

    def as_text(path: str, leaf: Any) -> Any:  # noqa: ARG001
        return str(leaf) if type(leaf) is version else leaf

    made = copy.copy(state)
    for name, value in state.items():
        made[name] = traversal.rebuild(name, value, as_text)
    return made


def _check_loads(content: Content, path: Path, state: dict[str, Any], file: BinaryIO) -> None:
    torch = torch_of(path)
    file.seek(0)
    try:
        torch.load(file, map_location="meta", weights_only=True)
    except Exception as error:  # with any error the file is useless
        raise _unfit(content, path, state, error) from error


def _unfit(
    content: Content, path: Path, state: dict[str, Any], error: Exception
) -> IncompatibleState:
    found = _GLOBAL.search(str(error))
    culprit = (found[1] or found[2]) if found else str(error).split("\n")[0]
    where, kind = next(_unloadable(state), ("", culprit))
    return IncompatibleState(
        "a torch file of this state could only be loaded by running code",
        where=f"{content.where}: {where}" if where else content.where,
        expected=f"tensors and plain values for {path.name}",
        found="an array of NumPy" if kind == "numpy.ndarray" else kind,
        hint=Hint(
            f"{_OTHERS} with `only`, or load it: holdfast.open(URL).checkpoint(REF).load().",
            f"{_OTHERS} with `--only`.",
        ),
    )


def _unloadable(state: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield path and type of the values that a torch file cannot hold."""
    torch = torch_of("torch")
    for name, value in state.items():
        for path, leaf in traversal.walk(name, value):
            if isinstance(leaf, torch.Tensor | int | float | str | bytes | None):
                continue
            file = io.BytesIO()
            try:
                torch.save(leaf, file)
                file.seek(0)
                torch.load(file, weights_only=True)
            except Exception:  # whatever it is, torch cannot load it
                yield path, f"{type(leaf).__module__}.{type(leaf).__qualname__}"
