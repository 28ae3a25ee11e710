"""The files of a stored state that was pushed as a file or as a folder of files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.registry.errors import Malformed
from holdfast.registry.values import check_path_name

#: The component that describes a folder of files; `registry/formats/tree.py` has the others.
TREE: Final = "tree"
#: The component of an opaque file: its name, and its bytes as an array.
OPAQUE: Final = "file"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file of a folder that was pushed."""

    size_bytes: int  # its size
    sha256: str  # the SHA-256 of its bytes in hex, as `sha256sum` prints it
    format: str  # how it is stored: `opaque`, or the format whose tensors it has become
    executable: bool  # whether its owner may run it


def files_in(tree: Any, where: str) -> dict[str, FileInfo]:
    """Return the files that a component `tree` describes, by name."""
    found: dict[str, FileInfo] = {}
    try:
        for name, one in tree["files"].items():
            info = FileInfo(one["size_bytes"], one["sha256"], one["format"], one["executable"])
            right = (
                type(info.size_bytes) is int
                and isinstance(info.format, str)
                and type(info.executable) is bool
                and len(bytes.fromhex(info.sha256)) == hashlib.sha256().digest_size
            )
            if not right:
                raise ValueError(name)
            found[check_path_name(name)] = info
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise Malformed("not the description of a folder", where=where, found=error) from error
    return found


def is_tree(components: Mapping[str, Any]) -> bool:
    """Return whether the components come from a folder of files."""
    return TREE in components and set(components) <= {TREE, "files", "states"}
