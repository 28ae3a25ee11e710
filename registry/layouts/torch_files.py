"""Shared by the layouts of `.pt` files: read a checkpoint, check that a file is complete."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.registry import formats
from holdfast.registry.errors import InvalidInput
from holdfast.registry.formats import stable
from holdfast.registry.layouts.table import Found, Reading

#: The end record of a zip archive without a comment, as torch writes it.
_END, _END_BYTES = b"PK\x05\x06", 22


def reading(found: Found, path: Path, counter: str) -> Reading:
    """Read the file of a checkpoint."""
    state: Any = formats.read(path, format="torch", portable=True).state
    held = state.get(counter)
    step = held if found.step is None and type(held) is int else found.step or 0
    warnings: tuple[str, ...] = ()
    if type(held) is int and held != step:
        warnings = (f"its name says {counter} {step}, its state {held}; the name counts",)
    return Reading(state, step, warnings)


def metrics_of(state: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers at the top of the `metrics` of a state."""
    found = state.get("metrics")
    if not isinstance(found, dict):
        return {}
    metrics = {}
    for name, value in found.items():
        if isinstance(name, str) and type(value) in (int, float):
            try:
                metrics[name] = float(value)
            except OverflowError as error:
                raise InvalidInput(
                    "a metric is too large", where=name[:100], found=error
                ) from error
    return metrics


def is_complete(path: Path) -> bool | None:
    """Return whether a file ends like an archive; `None` for other files."""
    with stable(path) as file:
        if file.read(4) != b"PK\x03\x04":
            return None
        size = file.seek(0, 2)
        file.seek(max(0, size - _END_BYTES))
        return file.read(4) == _END
