"""Checkpoints of the HF Trainer: `checkpoint-{step}/`, one folder of Hugging Face for each.

The Trainer makes no link to the newest folder: it takes the one with the highest number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from holdfast.registry import formats
from holdfast.registry.layouts.contents import RunContents
from holdfast.registry.layouts.scanning import fields_of, written
from holdfast.registry.layouts.table import Entry, Found, Reading, StateFile

NAME: Final = "hf"
SIDECARS: Final = False
COMPANIONS: Final = False
STEPPED: Final = False
CHECKPOINT: Final = "checkpoint-{step:01d}"


def entries(run: RunContents) -> Iterator[Entry]:
    """Yield a folder for each checkpoint."""
    for one in run.checkpoints:
        path = written(CHECKPOINT, {"step": one.step})
        yield StateFile(path, one, NAME, f"{one.handle.n}:{one.digest}")


def find(files: Mapping[str, str | None]) -> Iterable[Found]:
    """Yield the folders by number."""
    folders = {path.partition("/")[0] for path in files if "/" in path}
    steps = [(fields["step"], one) for one in folders if (fields := fields_of(CHECKPOINT, one))]
    for step, name in sorted(steps):
        yield Found(name, "checkpoint", NAME, step=step)


def reading(found: Found, path: Path, options: Mapping[str, Any]) -> Reading:  # noqa: ARG001
    """Read a folder."""
    return Reading(formats.read(path, format=NAME, portable=True).state, found.step or 0)


def is_complete(path: Path) -> bool | None:
    """Return `False` while the state of the trainer, which is written last, is missing."""
    return None if (path / "trainer_state.json").is_file() else False
