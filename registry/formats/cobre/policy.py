"""A policy folder: read it as a state, list its problems, write it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from holdfast.registry import pytree
from holdfast.registry.errors import Hint, IncompatibleState, InvalidInput, RegistryError
from holdfast.registry.formats.cobre import metadata, stages
from holdfast.registry.formats.cobre.wire import OnDisk
from holdfast.registry.formats.content import Content, portable
from holdfast.registry.formats.source import stable, walk
from holdfast.registry.formats.state_file import (
    FileReport,
    FileState,
    TensorHeader,
    WrittenFile,
    problem,
)
from holdfast.registry.formats.target import new_folder, put_file
from holdfast.registry.values import max_record_bytes

FORMAT: Final = "cobre"
#: Folders that must be there; `states` is written only on demand.
_NEEDED: Final = ("cuts", "basis")


def detect(path: Path) -> bool:
    """Return whether a folder has two parts of a policy, out of two folders and the metadata."""
    folders = sum((path / name).is_dir() for name in _NEEDED)
    return folders + (path / metadata.NAME).is_file() >= 2


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
    for folder in stages.FOLDERS:
        known: set[str] = set()
        for file in _complete(path, folder):
            with stable(file) as opened:
                size = opened.seek(0, 2)
                source = OnDisk(opened.fileno(), size)
                domination = metadata.has_domination(about)
                stage_id, found = stages.describe_stage(
                    folder, source, str(file), domination=domination
                )
            name, total = name_of(stage_id), total + size
            _check_once(name, known, file)
            tensors |= {f"{folder}/{name}/{key}": one for key, one in found.items()}
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
    for folder in stages.FOLDERS:
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
    state: dict[str, Any] = {"metadata": about}
    for folder in stages.FOLDERS:
        found: dict[str, dict[str, Any]] = {}
        known: set[str] = set()
        for file in _complete(path, folder):
            name, stage, size = _stage(folder, file, about)
            _check_once(name, known, file)
            found[name], total = stage, total + size
        if folder in _NEEDED or found:
            state[folder] = dict(sorted(found.items(), key=lambda pair: pair[1]["stage_id"]))
    return state, total


def _strays(path: Path) -> list[str]:
    """Return the files and folders that are no part of a policy, which reading would lose."""
    return [
        name
        for name, _ in walk(path, lambda name: name in stages.FOLDERS)
        if name not in (metadata.NAME, *stages.FOLDERS)
        and not (name.partition("/")[0] in stages.FOLDERS and name.endswith(".bin"))
    ]


def _stray(path: Path, name: str) -> InvalidInput:
    return InvalidInput(
        "a file is no part of a policy",
        where=path / name,
        expected=f"{metadata.NAME}, and files .bin in {', '.join(stages.FOLDERS)}",
        hint=Hint(
            "Move it away, or keep the folder file by file: format='tree'.",
            "Move it away, or keep the folder file by file: `--format tree`.",
        ),
    )


def _metadata(path: Path) -> tuple[dict[str, Any], int]:
    file = path / metadata.NAME
    if not file.exists():
        raise InvalidInput(
            "the policy is not complete: its metadata is written last",
            where=file,
            hint="Wait for the program that writes it, or take an older policy.",
        )
    data = _bytes(file)
    return metadata.parse(data, str(file)), len(data)


def _files(path: Path, folder: str, found: list[str]) -> list[Path]:
    where = path / folder
    if not where.is_dir():
        if folder in _NEEDED:
            found.append(f"{where}: the folder is missing")
        return []
    return sorted(file for file in where.iterdir() if file.suffix == ".bin")


def _complete(path: Path, folder: str) -> list[Path]:
    """Return the files of a folder, which must be there if every policy has it."""
    missing: list[str] = []
    files = _files(path, folder, missing)
    if missing:
        raise InvalidInput("the policy is not complete", where=path, found=missing[0])
    return files


def _check_once(name: str, known: set[str], file: Path) -> None:
    if name in known:
        raise InvalidInput("two files are of one stage", where=file, found=name)
    known.add(name)


def _stage(folder: str, file: Path, about: Mapping[str, Any]) -> tuple[str, dict[str, Any], int]:
    data = _bytes(file)
    domination = metadata.has_domination(about)
    stage = stages.read_stage(folder, data, str(file), domination=domination)
    return name_of(stage["stage_id"]), stage, len(data)


def name_of(stage_id: int) -> str:
    """Return the name of a stage: three digits, or more where they are needed."""
    return f"stage_{stage_id:03d}"


def _bytes(file: Path) -> bytes:
    """Read a whole file."""
    with stable(file) as opened:
        size = opened.seek(0, 2)
        if size > max_record_bytes():
            raise InvalidInput(
                "the file is too large to be read at once",
                where=file,
                expected=f"at most {max_record_bytes()} bytes",
                found=f"{size} bytes",
            )
        opened.seek(0)
        return opened.read()


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
    state = {name: _numpy(value) for name, value in portable(content).items()}
    unknown = sorted(set(state) - {"metadata", *stages.FOLDERS})
    if unknown or not set(_NEEDED) <= set(state):
        raise IncompatibleState(
            "a policy folder holds metadata, cuts, basis and states",
            where=content.where,
            found=", ".join(state) or "nothing",
            hint="Choose components with `--only`, or pull to a .pt file.",
        )
    files: dict[str, bytes] = {}
    for folder in stages.FOLDERS:
        found = state.get(folder, {})
        if not isinstance(found, dict):
            raise IncompatibleState("not a dict of stages", where=folder)
        for name, stage in found.items():
            data = stages.write_stage(folder, stage, f"{folder}/{name}")
            files[f"{folder}/{name_of(stage['stage_id'])}.bin"] = data
        if len([name for name in files if name.startswith(f"{folder}/")]) != len(found):
            raise IncompatibleState("two stages have one number", where=folder)
    about = state.get("metadata", {})
    files[metadata.NAME] = metadata.dump(
        {**about, **(more or {})} if isinstance(about, dict) else about, "metadata"
    )
    return files


def _numpy(value: Any) -> Any:
    """Return a value whose tensors are arrays."""
    if isinstance(value, pytree.TensorBytes):
        if value.dtype == "bfloat16" or value.dtype.startswith("float8"):
            raise IncompatibleState("a policy has no such element type", found=value.dtype)
        return np.frombuffer(value.data, value.dtype).reshape(value.shape)
    if isinstance(value, dict):
        return {key: _numpy(item) for key, item in value.items()}
    return value
