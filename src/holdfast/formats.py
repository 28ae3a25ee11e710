"""Files of other programs as states, and states as such files: `holdfast.formats.read(path)`.

`read` and `write` convert; `inspect` describes a file without its data, `validate` lists its
problems, `detect` tells its format by its content. `docs/cli.md`, "push", lists the formats.
"""

from __future__ import annotations

from holdfast.registry.formats import (
    FileReport,
    FileState,
    TensorHeader,
    WrittenFile,
    detect,
    inspect,
    read,
    validate,
    write,
)

__all__ = [
    "FileReport",
    "FileState",
    "TensorHeader",
    "WrittenFile",
    "detect",
    "inspect",
    "read",
    "validate",
    "write",
]
