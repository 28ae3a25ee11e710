"""Read files of other programs as states, and write states as such files.

`table` lists the formats; each is one module with the same five functions, imported when a file
needs it: it may wrap a heavy library. The content of a file or folder decides how it is read, and
its name where several formats know the content or none does. What is left is opaque: its bytes,
unread; a folder is then a `tree` of files. The name decides how a file is written. The list is
closed: no plugin is looked up.

`state_file` has the values that formats return, `content` the states that they write; `source`
reads a file that may change meanwhile, and bounds what it may become; `target` writes one whole or
not at all. A file is hostile: no length in it is trusted, and nothing in it is run.

`holdfast.formats` is the public name of this room. docs/cli/move.md, "push" and "pull", describes
the formats for users; CONTRIBUTING.md tells how to add one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.formats import content, table
from holdfast.registry.formats.content import Content, MemoryContent, StoredContent, with_torch
from holdfast.registry.formats.digesting import BY_TURNS, components, without_bytes
from holdfast.registry.formats.source import check_path, limited, within
from holdfast.registry.formats.state_file import (
    FileReport,
    FileState,
    TensorHeader,
    WrittenFile,
    problem,
)
from holdfast.registry.formats.table import Format
from holdfast.registry.formats.target import check_target
from holdfast.registry.loading import Stored, is_tree
from holdfast.registry.objects import Component
from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.formats.andrea import read_table
    from holdfast.registry.formats.content import portable
    from holdfast.registry.formats.hf import json_file
    from holdfast.registry.formats.safetensors_header import NAMES as SAFETENSORS_NAMES
    from holdfast.registry.formats.safetensors_header import encode_header, named_tensors
    from holdfast.registry.formats.source import json_value, sha256_of, stable, walk
    from holdfast.registry.formats.table import (
        GENERIC_EXTENSIONS,
        GENERIC_NAMES,
        MAIN_EXTENSIONS,
        OF_SYSTEMS,
        TREE,
        by_extension,
        check_scope,
        named,
    )
    from holdfast.registry.formats.table import OPAQUE as OPAQUE_FORMAT
    from holdfast.registry.formats.target import fail, new_file, put_file
    from holdfast.registry.loading import OPAQUE
else:
    __getattr__ = at_first_use(__name__)

PathLike = str | os.PathLike[str]


def detect(path: PathLike) -> str | None:
    """Return the format of a file or folder by its content; `None` if no format knows it.

    Raises:
        InvalidInput: There is no such file.
        AccessDenied: The user may not read it.
    """
    with within(Path(path)):
        found = table.by_content(Path(path))
    return None if found is None else found.name


def read(
    path: PathLike,
    *,
    format: str | None = None,  # noqa: A002
    portable: bool = False,
    max_bytes: int | None = None,
) -> FileState:
    """Read a file or a folder as a state for `Run.save`. Nothing in it is ever run.

    Args:
        path: The file.
        format: Its format, such as `torch` or `opaque`. By default its content decides; what no
            format knows is of the format that its name promises, or else `opaque`, and a folder is
            a `tree`. `tree` keeps every byte of any folder.
        portable: Whether tensors are returned as bytes, for which torch is not needed. Such a state
            can be saved and written; only a program that computes needs torch's tensors.
        max_bytes: The most bytes that the file or folder may have, or become if it is compressed.
            By default `HOLDFAST_MAX_FILE_BYTES` says it; without that, memory is the limit.

    Returns:
        The state, the file's own metadata, and the format.

    Raises:
        InvalidInput: There is no such file or format, it breaks its format, it is above the size
            limit, or it changed meanwhile.
        UnsupportedFormat: It is of a format that is out of scope, such as ONNX.
        UnsupportedValue: A value in it could only be loaded by running code.
        IncompatibleState: It does not fit into memory, or a library that reads it is not installed.
    """
    path = Path(path)
    with limited(max_bytes), within(path):
        check_path(path)
        found = _format_of(path, format).module.read(path)
    if portable:
        return found
    return FileState(with_torch(found.state), found.format, found.size_bytes, found.metadata)


def digest(path: Path, name: str | None, max_bytes: int | None) -> tuple[str, dict[str, Component]]:
    """Return the format of a file, and the components that a push of it would store."""
    with limited(max_bytes), within(path):
        check_path(path)
        found = _format_of(path, name)
        with without_bytes() if found.name in BY_TURNS else nullcontext():
            return found.name, components(found.module.read(path).state)


def write(
    path: PathLike,
    state: object,
    metadata: Mapping[str, Any] | None = None,
    format: str | None = None,  # noqa: A002
    *,
    only: Iterable[str] | None = None,
    force: bool = False,
) -> WrittenFile:
    """Write a state to a file, whole or not at all; stored bytes are verified.

    Args:
        path: The file.
        state: A checkpoint or another stored state, or a state in memory, as for `Run.save`.
        metadata: Metadata of the file itself, for a format that has it: strings by name for
            `safetensors`.
        format: The format. By default the extension of `path` decides, unless the state is an
            opaque file, whose bytes are written under any name.
        only: Names of the wanted components; all without it.
        force: Whether to replace an existing file.

    Raises:
        IncompatibleState: The state does not fit the format, or the format keeps no metadata; the
            message names the path in the state.
        UnsupportedFormat: The format is out of scope, such as ONNX.
        UnsupportedValue: A value of a state in memory cannot be stored.
        InvalidInput: `path` exists already, or there is no such format.
        NotFound: There is no such component.
        IntegrityError: An object in the registry is damaged; nothing was written.
        StoreFull: The disk is full; nothing was written.
    """
    path = Path(path)
    check_target(path, force=force)
    names = None if only is None else list(only)
    source: Content
    if isinstance(state, Stored):
        source = StoredContent(state, names)
    else:
        source = MemoryContent(state, names, f"the state for {path.name}")
    chosen = _target_format(path, source, format)
    if metadata is not None and not chosen.keeps_metadata:
        raise IncompatibleState(
            f"a file of format {chosen.name} keeps no metadata",
            where=path,
            hint="Put it into the state, or leave it out.",
        )
    return chosen.module.write(path, source, metadata=metadata, force=force)


def inspect(
    path: PathLike,
    *,
    format: str | None = None,  # noqa: A002
    max_bytes: int | None = None,
) -> FileReport:
    """Describe a file without reading the data of its tensors, and without checking them.

    Args:
        path: The file or folder.
        format: Its format, as for `read`.
        max_bytes: As for `read`.

    Raises:
        InvalidInput: There is no such file or format, it breaks its format, or it is above the size
            limit.
        UnsupportedFormat: It is of a format that is out of scope, such as ONNX.
        UnsupportedValue: It could only be loaded by running code.
    """
    path = Path(path)
    with limited(max_bytes), within(path):
        check_path(path)
        return _format_of(path, format).module.inspect(path)


def validate(
    path: PathLike,
    *,
    format: str | None = None,  # noqa: A002
    max_bytes: int | None = None,
) -> list[str]:
    """Return the problems of a file, each a line of text; none if `read` accepts it.

    Args:
        path: The file or folder.
        format: Its format, as for `read`.
        max_bytes: As for `read`; a file above it has one problem.

    Raises:
        InvalidInput: There is no such file or format.
        UnsupportedFormat: It is of a format that is out of scope, such as ONNX.
        StorageError: It cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise InvalidInput("no such file", where=path)
    with limited(max_bytes), within(path):
        found, named = _format_of(path, format), table.by_extension(path)
        try:
            check_path(path)
        except InvalidInput as error:
            return [problem(error)]
        faults = found.module.validate(path)
        if format is None and named not in (None, found):
            faults.append(f"{path}: its name belongs to another format than {found.name}")
        return faults


def opaque_name(stored: Stored) -> str | None:
    """Return the file name of a stored state that is an opaque file; `None` of any other state."""
    return content.opaque_name(stored.manifest.components)


def _format_of(path: Path, name: str | None) -> Format:
    return table.of_file(path) if name is None else table.named(name)


def _target_format(path: Path, state: Content, name: str | None) -> Format:
    if name is not None:
        return table.named(name)
    if content.opaque_name(state.parts) is not None:
        return table.OPAQUE
    if is_tree(state.parts):
        return table.TREE
    found = table.by_extension(path)
    table.check_scope(path)
    if found is None:
        raise IncompatibleState(
            f"a state cannot be written as {path.suffix or 'a file without extension'}",
            where=state.where,
            expected=table.EXTENSIONS,
            hint="Choose the format by the extension of the path, or name it: hf, cobre and andrea "
            "have no extension.",
        )
    return found
