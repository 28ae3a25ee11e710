"""ANDREA: `step_NNNNNN.bin`, and `NAME.loss.json`, `.samples.json`, `.state.json` beside them.

The document names only the endings of the three histories. NAME is `run`, or the name that an
imported folder had. What a pivot archives is in `archive/PIVOT/`, under the same names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from holdfast.registry.formats import andrea
from holdfast.registry.layouts.contents import RunContents, imported_as
from holdfast.registry.layouts.scanning import fields_of, written
from holdfast.registry.layouts.table import Entry, Found, Reading, StateFile, TextFile
from holdfast.registry.loading import Stored
from holdfast.registry.pytree import leaf_kinds

NAME: Final = "andrea"
SIDECARS: Final = False
COMPANIONS: Final = False
STEPPED: Final = True
CHECKPOINT: Final = "step_{step:06d}.bin"
STREAM: Final = "{stem}.{name}.json"
_STREAMS: Final = ("loss", "samples", "state")
_COMPONENTS: Final = ("step", *andrea.PARTS)


def entries(run: RunContents) -> Iterator[Entry]:
    """Yield the step files, and the three histories."""
    stem = "run"
    for one in run.checkpoints:
        stem = imported_as(one, NAME).get("stem", stem)
        if one.parts is not None and not set(_COMPONENTS) <= set(one.parts):
            continue  # it was thinned: a step file needs m and v
        path = written(CHECKPOINT, {"step": one.step})
        yield StateFile(path, one, andrea.FORMAT, f"{one.handle.n}:{one.digest}", _COMPONENTS)
    for name, stream in run.streams.items():
        if name in _STREAMS:
            file = written(STREAM, {"stem": stem, "name": name})
            for label in stream.archives:
                yield from _history(f"archive/{label}/{file}", stream.read(archive=label))
            yield from _history(file, stream.read())


def _history(path: str, entries: list[dict[str, Any]]) -> Iterator[TextFile]:
    """Yield the file of a history; that of the bandit holds its newest state alone."""
    if path.endswith(".state.json"):
        if entries:
            state = {key: value for key, value in entries[-1].items() if key != "step"}
            yield TextFile(path, json.dumps(state).encode())
    else:
        yield TextFile(path, json.dumps(entries).encode())


def find(files: Mapping[str, str | None]) -> Iterable[Found]:
    """Yield the step files by number, then the histories."""
    steps, streams = [], []
    for path in sorted(path for path, target in files.items() if target is None):
        if fields := fields_of(CHECKPOINT, path):
            steps.append((fields["step"], path))
        elif (fields := fields_of(STREAM, path)) and fields["name"] in _STREAMS:
            streams.append(Found(path, "stream", "json", fields["name"]))
            stem = fields["stem"]
    noted = {"stem": stem} if streams else {}
    for step, path in sorted(steps):
        yield Found(path, "checkpoint", andrea.FORMAT, phase="main", step=step, noted=noted)
    yield from streams


def reading(found: Found, path: Path, options: Mapping[str, Any]) -> Reading:
    """Read a step file; if its name has another step than its header, the header counts.

    Its arrays have the names, and the type, of the run's own.
    """
    names, is_numpy = _form_of(options.get("like"))
    state: Any = andrea.read(path, options.get("table", names)).state
    step = state["step"]
    if is_numpy:
        state |= {name: _numpy(state[name]) for name in andrea.PARTS}
    is_named = found.step == step
    warnings = () if is_named else (f"its name says step {found.step}, its header {step}",)
    return Reading(state, step, warnings)


def _form_of(like: Stored | None) -> tuple[andrea.Table | None, bool]:
    """Return the shapes of a checkpoint's weights by name, and whether they are arrays of NumPy."""
    part = None if like is None else like.manifest.components.get("weights")
    if like is None or part is None:
        return None, False
    shapes = {path: one.shape for path, one in like.tensors().items()}
    names = {path[8:]: shape for path, shape in shapes.items() if path.startswith("weights/")}
    is_flat = not names or any("/" in name for name in names)
    return None if is_flat else names, set(leaf_kinds(part.skeleton).values()) == {"numpy"}


def _numpy(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: _numpy(one) for name, one in part.items()}
    return np.frombuffer(part.data, "<f4").reshape(part.shape)


def is_complete(path: Path) -> bool | None:
    """Return whether a file has the size that its header gives."""
    if fields_of(CHECKPOINT, path.name) is None:
        return None
    return andrea.detect(path)
