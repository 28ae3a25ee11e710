"""Thalia: `stage{N}.thalia` with a `.thalia.meta` beside each.

The names follow the document's examples. Every checkpoint is a whole file, because only the program
chooses the base of a delta. `latest.thalia` is not in the document.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from holdfast.registry import formats
from holdfast.registry.errors import InvalidInput
from holdfast.registry.formats import StoredContent
from holdfast.registry.formats.thalia import delta, framing, writing
from holdfast.registry.history import check_phase
from holdfast.registry.layouts.contents import RunContents, imported_as
from holdfast.registry.layouts.scanning import fields_of, metrics_of, written
from holdfast.registry.layouts.table import Entry, Found, Link, Reading, StateFile, TextFile
from holdfast.registry.loading import Checkpoint
from holdfast.registry.values import Digest

NAME: Final = "thalia"
SIDECARS: Final = False
COMPANIONS: Final = False
STEPPED: Final = False
CHECKPOINT: Final = "stage{step:01d}.thalia"
LATEST: Final = "latest.thalia"
_ENDINGS: Final = (".thalia", ".thalia.zst", ".thalia.lz4")
_NAMES: Final = tuple(
    f"stage{{step:01d}}{delta}{ending}" for delta in ("", ".delta") for ending in _ENDINGS
)


def entries(run: RunContents) -> Iterator[Entry]:
    """Yield a file for each checkpoint, its metadata, and the newest one as a link."""
    paths = {}
    for one in run.checkpoints:
        paths[one.handle.n] = _name(one)
        told = writing.described(StoredContent(one, None))
        text = json.dumps({**told, **_metadata(one)}, indent=2)
        key = f"{one.handle.n}:{one.digest}:{Digest.of(text.encode())}"
        yield StateFile(paths[one.handle.n], one, NAME, key)
        yield TextFile(f"{paths[one.handle.n]}.meta", f"{text}\n".encode())
    latest = run.latest()
    if latest is not None:
        yield Link(LATEST, Path(paths[latest.handle.n]).name)


def _name(checkpoint: Checkpoint) -> str:
    """Return the name of a file; an imported file keeps its name, but is no delta any more."""
    noted = imported_as(checkpoint, NAME).get("file", "")
    if noted.endswith(_ENDINGS) and ".delta." not in noted and "/" not in noted:
        return noted
    return written(CHECKPOINT, {"step": checkpoint.step})


def _metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the facts of a checkpoint for an index of files, without loading the brain."""
    known = {"step": checkpoint.step, "phase": checkpoint.phase, "metrics": checkpoint.metrics}
    shapes = {path: [one.dtype, list(one.shape)] for path, one in checkpoint.tensors().items()}
    return {**known, "size_bytes": checkpoint.size_bytes, "tensors": shapes}


def find(files: Mapping[str, str | None]) -> Iterable[Found]:
    """Yield the stages by number, then other brains by name."""
    plain = [path for path, target in files.items() if target is None and "/" not in path]
    stages, others = [], []
    for path in plain:
        fields = next((found for name in _NAMES if (found := fields_of(name, path))), None)
        if fields is not None:
            stages.append((fields["step"], path))
        elif path.endswith(_ENDINGS):
            others.append(path)
    for step, path in sorted(stages):
        yield Found(path, "checkpoint", NAME, step=step)
    yield from (Found(path, "checkpoint", NAME) for path in sorted(others))


def reading(found: Found, path: Path, options: Mapping[str, Any]) -> Reading:  # noqa: ARG001
    """Read a brain, of a delta with all its bases; its metadata is the meta of the checkpoint."""
    state: Any = formats.read(path, format=NAME, portable=True).state
    metadata = state.pop("metadata")
    meta = {key: value for key, value in metadata.items() if key not in writing.NO_META}
    phase, metrics = _phase(metadata), metrics_of(metadata)
    return Reading(state, found.step, phase=phase, meta=meta, metrics=metrics)


def _phase(metadata: Mapping[str, Any]) -> str | None:
    """Return the stage of a file if a phase can have its name; it is in the meta in any case."""
    try:
        return check_phase(metadata.get(writing.STAGE))
    except InvalidInput:
        return None


def is_complete(path: Path) -> bool | None:
    """Return whether a file is whole: it ends with its digest, a delta with its metadata."""
    try:
        with framing.opened(path) as body:
            if body.is_delta:
                delta.parse(body)
            return True
    except InvalidInput:
        return None  # cut off or damaged: only time can tell
