"""The table of formats: a new format is one module of this room and one row here.

The module is imported when a file needs it, and offers the functions of `FormatModule`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from holdfast.registry.errors import InvalidInput, UnsupportedFormat
from holdfast.registry.formats.content import Content
from holdfast.registry.formats.state_file import FileReport, FileState, WrittenFile
from holdfast.registry.values import near


class FormatModule(Protocol):
    """The functions that the module of each format offers.

    A file is hostile: no length in it is trusted before it is checked, nothing in it is run, and
    every fault of it is an `InvalidInput`.
    """

    def detect(self, path: Path) -> bool:
        """Return whether the content of an existing file or folder is of this format; be quick."""

    def read(self, path: Path) -> FileState:
        """Read a file as a state, whose tensors are `pytree.TensorBytes` if that needs no torch."""

    def inspect(self, path: Path) -> FileReport:
        """Describe a file without reading the data of its tensors."""

    def validate(self, path: Path) -> list[str]:
        """Return the problems of a file, each a line of text; none if `read` accepts it."""

    def write(
        self, path: Path, content: Content, *, metadata: Mapping[str, Any] | None, force: bool
    ) -> WrittenFile:
        """Write a state, whole or not at all; the caller has checked the target."""


@dataclass(frozen=True, slots=True)
class Format:
    """A row of the table."""

    name: str  # its name, also of its module
    #: Extensions, in lower case: a file with one of them is of this format.
    extensions: tuple[str, ...] = ()
    is_folder: bool = False  # whether it is a folder and not a file
    keeps_metadata: bool = False  # whether `write` can keep metadata
    checked: str = "every array was read"  # result of `validate` for a file without problems
    of_system: bool = False  # whether only one system or library writes it

    @property
    def module(self) -> FormatModule:
        """Its module."""
        return cast("FormatModule", import_module(f"{__package__}.{self.name}"))


#: The format of every other file, and of every other folder.
OPAQUE = Format("opaque", checked="its bytes were read")
TREE = Format("tree", is_folder=True, checked="every file was read, every name is safe")
ANDREA = Format("andrea", checked="sizes fit", of_system=True)
_STEP_FILE = re.compile(r"step_\d{6,}\.bin", re.ASCII)
#: All formats. Content is compared with them in this order.
FORMATS: tuple[Format, ...] = (
    Format("torch", (".pt", ".pth", ".ckpt")),
    Format("safetensors", (".safetensors", ".safetensors.index.json"), keeps_metadata=True),
    Format("zarr", (".zarr",), is_folder=True),
    Format("npz", (".npz",)),
    Format(
        "thalia",
        (".thalia", ".thalia.zst", ".thalia.lz4"),
        keeps_metadata=True,
        checked="checksum and sizes fit",
        of_system=True,
    ),
    Format("burn", (".mpk", ".mpk.gz"), keeps_metadata=True, of_system=True),
    Format("hf", is_folder=True, checked="every file was read"),
    Format("cobre", is_folder=True, keeps_metadata=True, of_system=True),
    ANDREA,
    TREE,
    OPAQUE,
)
_GENERIC = tuple(one for one in FORMATS if not one.of_system)
_OF_SYSTEMS = tuple(one for one in FORMATS if one.of_system)
#: All names, and all extensions: for messages.
NAMES = ", ".join(one.name for one in (*_GENERIC, *_OF_SYSTEMS))
EXTENSIONS = ", ".join(extension for one in FORMATS for extension in one.extensions)
#: The generic ones, and the first extension of each: for help texts, which end with the others.
GENERIC_NAMES = ", ".join(one.name for one in _GENERIC)
GENERIC_EXTENSIONS = ", ".join(extension for one in _GENERIC for extension in one.extensions)
MAIN_EXTENSIONS = ", ".join(one.extensions[0] for one in _GENERIC if one.extensions)
OF_SYSTEMS = ", ".join(
    f"{one.name} ({', '.join(one.extensions)})" if one.extensions else one.name
    for one in _OF_SYSTEMS
)


def named(name: str) -> Format:
    """Return the format of a name."""
    if name.lower() == "onnx":
        raise _out_of_scope(name)
    for one in FORMATS:
        if one.name == name:
            return one
    raise InvalidInput(
        "no such format", where=name, expected=NAMES, hint=near(name, NAMES.split(", "))
    )


def check_scope(path: Path) -> None:
    """Refuse a file of a format that holds no states, by its extension."""
    if path.suffix.lower() == ".onnx":
        raise _out_of_scope(path)


def _out_of_scope(where: object) -> UnsupportedFormat:
    return UnsupportedFormat(
        "ONNX is out of scope: it is a format of graphs of computations, and a checkpoint has no "
        "graph",
        where=where,
        expected=NAMES,
        hint="To make such a file, load the checkpoint into its model and call torch.onnx.export. "
        "To keep one beside a run, store its bytes: format 'opaque'. To take weights out of one, "
        "use the package onnx, and save its arrays.",
    )


def by_extension(path: Path) -> Format | None:
    """Return the format that the name of a file promises."""
    name = path.name.lower()
    if _STEP_FILE.fullmatch(name):
        return ANDREA
    return next((one for one in FORMATS if name.endswith(one.extensions or "/")), None)


def by_content(path: Path) -> Format | None:
    """Return the format that the content of a file or folder is of."""
    is_folder = path.is_dir()
    some = (one for one in FORMATS if one.is_folder == is_folder)
    return next((one for one in some if one.module.detect(path)), None)


def of_file(path: Path) -> Format:
    """Return the format that a file or folder is read as: by its content, or its name's promise.

    The name decides between formats that both know the content, and if none does.
    """
    check_scope(path)
    named, is_folder = by_extension(path), path.is_dir()
    named = named if named is not None and named.is_folder == is_folder else None
    if not path.exists() or (named is not None and named.module.detect(path)):
        return named or OPAQUE
    return by_content(path) or named or (TREE if is_folder else OPAQUE)
