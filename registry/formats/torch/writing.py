"""Write files of `torch.save`: archives that plain `torch.load(weights_only=True)` reads."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from holdfast.registry.errors import Hint, IncompatibleState
from holdfast.registry.formats.content import Content
from holdfast.registry.formats.state_file import WrittenFile
from holdfast.registry.formats.target import new_file
from holdfast.registry.formats.torch.container import torch_of
from holdfast.registry.pytree import traversal

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
