"""ANDREA: `step_NNNNNN.bin`, and `NAME.loss.json`, `.samples.json`, `.state.json` beside them.

The document names only the endings of the three histories. NAME is `run`, or the name that an
imported folder had.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from holdfast.registry.formats import andrea
from holdfast.registry.layouts.contents import RunContents, imported_as
from holdfast.registry.layouts.patterns import fields_of, written
from holdfast.registry.layouts.table import Entry, Found, Reading, StateFile, TextFile
from holdfast.registry.spec import RunSpec
from holdfast.registry.spec.presets import load_preset

NAME: Final = "andrea"
SIDECARS: Final = False
COMPANIONS: Final = False
CHECKPOINT: Final = "step_{step:06d}.bin"
STREAM: Final = "{stem}.{name}.json"
_STREAMS: Final = ("loss", "samples", "state")
_COMPONENTS: Final = ("step", *andrea.PARTS)


def spec() -> RunSpec:
    """Return the preset."""
    return load_preset(NAME)


def entries(run: RunContents) -> Iterator[Entry]:
    """Yield the step files, and the three histories."""
    stem = "run"
    for one in run.checkpoints:
        stem = imported_as(one, NAME).get("stem", stem)
        path = written(CHECKPOINT, {"step": one.step})
        yield StateFile(path, one, andrea.FORMAT, f"{one.handle.n}:{one.digest}", _COMPONENTS)
    for name, stream in run.streams.items():
        if name not in _STREAMS:
            continue
        entries = stream.read()
        if name != "state":
            text = json.dumps(entries)
        elif entries:  # the file holds the newest state alone
            text = json.dumps({key: value for key, value in entries[-1].items() if key != "step"})
        else:
            continue
        yield TextFile(written(STREAM, {"stem": stem, "name": name}), text.encode())


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
    """Read a step file; if its name has another step than its header, the header counts."""
    state: Any = andrea.read(path, options.get("table")).state
    step = state["step"]
    is_named = found.step == step
    warnings = () if is_named else (f"its name says step {found.step}, its header {step}",)
    return Reading(state, step, warnings)


def is_complete(path: Path) -> bool | None:
    """Return whether a file has the size that its header gives."""
    if fields_of(CHECKPOINT, path.name) is None:
        return None
    return andrea.detect(path)
