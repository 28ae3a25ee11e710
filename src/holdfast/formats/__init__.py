"""Files of other programs as states, and states as such files: `holdfast.formats.read(path)`.

`read` and `write` convert; `inspect` describes a file without its data, `validate` lists its
problems, `detect` tells its format by its content. `docs/cli/move.md`, "push", lists the formats.
What only one format has is in a module of its own: `holdfast.formats.thalia` and
`holdfast.formats.andrea`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.formats import andrea as andrea
    from holdfast.formats import thalia as thalia
else:
    from holdfast.registry.values.first_use import at_first_use

    __getattr__ = at_first_use(__name__)

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
