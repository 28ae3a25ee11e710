"""Files of `torch.save`. Nothing in them is run, and reading most of them needs no torch.

- `container`: the archive and the form before torch 1.6: where the pickle and the storages are.
- `names`: the closed list of names for the interpreter of pickles.
- `storages`: tensors as views of storages, which are read once, straight into their memory.
- `reading`, `writing`: whole files.

The file is not mapped, although its archive would allow it: `holdfast.registry.formats.source` says
why. A description reads no data of tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.formats.torch.reading import detect, inspect, read, validate
from holdfast.registry.formats.torch.writing import write
from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.formats.torch.writing import LIGHTNING_NAMES as LIGHTNING_NAMES
    from holdfast.registry.formats.torch.writing import without_versions as without_versions
else:
    __getattr__ = at_first_use(__name__)


__all__ = [
    "LIGHTNING_NAMES",
    "detect",
    "inspect",
    "read",
    "validate",
    "without_versions",
    "write",
]
