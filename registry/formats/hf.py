"""Checkpoint folders of Hugging Face: `config.json`, safetensors, tokenizer, state of the trainer.

The state is `{"model": {name: tensor}}` of `model.safetensors` or its shards; `adapter` of
`adapter_model.safetensors` (PEFT); `optimizer` of `optimizer.pt`, if that holds tensors and plain
values only; `json`, the values of the known JSON files by name; `metadata`, that of the safetensors
by file; and `files`, the bytes of all other files by path, unread: `rng_state.pth`, `scheduler.pt`,
`training_args.bin`, tokenizers, code.
An empty component is skipped. A model in shards is written back as one file.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from holdfast.registry.errors import (
    Hint,
    IncompatibleState,
    InvalidInput,
    RegistryError,
    UnsupportedValue,
)
from holdfast.registry.formats import safetensors, torch
from holdfast.registry.formats.content import Content, MemoryContent, portable
from holdfast.registry.formats.digesting import is_digesting, taken
from holdfast.registry.formats.safetensors import headers, read_index, read_shards
from holdfast.registry.formats.safetensors_header import header_of, read_file
from holdfast.registry.formats.source import (
    check_room,
    json_object,
    json_text,
    read_exactly,
    small,
    stable,
    walk,
    whole,
)
from holdfast.registry.formats.state_file import (
    FileReport,
    FileState,
    TensorHeader,
    WrittenFile,
    problem,
)
from holdfast.registry.formats.target import new_folder, put_file
from holdfast.registry.values import check_path_name

FORMAT: Final = "hf"
#: The component of each file of tensors; an index stands for its shards.
_TENSORS: Final = {"model.safetensors": "model", "adapter_model.safetensors": "adapter"}
_INDEX: Final = "model.safetensors.index.json"
_OPTIMIZER: Final = "optimizer.pt"
_CONFIGS: Final = ("config.json", "adapter_config.json")
#: JSON files that are plain values; a tokenizer can be too large for it.
_JSON: Final = (
    *_CONFIGS,
    "generation_config.json",
    "preprocessor_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "trainer_state.json",
)
_COMPONENTS: Final = ("model", "adapter", "optimizer", "json", "metadata", "files")
_MAX_FILES: Final = 10_000
#: Longer files become arrays.
_SHORT_BYTES: Final = 4096


def detect(path: Path) -> bool:
    """Return whether a folder has a configuration, and tensors in safetensors."""
    return any((path / name).is_file() for name in _CONFIGS) and any(
        (path / name).is_file() for name in (*_TENSORS, _INDEX)
    )


def read(path: Path) -> FileState:
    """Read a folder as a state."""
    files = _files(path)
    check_room(_total(files), path)
    state: dict[str, Any] = {name: {} for name in _COMPONENTS}
    total = 0
    for _, reader in _readers(files):
        part, size = reader()
        total += size
        for name, value in part.items():
            state[name] |= value
    return FileState({name: value for name, value in state.items() if value}, FORMAT, total)


def inspect(path: Path) -> FileReport:
    """Read the headers of the tensors of a folder, and its configuration."""
    files = _files(path)
    total = _total(files)
    tensors: dict[str, TensorHeader] = {}
    for name, component in _TENSORS.items():
        found = []
        if name in files:
            found = [header_of(files[name])[0]]
        elif component == "model" and _INDEX in files:
            found = list(headers(files[_INDEX])[0].values())
        tensors |= {
            f"{component}/{name}": TensorHeader(dtype, shape)
            for name, dtype, shape in sorted(one for header in found for one in header.tensors)
        }
    if _OPTIMIZER in files:
        with suppress(UnsupportedValue):
            report = torch.inspect(files[_OPTIMIZER])
            tensors |= {f"optimizer/{name}": one for name, one in report.tensors.items()}
    config = next(_json(files[name])[0] for name in _CONFIGS if name in files)
    return FileReport(FORMAT, total, tensors, config)


def validate(path: Path) -> list[str]:
    """Return every problem of a folder."""
    found: list[str] = []
    try:
        files = _files(path)
        for name, reader in _readers(files):
            try:
                reader()
            except RegistryError as error:
                found += _problems_of(name, files[name]) or [problem(error)]
    except RegistryError as error:
        found.append(problem(error))
    return found


def _problems_of(name: str, file: Path) -> list[str]:
    """Return every problem of a file that cannot be read, if its format lists them."""
    if name in _TENSORS or name == _INDEX:
        return safetensors.validate(file)
    return torch.validate(file) if name == _OPTIMIZER else []


def _files(path: Path) -> dict[str, Path]:
    """Return the files of a folder by their path in it, with `/`."""
    if not detect(path):
        raise InvalidInput(
            "not a checkpoint folder of Hugging Face",
            where=path,
            expected="config.json or adapter_config.json, with safetensors",
            hint=Hint(
                "Save the model with safe_serialization=True.", "Save the model as safetensors."
            ),
        )
    found = {}
    for name, seen in walk(path):
        check_path_name(name, path)
        if not stat.S_ISDIR(seen.st_mode):
            found[name] = path / name
        if len(found) > _MAX_FILES:
            raise InvalidInput("too many files", where=path, expected=f"{_MAX_FILES}")
    return found


def _total(files: Mapping[str, Path]) -> int:
    """Return the size of all files."""
    total = 0
    for file in files.values():
        try:
            total += file.stat().st_size
        except OSError as error:
            raise InvalidInput("a file cannot be read", where=file, found=error) from error
    return total


_Part = tuple[dict[str, dict[str, Any]], int]


def _readers(files: Mapping[str, Path]) -> Iterator[tuple[str, Callable[[], _Part]]]:
    """Yield the name and a reader of each file; the shards of a model have one reader."""
    shards: set[Path] = set()
    if _INDEX in files and "model.safetensors" not in files:
        index = files[_INDEX]
        shards = {index, *_shards(index)}
        yield _INDEX, lambda: _of_shards(index)
    for name, file in files.items():
        if file in shards:
            continue
        if name in _TENSORS:
            yield name, lambda name=name, file=file: _of_tensors(name, file)  # type: ignore[misc]
        elif name in _JSON:
            yield name, lambda name=name, file=file: _of_json(name, file)  # type: ignore[misc]
        elif name == _OPTIMIZER:
            yield name, lambda file=file: _of_optimizer(file)  # type: ignore[misc]
        else:
            yield name, lambda name=name, file=file: _of_bytes(name, file)  # type: ignore[misc]


def _shards(index: Path) -> list[Path]:
    try:
        return list(read_index(index).shards)
    except InvalidInput:
        return []  # the reader of the shards says it


def _of_shards(index: Path) -> _Part:
    tensors, metadata, size = read_shards(index)
    about = {} if metadata is None else {"model.safetensors": metadata}
    return {"model": dict(sorted(tensors.items())), "metadata": about}, size


def _of_tensors(name: str, file: Path) -> _Part:
    tensors, header, size = read_file(file)
    about = {} if header.metadata is None else {name: header.metadata}
    return {_TENSORS[name]: dict(sorted(tensors.items())), "metadata": about}, size


def _of_optimizer(file: Path) -> _Part:
    try:
        found = torch.read(file)
    except UnsupportedValue:
        return _of_bytes(_OPTIMIZER, file)  # it needs code; its bytes do not
    state: Any = found.state
    return {"optimizer": state}, found.size_bytes


def _of_json(name: str, file: Path) -> _Part:
    value, size = _json(file)
    return {"json": {name: value}}, size


def _of_bytes(name: str, file: Path) -> _Part:
    with stable(file) as opened:
        size = file.stat().st_size
        if is_digesting() and size > _SHORT_BYTES:
            fill = partial(read_exactly, opened, path=file)
            return {"files": {name: taken("uint8", (size,), fill)}}, size
    data = bytes(whole(file)[0])
    return {"files": {name: data}}, len(data)


def _json(file: Path) -> tuple[dict[str, Any], int]:
    data = small(file)
    return json_object(data, file), len(data)


# Writing


def write(
    path: Path,
    content: Content,
    *,
    metadata: Mapping[str, Any] | None,  # noqa: ARG001 - the table says that it keeps none
    force: bool,  # noqa: ARG001 - a folder is never replaced
) -> WrittenFile:
    """Write a state as a folder, which appears whole or not at all."""
    state = portable(content, without=_TENSORS.values())
    _check_state(state, content)
    about = state.get("metadata", {})
    with new_folder(path, content.size_bytes) as folder:
        for name, component in _TENSORS.items():
            if component in content.parts:
                kept = about.get(name, {"format": "pt"})
                part = content.only(component)
                safetensors.write(folder / name, part, metadata=kept, force=False)
        if "optimizer" in state:
            part = MemoryContent(state["optimizer"], None, f"{content.where}: optimizer")
            torch.write(folder / _OPTIMIZER, part, metadata=None, force=False)
        for name, value in state.get("json", {}).items():
            put_file(folder / name, json_file(name, value))
        for name, data in state.get("files", {}).items():
            put_file(folder / name, data)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return WrittenFile(path, FORMAT, size)


def json_file(name: str, value: Any) -> bytes:
    """Return the bytes of a JSON file that the state holds as a value."""
    return f"{json_text(value, f'json/{name}')}\n".encode()


def _is_dict(skeleton: Any) -> bool:
    return isinstance(skeleton, dict) and not {"d", "od", "sd"}.isdisjoint(skeleton)


def _check_state(state: Mapping[str, Any], content: Content) -> None:
    names = [name for name, _ in content.skeletons]
    weights: Any = {name: content.parts[name] for name in content.parts if name not in state}
    configs = state.get("json", {})
    if (
        set(names) - set(_COMPONENTS)
        or not weights
        or not all(_is_dict(part.skeleton) for part in weights.values())
        or not all(isinstance(part, dict) for part in state.values())
        or not set(_CONFIGS) & set(configs)
    ):
        raise IncompatibleState(
            "not the state of a checkpoint folder of Hugging Face",
            where=content.where,
            expected="model or adapter, and json with config.json or adapter_config.json",
            found=", ".join(names) or "nothing",
            hint="Choose components with `--only`, or pull to a .safetensors or .pt file.",
        )
    taken = {*_TENSORS, _INDEX, *configs} | ({_OPTIMIZER} & {f"{name}.pt" for name in state})
    for name in configs:
        if name not in _JSON:
            raise IncompatibleState("not a file of JSON that is known", where=f"json/{name}")
    for name, data in state.get("files", {}).items():
        check_path_name(name, f"{content.where}: files")
        if name in taken:
            raise IncompatibleState("not the path of another file", where=f"files/{name}")
        if type(data) is not bytes:
            raise IncompatibleState("not the bytes of a file", where=f"files/{name}")
