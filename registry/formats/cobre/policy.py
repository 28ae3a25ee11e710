"""A policy folder: read it as a state, list its problems, write it.

`metadata.json` is written last, so a folder with it is complete. Its keys, their types, and the
releases that wrote them are here, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from holdfast.registry import pytree
from holdfast.registry.errors import Hint, IncompatibleState, InvalidInput, RegistryError
from holdfast.registry.formats.cobre import stages
from holdfast.registry.formats.cobre.wire import OnDisk
from holdfast.registry.formats.content import Content, portable
from holdfast.registry.formats.source import json_object, json_text, small, stable, walk
from holdfast.registry.formats.state_file import (
    FileReport,
    FileState,
    TensorHeader,
    WrittenFile,
    problem,
)
from holdfast.registry.formats.target import new_folder, put_file

_METADATA: Final = "metadata.json"
_U32, _U64 = 2**32 - 1, 2**64 - 1
#: Key -> largest number, in the order of the file; those without a number have their own checks.
_ORDER: Final[Mapping[str, int | None]] = {
    "version": None,
    "cobre_version": None,
    "created_at": None,
    "completed_iterations": _U32,
    "final_lower_bound": None,
    "best_upper_bound": None,
    "state_dimension": _U32,
    "num_stages": _U32,
    "config_hash": None,
    "system_hash": None,
    "max_iterations": _U32,
    "forward_passes": _U32,
    "warm_start_cuts": _U32,
    "warm_start_counts": None,
    "rng_seed": _U64,
    "total_visited_states": _U64,
}
#: Keys that only some releases wrote; the others are required.
_OPTIONAL: Final = {
    "version",
    "config_hash",
    "system_hash",
    "warm_start_counts",
    "total_visited_states",
}
REQUIRED: Final = tuple(key for key in _ORDER if key not in _OPTIONAL)
_RELEASE: Final = re.compile(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?", re.ASCII)
#: The last release whose cuts have a domination count.
_LAST_WITH_DOMINATION: Final = (0, 4, 4)


def _problems(metadata: Mapping[str, Any]) -> list[str]:
    """Return every key that is missing or wrong."""
    found = [f"{key} is missing" for key in REQUIRED if key not in metadata]
    for key, most in _ORDER.items():
        if key in metadata and not _is_right(key, metadata[key], most):
            found.append(f"{key} has a wrong value")
    counts = metadata.get("warm_start_counts")
    if isinstance(counts, list) and len(counts) not in (0, metadata.get("num_stages")):
        found.append("warm_start_counts has another length than num_stages")
    return found


def _is_right(key: str, value: Any, most: int | None) -> bool:
    if most is not None:
        return type(value) is int and 0 <= value <= most
    if key == "warm_start_counts":
        return isinstance(value, list) and all(type(n) is int and 0 <= n <= _U32 for n in value)
    if key == "best_upper_bound" and value is None:
        return True
    if key.endswith("_bound"):
        return type(value) in (int, float) and math.isfinite(value)
    return isinstance(value, str)


def _has_domination(metadata: Mapping[str, Any]) -> bool:
    """Return whether field 9 of a cut is its domination count; later it may mean anything."""
    found = _RELEASE.match(metadata.get("cobre_version", ""))
    if found is None:
        return False
    return tuple(int(part or 0) for part in found.groups()) <= _LAST_WITH_DOMINATION


def _dump_metadata(metadata: Any, where: str) -> bytes:
    """Return the file, in the form of the program: keys in order, two spaces, no last newline."""
    if not isinstance(metadata, dict):
        raise IncompatibleState("the metadata of a policy is a dict", where=where)
    faults = _problems(metadata)
    if faults:
        raise IncompatibleState(
            "not the metadata of a policy", where=where, found="; ".join(faults)[:500]
        )
    ordered = {key: metadata[key] for key in _ORDER if key in metadata}
    ordered |= {key: value for key, value in metadata.items() if key not in ordered}
    return _EXPONENT.sub(_as_written, json_text(ordered, where, allow_nan=False)).encode()


#: A number at the end of a line of metadata, as Python writes it.
_EXPONENT: Final = re.compile(r"(?<=[ :] )(-?)(\d)(?:\.(\d+))?e([+-]\d+)(?=,?$)", re.MULTILINE)


def _as_written(number: re.Match[str]) -> str:
    """Return a number with an exponent as the program writes it: 1e16, and 0.00001."""
    sign, first, more, exponent = number.groups()
    if int(exponent) == -5:
        return f"{sign}0.0000{first}{more or ''}"
    return f"{sign}{first}{'.' * bool(more)}{more or ''}e{int(exponent)}"


FORMAT: Final = "cobre"
FOLDERS: Final = stages.FOLDERS
#: Folders that must be there; `states` is written only on demand.
_NEEDED: Final = ("cuts", "basis")


def detect(path: Path) -> bool:
    """Return whether a folder has two parts of a policy, out of two folders and the metadata."""
    folders = sum((path / name).is_dir() for name in _NEEDED)
    return folders + (path / _METADATA).is_file() >= 2


def read(path: Path) -> FileState:
    """Read a folder as a state."""
    state, size = _read(path)
    found = _faults(state)
    if found:
        raise InvalidInput(
            "the parts of the policy do not fit each other", where=path, found=found[0]
        )
    return FileState(state, FORMAT, size, state["metadata"])


def inspect(path: Path) -> FileReport:
    """Describe a folder from its metadata and the tables of its files, but no numbers of cuts."""
    about, total = _metadata(path)
    tensors: dict[str, TensorHeader] = {}
    domination = _has_domination(about)
    for folder, file in _complete(path):
        with stable(file) as opened:
            size = opened.seek(0, 2)
            source = OnDisk(opened.fileno(), size)
            stage_id, found = stages.describe_stage(
                folder, source, str(file), domination=domination
            )
        total += size
        named = {f"{folder}/{name_of(stage_id)}/{key}": one for key, one in found.items()}
        if named.keys() & tensors.keys():
            raise _twice(file, name_of(stage_id))
        tensors |= named
    return FileReport(FORMAT, total, dict(sorted(tensors.items())), about)


def validate(path: Path) -> list[str]:
    """Return every problem of a folder."""
    found = [problem(_stray(path, name)) for name in _strays(path)]
    try:
        about, _ = _metadata(path)
    except RegistryError as error:
        found.append(problem(error))
        about = {}
    state: dict[str, Any] = {"metadata": about}
    for folder in FOLDERS:
        state[folder] = {}
        for file in _files(path, folder, found):
            try:
                name, stage, _ = _stage(folder, file, about)
            except RegistryError as error:
                found.append(problem(error))
                continue
            if name in state[folder]:
                found.append(f"{file}: another file is of the same stage, {name}")
            state[folder][name] = stage
            found += [f"{file}: {text}" for text in stages.problems(folder, stage)]
    return found + [f"{path}: {text}" for text in _faults(state)]


def _read(path: Path) -> tuple[dict[str, Any], int]:
    about, total = _metadata(path)
    for name in _strays(path):
        raise _stray(path, name)
    state: dict[str, Any] = {"metadata": about, **{folder: {} for folder in FOLDERS}}
    for folder, file in _complete(path):
        name, stage, size = _stage(folder, file, about)
        if name in state[folder]:
            raise _twice(file, name)
        state[folder][name], total = stage, total + size
    for folder in FOLDERS:
        found = sorted(state.pop(folder).items(), key=lambda pair: pair[1]["stage_id"])
        if folder in _NEEDED or found:
            state[folder] = dict(found)
    return state, total


def _strays(path: Path) -> list[str]:
    """Return the files and folders that are no part of a policy, which reading would lose."""
    return [
        name
        for name, _ in walk(path, lambda name: name in FOLDERS)
        if name not in (_METADATA, *FOLDERS)
        and not (name.partition("/")[0] in FOLDERS and name.endswith(".bin"))
    ]


def _stray(path: Path, name: str) -> InvalidInput:
    return InvalidInput(
        "a file is no part of a policy",
        where=path / name,
        expected=f"{_METADATA}, and files .bin in {', '.join(FOLDERS)}",
        hint=Hint(
            "Move it away, or keep the folder file by file: format='tree'.",
            "Move it away, or keep the folder file by file: `--format tree`.",
        ),
    )


def _metadata(path: Path) -> tuple[dict[str, Any], int]:
    file = path / _METADATA
    if not file.exists():
        raise InvalidInput(
            "the policy is not complete: its metadata is written last",
            where=file,
            hint="Wait for the program that writes it, or take an older policy.",
        )
    data = small(file)
    found = json_object(data, file)
    if faults := _problems(found):
        raise InvalidInput(
            "not the metadata of a policy", where=file, found="; ".join(faults)[:500]
        )
    return found, len(data)


def _files(path: Path, folder: str, found: list[str]) -> list[Path]:
    where = path / folder
    if not where.is_dir():
        if folder in _NEEDED:
            found.append(f"{where}: the folder is missing")
        return []
    return sorted(file for file in where.iterdir() if file.suffix == ".bin")


def _complete(path: Path) -> list[tuple[str, Path]]:
    """Return the files of the folders, which must be there if every policy has them."""
    missing: list[str] = []
    files = [(folder, file) for folder in FOLDERS for file in _files(path, folder, missing)]
    if missing:
        raise InvalidInput("the policy is not complete", where=path, found=missing[0])
    return files


def _twice(file: Path, name: str) -> InvalidInput:
    return InvalidInput("two files are of one stage", where=file, found=name)


def _stage(folder: str, file: Path, about: Mapping[str, Any]) -> tuple[str, dict[str, Any], int]:
    data = small(file)
    domination = _has_domination(about)
    stage = stages.read_stage(folder, data, str(file), domination=domination)
    return name_of(stage["stage_id"]), stage, len(data)


def name_of(stage_id: int) -> str:
    """Return the name of a stage: three digits, or more where they are needed."""
    return f"stage_{stage_id:03d}"


def _faults(state: Mapping[str, Any]) -> list[str]:
    """Return the contradictions between the files of a policy."""
    about, cuts = state["metadata"], state.get("cuts", {})
    found = []
    if "num_stages" in about and len(cuts) != about["num_stages"]:
        found.append(
            f"num_stages is {about['num_stages']}, and there are {len(cuts)} files of cuts"
        )
    for name, stage in cuts.items():
        dimension = stage["state_dimension"]
        if dimension != about.get("state_dimension", dimension):
            found.append(f"{name} has another state_dimension than the metadata")
    return found


# Writing


def write(
    path: Path,
    content: Content,
    *,
    metadata: Mapping[str, Any] | None,
    force: bool,  # noqa: ARG001 - a folder is never replaced
) -> WrittenFile:
    """Write a state as a folder that appears whole or not at all; its metadata comes last."""
    files = _encode(content, metadata)
    with new_folder(path, content.size_bytes) as folder:
        for name in _NEEDED:
            (folder / name).mkdir()
        size = sum(put_file(folder / name, data) for name, data in files.items())
    return WrittenFile(path, FORMAT, size)


def _encode(content: Content, more: Mapping[str, Any] | None) -> dict[str, bytes]:
    """Return the bytes of each file, the metadata last."""
    state = {name: as_arrays(value) for name, value in portable(content).items()}
    unknown = sorted(set(state) - {"metadata", *FOLDERS})
    if unknown or not set(_NEEDED) <= set(state):
        raise IncompatibleState(
            "a policy folder holds metadata, cuts, basis and states",
            where=content.where,
            found=", ".join(state) or "nothing",
            hint="Choose components with `--only`, or pull to a .pt file.",
        )
    files: dict[str, bytes] = {}
    for folder in FOLDERS:
        found = state.get(folder, {})
        if not isinstance(found, dict):
            raise IncompatibleState(
                "not a dict of stages",
                where=folder,
                expected="{'stage_000': {'stage_id': 0, ...}, ...}, tables of Cobre",
                found=type(found).__name__,
                hint="docs/layouts.md says which form the state has.",
            )
        for name, stage in found.items():
            data = stages.write_stage(folder, stage, f"{folder}/{name}")
            if name != name_of(stage["stage_id"]):
                raise IncompatibleState(
                    "a stage has another name than its number gives",
                    where=f"{folder}/{name}",
                    expected=name_of(stage["stage_id"]),
                )
            files[f"{folder}/{name}.bin"] = data
    about = state.get("metadata", {})
    files[_METADATA] = _dump_metadata(
        {**about, **(more or {})} if isinstance(about, dict) else about, "metadata"
    )
    return files


def as_arrays(value: Any) -> Any:
    """Return a value whose tensors are arrays."""
    if isinstance(value, pytree.TensorBytes):
        if value.dtype == "bfloat16" or value.dtype.startswith("float8"):
            raise IncompatibleState("a policy has no such element type", found=value.dtype)
        return np.frombuffer(value.data, value.dtype).reshape(value.shape)
    if isinstance(value, dict):
        return {key: as_arrays(item) for key, item in value.items()}
    return value
