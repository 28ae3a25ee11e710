"""Any folder of files, kept byte for byte.

A file becomes tensors only if it is of a format whose bytes this project writes itself, and if
writing them gives the very bytes of the file; that is tried before anything is saved. All others
are kept as bytes. The state has up to three components: `tree` describes every file (size, SHA-256,
format, whether it is executable) and names the empty folders; `files` has bytes by name; `states`
has the states of the others by name.

Of a file's mode only whether its owner may run it is kept, as in git. Times and owners are not.
Symlinks and other things that are no files are refused.
"""

from __future__ import annotations

import hashlib
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from holdfast.backends.escape import quoted
from holdfast.registry import pytree
from holdfast.registry.errors import IncompatibleState, InvalidInput, RegistryError
from holdfast.registry.formats import andrea, safetensors
from holdfast.registry.formats.content import Content, MemoryContent, portable
from holdfast.registry.formats.source import walk, whole
from holdfast.registry.formats.state_file import (
    RAISED,
    Faults,
    FileReport,
    FileState,
    TensorHeader,
    WrittenFile,
    problems,
)
from holdfast.registry.formats.target import new_folder, put_file
from holdfast.registry.loading import TREE, FileInfo, files_in, is_tree
from holdfast.registry.values import check_bytes, check_path_name, check_path_names

FORMAT: Final = "tree"
FILES: Final = "files"
STATES: Final = "states"
#: Formats whose bytes no library decides, so that they are the same for ever.
_REBUILT: Final = {"safetensors": safetensors, "andrea": andrea}
_MOST: Final = 100_000


def detect(path: Path) -> bool:  # noqa: ARG001
    """Return whether a folder is of this format: any folder can be, so nothing shows it."""
    return False


def read(path: Path) -> FileState:
    """Read a folder."""
    files, folders = _scan(path)
    described, opaque, states, total = {}, {}, {}, 0
    check_bytes(sum(one.stat().st_size for one in files.values()), "reading it", where=path,
                kind=IncompatibleState)  # fmt: skip
    for name, file in files.items():
        data, executable = _bytes(file)
        total += data.nbytes
        format_name, state = _rebuilt(file, data)
        if state is None:
            opaque[name] = data
        else:
            states[name] = state
        described[name] = {
            "size_bytes": data.nbytes,
            "sha256": hashlib.sha256(data.data).hexdigest(),
            "format": format_name,
            "executable": executable,
        }
    state_of = {TREE: {"files": described, "folders": folders}}
    more: dict[str, Any] = {
        name: part for name, part in ((FILES, opaque), (STATES, states)) if part
    }
    return FileState({**state_of, **more}, FORMAT, total)


def inspect(path: Path) -> FileReport:
    """Return the names and sizes of the files of a folder."""
    files, _ = _scan(path)
    sizes = {name: file.stat().st_size for name, file in files.items()}
    tensors = {name: TensorHeader("uint8", (size,)) for name, size in sorted(sizes.items())}
    return FileReport(FORMAT, sum(sizes.values()), tensors)


def validate(path: Path) -> list[str]:
    """Return every reason for which a folder cannot be kept."""
    faults = Faults()
    with faults:
        _scan(path, faults)
    return faults.lines or problems(read, path)


def _scan(root: Path, faults: Faults = RAISED) -> tuple[dict[str, Path], list[str]]:
    """Return the files of a folder, and its empty folders, by name."""
    files: dict[str, Path] = {}
    empty: dict[str, None] = {}
    for name, seen in walk(root):
        empty.pop(name.rpartition("/")[0], None)
        with faults:
            _check_entry(name, seen.st_mode, root)
            if stat.S_ISDIR(seen.st_mode):
                empty[name] = None
            else:
                files[name] = root / name
    if len(files) > _MOST:
        raise InvalidInput("too many files", where=root, expected=_MOST, found=len(files))
    check_path_names([*files, *empty], root)
    return files, list(empty)


def _check_entry(name: str, mode: int, root: Path) -> None:
    check_path_name(name, root)
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InvalidInput(
            "neither a file nor a folder",
            where=root / name,
            found="a symlink" if stat.S_ISLNK(mode) else "something else",
            hint="Remove it, or replace it by the file that it points to.",
        )


def _bytes(path: Path) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], bool]:
    data, found = whole(path)
    return np.frombuffer(data, np.uint8), bool(found.st_mode & stat.S_IXUSR)


def _rebuilt(path: Path, data: np.ndarray[Any, Any]) -> tuple[str, Any]:
    """Return format and state of a file that writing gives back byte for byte; else no state."""
    for name, module in _REBUILT.items():
        try:
            if not module.detect(path) or safetensors.looks_like_index(path):
                continue  # an index is not written again as one
            found = module.read(path)
            with tempfile.TemporaryDirectory() as folder:
                copy = Path(folder) / "file"
                content = MemoryContent(found.state, None, str(path))
                module.write(copy, content, metadata=None, force=False)
                same = copy.stat().st_size == data.nbytes and copy.read_bytes() == data.tobytes()
        except RegistryError:
            continue
        if same:
            return name, found.state
    return "opaque", None


# Writing


def write(path: Path, content: Content, *, metadata: None, force: bool) -> WrittenFile:  # noqa: ARG001
    """Write the folder; every file has the bytes that were pushed, or nothing is written."""
    if not is_tree(dict(content.skeletons)):
        raise IncompatibleState("the state is no folder of files", where=content.where)
    described: Any = pytree.unflatten_component(content.parts[TREE].skeleton, ())
    files = files_in(described, content.where)
    folders = [check_path_name(one, content.where) for one in described.get("folders", ())]
    check_path_names([*files, *folders], content.where)
    if described != {**described, "files": {name: asdict(files[name]) for name in files}} or (
        set(described) - {"files", "folders"}
    ):
        raise IncompatibleState("more than the description of a folder", where=content.where)
    opaque = _opaque_paths(content, files)
    with new_folder(path, content.size_bytes) as root:
        for name in folders:
            (root / name).mkdir(parents=True)
        for name, info in files.items():
            if info.format == "opaque" and name in opaque:
                if content.tensors[opaque[name]].nbytes != info.size_bytes:
                    raise _differs(content, name)
                put_file(root / name, content.stream([opaque[name]]))
        _write_states(root, files, content)
        for name, info in files.items():
            _check(root / name, name, info, content)
    return WrittenFile(path, FORMAT, sum(info.size_bytes for info in files.values()))


def _opaque_paths(content: Content, files: Mapping[str, FileInfo]) -> dict[str, str]:
    """Return the path of the bytes of each opaque file, by its name."""
    part = content.parts.get(FILES)
    skeleton: Any = {"d": []} if part is None else part.skeleton
    paths = {} if part is None else pytree.leaf_paths(FILES, part.skeleton)
    found = {}
    for name, node in (
        skeleton["d"] if isinstance(skeleton, dict) and "d" in skeleton else [("", 0)]
    ):
        if name not in files or not isinstance(node, dict) or "n" not in node:
            raise _differs(content, str(name))
        found[name] = paths[node["n"]]
    return found


def _write_states(root: Path, files: dict[str, FileInfo], content: Content) -> None:
    if STATES not in content.parts:
        return
    for name, state in portable(content, [STATES])[STATES].items():
        if name not in files or files[name].format not in _REBUILT:
            raise _differs(content, name)
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        inner = MemoryContent(state, None, f"{content.where}: {name}")
        _REBUILT[files[name].format].write(root / name, inner, metadata=None, force=False)


def _check(path: Path, name: str, info: FileInfo, content: Content) -> None:
    if not path.is_file():
        raise _differs(content, name)
    with path.open("rb") as file:
        hashed = hashlib.file_digest(file, "sha256").hexdigest()
    if hashed != info.sha256:
        raise _differs(content, name)
    path.chmod(0o755 if info.executable else 0o644)


def _differs(content: Content, name: str) -> IncompatibleState:
    return IncompatibleState(
        "a file cannot be rebuilt as it was",
        where=f"{content.where}: {quoted(name)}",
        hint="Load the checkpoint in Python: its tensors are under `states`.",
    )
